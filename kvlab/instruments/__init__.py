"""Instruments: pure measures on tensors, and probes that measure during decoding."""
