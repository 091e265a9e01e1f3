"""JupyterLab's pages in a browser: running a cell, moving a slider, and reading the picture again."""

from __future__ import annotations

import re

from playwright.sync_api import expect

SLOW = 120_000  # ms; nothing waits as long on an idle machine


def drawings(html):
    """The drawings of a static picture, as the browser gets them."""
    return re.findall(r'<img class="kvlab-[a-z]+"[^>]* src="([^"]+)"', html)


def drawn(page):
    """The drawings that a page shows in a static picture."""
    return page.locator(".kvlab-picture img").evaluate_all("images => images.map(each => each.src)")


def shown(page):
    """The picture that is seen: beside the widgets stands the one that is saved."""
    return page.locator(".kvlab-picture").filter(visible=True)


def outlines(html):
    """The outlines of a picture's drawings, as they were sent to the widgets."""
    return re.findall(r'<path[^>]* d="([^"]*)"', html)


def outlined(page):
    """The outlines that the widgets show."""
    return page.locator(".kvlab-picture svg path").evaluate_all("paths => paths.map(each => each.getAttribute('d'))")


def run_cell(page, number=0):
    """Run a cell of the notebook that a page shows, once there is a kernel to run it."""
    page.set_default_timeout(SLOW)
    # A cell that is run before there is a kernel is silently not run.
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=SLOW)
    page.locator(".jp-Notebook .jp-CodeCell").nth(number).locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")


def slider_of(page, name):
    return page.locator(".widget-slider", has=page.get_by_text(name, exact=True))


def choose_theme(page, name):
    page.get_by_role("menuitem", name="Settings").click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text(f"JupyterLab {name}", exact=True).click()
    page.wait_for_selector(f"body[data-jp-theme-name='JupyterLab {name}']", state="attached")
