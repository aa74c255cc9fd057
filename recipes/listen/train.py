"""Adapters that add a sensor to a speech recogniser, and that describe series: `mmattn train config.yaml`.

`part: speech` is a recogniser of spoken numbers with a sensor, `part: series` a language model that describes series of
16,000 samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmattn import training
from mmattn.errors import import_extra

from .series import ATTRIBUTES
from .settings import Config
from .train_series import Describing
from .train_speech import Listening
from .voices import HELD_OUT

TRAINED = {
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds of training", 1, ".0f", ""),
}
COLUMNS = {
    "speech": {
        "noisy": ("word error rate at 0 dB", 100, ".1f", " %"),
        "clean": ("at 30 dB", 100, ".1f", " %"),
        **TRAINED,
    },
    "series": {**{name: (name, 100, ".1f", " %") for name in (*ATTRIBUTES, "all")}, **TRAINED},
}


def main(settings: dict[str, Any]) -> Path:
    """Run one part with these settings (see settings.py) and return the run's folder."""
    config = Config(**settings)
    import_extra("matplotlib", "viz")  # fail now rather than after the last step
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    part = (Listening if config.part == "speech" else Describing)(config, run)
    content = {"part": config.part, "seed": config.seed, **part.table()}
    run.finish(content, table)
    return run.path


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`."""
    first = contents[0]
    runs = [[{"parameters": None, "seconds": None, **row} for row in one["rows"]] for one in contents]
    text = training.spread_table("", COLUMNS[first["part"]], runs)
    if first["part"] == "speech":
        return f"{text}\n\n{first['held_out']} utterances of {len(HELD_OUT)} voices that were never trained on."
    return f"{text}\n\n{first['patches']} patches."
