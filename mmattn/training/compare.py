"""Runs side by side: the settings that differ, the rows of their tables, and their metrics, as Markdown."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmattn.errors import ConfigError
from mmattn.storage.json_files import read_json
from mmattn.training.metrics import Figures, read_metrics


@dataclass(frozen=True)
class SavedRun:
    """A run read back from its folder, finished or not.

    Attributes:
        path: the folder.
        settings: as they were used, without sections: "optim.max_steps".
        rows: of `table.json`; none before the run is finished.
        metrics: lines by the name of the model that was trained; "" where the run names none.
    """

    path: Path
    settings: Figures
    rows: Sequence[Figures] = ()
    metrics: dict[str, list[Figures]] = field(default_factory=dict)

    def values(self, metric: str, model: str = "") -> dict[int, float]:
        """Return a metric by step.

        Args:
            metric: its name, such as "eval_loss".
            model: the name of the model.
        """
        lines = [(line.get("step"), line.get(metric)) for line in self.metrics.get(model, [])]
        return {step: value for step, value in lines if isinstance(step, int) and isinstance(value, (int, float))}


def read_run(folder: str | os.PathLike[str]) -> SavedRun:
    """Read the folder of a run, finished or not.

    Args:
        folder: of the run.

    Raises:
        ConfigError: no such folder, or none of a run.
        AdapterFileError: a damaged table.
    """
    import yaml

    place = Path(folder)
    config = place / "config.resolved.yaml"
    if not config.is_file():
        raise ConfigError(f"{place} is not the folder of a run: it has no {config.name}; name one that `out` named")
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{config} must hold settings, got {type(settings).__name__}")
    table = place / "table.json"
    content = read_json(table, max_bytes=64 << 20) if table.is_file() else {}
    rows = content.get("rows", []) if isinstance(content, dict) else []
    metrics: dict[str, list[Figures]] = {}
    for line in read_metrics(place / "metrics.jsonl"):
        metrics.setdefault(str(line.pop("model", "")), []).append(line)
    return SavedRun(place, flattened(settings), [row for row in rows if isinstance(row, dict)], metrics)


def read_seeds(folder: str | os.PathLike[str]) -> list[SavedRun]:
    """Read the run of a folder, or all runs of seeds that `mmattn train --seeds` wrote into it.

    Args:
        folder: of the run, or of folders `seed-N`.

    Raises:
        ConfigError: neither.
        AdapterFileError: a damaged table.
    """
    place = Path(folder)
    seeds = [path for path in place.glob("seed-*") if (path / "config.resolved.yaml").is_file()]
    if (place / "config.resolved.yaml").is_file() or not seeds:
        return [read_run(place)]
    return [read_run(path) for path in sorted(seeds, key=lambda path: (len(path.name), path.name))]


Runs = Mapping[str, Sequence[SavedRun]]
"""By name a run, or the runs of several seeds."""
Curves = Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]]
"""By metric and name of the run and its model the values by step, of each seed."""

METRICS = ("loss", "eval_loss", "eval_right_loss")
_NONE = "–"


def compare_runs(runs: Runs, metrics: Sequence[str] = METRICS) -> str:
    """Compare runs of one or several recipes: settings that differ, tables, the last and the lowest of metrics.

    Of several seeds a figure of the table is the mean ± half the range, and a metric the mean.

    Args:
        runs: see `Runs`.
        metrics: their names.

    Raises:
        ConfigError: fewer than two runs.
    """
    if len(runs) < 2:
        raise ConfigError(f"there is nothing to compare with: name two runs or more, got {len(runs)}")
    return "\n\n".join([_settings(runs), *_tables(runs), *_tables_of_curves(curves_of(runs, metrics))])


def curves_of(runs: Runs, metrics: Sequence[str] = METRICS) -> Curves:
    """Return the metrics of runs over steps.

    Args:
        runs: see `Runs`.
        metrics: their names; one that no run has is left out.
    """
    curves: dict[str, dict[str, list[dict[int, float]]]] = {}
    for metric in metrics:
        for name, seeds in runs.items():
            for model in dict.fromkeys(model for run in seeds for model in run.metrics):
                values = [one for run in seeds if (one := run.values(metric, model))]
                if values:
                    curves.setdefault(metric, {})[f"{name}: {model}" if model else name] = values
    return curves


def _settings(runs: Runs) -> str:
    """Return the shared settings that differ, and the names of those that some runs do not have."""
    settings = {name: _settings_of(seeds) for name, seeds in runs.items()}
    common = set.intersection(*(set(one) for one in settings.values()))
    keys = [key for key in next(iter(settings.values())) if key in common - {"out", "progress", "resume"}]
    rows = [[key, *(one[key] for one in settings.values())] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    lines = [f"{len(common)} settings in common, of which {len(rows)} differ."]
    for name, one in settings.items():
        if missing := [key for key in one if key not in common]:
            lines.append(f"Not in all of them, but in {name}: {', '.join(missing)}.")
    return "\n".join(lines) + (f"\n\n{markdown_table(['setting', *settings], rows)}" if rows else "")


def _settings_of(seeds: Sequence[SavedRun]) -> dict[str, str]:
    """Return each setting as text, with all its values where seeds differ in it."""
    texts: dict[str, dict[str, None]] = {}
    for run in seeds:
        for key, value in run.settings.items():
            texts.setdefault(key, {})[_NONE if value is None else str(value)] = None
    return {key: ", ".join(values) for key, values in texts.items()}


def _figures(runs: Runs) -> dict[str, dict[str, dict[str, list[object]]]]:
    """Return by figure, row and run the numbers of all seeds."""
    figures: dict[str, dict[str, dict[str, list[object]]]] = {}
    for name, seeds in runs.items():
        for row, values in (pair for run in seeds for pair in _by_name(run.rows).items()):
            for figure, value in values.items():
                if _numbers([value]):
                    figures.setdefault(figure, {}).setdefault(row, {}).setdefault(name, []).append(value)
    return figures


def _tables(runs: Runs) -> list[str]:
    """Return a table for each figure that two runs have at least: a line for each row, a column for each run."""
    parts, alone = [], dict[str, list[str]]()
    for figure, rows in _figures(runs).items():
        owners = [name for name in runs if any(name in row for row in rows.values())]
        if len(owners) == 1:
            alone.setdefault(owners[0], []).append(figure)
        else:
            lines = [[row, *(_cell(values.get(name, [])) for name in runs)] for row, values in rows.items()]
            parts.append(markdown_table([figure, *runs], lines))
    parts += [f"In the table of {name} alone: {', '.join(names)}." for name, names in alone.items()]
    if unfinished := [name for name, seeds in runs.items() if not all(run.rows for run in seeds)]:
        parts.append(f"Without a table, as it is not finished or measured nothing: {', '.join(unfinished)}.")
    return parts


def _by_name(rows: Sequence[Figures]) -> dict[str, Figures]:
    """Return rows by name; further ones of the same name have a number behind it."""
    named: dict[str, Figures] = {}
    for row in rows:
        name, number = str(row.get("name", len(named))), 2
        while name in named:
            name, number = f"{row['name']} ({number})", number + 1
        named[name] = row
    return named


def _tables_of_curves(curves: Curves) -> Iterable[str]:
    """Of each metric its last step, its last value, and the lowest one."""
    for metric, named in curves.items():
        rows = []
        for name, seeds in named.items():
            steps = ", ".join(dict.fromkeys(f"{max(values):,}" for values in seeds))
            last = statistics.fmean(values[max(values)] for values in seeds)
            lowest = statistics.fmean(min(values.values()) for values in seeds)
            rows.append([name, steps, f"{last:.4g}", f"{lowest:.4g}"])
        yield markdown_table([metric, "last step", "last", "lowest"], rows)


def _cell(values: Sequence[object]) -> str:
    return mean_and_spread(values, 1, ",.0f" if all(isinstance(value, int) for value in values) else ".4g", "")


def _numbers(values: Iterable[object]) -> list[float]:
    """Return the values that are finite numbers."""
    numbers = [one for one in values if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return [one for one in numbers if math.isfinite(one)]


Columns = Mapping[str, tuple[str, float, str, str]]
"""For each figure of a row: the column's head, a factor, a format, a unit."""


