"""MLflow's own server with pages that open on training runs: `mlflow server --app-name kvlab`, as `make lab` starts it.

MLflow 3.17 first shows its pages for applications of language models, an assistant that wants a provider or a key, and
a note on telemetry. These choices are kept by the browser and are no settings of the server. A browser that has not
chosen yet is given other choices here; the tag `mlflow.experimentKind` alone is not enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlflow.server import app as pages
from mlflow.server.fastapi_app import app

__all__ = ["app"]

CHOICES = {
    "mlflow.workflowType_v1": "machine_learning",
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,  # it opens only once, and this says that it has
    "mlflow.telemetry.info.alert.dismissed_v1": True,
    "mlflow.settings.telemetry.enabled_v1": False,
}
SCRIPT = f"""<script>
for (const [name, choice] of Object.entries({json.dumps(CHOICES)}))
    if (localStorage.getItem(name) === null) localStorage.setItem(name, JSON.stringify(choice));
</script>"""


def page() -> Any:
    """MLflow's only page, with the choices made before its program begins."""
    html = (Path(pages.static_folder or "") / "index.html").read_text(encoding="utf-8")
    # A page that was cached from a plain MLflow server must not come back.
    return pages.response_class(
        html.replace("<head>", f"<head>{SCRIPT}", 1), mimetype="text/html", headers={"Cache-Control": "no-store"}
    )


pages.view_functions["serve"] = page
