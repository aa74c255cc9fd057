"""Check that a model looks at its evidence: the same questions with right, different, blank, moved and no evidence.

Verdicts are exact tests (binomial, McNemar, Fisher) at one error level for all of them together.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from numbers import Number
from random import Random

from mmattn.errors import ConfigError
from mmattn.inspect.doctor.questions import ALTERATIONS, Answer, Item, blank, contents, is_right, moved
from mmattn.inspect.doctor.report import DIFFERENT, LEVEL, RIGHT, Report, binomial_tail, fisher, mcnemar, rejected

#: Questions that are asked one by one, at most.
MAX_ALONE = 64
#: Share of the answers that must change with the evidence.
MIN_SHARE_CHANGED = 0.25
#: Share of the answers that may differ when the same question is asked again.
MAX_SHARE_UNSTABLE = 0.02
#: Share of the answers of a kind that may stay whatever the evidence, and questions that a kind needs.
MAX_SHARE_CONSTANT, MIN_KIND = 0.5, 8
#: Sizes of small batches, in turn: odd and even, and many rows are the last.
SMALL_BATCHES = (3, 2)
#: Below this accuracy pictures are altered, to see whether they are read better then.
MIN_ACCURACY = 0.9
AGAIN, SHUFFLED, NONE = "again", "shuffled", "none"
BATCHES = "in batches", "in small batches"
PLACES = ("first", "in the middle", "last")
PARTS = "first part alone", "last part alone"

Checks = dict[str, tuple[float, str, str]]
"""By name of a check: its p-value, the figures, and what is wrong if it failed."""


class Asker:
    """Ask items with evidence of some kind, and keep the answers in `texts` by the kind."""

    def __init__(self, answer: Answer, items: Sequence[Item], batch_size: int, advance: Callable[[int], None]) -> None:
        self.answer, self.items, self.batch_size, self.advance = answer, items, batch_size, advance
        self.count, self.texts, self.refusal = 0, dict[str, list[str]](), ""
        self.words = {item.answer for item in items}

    def ask(
        self,
        kind: str,
        evidence: Callable[[int], list[object]],
        numbers: Sequence[int],
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Ask items of these numbers, in batches whose sizes take turns."""
        texts = self.texts.setdefault(kind, [""] * len(self.items))
        start, turns = 0, cycle(sizes or [self.batch_size])
        while batch := numbers[start : start + min(next(turns), self.batch_size)]:
            reply = self.answer([self.items[number].question for number in batch], list(map(evidence, batch)))
            answers = list(reply) if isinstance(reply, Iterable) and not isinstance(reply, (str, Mapping)) else [reply]
            if len(answers) != len(batch) or not all(isinstance(answer, (str, Number)) for answer in answers):
                raise ConfigError(f"{len(batch)} questions need as many texts for answers, got {reply!r:.60}")
            for number, text in zip(batch, answers, strict=True):
                texts[number] = str(text)
            start += len(batch)
            self.advance(len(batch))
        self.count += len(numbers)

    def ask_without(self, numbers: Sequence[int]) -> None:
        """Ask without evidence, unless that was refused before."""
        if not self.refusal:
            try:
                self.ask(NONE, lambda number: [], numbers)
            except Exception as error:
                self.texts.pop(NONE, None)
                self.refusal = f"not possible, {type(error).__name__}: {error}"

    def said(self, kind: str, number: int) -> str:
        """Return which answers of the data an answer has, but for those that the question has."""
        text, question = self.texts[kind][number], self.items[number].question
        return ", ".join(sorted(word for word in self.words if is_right(word, text) and not is_right(word, question)))

    def right(self, kind: str, numbers: Sequence[int] | None = None) -> list[bool]:
        """Return which answers are right, of all items or those of some numbers."""
        numbers = range(len(self.items)) if numbers is None else numbers
        return [is_right(self.items[number].answer, self.texts[kind][number]) for number in numbers]

    def right_evidence(self, number: int) -> list[object]:
        """Return the right evidence."""
        return contents(self.items[number].parts)

    def different_evidence(self, number: int) -> list[object]:
        """Return the evidence of another row."""
        return contents(self.items[number].different_parts)


