"""An extension of griffe: examples and formulas that stand in a docstring without a heading become code blocks."""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Fence paragraphs that begin with `>>>`; Markdown would read them as quotations."""

    def on_instance(self, *, obj: griffe.Object, **given: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring and ">>>" in obj.docstring.value:
            blocks = inspect.cleandoc(obj.docstring.value).split("\n\n")
            fenced = [f"```pycon\n{block}\n```" if block.startswith(">>>") else block for block in blocks]
            obj.docstring.value = "\n\n".join(fenced)
