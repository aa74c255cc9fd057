"""Python's own documentation, from `pydoc_data`: topics, of which some are held out, without what they share."""

from __future__ import annotations

import re
from random import Random


def load_topics(held_out: float = 0.15, seed: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """Topics to train on and to retrieve from, and held-out topics, {name: text}.

    Topics repeat each other's sections: a paragraph of a held-out topic that stands in another topic, too, is leakage,
    and is taken out of the topics to train on.
    """
    from pydoc_data.topics import topics

    unique = {text: name for name, text in sorted(topics.items(), reverse=True)}
    names = sorted(unique.values())
    Random(seed).shuffle(names)
    away = set(names[: round(held_out * len(names))])
    held = {name: topics[name] for name in sorted(away)}
    told = {_plain(part) for text in held.values() for part in paragraphs(text)}
    train = {}
    for name in sorted(set(names) - away):
        kept = [part for part in paragraphs(topics[name]) if _plain(part) not in told]
        train[name] = "\n\n".join(kept)
    return train, held


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
