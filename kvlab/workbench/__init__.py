"""Experiments, tracking, report and figures: everything around a run. Nothing below this layer knows of it."""

import os

# Before anything here imports mlflow; started processes inherit it.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
