"""What was computed before, in memory and in files, is used only where it is what would be computed now."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import MmattnError
from tests.computed import Cache, Change, all_of, distance, outcome, outcome_of_files
from tests.computed_changes import config_changes, setting_changes
from tests.hosts.host_caches import BY_NAME, CACHES, FAMILIES, is_heard, lm, unet
from tests.hosts.host_changes import (
    ADAPTER,
    ADAPTER_AND_BACK,
    ADAPTER_UNCOUNTED,
    CALL,
    DIFFUSERS,
    HOST,
    HOST_UNCOUNTED,
    IN_BLOCK,
    LORA,
    OF_LM,
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


def _all_changes(changes: Sequence[Change], cache: Cache, folder: Path, *, least: int, **options: Any) -> None:
    cases = {one.name: lambda place, one=one: outcome(cache, one, place, **options) for one in changes}
    all_of(cases, folder, least)


# Files of what was computed before: those of another host or text are not taken, and one's own are found again


FILES = [cache for cache in CACHES if cache.is_file]
_FOLLOWING = ("passage folder", "passage file", "hidden state folder")
LORA_SETTINGS: list[dict[str, Any]] = [
    {"lora_alpha": 20}, {"use_rslora": True}, {"use_dora": True}, {"layers_to_transform": [0]},
    {"alpha_pattern": {"k_proj": 3}}, {"target_modules": ["k_proj"]},
]  # fmt: skip


def _quick(family: str, name: str) -> Any:
    marks = () if (family, name) == ("llama", "passage folder") else pytest.mark.slow
    return pytest.param(family, BY_NAME[name], id=f"{family}-{name}", marks=marks)


@pytest.mark.parametrize(("family", "cache"), [_quick(*pair) for pair in itertools.product(FAMILIES, _FOLLOWING)])
def test_a_host_of_equal_weights_and_another_config_takes_up_no_files(
    family: str, cache: Cache, tmp_path: Path
) -> None:
    """Invariant 198: every field of the config that changes logits."""
    first = {"family": family}
    settings = [one for one in config_changes(lm(family).host.config) if is_heard(family, **one)]
    cases = {str(one): lambda folder, one=one: outcome_of_files(cache, folder, first, first | one) for one in settings}
    all_of(cases, tmp_path, least=3)


@pytest.mark.slow
@pytest.mark.parametrize("settings", LORA_SETTINGS, ids=str)
@pytest.mark.parametrize("cache", FILES, ids=lambda cache: cache.name)
def test_a_host_with_a_lora_of_other_settings_takes_up_no_files(
    cache: Cache, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Invariant 198: of equal weights, where it has as many."""
    outcome_of_files(cache, tmp_path, {"lora": {}}, {"lora": settings})


def test_an_adapter_of_equal_weights_and_other_settings_takes_up_no_bank(tmp_path: Path) -> None:
    """Invariant 198: five heads of width 2 have as many weights as two of width 5."""
    other = {"resampler": mmattn.Resampler(num_latents=3, depth=1, num_heads=5, head_dim=2)}
    outcome_of_files(BY_NAME["bank file, resampled"], tmp_path, {}, {"adapter": other})


@pytest.mark.parametrize("name", ["passage folder", "passage folder, prefix", "hidden state folder"])
def test_files_under_the_names_of_others_are_not_taken_for_them(name: str, tmp_path: Path) -> None:
    """Invariant 199: as a copy or a rename gone wrong leaves them."""
    cache = BY_NAME[name]
    cache.adapt(subject := cache.make())
    with torch.no_grad(), cache.open(subject, tmp_path) as ask:
        want = ask()
        files = sorted(tmp_path.rglob("*.safetensors"))
        assert len(files) == 2
        one, other = (file.read_bytes() for file in files)
        for contents in ((one, one), (other, other), (other, one)):
            for file, content in zip(files, contents, strict=True):
                file.write_bytes(content)
            with suppress(MmattnError):
                assert distance(ask(), want) < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *itertools.product(("passage folder", "passage file", "hidden state folder"), HOST_UNCOUNTED),
        *itertools.product(("bank file",), ADAPTER_UNCOUNTED),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_files_follow_writes_that_torch_does_not_count(name: str, change: Change, tmp_path: Path) -> None:
    """Invariant 198: such as an average of weights through `.data`, seen where a file is opened."""
    outcome(BY_NAME[name], change, tmp_path)


@contextmanager
def _reading(host: Any) -> Iterator[list[int]]:
    """A list of the lengths of what the first layer of a host reads."""
    lengths: list[int] = []
    with host.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1])):
        yield lengths


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["passage folder", "passage folder, prefix", "passage file", "hidden state folder"])
def test_what_was_written_under_autocast_is_found_under_autocast(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Invariant 200: and answers bit for bit as when it was written; only the text is read by the host."""
    cache = BY_NAME[name]
    answers = []
    for time in range(3):
        cache.adapt(subject := cache.make())
        with torch.no_grad(), torch.autocast("cpu", dtype), cache.open(subject, tmp_path) as ask:
            with _reading(subject.host) as read:
                answers.append(ask())
            assert torch.equal(answers[-1], answers[0])
            if time == 0:
                first = len(read)
            else:
                assert len(read) < first
