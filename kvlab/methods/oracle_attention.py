"""The gold set as a policy: the limit of what a prefill policy can keep of the response's attention."""

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.core import attention
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class OracleAttention(Scorer):
    """Keeps the tokens that the response will attend to most: it sees the response, which no method can.

    A reference and no method. Attention of the response's queries over the prompt is summed over the response and the
    GQA group. The top `budget` positions stay (DapQ's gold set, Tian et al. 2026, equation 1). Nothing is forced; every
    generated token is also kept. Only a replay and `kvlab.fidelity` know the response. A live run takes the sets that
    `kvlab.attribution.oracle.oracle_attention` finds. Cost: none that counts.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
    """

    name: ClassVar[str] = "oracle_attention"
    summary: ClassVar[str] = "what the response attends to most: it sees the response, a reference and no method"
    family: ClassVar[str] = "reference"
    kind: ClassVar[str] = "reference"
    sees_response: ClassVar[bool] = True

    def scores(self, prompt: Prompt) -> Tensor:
        queries = prompt.response(self)

        def summed(row: int) -> Tensor:
            weights = attention.attention_over_prompt(queries[row], prompt.keys[row], prompt.softmax(row))
            return attention.sum_over_group(weights.sum(-2), prompt.kv_heads)

        return prompt.share(("gold",), lambda: torch.stack([summed(row) for row in range(prompt.rows)]))
