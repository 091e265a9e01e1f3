"""The harness's own evaluation with the model kvlab: tasks in its YAML, offline, on a tiny random model."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from lm_eval.api.registry import get_model
from support.commands import call
from support.harness import ANSWERS, CHOICES, CHOSEN, PASSAGES, ROLLING, SNAPKV, STREAMING, evaluated, written
from support.texts import FERRY

import kvlab
from kvlab import evaluation
from kvlab.errors import KvlabError
from kvlab.harness.model import KvlabLM
from kvlab.harness.reading import Continued, Reader
from kvlab.tasks.base import Example

NEW = 8


def examples(prompts=PASSAGES, question="\nQuestion: what comes next?", chat=False):
    return [
        Example(str(n), context, question, ("x",), max_new_tokens=NEW, chat=chat) for n, context in enumerate(prompts)
    ]


@pytest.mark.parametrize("arguments", [STREAMING, SNAPKV, dict(policy="full")], ids=lambda a: a["policy"])
def test_choices_are_scored_by_likelihoods_of_the_compressed_cache(reader, tmp_path, arguments):
    path = written(tmp_path, CHOICES, "choices", CHOSEN)
    found = evaluated(KvlabLM(reader, **arguments), path)
    policy = kvlab.policy(arguments["policy"], **{k: v for k, v in arguments.items() if k != "policy"})
    right = []
    for sample, record in zip(found["samples"]["kvlab_ferry"], CHOSEN, strict=True):
        text = f"{record['passage']}\nQuestion: {record['question']}\nAnswer:"
        context = reader.encode(text, chat=False)
        told = []
        for choice, (((logprob, greedy),),) in zip(record["choices"], zip(sample["resps"]), strict=True):
            whole = reader.encode(f"{text} {choice}", chat=False)
            last, steps = context.shape[1] - 1, whole.shape[1] - context.shape[1]
            options = dict(turns="leave", tokenizer=reader.tokenizer, max_new_tokens=steps)
            with kvlab.compress(reader.model, policy, **options) as session:
                past, total = reader.model(context[:, :last]).past_key_values, 0.0
                session.end_prompt()
                for place in range(last, last + steps):
                    logits = reader.model(whole[:, place : place + 1], past_key_values=past).logits[0, -1]
                    total += float(logits.log_softmax(-1)[whole[0, place + 1]])
            assert logprob == pytest.approx(total, abs=1e-3) and greedy is False
            told.append(total)
        right.append(told.index(max(told)) == record["label"])
    assert found["results"]["kvlab_ferry"]["acc,none"] == pytest.approx(sum(right) / 3)


@pytest.mark.parametrize("at", ["prompt", "context"])
@pytest.mark.parametrize("arguments", [STREAMING, SNAPKV, dict(policy="full")], ids=lambda a: a["policy"])
def test_answers_and_scores_are_those_of_kvlab_eval(reader, tmp_path, arguments, at):
    policy = kvlab.policy(arguments["policy"], **{k: v for k, v in arguments.items() if k != "policy"})
    made = [next(iter(evaluation.answers(reader, example, [policy], at))) for example in examples()]
    # Two of three references are what kvlab's own evaluation answers.
    references = [made[0]["prediction"], made[1]["prediction"], "something else"]
    records = [{"prompt": e.prompt, "answer": a} for e, a in zip(examples(), references, strict=True)]
    path = written(tmp_path, ANSWERS, "answers", records, new_tokens=NEW)
    question = {"question": "\nQuestion:"} if at == "context" else {}
    model = KvlabLM(reader, compress_at=at, **arguments, **question)
    found = evaluated(model, path)
    said = [sample["resps"][0][0] for sample in found["samples"]["kvlab_said"]]
    assert said == [answer["prediction"] for answer in made]
    assert found["results"]["kvlab_said"]["exact_match,none"] == pytest.approx(2 / 3)
    told = found["config"]["kvlab"]["tasks"]["kvlab_said"]
    assert told["requests"] == told["compressed_requests"] == 3
    mean = sum(answer["kv_bytes"] + answer["aux_bytes"] for answer in made) / 3
    assert told["stored_bytes"] == pytest.approx(mean)
    if at == "prompt":
        assert told["prompt_tokens"] == told["compressed_tokens"]
    else:
        assert told["compressed_tokens"] < told["prompt_tokens"]


@pytest.mark.parametrize("at", ["prompt", "context"])
def test_batches_change_no_score_and_no_count(reader, tmp_path, at):
    """Neither of choices nor of responses, whatever the harness calls its batch."""
    records = [{"prompt": e.prompt, "answer": "x"} for e in examples()]
    paths = (
        written(tmp_path, CHOICES, "choices", CHOSEN),
        written(tmp_path, ANSWERS, "answers", records, new_tokens=NEW),
        written(tmp_path, ROLLING, "texts", [{"text": FERRY[:900]}]),
    )
    told = []
    for size in (1, "2", "auto"):
        model = KvlabLM(reader, compress_at=at, batch_size=size, rolling_chunk=40, **SNAPKV)
        found = evaluated(model, *paths)
        said = [sample["resps"] for sample in found["samples"]["kvlab_said"]]
        likely = [resp[0] for sample in found["samples"]["kvlab_ferry"] for resp in sample["filtered_resps"]]
        texts = [sample["resps"][0][0] for sample in found["samples"]["kvlab_texts"]]
        told.append((said, found["config"]["kvlab"]["tasks"], likely, texts))
    for found in told[1:]:
        assert found[:2] == told[0][:2]
        assert found[2] == pytest.approx(told[0][2], abs=1e-3) and found[3] == pytest.approx(told[0][3], abs=1e-3)


def test_a_chat_template_gives_what_kvlab_eval_asks(reader, tmp_path):
    asked = examples(chat=True)
    made = [next(iter(evaluation.answers(reader, e, [kvlab.policy("full")], "prompt"))) for e in asked]
    records = [{"prompt": e.prompt, "answer": "x"} for e in asked]
    path = written(tmp_path, ANSWERS, "answers", records, new_tokens=NEW)
    found = evaluated(KvlabLM(reader), path, apply_chat_template=True)
    prompts = [sample["arguments"][0][0] for sample in found["samples"]["kvlab_said"]]
    assert [reader.encode(text, chat=False).tolist() for text in prompts] == [
        reader.encode(e.prompt, chat=True).tolist() for e in asked
    ]
    assert [s["resps"][0][0] for s in found["samples"]["kvlab_said"]] == [answer["prediction"] for answer in made]


def test_a_response_ends_before_the_text_until_which_it_goes(reader, tmp_path):
    records = [{"prompt": e.prompt, "answer": "x"} for e in examples()[:1]]
    path = written(tmp_path, ANSWERS, "answers", records, new_tokens=NEW)
    model = KvlabLM(reader, **STREAMING)
    whole = evaluated(model, path)["samples"]["kvlab_said"][0]["resps"][0][0]
    end = whole[len(whole) // 2 :][:3]
    short = evaluated(model, path, gen_kwargs={"until": [end]})["samples"]["kvlab_said"][0]["resps"][0][0]
    assert short == whole.split(end)[0]


def test_a_limit_is_a_number_of_examples(reader, tmp_path):
    found = evaluated(KvlabLM(reader, **SNAPKV), written(tmp_path, CHOICES, "choices", CHOSEN), limit=2)
    assert len(found["samples"]["kvlab_ferry"]) == 2
    assert found["config"]["kvlab"]["tasks"]["kvlab_ferry"]["requests"] == 6


def test_rolling_likelihoods_are_those_of_plain_transformers_for_the_full_cache(reader, tmp_path):
    import torch

    path = written(tmp_path, ROLLING, "texts", [{"text": FERRY[:900]}])
    found = evaluated(KvlabLM(reader, rolling_chunk=50), path)
    ids = reader.encode(FERRY[:900], chat=False)
    begin = torch.tensor([[reader.tokenizer.bos_token_id]])
    with torch.inference_mode():
        logits = reader.model(torch.cat([begin, ids[:, :-1]], 1)).logits[0].log_softmax(-1)
    wanted = float(logits.gather(-1, ids[0, :, None]).sum())
    ((logprob,),) = found["samples"]["kvlab_texts"][0]["resps"]
    assert logprob == pytest.approx(wanted, rel=1e-5)
    other = evaluated(KvlabLM(reader, rolling_chunk=50, **STREAMING), path)
    assert other["samples"]["kvlab_texts"][0]["resps"][0][0] != pytest.approx(wanted, rel=1e-5)


def test_what_is_too_long_loses_its_beginning_and_is_counted(reader):
    model = KvlabLM(reader, max_length=64, **STREAMING)
    request = type("Request", (), {"args": (FERRY[:900], " and then the boat"), "task_name": "t"})
    tokens = model.tok_encode(FERRY[:900] + " and then the boat")
    continuation = tokens[len(model.tok_encode(FERRY[:900])) :]
    ((logprob, _),) = model.loglikelihood([request], disable_tqdm=True)
    kept = tokens[len(tokens) - 65 : len(tokens) - len(continuation)]
    alone = Reader(reader, model._reader.policy).likelihoods([Continued(kept, continuation)])
    assert logprob == next(alone).logprob
    assert model.get_model_info()["kvlab"]["cut_requests"] == 1


def test_results_tell_what_was_compressed_and_what_it_took(reader, tmp_path):
    path = written(tmp_path, CHOICES, "choices", CHOSEN)
    small, whole = (evaluated(KvlabLM(reader, **a), path)["config"] for a in (SNAPKV, dict(policy="full")))
    assert small["model_sha"] == reader.sha256 and "snapkv(budget=40, window=8" in small["kvlab"]["signature"]
    json.dumps(small["kvlab"])
    less, more = (config["kvlab"]["tasks"]["kvlab_ferry"] for config in (small, whole))
    assert 0 < less["stored_bytes"] < more["stored_bytes"] and 0 < less["read_bytes"] < more["read_bytes"]
    entry = 2 * 4 * reader.model.config.head_dim * reader.model.config.num_key_value_heads * reader.n_layers
    assert less["stored_bytes"] < (40 + 7) * entry, "the budget, and the tokens of the longest choice"
    assert less["prompt_tokens"] - 1 == less["compressed_tokens"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(policy="snapk", budget=8), "did you mean 'snapkv'"),
        (dict(policy="snapkv"), "snapkv needs a budget"),
        (
            dict(policy="snapkv", budget=64, windw=8),
            "unknown argument of the model kvlab 'windw'; did you mean 'window'",
        ),
        (dict(polcy="snapkv"), "did you mean 'policy'"),
        (dict(policy="snapkv", budget=2), "snapkv"),
        (dict(storage="kivi-3"), "kivi"),
        (dict(compress_at="context "), "neither 'prompt' nor 'context'"),
        (dict(question="Question:"), "compress_at=context"),
        (dict(compress_at="context", question=" "), "the text that a question begins with"),
        (dict(rolling_chunk=1), "at least 2"),
        (dict(batch_size="many"), "batch_size='many' is neither a number from 1 on nor 'auto'"),
        (dict(rolling_chunk="many"), "whole number"),
        (dict(max_length=10**9), "max_length=1000000000"),
        (dict(trust_remote_code=True), "remote code"),
    ],
)
def test_a_wrong_argument_is_one_sentence(reader, arguments, sentence):
    with pytest.raises(KvlabError) as told:
        KvlabLM(reader, **arguments)
    assert sentence in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ({"num_beams": 4}, "unknown argument of a generation 'num_beams'"),
        ({"max_gen_toks": 10**6}, "takes"),
        ({"max_gen_toks": 0}, "at least 1"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 7.0}, "top_p"),
    ],
)
def test_a_generation_that_cannot_be_is_one_sentence(reader, asked, sentence):
    request = type("Request", (), {"args": ("One two three", asked), "task_name": "t"})
    with pytest.raises(KvlabError, match=sentence):
        KvlabLM(reader).generate_until([request], disable_tqdm=True)


def test_a_request_without_the_question_is_named(reader):
    model = KvlabLM(reader, compress_at="context", question="Question:", **STREAMING)
    request = type("Request", (), {"args": ("Nothing is asked.", " Yes"), "task_name": "t"})
    with pytest.raises(KvlabError, match="nowhere in a request that ends with 'Nothing is asked.'"):
        model.loglikelihood([request], disable_tqdm=True)


@pytest.fixture(scope="module")
def folder(reader, tmp_path_factory):
    """The tiny model in a folder."""
    path = tmp_path_factory.mktemp("model")
    reader.model.save_pretrained(path)
    reader.tokenizer.save_pretrained(path)
    return path


def test_the_harness_finds_the_model_by_its_name(folder, reader, tmp_path):
    path = written(tmp_path, CHOICES, "choices", CHOSEN)
    text = f"pretrained={folder},policy=snapkv,budget=40,window=8,compress_at=context,storage=as_is"
    named = evaluated("kvlab", path, model_args=text, device="cpu")
    assert named["results"] == evaluated(KvlabLM(reader, **SNAPKV), path)["results"]
    assert named["config"]["kvlab"]["compress_at"] == "context"
    with pytest.raises(KvlabError, match="neither"):
        evaluated("kvlab", path, model_args=text.replace("context", "the end"))


def test_the_entry_point_leads_to_the_model():
    """As a harness that looks for entry points will find it; 0.4.13 has a name for it only once it is registered."""
    (point,) = importlib.metadata.entry_points(group="lm_eval.models", name="kvlab")
    assert point.load() is KvlabLM is get_model("kvlab")


def test_the_command_hands_its_arguments_to_the_harness(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = written(tmp_path, CHOICES, "choices", CHOSEN)
    model = [
        "--model",
        "kvlab",
        "--model_args",
        f"pretrained={folder},policy=snapkv,budget=40,window=8",
        "--tasks",
        path,
    ]
    code, out, err = call(capfd, "lm-eval", *model, "--output_path", str(tmp_path / "out"))
    assert code == 0, err
    assert "kvlab_ferry" in out
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["kvlab"]["tasks"]["kvlab_ferry"]["requests"] == 9
    code, _, told = call(capfd, "lm-eval", *(word.replace("snapkv", "snapk") for word in model))
    assert code == 1 and "kvlab: unknown policy 'snapk'" in told and "Traceback" not in told
    assert "--model_args" in call(capfd, "lm-eval", "run", "--help")[1]
