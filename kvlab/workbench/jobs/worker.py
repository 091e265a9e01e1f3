"""One job in a process of its own: executes a notebook, and writes a note of how it ended.

`processes.Process` starts it as `python -m kvlab.workbench.jobs.worker SPEC.json`; `fork_server` starts it in a fork of
itself. Whatever happens, the executed notebook stays on disk; the note is missing only if this process died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.lib import environment

if TYPE_CHECKING:
    from nbformat import NotebookNode

START_S = 300  # seconds for a kernel to start: many that start at once from a slow disk need long


def main(spec_path: str, manager: type | None = None) -> int:
    """Run the job that the spec describes; 0 if the notebook ran to its end.

    Args:
        manager: class of the kernel manager; papermill's own if there is none.
    """
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    _end_with(spec["parent"])
    result = execute(spec, manager)
    note = Path(spec["result"])
    note.with_suffix(".part").write_text(json.dumps(result), encoding="utf-8")
    os.replace(note.with_suffix(".part"), note)
    return 0 if result["ok"] else 1


def execute(spec: dict[str, Any], manager: type | None = None) -> dict[str, Any]:
    """Execute the notebook of `spec` and export it as HTML; returns {"ok", "error", "html", "died"}.

    Whether it failed is read from the exception: the notebook's metadata do not show that its kernel died. "died" is
    true in that case, since another try may succeed.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("papermill").setLevel(logging.ERROR)
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    error, died = None, False
    options: dict[str, Any] = {"kernel_manager_class": manager} if manager else {}
    try:
        papermill.execute_notebook(
            _literally(spec["notebook"]),
            _literally(spec["output"]),
            parameters=spec["parameters"],
            cwd=spec["cwd"],
            kernel_name="python3",
            progress_bar=False,
            request_save_on_cell_execute=True,
            start_timeout=START_S,
            **options,
        )
    except PapermillExecutionError as failure:
        sentence = " ".join(str(failure.evalue).split())
        error = f"{failure.ename} in cell {failure.cell_index + 1}: {sentence}"[:1000]
    except Exception as failure:
        sentence = (str(failure).strip().splitlines() or [""])[0]
        error = f"{type(failure).__name__}: {sentence}"[:1000]
        # A kernel that dies while it starts, or starts too slowly, raises a plain RuntimeError with these words.
        died = isinstance(failure, DeadKernelError) or (
            type(failure) is RuntimeError and sentence.startswith(("Kernel died", "Kernel didn't respond"))
        )
    html = to_html(Path(spec["output"])) if Path(spec["output"]).exists() else None
    return {"ok": error is None, "error": error, "html": str(html) if html else None, "died": died}


def _literally(path: str) -> str:
    """A path with its braces doubled: papermill fills parameters into paths by str.format."""
    return path.replace("{", "{{").replace("}", "}}")


def to_html(path: Path) -> Path | None:
    """The notebook as one HTML file next to it, readable offline: pictures inside, no scripts from elsewhere.

    None if the export fails, which must not fail a run whose numbers are good.
    """
    import nbformat

    try:
        body = page(nbformat.read(path, as_version=4), path.stem)
        html = path.with_suffix(".html")
        html.write_text(body, encoding="utf-8")
    except Exception as error:
        print(f"no HTML: {error}", file=sys.stderr)
        return None
    return html


def page(content: NotebookNode, name: str) -> str:
    """A notebook's content as one HTML page of that name."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(embed_images=True)
    for address in (
        "require_js_url",
        "mathjax_url",
        "mermaid_js_url",
        "mermaid_layout_elk_js_url",
        "jquery_url",
        "jupyter_widgets_base_url",
        "widget_renderer_url",
    ):
        if exporter.has_trait(address):
            setattr(exporter, address, "")
    # The page has no scripts, so widgets would be empty. Without their state nbconvert shows HTML or text instead.
    content.metadata.pop("widgets", None)
    body, _ = exporter.from_notebook_node(content, {"metadata": {"name": name}})
    # An empty address would make the browser load the page as its own script.
    return re.sub(r'<script src=""\s*>\s*</script>', "", body)


def _end_with(parent: int) -> None:
    """End this process and its children as soon as its parent (the sweep, or a Dask worker) is gone.

    Nobody would mark its run then, and another sweep may begin the same job. The parent may be gone already, so its
    process number is given, and not asked for here.
    """
    import psutil

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    environment.configure()
    sys.exit(main(sys.argv[1]))
