"""Sessions that store what is kept in another form: as a replay does, in batches, beams, drafts, turns and joins."""

from __future__ import annotations

import pytest
import torch
from support.live_runs import Witness, generate, left_padded, prompt
from support.sessions import state
from support.tensors import sets

import kvlab
from kvlab.core.storage import keys_and_values, kivi, stored_as
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError

SMALL = kivi(4, group=8, residual=12)
FORMS = {
    "fp8": "fp8",
    "int8": "int8",
    "kivi-4": SMALL,
    "kivi-2": kivi(2, group=8, residual=12),
    "turbo-4": "turbo-4",
    "nvfp4": "nvfp4",
    "turbo-4/kivi-4": keys_and_values("turbo-4", SMALL),
}
POLICIES = {
    "full": {},
    "snapkv": dict(budget=30, window=6, kernel=3),
    "streamingllm": dict(budget=24),
    "h2o": dict(budget=24),
    "zsmerge": dict(budget=24, window=4),
    "quest": dict(budget=24, page=2),
    "duoattention": dict(budget=40, sinks=4, recent=12),
}
pytestmark = pytest.mark.filterwarnings("ignore:duoattention knows no head scores")


def made(name):
    return kvlab.policy(name, **POLICIES[name])


@pytest.fixture(scope="module")
def wide(tiny):
    """A tiny model whose heads are wide enough for KIVI's groups."""
    return tiny("tiny-llama-gqa", head_dim=32)


class Written:
    """Keys and values as they come to the stores of every layer, before anything rounds them."""

    def __init__(self, monkeypatch):
        self.entries = {}
        append = LayerStore.append

        def noted(store, keys, values, positions=None):
            self.entries.setdefault(store.layers[0], []).append((keys[0].clone(), values[0].clone()))
            append(store, keys, values, positions)

        monkeypatch.setattr(LayerStore, "append", noted)

    def of(self, layer, part):
        return torch.cat([pair[part] for pair in self.entries[layer]], 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_live_run_reads_and_puts_out_what_a_replay_does(wide, monkeypatch, name, form):
    length, steps, policy, storage = 70, 60, made(name), FORMS[form]
    trace = kvlab.capture(wide, prompt(length, seed=3), new_tokens=0, queries="all", accumulate=True)
    written, live = Written(monkeypatch), Witness()
    with kvlab.compress(wide.model, policy, probes=[live], max_new_tokens=steps, storage=storage) as session:
        generate(wide.model, prompt(length, seed=3), steps + 1)
    queries, keys, values = (
        torch.stack([torch.cat([getattr(trace, part)[layer], new(layer)], 1) for layer in range(2)])
        for part, new in (
            (
                "queries",
                lambda layer: torch.stack([live.steps[layer, t]["queries"][0] for t in range(1, steps + 1)], 1),
            ),
            ("keys", lambda layer: written.of(layer, 0)),
            ("values", lambda layer: written.of(layer, 1)),
        )
    )
    same = kvlab.Trace.from_tensors(queries, keys, values, length, accumulated=trace.accumulated)
    replayed = Witness()
    result = kvlab.replay(same, policy, probes=[replayed], storage=storage)
    for step in range(1, steps + 1):
        of_all = replayed.steps[None, step]
        for layer in range(2):
            one = live.steps[layer, step]
            assert sets(one["read"][0]) == sets(of_all["read"][layer]), f"read at step {step}"
            assert sets(one["stored"][0]) == sets(of_all["stored"][layer]), f"stored after step {step}"
            torch.testing.assert_close(one["output"][0], of_all["output"][layer], atol=2e-5, rtol=0)
    assert session.kv_bytes + session.aux_bytes == pytest.approx(float(result.stored_bytes[-1]), abs=2)
    assert session.read_bytes == pytest.approx(float(result.read_bytes[-1]), abs=2)


def test_what_is_stored_is_what_the_form_takes_by_hand(wide):
    """kivi-4 on 200 tokens: 64 leave, in two groups of 32, and 136 are in float32."""
    with kvlab.compress(wide.model, "full", storage="kivi-4") as session, torch.inference_mode():
        wide.model(prompt(200))
        whole = 2 * 2 * 200 * 2 * 32 * 4  # layers, heads, tokens, key and value, numbers, bytes
        assert session.kv_bytes == whole
        session.end_prompt()
    entry, group = 2 * 32 * 4 // 8 + 2 * 2, 32 * 2 * 2
    assert session.kv_bytes == 2 * 2 * (64 * entry + 2 * group + 136 * 2 * 32 * 4)
    assert session.allocated_bytes < whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["full", "snapkv", "streamingllm", "duoattention"])
