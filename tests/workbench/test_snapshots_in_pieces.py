"""A ledger that is kept in pieces: several stores, several profiles, and claims that come and go."""

from __future__ import annotations

import pandas
import pytest
from support.commands import call
from support.projects import EXPERIMENT, blank_store, experiment
from support.report_pages import CLAIM
from support.runs import job

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench.report import page, snapshots
from kvlab.workbench.report.evidence import evidence
from kvlab.workbench.report.ledger_models import subjects
from kvlab.workbench.store import database, tracking

OTHER = "zsmerge.figure4.reduction_10"


def other_store(project) -> None:
    """Go on with an empty store, as on another day or another machine."""
    (project / "mlruns" / "mlflow.db").write_bytes(blank_store())


def lines(path) -> pandas.DataFrame:
    return pandas.read_csv(path, dtype=str, keep_default_na=False).set_index("claim")


def test_what_another_store_measured_stays_with_all_that_it_says(project, tmp_path):
    folder = tmp_path / "ledger"
    job(0.6, hardware="one machine")
    (first,) = snapshots.keep(folder)
    before = lines(first.path).loc[CLAIM]
    other_store(project)
    job(0.4, metric="reduction/0.10", hardware="another machine")
    (second,) = snapshots.keep(folder)
    after = lines(second.path)
    assert (second.replaced, second.stayed, second.dropped) == (1, 1, [])
    assert after.loc[CLAIM].equals(before) and before["machine"] == "one machine"
    assert after.loc[OTHER][["value", "machine"]].tolist() == ["0.4", "another machine"]
    assert list(after.index) == [claim.id for claim in papers.claims()]


def test_a_store_without_a_run_of_a_claim_leaves_what_was_said_of_it(project, tmp_path):
    """Its numbers and why it is not measured may come from a run that lacked a part."""
    folder = tmp_path / "ledger"
    job(0.6)
    path = snapshots.keep(folder)[0].path
    before = lines(path)
    before.loc[OTHER, ["value", "why"]] = ["0.25", "too short a prompt"]
    before.reset_index()[list(pandas.read_csv(path, nrows=0).columns)].to_csv(path, index=False)
    other_store(project)
    job(0.5)
    snapshots.keep(folder)
    after = lines(path)
    assert after.loc[CLAIM, "value"] == "0.5" and after.loc[OTHER].equals(before.loc[OTHER])
    job(0.4, metric="reduction/0.10")
    snapshots.keep(folder)
    assert lines(path).loc[OTHER, "value"] == "0.4"


def test_keeping_again_changes_nothing_and_a_newer_run_replaces(project, tmp_path):
    job(0.6)
    path = snapshots.keep(tmp_path / "ledger")[0].path
    once = path.read_bytes()
    snapshots.keep(tmp_path / "ledger")
    assert path.read_bytes() == once
    job(0.3)
    snapshots.keep(tmp_path / "ledger")
    assert lines(path).loc[CLAIM][["value", "verdict"]].tolist() == ["0.3", "holds in direction only"]


@pytest.mark.parametrize("between", [True, False], ids=["kept before", "in one store"])
def test_each_profile_has_its_line_and_the_full_one_is_shown(project, tmp_path, between):
    folder = tmp_path / "ledger"
    job(0.3, profile="full")
    if between:
        snapshots.keep(folder)
        other_store(project)
    job(0.6, profile="quick")
    path = snapshots.keep(folder)[0].path

    def there() -> list[list[str]]:
        return lines(path).loc[CLAIM, ["value", "profile"]].to_numpy().tolist()

    def shown(profile: str | None = None) -> tuple[float | None, str]:
        (entry,) = (entry for entry in snapshots.kept(folder, profile=profile) if entry.claim.id == CLAIM)
        return entry.verdict.value, entry.origin.profile

    assert there() == [["0.3", "full"], ["0.6", "quick"]]
    assert (shown(), shown("quick"), shown("full")) == ((0.3, "full"), (0.6, "quick"), (0.3, "full"))
    with pytest.raises(KvlabError, match=r"it has: toy@0 \(full profile\), toy@0 \(quick profile\)"):
        snapshots.kept(folder, profile="gpu")
    job(0.2, profile="full")
    snapshots.keep(folder, profile="quick")
    assert there() == [["0.3", "full"], ["0.6", "quick"]]
    snapshots.keep(folder)
    assert there() == [["0.2", "full"], ["0.6", "quick"]]


