"""The Python files of the workspace in use: `from kvlab_workspace.policies._mine import ...` in tests and notebooks."""

from kvlab.lib.workspace import root, workspace

_folder = workspace()
if _folder is None:
    raise ModuleNotFoundError(f"{root()} is no workspace; change into one, or name it in KVLAB_ROOT", name=__name__)
__path__ = [str(_folder)]
