"""What a policy returns is checked, and what it reads is declared: alike in replays, live runs and `keep`."""

import inspect
import pydoc
import warnings

import pytest
import torch
from support.paths import ROOT
from support.replaying import PROMPT, tensors, trace

import kvlab
from kvlab.core.ranking import top_positions
from kvlab.methods import Budget, Prompt, has_budget
from kvlab.methods._base.contract import CHECKS


class Best(kvlab.Policy):
    """Keeps what the window attends to."""

    name = "best"
    budget: Budget = 10
    observes = 8  # pyright: ignore

    def scores(self, prompt):
        return prompt.window_scores(8)

    def choose(self, prompt, budget):
        return top_positions(self.scores(prompt), budget)


def with_verb(verb, function):
    return type("Wrong", (Best,), {"__module__": __name__, verb: function})()


def best(policy, prompt, budget):
    return top_positions(policy.scores(prompt), budget)


WRONG_CHOICES = {
    "bool": lambda s, p, b: s.scores(p) > 0,
    "average": lambda s, p, b: best(s, p, b + 5),
    "int32": lambda s, p, b: best(s, p, b).int(),
    "float32": lambda s, p, b: best(s, p, b).float(),
    "nothing": lambda s, p, b: None,
    "ascend": lambda s, p, b: best(s, p, b).flip(-1),
    "twice": lambda s, p, b: best(s, p, b) * 0,
    "outside": lambda s, p, b: best(s, p, b) + PROMPT,
    r"\[2, 10\]": lambda s, p, b: best(s, p, b)[:, 0],
}


@pytest.mark.parametrize("what", WRONG_CHOICES)
def test_a_wrong_choice_is_refused_in_a_replay_and_by_keep(what):
    policy = with_verb("choose", WRONG_CHOICES[what])
    with pytest.raises(kvlab.KvlabError, match=f"choose .*{what}"):
        kvlab.replay(trace(), policy)
    queries, keys, values, _ = tensors()
    with pytest.raises(kvlab.KvlabError, match="choose"):
        policy.keep(*(torch.as_tensor(x)[:, :, :PROMPT] for x in (queries, keys, values)))


@pytest.mark.parametrize("what", WRONG_CHOICES)
def test_a_wrong_choice_is_refused_live(lm, what):
    with (
        pytest.raises(kvlab.KvlabError, match="choose"),
        kvlab.compress(lm.model, with_verb("choose", WRONG_CHOICES[what])),
    ):
        lm.model.generate(torch.arange(40)[None], max_new_tokens=2)


@pytest.mark.parametrize(
    "verb, function, what",
    [
        ("scores", lambda s, p: p.window_scores(8) * torch.nan, "NaN"),
        ("scores", lambda s, p: p.window_sums(8), "group"),
        ("scores", lambda s, p: p.window_scores(8)[0, 0], r"\[48\]"),
        ("select", lambda s, store, q, c: store.positions > 3, "bool"),
        ("select", lambda s, store, q, c: store.positions.clone(), "<= 10"),
        ("step", lambda s, store, w: store.evict(store.positions > 3), "bool"),
        ("step", lambda s, store, w: store.evict(store.positions.argsort().flip(-1)), "ascend"),
        ("step", lambda s, store, w: store.drop(store.length), "outside"),
        ("survey", lambda s, p: None, "nothing"),
    ],
)
def test_other_verbs_are_checked(verb, function, what):
    with pytest.raises(kvlab.KvlabError, match=f"{verb} .*{what}"):
        kvlab.replay(trace(), with_verb(verb, function))


def test_too_few_and_padding_are_taken_and_entries_tell_what_was_kept():
    fewer = kvlab.replay(trace(), with_verb("choose", lambda s, p, b: best(s, p, b - 5)))
    assert fewer.summary["entries"] == 5 and set(fewer.table.entries) == {5}

    def padded(policy, prompt, budget):
        kept = best(policy, prompt, budget).clone()
        kept[:, :, -1] = -1
        return kept

    assert kvlab.replay(trace(), with_verb("choose", padded)).summary["entries"] == 9


FITS = [name for name in kvlab.policies() if has_budget(name) and name != "compilerkv"]


