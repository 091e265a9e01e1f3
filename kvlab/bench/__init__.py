"""Speed and memory of policies on a live model, by one harness."""

TASKS = ("decode", "prefill", "memory")
