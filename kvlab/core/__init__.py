"""Attention as pure functions, the seam into transformers, and the KV entries of one layer."""
