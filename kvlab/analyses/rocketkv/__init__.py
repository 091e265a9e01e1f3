"""RocketKV: coarse eviction first, then fine selection at each step."""
