"""Tiny models that answer questions from pictures or passages, sound ones and one for each of many faults."""

from __future__ import annotations

import hashlib
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
def state(seed: int = 0, steps: int = 300) -> dict[str, Tensor]:
    """The weights of a reader that was trained for so many steps."""
    torch.manual_seed(seed)
    reader = Reader()
    rows = picture_rows(700, seed + 1000, (1, 3))
    questions, evidence = [row["prompt"] for row in rows], [row["images"] for row in rows]
    pictures, mask = reader.pack(questions, evidence)
    kinds, answers = reader.kinds(questions), torch.tensor([ANSWERS.index(row["text"]) for row in rows])
    optimizer = torch.optim.AdamW(reader.parameters(), 3e-3, weight_decay=0.05)
    for _ in range(steps):
        batch = torch.randint(len(rows), (61,))
        noisy = pictures[batch] + 0.1 * torch.randn(61, *pictures.shape[1:])
        loss = F.cross_entropy(reader.logits(kinds[batch], noisy, mask[batch]), answers[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return reader.state_dict()


def sound(seed: int = 0, steps: int = 300) -> Reader:
    """A trained reader without a fault."""
    reader = Reader().eval()
    reader.load_state_dict(state(seed, steps))
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


def shortcut(reader: Reader) -> None:
    """Learned from the questions, which tell the answer in the data of this model."""
    reader.answer = lambda questions, evidence: [guess(one) for one in questions]  # type: ignore[method-assign]


def guess(question: str) -> str:
    """The answer that a question has at most of its rows in `guessable_rows`."""
    options = SHAPES if "shape" in question else tuple(COLOURS)
    return options[int(hashlib.sha256(question.encode()).hexdigest(), 16) % len(options)]


def guessable_rows() -> list[dict[str, Any]]:
    """Rows of which four in five have the usual answer to their question."""
    rows = picture_rows(900, 5)
    return [row for row in rows if row["text"] == guess(row["prompt"]) or len(row["prompt"]) % 5 == 0] + rows[:40]


def kept_by_question() -> Callable[[Any, Any], list[Any]]:
    kept: dict[str, Any] = {}
    return lambda questions, evidence: [
        kept.setdefault(one, what) for one, what in zip(questions, evidence, strict=True)
    ]


def kept_by_row() -> Callable[[Any, Any], list[Any]]:
    kept: dict[int, Any] = {}
    return lambda questions, evidence: [kept.setdefault(row, what) for row, what in enumerate(evidence)]


def one_call_late() -> Callable[[Any, Any], list[Any]]:
    last: list[Any] = []

    def change(questions: Any, evidence: Any) -> list[Any]:
        late = list(evidence) if not last else [last[-1], *evidence[:-1]]
        last.append(evidence[-1])
        return late

    return change


def sometimes_lost() -> Callable[[Any, Any], list[Any]]:
    random = Random(0)
    return lambda questions, evidence: [[] if random.random() < 0.4 else one for one in evidence]


def dropout(reader: Reader) -> None:
    reader.look[2].p = 0.8  # type: ignore[union-attr]
    reader.train()


FAULTS: dict[str, tuple[Any, str, str]] = {
    # name: (how to plant it, rows, words that the report must have in a FAIL line)
    "ignored pictures": (wrong_pack(lambda x, mask: (x * 0, mask)), "one", "does not arrive"),
    "mask all false": (wrong_pack(lambda x, mask: (x, mask & False)), "one", "does not arrive"),
    "mask inverted": (wrong_pack(lambda x, mask: (x, ~mask)), "mixed", "does not arrive"),
    "text-only shortcut": (shortcut, "guessable", "the question tells"),
    "constant answers": (wrong_answers(lambda texts, _: ["red"] * len(texts)), "one", "whatever is asked"),
    "not rescaled": (wrong_pixels(lambda x: x * 255), "one", "garbled"),
    "not normalised": (wrong_pixels(lambda x: x * 0.27 + 0.45), "one", "normalisation"),
    "channels in another order": (wrong_pixels(lambda x: x.flip(-1)), "one", "channels"),
    "negative": (wrong_pixels(lambda x: 1 - x), "one", "inverted"),
    "channels first": (wrong_pixels(lambda x: x.permute(2, 0, 1)), "one", "garbled"),
    "upside down": (wrong_pixels(lambda x: x.flip(0)), "one", "reverse"),
    "batch rows swapped": (
        wrong_pack(lambda x, mask: (x.roll(1, 0), mask.roll(1, 0))),
        "one",
        "rows or requests are mixed",
    ),
    "batch in reverse": (wrong_answers(lambda texts, _: texts[::-1]), "one", "rows or requests are mixed"),
    "the first row for all": (
        wrong_pack(lambda x, m: (x[:1].expand_as(x), m[:1].expand_as(m))),
        "one",
        "rows or requests are mixed",
    ),
    "sorted and not put back": (wrong_answers(lambda texts, _: sorted(texts)), "one", "mixed"),
    "padding is read": (wrong_pack(lambda x, mask: (x, mask | True)), "mixed", "padding"),
    "mean of the batch": (wrong_pack(lambda x, mask: (x.mean(0, keepdim=True).expand_as(x), mask)), "one", "mixed"),
    "cache by the question": (lambda r: wrong_evidence(kept_by_question())(r), "one", "earlier call"),
    "the first picture kept": (lambda r: wrong_evidence(kept_by_row())(r), "one", "does not arrive"),
    "another request's picture": (lambda r: wrong_evidence(one_call_late())(r), "one", "the one before"),
    "sometimes lost": (lambda r: wrong_evidence(sometimes_lost())(r), "one", "a race"),
    "dropout": (dropout, "one", "dropout"),
    "only the first picture": (wrong_pack(lambda x, mask: (x[:, :1], mask[:, :1])), "several", "stands last"),
    "only the last picture": (
        lambda r: wrong_evidence(lambda _, e: [one[-1:] for one in e])(r),
        "several",
        "stands first",
    ),
}


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


def stale_chain() -> Callable[[str, Any], str]:
    kept: dict[str, str] = {}
    return lambda question, evidence: kept.setdefault(question, chain(question, evidence))


def learned_chain() -> Callable[[str, Any], str]:
    """Knows the answers by heart."""
    known = {row["prompt"]: row["text"] for row in passage_rows()}
    return lambda question, evidence: known[question]


CHAINS: dict[str, tuple[Any, str]] = {
    "evidence truncated": (lambda: lambda q, e: chain(q, [" ".join(e)[:400]]), "stands last"),
    "only the last passage": (lambda: lambda q, e: chain(q, e[-1:]), "stands first"),
    "the middle is lost": (lambda: lambda q, e: chain(q, e[:1] + e[-1:]), "stands in the middle"),
    "passages ignored": (lambda: lambda q, e: chain(q, []), "whatever is asked"),
    "learned by heart": (learned_chain, "the question tells"),
    "stale cache": (stale_chain, "earlier call"),
}


def weak_chain(share: float, seed: int) -> Callable[[str, Any], str]:
    """A chain that fails at some questions and evidence, always at the same ones."""

    def answer(question: str, evidence: Any) -> str:
        text = f"{seed} {question} {' '.join(evidence)}"
        luck = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8
        return chain(question, evidence) if luck < share else "I do not know."

    return answer
