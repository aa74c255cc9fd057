"""Questions, verdicts and answers, as one table."""

from __future__ import annotations

from dataclasses import dataclass, field

_WORDS = {True: "ok", False: "FAIL", None: "note"}


@dataclass
class Report:
    """Verdicts, in the order the questions were asked; a figure without a verdict is a note.

    >>> report = Report()
    >>> report.add(True, "rows", "keep to themselves")
    >>> report.add(None, "null slot", "takes 12.0 %")
    >>> print(report)
    ok    rows       keep to themselves
    note  null slot  takes 12.0 %
    >>> assert report.ok, report
    """

    lines: list[tuple[bool | None, str, str]] = field(default_factory=list)

    def add(self, ok: bool | None, question: str, answer: str) -> None:
        """Note one verdict, or with None a figure."""
        self.lines.append((ok, question, answer))

    @property
    def ok(self) -> bool:
        """Whether no verdict is bad."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """The questions whose verdict is bad."""
        return [question for ok, question, _ in self.lines if ok is False]

    def __str__(self) -> str:
        width = max((len(question) for _, question, _ in self.lines), default=0)
        return "\n".join(f"{_WORDS[ok]:<4}  {question:<{width}}  {answer}" for ok, question, answer in self.lines)
