"""Records as LongBench's files hold them."""

from __future__ import annotations

from support.texts import FERRY


def record(task: str, **changes: object) -> dict:
    """A question about the ferry, as a task of LongBench."""
    return {
        "dataset": task,
        "_id": f"{task}-{len(changes)}",
        "context": FERRY,
        "input": "Who owned the piano?",
        "answers": ["Ilse Brandt"],
        "all_classes": ["Person", "Date"] if task in ("trec", "lsht") else None,
        "length": 300,
        "language": "en",
    } | changes
