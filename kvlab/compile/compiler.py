"""The whole way from documents to tables, resumable at every context."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.compile import learning, log
from kvlab.compile.contexts import DOCUMENTS, Context, cells, checked, pool, stratified
from kvlab.compile.log import DIGITS, Journal, Samples
from kvlab.compile.settings import Settings
from kvlab.compile.trials import candidates, draw, neutral, prefilled, with_thresholds, with_weights
from kvlab.core.geometry import geometry
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.inputs.corpus import Document
from kvlab.lib.files import replacing
from kvlab.methods._base.lookup import DecisionTables

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Learnt:
    """The result of `learn`.

    Attributes:
        tables: both tables, with how they were learnt.
        lines: the log of each phase, a line for each context.
    """

    tables: DecisionTables
    lines: dict[str, list[dict[str, Any]]]

    def samples(self, phase: str) -> Samples:
        return Samples.of(self.lines[phase])

    def summary(self) -> list[str]:
        """The result in a few lines of text."""
        tables, lines = self.tables, []
        about = tables.model_extra or {}
        if tables.heads is not None:
            changed = sum(w != 1 for row in tables.heads for w in row)
            heads = sum(map(len, tables.heads))
            samples = about["samples"]["heads"]
            lines.append(f"{samples} joint actions on the heads: {changed} of {heads} weigh other than 1")
        if tables.risk is not None:
            cells = [count > 0 for row in about["visited"] for count in row]
            seen = f"{sum(cells)} of {len(cells)} cells of risk seen in {about['contexts']} contexts"
            lines.append(f"{about['samples']['risk']} joint actions on the thresholds: {seen}")
        return lines

    def save(self, path: str | Path) -> list[Path]:
        """Write the tables, and their log beside them (`NAME-log.parquet`)."""
        path = Path(path)
        log_file = log.save(path.with_name(f"{path.stem}-log.parquet"), self.lines)
        return [write(self.tables, path), log_file]


def learn(
    lm: LM,
    settings: Settings,
    documents: Sequence[Document] | None = None,
    journal: str | Path | None = None,
    advance: Advance = lambda *_: None,
) -> Learnt:
    """Learn both of CompilerKV's tables for a model (sections 3.2, 4.3, 4.4 and appendix B.1).

    A pool of contexts is measured, and some are taken evenly over the bins of entropy and perplexity. In each of these
    the weights of all heads are drawn at random, many times; each time the prompt is compressed and the NLL of its
    continuation is compared with the full cache's. The same is done for the thresholds, with the learnt weights in
    place. Conservative Q-learning turns the two logs into tables; `learning` says how rewards are credited.

    The query heads of a GQA group have the same values and, by eq. 6, the same attention, so that only the largest of
    their weights counts (eq. 10): here they share one weight. Cells of risk that no context fell into keep the neutral
    threshold, 0.

    Args:
        documents: what to learn from; `DOCUMENTS` unless given. Texts that kvlab evaluates on are refused.
        journal: a JSONL file that keeps what was measured; with it a run that was cut off goes on where it stopped.
        advance: called with a label, the tokens fed so far, and roughly how many there will be.

    Raises:
        KvlabError: documents that are too short or overlap with evaluations, contexts beyond what the model takes, a
            journal that is damaged or that another process writes, or a model without tokenizer.
    """
    lm.require_tokenizer("nothing can be learnt from texts")
    if documents is None:
        documents = [corpus.document(name) for name in DOCUMENTS]
    documents = checked(documents)
    longest = max(settings.lengths) + settings.continuation + 1
    if longest > lm.context_length:
        raise KvlabError(
            f"contexts of {max(settings.lengths)} tokens and {settings.continuation} after them are beyond the "
            f"{lm.context_length} that {lm.name} takes"
        )
    with Journal.open(journal) as kept:
        run = _Run(lm, settings, kept, advance)
        return run.learn(documents)


class _Run:
    def __init__(self, lm: LM, settings: Settings, journal: Journal, advance: Advance):
        self.lm, self.settings, self.journal, self._advance = lm, settings, journal, advance
        self.fed = self.todo = 0
        # Everything that a line depends on besides its context and its actions.
        names = ("budget", "continuation", "window", "utility_window", "kernel")
        self.about = [lm.sha256, str(lm.dtype), lm.device.type, [getattr(settings, name) for name in names]]

    def learn(self, documents: Sequence[Document]) -> Learnt:
        settings = self.settings
        contexts = pool(self.lm, documents, settings)
        mean_length = sum(len(context.ids) for context in contexts) / len(contexts)
        trials = settings.samples + settings.risk_samples
        phases = (settings.samples > 0) + (settings.risk_samples > 0)
        n = min(settings.contexts, len(contexts))
        self.todo = int(mean_length * len(contexts) + n * (phases * mean_length + trials * settings.continuation))
        measured = [self._measured(context) for context in contexts]
        entropy, perplexity = zip(*measured, strict=True)
        chosen = stratified(cells(entropy, perplexity, settings), settings.contexts, settings.seed)
        contexts = [contexts[i] for i in chosen]

        lines: dict[str, list[dict[str, Any]]] = {}
        weights = None
        if settings.samples:
            lines["heads"] = [self._phase("heads", context, None) for context in contexts]
            samples = Samples.of(lines["heads"])
            weights = learning.weights(samples, settings, len(self.lm.layout.compressed))
        if settings.risk_samples:
            lines["risk"] = [self._phase("risk", context, weights) for context in contexts]
        return Learnt(self._tables(weights, lines, documents), lines)

    def _step(self, label: str, tokens: int) -> None:
        self.fed += tokens
        self._advance(label, min(self.fed, self.todo), self.todo)

    def _measured(self, context: Context) -> tuple[float, float]:
        """Entropy and perplexity."""
        name = log.key("context", self.about, context.name)
        line = self.journal.get(name)
        if line is None:
            with prefilled(self.lm, context, self.settings) as prefill:
                measured = {"entropy": round(prefill.entropy, 6), "perplexity": round(prefill.perplexity, 6)}
            line = self.journal.add(name, {"kind": "context", "context": context.name, **measured})
        self._step("measuring contexts", len(context.ids))
        return line["entropy"], line["perplexity"]

    def _phase(self, phase: str, context: Context, weights: np.ndarray | None) -> dict[str, Any]:
        """All trials of one phase in one context."""
        settings = self.settings
        samples = settings.samples if phase == "heads" else settings.risk_samples
        label = "trying weights" if phase == "heads" else "trying thresholds"
        propensities = settings.propensities(phase)
        kv_heads = geometry(self.lm.model.config).kv_heads
        states = len(self.lm.layout.compressed) * (kv_heads if phase == "heads" else 1)
        seed = [settings.seed, 3, len(phase), *context.name.encode()]
        actions = draw(np.random.default_rng(seed), samples, states, propensities)
        written = ["".join(DIGITS[a] for a in row) for row in actions]
        trial_weights = None if weights is None else weights.tolist()
        name = log.key(phase, self.about, context.name, settings.actions(phase), written, trial_weights)
        line = self.journal.get(name)
        if line is None:
            line = self.journal.add(
                name,
                {
                    "kind": phase,
                    "context": context.name,
                    "propensities": propensities,
                    **self._run_actions(phase, context, weights, actions),
                    "actions": written,
                },
            )
        self._step(label, len(context.ids) + samples * settings.continuation)
        return line

    def _run_actions(
        self, phase: str, context: Context, weights: np.ndarray | None, actions: np.ndarray
    ) -> dict[str, Any]:
        settings, values = self.settings, np.array(self.settings.actions(phase))
        with prefilled(self.lm, context, settings) as prefill:
            kept, retained = [], []
            group = prefill.prompts[0].queries.shape[1] // prefill.kv_heads
            if phase == "heads":
                for row in actions:
                    grid = values[row].reshape(-1, prefill.kv_heads)
                    kept.append(prefill.kept(with_weights(settings, grid, group)))
            else:
                base = neutral(settings) if weights is None else with_weights(settings, weights, group)
                counts = candidates(base, prefill, settings.thresholds)
                for row in actions:
                    kept.append(prefill.kept(with_thresholds(base, values[row])))
                    retained.append(counts[np.arange(len(row)), row].tolist())
            losses, full = prefill.losses(kept).tolist(), prefill.full_loss()
            line = {"entropy": round(prefill.entropy, 6), "perplexity": round(prefill.perplexity, 6)}
        line |= {"full": round(full, 6), "nll": [round(loss, 6) for loss in losses]}
        return line | ({"retained": retained} if phase == "risk" else {})

    def _tables(
        self, weights: np.ndarray | None, lines: dict[str, list[dict[str, Any]]], documents: Sequence[Document]
    ) -> DecisionTables:
        from kvlab import __version__

        settings, lm = self.settings, self.lm
        shape = geometry(lm.model.config)
        heads = risk = visited = None
        if weights is not None:
            heads = np.repeat(weights, shape.group, 1).tolist()
        if "risk" in lines:
            samples = Samples.of(lines["risk"])
            risk, visited = learning.thresholds(samples, settings).tolist(), learning.visits(samples, settings).tolist()
        about = {
            "format": "kvlab-compilerkv-1",
            "sha256": lm.sha256,
            "dtype": str(lm.dtype).removeprefix("torch."),
            "kv_heads": shape.kv_heads,
            "kvlab": __version__,
            "command": command(lm, settings, documents),
            "settings": settings.model_dump(mode="json"),
            "propensities": {phase: settings.propensities(phase) for phase in lines},
            "documents": [document.signature for document in documents],
            "samples": {phase: sum(len(line["nll"]) for line in trials) for phase, trials in lines.items()},
            "contexts": len(next(iter(lines.values()))),
            "visited": visited,
        }
        ranges = {"entropy": settings.entropy, "perplexity": settings.perplexity}
        return DecisionTables(model=lm.name, heads=heads, risk=risk, **ranges, **about)


OPTIONS = ("budget", "contexts", "samples", "risk_samples", "alpha", "seed")
"""Settings with an option of their own on the command line; the others are set by -p."""


def command(lm: LM, settings: Settings, documents: Sequence[Document]) -> str:
    """The command line that learns the same again."""
    parts = [f"--model {lm.name}", f"--budget {settings.budget}"]
    if [document.name for document in documents] != list(DOCUMENTS):
        parts.append("--documents " + shlex.quote(",".join(document.name for document in documents)))
    for name, value in settings:
        if name == "budget" or value == Settings.model_fields[name].default:
            continue
        text = json.dumps(value, separators=(",", ":"))
        parts.append(f"--{name.replace('_', '-')} {text}" if name in OPTIONS else f"-p {name}={text}")
    return " ".join(["kvlab compile", *parts])


def mapped(tables: DecisionTables, lm: LM) -> DecisionTables:
    """Tables learnt on one model, mapped to another by relative depth; they note where they were learnt."""
    shape = geometry(lm.model.config)
    sha = str(getattr(tables, "sha256", ""))
    about = {
        "model": lm.name,
        "sha256": lm.sha256,
        "mapped_from": f"{tables.model}@{sha[:8]}".rstrip("@"),
        "kv_heads": shape.kv_heads,
        "dtype": str(lm.dtype).removeprefix("torch."),
    }
    return tables.mapped(len(lm.layout.compressed), shape.heads).model_copy(update=about)


def write(tables: DecisionTables, path: str | Path) -> Path:
    """Write the JSON file, a line for each layer; under its name only once it is whole."""
    fields = tables.model_dump(mode="json")
    lines = []
    for name, value in fields.items():
        if name in ("heads", "risk") and value is not None:
            rows = ",\n".join(f"  {json.dumps(layer)}" for layer in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    with replacing(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return Path(path)
