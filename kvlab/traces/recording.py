"""The request of one capture, checked before anything runs: its prompt as token ids, and what it records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeGuard, cast, get_args

import numpy as np
import torch
from torch import Tensor

from kvlab.core import hookable, hooks
from kvlab.core.rotation import changes_within
from kvlab.errors import KvlabError, whole
from kvlab.inputs.corpus import Document
from kvlab.lib import progress_bars
from kvlab.methods import Policy, has_budget, listed, policy
from kvlab.methods._base.needs import NOTHING, Draft, PseudoTokens
from kvlab.methods._base.repeating import Part, Repetition, longest
from kvlab.traces.passes import chunk_for
from kvlab.traces.trace import Keep

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

OnePrompt: TypeAlias = str | Document | Tensor | np.ndarray | Sequence[int]
"""A prompt: a text, a document, or token ids as a tensor, an array or a list."""

# Lists by what they hold: a str is itself a sequence of str, and must not count as several prompts.
SeveralPrompts: TypeAlias = (
    list[str] | list[Document] | list[str | Document] | list[Tensor] | list[list[int]] | tuple[OnePrompt, ...]
)
"""A list or a tuple of prompts."""

# Logits are wide; the likelihoods of more tokens than this are not recorded, even where all queries are.
NLL_TOKENS = 256


class Options(TypedDict, total=False):
    """The named options of `capture`, which documents each."""

    chat: str | bool
    queries: str | None
    accumulate: bool
    pseudo: Sequence[Policy | str]
    policies: Sequence[Policy | str]
    response: Tensor | Sequence[int] | None
    keep: Keep
    into: str | Path | None
    chunk: int | None
    progress: bool | None


@dataclass(frozen=True, eq=False)
class Recording:
    """The settings of one capture: with the weights and the code, all that its numbers depend on.

    Attributes:
        ids: int64 `[prompt]`.
        document: the prompt's name, with a hash.
        new_tokens: length of the response.
        window: how many of the last prompt queries are kept.
        accumulate: whether the attention over all prompt queries is summed.
        likelihoods: of how many of the last prompt tokens.
        pseudo: token ids by the key that a policy asks for.
        drafts: answers that are drafted, and how many tokens each has.
        projection: whether the output projections are recorded.
        hidden: whether the prompt's hidden states are recorded, as each layer's attention is given them.
        repeats: what is fed to have the model repeat its prompt, for each repetition.
        response: token ids to feed instead of the greedy ones; None for these.
        chunk: tokens of the prompt that are fed at once.
    """

    ids: Tensor
    document: str
    new_tokens: int
    window: int
    accumulate: bool
    likelihoods: int
    pseudo: dict[str, Tensor]
    drafts: dict[Draft, int]
    projection: bool
    hidden: bool
    repeats: dict[Repetition, list[Part]]
    response: Tensor | None
    chunk: int

    @property
    def work(self) -> int:
        """Of all its forward passes, as `bars.layers` counts it."""
        repeated = [len(part.ids) for parts in self.repeats.values() for part in parts]
        chunks = (len(each) for each in self.ids.split(self.chunk))
        drafted = [fed for tokens in self.drafts.values() for fed in range(1, tokens + 1)]
        pseudo = map(len, self.pseudo.values())
        return progress_bars.work(*chunks, *pseudo, *drafted, *repeated, *[1] * self.new_tokens)


def planned(
    lm: LM,
    text_or_ids: Any,
    new_tokens: int,
    window: int,
    chat: str | bool,
    queries: str | None,
    accumulate: bool,
    pseudo: Sequence[Policy | str],
    policies: Sequence[Policy | str],
    response: Tensor | Sequence[int] | None,
    chunk: int | None,
) -> Recording:
    """Plan a `capture` with these arguments, checked; nothing runs. Raises KvlabError as `capture` does."""
    new_tokens, window = whole("new_tokens", new_tokens), whole("window", window)
    if new_tokens < 0 or window < 0:
        raise KvlabError(f"new_tokens and window must not be negative, and are {new_tokens} and {window}")
    if chunk is not None and whole("chunk", chunk) < 1:
        raise KvlabError(f"a prompt is fed in chunks of at least one token, and not of {chunk}")
    if queries not in (None, "all"):
        raise KvlabError(f"queries={queries!r}: it is 'all' for every prompt query, or left out for the last `window`")
    served = [_roomy(method) for method in listed(policies)]
    needs = reduce(or_, (each.needs for each in served), NOTHING)
    window = max(window, needs.queries or 0, needs.perplexity)
    queries = "all" if needs.every_query else queries
    accumulate = accumulate or needs.accumulated
    if needs.projection:
        asker = next(method.name for method in served if method.needs.projection)
        hookable.required_projections(hookable.layers_of(lm.model), asker)
    ids, document = prompt_ids(lm, text_or_ids, chat)
    length = len(ids)
    if response is not None:
        response = _checked(lm, response, "response")[:new_tokens]
        new_tokens = len(response)
    asking = [*map(_roomy, listed(pseudo, "pseudo")), *served]
    extra = pseudo_tokens(lm, ids, asking)
    wanted = (method.needs.pseudo for method in asking)
    drafts = {draft: draft.tokens for draft in wanted if isinstance(draft, Draft)}
    encode = encoder(lm) if lm.tokenizer else None
    repeats = {repetition: repetition.parts(ids, encode) for repetition in needs.repetitions}
    furthest = length + max([new_tokens, *map(len, extra.values()), *drafts.values(), *map(longest, repeats.values())])
    if furthest > lm.context_length:
        raise KvlabError(
            f"the prompt has {length} tokens and {furthest - length} follow it, which is beyond the "
            f"{lm.context_length} that "
            f"{lm.name} takes; shorten the document (Document.window) or the response"
        )
    hooks.check_length(lm.model, furthest)
    if chunk is not None and chunk < length and changes_within(lm.model, length):
        raise KvlabError(
            f"{lm.name}'s RoPE depends on the length of what it is fed, so the {length} tokens of the prompt must be "
            "one chunk; leave chunk out"
        )
    chunk = chunk_for(lm.model, length) if chunk is None else min(whole("chunk", chunk), length)
    window = length if queries == "all" else min(window, length)
    known = min(window, length - 1, max(NLL_TOKENS, needs.perplexity))
    return Recording(
        ids=ids,
        document=document,
        new_tokens=new_tokens,
        window=window,
        accumulate=accumulate,
        likelihoods=known,
        pseudo=extra,
        drafts=drafts,
        projection=needs.projection,
        hidden=needs.hidden,
        repeats=repeats,
        response=response,
        chunk=chunk,
    )


def pseudo_tokens(lm: LM, ids: Tensor, policies: Sequence[Policy]) -> dict[str, Tensor]:
    """The tokens of the pseudo-queries that policies ask for, int64 `[m]` each, by their key.

    Args:
        ids: of the prompt, `[tokens]`.

    Raises:
        KvlabError: pseudo-tokens of a sentence for a model without a tokenizer.
    """
    vocabulary = hookable.text_config(lm.model).vocab_size
    wanted = (method.needs.pseudo for method in policies)
    return {
        pseudo.key: pseudo.tokens(ids, vocabulary, encoder(lm)) for pseudo in wanted if isinstance(pseudo, PseudoTokens)
    }


def prompt_ids(lm: LM, text_or_ids: Any, chat: str | bool = "auto") -> tuple[Tensor, str]:
    """Token ids `[tokens]` of a text, a `Document` or ids, and a name for them with a hash.

    Raises:
        KvlabError: nothing in it, not of one sequence, or ids that the model does not have.
    """
    from kvlab.inputs.corpus import Document

    if chat not in ("auto", True, False):
        raise KvlabError(f"chat={chat!r}: it is 'auto', True or False")
    if isinstance(text_or_ids, Path):
        raise KvlabError(f"{text_or_ids} is a path; give the text in it, as kvlab.document({str(text_or_ids)!r})")
    if isinstance(text_or_ids, str):
        if not text_or_ids.strip():
            raise KvlabError("the document is empty; it needs at least one token")
        text_or_ids = Document("text", text_or_ids)
    if isinstance(text_or_ids, Document):
        return lm.encode(text_or_ids.text, chat=chat)[0].cpu(), text_or_ids.signature
    ids = _checked(lm, text_or_ids, "prompt")
    return ids, f"ids@{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]}"


def several(
    prompts: OnePrompt | SeveralPrompts, response: Tensor | Sequence[int] | None = None
) -> TypeGuard[SeveralPrompts]:
    """Whether these are several prompts rather than one.

    Raises:
        KvlabError: several, and one response that must follow.
    """
    from kvlab.inputs.corpus import Document

    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else 0
    many = isinstance(first, str | Document | list | tuple) or getattr(first, "ndim", 0) > 0
    if many and response is not None:
        raise KvlabError("one response cannot follow several documents; capture them one by one")
    return many


def _checked(lm: LM, ids: Any, what: str) -> Tensor:
    """Token ids of one sequence as int64 `[tokens]`, or an error that says what is wrong with them."""
    try:
        ids = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise KvlabError(f"the {what} is a text, a Document or token ids, and not {type(ids).__name__}") from None
    if not ids.numel():
        raise KvlabError(f"the {what} is empty; it needs at least one token")
    if ids.is_floating_point() or ids.dim() > 2 or (ids.dim() == 2 and len(ids) > 1):
        raise KvlabError(
            f"the {what} is one sequence of whole token ids, [tokens] or [1, tokens], and not {ids.dtype} of shape "
            f"{tuple(ids.shape)}; capture several as a list"
        )
    if not ids.dim():
        raise KvlabError(f"the {what} is a text, a Document or token ids, and not the number {int(ids)}")
    ids, vocabulary = ids.reshape(-1).long(), cast(Any, lm.model).get_input_embeddings().num_embeddings
    beyond = ids[(ids < 0) | (ids >= vocabulary)]
    if len(beyond):
        raise KvlabError(f"the {what} has the token id {int(beyond[0])}, and {lm.name} knows 0 .. {vocabulary - 1}")
    return ids


def check_keep(keep: str) -> None:
    """Refuse a place for traces that there is not."""
    if keep not in get_args(Keep):
        raise KvlabError(f"keep={keep!r} is none of {', '.join(map(repr, get_args(Keep)))}")


def _roomy(method: Policy | str) -> Policy:
    """A policy by name, with room for the whole prompt."""
    if isinstance(method, Policy):
        return method
    return policy(method, budget=1.0) if has_budget(method) else policy(method)


def encoder(lm: LM) -> Callable[[str], Tensor]:
    """The function that makes pseudo-tokens `[tokens]` of a text."""

    def encode(text: str) -> Tensor:
        tokenizer = lm.require_tokenizer("pseudo-tokens cannot be made from a sentence")
        return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)

    return encode
