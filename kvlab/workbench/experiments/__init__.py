"""Experiments: YAML files, checked against their notebooks, and the jobs that they stand for."""

from kvlab.workbench.experiments.experiment import (
    CELL,
    ORDINARY,
    POLICY,
    PROFILES,
    TRIAL,
    Experiment,
    Job,
    Profile,
    jobs,
    load,
    longest_first,
    names,
    run_name,
)
from kvlab.workbench.experiments.parameter_values import checked, plain, read

__all__ = [
    "CELL",
    "ORDINARY",
    "POLICY",
    "PROFILES",
    "TRIAL",
    "Experiment",
    "Job",
    "Profile",
    "checked",
    "jobs",
    "load",
    "longest_first",
    "names",
    "plain",
    "read",
    "run_name",
]
