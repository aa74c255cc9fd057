"""Is this adapter's folder whole, and does what it holds look alive? One line per question, with a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike

from torch import Tensor

from mmattn.adapters.files import load_folder
from mmattn.errors import AdapterFileError, NonFiniteError


@dataclass
class Report:
    """Verdicts, in the order the questions were asked."""

    lines: list[tuple[bool, str, str]] = field(default_factory=list)

    def add(self, ok: bool, question: str, answer: str) -> None:
        """Note one verdict."""
        self.lines.append((ok, question, answer))

    @property
    def ok(self) -> bool:
        """Whether every verdict is good."""
        return all(ok for ok, _, _ in self.lines)

    def __str__(self) -> str:
        width = max(len(question) for _, question, _ in self.lines)
        return "\n".join(
            f"{'ok  ' if ok else 'FAIL'}  {question:<{width}}  {answer}" for ok, question, answer in self.lines
        )


def diagnose(folder: str | PathLike[str]) -> Report:
    """Examine the folder of a saved adapter; nothing is loaded onto a host.

    Whole files that agree, finite weights, and gates that have moved from 0, where they start: an adapter with closed
    gates adds nothing.
    """
    report = Report()
    try:
        config, tensors = load_folder(folder)
    except (AdapterFileError, NonFiniteError) as error:
        report.add(False, "files", str(error))
        return report
    host = config["host"]
    count = sum(tensor.numel() for tensor in tensors.values())
    report.add(True, "files", f"whole, checksums agree, written by mmattn {config['mmattn_version']}")
    report.add(True, "kind", f"{config['kind']}, {count:,} parameters, behind layers {config['layers']}")
    report.add(True, "host", f"{host['class']} of {host['num_layers']} layers, width {host['hidden_size']}")
    report.add(True, "memory", f"width {config['adapter']['memory_dim']}")
    gates = open_gates(tensors)
    report.add(
        bool(gates) and min(gates.values()) > 0,
        "gates",
        ", ".join(f"{name} {size:.3f}" for name, size in gates.items()) or "none found",
    )
    return report


def open_gates(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each gate is open: the largest |tanh| of its numbers, by the name of its block and part."""
    gates = {name: value for name, value in tensors.items() if name.endswith("gate.gate")}
    return {
        name.removeprefix("blocks.").removesuffix(".gate"): value.float().tanh().abs().max().item()
        for name, value in gates.items()
    }
