"""Former names of what users call or override still work, and warn."""

from typing import ClassVar

import pytest
import torch

import kvlab
from kvlab.core.layout import WHOLE, Layout
from kvlab.core.softmax import Softmax
from kvlab.core.storage import stored_as
from kvlab.core.store import LayerStore
from kvlab.methods._base.needs import Needs
from kvlab.methods.morphkv import MorphKV


def store(length=6):
    keys = torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(0))
    return LayerStore(keys, -keys)


def test_a_store_answers_to_its_former_names():
    with pytest.warns(FutureWarning, match=r"LayerStore\.hold is LayerStore\.set_storage now"):
        old = store()
        old.hold(stored_as("int8"))
    assert str(old.storage) == "int8"
    with pytest.warns(FutureWarning, match="gather"):
        keys, values = old.taken(torch.tensor([[[0, 2]]]).expand(1, 2, 2))
    assert torch.equal(keys, old.keys[:, :, [0, 2]]) and torch.equal(values, old.values[:, :, [0, 2]])
    with pytest.warns(FutureWarning, match="steps_until_quantised"):
        assert old.calm == old.steps_until_quantised > 1000
    with pytest.warns(FutureWarning, match="quantise_pending"):
        old.settle()


def test_small_objects_answer_to_their_former_names():
    with pytest.warns(FutureWarning, match=r"Softmax\.told is Softmax\.scaling now"):
        assert Softmax(0.5).told == 0.5
    with pytest.warns(FutureWarning, match="index"):
        assert Layout((WHOLE, "a window", WHOLE), (0, 2)).place(2) == 1
    with pytest.warns(FutureWarning, match="positions"):
        assert Needs(rotation=True).places is True
    with pytest.warns(FutureWarning, match="convert"):
        assert stored_as("int8").hold is stored_as("int8").convert


@pytest.mark.filterwarnings("ignore:Waits.settle:FutureWarning")  # by `super()`
def test_a_policy_that_overrides_the_former_verb_is_still_asked(tiny):
    calls = []
    with pytest.warns(FutureWarning, match=r"Waits\.settle is Waits\.evict_pending now"):

        class Waits(MorphKV):
            name: ClassVar[str] = "waits"

            def settle(self, store):
                calls.append(store.length)
                super().settle(store)

    lm = tiny()
    ids = torch.arange(40)[None] % 30 + 3
    sets = []
    for policy in (Waits(budget=16, window=4), kvlab.policy("morphkv", budget=16, window=4)):
        with kvlab.compress(lm.model, policy, turns="leave") as session, torch.inference_mode():
            past = lm.model(ids, use_cache=True).past_key_values
            session.end_prompt()
            lm.model(ids[:, :5], past_key_values=past, use_cache=True)
        sets.append(session.kept(0))
    assert calls and torch.equal(*sets) and sets[0].shape[1] < 40
