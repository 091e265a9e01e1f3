"""Several replays as one result: by policy and budget, as tables, with intervals over documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from kvlab.errors import KvlabError
from kvlab.lib import bootstrap
from kvlab.methods import Policy
from kvlab.replays.single import Replay

if TYPE_CHECKING:
    import pandas as pd

FIRST = ("recall", "mass_lost", "output_error", "stored_bytes", "read_bytes")


class Replays(Sequence[Replay]):
    """Several policies, budgets or traces. `result[policy, budget]` is one `Replay` (a list of them over several
    traces).
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
    def __getitem__(self, key: str | Policy | tuple[str | Policy, int | float | None]) -> Any: ...
    def __getitem__(self, key: int | slice | str | Policy | tuple[str | Policy, int | float | None]) -> Any:
        if isinstance(key, int | slice):
            return self.results[key]
        name, budget = key if isinstance(key, tuple) else (key, None)
        chosen = [
            r
            for r in self.results
            if name in (r.policy, r.policy.name, str(r.policy)) and budget in (None, r.policy.asked, r.budget)
        ]
        if not chosen:
            known = ", ".join(sorted({f"{r.policy.name}, {r.policy.asked}" for r in self.results}))
            raise KvlabError(
                f"no replay of {name}{'' if budget is None else f' at budget {budget}'}; there are: {known}"
            )
        return chosen[0] if len({id(r.trace) for r in self.results}) == 1 else chosen

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for each policy, budget and trace; it prints as many columns as fit into the terminal.

        Columns: policy, budget, recall, mass_lost, output_error, stored_bytes, read_bytes, window_recall, step_recall,
        entries (what the budget came to), raised (to what the method needs), trace and signature; sink_share where a
        model has learnt sinks, and uncompressed_bytes, what the layers held at the end that no policy compresses, where
        there are any.
        """
        from kvlab.replays.summaries import Summary

        rows = []
        for r in self.results:
            means = r.summary
            first = {name: means.pop(name) for name in FIRST}
            marks = {"entries": r.budget, "raised": r.raised, "trace": r.trace.signature, "signature": r.signature}
            if r.trace.layout.mixed:
                means["uncompressed_bytes"] = r.trace.uncompressed_bytes
            rows.append({"policy": r.policy.name, "budget": r.policy.asked} | first | means | marks)
        return Summary(rows)

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """Tidy, over the traces: policy, budget, entries, parameters, measure, traces, value, low, high.

        `entries` is what the budget came to, on average where a fraction comes to more on a longer prompt. `value` is
        the mean over the traces (documents), `low` and `high` its 95 % bootstrap interval; with one trace they are the
        value itself.
        """
        import pandas as pd

        by_policy: dict[Policy, list[Replay]] = {}
        for result in self.results:
            by_policy.setdefault(result.policy, []).append(result)
        rows = []
        for policy, results in by_policy.items():
            summaries = [result.summary for result in results]
            entries = sum(result.budget for result in results) / len(results)
            budget = {"budget": policy.asked, "entries": int(entries) if entries.is_integer() else entries}
            marks = {"policy": policy.name} | budget | {"parameters": str(policy)}
            for measure in results[0].measures:
                if any(measure not in summary for summary in summaries):
                    continue
                value, (low, high) = bootstrap.summarise([summary[measure] for summary in summaries])
                rows.append(
                    marks | {"measure": measure, "traces": len(results), "value": value, "low": low, "high": high}
                )
        return pd.DataFrame(rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The tidy tables of all, with the trace they come from."""
        import pandas as pd

        return pd.concat([r.table.assign(trace=r.trace.signature) for r in self.results], ignore_index=True)
