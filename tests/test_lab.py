"""What `make lab` starts, in a real browser: a trace explored in JupyterLab, and a sweep's runs in the MLflow UI."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from browsing import missing_images, opened, overflow
from playwright.sync_api import expect
from projects import BODY, EXPERIMENT, PARAMETERS, blank_store, cell, experiment, notebook
from test_never_lose import environment, free_port

from kvlab.workbench import worker

# One process for all, since they share what takes long to start.
pytestmark = [pytest.mark.roundtrip, pytest.mark.xdist_group("lab")]

ROOT = Path(__file__).parents[1]
SLOW = 120_000      # ms; nothing waits as long on an idle machine
LAYERS, HEADS, KV_HEADS, PROMPT, STEPS = 3, 4, 2, 48, 8
TRACE = f"""import torch
import kvlab
made = torch.Generator().manual_seed(0)
queries, keys, values = (torch.randn({LAYERS}, heads, {PROMPT + STEPS}, 16, generator=made)
                         for heads in ({HEADS}, {KV_HEADS}, {KV_HEADS}))
trace = kvlab.Trace.from_tensors(2 * queries, keys, values, {PROMPT})
explorer = kvlab.explore(trace, "snapkv", "streamingllm", budgets=[36, 40, 44], layer=0, head=2, step=3)
"""
BEFORE, AFTER = "layer 0, query head 2, decoding step 3", "layer 1, query head 2, decoding step 3"


def write_notebook(path):
    notebook(path, cell(f"{TRACE}explorer"), cell("print(explorer)"), cell("explorer.show(layer=2, budget=44)"))


def drawings(html):
    """The drawings of a picture, as the browser gets them."""
    return re.findall(r'<img class="kvlab-[a-z]+"[^>]* src="([^"]+)"', html)


def drawn(page):
    """The drawings that a page shows."""
    return page.locator(".kvlab-picture img").evaluate_all("images => images.map(each => each.src)")


@pytest.fixture(scope="module")
def pictures():
    """The same trace's pictures, made in this process: of each layer."""
    made: dict = {}
    exec(TRACE, made)  # noqa: S102
    explorer = made["explorer"]
    try:
        found = []
        for layer in range(LAYERS):
            explorer.show(layer=layer)
            found.append(drawings(explorer.html()))
        return found
    finally:
        explorer.close()


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook with its outputs, as `nbconvert --execute` leaves it."""
    path = tmp_path_factory.mktemp("executed") / "explore.ipynb"
    write_notebook(path)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=environment())
    return path


class Lab:
    """`make lab` in a project's folder: JupyterLab and the MLflow server, each on a free port."""

    def __init__(self, project, home):
        self.project, self.home, self.mlflow_port = project, home, free_port()
        self.mlflow = f"http://127.0.0.1:{self.mlflow_port}"
        self.process, self.server = None, {}

    def start(self):
        command = ["make", "-f", str(ROOT / "Makefile"), "--old-file", ".venv/.stamp", "lab",
                   f"BIN={Path(sys.executable).parent}", f"PORT={self.mlflow_port}"]
        folders = {f"JUPYTER_{name}_DIR": str(self.home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        with (self.home / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=self.project, stdout=log, stderr=log, start_new_session=True,
                env=environment(JUPYTER_PORT=str(free_port()), BROWSER="true", IPYTHONDIR=str(self.home / "ipython"),
                                **folders))
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.home / "log").read_text()
            for path in (self.home / "runtime").glob("jpserver-*.json"):
                self.server = json.loads(path.read_text() or "{}")
            try:
                if self.server:
                    urllib.request.urlopen(f"{self.mlflow}/health", timeout=2).close()
                    return self
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError((self.home / "log").read_text())

    def address(self, path, token=True):
        return f"{self.server['url']}lab/tree/{path}" + (f"?token={self.server['token']}" if token else "")

    def stop(self):
        """Ask it to end, and its kernels with it; kill what stays."""
        if self.process is None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        os.killpg(self.process.pid, signal.SIGTERM)
        _, left = psutil.wait_procs([*family, psutil.Process(self.process.pid)], timeout=20)
        for one in left:
            one.kill()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def project(tmp_path_factory, executed):
    """A project's folder with the notebook, as it is written and as nbconvert executed it, and an empty store."""
    root = tmp_path_factory.mktemp("project")
    (root / "mlruns").mkdir()
    (root / "mlruns" / "mlflow.db").write_bytes(blank_store())
    notebook(root / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(BODY))
    write_notebook(root / "notebooks" / "explore.ipynb")
    (root / "notebooks" / "executed.ipynb").write_bytes(executed.read_bytes())
    experiment(root, grid={"reduction": [0.55, 0.62]})
    return root


@pytest.fixture(scope="module")
def lab(browser, project, tmp_path_factory):
    made = Lab(project, tmp_path_factory.mktemp("jupyter"))
    try:
        yield made.start()
    finally:
        made.stop()


def test_both_servers_listen_on_loopback_alone_and_want_a_token(lab, browser):
    family = psutil.Process(lab.process.pid).children(recursive=True)
    listening = {each.laddr for one in family for each in one.net_connections("inet")
                 if each.status == psutil.CONN_LISTEN}
    assert {lab.server["port"], lab.mlflow_port} <= {port for _, port in listening}
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert len(lab.server["token"]) >= 32
    with opened(browser, lab.address("notebooks/explore.ipynb", token=False)) as (page, _):
        assert "/login?" in page.url and page.locator("input[type=password]").count() > 0
        assert page.request.get(f"{lab.server['url']}api/contents/notebooks").status == 403


def test_a_slider_moved_in_jupyterlab_moves_the_picture(lab, browser, pictures):
    with opened(browser, lab.address("notebooks/explore.ipynb")) as (page, complaints):
        page.set_default_timeout(SLOW)
        picture, cells = page.locator(".kvlab-picture"), page.locator(".jp-Notebook .jp-CodeCell")
        # A cell that is run before there is a kernel is silently not run.
        expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=SLOW)
        cells.first.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        expect(picture).to_contain_text(BEFORE, timeout=SLOW)
        assert drawn(page) == pictures[0] and missing_images(page) == []

        slider = page.locator(".widget-slider", has=page.get_by_text("layer", exact=True))
        slider.locator(".noUi-handle").focus()
        page.keyboard.press("ArrowRight")
        expect(picture).to_contain_text(AFTER, timeout=SLOW)
        expect(slider.locator(".widget-readout")).to_have_text("1")
        assert drawn(page) == pictures[1] != pictures[0]

        cells.nth(1).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        expect(cells.nth(1).locator(".jp-OutputArea-output")).to_contain_text("layer 1, head 2, step 3", timeout=SLOW)

        # The other way: the kernel moves the sliders.
        cells.nth(2).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        expect(picture).to_contain_text("layer 2", timeout=SLOW)
        expect(slider.locator(".widget-readout")).to_have_text("2")
        expect(page.locator(".widget-slider", has=page.get_by_text("budget", exact=True))
               .locator(".widget-readout")).to_have_text("44")
        assert [said for said in complaints if "kvlab" in said or said.startswith("exception")] == []


