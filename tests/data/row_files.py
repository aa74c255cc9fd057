"""Files of rows to read: pictures, lines of JSON, class folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image


def picture(folder: Path, name: str, colour: int = 0) -> Path:
    """A picture of one colour."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (7, 5), (colour, 3 * colour % 256, 50)).save(folder / name)
    return folder / name


def lines(path: Path, *given: Any) -> Path:
    """Objects, or what is to stand in a line, one for each line."""
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in given), encoding="utf-8")
    return path


def class_folders(folder: Path, each: int = 3, names: tuple[str, ...] = ("daisy", "lily-valley")) -> Path:
    """Class folders as torchvision's ImageFolder reads them."""
    for place, name in enumerate(names):
        for number in range(each):
            picture(folder / name, f"{number}.png", 40 * place + number)
    return folder
