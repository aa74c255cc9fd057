"""Python's own documentation, from `pydoc_data`: topics, of which some are held out, without what they share."""

from __future__ import annotations

import re
from random import Random


def load_topics(held_out: float = 0.15, seed: int = 0, copies: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Topics to train on and to retrieve from, and held-out topics, {name: text}.

    Topics repeat each other's sections. Every paragraph is kept once, in a held-out topic where one has it: else those
    to train on would leak into the held-out ones, and what is retrieved in training would be copies of the text, which
    teaches nothing but to copy.

    Args:
        copies: leave every topic to train on as it is, to see what that would be worth.
    """
    from pydoc_data.topics import topics

    unique = {text: name for name, text in sorted(topics.items(), reverse=True)}
    names = sorted(unique.values())
    Random(seed).shuffle(names)
    away = sorted(names[: round(held_out * len(names))])
    told: set[str] = set()
    once: dict[str, str] = {}
    for name in [*away, *sorted(set(names) - set(away))]:
        kept = []
        for part in paragraphs(topics[name]):
            if _plain(part) not in told:
                told.add(_plain(part))
                kept.append(part)
        once[name] = topics[name] if copies and name not in away else "\n\n".join(kept)
    held = {name: once.pop(name) for name in away}
    return {name: text for name, text in once.items() if text}, held


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a topic, as it has them."""
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _plain(paragraph: str) -> str:
    return " ".join(paragraph.split()).lower()


def load_docstrings() -> list[str]:
    """The docstrings of the standard library, each once: what a language model may know before it sees a topic."""
    import ast
    import sysconfig
    from pathlib import Path

    library, found = Path(sysconfig.get_path("stdlib")), {}
    for file in sorted(library.rglob("*.py")):
        parts = set(file.relative_to(library).parts)
        if parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    found[text] = None
    return list(found)
