"""The stability of verdicts: those of quoted findings in runs with other seeds and other texts.

They are kept as data in a CSV for each model (stability/MODEL.csv). The count is of a finding's cells whose verdict
differs from that of its first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib.files import why
from kvlab.render.phrases import listed, plural
from kvlab.workbench import project
from kvlab.workbench.jobs.stability_cells import ANY
from kvlab.workbench.report import csv_tables
from kvlab.workbench.report.ledger import WEAKEST, Entry, claims, names, turns
from kvlab.workbench.report.ledger_models import Subject

FOLDER = "stability"  # a folder of its own, so every CSV next to it is a ledger
KEYS = ["paper", "finding", "claim", "model", "profile", "seed", "documents"]
NUMBERS = ["value", "low", "high"]
COLUMNS = [*KEYS, "verdict", *NUMBERS, "signature", "commit", "machine"]

WEAKEST_OF = "the finding's verdict, that of its weakest claim,"

Line = dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """A finding's outcome in a cell, that is, with a seed on a set of documents (`ANY`: of each).

    numbers: the values of its claims with their intervals, as they are written.
    """

    seed: str
    documents: str
    verdict: str
    numbers: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        seed = "" if self.seed == ANY else f"seed {self.seed}"
        texts = "" if self.documents == ANY else self.documents
        return f"{self.verdict} ({', '.join(part for part in (texts, seed) if part) or 'one run'})"


@dataclass(frozen=True)
class Stability:
    """A quoted finding on a model: what it stands as in each cell. The others are compared with the first.

    A cell stands as the weakest of the finding's claims does there. One that measured none of them is no cell.
    claims: each claim that was measured again, with its own cells.
    """

    paper: str
    finding: str
    model: str
    profile: str
    cells: tuple[Outcome, ...]
    claims: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict, hash=False)

    @property
    def others(self) -> tuple[Outcome, ...]:
        return self.cells[1:]

    @property
    def flips(self) -> list[Outcome]:
        """The other cells whose verdict is not that of the first."""
        return [cell for cell in self.others if cell.verdict != self.cells[0].verdict]

    @property
    def turns(self) -> list[Outcome]:
        """The flips from holding, in direction at least, to failing, or the other way round."""
        first = self.cells[0].verdict
        return [cell for cell in self.flips if turns((cell.verdict, first))]

    @property
    def repeated(self) -> list[Outcome]:
        """The other cells with the very numbers that another seed gave on the same documents."""
        return [
            cell
            for place, cell in enumerate(self.cells)
            if any((cell.documents, cell.numbers) == (one.documents, one.numbers) for one in self.cells[:place])
        ]

    @property
    def count(self) -> str:
        """ "1 of 5"."""
        return f"{len(self.flips)} of {len(self.others)}"

    @property
    def sentence(self) -> str:
        """Describe the measurements and the outcome in a sentence."""
        return self._sentence("its verdict")

    def sentence_of(self, claim: str) -> str:
        """As `sentence`, for the reader of one of its claims: of several the claim's own verdicts first."""
        own = self.claims.get(claim)
        if own is None:
            return self._sentence("the verdict of its finding")
        if len(self.claims) == 1:
            return self.sentence
        if [cell.verdict for cell in own] == [cell.verdict for cell in self.cells]:
            return self._sentence("its verdict, as its finding's,")
        return f"{replace(self, cells=own).sentence} {self._sentence(WEAKEST_OF)}"

    def _sentence(self, whose: str) -> str:
        first = f"With other seeds and texts ({self.profile} profile)"
        if not self.others:
            return f"{first} it was not measured again."
        each = "; ".join(cell.sentence for cell in self.cells)
        if not self.flips:
            stays = f"all {len(self.others)} other runs" if len(self.others) > 1 else "the other run"
            return f"{first} {whose} stays in {stays}: {each}."
        turns = f", {len(self.turns)} of them from holding to failing or back" if self.turns else ""
        return f"{first} {whose} flips in {self.count} other {plural(len(self.others), 'run')}{turns}: {each}."


def measured(lines: Iterable[Mapping[str, str]]) -> list[Stability]:
    """The findings that lines are about, in their order. Lines of claims that there are not any more are left out."""
    facts = {claim.id: claim.fact for claim in claims()}
    found: dict[tuple[str, str, str, str], list[Mapping[str, str]]] = {}
    for line in lines:
        if line["claim"] in facts:
            found.setdefault((*facts[line["claim"]], line["model"], line["profile"]), []).append(line)
    every = [Stability(*about, _cells(mine), _of_claims(mine)) for about, mine in found.items()]
    return [one for one in every if one.cells]


def _of_claims(lines: Sequence[Mapping[str, str]]) -> dict[str, tuple[Outcome, ...]]:
    names = dict.fromkeys(line["claim"] for line in lines)
    found = {name: _cells([line for line in lines if line["claim"] == name]) for name in names}
    return {name: cells for name, cells in found.items() if cells}


