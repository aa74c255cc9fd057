"""Faults as a stranger would plant them in readers, chains and servers, and sound models of many accuracies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from random import Random
from typing import Any, NamedTuple

import torch

from mmattn.encoders import load_image
from mmattn.inspect.doctor.questions import COLOURS
from tests.inspect.doctor import servers, tiny_readers
from tests.inspect.doctor.tiny_readers import (
    NAMES,
    chain,
    dropout,
    passage_rows,
    picture_rows,
    sound,
    wrong_evidence,
    wrong_pack,
    wrong_pixels,
)

Questions, Evidence = Sequence[str], Sequence[Sequence[Any]]
Many = Callable[[Questions, Evidence], list[str]]
"""From questions and the evidence of each to answers."""


class Subject(NamedTuple):
    """What `doctor` is given: a function or an address, rows, and further arguments."""

    model: Any
    rows: list[dict[str, Any]]
    options: dict[str, Any]


def many(model: Any, rows: list[dict[str, Any]], **options: Any) -> Subject:
    return Subject(model, rows, {"batched": True} | options)


def single(model: Any, rows: list[dict[str, Any]], **options: Any) -> Subject:
    return Subject(model, rows, options)


# Cards: a colour and a number -----------------------------------------------------------------------------------------

PIXELS = {
    "red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0), "black": (0, 0, 0),
    "white": (255, 255, 255), "orange": (255, 165, 0), "purple": (128, 0, 128),
}  # fmt: skip
assert tuple(PIXELS) == COLOURS


def card_rows(count: int = 200, seed: int = 0, kinds: str = "cny", yes: float = 0.5, named: bool = False) -> list[Any]:
    """Rows that ask for the colour (c) or the number (n) of a card, or if it has a colour (y)."""
    random, rows = Random(seed), []
    for number in range(count):
        colour, size, kind = random.choice(COLOURS), random.randint(1, 9), random.choice(kinds)
        other = random.choice([one for one in COLOURS if one != colour])
        said = colour if random.random() < yes else other
        question, text = {
            "c": (f"What colour has card {number}?", colour),
            "n": (f"How many points has card {number}?", str(size)),
            "y": (f"Is this card {said}?", "yes" if said == colour else "no"),
        }[kind]
        pixels = torch.tensor(PIXELS[colour], dtype=torch.uint8).expand(8 + size, 8 + size, 3).clone()
        row = {"prompt": question, "image": load_image(pixels), "text": text}
        rows.append(row | ({"metadata": {"kind": kind}} if named else {}))
    return rows


def read_card(question: str, evidence: Sequence[Any]) -> str:
    """The answer from the picture; without one what is usual."""
    picture = evidence[0] if evidence else load_image(torch.full((8, 8, 3), 127, dtype=torch.uint8))
    pixel = picture.getpixel((0, 0))
    colour = min(PIXELS, key=lambda name: sum((a - b) ** 2 for a, b in zip(PIXELS[name], pixel, strict=True)))
    if question.startswith("How many"):
        return str(max(1, picture.width - 8))
    if question.startswith("Is"):
        return "yes" if colour in question else "no"
    return colour


def read_cards(questions: Questions, evidence: Evidence) -> list[str]:
    return [read_card(*one) for one in zip(questions, evidence, strict=True)]


def evidence_changed(change: Callable[[list[Any]], list[Any]], model: Many = read_cards) -> Many:
    """A model that is given the evidence of a batch changed."""
    return lambda questions, evidence: model(questions, change(list(evidence)))


def per_request(change: Callable[[str, Sequence[Any]], Sequence[Any]], model: Many = read_cards) -> Many:
    """A model that is given the evidence of each question changed."""
    return lambda questions, evidence: model(questions, [change(*one) for one in zip(questions, evidence, strict=True)])


def luck(*words: object) -> float:
    """A number from 0 to 1 that depends on the words alone."""
    return int(hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest()[:8], 16) / 16**8


def seen(evidence: Sequence[Any]) -> str:
    return " ".join(one if isinstance(one, str) else hashlib.sha256(one.tobytes()).hexdigest() for one in evidence)


def weak(model: Many, share: float, seed: int = 0, wrong: Sequence[str] = ("I do not know.",)) -> Many:
    """A model that fails at a share of questions and evidence, always at the same ones, with one of some answers."""

    def answer(questions: Questions, evidence: Evidence) -> list[str]:
        texts = model(questions, evidence)
        for place, (question, what) in enumerate(zip(questions, evidence, strict=True)):
            others = [one for one in wrong if one != texts[place]] or [texts[place]]
            if luck(seed, question, seen(what)) >= share:
                texts[place] = others[int(luck("which", seed, question, seen(what)) * len(others))]
        return texts

    return answer


def verbose(model: Many) -> Many:
    return lambda questions, evidence: [
        f"Well, as far as I can tell: {text.capitalize()}. Ask me more!" for text in model(questions, evidence)
    ]


def listed(model: Callable[[str, Any], str]) -> Many:
    return lambda questions, evidence: [model(*one) for one in zip(questions, evidence, strict=True)]


def odd_last(evidence: list[Any]) -> list[Any]:
    return [*evidence[:-1], evidence[0]] if len(evidence) % 2 else evidence


def last_first(evidence: list[Any]) -> list[Any]:
    return [*evidence[:-1], evidence[0]]


def odd_places(evidence: list[Any]) -> list[Any]:
    return [evidence[place - place % 2] for place in range(len(evidence))]


def micro_batches(questions: Questions, evidence: Evidence) -> list[str]:
    """Rows after the fourth are read with the evidence of the first four."""
    return read_cards(questions, [evidence[place % 4] for place in range(len(evidence))])


def unsorted(questions: Questions, evidence: Evidence) -> list[str]:
    """Sorted by length, and not put back."""
    order = sorted(range(len(questions)), key=lambda one: len(questions[one]))
    return read_cards([questions[one] for one in order], [evidence[one] for one in order])


def padded_left(questions: Questions, evidence: Evidence) -> list[str]:
    """Questions that are shorter than the longest of the batch lose their picture."""
    longest = max(map(len, questions))
    return read_cards(questions, [e if len(q) == longest else [] for q, e in zip(questions, evidence, strict=True)])


def dropped(share: float) -> Many:
    random = Random(1)
    return per_request(lambda _, what: [] if random.random() < share else what)


def every(nth: int) -> Many:
    requests = count(1)
    return per_request(lambda _, what: [] if next(requests) % nth == 0 else what)


def cached_by_question() -> Many:
    kept: dict[str, Any] = {}
    return per_request(lambda question, what: kept.setdefault(question, what))


def cached_by_picture() -> Many:
    kept: dict[str, str] = {}
    return listed(lambda question, what: kept.setdefault(seen(what), read_card(question, what)))


def first_for_all() -> Many:
    kept: list[Any] = []
    return per_request(lambda _, what: (kept.append(what), kept[0])[1])


def last_of_the_question() -> Many:
    """Without evidence, the last evidence of the same question."""
    kept: dict[str, Any] = {}

    def change(question: str, what: Sequence[Any]) -> Sequence[Any]:
        if what:
            kept[question] = what
        return what or kept.get(question, [])

    return per_request(change)


def last_of_all() -> Many:
    """Without evidence, the last evidence of any request."""
    kept: list[Any] = [[]]

    def change(_: str, what: Sequence[Any]) -> Sequence[Any]:
        kept[0] = what or kept[0]
        return kept[0]

    return per_request(change)


def one_late(start: Any = ()) -> Callable[[str, Any], Any]:
    kept = [list(start)]

    def change(_: str, what: Any) -> Any:
        kept.append(what)
        return kept[-2]

    return change


def once_only() -> Many:
    """A request that came before is answered without its picture."""
    done: set[tuple[str, str]] = set()

    def change(question: str, what: Sequence[Any]) -> Sequence[Any]:
        again = (question, seen(what)) in done
        done.add((question, seen(what)))
        return [] if again else what

    return per_request(change)


def noisy(share: float, text: str | None = None) -> Many:
    random = Random(2)

    def answer(questions: Questions, evidence: Evidence) -> list[str]:
        return [
            (random.choice(COLOURS) if text is None else text) if random.random() < share else right
            for right in read_cards(questions, evidence)
        ]

    return answer


def kind_ignored(start: str, text: Callable[[str], str]) -> Many:
    return listed(lambda question, what: text(question) if question.startswith(start) else read_card(question, what))


def prior(question: str) -> str:
    """A colour, always the same for a question."""
    return COLOURS[int(luck("prior", question) * len(COLOURS))]


def swapped(picture: Any) -> Any:
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return load_image(pixels.view(picture.height, picture.width, 3).flip(-1))


def planted(plant: Callable[[Any], None], rows: list[Any], **options: Any) -> Subject:
    """The trained reader with a fault."""
    reader = sound()
    plant(reader)
    return many(reader.answer, rows, **options)


def shrunk(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.mean((0, 1), keepdim=True).expand_as(pixels)


def corner(pixels: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(tiny_readers.SIDE)[:, None, None] < 3, pixels, torch.full_like(pixels, 0.35))


def half(pixels: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(tiny_readers.SIDE)[None, :, None] < 6, torch.full_like(pixels, 0.35), pixels)


# Chains ---------------------------------------------------------------------------------------------------------------

CHINESE = ("红色", "蓝色", "绿色", "黄色", "黑色", "白色")
KOREAN = ("빨간색", "파란색", "초록색", "노란색", "검은색")


def chinese_rows(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    random = Random(seed)
    rows = []
    for number in range(count):
        colour = random.choice(CHINESE)
        passage = f"第{number}个人的车是{colour}的。"
        rows.append({"prompt": f"第{number}个人的车是什么颜色？", "passages": [passage], "text": colour})
    return rows


def chinese_chain(question: str, evidence: Sequence[str]) -> str:
    start = question.split("个")[0] + "个"
    said = next((colour for text in evidence if start in text for colour in CHINESE if colour in text), None)
    return f"他的车是{said}的。" if said else "不知道。"


def korean_rows(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    random, rows = Random(seed), []
    for number in range(count):
        colour = random.choice(KOREAN)
        passage = f"{number}번 자동차는 {colour}입니다."
        rows.append({"prompt": f"{number}번 자동차는 무슨 색입니까?", "passages": [passage], "text": colour})
    return rows


def korean_chain(question: str, evidence: Sequence[str]) -> str:
    start = question.split("번")[0] + "번"
    hits = [text for text in evidence if text.startswith(start)]
    return hits[0].split(" ")[-1] if hits else "모르겠습니다."


def number_rows(count: int = 80, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that ask for a number from 1 to 40."""
    random, rows = Random(seed), []
    for number in range(count):
        name, boats = f"{random.choice(NAMES)}{number}", random.randint(1, 40)
        passage = f"{name} has {boats} boats. {random.choice(NAMES)} sold it."
        rows.append({"prompt": f"How many boats has {name} ?", "passages": [passage], "text": str(boats)})
    return rows


