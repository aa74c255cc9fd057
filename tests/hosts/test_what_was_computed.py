"""What was computed before is used only where it would be computed now: every cache, every change, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.computed import Cache, Change, all_of, outcome
from tests.computed_changes import setting_changes
from tests.hosts.host_caches import BY_NAME, CACHES, FAMILIES, TUNERS, is_heard, lm, put_on, unet
from tests.hosts.host_changes import (
    ADAPTER,
    ADAPTER_AND_BACK,
    CALL,
    DIFFUSERS,
    HOST,
    IN_BLOCK,
    LORA,
    OF_LM,
    OF_TUNER,
    PEFT,
)

#: What stands for the host where a cache does not follow it.
_FEW = ("host: add_", "host: AdamW fused", "LoRA: scaling[…] =", "LoRA: set_adapter")
#: Pairs that run with every test; all others are marked slow.
_QUICK_CACHES = ("prepared gated", "block inserted", "bank", "passages, block", "passage folder", "hidden states")
_QUICK_CHANGES = ("adapter: AdamW fused", "host: AdamW fused", "LoRA: scaling[…] =", "call: autocast bfloat16")
#: Caches that follow the host, one of each kind.
FOLLOWING = (
    *("prepared inserted", "block inserted, no gate", "passages", "passages, block", "passage folder"),
    *("passage file", "hidden states", "hidden state folder", "prompts"),
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # by peft
    pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # by peft's SHiRA
]


def changes_of(cache: Cache) -> Iterator[tuple[Change, dict[str, Any]]]:
    """Yield the changes that can meet a cache, with the options of its host."""
    is_unet = cache.make is unet
    plain = [*HOST, *CALL, *([] if is_unet else OF_LM)]
    if "adapter" in cache.follows:
        plain += [*ADAPTER, ADAPTER_AND_BACK]
    if cache.name.startswith(("block", "stream")) and "prepared" not in cache.name:
        plain += IN_BLOCK
    every = [(change, {}) for change in plain]
    every += [(change, {"lora": {}}) for change in (*LORA, *(DIFFUSERS if is_unet else PEFT))]
    for change, options in every:
        if "host" in cache.follows or change.name in _FEW or not change.name.startswith(("host", "LoRA")):
            yield change, options


PAIRS = [(cache, change, options) for cache in CACHES for change, options in changes_of(cache)]


def cases() -> Iterator[Any]:
    for cache, change, options in PAIRS:
        is_quick = cache.name in _QUICK_CACHES and change.name in _QUICK_CHANGES
        marks = () if is_quick else pytest.mark.slow
        yield pytest.param(cache, change, options, id=f"{cache.name}-{change.name}", marks=marks)


@pytest.mark.parametrize(("cache", "change", "options"), list(cases()))
def test_after_a_change_a_cache_answers_as_if_all_was_computed_anew_or_raises(
    cache: Cache, change: Change, options: dict[str, Any], tmp_path: Path
) -> None:
    """Invariant 197."""
    outcome(cache, change, tmp_path, **options)


#: Every family with one cache, and Llama with all.
_SETTINGS = [
    *((family, "passages") for family in FAMILIES),
    *(("llama", name) for name in FOLLOWING if name != "passages"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), _SETTINGS)
def test_each_setting_of_the_modules_of_a_host_is_noticed(family: str, name: str, tmp_path: Path) -> None:
    """Invariant 197: numbers, switches, activations and buffers, changed in place, and fields of the config."""
    # Rotary frequencies are read when an adapter is attached.
    changes = [one for one in setting_changes(lm(family).host) if "inv_freq" not in one.name]
    changes = [one for one in changes if is_heard(family, one.apply)]
    _all_changes(changes, BY_NAME[name], tmp_path, least=3, family=family)


@pytest.mark.slow
@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize(
    "name", ["prepared inserted", "passages", "passage folder", "passage file", "hidden states", "prompts"]
)
def test_each_kind_of_adapter_of_peft_is_noticed(name: str, tuner: str, tmp_path: Path) -> None:
    """Invariant 197: put on, switched off, its weights changed, taken off."""
    added = Change("put on", lambda subject: put_on(subject.host, tuner) and None)
    _all_changes([added], BY_NAME[name], tmp_path, least=0)
    _all_changes(OF_TUNER, BY_NAME[name], tmp_path, least=2, tuner=tuner)


def _all_changes(changes: Sequence[Change], cache: Cache, folder: Path, *, least: int, **options: Any) -> None:
    cases = {one.name: lambda place, one=one: outcome(cache, one, place, **options) for one in changes}
    all_of(cases, folder, least)
