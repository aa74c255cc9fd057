"""Tables of runs: the figures of several seeds as mean ± spread, and runs side by side; what runs left, read back."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.json_files import read_json

Figures = dict[str, object]
"""Metrics of a step, a row of a table, or settings, by name."""
Columns = Mapping[str, tuple[str, float, str, str]]
"""For each figure of a row: the column's head, a factor, a format, a unit."""
METRICS = ("loss", "eval_loss", "eval_right_loss")
_NONE = "–"


def _read_run(folder: Path) -> tuple[Figures, Sequence[Figures]]:
    """Return the settings of a run, without sections, and the rows of its table; none before the run is finished."""
    import yaml

    config, table = folder / "config.resolved.yaml", folder / "table.json"
    if not config.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {config.name}; name the `out` of a run")
    try:
        settings = flattened(yaml.safe_load(config.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{config} holds no settings: {' '.join(str(error).split())[:200]}") from error
    content = read_json(table, max_bytes=64 << 20) if table.is_file() else {}
    if not isinstance(content, dict):
        raise AdapterFileError(f"{table} must hold an object, got {type(content).__name__}: train the run again")
    return settings, content.get("rows", [])


def read_metrics(path: str | os.PathLike[str]) -> list[Figures]:
    """The complete lines of a `metrics.jsonl`; a process killed while it wrote leaves half a one.

    Args:
        path: of the file; where there is none, there are no lines.
    """
    lines: list[Figures] = []
    for text in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def compare_runs(runs: Mapping[str, str | os.PathLike[str]], metrics: Sequence[str] = METRICS) -> str:
    """Compare runs of one or several recipes: settings that differ, figures of their tables, the last of each metric.

    Args:
        runs: the folder of each run by name, finished or not; of one that `mmattn train --seeds` wrote a figure is the
            mean ± half the range.
        metrics: their names.

    Raises:
        ConfigError: fewer than two runs, or a folder without a run.
        AdapterFileError: a damaged table.
    """
    if len(runs) < 2:
        raise ConfigError(f"there is nothing to compare with: name two runs or more, got {len(runs)}")
    settings, figures = dict[str, dict[str, list[object]]](), dict[str, dict[str, list[object]]]()
    for name, run in ((name, Path(run)) for name, run in runs.items()):
        seeds = [] if (run / "config.resolved.yaml").is_file() else sorted(run.glob("seed-*/config.resolved.yaml"))
        for folder in [seed.parent for seed in seeds] or [run]:
            chosen, rows = _read_run(folder)
            for key, value in chosen.items():
                settings.setdefault(key, {}).setdefault(name, []).append(value)
            for key, value in _figures(rows, read_metrics(folder / "metrics.jsonl"), metrics).items():
                figures.setdefault(key, {}).setdefault(name, []).append(value)
    lines = []
    for key, values in settings.items():
        cells = [", ".join(dict.fromkeys(map(str, values.get(name, [_NONE])))) for name in runs]
        if len(set(cells)) > 1 and key not in ("out", "progress", "resume"):
            lines.append([key, *cells])
    lines += [[key, *(_cell(values.get(name, [])) for name in runs)] for key, values in figures.items()]
    return markdown_table(["", *runs], lines)


def _figures(rows: Sequence[Figures], logged: Sequence[Figures], metrics: Sequence[str]) -> Figures:
    """Return the figures of a run's table and the last value of each metric, by name."""
    figures, counts = Figures(), Counter[str]()
    for row in rows:
        name = str(row.get("name", ""))
        counts[name] += 1
        name += f" ({counts[name]})" if counts[name] > 1 else ""
        figures |= {f"{name}: {key}": value for key, value in row.items() if _numbers([value])}
    for metric in metrics:
        for line in logged:
            if _numbers([line.get(metric)]):
                figures[f"{line['model']}: last {metric}" if line.get("model") else f"last {metric}"] = line[metric]
    return figures


def _cell(values: Sequence[object]) -> str:
    return mean_and_spread(values, 1, ",.0f" if all(isinstance(value, int) for value in values) else ".4g", "")


def _numbers(values: Sequence[object]) -> list[float]:
    """Return the values that are finite numbers."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return [number for number in numbers if math.isfinite(number)]


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