def examine(answer: Answer, items: Sequence[Item], batch_size: int, advance: Callable[[int], None]) -> Report:
    """Return the report on a function from questions and the evidence of each to answers, which `advance` counts."""
    begin, n, notes = time.perf_counter(), range(len(items)), dict[str, str]()
    asker, order = Asker(answer, items, batch_size, advance), Random(0).sample(n, len(n))
    later = _alone(asker, order)
    later |= _in_batches(asker, order[:MAX_ALONE])
    asker.ask(RIGHT, asker.right_evidence, order[MAX_ALONE:])
    asker.ask(DIFFERENT, asker.different_evidence, order[MAX_ALONE:])
    asker.ask(SHUFFLED, lambda number: asker.right_evidence((number + 1) % len(n)), n)
    asker.ask("blank", lambda number: blank(items[number].parts), n)
    asker.ask_without(order[MAX_ALONE:])
    if asker.refusal:
        notes["no evidence"] = asker.refusal
    follows, checks = _looks(asker)
    kinds, of_kinds = _kinds(asker)
    checks |= of_kinds | later
    if all(kind == "passages" for item in items for kind, _ in item.parts):
        checks |= _among_passages(asker)
    elif any(len(item.parts) > 1 for item in items):
        checks |= _by_part(asker, [number for number in n if len(items[number].parts) > 1])
    else:
        notes["position"] = "not checked: give rows with passages, or with two pictures or more each"
    right = asker.right(RIGHT)
    if sum(right) < MIN_ACCURACY * len(n) and any(kind == "pictures" for item in items for kind, _ in item.parts):
        checks |= _altered(asker)
    contrasts = [number for number in n if items[number].different_answer is not None]
    answered = [is_right(str(items[number].different_answer), asker.texts[DIFFERENT][number]) for number in contrasts]
    figures = {RIGHT: right, "… by looking": follows} | ({"counterfactual": answered} if answered else {})
    figures |= {kind: [right[number] for number in numbers] for kind, numbers in kinds.items()}
    whole = [kind for kind in asker.texts if kind not in (AGAIN, DIFFERENT, *PARTS)]
    figures |= {kind: asker.right(kind) for kind in whole}
    title = f"{len(n)} questions, {asker.count:,} answers in {time.perf_counter() - begin:.0f} s; a sound model gets a "
    report = Report([], f"{title}FAIL in at most 1 of {1 / LEVEL:.0f} reports", figures, follows, items, asker.texts)
    failed = rejected({check: p for check, (p, _, _) in checks.items()})
    for check, (_, figure, fault) in checks.items():
        ok = None if check == "looks" and sum(follows) < MIN_SHARE_CHANGED * len(n) else True
        report.add(*((False, check, f"{figure}: {fault}") if check in failed else (ok, check, figure)))
    report.lines += [(None, check, note) for check, note in notes.items()]
    return report


