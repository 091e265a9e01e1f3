"""Speed and memory, measured and computed."""