def number_chain(question: str, evidence: Sequence[str]) -> str:
    hit = re.search(rf"\b{question.split()[4]} has (\d+) boats", " ".join(evidence))
    return f"{hit[1]} boats." if hit else "I do not know."


def session() -> Callable[[str, Any], str]:
    kept: list[str] = []

    def answer(question: str, evidence: Sequence[str]) -> str:
        kept.extend(evidence)
        return chain(question, kept[-400:])

    return answer


def leaked() -> Subject:
    rows = passage_rows(64)
    for row in rows:
        row["prompt"] += f" (as in {row['text']})"
    return single(lambda question, evidence: question.split("as in ")[1], rows)


def previous_passages() -> Callable[[str, Any], str]:
    late = one_late()
    return lambda question, evidence: chain(question, late(question, evidence))


@contextmanager
def mixing_server() -> Iterator[Subject]:
    with servers.serving(mixed=True) as url:
        yield Subject(url, card_rows(80, 0, "c"), {"max_questions": 40})


WRONG_COLOURS = (*COLOURS, "I do not know.")

FAULTS: dict[str, Callable[[], Subject | AbstractContextManager[Subject]]] = {
    # Pictures that do not arrive.
    "grey pictures": lambda: many(per_request(lambda q, e: []), card_rows()),
    "grey pictures, 24 questions": lambda: many(per_request(lambda q, e: []), card_rows(24, 3)),
    "the first picture for all": lambda: many(first_for_all(), card_rows()),
    "answers from the question alone": lambda: many(listed(lambda q, e: prior(q)), card_rows(200, 0, "c")),
    "answers from the question, half wrong": lambda: many(
        weak(listed(lambda q, e: read_card(q, [])), 0.6), card_rows(200, 1, "y")
    ),
    "always yes, of 80 % yes": lambda: many(listed(lambda q, e: "yes"), card_rows(200, 0, "y", 0.8)),
    "the answer is in the question": leaked,
    "pictures shrunk to a pixel": lambda: planted(wrong_pixels(shrunk), picture_rows(300, 7)),
    "pictures cropped to a strip": lambda: planted(wrong_pixels(corner), picture_rows(300, 7)),
    "one half of the picture lost": lambda: planted(wrong_pixels(half), picture_rows(300, 7)),
    "a fifth of the questions ignores the picture": lambda: many(
        listed(lambda q, e: "red" if luck(q) < 0.2 else read_card(q, e)), card_rows(200, 0, "c")
    ),
    # Pictures that are read wrongly.
    "red and blue": lambda: many(per_request(lambda q, e: [swapped(one) for one in e]), card_rows(200, 0, "c")),
    "upside down": lambda: planted(wrong_pixels(lambda x: x.flip(0)), picture_rows(300, 8)),
    "mirrored": lambda: planted(wrong_pixels(lambda x: x.flip(1)), picture_rows(300, 8)),
    "on its side": lambda: planted(wrong_pixels(lambda x: x.transpose(0, 1)), picture_rows(300, 8)),
    "normalised twice": lambda: planted(wrong_pixels(lambda x: (x - 0.45) / 0.27), picture_rows(300, 8)),
    "not divided by 255": lambda: planted(wrong_pixels(lambda x: x * 255), picture_rows(300, 8)),
    "read from below": lambda: planted(wrong_pixels(lambda x: x.flip(0)), picture_rows(300, 5), max_questions=160),
    "negative": lambda: planted(wrong_pixels(lambda x: 1 - x), picture_rows(300, 5)),
    "not normalised": lambda: planted(wrong_pixels(lambda x: x * 0.27 + 0.45), picture_rows(300, 5), max_questions=160),
    # Kinds of questions.
    "every number is 2": lambda: many(kind_ignored("How", lambda q: "2"), card_rows()),
    "every number is 2, named kinds": lambda: many(kind_ignored("How", lambda q: "2"), card_rows(named=True)),
    "every yes or no is yes": lambda: many(kind_ignored("Is", lambda q: "yes"), card_rows()),
    "colours are told by the question": lambda: many(kind_ignored("What", prior), card_rows()),
    "colours are told by the question, named kinds": lambda: many(kind_ignored("What", prior), card_rows(named=True)),
    "every shape is a bar": lambda: planted(
        tiny_readers.wrong_answers(lambda texts, q: ["bar" if "shape" in b else a for a, b in zip(texts, q)]),  # noqa: B905
        picture_rows(300, 5),
    ),
    # Rows of a batch.
    "a batch in reverse": lambda: many(evidence_changed(lambda e: e[::-1]), card_rows()),
    "a batch in reverse, 20 questions": lambda: many(evidence_changed(lambda e: e[::-1]), card_rows(20, 2, "c")),
    "a batch in reverse, accuracy 0.6": lambda: many(
        evidence_changed(lambda e: e[::-1], weak(read_cards, 0.6)), card_rows()
    ),
    "rotated by one": lambda: many(evidence_changed(lambda e: e[-1:] + e[:-1]), card_rows(200, 0, "y")),
    "the last row": lambda: many(evidence_changed(last_first), card_rows()),
    "every second row": lambda: many(evidence_changed(odd_places), card_rows()),
    "batches of odd sizes": lambda: many(evidence_changed(lambda e: e[::-1] if len(e) % 2 else e), card_rows()),
    "the last row of batches of odd sizes": lambda: many(evidence_changed(odd_last), card_rows(200, 0, "cn")),
    "batches of even sizes": lambda: many(evidence_changed(lambda e: e if len(e) % 2 else e[::-1]), card_rows()),
    "more than four rows": lambda: many(micro_batches, card_rows()),
    "sorted and not put back": lambda: many(unsorted, card_rows()),
    "padded at the wrong side": lambda: many(padded_left, card_rows()),
    "padding is read": lambda: planted(wrong_pack(lambda x, mask: (x, mask | True)), picture_rows(300, 5, (1, 3))),
    "lost in batches": lambda: many(evidence_changed(lambda e: [[]] * len(e) if len(e) > 1 else e), card_rows()),
    "lost alone": lambda: many(evidence_changed(lambda e: [[]] * len(e) if len(e) == 1 else e), card_rows()),
    # Earlier requests.
    "cached by the question": lambda: many(cached_by_question(), card_rows()),
    "cached by the picture": lambda: many(cached_by_picture(), card_rows(40, 0, "cn") + card_rows(40, 0, "y")),
    "last evidence of the question": lambda: many(last_of_the_question(), card_rows()),
    "last evidence of any request": lambda: many(last_of_all(), card_rows()),
    "a session": lambda: single(session(), passage_rows()),
    "one request late": lambda: many(per_request(one_late()), card_rows()),
    "lost the second time": lambda: many(once_only(), card_rows()),
    # Some requests.
    "a tenth of the requests loses its picture": lambda: many(dropped(0.1), card_rows()),
    "a fifth of the requests loses its picture": lambda: many(dropped(0.2), card_rows()),
    "a third of the requests loses its picture": lambda: many(dropped(0.3), card_rows()),
    "every fourth request loses its picture": lambda: many(every(4), card_rows()),
    "every tenth request loses its picture": lambda: many(every(10), card_rows()),
    "a seventh of the answers is noise": lambda: many(noisy(0.15), card_rows(200, 0, "c")),
    "a seventh of the answers is empty": lambda: many(noisy(0.15, ""), card_rows()),
    "dropout": lambda: planted(dropout, picture_rows(300, 5)),
    "requests of a server share a picture": mixing_server,
    # Chains.
    "300 characters": lambda: single(lambda q, e: chain(q, [" ".join(e)[:300]]), passage_rows()),
    "two passages": lambda: single(lambda q, e: chain(q, e[:2]), passage_rows()),
    "four passages": lambda: single(lambda q, e: chain(q, e[:4]), passage_rows()),
    "six passages": lambda: single(lambda q, e: chain(q, e[:6]), passage_rows()),
    "all but the last passage": lambda: single(lambda q, e: chain(q, e[:-1] if len(e) > 1 else e), passage_rows()),
    "all but the first passage": lambda: single(lambda q, e: chain(q, e[1:] if len(e) > 1 else e), passage_rows()),
    "off by one": lambda: single(lambda q, e: chain(q, e[1:2]), passage_rows()),
    "passages of the previous question": lambda: single(previous_passages(), passage_rows()),
    "the first passage, accuracy 0.5": lambda: many(weak(listed(lambda q, e: chain(q, e[:1])), 0.5, 3), passage_rows()),
    "the first passage, in Chinese": lambda: single(lambda q, e: chinese_chain(q, e[:1]), chinese_rows()),
    "numbers with a half": lambda: single(lambda q, e: number_chain(q, e).replace(" boats", ".5"), number_rows()),
    "the last of several pictures": lambda: planted(
        wrong_evidence(lambda _, e: [one[-1:] for one in e]), picture_rows(300, 9, (1, 3))
    ),
    "two of three pictures": lambda: planted(
        wrong_evidence(lambda _, e: [one[:2] for one in e]), picture_rows(300, 9, (3, 3))
    ),
}
"""By name of a fault: the subject, or a context in which there is one."""

