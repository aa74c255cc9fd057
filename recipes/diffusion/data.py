"""Real pictures: scikit-learn's 1,797 handwritten digits, a folder with one folder per class, or torchvision's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn.encoders import away_from_paper
from mmattn.errors import ConfigError

from .attributes import INK, LIGHT, Attributes, Subject
from .settings import DataSettings

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
KINDS = {"ink": INK, "light": LIGHT}


@dataclass
class Pictures:
    """Pictures (n, c, size, size) from -1 to 1, their classes (n,) and standardised measures (n, 3)."""

    pictures: Tensor
    classes: Tensor
    measures: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, rows: slice | Tensor) -> Pictures:
        """The same of these rows."""
        return Pictures(self.pictures[rows], self.classes[rows], self.measures[rows])


def load_data(
    settings: DataSettings | None = None, size: int = 16, channels: int | None = None
) -> tuple[Pictures, Pictures, Subject]:
    """Training pictures, held-out pictures and what can be said of them, `size` pixels a side.

    Raises:
        ConfigError: no such data, or too little of it to train and to measure.
    """
    settings = settings or DataSettings()
    attributes = KINDS[settings.attributes]
    read = {"digits": _digits, "folder": _folder, "torchvision": _torchvision}[settings.kind]
    pictures, classes, away, names = read(settings, size, attributes)
    if channels is not None and channels != pictures.shape[1]:
        pictures = pictures.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    for number, called in enumerate(names):
        if int((~away & (classes == number)).sum()) < 2:
            raise ConfigError(f"there are fewer than two training pictures of {called[0]!r}; two of each are needed")
    if len(names) < 2 or not away.any():
        raise ConfigError(f"{len(names)} classes and {int(away.sum())} held-out pictures: two and one are needed")
    raw = attributes.measure(pictures)
    known, own = raw[~away], classes[~away]
    subject = Subject(
        names,
        attributes,
        torch.stack([known[own == number].mean(0) for number in range(len(names))]),
        torch.stack([known[own == number].std(0) for number in range(len(names))]).clamp(min=1e-6),
    )
    whole = Pictures(pictures, classes, subject.standardised(raw, classes))
    return whole[~away], whole[away], subject


Read = tuple[Tensor, Tensor, Tensor, tuple[tuple[str, ...], ...]]


def _digits(settings: DataSettings, size: int, attributes: Attributes) -> Read:
    from sklearn.datasets import load_digits

    raw = load_digits()
    pictures = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    pictures = F.interpolate(pictures, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    if attributes is not INK:
        raise ConfigError("data.attributes must be ink for the digits: they have no colours")
    every = round(1 / settings.held_out)
    away = torch.arange(len(pictures)) % every == every - 1
    # Twice in words for each time in figures.
    names = tuple((name, name, str(number)) for number, name in enumerate(NUMBERS))
    return 2 * pictures - 1, torch.tensor(raw.target), away, names


def _folder(settings: DataSettings, size: int, attributes: Attributes) -> Read:
    """One folder of pictures per class; the last of every few are held out."""
    from torchvision.datasets import ImageFolder

    root = _place(settings)
    try:
        found = ImageFolder(str(root))
    except (FileNotFoundError, OSError) as error:
        raise ConfigError(f"data.path={root} must hold one folder of pictures per class: {error}") from error
    classes = torch.tensor([label for _, label in found.samples])
    chosen = _spread(len(classes), settings.most)
    pictures = _framed((found.samples[row][0] for row in chosen), size, attributes)
    classes = classes[chosen]
    return pictures, classes, _last_of_each(classes, settings.held_out), _names(found.classes)


def _torchvision(settings: DataSettings, size: int, attributes: Attributes) -> Read:
    """A dataset class by its name, split as it comes where it does, and otherwise as a folder is."""
    from torchvision import datasets

    made = getattr(datasets, settings.name or "", None)
    if made is None:
        raise ConfigError(f"torchvision.datasets has no {settings.name!r}; data.name=MNIST would be one")
    takes = inspect.signature(made).parameters
    splits: list[dict[str, Any]] = [{}]
    if "train" in takes:
        splits = [{"train": True}, {"train": False}]
    elif "split" in takes and "split" not in settings.options:
        splits = [{"split": "train"}, {"split": "test"}]
    given = {**({"download": settings.download} if "download" in takes else {}), **settings.options}
    try:
        parts = [made(str(_place(settings)), **split, **given) for split in splits]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"torchvision's {settings.name} cannot be read from {settings.path}: {error}; data.download=true fetches "
            "it, data.options={...} are further arguments"
        ) from error
    pictures, classes = [], []
    for part, most in zip(parts, (settings.most, max(1, settings.most // 4)), strict=False):
        rows = [part[row] for row in _spread(len(part), most)]
        pictures.append(_framed((image for image, _ in rows), size, attributes))
        classes.append(torch.tensor([int(label) for _, label in rows]))
    labels = torch.cat(classes)
    away = torch.zeros(len(labels), dtype=torch.bool)
    away[len(classes[0]) :] = True
    if len(parts) == 1:
        away = _last_of_each(labels, settings.held_out)
    called = getattr(parts[0], "classes", None) or [f"class {number}" for number in range(int(labels.max()) + 1)]
    return torch.cat(pictures), labels, away, _names(called)


def _place(settings: DataSettings) -> Path:
    if settings.path is None:
        raise ConfigError(f"data.kind={settings.kind} needs data.path=FOLDER")
    return Path(settings.path)


def _names(classes: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    # MNIST calls its classes "7 - seven".
    return tuple((name.split(" - ")[-1].replace("_", " ").lower(),) for name in classes)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly over all."""
    return torch.linspace(0, count - 1, min(most, count)).long().tolist()


def _last_of_each(classes: Tensor, held_out: float) -> Tensor:
    """The last share of each class (n,) bool, at least one."""
    away = torch.zeros(len(classes), dtype=torch.bool)
    for number in classes.unique():
        rows = (classes == number).nonzero()[:, 0]
        away[rows[-max(1, round(held_out * len(rows))) :]] = True
    return away


def _framed(sources: Iterable[Any], size: int, attributes: Attributes) -> Tensor:
    """Pictures (n, c, size, size): the middle square; of writing the ink, whatever colours it and the paper have."""
    made = []
    for source in sources:
        image = mmattn.load_image(source)
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side)).resize((size, size))
        pixels = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1) / 255
        if attributes is INK:
            pixels = away_from_paper(pixels.mean(0, keepdim=True))
            pixels = pixels / pixels.max().clamp(min=0.1)
        made.append(2 * pixels - 1)
    return torch.stack(made)
