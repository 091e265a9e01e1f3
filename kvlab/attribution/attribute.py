"""Effects of evicted entries on a response: integrated gradients on the line from a policy to the full cache.

The effect of an entry e is minus the integral of dL/dg_e over g in [0, 1]. All gates move together from the policy's
attention output (0) to the full cache's (1). L is the loss of a response that is fed back. Effects add up to
L(policy) - L(full): integrated gradients (Sundararajan et al. 2017, arXiv 1703.01365) on a model's internals, as
attribution patching has it. `kvlab/attribution/gated.py` holds the algebra of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvlab.attribution import memory
from kvlab.attribution.path import Response
from kvlab.attribution.results import Attribution, Found
from kvlab.attribution.stored import StoredEntries
from kvlab.core import adapter, hookable, ranking
from kvlab.core.latent import parted
from kvlab.core.quantised import check_gradients
from kvlab.core.storage import AS_IS, Storage, stored_as
from kvlab.errors import KvlabError, whole
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.live.session import Session, compress
from kvlab.live.shared_prefill import shared_prefill
from kvlab.methods import Policy, policy
from kvlab.traces.passes import chunk_for
from kvlab.traces.recording import prompt_ids, several
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM
    from kvlab.live.cache import LiveCache

POINTS, MOST_POINTS = 8, 64
ENOUGH = 0.05
"""Share of the difference that may be left unexplained before more points are tried."""
PASS = 3
"""A pass with its way back counts as so many in the progress bar."""


def attribute(
    lm: LM | torch.nn.Module,
    policy_or_name: Policy | str,
    text: str | Document | Tensor | Sequence[int] | Trace,
    new_tokens: int = 32,
    *,
    response: str | Sequence[int] | Tensor | None = None,
    loss: Literal["nll", "kl"] = "nll",
    points: int = POINTS,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
    progress: bool | None = None,
) -> Attribution:
    """Compute how much the loss of each evicted entry cost the response, in nats, over layers, KV heads and positions.

    ```python
    why = kvlab.attribute(lm, kvlab.policy("snapkv", budget=64), text, new_tokens=32)
    why.summary, why.table, why.by("token"), why.restored, why.show()
    ```

    The policy runs once, live, with the response fed back; which entries each step reads is then fixed. The response is
    run again at some points on the line to the full cache. One backward pass at each point gives dL/dg of all entries.
    The prompt is prefilled once.

    Args:
        lm: from `kvlab.load` or `kvlab.random_lm`, or a transformers model (which has no tokenizer: ids only).
        policy_or_name: a policy that leaves entries out, after the prefill, while decoding, or in what a step reads.
        text: a text, a `Document` or token ids; or a trace of this model, whose prompt and response are taken.
        new_tokens: length of the response, 2 or more; the full cache's greedy one, unless `response` is given.
        response: a text or token ids that follow the prompt instead.
        loss: "nll", the response's negative log-likelihood; "kl", the divergence of the next-token distributions from
            the full cache's, summed over the response.
        points: of Gauss and Legendre on the line; doubled, up to 64, until the effects explain the difference of the
            losses up to 5 %.
        chat: as `kvlab.capture` takes it.
        storage: as `kvlab.compress` takes it. The cost of rounding is reported separately: `Attribution.rounding`.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: a policy that merges or changes entries or outputs, a response of one token, or what `kvlab.capture`
            refuses; more memory than there is.
    """
    options: dict[str, Any] = {"response": response, "loss": loss, "points": points, "chat": chat, "storage": storage}
    return attributions(lm, [policy_or_name], text, new_tokens, progress=progress, **options)[0]


def attributions(
    lm: LM | torch.nn.Module,
    policies: Sequence[Policy | str],
    text: str | Document | Tensor | Sequence[int] | Trace,
    new_tokens: int = 32,
    *,
    response: str | Sequence[int] | Tensor | None = None,
    loss: Literal["nll", "kl"] = "nll",
    points: int = POINTS,
    chat: str | bool = "auto",
    storage: str | Storage = "as_is",
    progress: bool | None = None,
) -> list[Attribution]:
    """`attribute` for several policies, with one prefill and one response for all of them."""
    lm, chosen = lm_of(lm), [policy(each) for each in policies]
    form = stored_as(storage)
    if len(form.times) > 1:
        raise KvlabError(
            f"{form} rounds an entry's key and value at different times, which attribution cannot tell apart; use two "
            "storages that round at once, such as 'turbo-4/turbo-2'"
        )
    if loss not in ("nll", "kl"):
        raise KvlabError(f"loss={loss!r} is neither 'nll' nor 'kl'")
    if not 1 <= whole("points", points) <= MOST_POINTS:
        raise KvlabError(f"points={points}: between 1 and {MOST_POINTS} points on the line can be taken")
    traced = None
    if isinstance(text, Trace):
        traced = text.document
        text, response = _from_trace(lm, text, response)
    if several(text):
        raise KvlabError("one prompt is attributed at a time; call attribute for each")
    for tested in chosen:
        _check(tested)
    check_gradients(lm.model, "attribution")
    ids, document = prompt_ids(lm, text, chat)
    document = traced or document
    given = None if response is None else response_ids(lm, response)
    tokens = whole("new_tokens", new_tokens) if given is None else len(given)
    if tokens < 2:
        raise KvlabError(
            f"a response of {tokens} token{'' if tokens == 1 else 's'} has nothing to attribute: the prefill predicts "
            "the first token before anything is evicted; take two or more"
        )
    if len(ids) + tokens > lm.context_length:
        raise KvlabError(
            f"the prompt has {len(ids)} tokens and the response {tokens}, which is beyond the {lm.context_length} that "
            f"{lm.name} takes; shorten the document (Document.window) or the response"
        )
    chunk = chunk_for(lm.model, len(ids))
    for tested in chosen:
        memory.check(lm, tested, len(ids), tokens - 1, form, chunk)
    modules = hookable.layers_of(lm.model)
    stepwise = sum(tested.needs.acts_while_decoding or not form.exact for tested in chosen)
    work = progress_bars.work(*map(len, pieces(ids, chunk)), *[1] * (tokens * (stepwise + (given is None))))
    work += (points * PASS + 2) * tokens * len(chosen)
    results = []
    with progress_bars.layers(modules, work, "attribute", progress):
        prompt, prefilled = prefill(lm, chosen, ids, given, tokens)
        for tested in chosen:
            made, reads = run_policy(tested, prompt, prefilled, form)
            found = _integrated(made, reads, loss, points)
            results.append(Attribution(lm, tested, document, ids, made, reads, found, loss, form))
    return results


def _from_trace(
    lm: LM, trace: Trace, response: str | Sequence[int] | Tensor | None
) -> tuple[Tensor, str | Sequence[int] | Tensor | None]:
    """The prompt of a trace, and its response unless another is given."""
    made_by = trace.meta.get("model")
    if trace.ids is None:
        raise KvlabError("this trace has no token ids to run again; capture the prompt, or give its ids")
    if made_by is not None and made_by != lm.signature:
        raise KvlabError(f"the trace is of {made_by}, and {lm.signature} is to run it; load the trace's model")
    prompt, own = trace.ids.tensor_split([trace.prompt_length])
    return prompt, own if response is None and len(own) else response


def _check(tested: Policy) -> None:
    """Refuse what has no line of single entries between its cache and the full one."""
    needs = tested.needs
    if needs.biases:
        what = "merges entries, or weighs them by more than their attention"
    elif needs.rewrites:
        what = "changes the entries that it keeps"
    elif needs.amends:
        what = "changes the attention's output"
    else:
        return
    raise KvlabError(
        f"{tested.name} {what}, so that its loss has no share for each entry that it leaves out; attribute a policy "
        "that evicts or selects"
    )


def pieces(ids: Tensor, chunk: int) -> list[Tensor]:
    """A prompt in parts of `chunk` tokens. No last one has a single token: that would be a step of decoding."""
    found = list(ids.split(chunk))
    if len(found) > 1 and len(found[-1]) == 1:
        found[-2:] = [torch.cat(found[-2:])]
    return found


def response_ids(lm: LM, response: str | Sequence[int] | Tensor) -> Tensor:
    if isinstance(response, str):
        if not response:
            raise KvlabError("the response is empty; give a text or token ids")
        tokenizer = lm.require_tokenizer("give the response as token ids")
        return torch.tensor(tokenizer(response, add_special_tokens=False).input_ids, dtype=torch.int64)
    return prompt_ids(lm, response)[0]


@torch.no_grad()
def prefill(
    lm: LM, policies: Sequence[Policy], ids: Tensor, given: Tensor | None, tokens: int
) -> tuple[Response, LiveCache]:
    """The prompt's end with its response, and the cache from which each of these policies can start."""
    with shared_prefill(lm.model, policies):
        out = None
        for piece in pieces(ids, chunk_for(lm.model, len(ids))):
            past = None if out is None else out.past_key_values
            out = lm.model(piece[None].to(lm.device), past_key_values=past, use_cache=True, logits_to_keep=1)
    assert out is not None, "a prompt has tokens"
    prefilled, logits = out.past_key_values, out.logits[0, -1].float()
    stores = [layer.groups[0].store for layer in prefilled.compressed]
    entries = [(store.keys[0], store.values[0]) for store in stores]
    made = _greedy(lm, entries, prefilled.others, logits, tokens) if given is None else given
    first = float(-logits.log_softmax(-1)[made[0]])
    return Response(lm, made.cpu(), len(ids), entries, prefilled.others, first), prefilled


