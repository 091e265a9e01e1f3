"""What `make lab` starts, in a real browser: a trace explored in JupyterLab, and a sweep's runs in the MLflow UI."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from playwright.sync_api import expect
from support.browsing import contrasts, missing_images, opened, overflow
from support.lab_pages import (
    SLOW,
    choose_theme,
    drawings,
    drawn,
    outlined,
    outlines,
    run_cell,
    shown,
    slider_of,
)
from support.projects import BODY, EXPERIMENT, PARAMETERS, blank_store, cell, experiment, notebook
from support.servers import Lab, environment

from kvlab.workbench.jobs import worker
from kvlab.workbench.store import database

pytestmark = pytest.mark.roundtrip

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


@pytest.fixture(scope="module")
def pictures():
    """The same trace's pictures, made in this process: of each layer, the static drawings and the live outlines."""
    made: dict = {}
    exec(TRACE, made)
    explorer = made["explorer"]
    found = []
    for layer in range(LAYERS):
        explorer.show(layer=layer)
        found.append((drawings(explorer.html()), outlines("".join(explorer._live().values()))))
    explorer.close()
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook with its outputs, as `nbconvert --execute` leaves it."""
    path = tmp_path_factory.mktemp("executed") / "explore.ipynb"
    write_notebook(path)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=environment())
    return path


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
    listening = {
        each.laddr for one in family for each in one.net_connections("inet") if each.status == psutil.CONN_LISTEN
    }
    assert {lab.server["port"], lab.mlflow_port} <= {port for _, port in listening}
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert len(lab.server["token"]) >= 32
    with opened(browser, lab.address("notebooks/explore.ipynb", token=False)) as (page, _):
        assert "/login?" in page.url and page.locator("input[type=password]").count() > 0
        assert page.request.get(f"{lab.server['url']}api/contents/notebooks").status == 403


def test_a_slider_moved_in_jupyterlab_moves_the_picture(lab, browser, pictures):
    with opened(browser, lab.address("notebooks/explore.ipynb")) as (page, complaints):
        run_cell(page)
        picture, cells = shown(page), page.locator(".jp-Notebook .jp-CodeCell")
        expect(picture).to_contain_text(BEFORE, timeout=SLOW)
        assert outlined(page) == pictures[0][1]

        scrolled = page.locator(".kvlab-scroll").first
        scrolled.evaluate("box => { box.style.width = '150px'; box.style.maxHeight = '60px'; box.scrollTop = 30; }")
        assert scrolled.evaluate("box => box.scrollTop") == 30
        slider = slider_of(page, "layer")
        slider.locator(".noUi-handle").focus()
        page.keyboard.press("ArrowRight")
        expect(picture).to_contain_text(AFTER, timeout=SLOW)
        expect(slider.locator(".widget-readout")).to_have_text("1")
        # The parts of a picture arrive one by one.
        page.wait_for_function(
            """expected => JSON.stringify(expected) == JSON.stringify(
            [...document.querySelectorAll('.kvlab-picture svg path')].map(each => each.getAttribute('d')))""",
            arg=pictures[1][1],
        )
        assert pictures[1][1] != pictures[0][1]
        assert scrolled.evaluate("box => box.scrollTop") == 30

        run_cell(page, 1)
        expect(cells.nth(1).locator(".jp-OutputArea-output")).to_contain_text("layer 1, head 2, step 3", timeout=SLOW)

        # The other way: the kernel moves the sliders.
        run_cell(page, 2)
        expect(picture).to_contain_text("layer 2", timeout=SLOW)
        expect(slider.locator(".widget-readout")).to_have_text("2")
        expect(slider_of(page, "budget").locator(".widget-readout")).to_have_text("44")
        assert [said for said in complaints if "kvlab" in said or said.startswith("exception")] == []


def test_a_slider_that_is_dragged_ends_where_it_is_let_go(lab, browser):
    """While it is dragged, no more is asked for than is answered."""
    with opened(browser, lab.address("notebooks/explore.ipynb")) as (page, _):
        asked = []
        page.on("websocket", lambda socket: socket.on("framesent", lambda frame: asked.append(frame)))
        page.reload()
        run_cell(page)
        expect(shown(page)).to_contain_text(BEFORE, timeout=SLOW)
        track = slider_of(page, "step").locator(".noUi-base").bounding_box()
        handle = slider_of(page, "step").locator(".noUi-handle").bounding_box()
        middle = handle["y"] + handle["height"] / 2
        page.mouse.move(handle["x"] + handle["width"] / 2, middle)
        page.mouse.down()
        asked.clear()
        for number in range(60):
            page.mouse.move(track["x"] + track["width"] * abs(number % 20 - 10) / 10, middle)
        page.mouse.move(track["x"] + track["width"] * 5 / 7, middle)
        page.mouse.up()
        expect(slider_of(page, "step").locator(".widget-readout")).to_have_text("6")
        expect(shown(page)).to_contain_text("decoding step 6:", timeout=SLOW)
        page.wait_for_timeout(500)
        expect(shown(page)).to_contain_text("decoding step 6:")
        assert 0 < len(asked) <= 70


def test_a_token_in_the_table_leads_to_its_place_in_the_text(lab, browser):
    with opened(browser, lab.address("notebooks/explore.ipynb")) as (page, _):
        run_cell(page)
        link = page.locator(".kvlab-worst a").first
        position = link.text_content()
        link.click()
        expect(page.locator(".kvlab-text :target")).to_have_text(f"[{position}] ")
        # The page is still the notebook, with its kernel.
        slider_of(page, "layer").locator(".noUi-handle").focus()
        page.keyboard.press("ArrowRight")
        expect(shown(page)).to_contain_text(AFTER, timeout=SLOW)


@pytest.mark.parametrize("name", ["explore", "executed"])
def test_every_word_is_legible_in_the_dark_theme(lab, browser, name):
    with opened(browser, lab.address(f"notebooks/{name}.ipynb")) as (page, _):
        page.set_default_timeout(SLOW)
        if name == "explore":
            run_cell(page)
        expect(shown(page)).to_contain_text(BEFORE, timeout=SLOW)
        try:
            choose_theme(page, "Dark")
            found = contrasts(page, ".kvlab-picture")
            assert len(found) > 30 and found[0][1] >= 4.5, found[:5]
        finally:
            choose_theme(page, "Light")


def test_a_notebook_that_was_saved_by_hand_shows_its_picture_without_its_kernel(lab, browser, project, pictures):
    path = project / "notebooks" / "saved.ipynb"
    write_notebook(path)
    # Without the notebooks that other tests left open.
    address = lab.address("notebooks/saved.ipynb")
    with opened(browser, address) as (page, _):
        run_cell(page)
        expect(shown(page)).to_contain_text(BEFORE, timeout=SLOW)
        assert shown(page).locator("svg").count() > 0, "the one that moves"
        page.keyboard.press("Control+s")
        deadline = time.monotonic() + 60
        while "kvlab-picture" not in path.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
    sessions = f"{lab.server['url']}api/sessions"
    with opened(browser, "about:blank") as (page, _):
        page.set_default_timeout(SLOW)
        headers = {"Authorization": f"token {lab.server['token']}"}
        for session in page.request.get(sessions, headers=headers).json():
            page.request.delete(f"{sessions}/{session['id']}", headers=headers)
        page.goto(address)
        expect(shown(page)).to_contain_text(BEFORE, timeout=SLOW)
        assert drawn(page) == pictures[0][0] and missing_images(page) == []
        expect(page.get_by_text(re.compile("Error displaying|Loading widget")).filter(visible=True)).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 900])
def test_every_slider_is_seen_whole(lab, browser, width):
    """Beside the file browser too, and in a narrow window."""
    with opened(browser, lab.address("notebooks/explore.ipynb"), (width, 900)) as (page, _):
        run_cell(page)
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
        expect(shown(page)).to_contain_text(BEFORE, timeout=SLOW)
        assert drawn(page) == pictures[0][0] and missing_images(page) == []
        assert page.locator(".widget-slider").count() == 0


def test_an_export_to_html_shows_the_picture(executed, browser, pictures):
    """The HTML that is kept with every run."""
    html = worker.to_html(executed)
    with opened(browser, html.as_uri(), offline=True) as (page, _):
        expect(shown(page)).to_contain_text(BEFORE, timeout=SLOW)
        assert drawn(page) == pictures[0][0] and missing_images(page) == []
        assert overflow(page) == 0
    strip = base64.b64decode(pictures[0][0][0].partition("base64,")[2]).decode()
    assert strip.startswith("<svg") and "rgb(213, 94, 0)" in strip


def test_the_mlflow_ui_lists_a_sweep_and_its_runs(lab, project, browser):
    command = [sys.executable, "-m", "kvlab", "run", EXPERIMENT, "--jobs", "2"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stderr
    (link,) = re.findall(r"^MLflow UI: (.*)$", done.stdout, re.M)
    assert link.startswith(lab.mlflow), "the command knows that `make lab` is running"
    with opened(browser, "about:blank") as (page, complaints):
        page.set_default_timeout(SLOW)
        refused = []
        page.on("response", lambda got: refused.append(got.url) if got.status >= 400 else None)
        page.goto(link)
        names = page.locator("[role=row] a[href*='/runs/']")
        expect(names).to_have_text(["sweep quick, 2 jobs"], timeout=SLOW)
        expect(page.get_by_text("A toy.")).to_be_visible()
        parent = page.locator("[role=row]", has=page.locator("a[href*='/runs/']"))
        parent.locator("[col-id='attributes.`Run Name`'] button").click()
        expect(names).to_have_count(3, timeout=SLOW)
        jobs = [f"{EXPERIMENT} · reduction={reduction}" for reduction in (0.55, 0.62)]
        assert sorted(names.all_inner_texts()) == sorted([*jobs, "sweep quick, 2 jobs"])
        names.filter(has_text="reduction=0.62").click()
        page.get_by_role("tab", name="Artifacts").or_(page.get_by_role("link", name="Artifacts")).click()
        page.get_by_text("tables").click()
        page.get_by_text("errors.json").click()
        expect(page.get_by_role("columnheader", name="ratio")).to_be_visible(timeout=SLOW)
        expect(page.get_by_role("cell", name="0.62")).to_be_visible()
        # MLflow asks itself who is logged in, which a server without accounts does not know.
        assert [url for url in refused if not url.endswith("/users/current")] == []
        assert [said for said in complaints if "Failed to load resource" not in said] == []


def test_the_mlflow_ui_opens_on_training_runs_and_asks_for_nothing(lab, project, browser):
    """In a browser that has never been there: no pages for language models' traces, no assistant, no telemetry."""
    named = database.client(f"sqlite:///{project / 'mlruns' / 'mlflow.db'}")
    database.experiment_id(named, "first_sight")
    with opened(browser, "about:blank") as (page, _):
        page.set_default_timeout(SLOW)
        sent = []
        page.on("request", lambda request: sent.append(request.url))
        page.goto(lab.mlflow)
        expect(page.get_by_text("Welcome to MLflow")).to_be_visible(timeout=SLOW)
        page.get_by_role("link", name="first_sight").click()
        expect(page.get_by_role("heading", name="Runs")).to_be_visible(timeout=SLOW)
        for unasked in (
            "Ask questions about your experiments",
            "Information about UI telemetry",
            "Evaluation runs",
            "Got it",
        ):
            expect(page.get_by_text(unasked)).to_have_count(0)
        assert [url for url in sent if not url.startswith((lab.mlflow, "data:", "blob:"))] == []
        # Who chooses otherwise is not overruled.
        page.get_by_text("GenAI", exact=True).click()
        page.goto(lab.mlflow)
        page.reload()
        expect(page.get_by_role("link", name="Prompts", exact=True)).to_be_visible(timeout=SLOW)


def test_the_lab_opens_copies(lab, project):
    assert "/lab/tree/lab/00_quickstart.ipynb" in (lab.home / "log").read_text()
    assert (project / "lab" / "toy.ipynb").read_bytes() == (project / "notebooks" / "toy.ipynb").read_bytes()


def test_ctrl_c_ends_both_servers_and_make_has_no_error(tmp_path):
    """As a terminal sends it: to make and all that it started."""
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_bytes(blank_store())
    notebook(tmp_path / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"))
    experiment(tmp_path)
    made = Lab(tmp_path, tmp_path / "jupyter")
    made.home.mkdir()
    try:
        made.start()
        assert (tmp_path / "mlruns" / ".ui").read_text() == made.mlflow
        family = psutil.Process(made.process.pid).children(recursive=True)
        assert len(family) >= 3
        os.killpg(made.process.pid, signal.SIGINT)
        made.process.wait(timeout=60)
        assert psutil.wait_procs(family, timeout=20)[1] == []
    finally:
        made.stop()
    said = (made.home / "log").read_text()
    assert "***" not in said and "Traceback" not in said
    assert not (tmp_path / "mlruns" / ".ui").exists()
