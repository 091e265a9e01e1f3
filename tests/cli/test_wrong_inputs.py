"""What users hand over that is not quite right: taken where its meaning is plain, else told in one sentence."""

import numpy as np
import pytest
import torch

import kvlab
from kvlab.errors import KvlabError, whole
from kvlab.inputs import models
from kvlab.traces import retrieval_heads
from kvlab.traces import shared as captures

IDS = torch.arange(3, 43)
POLICY = kvlab.policy("streamingllm", budget=12)


@pytest.fixture(scope="module")
def trace(tiny):
    return kvlab.capture(tiny(), IDS, new_tokens=3)


@pytest.fixture(scope="module")
def saved(trace, tmp_path_factory):
    return trace.save(tmp_path_factory.mktemp("traces") / "tiny.safetensors")


# A model, with or without what kvlab.load put around it


def test_everything_takes_a_model_or_its_lm(tiny, trace, own_home):
    lm = tiny()
    alone, shared = kvlab.capture(lm.model, IDS, 3), captures.shared(lm.model, IDS, 3)
    assert torch.equal(alone.keys, trace.keys) and torch.equal(shared.keys, trace.keys)
    with kvlab.compress(lm, POLICY) as session:
        lm.model.generate(IDS[None], max_new_tokens=3, do_sample=False)
    assert session.model is lm.model and session.kv_bytes
    both = [kvlab.fidelity(model, POLICY, IDS, new_tokens=3).summary for model in (lm, lm.model)]
    assert both[0] == both[1]
    both = [kvlab.closed_against_open(model, POLICY, IDS, new_tokens=3).table for model in (lm, lm.model)]
    assert both[0].equals(both[1])


def test_an_lm_brings_its_tokenizer_into_a_session(lm):
    sentence = kvlab.policy("dapq", budget=64, content="sentence")
    ids = lm.encode("a few words", chat=False)
    with kvlab.compress(lm, sentence) as session:
        lm.model.generate(ids.repeat(1, 40), max_new_tokens=2, do_sample=False)
    assert session.kept(layer=0).shape[1] <= 64 + 2
    with kvlab.compress(lm.model, sentence), pytest.raises(KvlabError, match="need a tokenizer"):
        lm.model.generate(ids.repeat(1, 40), max_new_tokens=2, do_sample=False)


def test_a_model_alone_has_no_tokenizer(tiny):
    model = tiny().model
    for call in (
        lambda: kvlab.capture(model, "a text"),
        lambda: kvlab.fidelity(model, POLICY, "a text"),
        lambda: kvlab.closed_against_open(model, POLICY, "a text"),
    ):
        with pytest.raises(KvlabError, match="came without its tokenizer: give token ids instead of text"):
            call()
    with pytest.raises(KvlabError, match="has no tokenizer"):
        retrieval_heads.measure(model, 40, 1)


def test_the_signature_of_a_model_alone_is_that_of_its_weights(tiny):
    first, second = (models.random_lm("tiny-llama-gqa", seed=seed).model for seed in (0, 1))
    names = {models.lm_of(model).signature for model in (first, second)}
    assert len(names) == 2 and models.lm_of(first).signature == models.lm_of(first).signature
    with torch.no_grad():
        first.model.embed_tokens.weight[7, 0] += 1
    assert models.lm_of(first).signature not in names


@pytest.mark.parametrize("given", ["smollm2-135m", None, 3, torch.nn.Linear(2, 2)], ids=repr)
def test_what_is_no_model(given):
    for call in (
        lambda: kvlab.capture(given, IDS),
        lambda: kvlab.fidelity(given, POLICY, IDS),
        lambda: kvlab.closed_against_open(given, POLICY, IDS),
        lambda: retrieval_heads.measure(given),
    ):
        with pytest.raises(KvlabError, match=r"a model is what kvlab\.load gives, or a transformers model"):
            call()


def test_a_part_of_a_model(tiny):
    with pytest.raises(KvlabError, match="a LlamaModel gives no logits"):
        kvlab.capture(tiny().model.model, IDS)


def test_tables_are_not_learnt_without_a_tokenizer(tiny, tmp_path):
    from kvlab import compile as compiling

    with pytest.raises(KvlabError, match="has no tokenizer, so nothing can be learnt from texts"):
        compiling.measure(tiny(), compiling.MarginalSettings(), [], tmp_path / "log.jsonl")
    assert not list(tmp_path.iterdir())


# Traces by their path


def test_replay_and_explore_take_paths(trace, saved):
    expected = dict(kvlab.replay(trace, POLICY).summary)
    for path in (saved, str(saved)):
        assert dict(kvlab.replay(path, POLICY).summary) == expected
        assert kvlab.explore(path, POLICY, "random", budget=12).trace.signature == trace.signature
    several = kvlab.replay([saved, trace], "streamingllm", budgets=[12])
    assert len(several) == 2 and several.summary.recall.nunique() == 1


@pytest.mark.parametrize(
    "given, told",
    [("none.safetensors", "there is no trace at none.safetensors"), (None, "not None"), (POLICY, "not streamingllm")],
    ids=repr,
)
def test_what_is_no_trace(given, told):
    for call in (
        lambda: kvlab.replay(given, POLICY),
        lambda: kvlab.replay([given], POLICY),
        lambda: kvlab.explore(given),
    ):
        with pytest.raises(KvlabError, match=told):
            call()


