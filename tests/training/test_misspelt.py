"""A misspelt keyword, and an argument that this kind of data ignores, are refused (Invariant 42)."""

from __future__ import annotations

from typing import Any

import pytest

from mmattn import training
from mmattn.errors import ConfigError
from tests.training import small_run

# Whatever these are given are figures, to be written down under their names.
OPEN = {"RunFolder.log"}


def public() -> dict[str, Any]:
    """Every function and class of the training room, and every public verb of the classes; no types of functions."""
    found: dict[str, Any] = {name: getattr(training, name) for name in training.__all__}
    for kind, own in list(found.items()):
        if isinstance(own, type) and kind != "AdapterTrainer":
            verbs = {f"{kind}.{name}": verb for name, verb in vars(own).items() if not name.startswith("_")}
            found |= {name: verb for name, verb in verbs.items() if callable(verb)}
    types = ("Loss", "Collate", "MemorySource", "DryRunEnded")
    return {name: own for name, own in found.items() if name not in OPEN and name not in types}


@pytest.mark.parametrize("name", sorted(public()))
def test_a_misspelt_keyword(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'misspelt'"):
        public()[name](misspelt=1)


@pytest.mark.parametrize("old", ["steps", "lr", "pieces", "ema", "clip", "recompute", "keep", "patience"])
def test_a_setting_of_the_first_version(old: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{old}'"):
        training.TrainingConfig(**{"max_steps": 3, old: 1})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": -1e-3}, "learning_rate must be in"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"gate_learning_rate": "fast"}, "gate_learning_rate must be a finite number, got 'fast'"),
        ({"weight_decay": -0.1}, "weight_decay must be in"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be a finite number"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing must be true or false, got 'yes'"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training.TrainingConfig(max_steps=3, **settings)


def test_gates_without_gates() -> None:
    """A learning rate of gates is no mistake on a model that has none: settings are shared with its control."""
    lora = training.add_lora(small_run.tiny.make("llama"), 2)
    assert {g["lr"] for g in training.parameter_groups(lora, 0.1, gate_learning_rate=0.2)} == {0.1}
