"""Reports of the doctor: verdicts in their order, and of a model that answers questions its figures and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from mmattn.inspect.evidence import Item
from mmattn.inspect.significance import interval

_WORDS = {True: "ok", False: "FAIL", None: "note"}
#: Items that the text shows.
_SHOWN = 5


@dataclass
class Report:
    """Verdicts of checks, in their order; a figure without a verdict is a note.

    Args:
        lines: verdict (None for a note), name of the check and answer.

    >>> report = Report()
    >>> report.add(True, "rows", "each depends on its own memory only")
    >>> report.add(None, "null slot", "there is none")
    >>> print(report)
    ok    rows       each depends on its own memory only
    note  null slot  there is none
    >>> assert report.ok, report
    """

    lines: list[tuple[bool | None, str, str]] = field(default_factory=list)

    def add(self, ok: bool | None, check: str, answer: str) -> None:
        """Append a line."""
        self.lines.append((ok, check, answer))

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check for ok, check, _ in self.lines if ok is False]

    def __str__(self) -> str:
        width = max((len(check) for _, check, _ in self.lines), default=0)
        return "\n".join(f"{_WORDS[ok]:<4}  {check:<{width}}  {answer}" for ok, check, answer in self.lines)


@dataclass
class LookingReport(Report):
    """Verdicts on a model that answers questions from evidence, with figures and every answer.

    Args:
        lines: as of a `Report`.
        title: questions, answers and seconds, in a line.
        figures: which answers are right, by the kind of evidence.
        follows: for each item, if its answer follows the evidence: right, and from other evidence what follows there.
        items: the questions.
        answers: to each item, by the kind of evidence.
    """

    title: str = ""
    figures: dict[str, list[bool]] = field(default_factory=dict)
    follows: list[bool] = field(default_factory=list)
    items: Sequence[Item] = ()
    answers: dict[str, list[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        figures = {
            name: {"right": sum(one), "of": len(one), "interval": interval(sum(one), len(one))}
            for name, one in self.figures.items()
        }
        checks = [{"verdict": _WORDS[ok], "check": check, "answer": answer} for ok, check, answer in self.lines]
        items = [
            {"row": item.row, "question": item.question, "answer": item.answer, "other_answer": item.other_answer}
            | {"follows": follows, "answers": {name: texts[place] for name, texts in self.answers.items()}}
            for place, (item, follows) in enumerate(zip(self.items, self.follows, strict=True))
        ]
        return {"ok": self.ok, "title": self.title, "figures": figures, "checks": checks, "items": items}

    def __str__(self) -> str:
        values, lines = self.as_dict(), [self.title, "", f"{'right answers':<22}            95 % interval"]
        for name, one in values["figures"].items():
            low, high = one["interval"]
            lines.append(
                f"{name:<22} {one['right']:>3}/{one['of']:<3} {one['right'] / one['of']:>4.0%}  {low:.0%}–{high:.0%}"
            )
        stuck = [one for one in values["items"] if not one["follows"]]
        lines += ["", super().__str__(), "", f"{len(stuck)} of {len(self.items)} answers do not follow the evidence"]
        for one in stuck[:_SHOWN]:
            answer, other = (one["answers"][name].strip()[:40] for name in ("right evidence", "other evidence"))
            question = f"row {one['row']}: {one['question']} {one['answer']!r}"
            lines.append(f"  {question}: answers {answer!r}, from other evidence {other!r}")
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return a page of its own: what the text says, and every answer."""
        head = ["row", "follows", "question", "answer", *self.answers]
        rows = [
            [one["row"], one["follows"], one["question"], one["answer"], *one["answers"].values()]
            for one in self.as_dict()["items"]
        ]
        cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in (head, *rows)]
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>doctor</title>'
            "<style>td { padding: 0.2em 0.8em; vertical-align: top }</style>"
            f"<pre>{escape(str(self))}</pre><table><tr>{'</tr><tr>'.join(cells)}</tr></table></html>"
        )
