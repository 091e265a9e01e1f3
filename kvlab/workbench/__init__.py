"""Experiments, tracking, report and plots: everything around a run. Nothing below this layer knows of it.

In a notebook:

    from kvlab.workbench import plots, tracking
    run = tracking.start("zsmerge_error_curves", {"model": model, "seed": seed}, signature=trace.signature)
    run.log({"error/evict/0.20": 0.13}, {"error/evict/0.20": (0.11, 0.15)})
    run.table("errors", frame); run.figure("figure4", figure)
    run.claims("zsmerge_error_curves")
"""

import os

# Before anything here imports mlflow; what is started from here inherits it.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
