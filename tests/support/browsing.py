"""A real browser for tests: the machine's chromium, headless, with what it complains about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1280, 900), (390, 844)


def executable() -> str | None:
    """The path of a chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """A headless chromium; without one the test is skipped."""
    path = executable()
    if path is None:
        pytest.skip("there is no chromium on this machine; `make browser` installs Debian's")
    # Chromium's own sandbox refuses to start for root (as in a container).
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@contextmanager
def opened(
    browser: Browser, address: str, size: tuple[int, int] = DESKTOP, **context: object
) -> Iterator[tuple[Page, list[str]]]:
    """A page at an address, and the growing list of its complaints: errors on the console, exceptions, failed requests.

    size: of the window, in pixels; context: as playwright's `new_context` takes it (color_scheme="dark").
    """
    within = browser.new_context(viewport={"width": size[0], "height": size[1]}, **context)
    page, complaints = within.new_page(), []
    page.on("console", lambda said: complaints.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url[:200]}"))
    try:
        page.goto(address)
        yield page, complaints
    finally:
        within.close()


def missing_images(page: Page) -> list[str]:
    """The descriptions of images that did not load."""
    return page.evaluate("""() => Promise.all([...document.images].map(image =>
        image.decode().then(() => image.naturalWidth > 0, () => false)
            .then(loaded => loaded ? null : image.alt || image.src)
    )).then(found => found.filter(each => each !== null))""")


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