def _alone(asker: Asker, order: Sequence[int]) -> Checks:
    """Ask items one by one, twice with right evidence, once with none and different; every second time these first."""
    # By which is asked first, the right evidence or less: right answers to new questions, and those without it.
    questions, firsts, without = set[str](), (list[bool](), list[bool]()), (list[bool](), list[bool]())
    for turn, number in enumerate(order[:MAX_ALONE]):
        for kind in (NONE, DIFFERENT, RIGHT, AGAIN) if turn % 2 else (RIGHT, AGAIN, NONE, DIFFERENT):
            if kind == NONE:
                asker.ask_without([number])
            else:
                asker.ask(kind, asker.different_evidence if kind == DIFFERENT else asker.right_evidence, [number])
        if asker.items[number].question not in questions:
            firsts[turn % 2].append(asker.right(RIGHT, [number])[0])
        without[turn % 2].append(
            any(asker.right(kind, [number])[0] for kind in (DIFFERENT, NONE) if kind in asker.texts)
        )
        questions.add(asker.items[number].question)
    numbers, half = order[:MAX_ALONE], min(len(order), MAX_ALONE) // 2
    differ = sum(asker.said(RIGHT, number) != asker.said(AGAIN, number) for number in numbers)
    late = mcnemar(asker.right(AGAIN, numbers), asker.right(RIGHT, numbers)) < LEVEL
    halves = asker.right(RIGHT, numbers[:half]), asker.right(RIGHT, numbers[half:])
    pairs = {
        "right before different evidence {}, after it {}": firsts,
        "without the right evidence, after it {}, before it {}": without,
        "at the beginning {}, later {}": halves,
    }
    pairs = {words: answers for words, answers in pairs.items() if all(answers)}  # some have no question of one kind
    return {
        "the same call again": (
            binomial_tail(differ, len(numbers), MAX_SHARE_UNSTABLE),
            f"{differ} of {len(numbers)} answers differ",
            "the second is right, a call gets the evidence of the one before" if late else "sampling, dropout, a race",
        ),
        "earlier calls": (
            min([1.0, *(len(pairs) * fisher(*answers) for answers in pairs.values())]),
            "; ".join(words.format(*map(_of, answers)) for words, answers in pairs.items()) or "one question alone",
            "something of an earlier call is kept, such as its evidence or a cache by the question",
        ),
    }


def _looks(asker: Asker) -> tuple[list[bool], Checks]:
    """Return which answers follow the evidence: right, and with different evidence what follows from that.

    Too few are right and change with different evidence, or too few counterfactuals are answered rightly both times, of
    those that are answered at all: with an answer of the data, and not "I do not know".
    """
    changes, follows, decided = [], [], []
    for number, (item, text, right) in enumerate(
        zip(asker.items, asker.texts[DIFFERENT], asker.right(RIGHT), strict=True)
    ):
        changes.append(right and not is_right(item.answer, text))
        target = item.different_answer
        follows.append(changes[-1] if target is None else right and is_right(target, text))
        if target is not None and asker.said(RIGHT, number) and asker.said(DIFFERENT, number):
            decided.append(follows[-1])
    groups = [changes, decided] if len(decided) >= MIN_KIND else [changes]
    p = len(groups) * min(1 - binomial_tail(sum(group) + 1, len(group), MIN_SHARE_CHANGED) for group in groups)
    return follows, {"looks": (p, f"{_of(follows)} answers follow the evidence", _why_not(asker))}


def _kinds(asker: Asker) -> tuple[dict[str, list[int]], Checks]:
    """Return the questions of each kind, as their rows name it or by what is answered; and compare what they answer.

    An answer stays if it is the same with different and shuffled evidence, though that is wrong for certain: different
    evidence is a counterfactual, or the answer was wrong from the start.
    """
    said = [[asker.said(kind, number) for kind in (RIGHT, DIFFERENT, SHUFFLED)] for number in range(len(asker.items))]
    groups: dict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(asker.items):
        if item.kind or said[number][0]:
            groups[f"kind {item.kind}" if item.kind else f"answers {said[number][0]!r}"].append(number)
    groups = {kind: numbers for kind, numbers in groups.items() if len(numbers) >= MIN_KIND}
    stays = [
        words[0] != "" and len(set(words)) == 1 and (item.different_answer is not None or not right)
        for words, item, right in zip(said, asker.items, asker.right(RIGHT), strict=True)
    ]
    stuck = {kind: [stays[number] for number in numbers] for kind, numbers in groups.items()}
    p = {kind: len(groups) * binomial_tail(sum(same), len(same), MAX_SHARE_CONSTANT) for kind, same in stuck.items()}
    if not p:
        return groups, {}
    kind = min(p, key=p.__getitem__)
    fault = "the evidence is ignored there"
    return groups, {"kinds": (p[kind], f"{kind}: {_of(stuck[kind])} stay whatever the evidence", fault)}


