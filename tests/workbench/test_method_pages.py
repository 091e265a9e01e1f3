"""A page of a method says what was measured, is made of its docstring, and is whole or not there at all."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import ClassVar

import pandas as pd
import pytest
import torch
from PIL import Image
from support.commands import call, complaint
from support.paths import ROOT
from support.texts import FERRY

import kvlab
from kvlab.analyses import portraits
from kvlab.analyses.portraits import Portrait, Settings
from kvlab.errors import KvlabError
from kvlab.methods import Policy, registry
from kvlab.replays.run import replay
from kvlab.traces import shared
from kvlab.workbench import method_pages
from kvlab.workbench.method_pages import Found, PolicyDocstring

PAGES = ROOT / "docs" / "policies"


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in (("ferry", FERRY), ("other", FERRY[len(FERRY) // 3 :])):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    documents = tuple(str(folder / f"{name}.txt") for name in ("ferry", "other"))
    return Settings(documents, tokens=120, new_tokens=4, budget=0.5, budgets=(0.4, 0.6), repeats=2)


@pytest.fixture
def own_traces(tmp_path, monkeypatch):
    """Traces go into a folder of this test."""
    monkeypatch.setattr(shared, "folder", lambda: tmp_path / "traces")


def portrait(name: str, trace: kvlab.Trace, **given) -> Portrait:
    return portraits.portrait(trace, kvlab.policy(name, **given), "ferry")


# ---------------------------------------------------------------------------------------------------- what is measured


def test_what_is_stored_is_what_the_replay_keeps(random_traces):
    trace = random_traces[0]
    shown = portrait("adakv", trace, budget=60)
    replayed = replay(trace, kvlab.policy("adakv", budget=60))
    for place, layer in enumerate(trace.layers):
        for head, kept in enumerate(replayed.kept(layer)):
            assert shown.stored[place, head].nonzero()[:, 0].tolist() == kept[kept >= 0].tolist()
    assert shown.stored_entries.mean(1).tolist() == [60] * len(trace.layers)
    assert (shown.entries, shown.prompt, shown.read, shown.merged, shown.channels) == (60, 120, None, None, None)


def test_what_is_read_is_counted_by_the_steps_that_could(random_traces):
    trace = random_traces[0]
    shown = portrait("streamingllm", trace, budget=40)
    assert shown.read is not None and shown.read.shape[-1] == trace.length
    # The first tokens stay, and every token of the response is in the window of all steps from its own on.
    assert (shown.read[..., :4] == 1).all() and (shown.read[..., trace.prompt_length :] == 1).all()
    # What was the oldest of the window is read by the first step alone.
    assert shown.read[0, 0, trace.prompt_length - 36].item() == pytest.approx(1 / trace.steps)
    # The own entry comes to those that are stored.
    assert torch.allclose(shown.read_entries, torch.tensor(41.0))
    top = portrait("exact_topk", trace, budget=20)
    assert top.stored.all() and torch.allclose(top.read_entries, torch.tensor(20.0))


def test_merged_entries_and_lost_channels_are_found(random_traces):
    trace = random_traces[0]
    merged = portrait("zsmerge", trace, budget=40, residual=2).merged
    assert merged is not None and (merged.sum(-1) == 2).all()
    thin = portrait("think", trace, ratio=0.5, window=20)
    assert thin.channels is not None and thin.stored.all()
    head_dim = trace.keys.shape[-1]
    # Half of the channels are gone, but for the window's keys.
    assert thin.channels.mean(-1).flatten().tolist() == pytest.approx(
        [(100 / 2 + 20) / 120] * thin.channels[..., 0].numel()
    )
    assert thin.channels.shape[-1] == head_dim


def test_a_run_is_timed_against_the_plain_one_of_its_round(reader, settings, monkeypatch):
    ran = []

    def generate(lm, ids, steps, contender):
        ran.append(contender.name)
        slow = {"transformers": 1.0 + len(ran), "h2o": 3.0 * (1 + len(ran))}.get(contender.name, 1.0)
        return dict.fromkeys(portraits.COSTS, slow)

    monkeypatch.setattr(portraits, "generate", generate)
    names = ["knorm", "h2o", "random", "tova", "quest", "full"]
    table = portraits.costs(reader, names, settings, lambda *_: None)
    assert sorted(set(table["policy"])) == sorted(names) and len(table) == len(names) * len(portraits.COSTS)
    # Two groups, each with a warm-up and two rounds; the rounds go back and forth.
    group = ["transformers", *names[:5]]
    assert ran == [*group, *group, *group[::-1], *["transformers", "full"] * 2, "full", "transformers"]
    h2o = table.query("policy == 'h2o' and metric == 'time_to_first_token'").iloc[0]
    # Its runs are the 9th and the 16th, the plain ones the 7th and the 18th.
    assert (h2o["low"], h2o["high"]) == pytest.approx((3 * 17 / 19, 3 * 10 / 8))


# ---------------------------------------------------------------------------------------------------- what is written


@pytest.fixture
def found(settings) -> Found:
    rows = [
        ["knorm", budget, measure, value, value - 0.01, value + 0.02]
        for budget in settings.budgets
        for measure, value in {
            "recall": budget,
            "mass_lost": 0.25,
            "output_error": 0.5,
            "stored_bytes": 3 * 2**20,
        }.items()
    ]
    rows += [
        ["snapkv", budget, measure, 0.7, 0.6, 0.8] for budget in settings.budgets for measure in portraits.MEASURES
    ]
    rows += [["knorm", budget, "read_bytes", 2**20, 0, 0] for budget in settings.budgets]
    rows += [["full", None, measure, 1.0, 1.0, 1.0] for measure in portraits.MEASURES]
    qualities = pd.DataFrame(rows, columns=["policy", "budget", "measure", "value", "low", "high"])
    costs = pd.DataFrame(
        [["knorm", "time_to_first_token", 1.25, 1.1, 1.4], ["knorm", "time_per_output_token", 0.75, 0.7, 0.8]],
        columns=["policy", "metric", "ratio", "low", "high"],
    )
    stored = torch.zeros(2, 2, 120, dtype=torch.bool)
    shown = Portrait(kvlab.policy("knorm", budget=0.5), "a text", 60, (0, 1), stored)
    return Found("a-model@12345678", settings, {"knorm": shown}, qualities, costs)


def test_a_page_says_what_was_measured(found):
    page = method_pages.page("knorm", found)
    lines = page.splitlines()
    assert lines[0] == "# knorm" and "L2 Norm-Based Strategy" in lines[2]
    assert "| `budget` | – | entries for each layer and KV head, or a fraction of the prompt. |" in lines
    assert "| first token | 1.25 | 1.10-1.40 |" in lines and "| decoding step | 0.75 | 0.70-0.80 |" in lines
    assert "| 0.4 | **knorm** | 0.400 (0.390-0.420) | 0.250 (0.240-0.270) | 0.500 (0.490-0.520) | 3.0 | 1.0 |" in lines
    assert "|  | snapkv | 0.700 (0.600-0.800) |" in page and "| none | full | 1.000 (1.000-1.000) |" in page
    assert "(figures/knorm.png)" in page
    assert "`kvlab bench decode --policies knorm --budget 0.5 --contexts 120 --new-tokens 4 --repeats 2`" in page
    last = f"Made by `kvlab pages --only knorm --repeats 2` with a-model@12345678 and kvlab {kvlab.__version__}."
    assert lines[-1] == last and not re.search(r"20\d\d-\d\d-\d\d", page)


def test_a_page_without_rounds_names_the_command_that_measures_times(found):
    untimed = dataclasses.replace(found.settings, repeats=0)
    page = method_pages.page("knorm", dataclasses.replace(found, settings=untimed, costs=found.costs[:0]))
    assert "first token" not in page and "Times depend on the machine, and were not measured here." in page
    assert "--new-tokens 4 --repeats 3` measures this method alone." in page
    assert page.splitlines()[-1].startswith("Made by `kvlab pages --only knorm --repeats 0` with a-model@12345678")


def test_what_is_not_the_default_is_said(found):
    drawn = dataclasses.replace(found.portraits["knorm"], policy=kvlab.policy("random", budget=0.5, seed=3))
    rest = {
        name: table.replace({"policy": {"knorm": "random"}})
        for name, table in (("costs", found.costs), ("qualities", found.qualities))
    }
    page = method_pages.page("random", dataclasses.replace(found, portraits={"random": drawn}, **rest))
    assert "Here it is measured with `seed=3`." in page and "alone, with its defaults." in page
    assert "Here it is measured" not in method_pages.page("knorm", found)


@pytest.mark.parametrize("name", kvlab.policies())
def test_every_docstring_makes_a_page(name):
    told = PolicyDocstring.of(registry()[name])
    assert told.paper and told.cost.endswith((".", ")"))
    sentences = method_pages._END.split(told.idea)
    assert len(sentences) >= 3 and all(each[0].isupper() or each[0] in '`"' for each in sentences), sentences
    listed = [each.strip() for names in told.parameters for each in names.split(",")]
    assert listed == list(dict.fromkeys(listed)) and set(listed) == set(registry()[name].model_fields)


def test_a_docstring_that_tells_too_little_is_refused():
    class Mute(Policy):
        """Keeps what it likes."""

        name: ClassVar[str] = "mute"

    with pytest.raises(KvlabError, match="the docstring of mute"):
        PolicyDocstring.of(Mute)


def test_pages_and_pictures_are_written_and_the_work_is_told(reader, settings, own_traces, tmp_path):
    done, names, out = [], ["zsmerge", "think", "full"], tmp_path / "pages"
    written = method_pages.write(reader, names, out, settings, lambda phase, fed: done.append(fed))
    assert [path.name for path in written] == ["zsmerge.md", "think.md", "full.md"]
    assert sum(done) == portraits.work(names, settings)
    assert sorted(path.name for path in out.rglob("*")) == sorted(
        ["figures", *(f"{name}.{end}" for name in names for end in ("md", "png"))]
    )
    sizes = [Image.open(out / "figures" / f"{name}.png").size for name in names]
    # A second panel for what is read, or for channels.
    assert sizes[0][1] == sizes[1][1] > sizes[2][1]
    text = (out / "zsmerge.md").read_text(encoding="utf-8")
    assert "--policies zsmerge --budget 0.5 " in text and "| 0.6 | **zsmerge** |" in text
    assert "--budget" not in (out / "full.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("where", ["_pictures", "page"])
def test_nothing_half_written_remains(where, reader, settings, own_traces, tmp_path, monkeypatch):
    out = tmp_path / "pages"
    out.mkdir()
    (out / "knorm.md").write_text("as it was", encoding="utf-8")

    def fail(*_):
        raise KvlabError("no more")

    monkeypatch.setattr(method_pages, where, fail)
    with pytest.raises(KvlabError, match="no more"):
        method_pages.write(reader, ["knorm", "full"], out, settings)
    assert [path.name for path in out.rglob("*")] == ["knorm.md"]
    assert (out / "knorm.md").read_text(encoding="utf-8") == "as it was"


def test_a_mistake_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kvlab.inputs.models.load", lambda *_: pytest.fail("the model is loaded before the names are read")
    )
    assert "snapkv" in complaint(capsys, "pages", "--only", "snapk", "--out", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "is a file" in complaint(capsys, "pages", "--only", "snapkv", "--out", str(tmp_path / "file"))


def test_the_command_writes_what_it_is_asked_for(capsys, reader, settings, own_traces, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda name: reader)
    monkeypatch.setattr(portraits, "Settings", lambda repeats: dataclasses.replace(settings, repeats=repeats))
    code, out, _ = call(capsys, "pages", "--only", "random", "--repeats", "0", "--out", str(tmp_path / "p"))
    assert code == 0 and out.split() == [str(tmp_path / "p" / "random.md")]
    picture = Image.open(io.BytesIO((tmp_path / "p" / "figures" / "random.png").read_bytes()))
    assert picture.format == "PNG" and "Software" not in picture.info


# ---------------------------------------------------------------------------------------------------- the repository


@pytest.mark.parametrize("name", kvlab.policies())
def test_every_policy_has_a_page_with_a_small_figure(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    told = PolicyDocstring.of(registry()[name])
    assert text.startswith(f"# {name}\n") and told.paper in text and told.idea in text
    assert 0 < (PAGES / "figures" / f"{name}.png").stat().st_size < 60_000


def test_no_page_is_of_a_method_that_is_gone():
    pages = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*") if path.is_file()}
    assert pages == {form.format(name) for name in kvlab.policies() for form in ("{}.md", "figures/{}.png")}
