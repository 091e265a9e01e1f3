"""The likelihood of what a live session was fed, for policies that ask how well the model knew its prompt."""

from __future__ import annotations

import torch
from torch import Tensor


class Likelihood:
    """The model's negative log-likelihoods of the last tokens that it was fed: `[batch, n]`, in nats."""

    def __init__(self):
        self.nll: Tensor | None = None
        self._next: Tensor | None = None  # log-probabilities of the next token, [batch, vocabulary]

    def add(self, ids: Tensor | None, logits: Tensor, most: int) -> None:
        """Of tokens `[batch, fed]` whose last `n` gave these logits `[batch, n, vocabulary]`; keeps the last `most`."""
        if ids is None:
            self.nll = self._next = None
            return
        log_probs = logits.float().log_softmax(-1)
        if self._next is None or log_probs.shape[1] < ids.shape[1]:
            before = log_probs[:, :-1]
        else:
            before = torch.cat([self._next[:, None], log_probs[:, :-1]], 1)
        targets = ids[:, ids.shape[1] - before.shape[1] :, None]
        new = -before.gather(-1, targets)[..., 0]
        previous = self.nll if before.shape[1] == ids.shape[1] else None
        self.nll = (new if previous is None else torch.cat([previous, new], 1))[:, -most:]
        self._next = log_probs[:, -1]

    def perplexity(self, n: int, rows: Tensor | None) -> Tensor | None:
        """exp of the mean over the last `n` tokens, `[rows]`; None where too few are known."""
        if self.nll is None or self.nll.shape[1] < n:
            return None
        perplexity = self.nll[:, self.nll.shape[1] - n :].mean(-1).exp()
        return perplexity if rows is None else perplexity[rows.to(perplexity.device)]

    def next_ids(self, rows: Tensor | None) -> Tensor | None:
        """The most likely token after what was fed, `[rows]`; None where its logits are not known."""
        if self._next is None:
            return None
        ids = self._next.argmax(-1)
        return ids if rows is None else ids[rows.to(ids.device)]

    def copy(self) -> Likelihood:
        copied = Likelihood()
        copied.nll, copied._next = self.nll, self._next
        return copied

    def select(self, rows: Tensor) -> None:
        if self.nll is not None and self._next is not None:
            self.nll, self._next = (x[rows.to(x.device)] for x in (self.nll, self._next))

    def crop(self, n: int) -> None:
        self.nll = self._next = None
