"""`Report`: the verdicts of the doctor, and of a model that answers questions its figures and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from mmattn.inspect.doctor.questions import Item
from mmattn.inspect.doctor.significance import interval

_WORDS = {True: "ok", False: "FAIL", None: "note"}
#: Names of the two kinds of evidence that the text of a report compares.
RIGHT, DIFFERENT = "right evidence", "different evidence"
#: Items that the text shows.
_SHOWN = 5


@dataclass
class Report:
    """Verdicts of checks, in their order; of a model that answers questions also figures and every answer.

    Args:
        lines: verdict (None for a note), name of the check and its result.
        title: questions, answers and seconds, in a line.
        figures: which answers are right, by the kind of evidence.
        follows: for each item, if its answer follows the evidence: right, and from different evidence what follows
            there.
        items: the questions.
        answers: to each item, by the kind of evidence.

    >>> report = Report()
    >>> report.add(True, "rows", "each depends on its own memory only")
    >>> report.add(None, "null slot", "there is none")
    >>> print(report)
    ok    rows       each depends on its own memory only
    note  null slot  there is none
    >>> assert report.ok, report
    """

    lines: list[tuple[bool | None, str, str]] = field(default_factory=list)
    title: str = ""
    figures: dict[str, list[bool]] = field(default_factory=dict)
    follows: list[bool] = field(default_factory=list)
    items: Sequence[Item] = ()
    answers: dict[str, list[str]] = field(default_factory=dict)

    def add(self, ok: bool | None, check: str, result: str) -> None:
        """Append a line."""
        self.lines.append((ok, check, result))

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check for ok, check, _ in self.lines if ok is False]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        figures = {
            name: {"right": sum(right), "of": len(right), "interval": interval(sum(right), len(right))}
            for name, right in self.figures.items()
        }
        checks = [{"verdict": _WORDS[ok], "check": check, "answer": result} for ok, check, result in self.lines]
        items = [
            {"row": item.row, "question": item.question, "answer": item.answer, "other_answer": item.other_answer}
            | {"follows": follows, "answers": {name: texts[place] for name, texts in self.answers.items()}}
            for place, (item, follows) in enumerate(zip(self.items, self.follows, strict=True))
        ]
        return {"ok": self.ok, "title": self.title, "figures": figures, "checks": checks, "items": items}

    def __str__(self) -> str:
        width = max((len(check) for _, check, _ in self.lines), default=0)
        verdicts = "\n".join(f"{_WORDS[ok]:<4}  {check:<{width}}  {result}" for ok, check, result in self.lines)
        if not self.items:
            return verdicts
        values, lines = self.as_dict(), [self.title, "", f"{'right answers':<22}            95 % interval"]
        for name, figure in values["figures"].items():
            low, high = figure["interval"]
            share = f"{figure['right']:>3}/{figure['of']:<3} {figure['right'] / figure['of']:>4.0%}"
            lines.append(f"{name:<22} {share}  {low:.0%}–{high:.0%}")
        stuck = [item for item in values["items"] if not item["follows"]]
        lines += ["", verdicts, "", f"{len(stuck)} of {len(self.items)} answers do not follow the evidence"]
        for item in stuck[:_SHOWN]:
            answer, other = (item["answers"][name].strip()[:40] for name in (RIGHT, DIFFERENT))
            question = f"row {item['row']}: {item['question']} {item['answer']!r}"
            lines.append(f"  {question}: answers {answer!r}, from {DIFFERENT} {other!r}")
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return a page of its own: what the text says, and every answer."""
        head = ["row", "follows", "question", "answer", *self.answers]
        rows = [
            [item["row"], item["follows"], item["question"], item["answer"], *item["answers"].values()]
            for item in self.as_dict()["items"]
        ]
        cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in (head, *rows)]
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>doctor</title>'
            "<style>td { padding: 0.2em 0.8em; vertical-align: top }</style>"
            f"<pre>{escape(str(self))}</pre><table><tr>{'</tr><tr>'.join(cells)}</tr></table></html>"
        )
