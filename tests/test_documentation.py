"""Documentation that runs: docstring examples, the Python blocks of pages, and what the words beside them promise."""

from __future__ import annotations

import doctest
import functools
import importlib
import json
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import mmattn
from mmattn import masks
from mmattn.cli.app import app
from tests.pages import blocks, run, run_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
REFERENCE = [page for page in PAGES if page.startswith("docs/reference/")]
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*/README.md"))
#: Pages beside the first, for whoever uses, changes or reports.
PROJECT = ["CONTRIBUTING.md", "recipes/README.md", "CHANGELOG.md", "SECURITY.md"]
LONG = ("docs/extending.md", "docs/sweeps.md", "docs/evaluation.md")  # they train, or run suites
OURS = re.compile(
    r"https://(?:mmattn\.github\.io/mmattn/"
    r"|(?:github\.com/mmattn/mmattn/(?:blob|tree)|raw\.githubusercontent\.com/mmattn/mmattn)/main/)"
)
ROOMS = "adapters encoders errors hosts inspect retrieval testing training"
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules() -> list[str]:
    """Every module of the package but `__main__`, which would run."""
    found = pkgutil.walk_packages(mmattn.__path__, "mmattn.")
    return ["mmattn", *(module.name for module in found if not module.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    if name.startswith("mmattn.serving.vllm."):
        pytest.importorskip("vllm")
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0


@pytest.mark.slow  # it trains
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # where there is no GPU
def test_readme_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found, "the README has no block that runs"
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "readme"}
    for block in found:
        run(block, names)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in RECIPES + PAGES]
)
def test_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    run_page((ROOT / page).read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return the links of a page within this repository, code left out."""
    return [target for target in targets(page.read_text(encoding="utf-8")) if "://" not in target]


def targets(text: str) -> list[str]:
    """Return all links of a text, code left out."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


def dead_links(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of one."""
    dead = []
    for target in links(page):
        place, _, heading = target.partition("#")
        file = page.parent / place if place else page
        if not file.exists() or (heading and heading not in headings(file)):
            dead.append(target)
    return dead


@functools.cache
def headings(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links, and the names that a page of the reference has."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found} | set(listed(text))


def listed(text: str) -> list[str]:
    """The names that a page of the reference has: by mkdocstrings, or in a heading of its own."""
    return re.findall(r"^(?::::|##) (mmattn\.\S+)$", text, re.M)


@pytest.mark.parametrize("page", ["README.md", *PROJECT, *PAGES, *RECIPES])
def test_links_lead_somewhere(page: str) -> None:
    assert dead_links(ROOT / page) == []


@pytest.mark.parametrize("page", ["README.md", *PROJECT, *PAGES, *RECIPES])
def test_links_need_no_network(page: str) -> None:
    """Links to files of this repository are relative: they work in a clone."""
    assert [target for target in targets((ROOT / page).read_text(encoding="utf-8")) if OURS.match(target)] == []


def test_links_of_the_package_page_are_absolute() -> None:
    command = [sys.executable, "-m", "hatch_fancy_pypi_readme", "pyproject.toml"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in targets(text) if "://" not in target] == []
    ours = [OURS.sub("", target).partition("#")[0] for target in targets(text) if OURS.match(target)]
    assert len(ours) > 20 and all((ROOT / place).exists() for place in ours)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_is_reached_from_the_first() -> None:
    first, reference = ROOT / "docs" / "README.md", ROOT / "docs" / "reference" / "README.md"
    linked = {(page.parent / link).resolve() for page in (first, reference) for link in links(page)}
    pages = {ROOT / page for page in PAGES} | set(ROOT.glob("docs/**/*.ipynb"))
    assert pages - {first} <= linked


def commands(text: str) -> list[list[str]]:
    """The words of each `mmattn …` in a page: lines of shell blocks, and code with a command and more."""
    lines = [line for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.M | re.S) for line in block.split("\n")]
    lines += re.findall(r"`(mmattn [^`\n]+)`", text)
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mmattn ") and "…" not in line]


def parse(words: list[str]) -> None:
    """Have the command line read words as it would, and do nothing."""
    command = typer.main.get_command(app)
    words = [word for word in words if word not in ("--debug", "--version")]
    while hasattr(command, "commands") and words:
        command, words = command.commands[words[0]], words[1:]
    if words:  # where a page names only the command
        command.make_context(command.name, words)


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_commands_of_pages_are_understood(page: str) -> None:
    for words in commands((ROOT / page).read_text(encoding="utf-8")):
        parse(words)


def absent(text: str) -> list[str]:
    """The commands, options, files and targets of make that a page names in code, and that are not there."""
    missing = [" ".join(["mmattn", *words]) for words in commands(text) if not is_there(words)]
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.M | re.S)
    names = [word.strip("`,.:;()") for one in code for word in one.split()]
    files = [name for name in names if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|toml|svg|yaml))", name)]
    made = (".venv", ".venv-lowest")
    for name in files:
        if not name.startswith(made) and not list(ROOT.glob(name)) + list(ROOT.glob(f"[!.]*/**/{name}")):
            missing.append(name)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    return missing + [f"make {name}" for name in re.findall(r"(?:^|`)make ([\w-]+)", text, re.M) if name not in targets]


def is_there(words: list[str]) -> bool:
    """Whether there is such a command with these options, whatever their values."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return False
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    return {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("page", ["README.md", *PROJECT])
def test_what_pages_of_the_project_name_is_there(page: str) -> None:
    """Invariant 182."""
    assert absent((ROOT / page).read_text(encoding="utf-8")) == []


def test_tests_that_are_named_are_there() -> None:
    named = re.findall(r"\btests(?:/\w+)+(?:\.py)?", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_modules_that_docstrings_name_are_there() -> None:
    """Invariant 182."""
    known = {path.name for path in ROOT.glob("[!.]*/**/*.py")}
    named = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in [*ROOT.glob("mmattn/**/*.py"), *ROOT.glob("recipes/**/*.py")]
        for name in re.findall(r"`(?:[\w./]*/)?(\w+\.py)`", path.read_text(encoding="utf-8"))
    ]
    assert named and [one for one in named if one[1] not in known] == []


def test_the_reference_has_every_public_name() -> None:
    """A page of the reference names a class or function, or a package whose `__all__` mkdocstrings reads."""
    found = [name for page in REFERENCE for name in listed((ROOT / page).read_text(encoding="utf-8"))]
    assert len(set(found)) == len(found)
    has: set[int] = set()
    for value in map(resolve, found):
        names = getattr(value, "__all__", []) if isinstance(value, types.ModuleType) else []
        has |= {id(value), *(id(getattr(value, name)) for name in names)}
    public = {f"mmattn.{name}" for name in mmattn.__all__}
    public |= {f"mmattn.{room}.{name}" for room in ROOMS.split() for name in resolve(f"mmattn.{room}").__all__}
    called = {name: resolve(name) for name in sorted(public)}
    assert [name for name, value in called.items() if callable(value) and id(value) not in has] == []


def resolve(path: str) -> Any:
    """What a dotted name stands for."""
    value = mmattn
    for depth, name in enumerate(path.split(".")[1:], start=2):
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(".".join(path.split(".")[:depth]))
    return value


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.slow
def test_notebooks_run_and_hold_what_they_show(path: Path) -> None:
    """Every cell runs and gives outputs of the kinds that are kept; numbers may differ from machine to machine."""
    torch.manual_seed(0)
    kept = json.loads(path.read_text(encoding="utf-8"))
    made = runpy.run_path(str(ROOT / "docs" / "notebooks" / "run.py"))["run"](kept)
    assert kinds(kept) == kinds(made), "run python docs/notebooks/run.py"
    assert path.stat().st_size < 100_000


def kinds(notebook: dict[str, Any]) -> list[list[list[str]]]:
    """For each code cell of a notebook what kinds of outputs it has."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[sorted(output.get("data", ["stdout"])) for output in cell["outputs"]] for cell in cells]


def test_every_rule_is_drawn(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_masks.py"))
    drawn = {path.name for path in script["draw"](tmp_path)}
    assert drawn == {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")}
    page = (ROOT / "docs" / "core.md").read_text(encoding="utf-8")
    assert [name for name in sorted(drawn) if f"pictures/{name}" not in page] == []
    rules = [name for name, rule in vars(masks).items() if getattr(rule, "__annotations__", {}).get("return") == "Mask"]
    public = {name for name in rules if not name.startswith("_")}
    source = (ROOT / "docs" / "draw_masks.py").read_text(encoding="utf-8")
    assert public and {name for name in public if f"masks.{name}(" not in source} == set()


def test_the_rooms_are_drawn() -> None:
    """The picture is of the rooms that the tests of the architecture know."""
    script = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["drawn"]()


def test_public_names_are_described() -> None:
    missing = [name for name in mmattn.__all__ if not (getattr(mmattn, name).__doc__ or "").strip()]
    assert missing == []
