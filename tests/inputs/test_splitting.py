"""Tokenizers of GGUF files split text as the file says, against plain loops, and end a response where they should."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow_bpe, tiny_gguf
from support.texts import FERRY

from kvlab.inputs import wheels
from kvlab.inputs.models import conversion, gguf_file, pretokenizers
from kvlab.inputs.models.folder import read_tokenizer

SAMPLE = (
    "In 1962 we paid $10,000 for 3.14 acres; it's we'll WE'LL don't 2024-05-06 12345678\n\n\n"
    "def f(x, y=1):\n    return {'a': [x ** 2, y]}  # 100%\r\n\t\tend   \n"
    "汉字 中文字符123 かな カナ 한국어 привет мир, naïve café cafe\u0301 n\u0303o ½² ١٢٣ १२३ "
    "😀🎉👍🏽👨‍👩‍👧 🇩🇪 \u00a0\u3000\u200b — “quoted” …!? <tag/> foo_bar CamelCase a/b\\c ~/.x @me #1 a  b   c    d\n"
)
ALPHABET = st.sampled_from(sorted(set(SAMPLE + FERRY)))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def merges():
    return tuple(slow_bpe.learnt(SAMPLE * 3 + FERRY[:1500], 250))


@pytest.fixture(scope="module")
def made(tmp_path_factory, merges):
    """made(pre): the tokenizer of a GGUF file, as it is loaded again from the folder, and the slow one."""
    folder, pairs = tmp_path_factory.mktemp("splitting"), {}

    def make(pre):
        if pre not in pairs:
            architecture = "qwen2" if pre == "qwen2" else "llama"
            file = gguf_file.opened(
                tiny_gguf.write(folder / f"{pre}.gguf", architecture=architecture, merges=merges, pre=pre)
            )
            target = folder / pre
            target.mkdir()
            pretokenizers.read(file.path, file.metadata).save_pretrained(target)
            (target / "config.json").write_text(json.dumps({"model_type": architecture}))
            tokens = SPECIAL + tiny_gguf.byte_letters() + [merge.replace(" ", "") for merge in merges]
            pairs[pre] = read_tokenizer(target), slow_bpe.SlowBPE(tokens, list(merges), pre, SPECIAL)
        return pairs[pre]

    return make


def texts(count: int) -> list[str]:
    rng = random.Random(0)
    words = SAMPLE.replace("\n", " \n ").split(" ")
    return [" ".join(rng.choice(words) for _ in range(rng.randint(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("pre", slow_bpe.SPLITS)
def test_a_way_of_splitting_is_that_of_plain_loops(made, pre):
    ours, slow = made(pre)
    for text in [SAMPLE, FERRY, "<|im_start|>user\n1962<|im_end|>\n", *texts(150)]:
        assert ours(text, add_special_tokens=False)["input_ids"] == slow.encode(text), repr(text)


@settings(max_examples=60, deadline=None)
@given(text=st.text(ALPHABET, max_size=60), pre=st.sampled_from(sorted(slow_bpe.SPLITS)))
def test_any_text_is_split_alike(made, text, pre):
    ours, slow = made(pre)
    assert ours(text, add_special_tokens=False)["input_ids"] == slow.encode(text)


def test_the_ways_are_told_apart_by_these_texts(made):
    """Or the tests above would test nothing: no two of the expressions give the same tokens."""
    alike = {"starcoder": "smollm", "stablelm2": "qwen2", "dbrx": "llama-bpe", "olmo": "gpt-2", "command-r": "smollm"}
    seen = {}
    for pre in slow_bpe.SPLITS:
        if pre not in alike:
            pieces = tuple(slow_bpe.split(SAMPLE, pre))
            assert pieces not in seen, (pre, seen.get(pieces))
            seen[pieces] = pre
    composed = made("command-r")[0]("cafe\u0301")["input_ids"]
    assert composed == made("smollm")[0]("café")["input_ids"] != made("smollm")[0]("cafe\u0301")["input_ids"]


def test_every_text_comes_back(made):
    for pre in slow_bpe.SPLITS:
        if pre not in slow_bpe.COMPOSED:
            ours, _ = made(pre)
            assert ours.decode(ours(SAMPLE)["input_ids"], clean_up_tokenization_spaces=False) == SAMPLE


def test_every_name_that_transformers_knows_is_in_the_table():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert GGUF_PRE_TOKENIZER_SPLITS.keys() <= pretokenizers.KINDS.keys()


@pytest.mark.parametrize(
    ("architecture", "pre", "ends"),
    [("llama", "smollm", 2), ("qwen2", "qwen2", [2, 0]), ("llama", "llama-bpe", 2), ("gemma3", "gpt-2", 2)],
)
def test_a_response_ends_at_the_files_token_and_at_those_of_its_kind(tmp_path, own_home, architecture, pre, ends):
    path = tiny_gguf.write(tmp_path / "a.gguf", architecture=architecture, pre=pre)
    folder = tmp_path / "made"
    folder.mkdir()
    conversion._convert(*conversion._read_skeleton(path), folder, "tiny", progress=False)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_settings_of_the_file_reach_the_tokenizer(tmp_path, own_home):
    path = tiny_gguf.write(tmp_path / "a.gguf")
    tokenizer = read_tokenizer(conversion.converted(path, wheels.file_sha256(path), progress=False))
    assert tokenizer.model_max_length == tiny_gguf.CONTEXT and tokenizer.chat_template == tiny_gguf.TEMPLATE
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (SPECIAL[2], SPECIAL[2], SPECIAL[1])
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
