"""What the first notebooks say in numbers and words follows from the replays."""

from __future__ import annotations

import pytest

import kvlab
from kvlab.analyses import exploring, first_look
from kvlab.analyses.morphkv import windows
from kvlab.errors import KvlabError


@pytest.fixture(scope="module")
def results(random_traces):
    return kvlab.replay(random_traces[0], ["streamingllm", "h2o"], budgets=[24])


def test_the_worst_query_is_told_in_one_line(results):
    (streaming, _) = results
    worst = first_look.worst(streaming)
    assert worst.mass_lost == float(streaming.mass_lost.max())
    assert float(streaming.mass_lost[worst.layer, worst.head, worst.step - 1]) == worst.mass_lost
    assert str(first_look.Place(3, 1, 20, 0.456)) == "layer 3, head 1, step 20: 46% of its attention is gone"


def test_a_trace_without_tokens_has_none_to_show(random_traces):
    captured = random_traces[0]
    trace = kvlab.Trace.from_tensors(
        captured.queries, captured.keys, captured.values, captured.prompt_length, scaling=captured.scaling
    )
    result = kvlab.replay(trace, kvlab.policy("streamingllm", budget=24))
    with pytest.raises(KvlabError, match="its tokens are not known"):
        first_look.lost_tokens("lm", trace, result, first_look.worst(result))
    with pytest.raises(KvlabError, match="its tokens are not known"):
        windows.repetition(trace)


def test_three_measures_and_the_bytes_are_told_line_by_line(random_traces, results):
    (_, h2o) = results
    full = kvlab.replay(random_traces[0], "full")
    lines = first_look.in_words(h2o, full).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "       recall",
        "    mass_lost",
        " output_error",
        "       stored",
    ]
    assert lines[1].endswith(f" {h2o.summary['mass_lost']:.3f}")
    mebibytes = [replay.summary["stored_bytes"] / 2**20 for replay in (h2o, full)]
    assert lines[3].endswith(f"{mebibytes[0]:.1f} MiB of {mebibytes[1]:.1f} MiB") and mebibytes[0] < mebibytes[1]


def test_every_policy_has_its_three_measures(results):
    findings = first_look.by_policy(results)
    assert set(findings.metrics) == {
        f"{measure}/{name}" for name in ("streamingllm", "h2o") for measure in ("recall", "mass_lost", "output_error")
    }
    (_, h2o) = results
    assert findings.metrics["output_error/h2o"] == pytest.approx(float(h2o.output_error.mean()))


def test_attention_lost_by_layer_averages_heads_and_steps(results):
    findings = exploring.lost_by_layer(list(results))
    assert len(findings.table) == 2 * 2
    for result in results:
        rows = findings.table[findings.table["policy"] == result.policy.name].set_index("layer")["mass_lost"]
        assert rows.tolist() == pytest.approx([float(layer.mean()) for layer in result.mass_lost])
        assert findings.metrics[f"mass_lost/{result.policy.name}"] == pytest.approx(float(result.mass_lost.mean()))
