"""A tiny model with a tokenizer of plain words, and a task of counting words; shared by the tests of evaluations.

Run as a script it evaluates under fire: a child is killed again and again, and the last one is left to finish.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import kvlab
from kvlab import evaluation
from kvlab.inputs import models
from kvlab.tasks.base import Example, Task

WORDS = {f"w{n}": n for n in range(256)}


def wordy(family="tiny-llama-gqa"):
    """A random model that reads and writes w0 .. w255, without a chat template."""
    words = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    return models.random_lm(family, device="cpu", dtype="float32", tokenizer=tokenizer)


class Echo(Task):
    """Random words; an answer scores by how many of the words it holds."""

    name: ClassVar[str] = "echo"
    summary: ClassVar[str] = "for tests"

    n: int = 3
    words: int = 40
    tokens: int = 6

    def examples(self, lm, limit=None):
        for number in range(min(self.n, limit or self.n)):
            draw = random.Random(f"{self.seed} {number}")
            context = " ".join(f"w{draw.randrange(3, 256)}" for _ in range(self.words))
            question = " " + " ".join(f"w{draw.randrange(3, 256)}" for _ in range(5))
            yield Example(f"echo-{number}", context, question, (f"w{number}",), self.tokens, marks={"number": number})

    def score(self, example, prediction):
        found = set(prediction.split())
        return {"score": len(found & set(example.prompt.split())) / max(len(found), 1)}


POLICIES = (
    kvlab.policy("streamingllm", budget=10),
    kvlab.policy("h2o", budget=12),
    kvlab.policy("quest", budget=16, page=2),
)
KILLED = evaluation.Plan(Echo(n=80, words=60, tokens=10), POLICIES)


def under_fire(path, kills):
    """How often a child was killed before it had finished, and whether the last one ended well."""
    lm, draw, killed = wordy(), random.Random(5), 0
    while True:
        child = os.fork()
        if child == 0:
            evaluation.run(lm, KILLED, path)
            os._exit(0)
        if killed == kills:
            return killed, os.waitpid(child, 0)[1]
        time.sleep(draw.uniform(0.02, 0.12))
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return killed, status
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*under_fire(sys.argv[1], int(sys.argv[2])))
