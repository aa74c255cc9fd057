"""easy-VQA: questions about drawn shapes, with its public split into training and test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from mmattn.errors import check_choice
from mmattn.models.cache import fetch


class Question(NamedTuple):
    """A question about a picture.

    Attributes:
        picture: file of the picture, 64 × 64.
        text: the question.
        answer: one of 13 words.
    """

    picture: Path
    text: str
    answer: str


def load_easy_vqa(split: str) -> list[Question]:
    """Return the questions of easy-VQA (https://github.com/vzhou842/easy-VQA, MIT), in their published order.

    Args:
        split: "train", 38,575 questions about 4,000 pictures, or "test", 9,673 about 1,000 others.

    Raises:
        ConfigError: another split.
        AdapterFileError: the data cannot be fetched.
    """
    folder = fetch("easy-vqa") / check_choice("split", split, ("train", "test"))
    rows = json.loads((folder / "questions.json").read_text("utf-8"))
    return [Question(folder / "images" / f"{picture}.png", text, answer) for text, answer, picture in rows]
