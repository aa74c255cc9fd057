"""A misspelt keyword, and an argument that this kind of data ignores, are refused (Invariant 42)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from transformers import TrainerCallback

from mmattn import training
from tests.training import small_run

# Whatever these are given are figures, to be written down under their names.
OPEN = {"RunFolder.log"}


def public() -> dict[str, Any]:
    """Every function and class of the training room, and every public verb of the classes; no types of functions."""
    found: dict[str, Any] = {name: getattr(training, name) for name in training.__all__}
    for kind, own in list(found.items()):
        if isinstance(own, type) and issubclass(own, (BaseModel, TrainerCallback)):
            del found[kind]  # pydantic refuses what it does not know, and a Trainer calls
        elif isinstance(own, type) and kind != "AdapterTrainer":
            verbs = {f"{kind}.{name}": verb for name, verb in vars(own).items() if not name.startswith("_")}
            found |= {name: verb for name, verb in verbs.items() if callable(verb)}
    types = ("DryRunEnded",)
    return {name: own for name, own in found.items() if name not in OPEN and name not in types}


@pytest.mark.parametrize("name", sorted(public()))
def test_a_misspelt_keyword(name: str) -> None:
    """Invariant 42."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'misspelt'"):
        public()[name](misspelt=1)


def test_gates_without_gates() -> None:
    """A learning rate of gates is no mistake on a model that has none: settings are shared with its control."""
    lora = training.add_lora(small_run.tiny.make("llama"), 2)
    assert {g["lr"] for g in training.parameter_groups(lora, 0.1, gate_learning_rate=0.2)} == {0.1}
