"""Logging to accelerate's trackers: settings, metrics, the final table and pictures.

TensorBoard writes into the run's folder, and so does Weights & Biases before it uploads; MLflow writes where
`MLFLOW_TRACKING_URI` says. A run that is resumed goes on in the run that the tracker already has.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmattn.encoders.images import load_image
from mmattn.errors import AdapterFileError
from mmattn.storage.json_files import read_json, write_json

FILE = "trackers.json"
PROJECT = "mmattn"


def start_trackers(
    accelerator: Any, folder: str | os.PathLike[str] | None, settings: Mapping[str, Any] | None, step: int
) -> None:
    """Begin a run in each tracker of an accelerator, or go on with the one it has."""
    names = [str(name) for name in accelerator.log_with]
    run_ids = _known(folder) if step else {}
    identity = run_ids.get("wandb", uuid.uuid4().hex[:8])
    where = {} if folder is None else {"dir": str(folder)}
    named = {} if folder is None else {"name": Path(folder).resolve().name}
    init_kwargs: dict[str, dict[str, Any]] = {
        # What was logged after the checkpoint comes again.
        "tensorboard": {"purge_step": step + 1} if step else {},
        "wandb": {"id": identity, "resume": "allow", **where, **named},
        "mlflow": {"run_id": run_ids.get("mlflow"), **{f"run_{key}": value for key, value in named.items()}},
    }
    accelerator.init_trackers("tensorboard" if names == ["tensorboard"] else PROJECT, init_kwargs=init_kwargs)
    if not accelerator.is_main_process:
        return
    new_ids = dict.fromkeys(names, "") | ({"wandb": identity} if "wandb" in names else {})
    if "mlflow" in names:
        new_ids["mlflow"] = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    for tracker in accelerator.trackers:
        if settings is not None and tracker.name not in run_ids:
            tracker.store_init_configuration(flattened(settings))
    if folder is not None:
        write_json(Path(folder) / FILE, run_ids | new_ids)


def log_to_trackers(accelerator: Any, prefix: str, step: int, figures: Mapping[str, Any]) -> None:
    """Give metrics of a step to every tracker, as "prefix/name".

    Args:
        accelerator: what `make_accelerator` returned.
        prefix: of the part of the run, whose steps are counted by themselves.
        step: its number.
        figures: by name; what is no number is left out.
    """
    values = {f"{prefix}/{name}": value for name, value in figures.items() if isinstance(value, (int, float))}
    for tracker in accelerator.trackers:
        if tracker.name == "wandb" and accelerator.is_main_process:
            # Its own count of steps may not go back, as that of a second training in the same run does.
            tracker.tracker.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
            tracker.log({**values, f"{prefix}/step": step})
        else:
            tracker.log(values, step=step)


def report_to_trackers(accelerator: Any, folder: str | os.PathLike[str]) -> None:
    """Give what a run has left to TensorBoard, Weights & Biases and MLflow: `table.json`, and every picture.

    Args:
        accelerator: what `make_accelerator` returned.
        folder: of the run.
    """
    if not (accelerator.is_main_process and accelerator.trackers):
        return
    place = Path(folder)
    rows = read_json(place / "table.json")["rows"] if (place / "table.json").is_file() else []
    pictures = {path.stem: path for path in sorted(place.glob("*.png"))}
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            import numpy

            if rows:
                tracker.tracker.add_text("table", (place / "table.md").read_text(encoding="utf-8"))
            images = {name: numpy.asarray(load_image(path))[None] for name, path in pictures.items()}
            tracker.log_images(images, dataformats="NHWC")
        elif tracker.name == "wandb":
            if rows:
                columns = list(dict.fromkeys(key for row in rows for key in row))
                tracker.log_table("table", columns, [[row.get(key) for key in columns] for row in rows])
            tracker.log_images({name: [load_image(path)] for name, path in pictures.items()})
        elif tracker.name == "mlflow":
            for path in [*(place / name for name in ("table.json", "table.md") if rows), *pictures.values()]:
                tracker.log_artifact(str(path))


def flattened(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings without sections, each a number, a text, True, False or None.

    >>> flattened({"seed": 0, "optim": {"max_steps": 40, "betas": [0.9, 0.98]}})
    {'seed': 0, 'optim.max_steps': 40, 'optim.betas': '[0.9, 0.98]'}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{before}{name}.")
        else:
            plain = value is None or isinstance(value, (bool, int, float, str))
            flat[f"{before}{name}"] = value if plain else str(value)
    return flat


def _known(folder: str | os.PathLike[str] | None) -> dict[str, str]:
    """The runs that trackers already have of this folder."""
    if folder is not None and (Path(folder) / FILE).is_file():
        with contextlib.suppress(AdapterFileError):
            run_ids = read_json(Path(folder) / FILE)
            return {str(key): str(value) for key, value in run_ids.items()} if isinstance(run_ids, dict) else {}
    return {}
