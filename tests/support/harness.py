"""Three tasks of our own for the lm-evaluation-harness, as its YAML, over files beside them."""

from __future__ import annotations

import json

import lm_eval
from lm_eval.tasks import TaskManager

from support.texts import FERRY

CHOICES = """
task: kvlab_ferry
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{passage}}}}\\nQuestion: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ANSWERS = """
task: kvlab_said
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: {new_tokens}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: kvlab_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""

PASSAGES = [FERRY[start : start + 900] for start in (0, 300, 700)]
CHOSEN = [
    {"passage": text, "question": f"Which number is {n}?", "choices": ["A", "B", "the third of the boats"], "label": n}
    for n, text in enumerate(PASSAGES)
]
STREAMING = dict(policy="streamingllm", budget=24)
SNAPKV = dict(policy="snapkv", budget=40, window=8)


def evaluated(model, *tasks, **options):
    """What the harness finds, with no tasks but these."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, **options
    )
    assert found is not None
    return found


def written(folder, yaml, name, records, **values):
    """A task's YAML in a folder, with the records that it reads beside it; its path."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    path = folder / f"{name}.yaml"
    path.write_text(yaml.format(folder=folder, name=name, **values), encoding="utf-8")
    return str(path)