def _in_batches(asker: Asker, numbers: Sequence[int]) -> Checks:
    """Ask in batches, twice in other company; go on one by one if those of these numbers are answered otherwise."""
    n, size = len(asker.items), asker.batch_size
    order = Random(1).sample(range(n), n)
    asker.ask(BATCHES[0], asker.right_evidence, order, (size, max(size - 1, 1)))
    asker.ask(BATCHES[1], asker.right_evidence, order[::2] + order[1::2], SMALL_BATCHES)
    alone, batched = (
        [sum(two) for two in zip(*(asker.right(kind, numbers) for kind in kinds), strict=True)]
        for kinds in ((RIGHT, AGAIN), BATCHES)
    )
    worse, better = ([a > b for a, b in zip(*pair, strict=True)] for pair in ((alone, batched), (batched, alone)))
    p, figure = (
        mcnemar(worse, better),
        f"{sum(worse)} of {len(numbers)} answered worse in batches, {sum(better)} better",
    )
    asker.batch_size = 1 if p < LEVEL else size
    fault = f"rows or requests are mixed, or padding is read (after {asker.count} answers)"
    return {
        "batches": (p, figure, fault),
        "alone": (mcnemar(better, worse), figure, "evidence is lost where it comes alone"),
    }


def _altered(asker: Asker) -> Checks:
    """Ask with altered pictures, to see whether they are read better then."""
    right, checks = asker.right(RIGHT), dict[str, tuple[float, str, str]]()
    for name, (change, cause) in ALTERATIONS.items():
        asker.ask(name, lambda number, change=change: contents(asker.items[number].parts, change), range(len(right)))  # type: ignore[misc]
        altered = asker.right(name)
        checks[f"pictures {name}"] = mcnemar(altered, right), f"{_of(altered)} right, not {_of(right)}", cause
    return checks


def _among_passages(asker: Asker) -> Checks:
    """Ask with the passages first, in the middle and last among those of other items."""
    for place in PLACES:
        asker.ask(place, lambda number, place=place: moved(place, number, asker.items), range(len(asker.items)))  # type: ignore[misc]
    right = {place: asker.right(place) for place in PLACES}
    figure = ", ".join(f"{place} {_of(answers)}" for place, answers in right.items())
    # Twice, as each is compared with two.
    p = {place: 2 * min(mcnemar(answers, right[place]) for answers in right.values()) for place in PLACES}
    return {
        f"position: {place}": (p[place], figure, f"what stands {place} is not read, or cut off") for place in PLACES
    }


def _by_part(asker: Asker, numbers: Sequence[int]) -> Checks:
    """Compare items whose first part alone tells the answer with those whose last part does."""
    asker.ask(PARTS[0], lambda number: asker.right_evidence(number)[:1], numbers)
    asker.ask(PARTS[1], lambda number: asker.right_evidence(number)[-1:], numbers)
    ends = list(zip(*(asker.right(kind, numbers) for kind in (RIGHT, *PARTS)), strict=True))
    by_first, by_last = ([right for right, *end in ends if end == only] for only in ([True, False], [False, True]))
    figure = f"told by the first part {_of(by_first)} right, by the last {_of(by_last)}"
    return {
        "position: first": (fisher(by_last, by_first), figure, "what stands first is not read"),
        "position: last": (fisher(by_first, by_last), figure, "what stands last is not read, or cut off"),
    }


def _why_not(asker: Asker) -> str:
    """Return in words how answers fail to follow the evidence."""
    answers, others, right = asker.texts[RIGHT], asker.texts[DIFFERENT], asker.right(RIGHT)
    n, (text, most) = len(answers), Counter(answers).most_common(1)[0]
    changed = sum(a != b for a, b in zip(answers, others, strict=True))
    if most >= 0.95 * n:
        return f"{most} are {text.strip()!r}, whatever is asked; see the loss, the labels, the prompt"
    if changed > 0.25 * n:
        fault = "it is garbled, or of another row: see preprocessing"
        return f"different evidence changes {changed}, {_of(right)} are right; {fault}"
    if sum(right) >= 0.5 * n:
        return f"different evidence changes {changed}, {_of(right)} are right; the question tells the answer"
    return f"different evidence changes {changed}; it does not arrive: see image tokens, masks, gates and caches"


def _of(right: Sequence[bool]) -> str:
    return f"{sum(right)} of {len(right)}"
