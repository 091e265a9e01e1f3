"""The tables of `kvlab eval` by kind and by turn."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pandas
import pytest
from rich.console import Console
from support.paths import ROOT
from support.spread import students

from kvlab.evaluation import Answer, decline, summary
from kvlab.render.figures import evaluation, turns
from kvlab.workbench.report import page, snapshots, task_means, task_scores


def answers(mode, kind, by_policy):
    """Two contexts' scores by turn: policy -> scores."""
    return [
        Answer(
            key=f"{mode}{kind}{policy}{context}{turn}",
            task="turns",
            example=f"{mode}-{kind}-{context}-{turn}",
            policy=policy,
            budget=None if policy == "full" else 64,
            compress_at="context",
            prediction="",
            answers=["1"],
            scores={"score": score},
            metric="score",
            prompt_tokens=9,
            generated_tokens=2,
            prefill_seconds=0.1,
            seconds=0.1,
            kv_bytes=100,
            aux_bytes=0,
            marks={"kind": kind, "mode": mode, "turn": turn},
            signature="m|t|p|compress at context|v",
        )
        for policy, scores in by_policy.items()
        for context in range(2)
        for turn, score in enumerate(scores, 1)
    ]


def shown(found):
    console = Console(width=100, record=True)
    evaluation.show_parts(found, console)
    return console.export_text()


FOUND = [
    *answers("chat", "kv", {"full": [1.0, 1.0], "snapkv": [1.0, 0.25]}),
    *answers("requests", "kv", {"full": [1.0, 1.0], "snapkv": [0.5, 0.5]}),
]


def test_each_mode_has_its_scores_by_turn():
    text = shown(FOUND)
    assert "score by turn, %: chat" in text and "score by turn, %: requests" in text
    rows = [re.findall(r"\d+\.\d", line) for line in text.splitlines() if "snapkv" in line]
    assert [row[:2] for row in rows] == [["100.0", "25.0"], ["50.0", "50.0"]]


def test_kinds_have_a_table_where_there_are_several_and_turns_need_not_be():
    other = answers("chat", "squad", {"full": [1.0], "snapkv": [0.0]})
    assert "score by kind" in shown([*FOUND, *other]) and "score by kind" not in shown(FOUND)
    plain = answers("chat", "kv", {"full": [1.0]})
    for answer in plain:
        answer.marks = {"kind": "kv"}
    assert not shown(plain).strip()


def test_turns_need_no_modes():
    """A task of one's own may ask several questions in one way."""
    alone = answers("chat", "kv", {"full": [1.0, 0.5]})
    for answer in alone:
        del answer.marks["mode"]
    (heading,) = [line.strip() for line in shown(alone).splitlines() if "score" in line]
    assert heading == "score by turn, %" and "50.0" in shown(alone)


def test_the_decline_is_paired_by_context_with_an_interval():
    """Later turns less the first, whatever contexts have at other times."""
    easy, hard = ([1.0, 0.5, 0.7], [0.5, 0.0, 0.4])
    asked = [
        replace(FOUND[0], key=f"{name}{turn}", scores={"score": score}, marks={"context": name, "turn": turn})
        for name, scores in {"easy": easy, "hard": hard}.items()
        for turn, score in enumerate(scores, 1)
    ]
    (row,) = decline(asked).to_dict("records")
    assert (row["policy"], row["contexts"]) == ("full", 2) and row["decline"] == pytest.approx(-0.35)
    assert (row["low"], row["high"]) == pytest.approx(students((-0.4, -0.3)), rel=1e-4)
    text = shown(asked)
    assert "later turns less the first" in text and "-35.0 (" in text
    (alone,) = decline([asked[0]]).to_dict("records")
    assert alone["contexts"] == 0 and alone["decline"] != alone["decline"], "one turn alone declines from nothing"


def test_questions_over_one_context_are_one_repetition():
    """Of both modes, too: four answers on each of two contexts have the interval of two numbers."""
    scores = {"a": (0.5, 0.5, 0.6, 0.4), "b": (0.5, 0.6, 0.5, 0.44)}
    asked = [
        replace(
            FOUND[0], key=f"{context}{n}", example=f"{context}-{n}", scores={"score": score}, marks={"context": context}
        )
        for context, mine in scores.items()
        for n, score in enumerate(mine)
    ]
    (row,) = summary(asked).to_dict("records")
    assert row["n"] == 8 and row["score"] == pytest.approx(0.505)
    assert (row["low"], row["high"]) == pytest.approx(students((0.5, 0.51)), rel=1e-4)


