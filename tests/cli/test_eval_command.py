"""`kvlab eval`: a table on stdout, answers in a file, a run in MLflow; mistakes are one sentence."""

from __future__ import annotations

import pandas
import pytest
from support.commands import call, complaint

from kvlab import evaluation
from kvlab.workbench.store import tracking

NEEDLE = ["eval", "needle", "-p", "lengths=[144]", "-p", "depths=[0.0, 0.5, 1.0]", "--limit", "2"]


@pytest.fixture
def loaded(lm, monkeypatch):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda *_: lm)


def test_needles_from_the_command_line(loaded, project, capsys, tmp_path):
    code, out, err = call(capsys, *NEEDLE, "--policies", "streamingllm,snapkv", "--budgets", "48,0.5")
    assert code == 0, err
    assert [line.count("needle") for line in out.splitlines() if "needle" in line] == [1] * 5
    assert sum("streamingllm" in line for line in out.splitlines()) == 2
    path = project / "eval" / "needle.jsonl"
    assert str(path) in err and path.with_suffix(".png").stat().st_size > 10_000
    found = evaluation.read(path)
    assert len(found) == 2 * 5 and {answer.policy for answer in found} == {"full", "streamingllm", "snapkv"}

    store = tracking.client()
    (run,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
    rows = evaluation.summary(found).set_index(["policy", "budget"])
    assert run.data.metrics["needle/snapkv/0.5/score"] == pytest.approx(rows.loc[("snapkv", 0.5), "score"])
    assert run.data.metrics["needle/full/kv_bytes"] == pytest.approx(rows.loc["full"].kv_bytes.iloc[0])
    folder = store.download_artifacts(run.info.run_id, "tables", str(tmp_path))
    assert len(pandas.read_parquet(f"{folder}/answers.parquet")) == 10
    assert {file.path for file in store.list_artifacts(run.info.run_id, "figures")} >= {"figures/needle_heatmap.png"}

    before = path.read_bytes()
    code, again, _ = call(capsys, *NEEDLE, "--policies", "streamingllm,snapkv", "--budgets", "48,0.5", "--no-log")
    assert code == 0 and path.read_bytes() == before, "what is done is not done again"
    assert again == out


@pytest.mark.parametrize(
    "arguments, code, match",
    [
        (["needl"], 1, "did you mean 'needle'"),
        (["needle", "-p", "length=[256]"], 1, "did you mean 'lengths'"),
        (["needle", "-p", "lengths=[-5]"], 1, "needle: lengths"),
        (["needle", "-p", "lengths"], 2, "key=value"),
        (["needle", "--policies", "snapk"], 1, "did you mean 'snapkv'"),
        (["needle", "--budgets", "many"], 2, "--budgets takes numbers"),
        (["needle", "--policies", "snapkv", "--budgets", "8"], 1, "budget 8 is below"),
        (["needle", "--compress-at", "question"], 1, "neither 'prompt' nor 'context'"),
        (["needle", "--limit", "0"], 2, "greater than or equal to 1"),
        (["longbench"], 1, "folder"),
    ],
)
def test_a_mistake_is_one_sentence(loaded, project, capsys, arguments, code, match):
    assert match in complaint(capsys, "eval", *arguments, code=code)
