"""Plain English, checked: sentences of at most 25 words, and none of a short list of private words.

python tests/project/words.py README.md docs/start.md    # print each long sentence and banned word as FILE:LINE
python tests/project/words.py --write                    # lower the numbers in words.csv to what is left

The texts are README.md and its neighbours, docs/, the notebooks' Markdown, the claims and experiments, and all
docstrings, comments and strings of kvlab/ and benchmarks/. words.csv lists how many problems a file may still have. The
numbers can only fall.
"""

from __future__ import annotations

import ast
import csv
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("words.csv")
LONGEST = 25
# A pattern -> what to write instead. Ordinary uses of a word stay free: "in place", "held out", "carried out".
BANNED = {
    r"told": "reported, distinguished",
    r"hears?|heard": "receives, reports",
    r"held(?![- ]out)": "stored, kept",
    r"besides?": "next to, with, also",
    r"in place of|in (?:its|their) place|tak(?:e|es|ing) (?:its|their|the) place": "instead of, replaces",
    r"taken (?:away|for|along|apart|back)": "removed, treated as",
    r"calm|settle[sd]?|shelf|shelves|patience|doubts?": "the field's term",
    r"carr(?:y|ies|ied) (?:along|over|with)": "copied, kept",
    r"ow(?:e|es|ed)": "is missing, must",
    r"shall": "must, is",
    r"nothing but": "only",
    r"stands? (?:at|in|on|under|above|below|where|there|behind|before|between)(?! for)": "is",
    r"not un(?!der|til|less|it|io|iq|if)\w+": "one negation or none",
    r"so that [^.]*, which": "two sentences",
    r"turned away|turns? [\w ]+ away": "rejected, refused",
}
NOUN_CLAUSE = 'a sentence that begins with "What" and asks nothing'

_BANNED = re.compile("|".join(rf"(?P<b{number}>\b(?:{each})\b)" for number, each in enumerate(BANNED)), re.IGNORECASE)
_END = re.compile(r"[.!?][\"'”’)\]*_]*\s+(?=\S)")
# No end of a sentence, whatever follows (an initial, but not X for code); and none before a number or a small letter.
_SHORT = re.compile(r"(?:^|[\s(\[\"“])(?:e\.g|i\.e|et al|cf|vs|approx|resp|Dr|Mr|Mrs|St|[A-WYZ])\.$")
_BEFORE_NUMBER = re.compile(r"(?:^|[\s(\[])(?:figs?|eqs?|secs?|tabs?|apps?|alg|thm|nos?|pp?|ch|vol)\.$", re.IGNORECASE)
_BEFORE_SMALL = re.compile(r"(?:etc|incl|\.\.|…)\.$", re.IGNORECASE)
_ITEM = re.compile(r"\s*(?:[*+-]|\d+[.)])\s+")
_FENCE = re.compile(r"\s*(`{3,}|~{3,}|:{3,})")
_MARK = re.compile(r"#+\s*(?:type:|noqa|pragma|pyright:|fmt:|%%)")
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_TEXT = ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp
_SKIPPED = re.compile(r"\s*(?:#|\||\[[^\]]+\]:\s|:[\w-]+:|={3,}$|-{3,}$)")


@dataclass(frozen=True)
class Problem:
    """A long sentence or a banned word."""

    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {self.text}"


def sentences(text: str) -> list[str]:
    """The sentences of one paragraph. A colon and a semicolon end none; nor do "e.g.", "et al." and "Fig. 3"."""
    found, start = [], 0
    for end in _END.finditer(text):
        before, after = text[start : end.start() + 1], text[end.end()]
        if _SHORT.search(before) or (_BEFORE_NUMBER.search(before) and (after.isdigit() or after == "(")):
            continue
        if _BEFORE_SMALL.search(before) and not after.isupper():
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    return [each for each in [*found, text[start:].strip()] if each]


