"""The papers of kvlab's methods: title, authors, year, arXiv id, and the address of the authors' code.

Policies and the files of claims read them from here. This file needs no torch, which `kvlab.methods` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvlab.errors import KvlabError


@dataclass(frozen=True)
class Paper:
    """A paper, as one cites it.

    Attributes:
        title: as on arXiv.
        authors: their surnames; the first one's and "et al." for more than two.
        year: of the first version.
        arxiv: the arXiv id without a version, such as "2404.14469"; None where the paper has none.
        code: the address of the authors' code; None where no such address is known.

    Raises:
        KvlabError: an arXiv id or an address of another form.
    """

    title: str
    authors: str
    year: int
    arxiv: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        if self.arxiv is not None and not re.fullmatch(r"\d{4}\.\d{4,5}", self.arxiv):
            raise KvlabError(f"{self.arxiv!r} is no arXiv id; give it without a version, such as '2404.14469'")
        if self.code is not None and not re.match(r"https?://\S+$", self.code):
            raise KvlabError(f"{self.code!r} is no address of code; it begins with https://")

    @property
    def url(self) -> str | None:
        """The address of the paper's page on arXiv; None without an id."""
        return None if self.arxiv is None else f"https://arxiv.org/abs/{self.arxiv}"

    @property
    def cited(self) -> str:
        """Authors and year, such as "Li et al. 2024"."""
        return f"{self.authors} {self.year}"


