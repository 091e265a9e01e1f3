"""The model "kvlab" of the lm-evaluation-harness. Only this file needs the harness to be installed."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import CacheHook, TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from kvlab.core.storage import Storage, stored_as
from kvlab.errors import KvlabError, whole
from kvlab.evaluation.answering import stops
from kvlab.harness.reading import Asked, Continued, Reader
from kvlab.harness.rows import Held, Known
from kvlab.harness.settings import Moment, batch_of, chosen, claimed, generation, loaded
from kvlab.inputs.models.catalogue import DEFAULT
from kvlab.methods import Policy

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

# Below the harness's own logger, so that its settings hold.
LOG = logging.getLogger("lm_eval.kvlab")
T = TypeVar("T")


class KvlabLM(TemplateLM):
    """A language model whose cache a policy compresses, for the harness's tasks.

    `lm_eval.simple_evaluate(model="kvlab", model_args="pretrained=...,policy=snapkv,budget=512", ...)` makes one (once
    `kvlab.harness` is imported); one that was made by hand can be given as `model=`, too.

    Args:
        pretrained: name, folder, GGUF file or Hugging Face id, or a model that `kvlab.load` returned.
        policy, budget: as `kvlab.policy` takes them; further `parameters` are the policy's own.
        storage: the form in which kept entries are stored (`kvlab list storages`).
        compress_at: "prompt" compresses a response's prompt after all of it was read, "context" all but the question.
        question: the text that a question begins with, for compress_at="context"; None for the last token alone.
        rolling_chunk: how many tokens of a rolling likelihood are read after each compression, at least 2.
        max_length: the longest sequence in tokens, at most the model's own; longer ones lose their beginning.
        device, dtype: as `kvlab.load` takes them.
        batch_size: how many sequences take their decoding steps together; each is prefilled and compressed alone. With
            "auto" `kvlab.live.decode_batch.TOGETHER` of them.
        max_batch_size: the most sequences in a batch with "auto".

    Raises:
        KvlabError: an unknown argument, a wrong value, or a model without tokenizer.
    """

    def __init__(
        self,
        pretrained: str | LM = DEFAULT,
        policy: str | Policy = "full",
        budget: int | float | None = None,
        storage: str | Storage = "as_is",
        compress_at: str = "prompt",
        question: str | None = None,
        rolling_chunk: int = 512,
        max_length: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,
        **parameters: Any,
    ):
        super().__init__()
        if trust_remote_code:
            raise KvlabError("kvlab never runs a model's remote code; leave trust_remote_code out")
        own = [name for name in inspect.signature(KvlabLM).parameters if name != "parameters"]
        method, self._moment = chosen(policy, budget, parameters, own), Moment(compress_at, question)
        form = stored_as(storage)
        if (chunk := whole("rolling_chunk", rolling_chunk)) < 2:
            raise KvlabError(f"rolling_chunk must be at least 2, and is {chunk}")
        self._chunk = chunk
        self.lm = loaded(pretrained, device, dtype)
        self.tokenizer: Any = self.lm.tokenizer
        self.max_length = self.lm.context_length if max_length is None else whole("max_length", max_length)
        if not 2 <= self.max_length <= self.lm.context_length:
            raise KvlabError(
                f"max_length={max_length} is not between 2 and the {self.lm.context_length} that {self.lm.name} takes"
            )
        self._reader = Reader(self.lm, method, form, batch_of(batch_size, max_batch_size))
        self._device, self._ends = self.lm.device, stops(self.lm)
        self._held: dict[str, list[Held | None]] = defaultdict(list)
        self._cut = 0
        self._asking: list[Any] = []
        if compress_at == "context" and question is None:
            LOG.warning(
                "compress_at=context without question=...: a request of the harness is one text, so all of it but its "
                "last token is compressed, the question included"
            )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> KvlabLM:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> KvlabLM:
        """The model of its own arguments, which go before those that the harness adds."""
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        # The harness's command has this default on every machine, and its own models take what there is.
        if added.get("device") == "cuda:0":
            added["device"] = "auto"
        return cls(**added | arg_dict)

    # ------------------------------------------------------------------ what the harness asks about the model

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        tokens = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, *sorted(self._ends)
        return next((token for token in tokens if token is not None), 0)

    @property
    def max_gen_toks(self) -> int:
        """The length of a response whose task says none; the harness's own models have the same."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """Marks the requests that the harness keeps: model and hash, since a folder's name may stand for two."""
        return self.lm.signature.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise KvlabError(f"{self.lm.name} has no chat template: leave apply_chat_template out")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encoded(string, add_special_tokens)["input_ids"]

    def _encoded(self, text: str, special: bool | None = None, **more: Any) -> Any:
        if special is None:
            # A chat template has written it already.
            begin = self.tokenizer.bos_token
            special = not (begin and text.startswith(begin))
        return self.tokenizer(text, add_special_tokens=special, verbose=False, **more)

    def get_model_info(self) -> dict[str, Any]:
        """Describe the run in the harness's results: the model, and under "kvlab" the compression and its bytes.

        For each task it has the means of `Held` over its requests (`read_bytes` over those that had a step).
        """
        return {
            "model_num_parameters": self.lm.model.num_parameters(),
            "model_dtype": str(self.lm.dtype),
            "model_sha": self.lm.sha256,
            "kvlab": {
                "signature": self._signature,
                "compress_at": self._moment.compress_at,
                "question": self._moment.question,
                "rolling_chunk": self._chunk,
                "cut_requests": self._cut,
                "tasks": {task: _means(held) for task, held in self._held.items()},
            },
        }

    @property
    def _signature(self) -> str:
        model, reader = f"{self.lm.signature} {str(self.lm.dtype).removeprefix('torch.')}", self._reader
        return f"{model}|{reader.storage.behind(str(reader.policy))}|{_version()}"

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's cache, which is asked before this model is, if it is this model's or empty."""
        if cache_hook.dbdict is not None:
            moment = f"compress_at={self._moment.compress_at}, question={self._moment.question!r}"
            lengths = f"rolling_chunk={self._chunk}, max_length={self.max_length}"
            where = getattr(cache_hook.dbdict, "filename", "of the harness")
            claimed(cache_hook.dbdict, f"{self._signature}|{moment}, {lengths}", where)
        super().set_cache_hook(cache_hook)

    # ------------------------------------------------------------------ likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._asking = list(requests)
        return cast("list[tuple[float, bool]]", super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        asking, self._asking = self._asking or [None] * len(requests), []
        found = []
        read = self._reader.likelihoods(self._continued(*request) for request in requests)
        for request, asked, known in zip(
            asking, requests, self._shown(read, len(requests), "loglikelihood", disable_tqdm), strict=True
        ):
            found.append((known.logprob, known.greedy))
            self._note(request, known.held)
            self.cache_hook.add_partial("loglikelihood", asked[0], found[-1])
        self._tell()
        return found

    def _continued(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> Continued:
        if not continuation:
            raise KvlabError(f"a continuation has no token of its own: {texts[1]!r:.60} after {texts[0][-60:]!r}")
        if len(continuation) > self.max_length:
            raise KvlabError(
                f"a continuation has {len(continuation)} tokens, which is beyond the {self.max_length} that "
                f"{self.lm.name} takes"
            )
        # The last token of a continuation is predicted and never fed, so one token more fits.
        context, cut = self._fitting(context, self.max_length + 1 - len(continuation))
        return Continued(context, continuation, self._compressed(texts[0], cut))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in self._shown(requests, len(requests), "loglikelihood_rolling", disable_tqdm):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            read = [self._rolled(*utils.make_disjoint_window(window)) for window in windows]
            found.append(sum(each.logprob for each in read))
            self._note(request, next((each.held for each in reversed(read) if each.held), None))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        self._tell()
        return found

    def _rolled(self, context: list[int], text: list[int]) -> Known:
        return self._reader.rolling(context, text, self._chunk)

    # ------------------------------------------------------------------ responses

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        found = []
        for request, text in zip(
            requests, self._shown(self._said(requests), len(requests), "generate_until", disable_tqdm), strict=True
        ):
            found.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        self._tell()
        return found

    def _said(self, requests: Sequence[Any]) -> Iterator[str]:
        """Yield the responses. Neighbouring requests with the same generation arguments go together."""
        for asked, alike in groupby(requests, key=lambda request: request.args[1]):
            wanted = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
            until = [each for each in cast("list[Any]", wanted.pop("until")) if each]
            if not all(isinstance(each, str) for each in until):
                raise KvlabError(f"until={until!r:.60} is no list of texts")
            new_tokens = int(cast("int", wanted.pop("max_gen_toks")))
            how = generation(self.lm, wanted, new_tokens, self._ends)
            if new_tokens >= self.max_length:
                raise KvlabError(
                    f"a task asks for {new_tokens} new tokens, and {self.lm.name} takes {self.max_length} in all; give "
                    "fewer, as in --gen_kwargs max_gen_toks=64"
                )
            together = list(alike)
            prompts = (self._asked(request.args[0], new_tokens, until) for request in together)
            for request, (tokens, held) in zip(together, self._reader.responses(prompts, how), strict=True):
                self._note(request, held)
                yield str(postprocess_generated_text(self.lm.decode(tokens) if tokens else "", until, None))

    def _asked(self, text: str, new_tokens: int, until: Sequence[str]) -> Asked:
        prompt, cut = self._fitting(self.tok_encode(text) or [self.prefix_token_id], self.max_length - new_tokens)
        compressed = len(prompt)
        if self._moment.compress_at == "context" and len(prompt) > 1:
            split = self._compressed(text, cut)
            compressed = max(1, len(prompt) - 1 if split is None else min(split, len(prompt) - 1))

        def over(tokens: list[int]) -> bool:
            said = self.tokenizer.decode(tokens) if until else ""
            return any(end in said for end in until)

        return Asked(prompt, compressed, over)

    # ------------------------------------------------------------------ what they share

    def _shown(self, found: Iterable[T], total: int, kind: str, hidden: bool) -> Iterable[T]:
        return tqdm(found, total=total, desc=f"Running {kind} requests", disable=hidden)

    def _fitting(self, tokens: list[int], room: int) -> tuple[list[int], int]:
        """The last `room` of the tokens, and how many are left out; the first time with a warning."""
        cut = max(0, len(tokens) - room)
        if cut and not self._cut:
            LOG.warning(
                "%d tokens of a request do not fit into the %d of %s. The request loses its beginning, as in the "
                "harness's own models. The results count such requests.",
                cut,
                self.max_length,
                self.lm.name,
            )
        self._cut += cut > 0
        return tokens[cut:], cut

    def _compressed(self, text: str, cut: int) -> int | None:
        """Count the tokens of a text that lie wholly before its question, without the first `cut` ones.

        None where no question is distinguished: then all tokens but the last are compressed.
        """
        start = self._moment.start(text)
        if start is None:
            return None
        offsets = self._encoded(text, return_offsets_mapping=True)["offset_mapping"]
        return sum(1 for _, end in offsets if end <= start) - cut

    def _note(self, request: Any, held: Held | None) -> None:
        self._held[getattr(request, "task_name", None) or "unnamed"].append(held)

    def _tell(self) -> None:
        for task, held in self._held.items():
            LOG.info("%s: %s", task, ", ".join(f"{name} {value:,.0f}" for name, value in _means(held).items()))


def _means(held: Sequence[Held | None]) -> dict[str, float]:
    """The number of requests, the number in which anything was compressed, and the means over the latter."""
    read = [asdict(each) for each in held if each is not None]
    found: dict[str, float] = {"requests": len(held), "compressed_requests": len(read)}
    for name in read[0] if read else ():
        values = [each[name] for each in read if each[name] or name != "read_bytes"]
        if name != "uncompressed_bytes" or any(values):
            found[name] = sum(values) / len(values) if values else 0.0
    return found


def _version() -> str:
    from kvlab import __version__

    return f"kvlab {__version__}"
