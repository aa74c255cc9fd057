"""The folder of a run: settings, metrics line by line, texts, tables. Files are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmattn.storage.files import write_text


class RunFolder:
    """A folder that a run writes its files into. Files of an earlier run are replaced as they are written.

    Args:
        path: of the folder, which is created where it is missing.

    Raises:
        OSError: the folder cannot be created or written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def begin(self, settings: Mapping[str, object]) -> bool:
        """Begin a run: write its settings, and remove metrics and table of an earlier one.

        A finished run of the same settings is left as it is, and one line says so.

        Args:
            settings: of the run, as JSON values.

        Returns:
            Whether there is anything to do.
        """
        if finished := self.finished(settings):
            print(finished)
            return False
        for name in ("table.json", "table.md"):
            (self.path / name).unlink(missing_ok=True)
        self.write_config(settings)
        self.write_text("metrics.jsonl", "")
        return True

    def finished(self, settings: Mapping[str, object]) -> str:
        """Return a message if a run with the same settings is finished here, else an empty string.

        Args:
            settings: as they were given to `begin` or `write_config`.
        """
        import yaml

        config = self.path / "config.resolved.yaml"
        if not (self.path / "table.json").is_file() or not config.is_file():
            return ""
        earlier = yaml.safe_load(config.read_text(encoding="utf-8"))
        if not isinstance(earlier, dict) or _learned_from(earlier) != _learned_from(settings):
            return ""
        return (
            f"{self.path} holds the finished run of these settings, and its table is left as it is; to begin anew "
            "remove that folder, or name another: out=FOLDER"
        )

    def write_config(self, settings: Mapping[str, object]) -> None:
        """Write all settings as they were used, as `config.resolved.yaml`."""
        import yaml

        self.write_text("config.resolved.yaml", yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))

    def log(self, **figures: object) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(figures)) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file, closed by a line break, and return its path."""
        write_text(self.path / name, text if not text or text.endswith("\n") else text + "\n")
        return self.path / name

    def write_json(self, name: str, content: object) -> Path:
        """Write a JSON file and return its path; numbers that are not finite become null."""
        return self.write_text(name, json.dumps(_plain(content), indent=2, ensure_ascii=False))

    def finish(self, content: dict[str, object], table: Callable[[list[dict[str, object]]], str]) -> str:
        """Write the content of a finished run as `table.json` and its table as `table.md`, and print the table.

        Args:
            content: what `table` makes a text of, as JSON values.
            table: from the contents of one or several runs to the text.
        """
        self.write_json("table.json", content)
        text = table([content])
        self.write_text("table.md", text)
        print(text)
        return text


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


def _learned_from(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that a table depends on, as JSON has them."""
    return {name: _plain(value) for name, value in settings.items() if name not in ("out", "progress", "resume")}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