def spread_table(corner: str, columns: Columns, tables: Sequence[Sequence[Mapping[str, object]]]) -> str:
    """Return one markdown table from the rows of several runs, each figure as mean ± spread.

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
    for rows in zip(*tables, strict=True):
        cells = [
            mean_and_spread([row[name] for row in rows], scale, form, unit)
            for name, (_, scale, form, unit) in columns.items()
        ]
        lines.append([str(rows[0]["name"]), *cells])
    return markdown_table([corner, *(head for head, *_ in columns.values())], lines)


def mean_and_spread(values: Sequence[object], scale: float, form: str, unit: str) -> str:
    """Return the mean ± half the range of the values that are finite numbers.

    Args:
        values: of each run.
        scale: factor of all of them.
        form: a format specification; counts, which have a "," in it, have no spread.
        unit: written after the figure.

    >>> mean_and_spread([3.0, 3.2, 3.1], 1, "+.2f", "")
    '+3.10 ± 0.10'
    """
    numbers = [scale * value for value in _numbers(values)]
    if not numbers:
        return _NONE
    mean, spread = sum(numbers) / len(numbers), (max(numbers) - min(numbers)) / 2
    about = "" if len(numbers) == 1 or "," in form else f" ± {spread:{form.lstrip('+')}}"
    return f"{mean:{form}}{about}{unit}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns: the first one to the left, the others to the right.

    Args:
        header: a cell for each column.
        rows: cells of each line.

    >>> print(markdown_table(["row", "bits"], [["seen", "3.5"]]))
    | row  | bits |
    | ---- | ---: |
    | seen |  3.5 |
    """
    widths = [max(4, *(len(line[i]) for line in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        placed = [cells[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(placed) + " |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(header), "| " + " | ".join(rule) + " |", *(line(row) for row in rows)])


def flattened(settings: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Return settings without sections, each a number, a text, True, False or None.

    >>> flattened({"seed": 0, "optim": {"max_steps": 40, "betas": [0.9, 0.98]}})
    {'seed': 0, 'optim.max_steps': 40, 'optim.betas': '[0.9, 0.98]'}
    """
    flat: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{before}{name}.")
        else:
            plain = value is None or isinstance(value, (bool, int, float, str))
            flat[f"{before}{name}"] = value if plain else str(value)
    return flat
