"""Run notebooks and save the outputs of their cells, so that they can be read without running them.

    python docs/notebooks/run.py             all of them
    python docs/notebooks/run.py 2-*.ipynb   one

Cells run in order in one namespace, in an empty folder. The outputs are what a cell prints, and the value of its last
line: as a picture where it has one (`_repr_png_`), else as text.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell, in the format of notebooks."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None:
        data: dict[str, Any] = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_png_"):
            kind = type(value)
            data = {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": [f"<{kind.__name__}>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def lines(text: str) -> list[str]:
    """Text in the format of notebooks: its lines."""
    return text.splitlines(keepends=True)


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells; whatever a cell raises is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count, before = [], 0, os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    count += 1
                    outputs = run_cell("".join(cell["source"]), names)
                    cell = {**cell, "execution_count": count, "outputs": outputs}
                cells.append(cell)
        finally:
            os.chdir(before)
    return {**notebook, "cells": cells}


def main(paths: list[Path]) -> None:
    """Run these notebooks and write them."""
    for path in paths:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(run(notebook), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")))