@torch.no_grad()
def run_policy(
    tested: Policy, made: Response, prefilled: LiveCache, storage: Storage = AS_IS
) -> tuple[Response, list[Tensor]]:
    """The response with what its storage rounds, and what each step of it reads under the policy, layer by layer."""
    lm, stepwise = made.lm, tested.needs.acts_while_decoding or not storage.exact
    stored = StoredEntries(lm.layout.compressed, made.prompt, made.steps)
    probes = [*["positions"] * stepwise, *[stored] * (not storage.exact)]
    options: dict[str, Any] = dict(tokenizer=lm.tokenizer, max_new_tokens=len(made.ids), storage=storage)
    with compress(lm.model, tested, probes, **options) as session:
        cache = session.branch(prefilled)
        session.end_prompt()
        for token in made.ids[:-1] if stepwise else ():
            lm.model(token.view(1, 1).to(lm.device), past_key_values=cache, logits_to_keep=1)
        reads = _reads(session, made.prompt, made.steps, stepwise)
    return replace(made, rounding=None if storage.exact else stored.layers(reads)), reads


def _greedy(
    lm: LM, entries: list[tuple[Tensor, Tensor]], others: dict[int, Any], logits: Tensor, tokens: int
) -> Tensor:
    """The full cache's greedy response `[tokens]`."""
    mine, latent = [], hookable.latent_of(hookable.layers_of(lm.model)[0])
    for keys, values in entries:
        layer = DynamicLayer()
        layer.update(*(x[None] for x in (parted(keys, latent) if latent else (keys, values))))
        mine.append(layer)
    cache = DynamicCache()
    cache.layers = adapter.arrange_layers(lm.model, hookable.layout_of(lm.model), mine)
    for number, layer in others.items():
        cache.layers[number] = adapter.copy_layer(layer)
    made = [logits.argmax()]
    while len(made) < tokens:
        out = lm.model(made[-1].view(1, 1), past_key_values=cache, logits_to_keep=1)
        made.append(out.logits[0, -1].float().argmax())
    return torch.stack(made)


