"""Write the reference under `docs/api` from the docstrings: a page for each part of the package.

    python docs/build.py

What is public: the names that `mmattn` exports, those that a sub-package lists in `__all__`, and in `MORE` what those
return or take from other modules.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

API = Path(__file__).resolve().parent / "api"
PARTS = ("core", "adapters", "hosts", "encoders", "retrieval", "inspect", "training", "testing")
MODULES = (
    "mmattn",
    "mmattn.errors",
    "mmattn.seq2seq",
    "mmattn.encoders",
    "mmattn.retrieval",
    "mmattn.inspect",
    "mmattn.training",
    "mmattn.testing",
)
#: Modules all of whose own functions and classes are public, and the name by which users import them.
WHOLE = {
    "mmattn.core.masks": "mmattn.masks",
    "mmattn.core.mask_converters": "mmattn.masks",
    "mmattn.core.positions": "mmattn.positions",
}
MORE = (
    "mmattn.adapters.block_adapter.BlockAdapter",
    "mmattn.adapters.block_adapter.SlotAdapter",
    "mmattn.adapters.gated_block.BlockLayout",
    "mmattn.adapters.gated.GatedLayout",
    "mmattn.adapters.adapter_layers.AdapterLayers",
    "mmattn.adapters.projected.PreparedMemory",
    "mmattn.adapters.protocols.AdapterConfig",
    "mmattn.adapters.protocols.MemorySource",
    "mmattn.adapters.protocols.View",
    "mmattn.adapters.protocols.Site",
    "mmattn.hosts.adapted.AdaptedModel",
    "mmattn.hosts.causal_lm.model.AdaptedCausalLM",
    "mmattn.hosts.unet.model.AdaptedUNet",
    "mmattn.hosts.bank.bank.Bank",
)


def public() -> dict[str, Any]:
    """Every public class and function by the name that users import it by."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
    for module, shown in WHOLE.items():
        for name, value in vars(importlib.import_module(module)).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == module:
                found[f"{shown}.{name}"] = value
    for path in MORE:
        module, _, name = path.rpartition(".")
        found[path] = getattr(importlib.import_module(module), name)
    # Each once, by its shortest name; modules have no page.
    shortest: dict[int, str] = {}
    for path in sorted((path for path in found if callable(found[path])), key=lambda path: (path.count("."), path)):
        shortest.setdefault(id(found[path]), path)
    return {path: found[path] for path in sorted(shortest.values())}


def part_of(value: Any) -> str:
    """The page that a class or function belongs on."""
    inside = value.__module__.split(".")[1]
    return inside if inside in PARTS else "training" if inside == "progress" else "core"


def anchor(heading: str) -> str:
    """What GitHub calls a heading in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def signature(value: Any) -> str:
    """Names and defaults of the arguments; the docstring says what they are."""
    given = inspect.signature(value)
    named = [one.replace(annotation=one.empty) for name, one in given.parameters.items() if name not in ("self", "cls")]
    returned = given.return_annotation
    shown = f" -> {returned}" if isinstance(returned, str) and returned != "None" else ""
    text = f"{given.replace(parameters=named, return_annotation=given.empty)}{shown}"
    return re.sub(r"<function .*? at 0x\w+>", "…", text)


def markdown(doc: str) -> str:
    """A docstring as Markdown: sections as lists, examples as code."""
    blocks = []
    for block in inspect.cleandoc(doc).split("\n\n"):
        first, _, rest = block.partition("\n")
        if first.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
        elif re.fullmatch(r"(Args|Raises|Returns|Yields|Attributes):", first):
            blocks.append(f"*{first[:-1]}*\n\n{listed(inspect.cleandoc(rest))}")
        elif all(line.startswith("    ") for line in block.split("\n")):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(plain(block))
    return "\n\n".join(blocks)


def listed(lines: str) -> str:
    """The lines of a section, "name: what", as a list; lines further in go on with the one before."""
    out: list[str] = []
    for line in lines.split("\n"):
        if not out or re.match(r"\*{0,2}\w+(, \w+)*( or \w+)?: ", line):
            out.append(f"- {plain(line.strip())}")
        else:
            out[-1] += f" {plain(line.strip())}"
    return "\n".join(out)


def plain(text: str) -> str:
    """Text with the signs of Markdown escaped; code between backticks stays."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*<$|])", r"\\\1", piece) for piece in pieces)


def section(path: str, value: Any) -> str:
    """The heading, signature and docstring of a class or function, and of the methods of a class."""
    error = inspect.isclass(value) and issubclass(value, Exception)
    called = "" if error else textwrap.fill(path.rpartition(".")[2] + signature(value), 110, subsequent_indent="    ")
    lines = [f"### {path}", called and f"```py\n{called}\n```", markdown(value.__doc__ or "")]
    if inspect.isclass(value) and not error:
        own = [base for base in value.__mro__ if base.__module__.startswith("mmattn")]
        members = {name: member for base in reversed(own) for name, member in vars(base).items()}
        for name, member in members.items():
            member = getattr(member, "__func__", member)
            if name.startswith("_") or not member.__doc__:
                continue
            if isinstance(member, property):
                lines.append(f"**`{name}`** {markdown(member.__doc__)}")
            elif inspect.isfunction(member):
                lines.append(f"**`{name}{signature(member)}`**\n\n{markdown(member.__doc__)}")
    return "\n\n".join(line for line in lines if line)


def pages() -> dict[str, str]:
    """The text of every page, by its file's name."""
    found, note = public(), "Made from the docstrings by `python docs/build.py`: change those."
    index, out = ["# Reference", note], {}
    for part in PARTS:
        names = {path: value for path, value in found.items() if part_of(value) == part}
        sections = [section(path, value) for path, value in names.items()]
        out[f"{part}.md"] = "\n\n".join([f"# {part.capitalize()}", note, *sections]) + "\n"
        first = {path: plain((value.__doc__ or "").strip().split("\n")[0]) for path, value in names.items()}
        rows = [f"| [{path}]({part}.md#{anchor(path)}) | {line} |" for path, line in first.items()]
        index += [f"## {part.capitalize()}", "\n".join(["| name | is |", "|---|---|", *rows])]
    return {"README.md": "\n\n".join(index) + "\n"} | out


if __name__ == "__main__":
    for file, text in pages().items():
        (API / file).write_text(text, encoding="utf-8")