def test_models_are_compared_by_the_profile_that_all_have(project, tmp_path):
    folder = tmp_path / "ledger"
    for model, profile, value in (("a@0", "full", 0.3), ("a@0", "quick", 0.6), ("b@0", "quick", 0.4)):
        job(value, model=model, profile=profile)
    snapshots.keep(folder)

    def of_both() -> dict[str, tuple[str, str]]:
        return {
            e.model: (e.origin.profile, e.compared.origin.profile)
            for e in snapshots.kept(folder)
            if e.claim.id == CLAIM
        }

    assert of_both() == {"a@0": ("full", "quick"), "b@0": ("quick", "quick")}
    job(0.5, model="b@0", profile="full")
    snapshots.keep(folder)
    assert of_both() == {"a@0": ("full", "full"), "b@0": ("full", "full")}


def test_a_run_is_compared_with_the_kept_one_of_its_profile(project, tmp_path, capsys):
    """Who checks an installation with the quick profile is not told how it differs from the full one."""
    folder = tmp_path / "ledger"
    job(-0.3, profile="full")
    job(0.6, profile="quick")
    snapshots.keep(folder)
    assert call(capsys, "report", "--compare", str(folder))[0] == 0
    other_store(project)
    job(0.61, profile="quick")
    assert call(capsys, "report", "--compare", str(folder))[0] == 0
    other_store(project)
    job(0.61, profile="full")
    code, out, _ = call(capsys, "report", "--compare", str(folder))
    assert code == 3 and "was fails, is holds in direction only; value 0.610" in out and "Of 1 kept verdicts" in out
    other_store(project)
    job(0.61, profile="gpu")
    assert "other profile: gpu, kept full" in call(capsys, "report", "--compare", str(folder))[1]


def test_a_run_that_lacks_a_number_does_not_take_a_verdict_away(project, tmp_path):
    """A claim on a trend needs two numbers; what is not given for it (`provided`) is a result, though."""
    trend = "zsmerge.figure4.reduction_50"
    whole = tracking.create_run(
        database.client(), EXPERIMENT, {}, {"kvlab.kind": "job", "kvlab.profile": "quick", "model": "toy@0"}, "whole"
    )
    whole.log({"reduction/0.50": 0.9, "growth/0.20_to_0.50": 0.3}, {"growth/0.20_to_0.50": (0.2, 0.4)})
    whole.finish()
    path = snapshots.keep(tmp_path / "ledger")[0].path
    before = lines(path).loc[trend]
    assert before["verdict"] == "holds in direction only"
    other_store(project)
    job(0.8, metric="reduction/0.50")
    snapshots.keep(tmp_path / "ledger")
    assert lines(path).loc[trend].equals(before)


def test_claims_that_are_gone_are_dropped_with_a_note(project, tmp_path, capsys):
    job(0.6)
    folder = tmp_path / "ledger"
    path = snapshots.keep(folder)[0].path
    path.write_text(path.read_text().replace(OTHER, "zsmerge.figure4.long_gone"))
    code, out, _ = call(capsys, "report", "--keep", str(folder))
    assert code == 0 and "dropped zsmerge.figure4.long_gone: there is no such claim any more" in out
    assert f"{path}: from this store 1, as kept before 0" in out
    assert "zsmerge.figure4.long_gone" not in path.read_text() and OTHER in lines(path).index
    assert "dropped" not in call(capsys, "report", "--keep", str(folder))[1]


def test_a_claim_that_no_experiment_measures_any_more_keeps_no_number(project, tmp_path):
    """It was measured once, and its experiment has ended since."""
    job(0.6)
    folder = tmp_path / "ledger"
    path = snapshots.keep(folder)[0].path
    untested = next(claim for claim in papers.claims() if claim.untested)
    before = lines(path)
    measured = ["verdict", "value", "profile", "signature"]
    before.loc[untested.id, measured] = before.loc[CLAIM, measured]
    before.reset_index()[list(pandas.read_csv(path, nrows=0).columns)].to_csv(path, index=False)
    snapshots.keep(folder)
    after = lines(path)
    assert after.loc[untested.id, ["verdict", "value", "profile"]].tolist() == ["not measured", "", ""]
    assert after.loc[untested.id, "why"] == untested.untested and after.loc[CLAIM].equals(before.loc[CLAIM])