def _reads(session: Session, prompt: int, steps: int, stepwise: bool) -> list[Tensor]:
    """The entries that each step reads, bool `[sets, steps or 1, prompt + steps]`, of each compressed layer."""
    found = []
    for layer in session.layout.compressed:
        if stepwise:
            sets = [session.records.positions(layer, step + 1) for step in range(steps)]
        else:
            sets = [session.kept_after_prefill(layer)]
        read = torch.zeros(len(sets[0]), len(sets), prompt + steps + 1, dtype=torch.bool)
        for step, positions in enumerate(sets):
            ranking.mark(read[:, step], positions)
        if not stepwise:
            read[..., prompt:] = True
        found.append(read[..., :-1].to(hookable.device_of(session.model)))
    return found


def _integrated(made: Response, reads: list[Tensor], loss: str, points: int) -> Found:
    """The losses at both ends, and the effects of all entries."""
    ends = torch.tensor([0.0, 1.0], device=made.lm.device)
    if loss == "kl":
        full = made.forward(reads, ends[1:], log_probabilities=True)
        assert full.log_probabilities is not None, "they were asked for"
        made.target = full.log_probabilities[0]
    losses = made.forward(reads, ends)
    attention = torch.stack([line.attention.to(made.lm.device) for line in losses.lines])
    policy_loss, full_loss = losses.values.tolist()
    difference = policy_loss - full_loss
    while True:
        effects, rounding = integrated_effects(made, reads, points)
        unexplained = difference - float(effects.sum()) - float(rounding.sum())
        if abs(unexplained) <= ENOUGH * abs(difference) or points * 2 > MOST_POINTS:
            break
        points *= 2
    by_step = losses.by_token[0] - losses.by_token[1]
    return Found(effects, attention, policy_loss, full_loss, by_step, points, rounding)


def integrated_effects(made: Response, reads: list[Tensor], points: int) -> tuple[Tensor, Tensor]:
    """Minus the integral of dL/dg by Gauss and Legendre, `[layers, kv_heads, prompt + steps]`: of evicted entries, and
    `[2, layers, ...]` of rounded keys and of rounded values.
    """
    nodes, counts = np.polynomial.legendre.leggauss(points)
    device = made.lm.device
    gates = torch.tensor((nodes + 1) / 2, dtype=torch.float32, device=device)
    weights = torch.tensor(counts / 2, dtype=torch.float32, device=device)
    effects = rounding = torch.zeros((), device=device)
    for some in range(0, points, made.points_at_once):
        part = slice(some, some + made.points_at_once)
        passed = made.forward(reads, gates[part], weights[part])
        effects = effects + torch.stack([line.effects.to(device) for line in passed.lines])
        rounding = rounding + torch.stack([line.rounding.to(device) for line in passed.lines], 1)
    return -effects, -rounding
