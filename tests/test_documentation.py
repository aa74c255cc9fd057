"""Documentation that runs: docstring examples, the README's Python blocks, and what the words beside them promise."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import mmattn
from mmattn.cli import app

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S)
SKIP = "<!-- skip -->"
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@dataclass(frozen=True)
class Block:
    """A Python block of a page, with the text it says it prints (None where it says nothing)."""

    line: int
    code: str
    output: str | None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page that are to be run; one that must download something stands under a skip mark."""
    found = []
    for match in BLOCK.finditer(page):
        if not page[: match.start()].rstrip().endswith(SKIP):
            found.append(Block(page[: match.start()].count("\n") + 1, match["code"], match["output"]))
    return found


def run(block: Block, names: dict[str, object]) -> None:
    """Run a block in `names` and compare what it prints with what it says."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.code, f"block at line {block.line}", "exec"), names)
    if block.output is not None:
        assert printed.getvalue().split() == block.output.split()


def modules() -> list[str]:
    """Every module of the package but `__main__`, which would run."""
    found = pkgutil.walk_packages(mmattn.__path__, "mmattn.")
    return ["mmattn", *(module.name for module in found if not module.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0


def test_there_are_docstring_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [e for name in modules() for t in finder.find(importlib.import_module(name)) for e in t.examples]
    assert len(examples) >= 10


def test_readme_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found, "the README has no block that runs"
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "readme"}
    for block in found:
        run(block, names)


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("recipes/*/README.md")))
def test_recipe_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        run(block, names)


def test_a_wrong_block_is_seen() -> None:
    (block,) = blocks("words\n```python\nprint(2 + 3)\n```\n\n```text\n7\n```\n")
    assert (block.line, block.output) == (2, "7\n")
    with pytest.raises(AssertionError):
        run(block, {})
    run(Block(1, "print(2 + 3)", "5\n"), {})
    with pytest.raises(NameError):
        run(Block(1, "unheard_of", None), {})


def test_a_skip_mark_skips_one_block() -> None:
    page = f"{SKIP}\n```python\nfirst\n```\n\n```python\nsecond\n```\n"
    assert [block.code for block in blocks(page)] == ["second\n"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in t]
    targets += [t for t in re.findall(r'(?:src|href)="([^"]+)"', text) if "://" not in t]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_commands_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    named = set(re.findall(r"`mmattn ([a-z]+)", text))
    assert named and named <= commands
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"make ([a-z]+) ", text)) <= targets


def test_public_names_are_described() -> None:
    missing = [name for name in mmattn.__all__ if not (getattr(mmattn, name).__doc__ or "").strip()]
    assert missing == []