def test_models_do_not_mix_in_one_file(project, tmp_path):
    job(0.6, model="toy@0")
    path = snapshots.keep(tmp_path / "ledger")[0].path
    before = path.read_bytes()
    other_store(project)
    job(0.6, model="toy@1")
    with pytest.raises(KvlabError, match="is of the model 'toy@0', not of 'toy@1'"):
        snapshots.keep(tmp_path / "ledger")
    assert path.read_bytes() == before
    job(0.6, model="toy@2")
    with pytest.raises(KvlabError, match=r"is of the model 'toy@\d', not of 'toy@\d'"):
        snapshots.keep(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_two_files_of_one_model_are_not_read_together(project, tmp_path):
    """One of them would be left out without a word."""
    job(0.6)
    path = snapshots.keep(tmp_path / "ledger")[0].path
    path.with_name("copy.csv").write_bytes(path.read_bytes())
    with pytest.raises(KvlabError, match="as another ledger in"):
        snapshots.kept(tmp_path / "ledger")


def test_older_ledgers_say_nothing_of_sizes_and_are_read(project, tmp_path):
    job(0.6, parameters=26_854, tables="none")
    path = snapshots.keep(tmp_path / "ledger")[0].path
    (subject,) = subjects(snapshots.read(path))
    assert subject.parameters == 26_854
    lines(path).reset_index().drop(columns=snapshots.LATER).to_csv(path, index=False)
    (subject,) = subjects(snapshots.read(path))
    assert subject.parameters is None and len(snapshots.read(path)) == len(papers.claims())


# ---------------------------------------------------------------- sentences


def test_a_kept_ledger_says_of_each_figure_what_its_run_said(project, tmp_path):
    """Made from the kept numbers; files of sentences that an older version kept are left alone."""
    shown = job(0.6)
    run = tracking.Run(database.client(), shown, EXPERIMENT)
    run.log({"reduction/0.20": 0.6}, {"reduction/0.20": (0.5, 0.7)})
    run.record("figure_4")
    folder = tmp_path / "ledger"
    snapshots.keep(folder)
    (folder / "stories").mkdir()
    (folder / "stories" / "toy.csv").write_text("not,a,ledger\n")
    (live,), (kept,) = (evidence(judged).values() for judged in (page.measured(), snapshots.kept(folder)))
    assert kept.sentences == live.sentences and len(kept.sentences["figure_4"]) == 1
    assert "0.600 (0.500 to 0.700), share of the error of eviction." in kept.sentences["figure_4"][0]
    text = page.save(snapshots.kept(folder), tmp_path / "report").read_text()
    said = "0.600 (0.500 to 0.700), share of the error of eviction."
    assert text.count(said) == 3, "in short, at the claim and at the run"


# ---------------------------------------------------------------- experiments that no claim rests on


def lonely(sentence: str, profile: str = "quick", model: str = "toy@0") -> str:
    """A job of an experiment that no claim rests on, which tells a figure; returns the run's id."""
    tags = {"kvlab.kind": "job", "kvlab.profile": profile, "model": model, "hardware": "one machine"}
    run = tracking.create_run(database.client(), "lonely", {}, tags | {"kvlab.commit": "c0ffee"}, "lonely")
    run.tell("front", [sentence])
    run.finish()
    return run.id


def test_the_report_of_a_store_shows_the_runs_that_no_claim_rests_on(project, tmp_path):
    experiment(project, "lonely")
    job(0.6), lonely("Another model's.", model="other@1"), lonely("Not of this profile.", profile="full")
    run = lonely("Of no claim.")
    (item,) = [item for item in evidence(page.measured()).values() if item.experiment == "lonely"]
    assert item.run and item.run.info.run_id == run and item.sentences == {"front": ["Of no claim."]}
    text = page.write(tmp_path / "report").read_text()
    assert "Of no claim." in text and "no claim rests on it" in text and "Not of this" not in text
