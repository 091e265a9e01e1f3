"""Capture: one forward pass records what attention saw, and a file keeps it."""
