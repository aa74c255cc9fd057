"""Run the Python blocks of pages and compare what they print with what stands below them.

    python tests/pages.py PAGE…

Needs the standard library alone, so that it also runs where nothing but an installed mmattn is. Each page has a working
folder of its own, with the assets of the current folder. Prints one line for each page and exits with 1 on a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import time
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S)
SKIP = "<!-- skip -->"
NEEDS = re.compile(r"<!-- needs (\w+) -->\s*\Z")
SHOWN = re.compile(r"<!-- (tests/\S+\.py) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A Python block of a page, with the text it says it prints (None where it says nothing), or the file it shows."""

    line: int
    code: str
    output: str | None
    file: str | None = None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page that are to be run.

    One that must download something stands under a skip mark, and one that needs a package under a mark that names it:
    it is run where that is installed.
    """
    found = []
    for match in BLOCK.finditer(page):
        needs = NEEDS.search(page[: match.start()])
        absent = needs is not None and importlib.util.find_spec(needs[1]) is None
        if not (absent or page[: match.start()].rstrip().endswith(SKIP)):
            shown = SHOWN.search(page[: match.start()])
            line = page[: match.start()].count("\n") + 1
            found.append(Block(line, match["code"], match["output"], shown and shown[1]))
    return found


def run(block: Block, names: dict[str, object]) -> None:
    """Run a block in `names` and compare what it prints with what it says; import the file that a block shows."""
    if block.file is not None and (ROOT / block.file).is_file():
        assert block.code == (ROOT / block.file).read_text(encoding="utf-8"), f"{block.file} reads otherwise now"
        names.update(vars(importlib.import_module(block.file.removesuffix(".py").replace("/", "."))))
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.code, f"block at line {block.line}", "exec"), names)
    if block.output is not None:
        wanted, found = block.output.split(), printed.getvalue().split()
        assert found == wanted, f"line {block.line}: it prints {' '.join(found)}, not {' '.join(wanted)}"


def run_page(text: str) -> None:
    """Run all blocks of a page, one after the other, in one module."""
    module = types.ModuleType("page")
    before = sys.modules.get("page")
    sys.modules["page"] = module  # dataclasses look for the module of a class
    try:
        for block in blocks(text):
            run(block, vars(module))
    finally:
        if before is None:
            del sys.modules["page"]
        else:
            sys.modules["page"] = before


def main(pages: list[str]) -> int:
    failed, here = 0, Path.cwd()
    warnings.simplefilter("ignore")
    for page in map(os.path.abspath, pages):
        text, began = Path(page).read_text(encoding="utf-8"), time.perf_counter()
        if not blocks(text):
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "assets").symlink_to(here / "assets")
            os.chdir(folder)
            try:
                run_page(text)
                said = "runs"
            except BaseException:
                failed, said = failed + 1, f"FAILS\n{traceback.format_exc()}"
            finally:
                os.chdir(here)
        print(f"{os.path.relpath(page, here)}: {said} ({time.perf_counter() - began:.0f} s)", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