ACCURACIES = (0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
SOUND: dict[str, Callable[[float, int], Subject]] = {
    "cards": lambda share, seed: many(weak(read_cards, share, seed), card_rows(200, seed)),
    "cards with wrong colours, verbose": lambda share, seed: many(
        verbose(weak(read_cards, share, seed, WRONG_COLOURS)), card_rows(200, seed, "c"), batch_size=5
    ),
    "cards of 80 % yes, 31 questions": lambda share, seed: many(
        weak(read_cards, share, seed), card_rows(200, seed, "ny", 0.8, named=True), max_questions=31
    ),
    "chain": lambda share, seed: many(weak(listed(chain), share, seed), passage_rows(120, seed)),
    "chain in Chinese or Korean": lambda share, seed: (
        many(weak(listed(chinese_chain), share, seed, ("不知道。",)), chinese_rows(60, seed))
        if seed % 2
        else many(weak(listed(korean_chain), share, seed, ("모르겠습니다.",)), korean_rows(60, seed))
    ),
    "numbers, 20 questions": lambda share, seed: many(
        weak(listed(number_chain), share, seed, ("7 boats.", "13 boats.", "I do not know.")), number_rows(80, seed),
        max_questions=20,
    ),
}  # fmt: skip
"""By kind of a sound model: the subject of an accuracy and a seed."""


def subject(made: Subject | AbstractContextManager[Subject]) -> AbstractContextManager[Subject]:
    return made if isinstance(made, AbstractContextManager) else nullcontext(made)
