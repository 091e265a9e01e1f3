"""TOVA (Oren et al., 2024): what the latest token attends to least leaves, at every step."""

from typing import ClassVar

from torch import Tensor

from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.eviction import evict_lowest
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class TOVA(Scorer):
    """Keeps, for the whole layer, the tokens that the latest query attends to most; one out for each one in.

    "Transformers are Multi-State RNNs" (Oren et al. 2024), section 3.2: the last query's attention, averaged over all
    heads of the layer, ranks the tokens. The lowest leaves. The prompt is brought down by its last query, and each
    decoding step by its own. One set serves all heads. Cost: none but the attention itself.

    Choices where the paper is silent: nothing is forced, so that the latest token itself may leave, as in the authors'
    code. Of equal scores the earlier position stays.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "what the latest token attends to, one set for a layer, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["tova"]

    @property
    def observes(self) -> int:
        return 1

    def scores(self, prompt: Prompt) -> Tensor:
        """Attention of the last query, averaged over the layer's heads, `[rows, kv_heads, length]`."""
        averaged = prompt.window_sums(1).mean(1, keepdim=True)
        return averaged.expand(-1, prompt.kv_heads, -1)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        evict_lowest(store, weights.mean(1, keepdim=True).expand(store.positions.shape), recent=0)
