"""A real browser for tests: the machine's chromium, headless, with what it complains about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

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


def failure(request: Request) -> list[str]:
    """What is wrong with a request that failed: nothing where its own page dropped it."""
    return [] if request.failure == "net::ERR_ABORTED" else [f"failed: {request.url[:200]} ({request.failure})"]


@contextmanager
def opened(
    browser: Browser, address: str, size: tuple[int, int] = DESKTOP, **context: object
) -> Iterator[tuple[Page, list[str]]]:
    """A page at an address, and the growing list of its complaints: errors on the console, exceptions, failed requests.

    A request that the page itself drops, as one that is left before its answer came, is none of them.

    size: of the window, in pixels; context: as playwright's `new_context` takes it (color_scheme="dark").
    """
    within = browser.new_context(viewport={"width": size[0], "height": size[1]}, **context)
    page, complaints = within.new_page(), []
    page.on("console", lambda said: complaints.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    page.on("requestfailed", lambda request: complaints.extend(failure(request)))
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


def contrasts(page: Page, within: str, besides: str = "svg") -> list[tuple[str, float]]:
    """Each piece of text that is seen in an element, and its contrast with what lies behind it, the least first.

    As WCAG 2 defines it: 4.5 and more is legible. Text in what `besides` selects is left out: drawings, at least.
    """
    return page.evaluate(_CONTRASTS, [within, besides])


_CONTRASTS = r"""([within, besides]) => {
    const parts = colour => {
        const found = colour.match(/[0-9.]+/g).map(Number), scale = colour.startsWith('color(') ? 1 : 255;
        return [...found.slice(0, 3).map(each => each / scale), found[3] ?? 1];
    };
    const light = colour => {
        const [red, green, blue] = colour.map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const over = (upper, lower) => upper.slice(0, 3).map((each, n) => each * upper[3] + lower[n] * (1 - upper[3]));
    const behind = element => {
        if (!element) return [1, 1, 1];
        const colour = parts(getComputedStyle(element).backgroundColor);
        return colour[3] === 1 ? colour : over(colour, behind(element.parentElement));
    };
    const seen = new Map(), walk = document.createTreeWalker(document.querySelector(within), NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement;
        if (!walk.currentNode.data.trim() || element.closest(`style, script, ${besides}`)) continue;
        if (!element.checkVisibility()) continue;
        const ground = behind(element);
        const [one, other] = [light(over(parts(getComputedStyle(element).color), ground)), light(ground)];
        seen.set(walk.currentNode.data.slice(0, 40), (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05));
    }
    return [...seen].sort((a, b) => a[1] - b[1]);
}"""