@pytest.mark.usefixtures("headless")
def test_the_figure_has_a_panel_for_each_mode_moment_and_budget():
    asked = [*FOUND, *(replace(answer, key=f"p{answer.key}", compress_at="prompt") for answer in FOUND)]
    more = [replace(answer, key=f"m{answer.key}", budget=96) for answer in asked if answer.policy != "full"]
    figure = turns.scores([*asked, *more])
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles[:4] == [
        "chat: the first question read",
        "requests: each question read",
        "chat: no question read",
        "requests: no question read",
    ]
    assert len(figure.axes) == 8 and [ax.get_ylabel() for ax in figure.axes[::4]] == [
        "score, budget 64",
        "score, budget 96",
    ]
    lines = {bars.get_label(): bars.lines[0].get_ydata().tolist() for bars in figure.axes[0].containers}
    assert lines == {"snapkv": [1.0, 0.25]}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full cache", "snapkv"]
    assert turns.scores([replace(answer, marks={}) for answer in FOUND]) is None


@pytest.mark.usefixtures("headless")
def test_the_figure_stands_beside_the_answers(tmp_path):
    path = evaluation.draw(FOUND, tmp_path / "turns.png")
    assert path == tmp_path / "turns.png" and path.stat().st_size > 10_000


def test_the_figure_has_the_same_answers_of_another_moment_too():
    other = [
        replace(answer, key=f"p{answer.key}", compress_at="prompt", signature="m|t|p|compress at prompt|v")
        for answer in FOUND
    ]
    strangers = [
        replace(other[0], key="a", signature="m|other task|p|compress at prompt|v"),
        replace(other[0], key="b", signature="m|t|p|compress at prompt|v2"),
        replace(other[0], key="c", example="another"),
    ]
    assert turns.with_counterparts(FOUND, [*FOUND, *other, *strangers]) == [*FOUND, *other]


def test_turns_and_modes_are_kept_and_shown(tmp_path):
    """In lines of their own, which do not change the table over all answers."""
    path = task_means.keep(tmp_path, FOUND, "a machine")
    lines = task_scores.read(path)
    found = {(line["policy"], line["mode"], line["turn"]): float(line["score"]) for line in lines}
    assert len(found) == len(lines) == 2 * (1 + 2 + 4)
    assert found["snapkv", "", ""] == pytest.approx(0.5625)
    assert found["snapkv", "chat", ""] == pytest.approx(0.625) and found["snapkv", "chat", "2"] == 0.25
    (board,) = task_scores.boards(tmp_path)
    assert board.full.score == 100 and board.n == 8
    assert [(system, cells[0].score) for system, cells in board.rows] == [("snapkv", pytest.approx(56.25))]
    chat, requests = board.by_turn
    assert (chat.mode, chat.turns, requests.mode) == ("chat", ["1", "2"], "requests")
    assert [(system, [cell.score for cell in cells]) for system, cells in chat.rows] == [
        ("full", [100, 100]),
        ("snapkv at 64", [100, 25]),
    ]
    assert task_means.keep(tmp_path, FOUND, "a machine").read_bytes() == path.read_bytes()
    judged = snapshots.kept(ROOT / "docs" / "ledger", "smollm2-135m")
    shown = page.render(judged, scores=[replace(board, model="smollm2-135m")])["report.html"]
    text = " ".join(re.sub(r"<[^>]+>", " ", shown[shown.index('id="scores"') :]).split())
    assert "By turn: chat Policy 1 2 full 100" in text and "By turn: requests" in text


def test_settings_of_one_policy_stand_apart_and_what_it_went_without_is_said(tmp_path):
    """Each in a row of its own; how long the prompts are and of which text is in the table's name."""
    task = "t(seed=0, lengths=(1000, 2000), document='sotu/1962')"
    signature = f"m|{task}|{{}}(budget=64, window={{}}, tables={{}})|compress at context|v"
    variants = {
        ("snapkv", 8, "'x'"): "snapkv, window=8",
        ("snapkv", 32, "'x'"): "snapkv, window=32",
        ("compilerkv", 32, None): "compilerkv, neutral tables",
        ("pyramidkv", 32, None): "pyramidkv",
    }
    found = [
        replace(answer, policy=of[0], signature=signature.format(*of), key=f"{of} {answer.key}", marks={})
        for of in variants
        for answer in FOUND
        if answer.policy != "full"
    ]
    task_means.keep(tmp_path, found, "a machine")
    (board,) = task_scores.boards(tmp_path)
    assert sorted(system for system, _ in board.rows) == sorted(variants.values()) and board.policies == 3
    assert board.prompts == "1,000 and 2,000 tokens, document sotu/1962"


def test_a_policy_with_fewer_answers_says_so_and_is_not_ranked_among_the_others(tmp_path):
    """The easy half of the examples makes no policy better than one that answered all of them."""
    easy = [
        replace(answer, policy="tova", key=f"easy {answer.key}", signature="m|t|tova(budget=64)|compress at context|v")
        for answer in FOUND
        if answer.policy == "snapkv" and answer.scores["score"] == 1.0
    ]
    found = [replace(answer, marks={}) for answer in [*easy, *FOUND]]
    task_means.keep(tmp_path, found, "a machine")
    (board,) = task_scores.boards(tmp_path)
    assert [(name, round(cells[0].score)) for name, cells in board.rows] == [
        ("snapkv", 56),
        ("tova, 2 of 8 answers", 100),
    ]
    assert (board.full.score, board.n, board.fewer) == (100, 8, {"tova, 2 of 8 answers": "tova"})
    text = page.render(
        snapshots.kept(ROOT / "docs" / "ledger", "smollm2-135m"), scores=[replace(board, model="smollm2-135m")]
    )["report.html"]
    assert "2 policies, 8 answers each, but for 1 with fewer; the full cache has 100" in text


