"""Extras: packages that `pip install kvlab` leaves out, and one sentence where one of them is missing."""

from __future__ import annotations

from importlib.util import find_spec

from kvlab.errors import KvlabError

LAB = "lab"
EXTRAS = {
    LAB: {
        "mlflow": "MLflow",
        "papermill": "papermill",
        "nbclient": "nbclient",
        "nbconvert": "nbconvert",
        "nbformat": "nbformat",
        "jupyter_client": "jupyter_client",
        "ipykernel": "ipykernel",
        "IPython": "IPython",
        "ipywidgets": "ipywidgets",
        "jupyterlab": "JupyterLab",
        "matplotlib": "matplotlib",
        "seaborn": "seaborn",
        "PIL": "Pillow",
        "pyarrow": "pyarrow",
        "requests": "requests",
        "sqlalchemy": "SQLAlchemy",
    },
    "cluster": {"distributed": "Dask", "dask_jobqueue": "dask-jobqueue"},
    "math": {"math_verify": "math-verify"},
    "kernels": {"triton": "Triton"},
    "lm-eval": {"lm_eval": "the lm-evaluation-harness"},
}
"""Extra -> module -> name in messages, of what kvlab itself imports."""
# A notebook that runs by itself needs neither.
BY_HAND = ("jupyterlab", "ipywidgets")


def is_installed(module: str) -> bool:
    """Whether a module can be imported; it is not imported here."""
    return find_spec(module) is not None


def missing(*modules: str) -> str | None:
    """The sentence for the first of these modules that is not installed, and None where all are.

    Args:
        modules: of EXTRAS; without any, all that experiments and their report need.
    """
    wanted = modules or tuple(module for module in EXTRAS[LAB] if module not in BY_HAND)
    return next((sentence(module) for module in wanted if not is_installed(module)), None)


def need(*modules: str) -> None:
    """Raise KvlabError with `missing`'s sentence, if there is one."""
    if advice := missing(*modules):
        raise KvlabError(advice)


def sentence(module: str | None) -> str | None:
    """The advice on a module that could not be imported: the extra to install. None for one that is no extra's.

    >>> sentence("mlflow.entities")
    "MLflow is not installed: pip install 'kvlab[lab]'"
    """
    top = (module or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if top in modules:
            return f"{modules[top]} is not installed: pip install 'kvlab[{extra}]'"
    return None
