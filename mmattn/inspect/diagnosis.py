"""`doctor`: the checks of an adapted model on a batch, or of the folder of a saved adapter, as a table of verdicts."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from mmattn.adapters.registry import adapter_kinds
from mmattn.adapters.serialization import load_folder
from mmattn.errors import AdapterFileError, NonFiniteError
from mmattn.hosts import host_kinds, load
from mmattn.hosts.base import AdaptedModel
from mmattn.inspect.batches import memories_of, random_batch
from mmattn.inspect.checks import CHECKS, OF_ROWS, openings
from mmattn.inspect.environment import version
from mmattn.inspect.memory_variants import has_rows
from mmattn.inspect.trial import Trial, evaluating

_WORDS = {True: "ok", False: "FAIL", None: "note"}


@dataclass
class Report:
    """Verdicts of checks, in their order; a figure without a verdict is a note.

    Args:
        lines: verdict (None for a note), name of the check and answer.

    >>> report = Report()
    >>> report.add(True, "rows", "each depends on its own memory only")
    >>> report.add(None, "null slot", "there is none")
    >>> print(report)
    ok    rows       each depends on its own memory only
    note  null slot  there is none
    >>> assert report.ok, report
    """

    lines: list[tuple[bool | None, str, str]] = field(default_factory=list)

    def add(self, ok: bool | None, check: str, answer: str) -> None:
        """Append a line.

        Args:
            ok: the verdict, None for a note.
            check: its name.
            answer: in words.
        """
        self.lines.append((ok, check, answer))

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check for ok, check, _ in self.lines if ok is False]

    def __str__(self) -> str:
        width = max((len(check) for _, check, _ in self.lines), default=0)
        return "\n".join(f"{_WORDS[ok]:<4}  {check:<{width}}  {answer}" for ok, check, answer in self.lines)


def doctor(model: AdaptedModel, batch: Mapping[str, Any]) -> Report:
    """Check each active adapter of a model on a batch: whether memory arrives, and only where it may.

    The model is called some twenty times without gradients; hooks, modes and random states are restored. Of what has
    rows and no slots (prefixes, passages, what another model has read) those checks are left out that are about slots.

    Args:
        model: the adapted model.
        batch: what it is called with, by name, `memory` included.

    Raises:
        ConfigError: no batch with a memory that may be attended to.
        ConditionError: no adapter is active, or the batch has a cache.
    """
    report = Report()
    with evaluating(model):
        memories = memories_of(model, batch)
        for name, memory in memories.items():
            trial = Trial(model, name, batch, memory)
            trial.output  # noqa: B018 - a batch that the model itself refuses is no matter of health
            title = f"{name}: " if len(memories) > 1 else ""
            for check, run in CHECKS.items():
                if has_rows(memory) and check not in OF_ROWS:
                    continue
                try:
                    verdict, answer = run(trial)
                except Exception as error:
                    verdict, answer = False, f"the check stopped with {type(error).__name__}: {error}"
                report.add(verdict, title + check, answer)
    trained, total = model.trainable_parameters()
    report.add(None, "trainable parameters", f"{trained:,} of {total:,} ({trained / max(total, 1):.2%})")
    report.add(None, "versions", versions(model))
    return report


def diagnose(folder: str | PathLike[str], host: str | PathLike[str] | None = None) -> Report:
    """Check the folder of a saved adapter: its files, finite weights, and gates that are open.

    Gates start at 0, where an adapter adds nothing. With a host, all checks of `doctor` run too, on a random batch.

    Args:
        folder: as `save_adapter` wrote it.
        host: name or folder of the model that the adapter was trained on, to be loaded.

    Raises:
        AdapterFileError: the host cannot be loaded, or the adapter is for another one.
    """
    report = Report()
    try:
        config, tensors = load_folder(folder)
    except (AdapterFileError, NonFiniteError) as error:
        report.add(False, "files", str(error))
        return report
    wanted = config["host"]
    count = sum(tensor.numel() for tensor in tensors.values())
    report.add(True, "files", f"complete, checksums agree, written by mmattn {config['mmattn_version']}")
    report.add(True, "kind", f"{config['kind']}, {count:,} parameters, at layers {config['layers']}")
    report.add(True, "host", f"{wanted['class']} of {wanted['num_layers']} layers, width {wanted['hidden_size']}")
    reads = getattr(adapter_kinds().get(config["kind"]), "reads", None)
    report.add(True, "memory", reads or f"width {config['adapter']['memory_dim']}")
    if host is None:
        ok, answer = openings(tensors)
        report.add(ok, "gates", answer)
        return report
    kind = host_kinds().get(wanted["kind"])
    if kind is None:
        raise AdapterFileError(
            f"this adapter is for a host of kind {wanted['kind']!r}, and registered are {', '.join(host_kinds())}: "
            "import the package that registers it first"
        )
    loaded = kind.load_host(host)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(loaded, folder)
    other = [str(one.message) for one in caught if "the weights of this" in str(one.message)]
    report.add(not other, "weights of the host", other[0] if other else f"those it was trained on, {os.fspath(host)}")
    report.lines += doctor(model, random_batch(model)).lines
    return report


def versions(model: AdaptedModel) -> str:
    """The versions of Python, mmattn, torch and the package of the host."""
    numbers: dict[str, str | None] = {"Python": platform.python_version(), "mmattn": version("mmattn") or "from source"}
    numbers |= {name: version(name) for name in ("torch", type(model.host).__module__.partition(".")[0])}
    return ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
