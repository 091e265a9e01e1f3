"""The report in a real browser: everything loads and fits, nothing complains, and what can be clicked works."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from support.browsing import DESKTOP, PHONE, missing_images, opened, overflow
from support.projects import EXPERIMENT
from support.report_pages import CLAIM, slug

from kvlab import papers
from kvlab.workbench.report import page as report
from kvlab.workbench.store import database, tracking

LONG = "a_very_long_name_without_any_place_to_break_it_" * 4


@pytest.fixture
def page_of_report(project, monkeypatch):
    """The address of a report on every claim of two experiments, each with a figure, and texts that are hard to fit."""
    asked = papers.claims()
    shown = [
        claim.model_copy(update={"figure": "curve"} if claim.experiment else {"untested": f"needs {LONG}"})
        for claim in asked
    ]

    def of(experiment=None):
        return [claim for claim in shown if experiment in (None, claim.experiment)]

    monkeypatch.setattr(papers, "claims", of)
    own = [
        paper.model_copy(update={"claims": [claim for claim in shown if claim.paper == paper.name]})
        for paper in papers.papers()
    ]
    monkeypatch.setattr(papers, "of_project", lambda: own)
    for name in (EXPERIMENT, "dapq_position_vs_content"):
        run = tracking.create_run(database.client(), name, {}, {"kvlab.kind": "job", "model": LONG}, "job")
        run.log(
            {
                metric: {"low": -0.4, "high": 0.8}.get(metric.rpartition("/")[2], 0.3)
                for claim in asked
                if claim.experiment == name
                for metric in claim.metrics
            }
        )
        run.tag("signature", f"{LONG}|<b>|seed 0")
        for figure in ("curve", "another"):
            picture = Figure(figsize=(9, 3))
            picture.subplots().plot([1, 3, 2])
            run.figure(figure, picture)
        run.finish()
    return report.write().as_uri()


@pytest.mark.parametrize(
    ("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), ((320, 640), "dark")], ids=str
)
def test_the_page_loads_whole_and_fits(browser, page_of_report, size, scheme):
    with opened(browser, page_of_report, size, color_scheme=scheme) as (page, complaints):
        asked_for = set(page.evaluate("performance.getEntriesByType('resource').map(each => each.name.split(':')[0])"))
        assert asked_for <= {"data"}
        assert page.locator("figure img").count() == 4 and missing_images(page) == []
        thumbs = page.locator(".thumb")
        assert thumbs.count() == sum(
            claim.experiment in (EXPERIMENT, "dapq_position_vs_content") for claim in papers.claims()
        )
        sizes = page.evaluate("""() => Promise.all([...document.querySelectorAll('.thumb')].map(thumb => {
            const image = new Image();
            image.src = getComputedStyle(thumb).backgroundImage.slice(5, -2);
            return image.decode().then(() => image.naturalWidth, () => 0);
        }))""")
        assert min(sizes) > 100
        assert overflow(page) == 0 and height(page) < 20_000
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert overflow(page) == 0
        assert complaints == []


def height(page) -> int:
    """Of the whole page, in pixels."""
    return page.evaluate("document.documentElement.scrollHeight")


def shown(page) -> list[str]:
    """The ids of the claims that are not filtered away."""
    return page.evaluate("[...document.querySelectorAll('details.claim:not([hidden])')].map(each => each.id)")


def test_every_claim_is_one_line_until_it_is_opened(browser, page_of_report):
    with opened(browser, page_of_report) as (page, complaints):
        assert len(shown(page)) == len(papers.claims())
        page.evaluate("document.querySelectorAll('details.group').forEach(each => each.open = true)")
        lines = page.locator("details.claim").filter(visible=True)
        heights = [line.bounding_box()["height"] for line in lines.all()]
        assert len(heights) > 100 and max(heights) < 40
        first = lines.first
        assert not first.locator(".inside").is_visible()
        first.locator("summary").click()
        assert first.locator(".inside").is_visible() and first.locator(".chip").is_visible()
        places = [page.locator(name).bounding_box()["y"] for name in ("#in-short", "#summary", "#claims", "#figures")]
        assert places == sorted(places)
        assert complaints == []


def test_claims_are_narrowed_by_paper_verdict_and_words(browser, page_of_report):
    with opened(browser, page_of_report) as (page, complaints):
        form, said = page.locator("form.filters"), page.locator("form.filters output")
        form.locator("[name=paper]").select_option("zsmerge")
        zsmerge = [claim for claim in papers.claims() if claim.paper == "zsmerge"]
        mine = {slug(claim.id) for claim in zsmerge}
        assert set(shown(page)) == mine and said.inner_text() == f"{len(mine)} of {len(papers.claims())} claims"
        assert page.locator("#dapq").is_hidden() and page.locator("#zsmerge-checks").get_attribute("open") is not None
        form.locator("[name=verdict]").select_option("untested")
        assert set(shown(page)) == {slug(claim.id) for claim in zsmerge if claim.untested}
        form.locator("button").click()
        page.wait_for_function("document.querySelectorAll('details.claim[hidden]').length === 0")
        assert page.locator("#zsmerge-checks").get_attribute("open") is None, "what the filter opened it closed again"
        form.locator("[name=words]").fill("  figure4 REDUCTION_20 ")
        assert slug(CLAIM) in shown(page) and len(shown(page)) < 10
        form.locator("[name=words]").fill("figure4 unheard-of")
        assert shown(page) == [] and page.locator("section.paper").filter(visible=True).count() == 0
        page.locator("#in-short a.finding").first.click()
        assert page.locator("details.claim:target .inside").is_visible(), "a link leads to what was filtered away"
        assert complaints == []


def test_a_header_that_stays_and_links_that_lead_somewhere(browser, page_of_report):
    with opened(browser, page_of_report) as (page, complaints):
        page.locator("header.bar-top a", has_text="ZSMerge").click()
        heading = page.locator("#zsmerge h3").first.bounding_box()
        bar = page.locator("header.bar-top").bounding_box()
        assert bar["y"] == 0 and bar["height"] <= heading["y"] < 200

        page.locator("#zsmerge details.claim:has(.thumb) > summary").first.click()
        page.locator("#zsmerge .thumb").first.click()
        figure = page.locator("figure:target")
        assert figure.count() == 1 and figure.locator("img").get_attribute("alt") == "curve"
        assert bar["height"] <= figure.bounding_box()["y"] < DESKTOP[1]

        small = figure.locator("img").bounding_box()
        figure.locator("label").click()
        assert figure.locator("img").bounding_box()["width"] > 1.5 * small["width"]
        figure.locator("label").click()
        assert figure.locator("img").bounding_box()["width"] == small["width"]

        figure.locator("figcaption a").first.click()
        assert page.locator("details.claim:target .inside").is_visible()
        assert complaints == []


@pytest.fixture
def pages_of_models(project):
    """The folder of a report on five models, which do not fit beside each other on a phone."""
    names = ("tiny", LONG, "qwen2.5-coder-0.5b", "of-unknown-size", "large")
    for number, name in enumerate(names):
        for experiment in (EXPERIMENT, "dapq_position_vs_content"):
            size = {} if name == "of-unknown-size" else {"parameters": 10 ** (7 + number // 2)}
            tags = {"kvlab.kind": "job", "model": name, **size}
            run = tracking.create_run(database.client(), experiment, {}, tags, "job")
            run.log(
                {
                    metric: {"low": -0.4, "high": 0.8}.get(metric.rpartition("/")[2], 0.3 * number)
                    for claim in papers.claims(experiment=experiment)
                    for metric in claim.metrics
                }
            )
            run.finish()
    return report.write().parent


@pytest.mark.parametrize(
    ("size", "scheme"), [((1400, 900), "light"), (DESKTOP, "dark"), (PHONE, "light"), ((320, 640), "dark")], ids=str
)
def test_models_side_by_side_fit_and_link_to_their_pages(browser, pages_of_models, size, scheme):
    address = (pages_of_models / "report.html").as_uri()
    with opened(browser, address, size, color_scheme=scheme) as (page, complaints):
        asked_for = set(page.evaluate("performance.getEntriesByType('resource').map(each => each.name.split(':')[0])"))
        assert asked_for <= {"data"} and overflow(page) == 0
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert overflow(page) == 0
        plots = page.locator("svg.growth")
        assert plots.count() > 20 and min(plots.nth(0).bounding_box()[side] for side in ("width", "height")) > 60
        row = page.locator("details.claim:has(.by-model)").first
        assert row.locator("li.model").count() == 5
        for cell in row.locator("li.model").all():
            assert cell.locator(".mark").inner_text() in ("●", "◐", "○", "–")
        page.locator("#in-short a.finding").last.click()
        assert page.locator("details.claim:target .inside").is_visible()
        page.locator(".matrix.models tbody a").last.click()
        assert page.locator("h1").inner_text().endswith("of-unknown-size")
        assert overflow(page) == 0
        page.locator("header.bar-top a").first.click()
        assert page.locator(".matrix.models").count() == 1
        assert complaints == []


def test_claims_are_narrowed_by_what_a_model_says(browser, pages_of_models):
    """The values grow from model to model, so that what the first says of a claim is not what the last does."""
    with opened(browser, (pages_of_models / "report.html").as_uri()) as (page, complaints):
        form = page.locator("form.filters")
        found = {}
        for model in ("tiny", "large"):
            form.locator("[name=model]").select_option(label=model)
            form.locator("[name=verdict]").select_option("")
            assert set(shown(page)) == {
                slug(claim.id)
                for claim in papers.claims()
                if claim.experiment in (EXPERIMENT, "dapq_position_vs_content")
            }
            form.locator("[name=verdict]").select_option("holds")
            found[model] = set(shown(page))
        judged = [(entry.model, slug(entry.claim.id)) for entry in report.entries() if entry.state == "holds"]
        assert found == {name: {claim for model, claim in judged if model == name} for name in found}
        assert found["tiny"] != found["large"]
        form.locator("[name=model]").select_option("")
        assert set(shown(page)) == {claim for _, claim in judged}
        assert complaints == []


def test_without_any_run_the_page_is_whole_too(browser, project):
    """What `kvlab reproduce` leaves where every job failed; `kvlab report` refuses to write it."""
    address = report.save(report.entries()).as_uri()
    with opened(browser, address, PHONE) as (page, complaints):
        assert overflow(page) == 0 and page.locator(".thumb, figure").count() == 0 and complaints == []
        assert page.locator("details.claim").count() == len(papers.claims())
        assert page.locator("#in-short .of-paper").get_by_text("has been measured yet").count() == len(papers.papers())
