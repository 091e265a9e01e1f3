"""A GGUF file of a few kilobytes: a Llama with random weights and a byte-level tokenizer, as llama.cpp writes it."""

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


def write(path: Path, seed: int = 0, tokenizer: bool = True) -> Path:
    """Write the file, with or without the tokenizer's vocabulary, and return its path."""
    rng = np.random.default_rng(seed)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = byte_letters()
    newline = letters[10]
    tokens = special + letters + [newline + newline]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.NORMAL] * 257)
        writer.add_token_merges([f"{newline} {newline}"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape) if len(shape) == 1 else rng.normal(scale=0.2, size=shape)
        writer.add_tensor(name, values.astype(np.float16).astype(np.float32))

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", HIDDEN)
        add(f"{block}.ffn_norm.weight", HIDDEN)
        add(f"{block}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"{block}.attn_k.weight", kv, HIDDEN)
        add(f"{block}.attn_v.weight", kv, HIDDEN)
        add(f"{block}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate.weight", MLP, HIDDEN)
        add(f"{block}.ffn_up.weight", MLP, HIDDEN)
        add(f"{block}.ffn_down.weight", HIDDEN, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
