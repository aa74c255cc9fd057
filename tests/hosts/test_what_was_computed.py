"""What was computed before is used only where it would be computed now: every cache, every change, one at a time."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import MmattnError
from mmattn.hosts import PassageCache
from mmattn.training import cached_hidden_states, cached_prompts
from tests import tiny
from tests.computed import CLOSE, Cache, Change, NotAPair, Subject, distance, outcome, outcome_of_files
from tests.computed_changes import config_changes, setting_changes
from tests.hosts.host_caches import BY_NAME, CACHES, HITS, IDS, PASSAGES, PROMPTS, TUNERS, lm, put_on, unet, vectors
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
#: Hosts of each build, none of which has what another's config sets.
FAMILIES = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "granite", "smollm3", "cohere", "glm"),
)
#: Caches that follow the host, one of each kind.
FOLLOWING = (
    *("prepared inserted", "block inserted, no gate", "passages", "passages, block", "passage folder"),
    *("passage file", "hidden states", "hidden state folder", "prompts"),
)


def changes_of(cache: Cache) -> Iterator[tuple[Change, dict[str, Any]]]:
    """Yield the changes that can meet a cache, with the options of its host."""
    is_unet = cache.make is unet
    plain = [*HOST, *CALL, *([] if is_unet else OF_LM)]
    if "adapter" in cache.follows:
        plain += [*ADAPTER, ADAPTER_AND_BACK]
    if cache.name.startswith(("block", "stream")):
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


def _folders(tmp_path: Path) -> Iterator[Path]:
    for number in itertools.count():
        (folder := tmp_path / str(number)).mkdir()
        yield folder


def _all(cases: Iterator[tuple[str, Callable[[Path], object]]], tmp_path: Path, least: int) -> None:
    """Run many small cases; all faults are told together, and cases that change no answer do not count."""
    faults, count = [], 0
    for (name, run), folder in zip(cases, _folders(tmp_path)):
        try:
            run(folder)
            count += 1
        except NotAPair:
            pass
        except AssertionError as fault:
            faults.append(f"{name}: {str(fault).splitlines()[0]}")
        shutil.rmtree(folder)
    assert not faults, "\n".join(faults)
    assert count >= least


@pytest.mark.parametrize(("cache", "change", "options"), cases())
def test_after_a_change_a_cache_answers_as_if_all_was_computed_anew_or_raises(
    cache: Cache, change: Change, options: dict[str, Any], tmp_path: Path
) -> None:
    """Invariant 7001."""
    outcome(cache, change, tmp_path, **options)


def _answers(family: str, change: Callable[[Subject], object] | None = None, **settings: Any) -> torch.Tensor | None:
    """The logits of the bare host of a family with one change; None where it cannot run so."""
    try:
        subject = lm(family, **settings)
        if change is not None:
            change(subject)
        with torch.no_grad():
            logits: torch.Tensor = subject.host(IDS).logits
        return logits if torch.isfinite(logits).all() else None
    except Exception:  # transformers judges its own config
        return None


def _is_heard(family: str, change: Callable[[Subject], object] | None = None, **settings: Any) -> bool:
    before, after = _answers(family), _answers(family, change, **settings)
    assert before is not None
    return after is not None and after.shape == before.shape and distance(after, before) > 1e-3


def _by_family(caches: tuple[str, ...], quick: str) -> list[Any]:
    """Pairs of a family and a cache: every family with the first cache, and Llama with all."""
    pairs = [*((family, caches[0]) for family in FAMILIES), *(("llama", cache) for cache in caches[1:])]
    pairs = [one for one in pairs if one != ("gpt2", "prompts")]
    return [
        pytest.param(family, BY_NAME[cache], id=f"{family}-{cache}", marks=() if family == quick else pytest.mark.slow)
        for family, cache in pairs
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "cache"), _by_family(("passages", *(one for one in FOLLOWING if one != "passages")), "")
)
def test_each_setting_of_the_modules_of_a_host_is_noticed(family: str, cache: Cache, tmp_path: Path) -> None:
    """Invariant 7001: numbers, switches, activations and buffers, changed in place, and fields of the config."""
    changes = [one for one in setting_changes(lm(family).host) if _is_heard(family, one.apply)]
    _all(((one.name, lambda folder, one=one: outcome(cache, one, folder, family=family)) for one in changes), tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepared resampled", "prepared inserted", "bank, resampled", "block decoupled"])
def test_each_setting_of_the_modules_of_an_adapter_is_noticed(name: str, tmp_path: Path) -> None:
    """Invariant 7001."""
    cache = BY_NAME[name]
    cache.adapt(subject := cache.make())
    changes = setting_changes(subject.model.adapters, lambda one: one.model.adapters)
    _all(((one.name, lambda folder, one=one: outcome(cache, one, folder)) for one in changes), tmp_path, 1)


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        pytest.param(family, BY_NAME[name], id=f"{family}-{name}", marks=() if (family, name) == quick else pytest.mark.slow)
        for quick in [("llama", "passage folder")]
        for name in ("passage folder", "passage file", "hidden state folder")
        for family in FAMILIES
    ],
)
def test_a_host_of_equal_weights_and_another_config_takes_up_no_files(
    family: str, cache: Cache, tmp_path: Path
) -> None:
    """Invariant 7002: every field of the config that changes logits."""
    settings = [one for one in config_changes(lm(family).host.config) if _is_heard(family, **one)]
    first = {"family": family}
    _all(
        ((str(one), lambda folder, one=one: outcome_of_files(cache, folder, first, first | one)) for one in settings),
        tmp_path,
        3,
    )


FILES = [cache for cache in CACHES if cache.is_file]
LORA_SETTINGS: list[dict[str, Any]] = [
    {"lora_alpha": 20}, {"use_rslora": True}, {"use_dora": True}, {"layers_to_transform": [0]},
    {"alpha_pattern": {"k_proj": 3}}, {"target_modules": ["k_proj"]},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("settings", LORA_SETTINGS, ids=str)
@pytest.mark.parametrize("cache", FILES, ids=lambda cache: cache.name)
def test_a_host_with_a_lora_of_other_settings_takes_up_no_files(
    cache: Cache, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Invariant 7002: with equal weights where it has as many."""
    outcome_of_files(cache, tmp_path, {"lora": {}}, {"lora": settings})


@pytest.mark.slow
def test_an_adapter_of_equal_weights_and_other_settings_takes_up_no_bank(tmp_path: Path) -> None:
    """Invariant 7002: five heads of width 2 have as many weights as two of width 5."""
    other = {"resampler": mmattn.Resampler(num_latents=3, depth=1, num_heads=5, head_dim=2)}
    outcome_of_files(BY_NAME["bank file, resampled"], tmp_path, {}, {"adapter": other})


@pytest.mark.slow
@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("name", ["prepared inserted", "passages", "passage folder", "passage file", "hidden states", "prompts"])
def test_each_kind_of_adapter_of_peft_is_noticed(name: str, tuner: str, tmp_path: Path) -> None:
    """Invariant 7001: put on, switched off, its weights changed, taken off."""
    cache = BY_NAME[name]
    added = Change("put on", lambda subject: put_on(subject.host, tuner) and None)
    cases = [("put on", lambda folder: outcome(cache, added, folder))]
    cases += [(one.name, lambda folder, one=one: outcome(cache, one, folder, tuner=tuner)) for one in OF_TUNER]
    _all(iter(cases), tmp_path, 2)
