"""Several replays as one result: by policy and budget, as tables, with intervals over documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.lib import bootstrap
from kvlab.methods import Policy

if TYPE_CHECKING:
    import pandas as pd


if TYPE_CHECKING:
    from kvlab.replays.run import Replay


MEASURES = ("recall", "window_recall", "step_recall", "mass_lost", "output_error", "stored_bytes", "read_bytes")
FIRST = ("recall", "mass_lost", "output_error", "stored_bytes", "read_bytes")


class Replays(Sequence):
    """Several policies, budgets or traces. `result[policy, budget]` is one `Replay` (a list of them over several
    traces).
    """

    def __init__(self, results: Iterable[Replay]):
        self.results = list(results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, key):
        if isinstance(key, int | slice):
            return self.results[key]
        name, budget = key if isinstance(key, tuple) else (key, None)
        found = [
            r
            for r in self.results
            if name in (r.policy, r.policy.name, str(r.policy)) and budget in (None, _budget_of(r), r.budget)
        ]
        if not found:
            known = ", ".join(sorted({f"{r.policy.name}, {_budget_of(r)}" for r in self.results}))
            raise KvlabError(
                f"no replay of {name}{'' if budget is None else f' at budget {budget}'}; there are: {known}"
            )
        return found[0] if len({id(r.trace) for r in self.results}) == 1 else found

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for each policy, budget and trace; it prints as many columns as fit into the terminal.

        Columns: policy, budget, recall, mass_lost, output_error, stored_bytes, read_bytes, window_recall, step_recall,
        entries (what the budget came to), raised (to what the method needs), trace and signature.
        """
        from kvlab.replays.summaries import Summary

        rows = []
        for r in self.results:
            means = r.summary
            first = {name: means.pop(name) for name in FIRST}
            marks = {"entries": r.budget, "raised": r.raised, "trace": r.trace.signature, "signature": r.signature}
            rows.append({"policy": r.policy.name, "budget": _budget_of(r)} | first | means | marks)
        return Summary(rows)

    @cached_property
    def intervals(self) -> pd.DataFrame:
        """Tidy, over the traces: policy, budget, parameters, measure, traces, value, low, high.

        `value` is the mean over the traces (documents), `low` and `high` its 95 % bootstrap interval; with one trace
        they are the value itself.
        """
        import pandas as pd

        by_policy: dict[Policy, list[Replay]] = {}
        for result in self.results:
            by_policy.setdefault(result.policy, []).append(result)
        rows = []
        for one, results in by_policy.items():
            summaries = [result.summary for result in results]
            marks = {"policy": one.name, "budget": getattr(one, "budget", None), "parameters": str(one)}
            for measure in MEASURES:
                value, (low, high) = bootstrap.summarise([summary[measure] for summary in summaries])
                found = {"measure": measure, "traces": len(results), "value": value, "low": low, "high": high}
                rows.append(marks | found)
        return pd.DataFrame(rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The tidy tables of all, with the trace they come from."""
        import pandas as pd

        return pd.concat([r.table.assign(trace=r.trace.signature) for r in self.results], ignore_index=True)


def _budget_of(result: Replay) -> int | float | None:
    return getattr(result.policy, "budget", None)


def _tidy(name: str, values: Tensor, axes: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd

    grid = np.indices(tuple(values.shape)).reshape(len(axes), -1) if values.numel() else np.empty((len(axes), 0), int)
    columns = dict(zip(axes, grid, strict=True))
    if "step" in columns:
        columns["step"] = columns["step"] + 1
    frame = pd.DataFrame(
        {
            axis: pd.array(columns[axis] if axis in columns else [pd.NA] * grid.shape[1], dtype="Int64")
            for axis in ("layer", "kv_head", "head", "step")
        }
    )
    if "step" not in axes:
        frame["step"] = pd.array([0] * len(frame), dtype="Int64")
    return frame.assign(measure=name, value=values.reshape(-1).double().numpy())
