"""The tables of the same run over several seeds, as one of mean ± spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmattn.training.run_folder import markdown_table

Columns = Mapping[str, tuple[str, float, str, str]]
"""For each figure of a row: the column's head, a factor, a format, a unit."""


def spread_table(corner: str, columns: Columns, tables: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """One markdown table from the rows of several runs, each figure as mean ± spread.

    Args:
        corner: head of the first column.
        columns: of each figure.
        tables: the rows of each run; a row has a "name" and a figure for each column.

    >>> runs = [[{"name": "seen", "bits": bits}] for bits in (3.0, 3.2, 3.1)]
    >>> print(spread_table("", {"bits": ("bits saved", 1, "+.2f", "")}, runs))
    |      |   bits saved |
    | ---- | -----------: |
    | seen | +3.10 ± 0.10 |
    """
    lines = []
    for place, first in enumerate(tables[0]):
        rows = [table[place] for table in tables]
        cells = [
            mean_and_spread([row[name] for row in rows], scale, form, unit)
            for name, (_, scale, form, unit) in columns.items()
        ]
        lines.append([first["name"], *cells])
    return markdown_table([corner, *(head for head, *_ in columns.values())], lines)


def mean_and_spread(values: Sequence[float | None], scale: float, form: str, unit: str) -> str:
    """Mean ± half the range of the values that are numbers.

    Args:
        values: of each run.
        scale: factor of all of them.
        form: a format specification; counts, which have a "," in it, have no spread.
        unit: written after the figure.

    >>> mean_and_spread([3.0, 3.2, 3.1], 1, "+.2f", "")
    '+3.10 ± 0.10'
    """
    known = [scale * value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "–"
    mean, spread = sum(known) / len(known), (max(known) - min(known)) / 2
    about = "" if len(known) == 1 or "," in form else f" ± {spread:{form.lstrip('+')}}"
    return f"{mean:{form}}{about}{unit}"
