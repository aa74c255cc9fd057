"""Questions with evidence: pictures and passages as a row has them, and other, blank, moved and altered ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmattn.data.readers import read_rows
from mmattn.data.row import Row, content_key, encoded_parts, make_row
from mmattn.encoders.images import load_image
from mmattn.errors import ConfigError, import_extra

Parts = Sequence[tuple[str, object]]
"""Pictures and passages in their order, each with its kind."""
Change = Callable[[Tensor], Tensor]
"""From a picture (height, width, 3) in numbers from 0 to 255 to a changed one."""
BLANK = "(This page is left blank.)"
#: Passages that the evidence is moved among.
DISTRACTORS = 4
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
#: Changes that undo a wrong preprocessing, and what is wrong if a model answers better then.
ALTERATIONS: dict[str, tuple[Change, str]] = {
    "red and blue swapped": (lambda x: x.flip(-1), "channels are read in another order (RGB, BGR)"),
    "negative": (lambda x: 255 - x, "light and dark are read inverted"),
    "paler": (lambda x: 128 + x / 2, "see the normalisation (mean, std) of pixels, perhaps done twice"),
    "of more contrast": (lambda x: 2 * x - 128, "see the normalisation (mean, std) of pixels, perhaps left out"),
    "upside down": (lambda x: x.flip(0), "rows of pixels are read in reverse"),
}


class Item(NamedTuple):
    """A question about the evidence of a row, with its answer; and evidence of another row with what follows from it.

    `other_answer` is None if the other row asks something else; else the other evidence is a counterfactual.
    """

    row: int
    question: str
    answer: str
    parts: Parts
    other: Parts
    other_answer: str | None


def read_items(data: object, count: int) -> list[Item]:
    """Return at most so many questions of rows, or of their file or folder, drawn at random.

    The other row of each asks the same and has another answer, or else it is any with another answer.

    Raises:
        ConfigError: rows without a question or evidence, or all with the same answer or evidence.
    """
    rows = _rows(data)
    parts = [encoded_parts(row) for row in rows]
    bad = [number for number, row in enumerate(rows) if not (row.prompt.strip() and parts[number])]
    if bad or not rows:
        raise ConfigError(
            f"{len(bad)} of {len(rows)} rows lack a question or evidence, such as {bad[:3]}: give each a prompt, its "
            "answer as text, and image, images, passage or passages"
        )
    by_question: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_question[row.prompt].append(number)
    random, items = Random(0), []
    for number in random.sample(range(len(rows)), min(count, len(rows))):
        row, keys = rows[number], [content_key(*part) for part in parts[number]]
        candidates = (by_question[row.prompt], range(len(rows)))
        others = [one for some in candidates for one in random.sample(some, min(len(some), 1000))]
        others = [one for one in others if not is_right(rows[one].text, row.text)]
        other = next((one for one in others if [content_key(*part) for part in parts[one]] != keys), None)
        if other is None:
            raise ConfigError(f"no row has another answer and other evidence than row {number}: give more rows")
        text = rows[other].text if rows[other].prompt == row.prompt else None
        items.append(Item(number, row.prompt, row.text, parts[number], parts[other], text))
    return items


def _rows(data: object) -> Sequence[Row]:
    if isinstance(data, (str, PathLike)):
        data = read_rows(fspath(data))
    if not isinstance(data, Iterable):
        raise ConfigError(f"doctor needs rows, or their file or folder; got {type(data).__name__}")
    rows: list[Any] = [make_row(one) if isinstance(one, Mapping) else one for one in data]
    wrong = {type(one).__name__ for one in rows if not isinstance(one, Row)}
    if wrong:
        raise ConfigError(f"doctor needs rows, as dicts or Row; got {', '.join(sorted(wrong))}")
    return rows


def plain_pictures(count: int = 64) -> list[dict[str, object]]:
    """Return rows that ask for the colour of a picture of one colour, to tell requests apart."""
    new, names = import_extra("PIL.Image", "vision").new, [COLOURS[number % len(COLOURS)] for number in range(count)]
    question = "What colour is this picture? Answer with one word."
    return [{"prompt": question, "image": new("RGB", (64, 64), name), "text": name} for name in names]


def contents(parts: Parts, change: Change | None = None) -> list[object]:
    """Return the evidence as a model is given it: images of Pillow, new ones at each call, and texts."""
    return [_picture(part, change) if kind == "pictures" else part for kind, part in parts]


def _picture(source: object, change: Change | None) -> object:
    picture = load_image(source)
    if change is None:
        return picture
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
    return load_image(change(pixels.float()).clamp(0, 255).to(torch.uint8))


def blank(parts: Parts) -> list[object]:
    """Return grey pictures of the same size, and passages that say nothing."""
    grey = contents(parts, lambda pixels: torch.full_like(pixels, 127))
    return [BLANK if isinstance(part, str) else part for part in grey]


def moved(place: str, number: int, items: Sequence[Item]) -> list[object]:
    """Return the passages of an item "first", "in the middle" or "last" among those of other items."""
    texts = [part for item in [*items[number + 1 :], *items[:number]] for _, part in item.parts]
    around = [text for text in texts if not is_right(items[number].answer, str(text))][:DISTRACTORS]
    before = {"first": 0, "in the middle": len(around) // 2, "last": len(around)}[place]
    return [*around[:before], *contents(items[number].parts), *around[before:]]


def is_right(expected: str, answer: str) -> bool:
    """Return True if an answer has the expected text as words of its own, whatever its capitals and line breaks.

    >>> is_right("red", "It is Red."), is_right("red", "It is covered.")
    (True, False)
    """
    phrase, text = (" ".join(one.lower().split()) for one in (expected, answer))
    before, after = (r"(?<!\w)" if phrase[:1].isalnum() else "", r"(?!\w)" if phrase[-1:].isalnum() else "")
    return re.search(before + re.escape(phrase) + after, text) is not None
