"""python -m recipes.benchmarks [PART ...] [--quick] [--json FILE]: ratios of times; all parts by default."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# numpy's threads would stay awake for 30 ms after a product and take a core from whoever is timed next.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import torch

from recipes.benchmarks import (
    bank,
    core,
    decoding,
    denoising,
    formats,
    index_memory,
    late_interaction,
    mllama,
    packing,
    passages,
    prompting,
    requests,
    search,
    shared,
    store,
    streaming,
    training_memory,
    ways,
)

PARTS = (
    "core",
    "decoding",
    "compiled",
    "beams",
    "prompting",
    "passages",
    "bank",
    "pages",
    "denoising",
    "formats",
    "search",
    "index_memory",
    "late_interaction",
    "packing",
    "requests",
    "shared",
    "store",
    "streaming",
    "training",
    "ways",
)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--beside", choices=["mllama"], help="decoding beside another implementation, same weights")
    parser.add_argument("--quick", action="store_true", help="few sizes, short rounds: to see that it runs")
    parser.add_argument("--json", type=Path, help="also write every ratio to this file")
    asked = parser.parse_args()
    if asked.beside and asked.parts != ["decoding"]:
        parser.error("--beside belongs to the part decoding: give that part alone")
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    transformers_quiet()
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    print("Every figure is a ratio of times measured in turn, round by round; its median over the rounds.\n")
    dtypes = [getattr(torch, name) for name in asked.dtype]
    runs: dict[str, Callable[[], object]] = {
        "core": lambda: print_core(dtypes, asked.quick),
        "decoding": lambda: (print_beside_mllama if asked.beside else print_decoding)(dtypes, asked.quick),
        "compiled": lambda: print_compiled(dtypes, asked.quick),
        "beams": lambda: print_beams(dtypes, asked.quick),
        "prompting": lambda: print_prompting(dtypes, asked.quick),
        "passages": lambda: print_passages(dtypes, asked.quick),
        "ways": lambda: print_ways(dtypes, asked.quick),
        "bank": lambda: print_bank(dtypes, asked.quick),
        "pages": lambda: print_pages(dtypes, asked.quick),
        "denoising": lambda: print_denoising(dtypes, asked.quick),
        "formats": lambda: print_formats(asked.quick),
        "search": lambda: print_search(asked.quick),
        "index_memory": lambda: print_index_memory(asked.quick),
        "late_interaction": lambda: print_late_interaction(asked.quick),
        "packing": lambda: print_packing(asked.quick),
        "requests": lambda: print_requests(asked.quick),
        "streaming": lambda: print_streaming(asked.quick),
        "shared": lambda: print_shared(dtypes, asked.quick),
        "store": lambda: print_store(asked.quick),
        "training": lambda: print_training(asked.quick),
    }
    results = {part: runs[part]() for part in asked.parts or PARTS}
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=1))


def transformers_quiet() -> None:
    """Layers used without their model would warn about a config they do not need."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def print_core(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Time of ours for each unit of theirs: below 1 ours is faster."""
    results = {}
    print("## Core: time of mmattn.CrossAttention for each unit of …\n")
    for dtype in dtypes:
        for backward in (False, True):
            what = f"{str(dtype).removeprefix('torch.')}, {'forward and backward' if backward else 'forward'}"
            rows: dict[str, dict[str, float]] = {}
            for size in core.QUICK if quick else core.SIZES + core.RAGGED:
                made = core.measure(size, dtype, backward, 0.2 if quick else 1.0)
                rows[str(size)] = {name: made[f"mmattn / {name}"] for name in made if f"mmattn / {name}" in made}
                results[f"{what}: {size}"] = made
            print(f"### {what}\n\n{table('size', rows)}\n", flush=True)
    return results


