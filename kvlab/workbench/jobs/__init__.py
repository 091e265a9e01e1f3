"""Experiments as jobs: YAML to papermill, locally or on a cluster; a sweep that is stopped at any moment can go on."""
