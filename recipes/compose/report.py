"""The table of a run of compose, after the figures of the paper."""

from __future__ import annotations

from typing import Any

from mmattn import training

from .data import TASKS

# arXiv 2401.02412, table 1.
PAPER = {
    "paper: m_A": (0.981, 0.042, 0.007),
    "paper: m_B": (0.0, 0.737, 0.0),
    "paper: composed": (0.929, 0.720, 0.843),
}
COLUMNS = {
    "substitution": ("KV-substitution", 100, ".1f", " %"),
    "arithmetic": ("numeric arithmetic", 100, ".1f", " %"),
    "KV-arithmetic": ("KV-arithmetic", 100, ".1f", " %"),
    "forced": ("KV-arithmetic, teacher-forced", 100, ".1f", " %"),
    "token_ms": ("ms a token", 1, ".2f", ""),
}


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, after the paper's rows, with what was trained."""
    first, paper = contents[0], []
    if first["key_models"] == 1:
        paper = [
            {**dict.fromkeys(COLUMNS), "name": name, **dict(zip(TASKS, row, strict=True))}
            for name, row in PAPER.items()
        ]
    lines = training.spread_table("", COLUMNS, [paper + one["rows"] for one in contents]).splitlines()
    # The paper's figures are of one run, whatever the number of ours.
    lines = [line.replace(" ± 0.0", "") if line.startswith("| paper") else line for line in lines]
    trained = []
    for name in (name for name in first["trained"] if name.endswith("all three")):
        seconds = [content["trained"][name]["seconds"] for content in contents]
        parameters = f"{first['trained'][name]['parameters']:,} parameters"
        trained.append(f"{name}: {parameters} in {training.mean_and_spread(seconds, 1, '.0f', ' s')}")
    return "\n".join(lines) + (
        f"\n\n{'; '.join(trained)}. Every expression measured is of {first['held']:,} keys that nothing put on m_B was "
        "trained on; ms a token: medians of one request, all in turn."
    )
