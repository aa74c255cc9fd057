"""Our own kinds of adapters and hosts, through the suites that every kind must pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
)

import mmattn
from mmattn.adapters import FusedCacheAdapter, JoinedAdapter, PrefixAdapter
from mmattn.adapters.composed import AugmentedPrompt
from mmattn.adapters.decoupled import DecoupledLayout, TimedResampler
from mmattn.testing import Case, HostCase, adapter_checks, host_checks
from mmattn.testing.adapter_calls import check_generation, check_padded_prompts, check_requests
from mmattn.testing.case import Check
from tests import contracts, tiny, tiny_transformers, tiny_unets
from tests.adapters.composed import composed_hosts as composing
from tests.families.building import tiny_model

SMALL: dict[str, Any] = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 6}
FUSED: dict[str, Any] = {"memory_dim": 24, "layers": (0, 2), "augmenting_layers": (3, 1), "hidden_dim": 11}
CALM = SMALL | {"memory_dim": composing.DIM, "augmenting_layers": composing.AUGMENTING_LAYERS}


def language(family: str) -> Callable[[], Any]:
    """Makes a tiny language model."""
    return functools.partial(tiny.make, family)


def family(name: str, auto: Any) -> Callable[[], Any]:
    """Makes a tiny model of any class."""
    return functools.partial(tiny_model, name, auto)


def unet(kind: str) -> Callable[[], Any]:
    """Makes a tiny UNet."""
    return functools.partial(tiny_unets.make, kind)


def transformer(name: str) -> Callable[[], Any]:
    """Makes a tiny diffusion transformer."""
    return functools.partial(tiny_transformers.make, name)


def reading_along(generator: torch.Generator, rows: int) -> mmattn.AugmentingModel:
    """Another language model for the same text."""
    return composing.along(seed=int(torch.randint(1000, (), generator=generator)))


def what_another_read(generator: torch.Generator, rows: int) -> AugmentedPrompt:
    """What another language model has cached of the first four tokens of each row, of any text."""
    states = tuple(torch.randn(rows, 4, 24, generator=generator) for _ in range(4))
    return AugmentedPrompt(states, torch.ones(rows, 4, dtype=torch.bool))


def a_prefix_for_each(generator: torch.Generator, rows: int) -> torch.Tensor:
    """Every row has a prefix, all of them are used, and another seed gives each row another one."""
    return (torch.arange(rows) + generator.initial_seed()) % 3


# Adapters, hosts, and what is not usual about their memories.
ADAPTERS: dict[str, Callable[[], Case]] = {
    "gated, llama": lambda: Case(mmattn.GatedAdapter(**SMALL), language("llama")),
    "gated with scores and a null slot before bloom": lambda: Case(
        mmattn.GatedAdapter(**SMALL, position="before", score_bias=True, null_slot=True, gate="head"),
        language("bloom"),
    ),
    "gated, mixtral": lambda: Case(mmattn.GatedAdapter(**SMALL, gate="channel"), language("mixtral")),
    "gated, latest image, gptj": lambda: Case(
        mmattn.GatedAdapter(**SMALL, visible_segments="latest"), language("gptj")
    ),
    "gated with a resampler, gemma2": lambda: Case(
        mmattn.GatedAdapter(**SMALL, resampler=mmattn.Resampler(num_latents=3, depth=1, num_heads=1, head_dim=4)),
        language("gemma2"),
    ),
    "chunked, llama": lambda: Case(mmattn.ChunkedAdapter(**SMALL, chunk_size=3), language("llama")),
    "chunked, bloom": lambda: Case(mmattn.ChunkedAdapter(**SMALL, chunk_size=3), language("bloom")),
    "composed, llama": lambda: Case(mmattn.ComposedAdapter(**CALM), language("llama"), reading_along),
    "composed, gptj": lambda: Case(mmattn.ComposedAdapter(**CALM, own_place=True), language("gptj"), reading_along),
    "prefix, llama": lambda: Case(PrefixAdapter(5, num_prefixes=3), language("llama"), a_prefix_for_each),
    "prefix, gpt2": lambda: Case(PrefixAdapter(4, num_prefixes=3), language("gpt2"), a_prefix_for_each),
    "joined, llama": lambda: Case(JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2)), language("llama")),
    "joined with a length norm, gemma2": lambda: Case(
        JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2), gate="head", length_norm=5.0), language("gemma2")
    ),
    "fused cache, mistral": lambda: Case(FusedCacheAdapter(**FUSED), language("mistral"), what_another_read),
    "fused cache by head, gpt2": lambda: Case(
        FusedCacheAdapter(**FUSED, gate="head"), language("gpt2"), what_another_read
    ),
    "gated, t5": lambda: Case(mmattn.GatedAdapter(**SMALL), family("t5", AutoModelForSeq2SeqLM)),
    "gated, bart, in the encoder": lambda: Case(
        mmattn.GatedAdapter(**SMALL, where="encoder"), family("bart", AutoModelForSeq2SeqLM)
    ),
    "gated, modernbert": lambda: Case(
        mmattn.GatedAdapter(**SMALL), family("modernbert", AutoModelForSequenceClassification)
    ),
    "inserted, llama": lambda: Case(mmattn.adapters.InsertedAdapter(tiny.MEMORY_DIM), language("llama")),
    "inserted without a gate, gpt2": lambda: Case(
        mmattn.adapters.InsertedAdapter(
            tiny.MEMORY_DIM,
            projection="linear",
            gate=False,
            resampler=mmattn.Resampler(num_latents=3, depth=1, num_heads=1, head_dim=4),
        ),
        language("gpt2"),
    ),
    "decoupled, unet": lambda: Case(mmattn.DecoupledAdapter(tiny.MEMORY_DIM), unet("stable")),
    "decoupled with a projection, sdxl": lambda: Case(
        mmattn.DecoupledAdapter(tiny.MEMORY_DIM, tokens=2, blocks=("up",)), unet("sdxl")
    ),
    "decoupled, sd3": lambda: Case(mmattn.DecoupledAdapter(tiny.MEMORY_DIM), transformer("SD3Transformer2DModel")),
    "decoupled after blocks, flux": lambda: Case(
        mmattn.DecoupledAdapter(tiny.MEMORY_DIM, tokens=2, layout=DecoupledLayout(10, bias=True, added_to="block")),
        transformer("FluxTransformer2DModel"),
    ),
    "joint decoupled, sd3": lambda: Case(
        mmattn.adapters.JointDecoupledAdapter(tiny.MEMORY_DIM, resampler=TimedResampler(3, 1, 16, 2, 8, 2, 8)),
        transformer("SD3Transformer2DModel"),
    ),
}

ENCODER = (
    mmattn.GatedAdapter(**SMALL, where="encoder"),
    mmattn.GatedAdapter(**SMALL, where="encoder", position="before"),
)
BOTH = (mmattn.GatedAdapter(**SMALL), mmattn.GatedAdapter(**SMALL, position="before"))
ALL = (*BOTH, mmattn.adapters.JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2)))
HOSTS: dict[str, Callable[[], HostCase]] = {
    "llama": lambda: HostCase(language("llama"), ALL),
    "bloom": lambda: HostCase(language("bloom"), BOTH),
    "mixtral": lambda: HostCase(language("mixtral"), ALL),
    "opt": lambda: HostCase(language("opt"), ALL),
    "t5": lambda: HostCase(family("t5", AutoModelForSeq2SeqLM), BOTH),
    "t5, in the encoder": lambda: HostCase(family("t5", AutoModelForSeq2SeqLM), ENCODER),
    "whisper": lambda: HostCase(family("whisper", AutoModelForSpeechSeq2Seq), BOTH),
    "bert": lambda: HostCase(family("bert", AutoModelForSequenceClassification), BOTH),
    "vit": lambda: HostCase(family("vit", AutoModelForImageClassification), BOTH),
    "unet": lambda: HostCase(unet("stable"), [mmattn.DecoupledAdapter(tiny.MEMORY_DIM)]),
    "wan": lambda: HostCase(transformer("WanTransformer3DModel"), [mmattn.DecoupledAdapter(tiny.MEMORY_DIM)]),
    "flux": lambda: HostCase(transformer("FluxTransformer2DModel"), [mmattn.DecoupledAdapter(tiny.MEMORY_DIM)]),
    "k unet": lambda: HostCase(unet("k"), [mmattn.DecoupledAdapter(tiny.MEMORY_DIM)]),
}


@functools.cache
def case_of(name: str) -> Case:
    """One case for all checks: what they ask with is made once, what they change is made anew."""
    return {**ADAPTERS, **HOSTS}[name]()


# An augmenting model is no memory of slots, and belongs to one call.
PREFIXES = ("prefix, llama", "prefix, gpt2")
FUSED_CACHES = ("fused cache, mistral", "fused cache by head, gpt2")
NO_SLOTS = ("composed, llama", "composed, gptj", *PREFIXES, *FUSED_CACHES)
# Their slots are attended to among the tokens of the host, in their order.
INSERTED = ("inserted, llama", "inserted without a gate, gpt2")
NO_TEXT = ("gated, t5", "gated, bart, in the encoder", "gated, modernbert")
DENOISED = (
    "decoupled, unet",
    "decoupled with a projection, sdxl",
    "decoupled, sd3",
    "decoupled after blocks, flux",
    "joint decoupled, sd3",
)
SLOW = (
    "mixtral",
    "opt",
    "k unet",
    "whisper",
    "vit",
    "t5, in the encoder",
    "gated, mixtral",
    "chunked, bloom",
    "composed, gptj",
    "prefix, gpt2",
    "fused cache by head, gpt2",
    "decoupled with a projection, sdxl",
    "gated, bart, in the encoder",
    "gated, modernbert",
    "decoupled after blocks, flux",
    "wan",
    "flux",
)
DOES_NOT_APPLY = {
    "check_rows_that_see_nothing": NO_SLOTS,
    "check_rows_that_see_nothing_in_training": NO_SLOTS,
    "check_masked_slots_are_nothing": NO_SLOTS,
    "check_order_of_slots": (*NO_SLOTS, *INSERTED),
    # A resampler and a null slot count slots.
    "check_slots_twice": (
        *NO_SLOTS,
        "joined, llama",
        *INSERTED,
        "gated with scores and a null slot before bloom",
        "gated with a resampler, gemma2",
        "joint decoupled, sd3",
    ),
    "check_batch_sizes_match": NO_SLOTS,
    "check_bad_memories_are_refused": NO_SLOTS,
    "check_prepared_is_the_same": ("composed, llama", "composed, gptj"),
    # A prefix is there to be seen, and so are tokens without a gate.
    "check_starts_as_identity": (*PREFIXES, "inserted without a gate, gpt2"),
    "check_adapters_stack": (*PREFIXES, "inserted without a gate, gpt2"),
    "check_edits_of_memory": NO_SLOTS,
    "check_gradients_reach_the_memory": NO_SLOTS,
    "check_doctor": ("composed, llama", "composed, gptj"),
    # UNets and encoders predict no tokens, encoder–decoders read another text than they write.
    "check_generation": (*NO_TEXT, *DENOISED),
    "check_padded_prompts": (*NO_TEXT, *DENOISED),
    # They must know the text of a request, or the host takes none.
    "check_requests": (
        *NO_TEXT,
        *DENOISED,
        *FUSED_CACHES,
        "gated, latest image, gptj",
        "gated with scores and a null slot before bloom",
        "chunked, llama",
        "chunked, bloom",
        "composed, llama",
        "composed, gptj",
    ),
    # They hand their memory to no attention that others could listen to.
    # Gemma 2 bounds the scores of its own attention.
    "check_record": ("joint decoupled, sd3", "joined with a length norm, gemma2", *FUSED_CACHES),
    # Decoupled adapters name no layers.
    "check_layers_that_are_not_there": ("unet", "k unet", "wan", "flux"),
}


@pytest.mark.usefixtures("nothing_deprecated")
@pytest.mark.parametrize(("check", "name"), contracts.applying(adapter_checks(), ADAPTERS, DOES_NOT_APPLY, SLOW))
def test_adapters(check: Check, name: str) -> None:
    """Invariants 23, 26, 27, 28, 31, 32, 34, 45, 51, 52, 54, 60, 177."""
    contracts.holds(check, case_of(name))


#: What differs between families: sliding windows, logits with a cap, learned positions, positions in a head's half.
FAMILIES = ("gpt2", "gemma3_text", "mistral", "opt", "cohere")
IN_THE_HOSTS_ATTENTION: dict[str, Callable[[str], Case]] = {
    "joined": lambda name: Case(JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2)), language(name)),
    "inserted": lambda name: Case(mmattn.adapters.InsertedAdapter(tiny.MEMORY_DIM), language(name)),
    "prefix": lambda name: Case(PrefixAdapter(5, num_prefixes=3), language(name), a_prefix_for_each),
    "fused cache": lambda name: Case(FusedCacheAdapter(**FUSED), language(name), what_another_read),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_THE_HOSTS_ATTENTION)
@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_generate(name: str, kind: str) -> None:
    """The kinds that act in the host's own attention, which differs from family to family."""
    case = IN_THE_HOSTS_ATTENTION[kind](name)
    contracts.holds(check_generation, case)
    contracts.holds(check_padded_prompts, case)
    if kind != "fused cache" and name != "opt":  # OPT of transformers asks a paged cache for its length, which it lacks
        contracts.holds(check_requests, case)


@pytest.mark.parametrize(("check", "name"), contracts.applying(host_checks(), HOSTS, DOES_NOT_APPLY, SLOW))
def test_hosts(check: Check, name: str) -> None:
    """Invariants 29, 33."""
    contracts.holds(check, case_of(name))


@pytest.mark.parametrize(("check", "name"), contracts.not_applying([*adapter_checks(), *host_checks()], DOES_NOT_APPLY))
def test_what_does_not_apply_says_so(check: Check, name: str) -> None:
    with pytest.raises(SkipTest):
        check(case_of(name))
