"""Key norms (Devoto et al., 2024): keys of small norm are attended to most."""

from typing import ClassVar

from torch import Tensor

from kvlab.core import attention
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class KNorm(Scorer):
    """Keeps the tokens whose keys have the smallest L2 norm; prefill only.

    "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (Devoto et al. 2024), section 3: attention
    and the key's norm correlate negatively. No query is needed. Every generated token is also kept. Cost: one norm for
    each entry.

    Choices: the paper leaves the first two layers whole in some runs; here all layers have the same budget. A rotation
    leaves the norm as it is, so that the rotated keys of the cache serve.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
    """

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "prompt tokens whose keys have a small norm"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["knorm"]

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(("knorm",), lambda: -attention.exact(prompt.keys).norm(dim=-1))
