"""A language model with its tokenizer."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from kvlab.core.hookable import device_of, layout_of, unwrapped
from kvlab.core.quantised import parts
from kvlab.errors import KvlabError
from kvlab.inputs.models.catalogue import RANDOM_PREFIX
from kvlab.lib.files import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvlab.core.layout import Layout


@dataclass(repr=False)
class LM:
    """A language model in evaluation mode, with its tokenizer (None where its weights are random or came without one).

    `sha256` is that of its weight files, or of the recipe where the weights are random.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    sha256: str

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context_length(self) -> int:
        """The longest sequence, in tokens, that the model was made for."""
        return self.model.config.get_text_config().max_position_embeddings

    @property
    def layout(self) -> Layout:
        """Which of its layers policies compress, and what the others look at; `layout.table()` is its tidy form."""
        return layout_of(self.model)

    @property
    def n_layers(self) -> int:
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def signature(self) -> str:
        return f"{self.name}@{self.sha256[:8]}"

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        context = f"up to {self.context_length} tokens"
        return f"LM({self.signature}, {self.n_layers} layers, {kind} on {self.device}, {context})"

    def encode(self, text: str, chat: bool | str = "auto") -> torch.Tensor:
        """The ids of `text`, int64 [1, tokens].

        chat="auto" makes it a user message where the tokenizer has a chat template, True insists on that, False takes
        the text as it stands. Raises KvlabError for an empty text, or where there is no tokenizer or no template.
        """
        tokenizer = self.require_tokenizer("it takes token ids instead of text")
        if not text.strip():
            raise KvlabError("the text is empty: there is nothing to read")
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat is True and not has_template:
            raise KvlabError(f"{self.name} has no chat template: use chat=False or chat='auto'")
        if chat and has_template:
            text = self._templated(tokenizer, text)
        ids = tokenizer(text, add_special_tokens=not (chat and has_template), verbose=False)["input_ids"]
        if not ids:
            raise KvlabError(f"{self.name}'s tokenizer finds no token in this text: there is nothing to read")
        return torch.tensor([ids], dtype=torch.int64, device=self.device)

    def require_tokenizer(self, so: str) -> PreTrainedTokenizerBase:
        """The tokenizer; where there is none a KvlabError, which says with `so` what follows from that."""
        if self.tokenizer is None:
            raise KvlabError(f"{self.name} has no tokenizer, so {so}; {self._remedy}")
        return self.tokenizer

    @property
    def _remedy(self) -> str:
        if self.name.startswith(RANDOM_PREFIX):
            return "kvlab.random_lm(..., tokenizer=NAME) makes it with one"
        return "to give it one, put its tokenizer.json next to the weights"

    def _templated(self, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
        import jinja2

        message = [{"role": "user", "content": text}]
        try:
            return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
        # A template is a program of the model's makers, run in a sandbox: it can fail in any way.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            AttributeError,
            TypeError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            why = first_line(error).rstrip(".")
            raise KvlabError(f"the chat template of {self.name} fails ({why}); use chat=False") from error

    def decode(self, ids: torch.Tensor | list[int]) -> str:
        """The text of one sequence of ids ([tokens] or [1, tokens]), without special tokens."""
        tokenizer = self.require_tokenizer("its ids have no text")
        return str(tokenizer.decode(torch.as_tensor(ids).reshape(-1).tolist(), skip_special_tokens=True))


class _Bare(LM):
    """A transformers model that came alone: without tokenizer, and with the hash of what its weights are now."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.tokenizer = model, None
        self.name = Path(getattr(model.config, "name_or_path", "") or type(model).__name__).name

    # Read from the weights, so that nobody who asks for something else waits for it.
    @functools.cached_property
    def sha256(self) -> str:  # type: ignore[reportIncompatibleVariableOverride]
        # A capture is in inference mode, where a quantised weight cannot be detached.
        with torch.inference_mode(False):
            return self._hashed()

    def _hashed(self) -> str:
        config = self.model.config.to_dict()
        own = {name: config[name] for name in sorted(config) if name not in ("_name_or_path", "transformers_version")}
        digest = hashlib.sha256(json.dumps(own, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            tensor: torch.Tensor = _brought(self.model, name) if tensor.is_meta else tensor
            for part in parts(tensor):
                digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def encode(self, text: str, chat: bool | str = "auto") -> torch.Tensor:
        raise KvlabError(
            f"the {type(self.model).__name__} came without its tokenizer: give token ids instead of text, "
            "or what kvlab.load gives instead of its model"
        )


def _brought(model: torch.nn.Module, name: str) -> torch.Tensor:
    """A weight that accelerate has offloaded."""
    from accelerate.utils import align_module_device

    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    with align_module_device(module):
        found = getattr(module, own).detach()
        if found.is_meta:
            raise KvlabError(
                f"the weight {name} is on the meta device and has no values; load the model's weights first"
            )
        return found.cpu()


def lm_of(model: LM | torch.nn.Module) -> LM:
    """The result of `kvlab.load`, or a transformers model, as an LM; a model alone has no tokenizer.

    Raises KvlabError for anything else.
    """
    if isinstance(model, LM):
        inside = unwrapped(model.model)
        return model if inside is model.model else replace(model, model=inside)
    model = unwrapped(model)
    if isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
        model = cast("PreTrainedModel", model)
        if model.get_output_embeddings() is not None:
            return _Bare(model)
        raise KvlabError(f"a {type(model).__name__} gives no logits: it is a part of a model; give the whole")
    raise KvlabError(f"a model is what kvlab.load gives, or a transformers model, and not {model!r:.60}")
