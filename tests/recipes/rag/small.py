"""Settings of runs of the retrieval recipe that take seconds, and texts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOPICS = {
    "loops": 'The "while" statement repeats a suite as long as an expression is true.\n\nA "break" leaves the loop.',
    "calls": "A call runs a function with arguments.\n\nArguments may be given by name.\n\nA call gives a value.",
    "names": "Names refer to objects.\n\nNames are bound by assignment, by import and by definition of functions.",
}


def small(lm: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run that takes seconds."""
    return {
        "lm": str(lm),
        "out": str(out),
        "progress": False,
        "data": {
            "train": 200,
            "synthetic": 50,
            "ask": 6,
            "sizes": [10, 20, 40],
            "small": 20,
            "per_query": 12,
            "cache": str(out.parent / "cache"),
        },
        "optim": {"max_steps": 2, "per_device_train_batch_size": 3},
        "docs": {"chunk": 5, "window": 3, "max_steps": 2, "batch_size": 2, "layer": 2, "rank": 3},
        **more,
    }
