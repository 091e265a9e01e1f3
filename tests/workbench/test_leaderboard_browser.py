"""The leaderboard in a real browser: the front is kvlab's, filters change what is drawn, and it fits a phone."""

from __future__ import annotations

import pytest
from support.browsing import DESKTOP, PHONE, contrasts, opened, overflow
from support.paths import ROOT

from kvlab.analyses.together import equal_bytes
from kvlab.workbench.report import leaderboard, page, snapshots

KEPT = ROOT / "docs" / "ledger"
MODEL, RULER = "qwen2.5-coder-1.5b", "ruler score"


@pytest.fixture(scope="module")
def charts():
    return leaderboard.read(KEPT)


@pytest.fixture(scope="module")
def address(charts, tmp_path_factory):
    """The page of the kept tables, as a file."""
    folder = tmp_path_factory.mktemp("page")
    page.save(snapshots.kept(KEPT), folder, charts=charts)
    return (folder / "leaderboard.html").as_uri()


def choose(shown, **chosen):
    for name, value in chosen.items():
        shown.locator(f"[name={name}]").select_option(value)


def drawn(shown, which=".mark"):
    """The policies of these marks, in the order of the alphabet."""
    return sorted(shown.evaluate(f"[...document.querySelectorAll('{which}')].map(each => each.dataset.name)"))


def rows(shown):
    """The cells of the table, row by row."""
    return shown.evaluate(
        "[...document.querySelectorAll('.ranking tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )


def best(chart, side="stored", budget=""):
    """The policies on the front of a chart, by `equal_bytes.front`."""
    rivals = [point for point in chart.points if point.rival and (not budget or point.budget == budget)]
    losses = [-point.value if chart.higher else point.value for point in rivals]
    sizes = [getattr(point, f"{side}_bytes") for point in rivals]
    on = equal_bytes.front(sizes, losses, leaderboard.SLACK)
    return sorted(point.name for point, is_on in zip(rivals, on, strict=True) if is_on)


@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), ((320, 640), "dark")], ids=str
)
def test_the_page_stands_alone_and_fits(browser, address, size, scheme):
    with opened(browser, address, size, color_scheme=scheme, offline=True) as (shown, complaints):
        assert drawn(shown)
        assert shown.evaluate("performance.getEntriesByType('resource').length") == 0
        assert overflow(shown) == 0
        assert contrasts(shown, "main", "svg, option, noscript")[0][1] > 4.4
        assert complaints == []


def test_every_chart_has_the_front_of_the_figures(browser, address, charts):
    with opened(browser, address) as (shown, complaints):
        for chart in charts:
            choose(shown, model=chart.model, measure=chart.measure)
            if shown.locator("[name=question]").is_visible():
                choose(shown, question=chart.question)
            assert drawn(shown, ".mark.on-front") == best(chart), (chart.model, chart.measure, chart.question)
            # On a logarithmic axis the full cache as it is, which loses nothing, is a line.
            known = [
                point for point in chart.points if point.stored is not None and (chart.higher or point.name != "full")
            ]
            assert drawn(shown) == sorted(point.name for point in known)
            assert len(rows(shown)) == len(chart.points), "those without a share stand in the table"
            assert shown.locator("svg line.whole").count() == 1
        assert complaints == []


def test_stored_and_read_bytes_have_a_front_each(browser, address, charts):
    chart = next(chart for chart in charts if chart.measure == "output error")
    with opened(browser, address) as (shown, complaints):
        choose(shown, model=chart.model, measure=chart.measure)
        assert not shown.locator("[name=question]").is_visible(), "replays have none"
        choose(shown, side="read", budget="64")
        assert drawn(shown, ".mark.on-front") == best(chart, "read", "64") != best(chart, "stored", "64")
        assert complaints == []


def test_filters_change_what_is_drawn_and_an_address_brings_it_back(browser, address, charts):
    (held,) = [chart for chart in charts if (chart.model, chart.question) == (MODEL, "held back") and chart.percent][:1]
    with opened(browser, address) as (shown, complaints):
        choose(shown, model=MODEL, measure="needle score", question="held back")
        both = shown.locator(".mark").count()
        choose(shown, budget="128")
        assert 0 < shown.locator(".mark").count() < both
        assert {row[1] for row in rows(shown)} == {"–", "128"}
        assert (
            MODEL in shown.locator("#board h2").inner_text() and "held back" in shown.locator("#board h2").inner_text()
        )
        before = rows(shown)
        choose(shown, question="read")
        assert rows(shown) != before
        as_share = shown.locator("svg .axis").text_content()
        choose(shown, unit="bytes")
        assert as_share != shown.locator("svg .axis").text_content()
        there, state = shown.url, rows(shown)
        choose(shown, model=held.model, measure=held.measure)
        assert rows(shown) != state
        shown.goto(there)
        assert rows(shown) == state
        shown.locator("nav a", has_text="Table").click()
        assert rows(shown) == state, "a link within the page changes nothing"
        assert complaints == []


def test_a_tap_says_what_a_mark_is_and_the_table_fits_a_phone(browser, address, charts):
    with opened(browser, address, PHONE, has_touch=True) as (shown, complaints):
        wide = "[...document.querySelectorAll('.scroll')].map(each => each.scrollWidth - each.clientWidth)"
        for chart in charts[:1] + charts[-1:]:
            choose(shown, model=chart.model, measure=chart.measure)
            assert shown.evaluate(wide) == [0], chart.measure
        shown.locator(".mark.on-front").first.tap(force=True)
        assert shown.locator(".tip b").inner_text().split()[0] in drawn(shown, ".mark.on-front")
        assert shown.locator(".chips button[aria-pressed=true]").count() == 1
        assert complaints == []


def test_marks_say_their_interval_and_columns_sort(browser, address, charts):
    (chart,) = [
        chart for chart in charts if (chart.model, chart.measure, chart.question) == (MODEL, RULER, "held back")
    ]
    kvzip = next(point for point in chart.points if point.policy == "kvzip")
    with opened(browser, address) as (shown, complaints):
        choose(shown, model=MODEL, measure=RULER, question="held back")
        tip = shown.locator(".tip")
        assert not tip.is_visible()
        shown.locator(".mark[data-name=kvzip]").hover(force=True)
        said = tip.inner_text()
        assert f"{kvzip.value:.0%}".replace("%", " %") in said and f"{100 * kvzip.low:.0f} to" in said
        assert f"{kvzip.n} answers" in said and "of the full cache" in said
        shown.locator("#table h2").hover()
        assert not tip.is_visible()
        scores = [float(row[4].removesuffix(" %")) for row in rows(shown)]
        assert scores == sorted(scores, reverse=True), "the best score stands first"
        shown.locator(".ranking th button", has_text="MiB").click()
        sizes = [float(row[3]) for row in rows(shown)]
        assert sizes == sorted(sizes)
        shown.locator(".ranking th button", has_text="MiB").click()
        assert [float(row[3]) for row in rows(shown)] == sorted(sizes, reverse=True)
        chip = shown.locator(".chips button[data-name=kvzip]")
        chip.click()
        assert chip.get_attribute("aria-pressed") == "true" and drawn(shown, ".mark.lit") == ["kvzip"]
        assert complaints == []
