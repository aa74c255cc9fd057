"""Answering from retrieved passages: pages of a bank, against projecting keys and values of the hits at every request.

    python -m recipes.benchmarks bank pages [--dtype float32 bfloat16] [--quick]

The GPT-2-small-shaped host with three gated adapters reads passages of 64 tokens as a MiniLM-shaped encoder (6 layers,
width 384) encodes them: "encoded" runs the encoder over the hits, "projected" projects keys and values from their
hidden states, "bank" gathers those. Answering reads a prompt of 32 tokens and generates 8. The part
"pages" gathers keys and values from pages in 8 bits, beside pages in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mmattn
from recipes.benchmarks.decoding import make_host, open_gates
from recipes.benchmarks.timing import Rows, Tables, interleaved, name_of, plural, ratios

WIDTH, PASSAGE, PROMPT, NEW = 384, 64, 32, 8
HITS, QUICK_HITS = (4, 16, 64, 256), (4, 16)
# Of one slot each: a hundred thousand passages of 64 would take 90 GB.
BANKS, QUICK_BANKS = (1_000, 10_000, 100_000), (1_000, 10_000)
HITS_OF_GROWTH = 64
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.int8},
}
# Slots of an entry, entries of the bank, hits.
PAGES = ((PASSAGE, 256, (4, 16, 64)), (1, 10_000, (100, 1000)))
QUICK_PAGES = ((PASSAGE, 32, (4,)), (1, 1000, (100,)))


def make_encoder(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a random encoder of MiniLM's sizes, from token ids (n, 64) to hidden states (n, 64, 384)."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=12, intermediate_size=4 * WIDTH, pad_token_id=0
    )
    encoder = BertModel(config, add_pooling_layer=False).to(dtype).eval()
    return lambda passages: encoder(input_ids=passages).last_hidden_state


def make_reader(dtype: torch.dtype, positions: int = 1024) -> mmattn.hosts.AdaptedCausalLM:
    """Return the host, for texts of `positions` tokens, with three gated adapters with open gates."""
    torch.manual_seed(0)
    model = mmattn.attach(make_host(dtype, positions), mmattn.GatedAdapter(WIDTH, every=4, num_heads=8, head_dim=64))
    open_gates(model, dtype)
    return model


def project_keys(model: mmattn.hosts.AdaptedCausalLM, prepared: mmattn.adapters.prepared_memory.PreparedMemory) -> None:
    """Project and cache the keys and values of every layer."""
    for adapter in map(model.adapter, model.adapters):
        memory = prepared.read(adapter)
        for layer in adapter.layers:
            prepared.project(adapter, layer, memory, 1)


@torch.no_grad()
def measure(hits: int, dtype: torch.dtype, answer: bool, seconds: float = 10.0) -> dict[str, float]:
    """Return the time of an answer, or of keys and values alone, for each unit of encoding the hits."""
    model, encode = make_reader(dtype), make_encoder(dtype)
    passages = torch.randint(1, 30_000, (max(hits, 64), PASSAGE))
    bank = model.bank(torch.cat([encode(piece) for piece in passages.split(64)]))
    rows = torch.randperm(len(passages))[None, :hits]
    prompt = torch.ones(1, PROMPT, dtype=torch.long)

    def run(prepare: Callable[[], mmattn.adapters.prepared_memory.PreparedMemory]) -> Callable[[], object]:
        if not answer:
            return lambda: project_keys(model, prepare())
        settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(prompt, memory=prepare(), **settings)

    times = interleaved(
        {
            "encoded": run(lambda: model.prepare(encode(passages[rows[0]]).reshape(1, -1, WIDTH))),
            "projected": run(lambda: model.prepare(bank.memory(rows))),
            "bank": run(lambda: bank.gather(rows)),
        },
        seconds=seconds,
    )
    return ratios(times, "encoded")


@torch.no_grad()
def measure_growth(banks: tuple[int, ...], dtype: torch.dtype, seconds: float = 4.0) -> dict[str, float]:
    """Return the time of gathering 64 entries from banks of several sizes, for each unit of the smallest."""
    model = make_reader(dtype)
    candidates = {
        f"{n:,} entries": gatherer(model.bank(torch.randn(1, 1, WIDTH, dtype=dtype).expand(n, -1, -1)), HITS_OF_GROWTH)
        for n in banks
    }
    times = interleaved(candidates, seconds=seconds, least=20)
    return ratios(times, next(iter(times)))


@torch.no_grad()
def measure_pages(
    slots: int, entries: int, hits: tuple[int, ...], dtype: torch.dtype, seconds: float = 8.0
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Return by format of the pages the time of gathering for each unit of bfloat16's, and bytes beside float32's."""
    model, memory = make_reader(dtype), torch.randn(entries, slots, WIDTH, dtype=dtype)
    banks = {name: model.bank(memory, **form) for name, form in FORMATS.items()}
    times = {}
    for count in hits:
        gatherers = {name: gatherer(bank, count) for name, bank in banks.items()}
        times[count] = ratios(interleaved(gatherers, seconds=seconds, least=20), "bfloat16")
    pages = {name: bank.page_nbytes() / banks["float32"].page_nbytes() for name, bank in banks.items()}
    whole = {f"{name}, with the entries": bank.nbytes() / banks["float32"].nbytes() for name, bank in banks.items()}
    return times, pages | whole


def gatherer(bank: mmattn.kv_store.store.Bank, hits: int) -> Callable[[], None]:
    """Return a function that gathers other hits in every call: the last ones are still in the processor's cache."""
    return lambda: project_keys(bank.model, bank.gather(torch.randint(0, len(bank), (1, hits))))


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield answers from retrieved passages with cached keys and values, and gathering from larger and larger banks."""
    for dtype in dtypes:
        for answer, what in ((True, "32 tokens read, 8 written"), (False, "keys and values alone")):
            rows = {
                f"{hits} passages": measure(hits, dtype, answer, 1.0 if quick else 10.0)
                for hits in (QUICK_HITS if quick else HITS)
            }
            yield f"Bank, {name_of(dtype)}, {what}: time for each unit of encoding the passages", "found", rows
        rows = {"64 hits": measure_growth(QUICK_BANKS if quick else BANKS, dtype, 1.0 if quick else 4.0)}
        yield f"Bank, {name_of(dtype)}: gathering for each unit of the smallest bank", "found", rows


def page_tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield gathering from pages in 8 bits beside those in bfloat16, and their bytes."""
    for dtype in dtypes:
        times: Rows = {}
        sizes: Rows = {}
        for slots, entries, hits in QUICK_PAGES if quick else PAGES:
            entry = plural(slots, "slot")
            rows, sizes[entry] = measure_pages(slots, entries, hits, dtype, 1.0 if quick else 8.0)
            times |= {f"{count:,} hits of {entry}": row for count, row in rows.items()}
        yield f"Pages, {name_of(dtype)}: time of gathering for each unit of pages in bfloat16", "found", times
        yield f"Pages, {name_of(dtype)}: bytes for each of float32's", "entries of", sizes