# By the name of the policy; of a paper with several, by that of its whole system.
PAPERS = {
    "adakv": Paper(
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
        "Feng et al.",
        2024,
        "2407.11550",
        "https://github.com/FFY0/AdaKV",
    ),
    "attention_matching": Paper(
        "Fast KV Compaction via Attention Matching",
        "Zweiger et al.",
        2026,
        "2602.16284",
        "https://github.com/adamzweiger/compaction",
    ),
    "cake": Paper(
        "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences",
        "Qin et al.",
        2025,
        "2503.12491",
        "https://github.com/antgroup/cakekv",
    ),
    "chunkkv": Paper(
        "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
        "Liu et al.",
        2025,
        "2502.00299",
        "https://github.com/NVIDIA/kvpress",
    ),
    "compactor": Paper(
        "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
        "Chari and Van Durme",
        2025,
        "2507.08143",
        "https://github.com/vnchari/compactor-vllm",
    ),
    "compilerkv": Paper(
        "CompilerKV: Risk-Adaptive KV Compression via Offline Experience Compilation",
        "Yang et al.",
        2026,
        "2602.08686",
        "https://github.com/luckypiggy-orangejuice/CompilerKV",
    ),
    "criticalkv": Paper(
        "CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective",
        "Feng et al.",
        2025,
        "2502.03805",
        "https://github.com/FFY0/DefensiveKV",
    ),
    "curdkv": Paper(
        "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition", "Sengupta et al.", 2025, "2509.15038"
    ),
    "dapq": Paper(
        "Where Matters More Than What: Decoding-aligned KV Cache Compression via Position-aware Pseudo Queries",
        "Tian et al.",
        2026,
        "2603.11564",
        "https://anonymous.4open.science/r/Anonymous-DapQ",
    ),
    "duoattention": Paper(
        "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
        "Xiao et al.",
        2024,
        "2410.10819",
        "https://github.com/mit-han-lab/duo-attention",
    ),
    "dynamickv": Paper(
        "DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs",
        "Zhou et al.",
        2024,
        "2412.14838",
        "https://github.com/DreamMr/DynamicKV",
    ),
    "expected_attention": Paper(
        "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
        "Devoto et al.",
        2025,
        "2510.00636",
        "https://github.com/NVIDIA/kvpress",
    ),
    "h2o": Paper(
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        "Zhang et al.",
        2023,
        "2306.14048",
        "https://github.com/FMInference/H2O",
    ),
    "keydiff": Paper(
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained "
        "Environments",
        "Park et al.",
        2025,
        "2504.15364",
    ),
    "keyformer": Paper(
        "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference",
        "Adnan et al.",
        2024,
        "2403.09054",
        "https://github.com/d-matrix-ai/keyformer-llm",
    ),
    "knorm": Paper(
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        "Devoto et al.",
        2024,
        "2406.11430",
        "https://github.com/alessiodevoto/l2compress",
    ),
    "kvcompose": Paper(
        "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens",
        "Akulov et al.",
        2025,
        "2509.05165",
    ),
    "kvzap": Paper(
        "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
        "Jégou and Jeblick",
        2026,
        "2601.07891",
        "https://github.com/NVIDIA/kvpress",
    ),
    "kvzip": Paper(
        "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
        "Kim et al.",
        2025,
        "2505.23416",
        "https://github.com/snu-mllab/KVzip",
    ),
    "lacache": Paper(
        "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language Models",
        "Shi et al.",
        2025,
        "2507.14204",
        "https://github.com/GATECH-EIC/LaCache",
    ),
    "lagkv": Paper(
        "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        "Liang et al.",
        2025,
        "2504.04704",
        "https://github.com/AI-Lab-China-Merchants-Bank/LagKV",
    ),
    "laq": Paper(
        "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query",
        "Wang et al.",
        2025,
        "2505.20334",
        "https://github.com/noforit/Lookahead_Q-Cache",
    ),
    "morphkv": Paper(
        "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
        "Ghadia et al.",
        2025,
        "2503.00979",
        "https://github.com/ghadiaravi13/MorphKV",
    ),
    "pyramidkv": Paper(
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        "Cai et al.",
        2024,
        "2406.02069",
        "https://github.com/Zefan-Cai/KVCache-Factory",
    ),
    "qfilters": Paper(
        "Q-Filters: Leveraging Query-Key Geometry for Efficient Key-Value Cache Compression",
        "Godey et al.",
        2025,
        "2503.02812",
        "https://github.com/NathanGodey/qfilters",
    ),
    "quest": Paper(
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        "Tang et al.",
        2024,
        "2406.10774",
        "https://github.com/mit-han-lab/Quest",
    ),
    "rkv": Paper(
        "R-KV: Redundancy-aware KV Cache Compression for Training-Free Reasoning Models Acceleration",
        "Cai et al.",
        2025,
        "2505.24133",
        "https://github.com/Zefan-Cai/R-KV",
    ),
    "rocketkv": Paper(
        "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
        "Behnam et al.",
        2025,
        "2502.14051",
        "https://github.com/NVlabs/RocketKV",
    ),
    "scissorhands": Paper(
        "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time",
        "Liu et al.",
        2023,
        "2305.17118",
        "https://github.com/lzcemma/Scissorhands",
    ),
    "simlayerkv": Paper(
        "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction",
        "Zhang et al.",
        2024,
        "2410.13846",
        "https://github.com/sail-sg/SimLayerKV",
    ),
    "snapkv": Paper(
        "SnapKV: LLM Knows What You are Looking for Before Generation",
        "Li et al.",
        2024,
        "2404.14469",
        "https://github.com/FasterDecoding/SnapKV",
    ),
    "sparq": Paper(
        "SparQ Attention: Bandwidth-Efficient LLM Inference",
        "Ribar et al.",
        2023,
        "2312.04985",
        "https://github.com/graphcore-research/llm-inference-research",
    ),
    "streamingllm": Paper(
        "Efficient Streaming Language Models with Attention Sinks",
        "Xiao et al.",
        2023,
        "2309.17453",
        "https://github.com/mit-han-lab/streaming-llm",
    ),
    "think": Paper(
        "ThinK: Thinner Key Cache by Query-Driven Pruning",
        "Xu et al.",
        2024,
        "2407.21018",
        "https://github.com/SalesforceAIResearch/ThinK",
    ),
    "tova": Paper(
        "Transformers are Multi-State RNNs",
        "Oren et al.",
        2024,
        "2401.06104",
        "https://github.com/schwartz-lab-NLP/TOVA",
    ),
    "triattention": Paper(
        "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression",
        "Mao et al.",
        2026,
        "2604.04921",
        "https://github.com/WeianMao/triattention",
    ),
    "zigzagkv": Paper(
        "ZigZagkv: Dynamic KV Cache Compression for Long-context Modeling based on Layer Uncertainty",
        "Zhong et al.",
        2024,
        "2412.09036",
    ),
    "zsmerge": Paper(
        "ZSMerge: Zero-Shot KV Cache Compression for Memory-Efficient Long-Context LLMs",
        "Liu et al.",
        2025,
        "2503.10714",
        "https://github.com/SusCom-Lab/ZSMerge",
    ),
}
