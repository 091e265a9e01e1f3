"""A policy inside transformers' own generate(): the closed loop."""