def test_arrays_that_are_no_tensors():
    with pytest.raises(KvlabError, match=r"queries must be a torch tensor .*not ndarray"):
        kvlab.Trace.from_tensors(*[np.zeros((1, 1, 4, 2))] * 3, 3)


# Numbers


@pytest.mark.parametrize("wrong", [1.5, "8", True, None])
def test_numbers_that_are_not_whole(tiny, trace, wrong):
    lm = tiny()
    for call in (
        lambda: kvlab.capture(lm, IDS, new_tokens=wrong),
        lambda: kvlab.capture(lm, IDS, 3, window=wrong),
        lambda: kvlab.fidelity(lm, POLICY, IDS, new_tokens=wrong),
        lambda: kvlab.closed_against_open(lm, POLICY, IDS, new_tokens=wrong),
        lambda: kvlab.compress(lm, POLICY, max_new_tokens=wrong),
        lambda: retrieval_heads.measure(lm, needles=wrong),
        lambda: kvlab.replay(trace, POLICY).kept(wrong),
    ):
        with pytest.raises(KvlabError, match=f"must be a whole number, and is {wrong!r}"):
            call()


def test_numbers_of_other_libraries_are_whole(tiny):
    assert whole("n", np.int64(3)) == whole("n", torch.tensor(3)) == 3
    assert kvlab.capture(tiny(), IDS, new_tokens=np.int32(2)).steps == 2


def test_a_number_is_no_prompt(tiny):
    for call in (lambda: kvlab.capture(tiny(), 3), lambda: kvlab.fidelity(tiny(), POLICY, 3)):
        with pytest.raises(KvlabError, match="a text, a Document or token ids, and not the number 3"):
            call()


@pytest.mark.parametrize("wrong, meant", [("0.2", "0.2"), ("128", "128"), ("64.0", "64")])
def test_a_budget_in_quotes(wrong, meant):
    with pytest.raises(KvlabError, match=rf"or a share of the prompt, such as 0\.2; did you mean budget={meant}\?$"):
        kvlab.policy("snapkv", budget=wrong)


def test_other_parameters_that_are_nearly_right():
    for given in ("8", 8.0):
        with pytest.raises(KvlabError, match=r"did you mean window=8\?"):
            kvlab.policy("snapkv", budget=64, window=given)
    with pytest.raises(KvlabError, match=r"share of the prompt, such as 0\.2$"):
        kvlab.policy("snapkv", budget="many")


@pytest.mark.parametrize("budgets", [20, "20", []])
def test_budgets_are_a_list(trace, budgets):
    with pytest.raises(KvlabError, match="budgets is a list of at least one"):
        kvlab.replay(trace, "streamingllm", budgets=budgets)


# Names


def test_an_unknown_policy_lists_all():
    for name in ("nonsense", "snapk"):
        with pytest.raises(KvlabError) as told:
            kvlab.policy(name, budget=64)
        assert all(known in str(told.value) for known in kvlab.policies())
    with pytest.raises(KvlabError, match=r"did you mean 'snapkv'\? "):
        kvlab.policy("SnapKV", budget=64)


@pytest.mark.parametrize("wrong", [3, None, ["snapkv"]])
def test_what_is_no_policy(trace, wrong):
    with pytest.raises(KvlabError, match="a policy is a name, such as 'snapkv'"):
        kvlab.policy(wrong)
    with pytest.raises(KvlabError, match="a policy is a name"):
        kvlab.replay(trace, [wrong])
    with pytest.raises(KvlabError, match="policies are names or objects, one or a list of them, and not 3"):
        kvlab.replay(trace, 3)


def test_one_name_where_a_list_is_meant(tiny, trace):
    assert kvlab.capture(tiny(), IDS, 1, policies="snapkv", pseudo="dapq").pseudo
    assert kvlab.replay(trace, POLICY, probes="entropy").records.table.size


@pytest.mark.parametrize("wrong", ["", "  ", None, 3])
def test_a_model_needs_a_name(wrong):
    with pytest.raises(KvlabError, match="a model has a name, such as 'smollm2-135m', or a path, and not"):
        kvlab.load(wrong)


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("Sotu/1962", "sotu/1962"),
        ("SOTU 1962", "sotu/1962"),
        ("squads/Oxygen", "squad/Oxygen"),
        ("squad/oxygen", "squad/Oxygen"),
        ("sotu", "sotu/17"),
        ("code/arg parse", "code/argparse"),
    ],
)
def test_a_document_that_is_nearly_one(wrong, meant):
    with pytest.raises(KvlabError, match=rf"did you mean '?{meant}"):
        kvlab.document(wrong)


@pytest.mark.parametrize("wrong", [None, 1962])
def test_a_document_needs_a_name(wrong):
    for call in (lambda: kvlab.document(wrong), lambda: kvlab.documents(wrong)):
        with pytest.raises(KvlabError, match=f"or the path of a text file, and not {wrong}"):
            call()


def test_a_path_is_not_read_as_a_prompt(tiny, tmp_path):
    with pytest.raises(KvlabError, match=r"is a path; give the text in it, as kvlab\.document"):
        kvlab.capture(tiny(), tmp_path / "notes.txt")
    with pytest.raises(KvlabError, match="chat='yes': it is 'auto', True or False"):
        kvlab.capture(tiny(), IDS, chat="yes")