def print_decoding(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Time per token for each unit of the host alone."""
    results = {}
    print("## Decoding: time per token for each unit of the host alone (GPT-2 small, three gated adapters)\n")
    for dtype in dtypes:
        rows: dict[str, dict[str, float]] = {}
        for count in (1,) if quick else (1, 8):
            for slots in (64, 257) if quick else (64, 257, 1024, 4096):
                made = decoding.measure(slots, count, dtype, 1.0 if quick else 5.0)
                rows[f"{slots} slots, {count} row{'s' if count > 1 else ''}"] = made
        print(f"### {str(dtype).removeprefix('torch.')}\n\n{table('memory', rows)}\n", flush=True)
        results |= {f"{dtype}: {name}": row for name, row in rows.items()}
    return results


def print_beside_mllama(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Our time of a step for each unit of Mllama's with the same weights, and of a layer where only Python costs."""
    seconds = 1.0 if quick else 12.0
    rows = {
        str(dtype).removeprefix("torch."): {
            f"{count} × {slots}": mllama.measure(count, slots, dtype, seconds)
            for count, slots in (mllama.QUICK if quick else mllama.SIZES)
        }
        for dtype in dtypes
    }
    print(f"## Decoding beside Mllama: our time of a step for each unit of its\n\n{table('rows × slots', rows)}\n")
    tiny = mllama.measure_layer(seconds)
    print(f"a cross-attention layer of width 64, one thread: {', '.join(f'{n} {t:.0f} µs' for n, t in tiny.items())}\n")
    return rows | {"layer": tiny}


def print_compiled(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """A compiled step with a static cache for each unit of the same step as it is."""
    rows = {
        f"{str(dtype).removeprefix('torch.')}, {slots} slots": decoding.measure_compiled(
            slots, dtype, 1.0 if quick else 15.0
        )
        for dtype in dtypes
        for slots in ((257,) if quick else (257, 1601, 4096))
    }
    print(f"## Compiled: time of a step for each unit of the step as it is\n\n{table('memory', rows)}\n", flush=True)
    return rows


def print_beams(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Four beams over one memory: shared, against a copy for each beam."""
    rows = {
        f"{str(dtype).removeprefix('torch.')}, 1024 slots": decoding.measure_beams(1024, 4, dtype, 2.0 if quick else 12)
        for dtype in dtypes
    }
    print(f"## Four beams: time of 16 tokens for each unit of the host alone\n\n{table('memory', rows)}\n", flush=True)
    return rows


def print_prompting(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Passages as a memory, for each unit of the same passages in the prompt."""
    results = {}
    print("## Prompting: time to the first token for each unit of reading the passages in the prompt\n")
    for dtype in dtypes:
        rows = {
            f"{passages} passages": prompting.measure(passages, dtype, 1.0 if quick else 20.0)
            for passages in (prompting.QUICK_PASSAGES if quick else prompting.PASSAGES)
        }
        what = str(dtype).removeprefix("torch.")
        print(f"### {what}\n\n{table('passages of 64 tokens', rows)}\n", flush=True)
        results |= {f"{what}: {name}": row for name, row in rows.items()}
    return results


def print_passages(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Passages that were read before, for each unit of the same passages in the prompt."""
    given = {"passages": passages.QUICK_PASSAGES, "seconds": 1.0} if quick else {}
    rows = {
        f"{shape}, {str(dtype).removeprefix('torch.')}": passages.measure(shape, dtype, **given)
        for shape in passages.SHAPES
        for dtype in dtypes
    }
    print(
        "## Passages read before: time to the first token for each unit of reading them in the prompt\n\n"
        f"{table('host', rows)}\n",
        flush=True,
    )
    return rows


def print_ways(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Ways to give a memory, for each unit of the host alone."""
    rows: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        for slots in ways.QUICK_SLOTS if quick else ways.SLOTS:
            for name, found in ways.measure(slots, dtype, **({"seconds": 1.0} if quick else {})).items():
                rows.setdefault(f"{name}, {str(dtype).removeprefix('torch.')}", {}).update(found)
    print(
        "## Ways to give a memory: a token for each unit of the host alone, and MB of keys and values\n\n"
        f"{table('way', rows)}\n",
        flush=True,
    )
    return rows


def print_packing(quick: bool) -> dict[str, dict[str, float]]:
    """Packed rows for each unit of padded ones."""
    rows = {
        f"{fill:.0%} of the padded batch is text": packing.measure(
            fill, **({"seconds": 2.0, "longest": 32} if quick else {})
        )
        for fill in (packing.QUICK_FILLS if quick else packing.FILLS)
    }
    print(
        f"## Packing: time of a training step for each unit of padded rows\n\n{table('documents', rows)}\n", flush=True
    )
    return rows


def print_requests(quick: bool) -> dict[str, dict[str, float]]:
    """Mixed requests through continuous batching, for each unit of one after the other."""
    rows = requests.measure(**({"count": 6, "slots": 64, "prompt": 16, "new": 8} if quick else {}))
    print(f"## Requests: {requests.COUNT} with memories of their own\n\n{table('way', rows)}\n", flush=True)
    return rows


def print_streaming(quick: bool) -> dict[str, dict[str, float]]:
    """A growing memory: time of a token, and answers that are revised."""
    times = {"64 of 10,000 frames seen": streaming.measure(**({"frames": 100, "window": 8} if quick else {}))}
    print(f"## Streaming: time of a token\n\n{table('memory', times)}\n", flush=True)
    rows = streaming.answers(**({"steps": 20, "count": 20, "seeds": 1} if quick else {}))
    print(f"## Streaming: what is written when a frame arrives\n\n{table('memory', rows)}\n", flush=True)
    return times | rows


def print_shared(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """A shared memory for each unit of a copy of it for each row."""
    rows = {
        f"{str(dtype).removeprefix('torch.')}": shared.measure(
            dtype, **({"seconds": 1.0, "rows": 4, "shared": 512} if quick else {})
        )
        for dtype in dtypes
    }
    print(f"## Shared memory: for each unit of a copy of it for each row\n\n{table('dtype', rows)}\n", flush=True)
    return rows


def print_bank(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Answers from retrieved passages with cached keys and values, and gathering from larger and larger banks."""
    results = {}
    print("## Bank: time of answering from retrieved passages for each unit of encoding them\n")
    for dtype in dtypes:
        for answer, what in ((True, "32 tokens read, 8 written"), (False, "keys and values alone")):
            rows = {
                f"{hits} passages": bank.measure(hits, dtype, answer, 1.0 if quick else 10.0)
                for hits in (bank.QUICK_HITS if quick else bank.HITS)
            }
            title = f"{str(dtype).removeprefix('torch.')}, {what}"
            print(f"### {title}\n\n{table('found', rows)}\n", flush=True)
            results |= {f"{title}: {name}": row for name, row in rows.items()}
        grown = {
            "64 hits": bank.measure_growth(bank.QUICK_BANKS if quick else bank.BANKS, dtype, 1.0 if quick else 4.0)
        }
        title = f"{str(dtype).removeprefix('torch.')}, gathering for each unit of the smallest bank"
        print(f"### {title}\n\n{table('found', grown)}\n", flush=True)
        results[title] = grown["64 hits"]
    return results


def print_pages(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """Gathering from pages in 8 bits beside those in bfloat16, and their bytes."""
    results = {}
    print("## Pages: time of gathering for each unit of pages in bfloat16\n")
    for dtype in dtypes:
        times: dict[str, dict[str, float]] = {}
        sizes: dict[str, dict[str, float]] = {}
        for slots, entries, found in bank.QUICK_PAGES if quick else bank.PAGES:
            entry = f"{slots} slot{'s' if slots > 1 else ''}"
            made, sizes[entry] = bank.measure_pages(slots, entries, found, dtype, 1.0 if quick else 8.0)
            times |= {f"{hits:,} hits of {entry}": row for hits, row in made.items()}
        title = str(dtype).removeprefix("torch.")
        print(f"### {title}\n\n{table('found', times)}\n\n{table('bytes, entries of', sizes)}\n", flush=True)
        results |= {f"{title}: {name}": row for name, row in times.items()}
    return results


def print_denoising(dtypes: list[torch.dtype], quick: bool) -> dict[str, dict[str, float]]:
    """A denoising step with cached keys and values, for each unit of diffusers' as it ships."""
    results = {}
    print("## Denoising: time of a step for each unit of diffusers as it ships\n")
    for dtype in dtypes:
        rows: dict[str, dict[str, float]] = {}
        for slots, count, fill, guided in denoising.QUICK if quick else denoising.SIZES:
            name = (
                f"{slots} slots, {count} row{'s' if count > 1 else ''}, {'guided, ' if guided else ''}{fill:.0%} full"
            )
            rows[name] = denoising.measure(slots, count, fill, dtype, guided, 1.0 if quick else 4.0)
            if not guided and dtype == torch.float32:
                rows[name] |= denoising.peak(slots, count, fill, dtype)
        what = str(dtype).removeprefix("torch.")
        print(f"### {what}\n\n{table('text memory', rows)}\n", flush=True)
        beside: dict[str, dict[str, float]] = {}
        for images, count, guided in denoising.IMAGES[:1] if quick else denoising.IMAGES:
            name = f"{denoising.TOKENS * images} slots, {count} row{'s' if count > 1 else ''}{', guided' * guided}"
            beside[name] = denoising.measure_adapter(images, count, dtype, guided, 1.0 if quick else 4.0)
        print(f"### {what}, an IP-Adapter beside the text\n\n{table('its memory', beside)}\n", flush=True)
        results |= {f"{dtype}: {name}": row for name, row in (rows | beside).items()}
    return results


def print_search(quick: bool) -> dict[str, dict[str, float]]:
    """Top-10 search for each unit of faiss' flat index."""
    print("## Search: time of the ten best of so many entries of width 384, for each unit of faiss IndexFlatIP\n")
    rows: dict[str, dict[str, float]] = {}
    held = {}
    for count in search.QUICK_SIZES if quick else search.SIZES:
        measured, held[f"{count:,} entries"] = search.measure(count, 1.0 if quick else 6.0)
        rows |= measured
    print(f"{table('index', rows)}\n\nbytes held for an entry:\n\n{table('index', held)}\n", flush=True)
    return rows | {f"{name}, bytes for an entry": row for name, row in held.items()}


def print_index_memory(quick: bool) -> dict[str, dict[str, float]]:
    """Attention that searches an index, for each unit of the host alone."""
    rows = {
        f"{count:,} entries, {store}": index_memory.measure(count, store, 1.0 if quick else 12.0)
        for count in (index_memory.QUICK_SIZES if quick else index_memory.SIZES)
        for store in index_memory.STORES
    }
    print(
        f"## Index memory: a token whose attention searches all entries of an index\n\n{table('index', rows)}\n",
        flush=True,
    )
    return rows


def print_late_interaction(quick: bool) -> dict[str, dict[str, float]]:
    """MaxSim over token states, beside the one vector of the same network."""
    results = {}
    for task in ("sentences", "facts"):
        rows = late_interaction.measure(task, **({"count": 20, "seconds": 1.0} if quick else {}))
        print(
            f"## Late interaction, {task}: MiniLM's token states beside its one vector\n\n{table('search', rows)}\n",
            flush=True,
        )
        results |= {f"{task}: {name}": row for name, row in rows.items()}
    return results


def print_training(quick: bool) -> dict[str, dict[str, float]]:
    """A training step of adapters above the middle of a host, beside a LoRA of equal size."""
    results = {}
    print("## Training: a step of two rows of 256 tokens, hosts in bfloat16\n")
    for setting in training_memory.QUICK if quick else training_memory.SETTINGS:
        rows = training_memory.measure(setting, **({"seconds": 1.0, "least": 2} if quick else {}))
        print(f"### {setting}\n\n{table('what is trained', rows)}\n", flush=True)
        results |= {f"{setting}: {name}": row for name, row in rows.items()}
    return results


def print_formats(quick: bool) -> dict[str, dict[str, float]]:
    """Formats of vectors on a disk, as a share of the rate at which dd reads."""
    rows = formats.measure(*((formats.QUICK_BLOCKS, 1) if quick else (formats.BLOCKS, 3)))
    print(f"## Formats: 16 MB blocks of half precision vectors, cold\n\n{table('read', rows)}\n", flush=True)
    return rows


def print_store(quick: bool) -> dict[str, dict[str, float]]:
    """A store, as a share of the rate at which dd reads its files."""
    rows = store.measure(**({"count": store.QUICK_ROWS, "rounds": 1} if quick else {}))
    print(f"## Store: rows of 16 slots of width 256, cold\n\n{table('what', rows)}\n", flush=True)
    return rows


def figure(value: float) -> str:
    """Two digits behind the point, three below a tenth."""
    return f"{value:,.3f}" if abs(value) < 0.0995 else f"{value:,.2f}"


def table(corner: str, rows: dict[str, dict[str, float]]) -> str:
    """Rows of figures as a table in markdown; a column that some rows lack is left empty there."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = [figure(row[column]) if column in row else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