@pytest.mark.parametrize("width", [1280, 900])
def test_every_slider_is_seen_whole(lab, browser, width):
    """Beside the file browser too, and in a narrow window."""
    with opened(browser, lab.address("notebooks/explore.ipynb"), (width, 900)) as (page, _):
        page.set_default_timeout(SLOW)
        expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=SLOW)
        page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_selector(".kvlab-picture")
        sizes = page.locator(".widget-hslider, .widget-dropdown").evaluate_all("""all => all.map(each => {
            const own = each.getBoundingClientRect(), area = each.closest('.jp-OutputArea').getBoundingClientRect();
            return [own.width, area.right - own.right];
        })""")
        assert len(sizes) == 6
        assert min(wide for wide, _ in sizes) > 250 and min(room for _, room in sizes) >= 0


def test_a_notebook_that_is_not_trusted_shows_the_picture_without_running(lab, browser, pictures):
    with opened(browser, lab.address("notebooks/executed.ipynb")) as (page, _):
        page.set_default_timeout(SLOW)
        expect(page.locator(".kvlab-picture")).to_contain_text(BEFORE, timeout=SLOW)
        assert drawn(page) == pictures[0] and missing_images(page) == []
        assert page.locator(".widget-slider").count() == 0


def test_an_export_to_html_shows_the_picture(executed, browser, pictures):
    """The HTML that is kept with every run."""
    html = worker.to_html(executed)
    with opened(browser, html.as_uri(), offline=True) as (page, _):
        expect(page.locator(".kvlab-picture")).to_contain_text(BEFORE, timeout=SLOW)
        assert drawn(page) == pictures[0] and missing_images(page) == []
        assert overflow(page) == 0
    strip = base64.b64decode(pictures[0][0].partition("base64,")[2]).decode()
    assert strip.startswith("<svg") and "rgb(213, 94, 0)" in strip


def test_the_mlflow_ui_lists_a_sweep_and_its_runs(lab, project, browser):
    command = [sys.executable, "-m", "kvlab", "run", EXPERIMENT, "--jobs", "2"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stderr
    asked = f"{lab.mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name={EXPERIMENT}"
    with urllib.request.urlopen(asked, timeout=60) as answer:
        number = json.load(answer)["experiment"]["experiment_id"]
    with opened(browser, "about:blank") as (page, complaints):
        page.set_default_timeout(SLOW)
        refused = []
        page.on("response", lambda got: refused.append(got.url) if got.status >= 400 else None)
        page.goto(f"{lab.mlflow}/#/experiments/{number}/runs")
        names = page.locator("[role=row] a[href*='/runs/']")
        expect(names).to_have_text([f"{EXPERIMENT} quick"], timeout=SLOW)
        parent = page.locator("[role=row]", has=page.locator("a[href*='/runs/']"))
        parent.locator("[col-id='attributes.`Run Name`'] button").click()
        expect(names).to_have_count(3, timeout=SLOW)
        assert sorted(names.all_inner_texts()) == ["reduction=0.55", "reduction=0.62", f"{EXPERIMENT} quick"]
        # MLflow asks itself who is logged in, which a server without accounts does not know.
        assert [url for url in refused if not url.endswith("/users/current")] == []
        assert [said for said in complaints if "Failed to load resource" not in said] == []
