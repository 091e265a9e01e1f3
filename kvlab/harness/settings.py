"""The arguments of the model "kvlab" in the harness, checked before anything runs, and those of a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError, nearest, whole
from kvlab.evaluation.planning import require_moment
from kvlab.inputs import models
from kvlab.live.decode_batch import TOGETHER
from kvlab.methods import Policy, has_budget, policy, registry

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from kvlab.inputs.models import LM


@dataclass(frozen=True)
class Moment:
    """When a request's cache is compressed.

    Attributes:
        compress_at: "prompt" after the whole prompt of a response, "context" before its end. A likelihood's context is
            compressed before its last token is fed, in either case.
        question: the context ends before the last occurrence of this text; None: before the last token.
    """

    compress_at: str = "prompt"
    question: str | None = None

    def __post_init__(self):
        require_moment(self.compress_at)
        if self.question is None:
            return
        if self.compress_at == "prompt":
            raise KvlabError("question= says where the context ends; give compress_at=context with it")
        if not isinstance(self.question, str) or not self.question.strip():
            raise KvlabError(f"question= is the text that a question begins with, and not {self.question!r}")

    def start(self, text: str) -> int | None:
        """Where the question begins in a request's text, in characters; None where no question is distinguished."""
        if self.question is None or not text:
            return None
        if (start := text.rfind(self.question)) < 0:
            raise KvlabError(
                f"question={self.question!r} is nowhere in a request that ends with {text[-60:]!r}; name a text that "
                "every question of this task begins with, or leave it out"
            )
        return start


def loaded(pretrained: Any, device: Any, dtype: Any) -> LM:
    """A model by name, folder, GGUF file or hub id, or as `kvlab.load` gives it; it must have a tokenizer."""
    lm = models.lm_of(pretrained) if not isinstance(pretrained, str) else models.load(pretrained, device, dtype)
    lm.require_tokenizer("the harness cannot give it text")
    return lm


def batch_of(size: Any, most: Any = None) -> int:
    """The number of sequences in a batch, from what the harness takes: a number, its text, "auto" or "auto:N"."""
    text = "1" if size is None else str(size)
    if text == "auto" or text.startswith("auto:"):
        return TOGETHER if most is None else min(TOGETHER, whole("max_batch_size", most))
    if not text.isdecimal() or not int(text):
        raise KvlabError(f"batch_size={size!r:.40} is neither a number from 1 on nor 'auto'")
    return int(text)


def chosen(wanted: Policy | str, budget: Any, parameters: Mapping[str, Any], known: Iterable[str]) -> Policy:
    """The policy that the arguments describe.

    Args:
        budget: None where none was given.
        parameters: arguments that must be the policy's own.
        known: the other valid arguments, for the message about an unknown one.
    """
    method = type(wanted) if isinstance(wanted, Policy) else registry().get(wanted)
    if method is None:
        return policy(wanted)  # which says what there is
    if stranger := sorted(set(parameters) - set(method.model_fields)):
        raise KvlabError(nearest(stranger[0], {*known, *method.model_fields}, "argument of the model kvlab", limit=40))
    if budget is None and isinstance(wanted, str) and has_budget(wanted):
        raise KvlabError(f"{wanted} needs a budget: entries for each head (budget=256), or a share (budget=0.2)")
    return policy(wanted, **parameters, **({} if budget is None else {"budget": budget}))


# The key of a cache's signature in a cache of the harness; its entries have hashes for keys.
MARK = "kvlab: signature"


def claimed(kept: MutableMapping[str, Any], signature: str, where: Any) -> None:
    """Mark a cache of the harness (`--use_cache`) with the signature of its entries; their keys name only the request.

    Raises:
        KvlabError: the cache has entries of another signature, or entries without any.
    """
    if (found := kept.get(MARK)) == signature:
        return
    if found is not None or kept:
        whose = f"are of {found}" if found else "do not say which model and policy they are of"
        raise KvlabError(
            f"the entries of the cache {where} {whose}, and this run is {signature}; give use_cache another name"
        )
    kept[MARK] = signature


# Defaults of the generation arguments that a task may set, without the length and the end of a response. The settings
# that a model's makers recommend are no part of a task: a penalty for repetition, say, changes greedy answers, too.
HOW = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "typical_p": 1.0}
SHARES = ("top_p", "min_p", "typical_p")


def generation(lm: LM, asked: Mapping[str, Any], new_tokens: int, ends: set[int]) -> GenerationConfig:
    """The generation that a task's arguments ask for, without `until` and the length.

    Raises:
        KvlabError: an argument that kvlab does not support, such as beams, or an impossible value.
    """
    from transformers import GenerationConfig

    if unknown := sorted(set(asked) - {*HOW, *SAMPLED}):
        raise KvlabError(nearest(unknown[0], {*HOW, *SAMPLED}, "argument of a generation", limit=40))
    if new_tokens < 1:
        raise KvlabError(f"max_gen_toks must be at least 1, and is {new_tokens}")
    for name, value in asked.items():
        if not isinstance(value, int | float) or (name in SHARES and not 0 <= value <= 1):
            raise KvlabError(f"{name} = {value!r:.40} is not right: give a number{' from 0 to 1' * (name in SHARES)}")
    settings = HOW | (SAMPLED if asked.get("do_sample") else {})
    settings = settings | {name: value for name, value in asked.items() if name in settings}
    pad = getattr(lm.tokenizer, "pad_token_id", None)
    tokens = {"eos_token_id": sorted(ends) or None, "pad_token_id": min(ends, default=0) if pad is None else pad}
    try:
        how = GenerationConfig(max_new_tokens=new_tokens, **tokens, **settings)
        if how.do_sample and not (how.temperature or 0) > 0:
            raise ValueError(f"temperature={how.temperature} with do_sample=True; give one above 0, or do_sample=False")
        how.validate()
    except (TypeError, ValueError) as error:
        raise KvlabError(f"this generation cannot be: {' '.join(str(error).split())}") from None
    return how