@pytest.mark.parametrize(
    "settings", ["t(lengths=x)", "t(lengths=('a',))", "t(document=5)", "t(seed=0)", "t", "no call ("]
)
def test_lengths_that_cannot_be_read_are_left_out(tmp_path, settings):
    found = [replace(answer, signature=f"m|{settings}|snapkv(budget=64)|compress at context|v") for answer in FOUND]
    task_means.keep(tmp_path, found, "a machine")
    assert [board.prompts for board in task_scores.boards(tmp_path)] == [""]


@pytest.mark.parametrize("place", ["/data/of/mine/bench", "/bench", "/data/bench/", r"C:\\data\\bench"])
def test_where_a_folder_lay_is_not_kept(tmp_path, place):
    signature = f"m|t(seed=0, folder='{place}', tasks=('a', 'b'))|p|compress at context|v"
    path = task_means.keep(tmp_path, [replace(answer, signature=signature) for answer in FOUND], "a machine")
    assert {line["settings"] for line in task_scores.read(path)} == {"t(seed=0, folder='bench', tasks=('a', 'b'))"}


def test_what_was_kept_before_there_were_turns_is_read_and_goes_on(tmp_path):
    """The form of the file: its columns, in their order, of which the two latest may be missing."""
    path = task_means.keep(tmp_path, [replace(answer, marks={}) for answer in FOUND], "a machine")
    head, *rest = path.read_text().splitlines()
    assert head == (
        "model,task,settings,kind,policy,budget,storage,parameters,compress_at,mode,turn,n,score,low,high,difference,"
        "difference_low,difference_high,kv_bytes,seconds,commit,machine,version"
    )
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    frame.drop(columns=["mode", "turn"]).to_csv(path, index=False)
    (board,) = task_scores.boards(tmp_path)
    assert board.by_turn == [] and len(board.rows) == 1
    assert task_means.keep(tmp_path, [replace(answer, marks={}) for answer in FOUND], "a machine") == path
    assert path.read_text().splitlines() == [head, *rest], "the same lines, none twice"
    for shipped in (ROOT / "docs" / "ledger" / "tasks").glob("*.csv"):
        assert task_scores.read(shipped)


def test_budgets_are_columns_in_their_order_and_what_takes_none_comes_last():
    found = [board.budgets for board in task_scores.boards(ROOT / "docs" / "ledger")]
    assert any(len(budgets) > 2 and "" in budgets for budgets in found)
    for budgets in found:
        numbers = [float(budget) for budget in budgets if budget]
        assert numbers == sorted(numbers) and "" not in budgets[:-1]


@pytest.fixture
def rows():
    """The summary of an evaluation with five systems; one interval is as long as they get."""
    systems = [("full", None), ("streamingllm", 48), ("expected_attention", 0.5), ("criticaladakv", 1024)]
    numbers = {"score": 0.45, "low": 0.351, "high": 1.0, "kv_bytes": 3 * 2**20, "aux_bytes": 2**18, "seconds": 12.25}
    change = {"difference": -0.123, "difference_low": -0.3, "difference_high": 0.1}
    about = {"task": "ruler_niah_multikey_3", "storage": "as it is", "n": 12, "compress_at": "question"}
    return pandas.DataFrame({**about, "policy": name, "budget": at, **numbers, **change} for name, at in systems)


def printed(rows, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    evaluation.show(rows, console)
    return console.file.getvalue().splitlines()


def test_a_table_fits_a_terminal_of_80_columns_whole(rows):
    lines = printed(rows, 80)
    assert max(map(len, lines)) <= 80 and not [line for line in lines if "…" in line]
    text = " ".join(" ".join(lines).split())
    assert "task ruler_niah_multikey_3; storage as it is; n 12" in text, "columns with one value stand in the title"
    assert sum("ruler_niah_multikey_3" in line for line in lines) == 1
    place = next(number for number, line in enumerate(lines) if "expected_attention" in line)
    for number, below in [("45.0", "35.1-100.0"), ("-12.3", "-30.0 to +10.0"), ("12.25", ""), ("3.25", "")]:
        assert number in lines[place] and below in lines[place + 1]
    rows.loc[1, "task"] = "needle"
    assert sum("ruler" in line for line in printed(rows, 80)) == 3, "columns that differ stay"


def test_a_wide_terminal_shows_every_column(rows):
    lines = printed(rows, 160)
    assert sum("ruler_niah_multikey_3" in line for line in lines) == 4
    assert sum("-12.3 (-30.0 to +10.0)" in line for line in lines) == 3