def words(sentence: str) -> int:
    """The number of words: whatever has a letter or a digit between two spaces."""
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def plain(text: str) -> str:
    """A paragraph as a reader sees it: a link is its text; code and a formula are one word, X."""
    text = re.sub(r"<!--.*?-->", " ", text)
    text = re.sub(r"(`+)(?:[^`]|(?!\1)`)+\1|\$\$?[^$]+\$\$?", "X", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<https?:[^>]*>|https?://\S+[\w/]", "X", text)
    text = re.sub(r"</?[a-zA-Z][^>]*>", " ", text)
    return " ".join(re.sub(r"\*\*|__|(?<!\w)[*_](?=\w)|(?<=[\w.!?])[*_](?!\w)", "", text).split())


def markdown(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items of a Markdown text, with their lines; no code, tables, headings, or made blocks."""
    part: list[str] = []
    start, fence, generated = first, "", False
    for number, line in enumerate([*text.splitlines(), ""], first):
        if generated or "<!-- generated:" in line:
            generated = "<!-- end -->" not in line
            line = ""
        elif mark := _FENCE.match(line):
            opened = mark[1][0] != ":"  # a directive's own text is prose
            if fence:
                fence = "" if mark[1][:3] == fence and line.strip() == mark[1] else fence
            elif opened:
                fence = mark[1][:3]
            line = ""
        elif fence or _SKIPPED.match(line):
            line = ""
        line = re.sub(r"^\s*(?:> ?)+", "", line)
        item = _ITEM.match(line)
        if part and (item or not line.strip()):
            yield start, plain(" ".join(part))
            part = []
        if line.strip():
            start = start if part else number
            part.append(line[item.end() :] if item else line)


def docstring(text: str, first: int) -> Iterator[tuple[int, str]]:
    """The paragraphs of a docstring: an item for each attribute or parameter; no examples, no code."""
    kept, example, indent = [], False, 0
    for line in inspect.cleandoc(text).splitlines():
        inner = len(line) - len(line.lstrip())
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        code = example or (inner >= 4 and indent == 0 and not (kept and kept[-1].strip()))
        if re.match(r" {4}\w[\w, ()*.]*: |[A-Z]\w+:$", line) or inner < indent:
            kept.append("")  # the next of a list of names, or its heading
        indent = inner if line.strip() and not example else indent
        kept.append("" if code and not re.match(r" +[\w*, ]+:", line) else line)
    # The paragraphs' lines move by those put in; the docstring's own line is near enough.
    for _, part in markdown("\n".join(kept)):
        yield first, part


def literal(node: ast.AST | None) -> Iterator[str]:
    """The texts that an expression can become, a value put in as one word, X."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = [*literal(node.left)], [*literal(node.right)]
        if left or right:
            yield from (before + after for before in left or ["X"] for after in right or ["X"])
    elif isinstance(node, ast.IfExp):
        yield from literal(node.body)
        yield from literal(node.orelse)


def code(path: Path) -> Iterator[tuple[int, str]]:
    """The paragraphs of a module: docstrings, comments, and strings of several words: messages, help, labels."""
    text = path.read_text(encoding="utf-8")

    def texts(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, _DOCUMENTED) and (found := ast.get_docstring(node, clean=False)):
            yield from docstring(found, node.body[0].lineno)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(child, _TEXT) and (parts := [*literal(child)]):
                lines = dict.fromkeys(line for part in parts for line in part.split("\n") if line.count(" ") > 1)
                yield from ((child.lineno, plain(line)) for line in lines)
                yield from inner(child)
            else:
                yield from texts(child)

    def inner(node: ast.AST) -> Iterator[tuple[int, str]]:
        """The texts of the values that are put into a text."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FormattedValue):
                yield from texts(child)
            elif not isinstance(child, ast.Constant):
                yield from inner(child)

    yield from texts(ast.parse(text))
    yield from comments(text)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The comments of a module; those of lines that follow one another are one paragraph. No marks for tools."""
    part: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _MARK.match(token.string):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        if part and not (alone and line == last + 1):
            yield first, plain(" ".join(part))
            part = []
        first = first if part else line
        last = line if alone else 0
        part.append(token.string.lstrip("#: ").strip())
    if part:
        yield first, plain(" ".join(part))


def fields(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a YAML file, as of papers' claims and experiments: values of several words, and no keys."""

    def texts(node: yaml.Node) -> Iterator[tuple[int, str]]:
        if isinstance(node, yaml.ScalarNode):
            if node.value.count(" ") > 1:
                yield node.start_mark.line + 1, plain(node.value)
        elif isinstance(node, yaml.MappingNode):
            for _, value in node.value:
                yield from texts(value)
        else:
            for value in node.value:
                yield from texts(value)

    if root := yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
        yield from texts(root)


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """The paragraphs of a file with the lines at which they begin."""
    if path.suffix == ".py":
        yield from code(path)
    elif path.suffix == ".yaml":
        yield from fields(path)
    elif path.suffix == ".ipynb":
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield from markdown("".join(cell["source"]))
    else:
        yield from markdown(path.read_text(encoding="utf-8"))


def problems(path: Path) -> list[Problem]:
    """The long sentences and banned words of a file."""
    found = []
    for line, part in passages(path):
        for sentence in sentences(part):
            if (count := words(sentence)) > LONGEST:
                found.append(Problem(line, "long", f"{count} words: {sentence}"))
            if re.match(r"What\b(?! to\b)(?!.*\?)", sentence):
                found.append(Problem(line, "banned", f"banned: {NOUN_CLAUSE}: {sentence}"))
            for hit in _BANNED.finditer(sentence):
                why = [*BANNED.values()][int(str(hit.lastgroup)[1:])]
                found.append(Problem(line, "banned", f"banned word: {hit[0]} (write: {why}): {sentence}"))
    return found


def files() -> list[str]:
    """The files with texts that people read, from the project's root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    found += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").glob("*.yaml")]
    found += [*(ROOT / "kvlab").rglob("*.py"), *(ROOT / "kvlab").rglob("*.yaml")]
    found += [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def allowed() -> dict[str, tuple[int, int]]:
    """A file -> how many long sentences and how many banned words it may have."""
    with ALLOWED.open(encoding="utf-8", newline="") as lines:
        return {row["file"]: (int(row["long"]), int(row["banned"])) for row in csv.DictReader(lines)}


def counts(path: str) -> tuple[int, int]:
    """How many long sentences and how many banned words a file has."""
    kinds = [problem.kind for problem in problems(ROOT / path)]
    return kinds.count("long"), kinds.count("banned")


def write() -> int:
    """Lower the numbers in words.csv to those of today. A file with more problems than before is refused."""
    before = allowed()
    rows = [(path, *found) for path in files() if any(found := counts(path))]
    more = [path for path, *found in rows if any(new > old for new, old in zip(found, before.get(path, (0, 0))))]
    if more:
        print(f"more problems than words.csv allows, which stays as it is: {', '.join(more)}")
        return 1
    with ALLOWED.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([("file", "long", "banned"), *rows])
    print(f"{sum(row[1] for row in rows)} long sentences and {sum(row[2] for row in rows)} banned words are left")
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        return write()
    found = 0
    for path in arguments or files():
        for problem in problems(ROOT / path):
            print(f"{path}:{problem}")
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
