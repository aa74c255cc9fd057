"""Everything that is computed once with a host or its adapter and used again: the caches of the table, and LoRAs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

import mmattn
from mmattn.adapters import FusedCacheAdapter, InsertedAdapter, JoinedAdapter, PassageAdapter, PrefixAdapter
from mmattn.hosts import PassageCache
from mmattn.training import cached_hidden_states, cached_prompts
from tests import tiny, tiny_unets
from tests.adapters.composed import composed_hosts
from tests.computed import Ask, Cache, Subject, distance

#: Hosts of each build.
FAMILIES = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "granite", "smollm3", "cohere", "glm"),
)
IDS = tiny.text(2, 13)
PASSAGES = [[8, 9, 10, 11, 12, 70, 71, 72, 73, 74, 75], [40, 33, 12, 13, 50, 51, 52, 53, 54, 55, 56, 57, 58]]
PROMPTS = [[5, 6, 7, 8, 20, 21, 22, 23, 24, 25, 26], [50, 60, 70]]


# Hosts ---------------------------------------------------------------------------------------------------------------


def lm(
    family: str = "llama",
    lora: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    **changes: Any,
) -> Subject:
    """A frozen tiny host of the same weights for all settings.

    Args:
        family: as transformers spells `model_type`.
        lora: settings of a LoRA on it, "default", beside an idle one, "second".
        adapter: settings that its adapter is to have instead.
        changes: of its config.
    """
    host = tiny.make(family, **changes).requires_grad_(False)
    if changes:
        host.load_state_dict(tiny.make(family).state_dict())
    if lora is None:
        return Subject(host, given=adapter)
    model = peft.get_peft_model(host, lora_config(**lora))
    model.add_adapter("second", lora_config())
    fill(host)
    model.set_adapter("default")
    host.requires_grad_(False)
    return Subject(host, model.eval())


def unet(lora: dict[str, Any] | None = None) -> Subject:
    """A frozen tiny UNet; with `lora` two LoRAs are on its attention, of which "default" is active."""
    host = tiny_unets.make().requires_grad_(False)
    if lora is not None:
        for name in ("default", "second"):
            host.add_adapter(lora_config(target_modules=["to_k", "to_v"], **lora), adapter_name=name)
        fill(host)
        host.set_adapter("default")
        host.requires_grad_(False)
    return Subject(host)


def lora_config(**changes: Any) -> peft.LoraConfig:
    """A LoRA on keys, values and the feed-forward layers of a Llama."""
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj", "down_proj"]} | changes)


def fill(host: Any, seed: int = 5) -> None:
    """Fill the LoRAs that are still nothing, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(host.named_parameters())
    with torch.no_grad():
        for name, up in weights.items():
            if "lora_B" in name and not up.any():
                for weight in (up, weights[name.replace("lora_B", "lora_A")]):
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)


def _answers(family: str, change: Callable[[Subject], object] | None = None, **settings: Any) -> Tensor | None:
    """The logits of the bare host of a family with one change; None where it cannot run so."""
    try:
        subject = lm(family, **settings)
        if change is not None:
            change(subject)
        with torch.no_grad():
            logits: Tensor = subject.host(IDS).logits
        return logits if torch.isfinite(logits).all() else None
    except Exception:  # transformers judges its own config
        return None


def is_heard(family: str, change: Callable[[Subject], object] | None = None, **settings: Any) -> bool:
    """Return whether a change of a bare host, or another setting of its config, changes its logits."""
    before, after = _answers(family), _answers(family, change, **settings)
    assert before is not None
    return after is not None and after.shape == before.shape and distance(after, before) > 1e-3


# Questions -----------------------------------------------------------------------------------------------------------


def vectors(rows: int = 2, slots: int = 5) -> mmattn.Memory:
    """A random memory, the same under every default dtype."""
    generator = torch.Generator().manual_seed(1)
    return mmattn.Memory(torch.randn(rows, slots, tiny.MEMORY_DIM, generator=generator, dtype=torch.float32))


def _answer(subject: Subject, memory: Any) -> Tensor:
    if hasattr(subject.host, "conv_in"):
        return subject.model(*tiny_unets.given(b=2)[0], memory=memory).sample
    return subject.model(IDS, memory=memory).logits


def _vectors(_: Subject) -> Any:
    return vectors()


def _in_chunks(_: Subject) -> Any:
    return mmattn.Memory(vectors(slots=6).tokens, segments=torch.tensor([[0, 0, 0, 1, 1, 1]] * 2))


def _prefixes(_: Subject) -> Any:
    return [[0, 2], [1]]


def _given(subject: Subject) -> Any:
    return subject.given


def _stream(_: Subject) -> Any:
    slots = mmattn.MemoryStream(tiny.MEMORY_DIM, rows=2)
    slots.append(vectors())
    return slots


def _selected(subject: Subject) -> Any:
    cache = PassageCache(subject.model)
    return cache.select([cache.add(PASSAGES, progress=False)] * 2)


