"""Runs side by side: the settings that differ, the rows of their tables, and their metrics over steps, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmattn.errors import ConfigError
from mmattn.training.run_folder import markdown_table
from mmattn.training.saved_runs import SavedRun
from mmattn.training.seed_tables import mean_and_spread

Runs = Mapping[str, Sequence[SavedRun]]
"""By name a run, or the runs of several seeds."""
Curves = Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]]
"""By metric and name of the run and its model the values by step, of each seed."""

METRICS = ("loss", "eval_loss")
_OWN = ("out", "progress", "resume")
_STEPS = 4
_NONE = "–"


def compare_runs(runs: Runs, metrics: Sequence[str] = METRICS) -> str:
    """What differs between runs, of one recipe or of several: then what they have in common is compared.

    Of several seeds a figure of the table is the mean ± half the range, and a metric the mean.

    Args:
        runs: see `Runs`.
        metrics: that are shown over steps.

    Raises:
        ConfigError: fewer than two runs.
    """
    if len(runs) < 2:
        raise ConfigError(f"there is nothing to compare with: name two runs or more, got {len(runs)}")
    parts = [_settings(runs), *_tables(runs), *_tables_of_curves(curves_of(runs, metrics))]
    return "\n\n".join(part for part in parts if part)


def curves_of(runs: Runs, metrics: Sequence[str] = METRICS) -> Curves:
    """The metrics of runs over steps.

    Args:
        runs: see `Runs`.
        metrics: their names; one that no run has is left out.
    """
    found: dict[str, dict[str, list[dict[int, float]]]] = {}
    for metric in metrics:
        for name, seeds in runs.items():
            for model in dict.fromkeys(model for run in seeds for model in run.metrics):
                values = [one for run in seeds if (one := run.values(metric, model))]
                if values:
                    found.setdefault(metric, {})[f"{name}: {model}" if model else name] = values
    return found


def _settings(runs: Runs) -> str:
    """The settings that all have and that differ, and the names of those that some do not have."""
    given = {name: _shared_settings(seeds) for name, seeds in runs.items()}
    common = [key for key in next(iter(given.values())) if all(key in one for one in given.values())]
    rows = []
    for key in common:
        values = [one[key] for one in given.values()]
        if key not in _OWN and len(set(values)) > 1:
            rows.append([key, *values])
    lines = [f"{len(common)} settings in common, of which {len(rows)} differ."]
    for name, one in given.items():
        if own := [key for key in one if key not in common]:
            more = f" and {len(own) - 8} more" if len(own) > 8 else ""
            lines.append(f"Not in all of them, but in {name}: {', '.join(own[:8])}{more}.")
    table = markdown_table(["setting", *given], rows) if rows else ""
    return "\n\n".join(part for part in ("\n".join(lines), table) if part)


def _shared_settings(seeds: Sequence[SavedRun]) -> dict[str, str]:
    """Each setting as text, with all its values where seeds differ in it."""
    found: dict[str, dict[str, None]] = {}
    for run in seeds:
        for key, value in run.settings.items():
            found.setdefault(key, {})[_NONE if value is None else str(value)] = None
    return {key: ", ".join(values) for key, values in found.items()}


def _tables(runs: Runs) -> list[str]:
    """A table for each figure that two runs have at least: a line for each row of theirs."""
    labelled = {name: [_labelled(run.rows) for run in seeds] for name, seeds in runs.items()}
    having: dict[str, set[str]] = {}
    for name, tables in labelled.items():
        for figure in (figure for rows in tables for row in rows.values() for figure in _figures(row)):
            having.setdefault(figure, set()).add(name)
    parts = []
    for figure in (figure for figure, names in having.items() if len(names) > 1):
        rows = []
        for label in dict.fromkeys(label for tables in labelled.values() for rows in tables for label in rows):
            cells = [
                _cell([rows[label].get(figure) for rows in tables if label in rows]) for tables in labelled.values()
            ]
            if any(cell != _NONE for cell in cells):
                rows.append([label, *cells])
        parts.append(markdown_table([figure, *labelled], rows))
    alone = {figure: next(iter(names)) for figure, names in having.items() if len(names) == 1}
    for name in runs:
        if own := [figure for figure, owner in alone.items() if owner == name]:
            parts.append(f"In the table of {name} alone: {', '.join(own)}.")
    if unfinished := [name for name, seeds in runs.items() if not all(run.rows for run in seeds)]:
        parts.append(f"Without a table, as it is not finished or measured nothing: {', '.join(unfinished)}.")
    return parts


def _labelled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Rows by name; those that share one are told apart by a whole number that they have besides."""
    names = [str(row.get("name", number)) for number, row in enumerate(rows)]
    found: dict[str, Mapping[str, Any]] = {}
    for name, row in zip(names, rows, strict=True):
        alike = [other for other, own in zip(rows, names, strict=True) if own == name]
        label = name
        if len(alike) > 1:
            counts = [key for key, value in row.items() if _is_whole(value)]
            key = next((key for key in counts if len({other.get(key) for other in alike}) == len(alike)), None)
            label = f"{name}, {key} {row[key]:,}" if key else f"{name} ({len(found)})"
        found[label] = row
    return found


def _tables_of_curves(curves: Curves) -> Iterable[str]:
    """Of each metric its value at a few steps, the last one, and the lowest."""
    for metric, named in curves.items():
        known = sorted({step for seeds in named.values() for values in seeds for step in values})
        chosen = [known[round(number * (len(known) - 1) / max(1, _STEPS - 1))] for number in range(_STEPS)]
        steps = list(dict.fromkeys(chosen))
        rows = []
        for name, seeds in named.items():
            cells = [_mean([at for values in seeds if (at := _at(values, step)) is not None]) for step in steps]
            last = _mean([values[max(values)] for values in seeds])
            rows.append([name, *cells, last, _mean([min(values.values()) for values in seeds])])
        yield markdown_table([metric, *(f"step {step:,}" for step in steps), "last", "lowest"], rows)


def _at(values: Mapping[int, float], step: int) -> float | None:
    """The last value up to a step; None before the first one, and after the end of the run."""
    if step > max(values):
        return None
    return next((values[known] for known in sorted(values, reverse=True) if known <= step), None)


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}" if values else _NONE


def _cell(values: Sequence[Any]) -> str:
    numbers = [value for value in values if _is_number(value)]
    return mean_and_spread(numbers, 1, ",.0f" if all(map(_is_whole, numbers)) else ".4g", "")


def _figures(row: Mapping[str, Any]) -> list[str]:
    return [name for name, value in row.items() if _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