def _cells(lines: Sequence[Mapping[str, str]]) -> tuple[Outcome, ...]:
    """The cells of these lines; a run that does not depend on the seed, or on the documents, counts in each of them."""
    cells = []
    for seed in _values(lines, "seed"):
        for documents in _values(lines, "documents"):
            here = [line for line in lines if line["seed"] in (seed, ANY) and line["documents"] in (documents, ANY)]
            said = [line["verdict"] for line in here if line["verdict"] != papers.UNMEASURED]
            if said:
                numbers = tuple(line[name] for line in here for name in NUMBERS)
                cells.append(Outcome(seed, documents, min(said, key=WEAKEST.index), numbers))
    return tuple(cells)


def _values(lines: Iterable[Mapping[str, str]], name: str) -> list[str]:
    values = list(dict.fromkeys(line[name] for line in lines))
    return [value for value in values if value != ANY] or values


def label(one: Stability) -> str:
    """The name of the file that it is kept in, without suffix."""
    return Subject(one.model).label


def sentences(found: Iterable[Stability]) -> list[str]:
    """How often verdicts flip in all, in a sentence for each model; none where nothing was measured."""
    of_models: dict[tuple[str, str], list[Stability]] = {}
    for one in found:
        if one.others:
            of_models.setdefault((one.model, one.profile), []).append(one)
    return [_sentence(Subject(model).label, profile, mine) for (model, profile), mine in of_models.items()]


def _sentence(label: str, profile: str, mine: Sequence[Stability]) -> str:
    seeds, texts = (_known(mine, name) for name in ("seed", "documents"))
    where = " and ".join(
        part
        for part in (
            f"the {plural(len(seeds), 'seed')} {listed(seeds)}" if seeds else "",
            f"the texts {listed(texts)}" if texts else "",
        )
        if part
    )
    unsteady = sum(bool(one.flips) for one in mine)
    turned = sum(bool(one.turns) for one in mine)
    flips, others = sum(len(one.flips) for one in mine), sum(len(one.others) for one in mine)
    turns = f" ({turned} from holding to failing or back)" if turned else ""
    repeated = sum(len(one.repeated) for one in mine)
    same = (
        f". {repeated} of the {others} repeat the numbers of another seed, which did not reach them" if repeated else ""
    )
    return (
        f"How often does a verdict flip? On {label} ({profile} profile), with {where}: of {len(mine)} quoted "
        f"{plural(len(mine), 'finding')} {unsteady or 'none'} {'flips' if unsteady < 2 else 'flip'} at least once"
        f"{turns}. In all, {flips} of {others} verdicts are not that of the first run ({flips / others:.0%}){same}."
    )


def _known(mine: Iterable[Stability], name: str) -> list[str]:
    values = dict.fromkeys(getattr(cell, name) for one in mine for cell in one.cells)
    return [value for value in values if value != ANY]


def of_entries(found: Iterable[Stability]) -> Callable[[Entry], Stability | None]:
    """The measurements of an entry's finding on its model, whatever the hash of its weights; of several profiles the
    last.
    """
    known = {(one.paper, one.finding, *names(one.model)): one for one in found}
    return lambda entry: known.get((*entry.claim.fact, *names(entry.model)))


# ---------------------------------------------------------------------------------------------------- the files


def keep(folder: Path, lines: Iterable[Line]) -> list[Path]:
    """Write the lines of each model as FOLDER/stability/MODEL.csv, whole or not at all, instead of what was there.

    The columns are paper, finding, claim, model, profile, seed, documents, verdict, value, low and high, and the run's
    signature, commit and machine. The seed and the documents are `any` where the experiment has no such parameter, or
    never reads it.

    Raises:
        KvlabError: the folder cannot be written, or two models would share a file.
    """
    files: dict[Path, list[Line]] = {}
    for line in lines:
        files.setdefault(folder / FOLDER / f"{Subject(line['model']).label}.csv", []).append(line)
    for path, mine in files.items():
        if len(models := sorted({line["model"] for line in mine})) > 1:
            raise KvlabError(f"{path} would be of the models {' and '.join(models)}: measure them one after the other")
    for path, mine in files.items():
        try:
            csv_tables.write(path, mine, COLUMNS)
        except OSError as error:
            raise KvlabError(f"cannot write {path}: {why(error)}") from error
    return list(files)


def read(folder: Path | None = None) -> list[Stability]:
    """Read FOLDER/stability (default: the folder of the project's report); nothing where there is no such folder.

    Raises:
        KvlabError: a file cannot be read, or has an unknown verdict.
    """
    found: list[Line] = []
    for path in sorted(((folder or here()) / FOLDER).glob("*.csv")):
        for line in csv_tables.read(path, COLUMNS, "measurement of stability"):
            if line["verdict"] not in papers.VERDICTS:
                raise KvlabError(
                    f"{path}: {line['claim']!r} has the verdict {line['verdict']!r}, and there is none such"
                )
            found.append(line)
    return measured(found)


def here() -> Path:
    """Where `kvlab stability` writes, and `kvlab report` looks, unless another folder is named."""
    return project.root() / "report"