def _gathered(subject: Subject) -> Any:
    return subject.model.bank(vectors(7, 3)).gather(HITS)


Given = Callable[[Subject], Any]
HITS = torch.tensor([[1, 4], [4, 6]])


def _prepared(subject: Subject, folder: Path, stack: ExitStack, memory: Given = _vectors) -> Ask:
    return _kept(subject, folder, stack, lambda _: subject.model.prepare(memory(subject)))


def _kept(subject: Subject, folder: Path, stack: ExitStack, memory: Given) -> Ask:
    given = memory(subject)
    return lambda: _answer(subject, given)


def _in_block(subject: Subject, folder: Path, stack: ExitStack, memory: Given = _vectors) -> Ask:
    stack.enter_context(subject.model.condition(memory(subject)))
    if hasattr(subject.host, "conv_in"):
        given = tiny_unets.given(b=2)[0]
        return lambda: subject.host(*given).sample
    return lambda: subject.host(IDS).logits


def _prepared_in_block(subject: Subject, folder: Path, stack: ExitStack) -> Ask:
    return _in_block(subject, folder, stack, lambda _: subject.model.prepare(vectors()))


def _bank(subject: Subject, folder: Path, stack: ExitStack) -> Ask:
    bank = subject.model.bank(vectors(7, 3))
    return lambda: _answer(subject, bank.gather(HITS))


def _bank_file(subject: Subject, folder: Path, stack: ExitStack, mapped: bool = False) -> Ask:
    if not (file := folder / "bank").exists():
        subject.model.bank(vectors(7, 3)).save(file)
    return lambda: _answer(subject, subject.model.load_bank(file, mapped=mapped).gather(HITS))


def _after(subject: Subject, cache: PassageCache, again: int) -> Tensor:
    numbers = cache.add(PASSAGES, progress=False)
    return _answer(subject, cache.select([numbers, numbers[1:]], recomputed_tokens=again))


def _passages(subject: Subject, folder: Path, stack: ExitStack, again: int = 0, **settings: Any) -> Ask:
    cache = PassageCache(subject.model, **settings)
    return lambda: _after(subject, cache, again)


def _passage_folder(subject: Subject, folder: Path, stack: ExitStack, again: int = 0, **settings: Any) -> Ask:
    return lambda: _after(subject, PassageCache(subject.model, folder=folder / "passages", **settings), again)


def _passage_file(
    subject: Subject, folder: Path, stack: ExitStack, prefix: Any = (), again: int = 0, mapped: bool = False
) -> Ask:
    file = folder / "saved"

    def ask() -> Tensor:
        if not file.exists():
            new = PassageCache(subject.model, prefix=prefix)
            new.add(PASSAGES, progress=False)
            new.save(file)
        cache = PassageCache.load(subject.model, file, mapped=mapped)
        return _answer(subject, cache.select([[0, 1], [1]], recomputed_tokens=again))

    return ask


def _hidden_states(subject: Subject, folder: Path, stack: ExitStack) -> Ask:
    stack.enter_context(cached_hidden_states(subject.model, folder))
    return lambda: _answer(subject, vectors())


def _hidden_state_folder(subject: Subject, folder: Path, stack: ExitStack) -> Ask:
    def ask() -> Tensor:
        with cached_hidden_states(subject.model, folder):
            return _answer(subject, vectors())

    return ask


def _prompts(subject: Subject, folder: Path, stack: ExitStack) -> Ask:
    prompts = stack.enter_context(cached_prompts(subject.model, PROMPTS))
    return lambda: subject.model(**prompts[[1, 0]], memory=vectors()).logits


def _prompt_arguments(subject: Subject, folder: Path, stack: ExitStack) -> Ask:
    prompts = stack.enter_context(cached_prompts(subject.model, PROMPTS))
    arguments = [prompts[[1, 0]] for _ in range(4)]
    return lambda: subject.model(**arguments.pop(), memory=vectors()).logits


@contextmanager
def _opened(subject: Subject, folder: Path, ask: Callable[..., Ask], **how: Any) -> Iterator[Ask]:
    with ExitStack() as stack:
        yield ask(subject, folder, stack, **how)


# The table -----------------------------------------------------------------------------------------------------------

_GATED: dict[str, Any] = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8}
_UPPER = mmattn.GatedAdapter(**_GATED | {"layers": (2,)})
_SOURCES: dict[str, Any] = {"layers": (0, 2), "augmenting_layers": composed_hosts.AUGMENTING_LAYERS}
GATED = mmattn.GatedAdapter(**_GATED)
_RESAMPLED = mmattn.GatedAdapter(**_GATED, resampler=mmattn.Resampler(num_latents=3, depth=1, num_heads=2, head_dim=5))
_CHUNKED = mmattn.ChunkedAdapter(**_GATED, chunk_size=3)
_JOINED = JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2))
_INSERTED, _UNGATED = InsertedAdapter(tiny.MEMORY_DIM), InsertedAdapter(tiny.MEMORY_DIM, gate=False)
_PREFIX = PrefixAdapter(3, num_prefixes=3)
_DECOUPLED = tiny_unets.adapter()
_COMPOSED = mmattn.ComposedAdapter(**_SOURCES, memory_dim=composed_hosts.DIM, num_heads=2, head_dim=6)
_FUSED = FusedCacheAdapter(**_SOURCES, memory_dim=24, hidden_dim=11)
_PASSAGES = PassageAdapter()
_BEGIN = [60, 61, 3]


