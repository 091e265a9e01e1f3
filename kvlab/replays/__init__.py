"""Replay: a policy over a trace, without running the model again."""
