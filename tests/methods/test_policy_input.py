"""What `Policy.keep` refuses: tensors that do not fit together, by name, with what it got and what would be right."""

import pytest
import torch
from support.refusals import refusal
from support.tensors import layer

import kvlab
from kvlab.errors import KvlabError

NAMES = ["snapkv", "streamingllm", "full", "quest"]


def given(**changes):
    """Two sequences of 40 tokens, 4 heads that share 2 KV heads, with some of the tensors exchanged."""
    queries, keys, values = layer(1, 4, 2, 16, 40, layers=2)
    return dict(queries=queries, keys=keys, values=values) | changes


def refused(name="snapkv", **tensors):
    parameters = {} if name == "full" else {"budget": 36}
    return refusal(lambda: kvlab.policy(name, **parameters).keep(**given(**tensors)))


def says(sentence, *words):
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("name", NAMES)
def test_heads_that_kv_heads_cannot_share(name):
    says(refused(name, queries=torch.ones(2, 5, 40, 16)), "queries", "5", "2 KV heads")
    says(refused(name, keys=torch.ones(2, 3, 40, 16), values=torch.ones(2, 3, 40, 16)), "queries", "4", "3 KV heads")


def test_fewer_query_heads_than_kv_heads():
    says(refused(queries=torch.ones(2, 1, 40, 16)), "queries", "1", "2 KV heads")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(name, bad):
    for which in ("queries", "keys", "values"):
        tensors = given()
        tensors[which][1, 1, 7, 3] = bad
        says(refused(name, **tensors), which, "finite")


@pytest.mark.parametrize("which", ["queries", "keys", "values"])
@pytest.mark.parametrize("shape", [(4, 40, 16), (1, 2, 4, 40, 16), (16,)])
def test_a_dimension_too_few_or_too_many(which, shape):
    says(refused(**{which: torch.ones(shape)}), which, "[batch", str(list(shape)))


@pytest.mark.parametrize("shape", [(2, 2, 39, 16), (2, 2, 40, 8), (1, 2, 40, 16), (2, 4, 40, 16)])
def test_values_of_another_shape_than_the_keys(shape):
    says(refused(values=torch.ones(shape)), "values", "[2, 2, 40, 16]", str(list(shape)))


@pytest.mark.parametrize("shape", [(3, 4, 40, 16), (2, 4, 40, 8)])
def test_queries_of_another_batch_or_head_size(shape):
    says(refused(queries=torch.ones(shape)), "queries", "batch of 2", "head_dim of 16", str(list(shape)))


def test_more_queries_than_tokens():
    says(refused(queries=torch.ones(2, 4, 41, 16)), "queries", "41", "40")


@pytest.mark.parametrize("shape, said", [((2, 4, 8, 12), "head_dim"), ((2, 3, 8, 16), "heads"), ((4, 8, 16), "[batch")])
def test_pseudo_queries_that_do_not_fit(shape, said):
    says(refused("dapq", pseudo=torch.ones(shape)), "pseudo", said)


@pytest.mark.parametrize("shape", [(2, 2, 40), (2, 4, 39), (1, 4, 40), (4, 40)])
def test_accumulated_attention_that_does_not_fit(shape):
    says(refused("h2o", accumulated=torch.ones(shape)), "accumulated", "[2, 4, 40]", str(list(shape)))


def test_what_is_not_finite_among_the_extras():
    says(refused("h2o", accumulated=torch.full((2, 4, 40), torch.nan)), "accumulated", "finite")
    says(refused("dapq", pseudo=torch.full((2, 4, 6, 16), torch.nan)), "pseudo", "finite")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_welcome(dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in given().items()}
    assert kvlab.policy("snapkv", budget=36).keep(**tensors).shape == (2, 2, 36)


def test_what_is_no_tensor_or_holds_no_token():
    queries, keys, values = layer(1, prompt=40, layers=1)
    with pytest.raises(KvlabError, match="queries must be a tensor .* and is a list"):
        kvlab.policy("streamingllm", budget=8).keep(queries.tolist(), keys, values)
    with pytest.raises(KvlabError, match="no token"):
        kvlab.policy("streamingllm", budget=8).keep(queries[:, :, :0], keys[:, :, :0], values[:, :, :0])
