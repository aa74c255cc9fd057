"""Everything that mmattn computes once and uses again: each cache with an adapted host and a question to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import mmattn
from mmattn.adapters import (
    FusedCacheAdapter,
    InsertedAdapter,
    JoinedAdapter,
    PassageAdapter,
    PrefixAdapter,
)
from mmattn.hosts import PassageCache
from mmattn.training import cached_hidden_states, cached_prompts
from tests import tiny, tiny_unets
from tests.adapters.chunked import chunks
from tests.adapters.composed import composed_hosts

Ask = Callable[[], Tensor]
IDS = tiny.text(2, 13)
PASSAGES = [[8, 9, 10, 11, 12, 70, 71, 72, 73, 74, 75], [40, 33, 12, 13, 50, 51, 52, 53, 54, 55, 56, 57, 58]]
PREFIX = [60, 61, 3]


@dataclass
class Subject:
    """A host, before or after it was adapted.

    Attributes:
        host: what adapters are attached to.
        peft: the peft model around it, where a LoRA is on it.
        model: the adapted model; None before.
        augmenting: a second language model, for adapters that read its states or its cache.
        prompt: what it has read.
    """

    host: Any
    peft: Any = None
    model: Any = None
    augmenting: Any = None
    prompt: Any = None


@dataclass(frozen=True)
class Cache:
    """A cache.

    Attributes:
        name: of the case.
        settings: of the adapter.
        open: for an adapted model and a folder yields a question, answered from what was computed before.
        follows: what its content is computed with: "adapter", "host".
        host: "lm" or "unet".
        is_file: the folder may be handed to another process.
    """

    name: str
    settings: Any
    open: Callable[[Subject, Path], AbstractContextManager[Ask]]
    follows: frozenset[str]
    host: str = "lm"
    is_file: bool = False


def make_host(kind: str = "lm", family: str = "llama", lora: bool = False, **changes: Any) -> Subject:
    """A frozen tiny host; with `lora` two LoRAs are on it, of which "default" is active."""
    if kind == "unet":
        host = tiny_unets.make().requires_grad_(False)
        if lora:
            add_lora(host, "default", 5)
            add_lora(host, "second", 6)
            host.set_adapter("default")
            host.requires_grad_(False)
        return Subject(host)
    host = tiny.make(family, **changes).requires_grad_(False)
    if not lora:
        return Subject(host)
    peft = get_peft_model(host, lora_config())
    peft.add_adapter("second", lora_config())
    fill_lora(host)
    peft.set_adapter("default")
    host.requires_grad_(False)
    return Subject(host, peft.eval())


def lora_config(**changes: Any) -> LoraConfig:
    """A LoRA on keys, values and the feed-forward layers of a Llama."""
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj", "down_proj"]} | changes)


def add_lora(unet: Any, name: str, seed: int) -> None:
    unet.add_adapter(LoraConfig(r=3, lora_alpha=5, target_modules=["to_k", "to_v"]), adapter_name=name)
    fill_lora(unet, seed)


def fill_lora(host: Any, seed: int = 5) -> None:
    """Fill the LoRAs that are still nothing."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(host.named_parameters())
    with torch.no_grad():
        for name, up in weights.items():
            if "lora_B" in name and not up.any():
                for weight in (up, weights[name.replace("lora_B", "lora_A")]):
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)


