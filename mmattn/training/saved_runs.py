"""The folder of a run, read back: settings, metrics of each model that it trained, the rows of its table."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmattn.errors import ConfigError
from mmattn.storage.json_files import read_json
from mmattn.training.metrics import read_metrics
from mmattn.training.trackers import flattened


@dataclass(frozen=True)
class SavedRun:
    """What a run of any recipe left in its folder, or has written so far.

    Attributes:
        path: the folder.
        settings: as they were used, without sections: "optim.max_steps".
        rows: of `table.json`; none before the run is finished.
        metrics: lines by the name of the model that was trained; "" where the run names none.
    """

    path: Path
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def values(self, metric: str, model: str = "") -> dict[int, float]:
        """A metric by step.

        Args:
            metric: its name, such as "eval_loss".
            model: the name of the model.
        """
        lines = self.metrics.get(model, [])
        return {line["step"]: line[metric] for line in lines if line.get(metric) is not None and "step" in line}

    def lowest(self, metric: str, model: str = "") -> float:
        """The lowest value of a metric: what a sweep looks for.

        Args:
            metric: its name.
            model: the name of the model.

        Raises:
            ConfigError: it was never measured.
        """
        found = self.values(metric, model)
        if not found:
            known = dict.fromkeys(name for lines in self.metrics.values() for line in lines for name in line)
            raise ConfigError(
                f"{self.path} has no {metric!r} in its metrics{f' of {model!r}' if model else ''}; there are: "
                f"{', '.join(known) or 'none'}"
            )
        return min(found.values())


def read_run(folder: str | os.PathLike[str]) -> SavedRun:
    """Read what a run left in its folder; of a run that is going on, what is there.

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
    metrics: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(place.glob("metrics*.jsonl")):
        own = path.stem.removeprefix("metrics").removeprefix("_")
        for line in read_metrics(path):
            metrics.setdefault(str(line.pop("model", own)), []).append(line)
    return SavedRun(place, flattened(settings), [row for row in rows if isinstance(row, dict)], metrics)


def read_seeds(folder: str | os.PathLike[str]) -> list[SavedRun]:
    """The run of a folder, or where `mmattn train --seeds` wrote one for each seed, all of them.

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
