"""The table of the three tasks, beside the paper's and its controls."""

from __future__ import annotations

from typing import Any

from mmattn import training

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
}


def table(tables: list[dict[str, Any]]) -> str:
    """The rows of one or several `table.json`, the paper's first, and what was trained."""
    paper = [{"name": name, **dict(zip(COLUMNS, (*row, None), strict=True))} for name, row in PAPER.items()]
    made = training.spread_table("", COLUMNS, [paper + one["rows"] for one in tables])
    # The paper's figures are of one run, whatever the number of ours.
    made = "\n".join(line.replace(" ± 0.0", "") if line.startswith("| paper") else line for line in made.splitlines())
    seconds = training.mean_and_spread([one["seconds"][-1] for one in tables], 1, ".0f", " s")
    return (
        f"{made}\n\nadapter: {tables[0]['parameters']:,} trained parameters in {seconds}; every expression measured is "
        f"of {tables[0]['held']:,} keys that no composition was trained on."
    )