def test_each_row_of_a_padded_batch_goes_as_it_goes_alone(wide, name, form):
    rows = [prompt(n, seed=n)[0] for n in (60, 43, 60)]
    ids, mask = left_padded(*rows)
    with kvlab.compress(wide.model, made(name), storage=FORMS[form]) as together:
        batch = generate(wide.model, ids, 30, attention_mask=mask)
    total = 0
    for number, row in enumerate(rows):
        with kvlab.compress(wide.model, made(name), storage=FORMS[form]) as session:
            alone = generate(wide.model, row[None], 30)
        assert batch.sequences[number, 60:].tolist() == alone.sequences[0, len(row) :].tolist()
        for layer in range(2):
            assert sets(together.kept(layer, number)) == sets(session.kept(layer))
        total += session.kv_bytes
    assert together.kv_bytes == total


@pytest.mark.parametrize("form", ["int8", "kivi-4"])
@pytest.mark.parametrize("name", ["full", "snapkv", "h2o"])
def test_beams(wide, name, form):
    """Beams of two prompts at once are those of each alone."""
    ids, options = prompt(50, rows=2), dict(num_beams=3)
    with kvlab.compress(wide.model, made(name), storage=FORMS[form]):
        both = generate(wide.model, ids, 24, **options).sequences
    for row in range(2):
        with kvlab.compress(wide.model, made(name), storage=FORMS[form]):
            alone = generate(wide.model, ids[row : row + 1], 24, **options).sequences
        assert both[row].tolist() == alone[0].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_are_taken_back_leave_no_trace(wide, form):
    """Few enough that none of them, nor what they made old, has been rounded."""
    ids, fed = prompt(44), prompt(12, seed=1)[0]
    logits = []
    for drafts in (0, 3):
        with kvlab.compress(wide.model, "full", turns="leave", storage=FORMS[form]):
            past = wide.model(ids, use_cache=True).past_key_values
            for token in fed:
                out = wide.model(token.view(1, 1), past_key_values=past)
                if drafts:
                    wide.model(prompt(drafts, seed=int(token)), past_key_values=past)
                    past.crop(-drafts)
        logits.append(out.logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("turns", ["leave", "recompress"])
@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_a_later_turn_rounds_what_is_there_no_second_time(wide, name, turns):
    with kvlab.compress(wide.model, made(name), turns=turns, storage=SMALL) as session:
        past = wide.model(prompt(60), use_cache=True).past_key_values
        session.end_prompt()
        (group,) = past.compressed[1].groups
        n = group.store._entries.old.counts[0]
        before = dict(zip(group.store.positions[0, 0, :n].tolist(), group.store.keys[0, 0], strict=False))
        wide.model(prompt(40, seed=1), past_key_values=past)
        wide.model(prompt(1, seed=2), past_key_values=past)
        after = dict(zip(group.store.positions[0, 0].tolist(), group.store.keys[0, 0], strict=True))
        old = before.keys() & after.keys()
        assert old and all(torch.equal(after[position], before[position]) for position in old)
        exact = 2 * 32 * 4 * 2 * 2
        assert session.kv_bytes < group.store.length * exact * 0.75, "the turn itself has been rounded, too"


@torch.inference_mode()
def test_another_storage_may_take_a_cache_over(wide):
    policy = made("snapkv")
    with kvlab.compress(wide.model, policy, storage="int8") as first:
        past = wide.model(prompt(60), use_cache=True).past_key_values
        wide.model(prompt(1), past_key_values=past)
    small = first.kv_bytes
    with kvlab.compress(wide.model, policy, probes=["mass_lost"]) as second:
        with pytest.raises(KvlabError, match="evicted or rounded entries.* leave out"):
            wide.model(prompt(1), past_key_values=past)
    with kvlab.compress(wide.model, policy) as second:
        wide.model(prompt(1), past_key_values=past)
        assert all(g.store.storage.exact for layer in past.compressed for g in layer.groups)
    assert second.kv_bytes > 2 * small


@torch.inference_mode()
def test_joined_sessions_keep_each_its_own_storage(wide):
    ids, fed = prompt(50), prompt(20, seed=4)[0]
    pairs = [("full", "as_is"), ("full", SMALL), ("snapkv", "int8"), ("duoattention", SMALL), ("h2o", "fp8")]

    def ended(name, form):
        with kvlab.compress(wide.model, made(name), turns="leave", storage=form) as session:
            past = wide.model(ids, use_cache=True).past_key_values
            session.end_prompt()
        return session, past

    sessions = [ended(*pair)[0] for pair in pairs]
    with kvlab.compress(wide.model, "full", turns="leave") as together:
        past = together.join(sessions)
        joined = [wide.model(token.expand(len(pairs), 1), past_key_values=past).logits for token in fed]
    for row, pair in enumerate(pairs):
        with kvlab.compress(wide.model, made(pair[0]), turns="leave", storage=pair[1]) as session:
            own = wide.model(ids, use_cache=True).past_key_values
            alone = [wide.model(token.view(1, 1), past_key_values=own).logits for token in fed]
        # A batch computes in another order, by which a number may be rounded to its other neighbour.
        torch.testing.assert_close(torch.cat(joined)[row :: len(pairs)], torch.cat(alone), atol=5e-3, rtol=0)
        assert session.kv_bytes == sessions[row].kv_bytes and sets(session.kept(1)) == sets(together.kept(1, row))


@torch.inference_mode()
def test_a_prompt_in_pieces_is_rounded_once_it_is_whole(wide):
    # Too short for blocks by oneDNN, whose last bits would turn a rounding of a scale to half precision.
    ids, after = prompt(60), []
    for pieces in (1, 4):
        with kvlab.compress(wide.model, made("snapkv"), storage=SMALL) as session:
            past = None
            for piece in ids.chunk(pieces, 1):
                past = wide.model(piece, past_key_values=past, use_cache=True).past_key_values
            after.append(
                (wide.model(prompt(1), past_key_values=past).logits, session.kv_bytes, session.kept(1).tolist())
            )
    torch.testing.assert_close(after[0][0], after[1][0], atol=1e-4, rtol=0)
    assert after[0][1:] == after[1][1:]


def test_both_loops_and_fidelity_take_a_storage(wide):
    loops = kvlab.closed_against_open(wide, made("snapkv"), prompt(60)[0], 12, storage="int8")
    assert set(loops.table.storage) == {"int8"} and loops.storage == stored_as("int8")
    found = kvlab.fidelity(wide, "full", prompt(300)[0], 12, storage="kivi-2")
    plain = kvlab.fidelity(wide, "full", prompt(300)[0], 12)
    assert set(found.table.storage) == {"kivi-2"} and found.summary["kl"] > 1e-6 > abs(plain.summary["kl"])


def test_probes_see_what_rounding_costs(wide):
    with kvlab.compress(wide.model, "full", probes=["output_error", "mass_lost"], storage=SMALL) as session:
        generate(wide.model, prompt(60), 8)
    assert session.means["mass_lost"] < 1e-5 and 1e-4 < session.means["output_error"] < 0.5
    assert set(session.table.storage) == {str(SMALL)}


def test_what_cannot_be_is_said_before_anything_runs(tiny, wide):
    lm, before = tiny("tiny-llama-gqa"), state(tiny("tiny-llama-gqa").model)
    with pytest.raises(KvlabError, match="groups of 32 channels, which do not divide this model's head size of 16"):
        kvlab.compress(lm.model, "full", storage="kivi-4")
    with pytest.raises(KvlabError, match="unknown storage 'int9'; did you mean 'int8'"):
        kvlab.compress(wide.model, "full", storage="int9")
    for call in (kvlab.fidelity, kvlab.closed_against_open):
        with pytest.raises(KvlabError, match="unknown storage"):
            call(wide, "full", prompt(20)[0], 4, storage="half")
    assert state(lm.model) == before
