"""Check that a model looks at its evidence: the same questions with right, other, blank, moved and no evidence.

Verdicts are exact tests (binomial, McNemar, Fisher) at one error level for all of them together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from mmattn.inspect.answering import Answer
from mmattn.inspect.evidence import ALTERATIONS, Item, blank, contents, is_right, moved
from mmattn.inspect.report import LookingReport
from mmattn.inspect.significance import LEVEL, binomial_tail, fisher, mcnemar, rejected

#: Questions that are asked one by one, at most.
ALONE = 40
#: Share of the answers that must follow the evidence.
LOOKS = 0.25
#: Share of the answers that may differ when the same is asked again.
STEADY = 0.02
#: Below this accuracy pictures are altered, to see whether they are read better then.
GOOD = 0.9
OWN, AGAIN, OTHER, BATCHES = "right evidence", "again", "other evidence", ("in batches", "in other batches")
PLACES = ("first", "in the middle", "last")

Checks = dict[str, tuple[float, str, str]]
"""By name of a check: its p-value, the figures, and what is wrong if it failed."""


class Asker:
    """Ask items with evidence of some kind, and keep the answers in `texts` by the kind."""

    def __init__(self, answer: Answer, items: Sequence[Item], batch_size: int) -> None:
        self.answer, self.items, self.batch_size = answer, items, batch_size
        self.count, self.texts = 0, dict[str, list[str]]()

    def ask(self, kind: str, evidence: Callable[[int], list[object]], numbers: Sequence[int]) -> None:
        """Ask items of these numbers, in batches."""
        texts = self.texts.setdefault(kind, [""] * len(self.items))
        for start in range(0, len(numbers), self.batch_size):
            batch = numbers[start : start + self.batch_size]
            answers = self.answer([self.items[one].question for one in batch], [evidence(one) for one in batch])
            for number, text in zip(batch, answers, strict=True):
                texts[number] = text
        self.count += len(numbers)

    def right(self, kind: str, numbers: Sequence[int] | None = None) -> list[bool]:
        """Return which answers are right, of all items or those of some numbers."""
        numbers = range(len(self.items)) if numbers is None else numbers
        return [is_right(self.items[one].answer, self.texts[kind][one]) for one in numbers]

    def own(self, number: int) -> list[object]:
        """Return the right evidence."""
        return contents(self.items[number].parts)

    def other(self, number: int) -> list[object]:
        """Return the evidence of another row."""
        return contents(self.items[number].other)


def examine(answer: Answer, items: Sequence[Item], batch_size: int) -> LookingReport:
    """Return the report on a function from questions and the evidence of each to answers."""
    begin, n, notes = time.perf_counter(), range(len(items)), dict[str, str]()
    asker, order = Asker(answer, items, batch_size), Random(0).sample(n, len(n))
    checks = _alone(asker, order[:ALONE])
    checks |= _in_batches(asker, order[:ALONE])
    asker.ask(OWN, asker.own, order[ALONE:])
    asker.ask(OTHER, asker.other, order[ALONE:])
    follows, looks = _looks(asker)
    checks = looks | checks
    asker.ask("shuffled", lambda one: asker.own((one + 1) % len(n)), n)
    asker.ask("blank", lambda one: blank(items[one].parts), n)
    try:
        asker.ask("none", lambda one: [], n)
    except Exception as error:
        del asker.texts["none"]
        notes["no evidence"] = f"not possible, {type(error).__name__}: {error}"
    if all(kind == "passages" for item in items for kind, _ in item.parts):
        checks |= _among_passages(asker)
    elif all(len(item.parts) > 1 for item in items):
        checks |= _by_part(asker)
    else:
        notes["position"] = "not checked: give rows with passages, or with two pictures or more each"
    right = asker.right(OWN)
    if sum(right) < GOOD * len(n) and any(kind == "pictures" for item in items for kind, _ in item.parts):
        for name, (change, cause) in ALTERATIONS.items():
            asker.ask(name, lambda one, change=change: contents(items[one].parts, change), n)  # type: ignore[misc]
            altered = asker.right(name)
            checks[f"pictures {name}"] = mcnemar(altered, right), f"{_of(altered)} right, not {_of(right)}", cause
    contrasts = [one for one in n if items[one].other_answer is not None]
    answered = [is_right(str(items[one].other_answer), asker.texts[OTHER][one]) for one in contrasts]
    figures = {OWN: right, "… by looking": follows} | ({"counterfactual": answered} if answered else {})
    figures |= {kind: asker.right(kind) for kind in asker.texts}
    figures = {kind: one for kind, one in figures.items() if kind not in (AGAIN, OTHER)}
    title = f"{len(n)} questions, {asker.count:,} answers in {time.perf_counter() - begin:.0f} s"
    report = LookingReport(
        [], f"{title}; FAIL is an error once in {1 / LEVEL:.0f}", figures, follows, items, asker.texts
    )
    failed = rejected({check: p for check, (p, _, _) in checks.items()})
    for check, (_, figure, fault) in checks.items():
        ok = None if check == "looks" and sum(follows) < LOOKS * len(n) else True
        report.add(*((False, check, f"{figure}: {fault}") if check in failed else (ok, check, figure)))
    report.lines += [(None, check, note) for check, note in notes.items()]
    return report


def _alone(asker: Asker, numbers: Sequence[int]) -> Checks:
    """Ask items one by one, twice with the right evidence and once with other, which is first at every second item."""
    # Right answers to new questions, and after other evidence.
    questions, firsts = set[str](), (list[bool](), list[bool]())
    for turn, number in enumerate(numbers):
        for kind in (OTHER, OWN, AGAIN) if turn % 2 else (OWN, AGAIN, OTHER):
            asker.ask(kind, asker.other if kind == OTHER else asker.own, [number])
        if asker.items[number].question not in questions:
            firsts[turn % 2].append(asker.right(OWN, [number])[0])
        questions.add(asker.items[number].question)
    differ = sum(asker.texts[OWN][one] != asker.texts[AGAIN][one] for one in numbers)
    late = mcnemar(asker.right(AGAIN, numbers), asker.right(OWN, numbers)) < LEVEL
    return {
        "the same call again": (
            binomial_tail(differ, len(numbers), STEADY),
            f"{differ} of {len(numbers)} answers differ",
            "the second is right, a call gets the evidence of the one before" if late else "sampling, dropout, a race",
        ),
        "earlier calls": (
            fisher(*firsts),
            f"asked first {_of(firsts[0])} right, asked after other evidence {_of(firsts[1])}",
            "something of an earlier call is kept, such as a cache by the question",
        ),
    }


def _looks(asker: Asker) -> tuple[list[bool], Checks]:
    """Return which answers follow the evidence: right, and with other evidence what follows from that."""
    follows = [
        ok and (not is_right(item.answer, text) if item.other_answer is None else is_right(item.other_answer, text))
        for item, text, ok in zip(asker.items, asker.texts[OTHER], asker.right(OWN), strict=True)
    ]
    p = 1 - binomial_tail(sum(follows) + 1, len(follows), LOOKS)
    return follows, {"looks": (p, f"{_of(follows)} answers follow the evidence", _why_not(asker))}


def _in_batches(asker: Asker, numbers: Sequence[int]) -> Checks:
    """Ask in batches, twice in other company; go on one by one if those of these numbers are answered otherwise."""
    n = len(asker.items)
    order = Random(1).sample(range(n), n)
    asker.ask(BATCHES[0], asker.own, order)
    asker.ask(BATCHES[1], asker.own, order[::2] + order[1::2])
    single, twice = (
        [a and b for a, b in zip(*(asker.right(kind, numbers) for kind in kinds), strict=True)]
        for kinds in ((OWN, AGAIN), BATCHES)
    )
    p = mcnemar(single, twice)
    asker.batch_size = 1 if p < LEVEL else asker.batch_size
    fault = f"rows or requests are mixed, or padding is read (after {asker.count} answers)"
    return {"batches": (p, f"twice right alone {_of(single)}, in two batches {_of(twice)}", fault)}


def _among_passages(asker: Asker) -> Checks:
    """Ask with the passages first, in the middle and last among those of other items."""
    for place in PLACES:
        asker.ask(place, lambda one, place=place: moved(place, one, asker.items), range(len(asker.items)))  # type: ignore[misc]
    right = {place: asker.right(place) for place in PLACES}
    figure = ", ".join(f"{place} {_of(one)}" for place, one in right.items())
    # Twice, as each is compared with two.
    p = {place: 2 * min(mcnemar(one, right[place]) for one in right.values()) for place in PLACES}
    return {
        f"position: {place}": (p[place], figure, f"what stands {place} is not read, or cut off") for place in PLACES
    }


def _by_part(asker: Asker) -> Checks:
    """Compare items whose first part alone tells the answer with those whose last part does."""
    n = range(len(asker.items))
    asker.ask("first part alone", lambda one: asker.own(one)[:1], n)
    asker.ask("last part alone", lambda one: asker.own(one)[-1:], n)
    ends = list(zip(*map(asker.right, (OWN, "first part alone", "last part alone")), strict=True))
    by_first, by_last = ([right for right, *end in ends if end == only] for only in ([True, False], [False, True]))
    figure = f"told by the first part {_of(by_first)} right, by the last {_of(by_last)}"
    return {
        "position: first": (fisher(by_last, by_first), figure, "what stands first is not read"),
        "position: last": (fisher(by_first, by_last), figure, "what stands last is not read, or cut off"),
    }


def _why_not(asker: Asker) -> str:
    """Return in words how answers fail to follow the evidence."""
    answers, others, right = asker.texts[OWN], asker.texts[OTHER], asker.right(OWN)
    n, (text, most) = len(answers), Counter(answers).most_common(1)[0]
    changed = sum(a != b for a, b in zip(answers, others, strict=True))
    if most >= 0.95 * n:
        return f"{most} are {text.strip()!r}, whatever is asked; see the loss, the labels, the prompt"
    if changed > 0.25 * n:
        return (
            f"other evidence changes {changed}, {_of(right)} are right; it is garbled or another's: see preprocessing"
        )
    if sum(right) >= 0.5 * n:
        return f"other evidence changes {changed}, {_of(right)} are right; the question tells the answer"
    return f"other evidence changes {changed}; it does not arrive: see image tokens, masks, gates and caches"


def _of(right: Sequence[bool]) -> str:
    return f"{sum(right)} of {len(right)}"