@pytest.mark.filterwarnings("ignore:duoattention")
@pytest.mark.parametrize("name", FITS)
def test_kvlabs_own_policies_keep_the_contract(name, lm):
    """Their verbs are not checked in use, and so they are here."""
    cls = type(kvlab.policy(name, budget=36))
    verbs = {verb: getattr(cls, verb) for verb in CHECKS if getattr(cls, verb) is not getattr(kvlab.Policy, verb)}
    policy = type("Own", (cls,), {"__module__": __name__, **verbs})(budget=36)
    own = kvlab.capture(lm, torch.arange(60)[None], new_tokens=4, policies=[policy], queries="all", accumulate=True)
    expected = kvlab.replay(own, kvlab.policy(name, budget=36))
    assert torch.equal(kvlab.replay(own, policy).kept(0), expected.kept(0))


def test_plain_attributes_stand_for_properties():
    class Plain(Best):
        observes: int = 16
        minimum = 4  # pyright: ignore
        accumulates = True  # pyright: ignore

    assert (Plain().observes, Plain().minimum, Plain().accumulates) == (16, 4, True)
    assert list(Plain.model_fields) == ["budget"]
    with pytest.raises(kvlab.KvlabError, match="below the 4 entries"):
        Plain(budget=3)
    with pytest.raises(kvlab.KvlabError, match="observes = 32"):

        class Bare(Best):
            observes: int


ASKED = sorted(name for name in dir(Prompt) if not name.startswith("_"))


def answers(prompt, policy):
    """What every property and method of a prompt gives, or the sentence that refuses it."""
    calls = {
        "window": (8,),
        "window_attention": (8, lambda rows: rows.sum(-2)),
        "window_sums": (8,),
        "window_scores": (8,),
    }
    found = {}
    for name in (*ASKED, "keys", "values", "layers", "n_layers", "positions", "seen", "lossy", "plan"):
        if name in ("answers", "share", "seen_by", "with_plan", "reduced_to", "softmax", "repeated"):
            continue
        try:
            value = getattr(prompt, name)
            if callable(value):
                value = value(*calls.get(name, (policy,)))
            found[name] = value
        except kvlab.KvlabError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("observes", [0, 8])
def test_a_prompt_offers_the_same_in_a_replay_and_live(lm, observes):
    told = []

    class Curious(kvlab.Policy):
        name = "curious"

        def choose(self, prompt, budget):
            told.append(answers(prompt, self))
            return super().choose(prompt, budget)

        def compress(self, store, prompt):
            self.choose(prompt, 1)
            super().compress(store, prompt)

    policy = type("Looking", (Curious,), {"__module__": __name__, "observes": observes})()
    ids = torch.arange(40)[None]
    kvlab.replay(kvlab.capture(lm, ids, new_tokens=2, accumulate=True, queries="all"), policy)
    (replayed,) = told
    told.clear()
    with kvlab.compress(lm.model, policy):
        lm.model.generate(ids, max_new_tokens=2)
    assert len(told) == replayed["n_layers"]
    for layer, live in enumerate(told):
        assert live.keys() == replayed.keys()
        for name, value in live.items():
            whole = replayed[name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value[0], whole[layer], rtol=1e-4, atol=1e-5)
            elif name not in ("rows", "layers"):
                assert value == whole, name
    refused = {name for name, value in told[0].items() if isinstance(value, str)}
    assert {"accumulated", "projection", "rotation", "pre_queries", "perplexity", "pseudo"} <= refused
    assert ({"queries", "window", "window_sums", "window_scores", "window_attention"} <= refused) == (observes == 0)


def test_fractions_below_a_minimum_are_told_once():
    with pytest.warns(UserWarning, match="snapkv 33") as told:
        result = kvlab.replay(trace(), ["snapkv", "knorm"], budgets=[0.25])
    assert len(told) == 1 and list(result.summary.entries) == [33, 12]
    assert list(result.summary.columns[:3]) == ["policy", "budget", "entries"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvlab.replay(trace(), ["snapkv", "knorm"], budgets=[0.75])


def test_help_shows_what_is_kvlabs():
    text = pydoc.plain(pydoc.render_doc(kvlab.Policy))
    assert "choose(self" in text and "model_dump" not in text and "__pydantic" not in text


def test_the_page_names_all_that_a_prompt_offers():
    page = (ROOT / "docs" / "what_a_policy_sees.md").read_text()
    for name in (*ASKED, *inspect.signature(Prompt).parameters):
        if name not in (
            "answers",
            "check_inputs",
            "seen_by",
            "with_plan",
            "reduced_to",
            "projections",
            "rotations",
            "scaling",
            "shared",
        ):
            assert f"`{name}" in page, name
    for verb in CHECKS:
        arguments = list(inspect.signature(getattr(kvlab.Policy, verb)).parameters)[1:]
        assert f"`{verb}({', '.join(arguments)})`" in page, verb
        assert all(f"| `{argument}` |" in page for argument in arguments), verb
