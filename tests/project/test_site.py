"""The documentation's site: built without a warning, and read in a browser."""

from __future__ import annotations

import html
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from playwright.sync_api import Page
from support.browsing import DESKTOP, PHONE, contrasts, missing_images, opened, overflow
from support.paths import ROOT

import kvlab
from kvlab import cli, papers
from kvlab.inputs import models
from kvlab.render.sentences import sentence
from kvlab.workbench.report import snapshots
from kvlab.workbench.report.ledger_models import subjects
from kvlab.workbench.report.model_agreement import across

BUILD = ROOT / "docs" / "site" / "build.py"
SHOWN = (
    *("index", "learn", "look_up", "README", "commands", "gallery", "notebooks", "ledger", "reference", "docs/start"),
    *("docs/design", "docs/measures", "docs/policies", "docs/policies/snapkv", "notebooks/dapq_window_recall"),
    "reference/kvlab.capture",
)


def counted(page: Page) -> int:
    """How many claims the ledger's filters leave, on all pages."""
    return int(page.inner_text("#count").split()[0])


SHOWN_ROWS = "#ledger-of-claims tbody tr:not([hidden])"


class Links(HTMLParser):
    """What a page links to, and the names that it can be linked at."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[key] for key in ("href", "src") if given.get(key)]
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(BUILD), "--out", str(out)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert built.returncode == 0, built.stderr[-3000:]
    return out / "html"


def test_a_warning_fails_every_build_and_not_only_the_first(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("site_build", BUILD)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    written = {"index.md": "# Home\n\n[away](nowhere.md)\n", "conf.py": "extensions = ['myst_parser']\n"}

    def stage(source):
        source.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            if not (source / name).exists():
                (source / name).write_text(text, encoding="utf-8")
                os.utime(source / name, (1, 1))  # older than any build, as copied files are

    monkeypatch.setattr(build, "stage", stage)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            build.main(tmp_path)
        assert ended.value.code == 1


def test_every_page_notebook_and_public_name_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        if "site" not in page.relative_to(ROOT).parts:
            assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / f"{notebook.stem}.html").is_file(), notebook
    names = explained(site)
    assert {f"kvlab.{name}" for name in kvlab.__all__ if not name.startswith("_")} <= {
        re.sub(r"^kvlab\.(?:\w+\.)*(?=\w+$)", "kvlab.", name) for name in names
    }


def explained(site: Path) -> set[str]:
    """The names at which the pages of the reference can be linked."""
    return {name for page in (site / "reference").glob("*.html") for name in Links(page).names}


def test_each_door_leads_to_its_pages_and_no_page_is_left_out(site):
    """Each page of docs/ is in the table of one door; the start page leads to the doors."""
    doors = ("learn", "do", "look_up", "understand")
    assert {f"{door}.html" for door in doors} <= set(Links(site / "index.html").links)
    led = {urlsplit(link).path for door in doors for link in Links(site / f"{door}.html").links}
    pages = list((ROOT / "docs").glob("*.md"))
    assert len(pages) > 15 and {f"docs/{path.stem}.html" for path in pages} <= led
    assert {"commands.html", "reference.html", "ledger.html", "notebooks.html"} <= led


def test_the_page_of_commands_has_each_command_and_its_options(site):
    text = re.sub(r"<[^>]+>", "", (site / "commands.html").read_text(encoding="utf-8"))
    for name, command in typer.main.get_command(cli.app).commands.items():
        assert f"kvlab {name}" in text
        options = {option for each in command.params if not each.hidden for option in each.opts if option[:2] == "--"}
        assert not [option for option in options - {"--help"} if option not in text], name


def test_the_start_page_shows_six_findings_of_the_kept_ledger(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).replace("’", "'").split())
    entries = snapshots.read(ROOT / "docs" / "ledger" / f"{models.DEFAULT}.csv")
    said = {sentence(entry.claim, entry.verdict, entry.weak) for entry in entries if entry.claim.kind == "finding"}
    assert sum(" ".join(each.split()) in text for each in said) == 6


def test_the_live_page_of_the_start_page_answers(site, browser):
    """It is a page of the default model, which the tests of this part have pulled."""
    assert (site / "_static" / "explorer.html").stat().st_size < 3e6
    with opened(browser, (site / "index.html").as_uri()) as (page, complaints):
        frame = page.frame_locator("iframe.live")
        finding = frame.get_by_text(re.compile(r"^At step \d+")).first
        before = finding.inner_text()
        frame.get_by_role("button", name="most different").click()
        assert finding.inner_text() != before and complaints == []
        assert not page.locator("img.still").is_visible()
    with opened(browser, (site / "index.html").as_uri(), PHONE) as (page, complaints):
        assert page.locator("img.still").is_visible() and not page.locator("iframe.live").is_visible()


def told(text: str) -> set[tuple[str, str]]:
    """What a text imports of kvlab, as (module, name): of a module, what it uses of that."""
    found = set()
    for home, things in re.findall(r"^\W*from (kvlab(?:\.\w+)*) import ([\w, ]+)", text, re.MULTILINE):
        for name in (thing.split()[0] for thing in things.split(",")):
            if not inspect.ismodule(held := pkgutil.resolve_name(f"{home}.{name}")):
                found.add((home, name))
                continue
            used = set(re.findall(rf"(?<![.\w]){name}\.([A-Za-z]\w*)\b(?!\.py)", text))
            found |= {(held.__name__, attribute) for attribute in used if hasattr(held, attribute)}
    return found


def test_whatever_our_pages_and_skeletons_import_is_in_the_reference(site):
    templates = [path for path in (ROOT / "kvlab/workbench/workspace/templates").rglob("*.j2") if path.is_file()]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *templates]
    wanted = {imported for path in pages for imported in told(path.read_text(encoding="utf-8"))}
    assert len(wanted) > 20 and ("kvlab.core.ranking", "top_positions") in wanted
    places = explained(site)

    def held(place: str) -> object:
        with suppress(ImportError, AttributeError):  # a place may be a heading's, or that of an attribute
            return pkgutil.resolve_name(place)

    def there(home: str, name: str) -> bool:
        """A name that is handed on stands where it is made, or where it is handed on."""
        wanted = pkgutil.resolve_name(f"{home}.{name}")
        return any(held(place) is wanted for place in places if place.endswith(f".{name}"))

    assert not [f"{home}.{name}" for home, name in sorted(wanted) if not there(home, name)]


def test_every_type_of_ours_in_a_signature_leads_to_what_it_is(site):
    ours = set()
    for path in (ROOT / "kvlab").rglob("*.py"):
        ours |= set(re.findall(r"^(?:class (\w+)|(\w+): TypeAlias)", path.read_text(encoding="utf-8"), re.MULTILINE))
    names = {name for pair in ours for name in pair if name and not name.startswith("_")}
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((site / "reference").glob("*.html")))
    shown = re.findall(r'<dt class="sig [^>]*>(.*?)</dt>', text, re.DOTALL)
    assert len(shown) > 100
    for signature in shown:
        # What a link leads to is gone, the name that is explained here, and what is given by default.
        plain = re.sub(
            r'<a class="reference.*?</a>|<span class="(?:sig-|property|default).*?</span></span>', "", signature
        )
        unlinked = names & set(re.findall(r'<span class="pre">([A-Za-z]\w+)</span>', plain))
        assert not unlinked, (unlinked, re.sub(r"<[^>]+>", "", signature))


def test_the_ledgers_page_says_what_the_report_says(site):
    """Both read the kept ledgers by one reader, and compare models by the profile that they share."""
    every = snapshots.kept(ROOT / "docs" / "ledger")
    text = (site / "ledger.html").read_text(encoding="utf-8")
    for kind, found in across(every, subjects(every)).items():
        assert f"<b>{len(found)}</b> {kind}" in text
    for entry in every[:40]:
        (row,) = re.findall(rf'<tr id="{re.escape(entry.claim.id)}".*?</tr>', text, re.DOTALL)
        assert f"<b>{entry.state}</b>" in row


def test_no_link_is_dead_and_nothing_is_fetched_from_elsewhere(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if "_static" not in page.parts}
    for page, held in pages.items():
        for link in held.links:
            where = urlsplit(link)
            if where.scheme in ("data", "mailto"):
                continue
            if where.scheme:
                assert "_static" not in link and not link.endswith((".js", ".css", ".png")), f"{page}: {link}"
                continue
            target = (page.parent / unquote(where.path)).resolve() if where.path else page
            assert target.is_file(), f"{page.relative_to(site)}: {link}"
            if where.fragment and target in pages:
                assert unquote(where.fragment) in pages[target].names, f"{page.relative_to(site)}: {link}"


@pytest.mark.parametrize(
    ("size", "scheme"),
    [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")],
    ids=["desk", "dark", "phone", "dark-phone"],
)
def test_pages_are_whole_fit_the_screen_and_are_legible_in_the_dark(site, browser, size, scheme):
    """On a phone every page but those of sources, on a desk one of each kind."""
    every = (path for path in site.rglob("*.html") if not {"_static", "_modules"} & set(path.parts))
    pages = sorted(every) if size == PHONE else [site / f"{name}.html" for name in SHOWN]
    assert len(pages) >= (80 if size == PHONE else 12)
    with opened(browser, "about:blank", size, color_scheme=scheme) as (page, complaints):
        for path in pages:
            page.goto(path.as_uri())
            assert complaints == [] and missing_images(page) == [] and overflow(page) <= 0, path
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            lightness = sum(map(int, re.findall(r"\d+", background)[:3]))
            assert (lightness < 200) == (scheme == "dark"), (path, background)
            if size == PHONE and scheme == "dark":
                # Tables that pandas styled have the light theme's ground and the figures' colours, in the dark as well.
                found = contrasts(page, "body", besides="svg, .cell_output table:not(.dataframe)")
                assert found and found[0][1] >= 4.5, (path, found[:5])


def test_the_search_finds_a_policy(site, browser):
    with opened(browser, f"{(site / 'search.html').as_uri()}?q=snapkv") as (page, complaints):
        page.wait_for_selector("#search-results li a")
        found = [link.get_attribute("href") or "" for link in page.locator("#search-results a").all()]
        assert any("docs/policies/snapkv.html" in link for link in found) and complaints == []
        page.wait_for_selector("#search-results .excerpt")
        excerpts = [text.lower() for text in page.locator("#search-results .excerpt").all_text_contents()]
        assert len(excerpts) > 5 and sum("snapkv" in text for text in excerpts) > len(excerpts) / 2
        titles = page.locator("#search-results li[class*=kind-title] > a").all_text_contents()
        assert len(titles) == len(set(titles))


def test_the_ledger_is_narrowed_by_paper_and_words(site, browser):
    with opened(browser, (site / "ledger.html").as_uri()) as (page, complaints):
        rows = page.locator("#ledger-of-claims tbody tr")
        shown = page.locator(SHOWN_ROWS)
        column = page.locator("#ledger-of-claims tbody td:first-child").first.bounding_box()
        assert column and column["width"] > 300
        page.select_option("[data-filter=verdict1]", "holds")
        assert 0 < counted(page) < rows.count()
        assert all(
            text.startswith("holds") for text in page.locator(f"{SHOWN_ROWS} td:nth-child(4)").all_text_contents()
        )
        page.select_option("[data-filter=verdict1]", "")
        page.select_option("[data-filter=paper]", "dapq")
        of_paper = counted(page)
        assert of_paper == len(papers.claims(paper="dapq")) and page.inner_text("#count").endswith(
            f"of {rows.count()} claims"
        )
        page.fill("[data-filter=words]", "snapkv RECALL")
        assert 0 < counted(page) < of_paper and shown.count() > 0 and complaints == []
        assert all("snapkv" in text.lower() and "recall" in text.lower() for text in shown.all_text_contents())


def test_the_ledger_is_turned_page_by_page(site, browser):
    every = len(papers.claims())
    with opened(browser, (site / "ledger.html").as_uri()) as (page, complaints):
        shown, seen = page.locator(SHOWN_ROWS), []
        forward = page.locator(".turn button[data-step='1']").first
        while True:
            assert 0 < shown.count() <= 25
            seen += shown.evaluate_all("rows => rows.map(row => row.id)")
            if forward.is_disabled():
                break
            forward.click()
        assert len(seen) == len(set(seen)) == every and complaints == []
        page.evaluate("location.hash = '#page=2'")
        page.wait_for_function("document.querySelector('.turn span').textContent.startsWith('page 2 of')")
        assert shown.first.get_attribute("id") == seen[25]
    with opened(browser, (site / "ledger.html").as_uri(), PHONE) as (page, complaints):
        assert page.evaluate("document.documentElement.scrollHeight") < 20_000


def test_the_ledger_is_narrowed_by_kind_and_an_address_holds_what_is_chosen(site, browser):
    with opened(browser, (site / "ledger.html").as_uri()) as (page, complaints):
        shown = page.locator(SHOWN_ROWS)
        page.select_option("[data-filter=kind]", "control")
        of_kind = counted(page)
        assert 0 < of_kind < page.locator("#ledger-of-claims tbody tr").count()
        assert set(shown.evaluate_all("rows => rows.map(row => row.dataset.kind)")) == {"control"}
        page.select_option("[data-filter=verdict0]", "holds")
        page.fill("[data-filter=words]", "of & on")
        # The page says its own address: the driver hears of a change only a moment later.
        address, count = page.evaluate("location.href"), page.inner_text("#count")
        assert address.endswith("#smollm2-135m=holds&kind=control&words=of+%26+on")
        assert complaints == []
    with opened(browser, address) as (page, complaints):
        assert page.input_value("[data-filter=words]") == "of & on" and page.inner_text("#count") == count
        assert page.input_value("[data-filter=kind]") == "control"
        # The address of the same page with something else, as by a link within it or the browser's way back.
        page.evaluate("location.hash = '#paper=zsmerge&kind=nonsense'")
        page.wait_for_function("document.querySelector('[data-filter=words]').value === ''")
        papers_of = page.locator(SHOWN_ROWS).evaluate_all("rows => rows.map(row => row.dataset.paper)")
        assert set(papers_of) == {"zsmerge"} and page.input_value("[data-filter=kind]") == "" and complaints == []


def test_a_claims_id_leads_to_its_row(site, browser):
    claim = papers.claims(paper="zsmerge")[-1].id
    with opened(browser, f"{(site / 'ledger.html').as_uri()}#{claim}") as (page, complaints):
        row = page.locator(f'[id="{claim}"]')
        place = row.bounding_box()
        assert place and 0 <= place["y"] < DESKTOP[1] and claim in row.inner_text()
        assert counted(page) == len(papers.claims()) and complaints == []