def attach(subject: Subject, cache: Cache) -> Subject:
    """Attach the adapter of a cache, its gates open; `subject` as it is then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        subject.model = mmattn.attach(subject.host, cache.settings)
    tiny.open_gates(subject.model)
    subject.model.adapters.requires_grad_(False)
    if cache.name.startswith(("composed", "fused")):
        subject.augmenting = composed_hosts.along()
        subject.prompt = subject.augmenting.prefill(IDS)
    return subject


# Questions -----------------------------------------------------------------------------------------------------------


def logits(subject: Subject, memory: Any, **more: Any) -> Tensor:
    if isinstance(subject.model, mmattn.hosts.AdaptedModel) and hasattr(subject.host, "conv_in"):
        return subject.model(*tiny_unets.given(b=2)[0], memory=memory, **more).sample
    return subject.model(IDS, memory=memory, **more).logits


def vectors(rows: int = 2, slots: int = 5) -> mmattn.Memory:
    return mmattn.Memory(torch.randn(rows, slots, tiny.MEMORY_DIM, generator=_seeded(1), dtype=torch.float32))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def prepared(subject: Subject, folder: Path, make: Callable[[Subject], Any] = lambda _: vectors()) -> Iterator[Ask]:
    memory = subject.model.prepare(make(subject))
    yield lambda: logits(subject, memory)


@contextmanager
def in_block(subject: Subject, folder: Path, make: Callable[[Subject], Any] = lambda _: vectors()) -> Iterator[Ask]:
    with subject.model.condition(make(subject)):
        if hasattr(subject.host, "conv_in"):
            yield lambda: subject.host(*tiny_unets.given(b=2)[0]).sample
        else:
            yield lambda: subject.host(IDS).logits


@contextmanager
def prepared_in_block(subject: Subject, folder: Path) -> Iterator[Ask]:
    with in_block(subject, folder, lambda _: subject.model.prepare(vectors())) as ask:
        yield ask


@contextmanager
def stream(subject: Subject, folder: Path) -> Iterator[Ask]:
    slots = mmattn.MemoryStream(tiny.MEMORY_DIM, rows=2)
    slots.append(vectors())
    yield lambda: logits(subject, slots)


@contextmanager
def bank(subject: Subject, folder: Path) -> Iterator[Ask]:
    pages = subject.model.bank(vectors(7, 3))
    yield lambda: logits(subject, pages.gather(torch.tensor([[1, 4], [4, 6]])))


@contextmanager
def gathered(subject: Subject, folder: Path) -> Iterator[Ask]:
    hits = subject.model.bank(vectors(7, 3)).gather(torch.tensor([[1, 4], [4, 6]]))
    yield lambda: logits(subject, hits)


@contextmanager
def bank_file(subject: Subject, folder: Path, mapped: bool = False) -> Iterator[Ask]:
    file = folder / "bank"
    if not file.exists():
        subject.model.bank(vectors(7, 3)).save(file)
    hits = torch.tensor([[1, 4], [4, 6]])
    yield lambda: logits(subject, subject.model.load_bank(file, mapped=mapped).gather(hits))


def answer(subject: Subject, passages: PassageCache, **more: Any) -> Tensor:
    numbers = passages.add(PASSAGES, progress=False)
    return logits(subject, passages.select([numbers, numbers[1:]], **more))


@contextmanager
def passages(subject: Subject, folder: Path, again: int = 0, **settings: Any) -> Iterator[Ask]:
    """One cache in memory."""
    cache = PassageCache(subject.model, **settings)
    yield lambda: answer(subject, cache, recomputed_tokens=again)


@contextmanager
def selected(subject: Subject, folder: Path) -> Iterator[Ask]:
    """What was selected before."""
    cache = PassageCache(subject.model)
    memory = cache.select([cache.add(PASSAGES, progress=False)] * 2)
    yield lambda: logits(subject, memory)


@contextmanager
def selected_in_block(subject: Subject, folder: Path) -> Iterator[Ask]:
    cache = PassageCache(subject.model)
    with subject.model.condition(cache.select([cache.add(PASSAGES, progress=False)] * 2)):
        yield lambda: subject.host(IDS).logits


@contextmanager
def passage_folder(subject: Subject, folder: Path, again: int = 0, **settings: Any) -> Iterator[Ask]:
    """A new cache over the folder each time."""
    yield lambda: answer(
        subject, PassageCache(subject.model, folder=folder / "f", **settings), recomputed_tokens=again
    )


@contextmanager
def small_passage_folder(subject: Subject, folder: Path) -> Iterator[Ask]:
    """One cache that keeps nothing in memory."""
    cache = PassageCache(subject.model, folder=folder / "f", max_bytes=0)
    yield lambda: answer(subject, cache)


@contextmanager
def passage_file(
    subject: Subject, folder: Path, prefix: Any = (), again: int = 0, mapped: bool = False
) -> Iterator[Ask]:
    file = folder / "passages"

    def ask() -> Tensor:
        if not file.exists():
            cache = PassageCache(subject.model, prefix=prefix)
            cache.add(PASSAGES, progress=False)
            cache.save(file)
        cache = PassageCache.load(subject.model, file, mapped=mapped)
        return logits(subject, cache.select([[0, 1], [1]], recomputed_tokens=again))

    yield ask


@contextmanager
def hidden_states(subject: Subject, folder: Path) -> Iterator[Ask]:
    with cached_hidden_states(subject.model, folder):
        yield lambda: logits(subject, vectors())


@contextmanager
def hidden_state_folder(subject: Subject, folder: Path) -> Iterator[Ask]:
    def ask() -> Tensor:
        with cached_hidden_states(subject.model, folder):
            return logits(subject, vectors())

    yield ask


@contextmanager
def prompts(subject: Subject, folder: Path) -> Iterator[Ask]:
    texts = [[5, 6, 7, 8], [50, 60, 70]]
    with cached_prompts(subject.model, texts) as read:
        yield lambda: subject.model(**read[[1, 0]], memory=vectors()).logits


@contextmanager
def prompt_arguments(subject: Subject, folder: Path) -> Iterator[Ask]:
    """Arguments that were made before."""
    with cached_prompts(subject.model, [[5, 6, 7, 8], [50, 60, 70]]) as read:
        ready = [read[[1, 0]] for _ in range(5)]
        yield lambda: subject.model(**ready.pop(), memory=vectors()).logits


def _augmenting(subject: Subject) -> Any:
    return subject.augmenting


def _prompt(subject: Subject) -> Any:
    return subject.prompt


GATED = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8}
UPPER = GATED | {"layers": (2,)}
FUSED = {"memory_dim": 2 * 2 * 6, "layers": (0, 2), "augmenting_layers": (1, 4), "hidden_dim": 11}
COMPOSED = {
    "memory_dim": composed_hosts.DIM, "layers": (0, 2), "augmenting_layers": (1, 4), "num_heads": 2, "head_dim": 6
}  # fmt: skip
_ADAPTER, _HOST, _BOTH = frozenset({"adapter"}), frozenset({"host"}), frozenset({"adapter", "host"})
_CHUNKED = mmattn.ChunkedAdapter(**GATED, chunk_size=3)
_RESAMPLED = mmattn.GatedAdapter(**GATED, resampler=mmattn.Resampler(num_latents=3, depth=1, num_heads=2, head_dim=5))


def _chunk_memory(_: Subject) -> Any:
    memory = vectors(slots=6)
    return mmattn.Memory(memory.tokens, segments=torch.tensor([[0, 0, 0, 1, 1, 1]] * 2))


def _with(open_: Callable[..., Any], **settings: Any) -> Callable[[Subject, Path], AbstractContextManager[Ask]]:
    return lambda subject, folder: open_(subject, folder, **settings)


def _prefix_rows(_: Subject) -> Any:
    return [[0, 2], [1]]


CACHES = [
    Cache("prepared gated", mmattn.GatedAdapter(**GATED), prepared, _ADAPTER),
    Cache("prepared resampled", _RESAMPLED, prepared, _ADAPTER),
    Cache("prepared chunked", _CHUNKED, _with(prepared, make=_chunk_memory), _ADAPTER),
    Cache("prepared joined", JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2)), prepared, _ADAPTER),
    Cache("prepared inserted", InsertedAdapter(tiny.MEMORY_DIM), prepared, _BOTH),
    Cache("prepared inserted, no gate", InsertedAdapter(tiny.MEMORY_DIM, gate=False), prepared, _BOTH),
    Cache("prepared prefix", PrefixAdapter(3, num_prefixes=3), _with(prepared, make=_prefix_rows), _ADAPTER),
    Cache("prepared decoupled", tiny_unets.adapter(), prepared, _ADAPTER, "unet"),
    Cache("block gated", mmattn.GatedAdapter(**GATED), in_block, _ADAPTER),
    Cache("block prepared gated", mmattn.GatedAdapter(**GATED), prepared_in_block, _ADAPTER),
    Cache("block chunked", _CHUNKED, _with(in_block, make=_chunk_memory), _ADAPTER),
    Cache("block joined", JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2)), in_block, _ADAPTER),
    Cache("block inserted", InsertedAdapter(tiny.MEMORY_DIM), in_block, _BOTH),
    Cache("block inserted, no gate", InsertedAdapter(tiny.MEMORY_DIM, gate=False), in_block, _BOTH),
    Cache("block prefix", PrefixAdapter(3, num_prefixes=3), _with(in_block, make=_prefix_rows), _ADAPTER),
    Cache("block decoupled", tiny_unets.adapter(), in_block, _ADAPTER, "unet"),
    Cache("stream", mmattn.GatedAdapter(**GATED), stream, _ADAPTER),
    Cache("composed", mmattn.ComposedAdapter(**COMPOSED), _with(prepared, make=_augmenting), _ADAPTER),
    Cache("composed block", mmattn.ComposedAdapter(**COMPOSED), _with(in_block, make=_augmenting), _ADAPTER),
    Cache("fused network", FusedCacheAdapter(**FUSED), _with(prepared, make=_prompt), _ADAPTER),
    Cache("fused network block", FusedCacheAdapter(**FUSED), _with(in_block, make=_prompt), _ADAPTER),
    Cache("bank", mmattn.GatedAdapter(**GATED), bank, _ADAPTER),
    Cache("bank, gathered", mmattn.GatedAdapter(**GATED), gathered, _ADAPTER),
    Cache("bank file", mmattn.GatedAdapter(**GATED), bank_file, _ADAPTER, is_file=True),
    Cache("bank file, mapped", mmattn.GatedAdapter(**GATED), _with(bank_file, mapped=True), _ADAPTER, is_file=True),
    Cache("passages", PassageAdapter(), passages, _HOST),
    Cache("passages, prefix", PassageAdapter(), _with(passages, prefix=PREFIX), _HOST),
    Cache("passages, recomputed", PassageAdapter(), _with(passages, again=2), _HOST),
    Cache("passages, selected", PassageAdapter(), selected, _HOST),
    Cache("passages, block", PassageAdapter(), selected_in_block, _HOST),
    Cache("passage folder", PassageAdapter(), passage_folder, _HOST, is_file=True),
    Cache("passage folder, prefix", PassageAdapter(), _with(passage_folder, prefix=PREFIX), _HOST, is_file=True),
    Cache("passage folder, recomputed", PassageAdapter(), _with(passage_folder, again=2), _HOST, is_file=True),
    Cache("passage folder, one cache", PassageAdapter(), small_passage_folder, _HOST, is_file=True),
    Cache("passage file", PassageAdapter(), passage_file, _HOST, is_file=True),
    Cache("passage file, mapped", PassageAdapter(), _with(passage_file, mapped=True), _HOST, is_file=True),
    Cache("passage file, prefix", PassageAdapter(), _with(passage_file, prefix=PREFIX, again=2), _HOST, is_file=True),
    Cache("hidden states", mmattn.GatedAdapter(**UPPER), hidden_states, _HOST),
    Cache("hidden state folder", mmattn.GatedAdapter(**UPPER), hidden_state_folder, _HOST, is_file=True),
    Cache("prompts", mmattn.GatedAdapter(**UPPER), prompts, _HOST),
    Cache("prompt arguments", mmattn.GatedAdapter(**UPPER), prompt_arguments, _HOST),
]
BY_NAME = {cache.name: cache for cache in CACHES}
