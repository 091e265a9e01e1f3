"""What policies share: the class `Policy`, the prompt that it sees, the clock of a decoding step, and its checks."""
