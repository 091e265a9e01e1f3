"""Experiments as jobs: YAML to papermill, locally or on a cluster, so that a sweep survives whatever stops it."""
