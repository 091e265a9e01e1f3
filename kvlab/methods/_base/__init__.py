"""Shared parts of all policies: the class `Policy`, its prompt, the clock of a decoding step, and the checks."""
