"""A tiny model that answers questions from pictures, ways to plant faults in it, and a chain over passages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.encoders import load_image

SIDE = 13
COLOURS = {"red": (210, 40, 30), "green": (30, 170, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
SHAPES = ("bar", "cross", "frame")
ANSWERS = (*COLOURS, *SHAPES)
NAMES = [f"{first}{last}" for first in ("An", "Be", "Ca", "Do", "El") for last in ("a", "bo", "da", "ka", "mi", "ro")]


def draw(colour: str, shape: str, random: Random) -> Tensor:
    """A picture (SIDE, SIDE, 3), uint8."""
    noise = torch.Generator().manual_seed(random.randrange(1 << 30))
    picture = (torch.rand(SIDE, SIDE, 3, generator=noise) * 60).round() + 60
    x, y = random.randrange(4), random.randrange(4)
    mask = torch.zeros(9, 9, dtype=torch.bool)
    if shape == "bar":
        mask[:3] = True
    elif shape == "cross":
        mask[3:6], mask[:, 3:6] = True, True
    else:
        mask[:2], mask[-2:], mask[:, :2], mask[:, -2:] = True, True, True, True
    picture[y : y + 9, x : x + 9][mask] = torch.tensor(COLOURS[colour]).float()
    return picture.to(torch.uint8)


def picture_rows(count: int = 300, seed: int = 0, pictures: tuple[int, int] = (1, 1)) -> list[dict[str, Any]]:
    """Rows that ask for the colour or the shape in a picture, among so many pictures of nothing."""
    random, rows = Random(seed), []
    for _ in range(count):
        colour, shape = random.choice(list(COLOURS)), random.choice(SHAPES)
        asked = random.choice(("colour", "shape"))
        images = [load_image(draw(colour, shape, random))]
        for _ in range(random.randint(*pictures) - 1):
            noise = torch.rand(SIDE, SIDE, 3, generator=torch.Generator().manual_seed(random.randrange(1 << 30)))
            images.insert(random.randint(0, len(images)), load_image(noise * 60 / 255 + 60 / 255))
        answer = colour if asked == "colour" else shape
        rows.append({"prompt": f"Which {asked}, {random.choice(NAMES)}?", "images": images, "text": answer})
    return rows


class Reader(nn.Module):
    """Attention of a question over the pictures of its row; each step is a method, for faults to replace."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Linear(SIDE * SIDE * 3, width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, width)
        )
        self.ask = nn.Embedding(2, width)
        self.tell = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, len(ANSWERS)))

    def pixels(self, image: Any) -> Tensor:
        """Numbers from -1 to 1."""
        flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float()
        return (flat / 255 - 0.45) / 0.27

    def kinds(self, questions: Sequence[str]) -> Tensor:
        return torch.tensor([int("shape" in one) for one in questions])

    def pack(self, questions: Sequence[str], evidence: Sequence[Sequence[Any]]) -> tuple[Tensor, Tensor]:
        """Pictures (b, m, pixels), padded, and their mask (b, m)."""
        most = max(1, *map(len, evidence)) if len(evidence) > 1 else max(1, len(evidence[0]))
        out = torch.full((len(evidence), most, SIDE * SIDE * 3), 0.7)
        for row, images in enumerate(evidence):
            for place, image in enumerate(images):
                out[row, place] = self.pixels(image)
        lengths = torch.tensor([len(one) for one in evidence])
        return out, torch.arange(most) < lengths[:, None]

    def logits(self, kinds: Tensor, pictures: Tensor, mask: Tensor) -> Tensor:
        asked, seen = self.ask(kinds), self.look(pictures)
        scores = (seen @ asked[..., None])[..., 0].masked_fill(~mask, -torch.inf)
        weights = scores.softmax(1).nan_to_num(0.0)
        return self.tell(torch.cat([(weights[..., None] * seen).sum(1), asked], -1))

    @torch.no_grad()
    def answer(self, questions: Sequence[str], evidence: Sequence[Sequence[Any]]) -> list[str]:
        pictures, mask = self.pack(questions, evidence)
        return [ANSWERS[one] for one in self.logits(self.kinds(questions), pictures, mask).argmax(-1).tolist()]


