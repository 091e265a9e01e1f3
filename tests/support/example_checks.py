"""What every maker of examples keeps to, checked from the outside: lengths, ids, the same bytes for the same seed."""

from __future__ import annotations


def length(lm, example):
    """Tokens of prompt, chat template and prefix, counted afresh."""
    count = lm.encode(example.prompt, chat="auto" if example.chat else False).shape[1]
    return count + len(lm.tokenizer(example.prefix, add_special_tokens=False)["input_ids"] if example.prefix else [])


def tokens_before(lm, text, needle):
    """How many tokens of `text` stand before `needle`, and how many it has without it."""
    before, _, after = text.partition(needle)
    assert needle in text and needle not in after
    count = [len(lm.tokenizer(part.strip(), add_special_tokens=False)["input_ids"]) for part in (before, after)]
    return count[0], sum(count)


def sound(lm, examples):
    """Lengths at most 2 % below the wanted ones, different ids, and answers; returns the examples as a list."""
    examples = list(examples)
    assert examples and len({example.id for example in examples}) == len(examples)
    for example in examples:
        wanted = example.marks["length"]
        assert 0.98 * wanted <= length(lm, example) <= wanted, example.id
        assert example.marks["tokens"] == length(lm, example)
        assert example.answers and all(example.answers) and example.question and example.max_new_tokens > 0
        assert example.prompt == example.context + example.question
    return examples


def seeded(task, lm, limit=None, **parameters):
    """The same seed makes the same examples, another one makes others, of the same cells."""
    first, again, other = (list(task(**parameters, seed=seed).examples(lm, limit)) for seed in (3, 3, 4))
    assert first == again
    assert [example.id for example in first] == [example.id for example in other]
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