def _adapt(subject: Subject, settings: Any) -> None:
    """Attach an adapter and open its gates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        subject.model = mmattn.attach(subject.host, replace(settings, **(subject.given or {})))
    tiny.open_gates(subject.model).adapters.requires_grad_(False)
    if settings in (_COMPOSED, _FUSED):
        subject.given = composed_hosts.along()
    if settings is _FUSED:
        subject.given = subject.given.prefill(IDS)


def _adapt_core(subject: Subject, settings: Any) -> None:
    _adapt(subject, settings)
    subject.model.use_core()


def _cache(name: str, settings: Any, ask: Callable[..., Ask], *, follows: str = "adapter", **how: Any) -> Cache:
    make, adapt = (unet if settings is _DECOUPLED else lm), partial(_adapt, settings=settings)
    if "core" in name:
        adapt = partial(_adapt_core, settings=settings)
    is_file = "folder" in name or "file" in name
    return Cache(name, make, adapt, partial(_opened, ask=ask, **how), frozenset(follows.split()), is_file)


CACHES = [
    _cache("prepared gated", GATED, _prepared),
    _cache("prepared resampled", _RESAMPLED, _prepared),
    _cache("prepared chunked", _CHUNKED, _prepared, memory=_in_chunks),
    _cache("prepared joined", _JOINED, _prepared),
    _cache("prepared inserted", _INSERTED, _prepared, follows="adapter host"),
    _cache("prepared inserted, no gate", _UNGATED, _prepared, follows="adapter host"),
    _cache("prepared prefix", _PREFIX, _prepared, memory=_prefixes),
    _cache("prepared decoupled", _DECOUPLED, _prepared),
    _cache("prepared fused cache", _FUSED, _prepared, memory=_given),
    _cache("block gated", GATED, _in_block),
    _cache("block prepared gated", GATED, _prepared_in_block),
    _cache("block chunked", _CHUNKED, _in_block, memory=_in_chunks),
    _cache("block joined", _JOINED, _in_block),
    _cache("block inserted", _INSERTED, _in_block, follows="adapter host"),
    _cache("block inserted, no gate", _UNGATED, _in_block, follows="adapter host"),
    _cache("block prefix", _PREFIX, _in_block, memory=_prefixes),
    _cache("block decoupled", _DECOUPLED, _in_block),
    _cache("block decoupled, core", _DECOUPLED, _in_block, follows="adapter host"),
    _cache("block composed", _COMPOSED, _in_block, memory=_given),
    _cache("block fused cache", _FUSED, _in_block, memory=_given),
    _cache("stream", GATED, _kept, memory=_stream),
    _cache("bank", GATED, _bank),
    _cache("bank, gathered", GATED, _kept, memory=_gathered),
    _cache("bank, resampled", _RESAMPLED, _bank),
    _cache("bank file", GATED, _bank_file),
    _cache("bank file, mapped", GATED, _bank_file, mapped=True),
    _cache("bank file, resampled", _RESAMPLED, _bank_file),
    _cache("passages", _PASSAGES, _passages, follows="host"),
    _cache("passages, prefix", _PASSAGES, _passages, follows="host", prefix=_BEGIN),
    _cache("passages, recomputed", _PASSAGES, _passages, follows="host", again=2),
    _cache("passages, selected", _PASSAGES, _kept, follows="host", memory=_selected),
    _cache("passages, block", _PASSAGES, _in_block, follows="host", memory=_selected),
    _cache("passage folder", _PASSAGES, _passage_folder, follows="host"),
    _cache("passage folder, prefix", _PASSAGES, _passage_folder, follows="host", prefix=_BEGIN),
    _cache("passage folder, recomputed", _PASSAGES, _passage_folder, follows="host", again=2),
    _cache("passage folder, nothing in memory", _PASSAGES, _passage_folder, follows="host", max_bytes=0),
    _cache("passage file", _PASSAGES, _passage_file, follows="host"),
    _cache("passage file, mapped", _PASSAGES, _passage_file, follows="host", mapped=True),
    _cache("passage file, prefix, recomputed", _PASSAGES, _passage_file, follows="host", prefix=_BEGIN, again=2),
    _cache("hidden states", _UPPER, _hidden_states, follows="host"),
    _cache("hidden state folder", _UPPER, _hidden_state_folder, follows="host"),
    _cache("prompts", _UPPER, _prompts, follows="host"),
    _cache("prompt arguments", _UPPER, _prompt_arguments, follows="host"),
]
BY_NAME = {cache.name: cache for cache in CACHES}