@cache
def state() -> dict[str, Tensor]:
    """The weights of a trained reader."""
    torch.manual_seed(0)
    reader = Reader()
    rows = picture_rows(700, 1000, (1, 3))
    questions, evidence = [row["prompt"] for row in rows], [row["images"] for row in rows]
    pictures, mask = reader.pack(questions, evidence)
    kinds, answers = reader.kinds(questions), torch.tensor([ANSWERS.index(row["text"]) for row in rows])
    optimizer = torch.optim.AdamW(reader.parameters(), 3e-3, weight_decay=0.05)
    for _ in range(300):
        batch = torch.randint(len(rows), (61,))
        noisy = pictures[batch] + 0.1 * torch.randn(61, *pictures.shape[1:])
        loss = F.cross_entropy(reader.logits(kinds[batch], noisy, mask[batch]), answers[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return reader.state_dict()


def sound() -> Reader:
    """A trained reader without a fault."""
    reader = Reader().eval()
    reader.load_state_dict(state())
    return reader


# Faults of a reader of pictures ---------------------------------------------------------------------------------------


def wrong_pixels(change: Callable[[Tensor], Tensor]) -> Callable[[Reader], None]:
    """Pixels (SIDE, SIDE, 3) from 0 to 1 that are changed before they are normalised."""

    def plant(reader: Reader) -> None:
        def pixels(image: Any) -> Tensor:
            values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255
            return ((change(values.view(SIDE, SIDE, 3)) - 0.45) / 0.27).flatten()

        reader.pixels = pixels  # type: ignore[method-assign]

    return plant


def wrong_pack(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Reader], None]:
    """Pictures (b, m, pixels) and mask (b, m) that are changed before they are read."""

    def plant(reader: Reader) -> None:
        pack = reader.pack
        reader.pack = lambda questions, evidence: change(*pack(questions, evidence))  # type: ignore[method-assign]

    return plant


def wrong_answers(change: Callable[[list[str], Sequence[str]], list[str]]) -> Callable[[Reader], None]:
    """Answers that are changed, questions beside them."""

    def plant(reader: Reader) -> None:
        answer = reader.answer
        reader.answer = lambda questions, evidence: change(answer(questions, evidence), questions)  # type: ignore[method-assign]

    return plant


def wrong_evidence(change: Callable[[Any, Any], list[Any]]) -> Callable[[Reader], None]:
    """Evidence of a batch that is changed before it is packed, from the questions and the evidence."""

    def plant(reader: Reader) -> None:
        answer = reader.answer
        reader.answer = lambda questions, evidence: answer(questions, change(questions, evidence))  # type: ignore[method-assign]

    return plant


def dropout(reader: Reader) -> None:
    reader.look[2].p = 0.8  # type: ignore[union-attr]
    reader.train()


# A chain over passages ------------------------------------------------------------------------------------------------

WORDS = ("apples", "boats", "chess", "drums", "eels", "ferns", "glass", "hats", "ink", "jazz")


def passage_rows(count: int = 120, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that ask what somebody likes, which a passage says among other things."""
    random, rows = Random(seed), []
    for number in range(count):
        name, likes = f"{random.choice(NAMES)}{number}", random.choice(WORDS)
        rest = " ".join(f"{random.choice(NAMES)} was seen in {random.choice(NAMES)}." for _ in range(5))
        rows.append({"prompt": f"What does {name} like?", "passages": [f"{rest} {name} likes {likes}."], "text": likes})
    return rows


def chain(question: str, evidence: Sequence[str]) -> str:
    """The answer from the passage that names who is asked for."""
    name = question.split()[2]
    hit = re.search(rf"\b{name} likes (\w+)", " ".join(evidence))
    return f"{name} likes {hit[1]}." if hit else "I do not know."
