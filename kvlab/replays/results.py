"""Several replays as one result: by policy and budget, as tables, with intervals over documents."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from kvlab.core.storage import Storage
from kvlab.errors import KvlabError
from kvlab.lib import intervals
from kvlab.methods import Policy
from kvlab.replays.gaps import GAPS, gaps_closed
from kvlab.replays.replay import Replay

if TYPE_CHECKING:
    import pandas as pd

LOSSES, BYTES = ("recall", "mass_lost", "output_error"), ("stored_bytes", "read_bytes")


class Replays(Sequence[Replay]):
    """Several policies, budgets, storages or traces. `result[policy, budget]` is one `Replay` (a list of them over
    several traces), and so is `result[policy, budget, storage]` where there are several storages.
    """

    def __init__(self, results: Iterable[Replay]):
        self.results = list(results)

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, key: int) -> Replay: ...
    @overload
    def __getitem__(self, key: slice) -> list[Replay]: ...
    # One replay, or a list of them over several traces: only who made the replays knows which.
    @overload
    def __getitem__(self, key: str | Policy | tuple) -> Any: ...
    def __getitem__(self, key: int | slice | str | Policy | tuple) -> Any:
        if isinstance(key, int | slice):
            return self.results[key]
        name, budget, storage = (*(key if isinstance(key, tuple) else (key,)), None, None)[:3]
        chosen = [
            r
            for r in self.results
            if name in (r.policy, r.policy.name, str(r.policy))
            and budget in (None, r.policy.asked, r.budget)
            and storage in (None, r.storage, r.storage.name)
        ]
        if not chosen:
            known = ", ".join(sorted({f"{r.storage.behind(r.policy.name)}, {r.policy.asked}" for r in self.results}))
            asked = f"{name}{'' if budget is None else f' at budget {budget}'}"
            raise KvlabError(
                f"no replay of {asked}{'' if storage is None else f' stored as {storage}'}; there are: {known}"
            )
        return chosen[0] if len({id(r.trace) for r in self.results}) == 1 else chosen

    @cached_property
    def _gaps(self) -> list[dict[str, float]]:
        """Of each replay the gaps that it closes, by the names of `GAPS`; none where a reference is missing."""
        comparable: dict[tuple[int, Storage], list[int]] = defaultdict(list)
        for index, result in enumerate(self.results):
            comparable[id(result.trace), result.storage].append(index)
        found: list[dict[str, float]] = [{} for _ in self.results]
        for indices in comparable.values():
            group = [self.results[index] for index in indices]
            for name, loss in GAPS.items():
                closed = gaps_closed([(each.policy, each.budget, float(getattr(each, loss).mean())) for each in group])
                for index, value in zip(indices, closed, strict=True):
                    found[index] |= {} if math.isnan(value) else {name: value}
        return found

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for each policy, budget, storage and trace; it prints as many columns as fit into the terminal. Of
        several documents the document is printed first.

        Columns: policy, budget, entries (kept, or those of the budget), recall, mass_lost, output_error, stored_bytes,
        read_bytes, window_recall, step_recall, storage, raised, document, trace and signature. storage comes right
        after entries where it is not the plain one everywhere. raised: the budget was raised to the method's least. A
        model with learnt sinks adds sink_share. Layers left alone add uncompressed_bytes, their bytes at the end.
        `random` and an oracle of the same budget add mass_gap_closed and error_gap_closed. These are the share of the
        way from `random` to the oracle.
        """
        from kvlab.lib.summaries import Summary

        rows, plain = [], all(r.storage.exact for r in self.results)
        gaps = dict.fromkeys((name for name in GAPS if any(name in each for each in self._gaps)), math.nan)
        for r, closed in zip(self.results, self._gaps, strict=True):
            means, storage = r.summary, {"storage": str(r.storage)}
            first = (
                {"entries": means.pop("entries")}
                | ({} if plain else storage)
                | {name: means.pop(name) for name in LOSSES}
                | gaps
                | closed
                | {name: means.pop(name) for name in BYTES}
            )
            marks = storage | {"raised": r.raised}
            marks |= {
                "document": r.trace.document.partition("@")[0],
                "trace": r.trace.signature,
                "signature": r.signature,
            }
            if r.trace.layout.mixed:
                means["uncompressed_bytes"] = r.trace.uncompressed_bytes
            rows.append({"policy": r.policy.name, "budget": r.policy.asked} | first | means | marks)
        return Summary(rows)

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """Tidy, over the traces: policy, budget, entries, storage, parameters, measure, traces, value, low, high.

        `entries` is what the budget came to, on average where a fraction comes to more on a longer prompt. `value` is
        the mean over the traces (documents), `low` and `high` its 95 % interval; with one trace they are the
        value itself. The gaps of `summary` are among the measures where every trace has them.
        """
        import pandas as pd

        by_policy: dict[tuple[Policy, Storage], list[int]] = defaultdict(list)
        for index, result in enumerate(self.results):
            by_policy[result.policy, result.storage].append(index)
        rows = []
        for (policy, storage), indices in by_policy.items():
            results = [self.results[index] for index in indices]
            summaries = [self.results[index].summary | self._gaps[index] for index in indices]
            entries = sum(result.entries for result in results) / len(results)
            budget = {"budget": policy.asked, "entries": int(entries) if entries.is_integer() else entries}
            marks = {"policy": policy.name} | budget | {"storage": str(storage), "parameters": str(policy)}
            for measure in [*results[0].measures, *GAPS]:
                if any(measure not in summary for summary in summaries):
                    continue
                value, (low, high) = intervals.summarise([summary[measure] for summary in summaries])
                rows.append(
                    marks | {"measure": measure, "traces": len(results), "value": value, "low": low, "high": high}
                )
        return pd.DataFrame(rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The tidy tables of all, with the trace they come from."""
        import pandas as pd

        return pd.concat([r.table.assign(trace=r.trace.signature) for r in self.results], ignore_index=True)
