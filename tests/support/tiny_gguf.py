"""GGUF files of a few kilobytes, with random weights and a byte-level tokenizer, as llama.cpp writes them.

A Llama, unless another architecture is asked for.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 256
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next letter from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in prints else next(hidden)) for byte in range(256)]


def write(
    path: Path,
    seed: int = 0,
    tokenizer: bool = True,
    architecture: str = "llama",
    quantised: gguf.GGMLQuantizationType | None = None,
    tied: bool = True,
    merges: tuple[str, ...] = (),
    pre: str = "smollm",
    scale: float = 0.2,
    norms: tuple[float, ...] = (1.0,),
    without: tuple[str, ...] = (),
) -> Path:
    """Write the file, with or without the tokenizer's vocabulary, and return its path.

    Args:
        architecture: "llama", "qwen2" (biases), "gemma3" (more norms) or "lfm2" (a convolution in the first layer).
        quantised: the type of the matrices; float16 numbers in float32 where it is None.
        tied: no output matrix of its own.
        merges: of the tokenizer, as pairs of byte letters with a space between; a blank line's by default.
        pre: how text is split before it is merged.
        scale: standard deviation of the matrices' numbers.
        norms: how the weights of each norm begin; the others are 1.
        without: names of tensors that are left out.
    """
    rng = np.random.default_rng(seed)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = byte_letters()
    newline = letters[10]
    merges = merges or (f"{newline} {newline}",)
    tokens = special + letters + [merge.replace(" ", "") for merge in merges]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([0, KV_HEADS] if architecture == "lfm2" else KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    if architecture == "gemma3":
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_value_length(HIDDEN // HEADS)
        writer.add_sliding_window(64)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(3)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(
            [gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.NORMAL] * (len(tokens) - len(special))
        )
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
    for name, shape in _shapes(architecture, len(tokens), tied).items():
        values = rng.normal(scale=scale, size=shape).astype(
            np.float16 if quantised is None or len(shape) == 1 else np.float32
        )
        values = values.astype(np.float32)
        if "norm" in name:
            values = np.ones(shape, np.float32)
            values[: len(norms)] = norms
        if name in without:
            continue
        if quantised is not None and len(shape) == 2 and "conv.conv" not in name:
            data = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(architecture: str, vocabulary: int, tied: bool) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN)}
    shapes |= {("token_embd_norm" if architecture == "lfm2" else "output_norm") + ".weight": (HIDDEN,)}
    if not tied:
        shapes |= {"output.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        names: dict[str, tuple[int, ...]] = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
        if architecture == "lfm2" and layer == 0:
            names |= {"shortconv.conv.weight": (HIDDEN, 3), "shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN)}
            names |= {"shortconv.out_proj.weight": (HIDDEN, HIDDEN)}
        else:
            names |= {"attn_q.weight": (HIDDEN, HIDDEN), "attn_output.weight": (HIDDEN, HIDDEN)}
            names |= {"attn_k.weight": (kv, HIDDEN), "attn_v.weight": (kv, HIDDEN)}
            if architecture == "qwen2":
                names |= {"attn_q.bias": (HIDDEN,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            if architecture in ("gemma3", "lfm2"):
                names |= {"attn_q_norm.weight": (HIDDEN // HEADS,), "attn_k_norm.weight": (HIDDEN // HEADS,)}
            if architecture == "gemma3":
                names |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        names |= {"ffn_gate.weight": (MLP, HIDDEN), "ffn_up.weight": (MLP, HIDDEN), "ffn_down.weight": (HIDDEN, MLP)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in names.items()}
    return shapes
