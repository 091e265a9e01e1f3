"""What is measured: pure measures on tensors, and probes that look while a cache is at work."""
