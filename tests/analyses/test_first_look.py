"""What the first notebooks say in numbers and words follows from the replays."""

from __future__ import annotations

import re

import pytest

import kvlab
from kvlab.analyses import exploring, first_look
from kvlab.errors import KvlabError


@pytest.fixture(scope="module")
def results(random_traces):
    return kvlab.replay(random_traces[0], ["streamingllm", "h2o"], budgets=[24])


def test_the_worst_query_is_told_in_one_line(results):
    (streaming, _) = results
    worst = first_look.worst(streaming)
    assert worst.mass_lost == float(streaming.mass_lost.max())
    assert float(streaming.mass_lost[worst.layer, worst.head, worst.step - 1]) == worst.mass_lost
    assert str(first_look.LostQuery(3, 1, 20, 0.456)) == "layer 3, head 1, step 20: 46% of its attention is gone"


def test_a_trace_without_tokens_has_none_to_show(random_traces):
    captured = random_traces[0]
    trace = kvlab.Trace.from_tensors(
        captured.queries, captured.keys, captured.values, captured.prompt_length, scaling=captured.scaling
    )
    result = kvlab.replay(trace, kvlab.policy("streamingllm", budget=24))
    with pytest.raises(KvlabError, match="its tokens are not known"):
        first_look.lost_tokens("lm", trace, result, first_look.worst(result))


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


def counted(sentences: list[str]) -> list[str]:
    """The sentences that a reader counts, however they were put into the list; each begins and ends as one does."""
    found = re.split(r"(?<=[.?]) (?=\S)", " ".join(filter(None, sentences)))
    assert all(re.fullmatch(r"\S.*\.", sentence) and "  " not in sentence for sentence in found), found
    return found


def test_the_story_of_the_first_picture_follows_from_the_replays(results):
    (streaming, h2o) = results
    lost = streaming.mass_lost.numpy()
    heads = {(layer, head): lost[layer, head].mean() for layer in range(len(lost)) for head in range(lost.shape[1])}
    (layer, head), most = max(heads.items(), key=lambda item: item[1])
    tenth = sum(sorted(heads.values())[-max(1, len(heads) // 10) :]) / sum(heads.values())
    along, where, who, _, _, _ = counted(first_look.story(streaming, results))
    assert along.startswith(f"streamingllm loses {lost.mean():.1%} of the response's attention")
    assert f"worst tenth of the heads has {tenth:.0%}" in where and where.endswith(
        f"head {head} of layer {layer} loses {most:.0%} of its own."
    )
    half = lost.shape[-1] // 2
    halves = lost[..., :half].mean(), lost[..., half:].mean()
    assert along.endswith(f"{halves[0]:.1%} in its first half and {halves[1]:.1%} in its second.")
    assert float(h2o.mass_lost.mean()) < lost.mean()
    assert f"h2o ({float(h2o.mass_lost.mean()):.1%}) loses least and streamingllm ({lost.mean():.1%}) most" in who


def test_the_story_of_two_policies_follows_from_their_layers(results):
    (streaming, h2o) = results
    left, right = (one.mass_lost.mean((1, 2)).tolist() for one in results)
    found = exploring.lost_by_layer([streaming, h2o])
    means, layers, _, _, _ = counted(exploring.story(found, "streamingllm", "h2o"))
    lower = sum(b < a for a, b in zip(left, right, strict=True))
    assert means.endswith(f"h2o loses less in {lower} of {len(left)} layers.")
    assert f"most in layer {left.index(max(left))} ({max(left):.0%})" in layers
    apart = [abs(a - b) for a, b in zip(left, right, strict=True)]
    assert f"differ most in layer {apart.index(max(apart))} (" in layers
