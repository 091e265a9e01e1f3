"""Experiments, tracking, report and figures: everything around a run. Nothing below this layer knows of it."""
