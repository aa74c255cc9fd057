"""Requests, rows and documents whose memory is not finite, or overflows later, and whether another one ever changes.

Each batch has several rows, one or two of them spoilt: NaN, infinity, numbers that are finite and overflow in a cast,
a norm or a product, numbers too small to be normal; in a number, a slot, or all of a row, in the vectors or the scores.
The others must be bit for bit what they are beside a sound row; for requests, which do not run in the same steps then,
the same tokens, but where two are as likely to rounding. A spoilt row is refused, ends with an error, or is answered
with finite numbers, as it is alone.
"""

from __future__ import annotations

import copy
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.adapters import InsertedAdapter, JoinedAdapter
from mmattn.adapters.gated import GatedLayout
from mmattn.core.tracing import report_checks
from mmattn.errors import NonFiniteError
from tests import tiny

VALUES = (math.inf, -math.inf, math.nan, 3e38, -1e38, 1e30, 1e20, -1e19, 7e4, -6e4, 1e-40, 1e-45)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTH, NEW = 5, 3
#: Of each kind of adapter in each dtype.
BATCHES = 12 * int(os.environ.get("MMATTN_STRESS", "1"))

_SMALL: dict[str, Any] = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8}
_LATENTS = mmattn.Resampler(num_latents=3, depth=1, num_heads=2, head_dim=8)
KINDS: dict[str, Callable[[], Any]] = {
    "gated": lambda: mmattn.GatedAdapter(**_SMALL),
    "without a norm": lambda: mmattn.GatedAdapter(**_SMALL, layout=GatedLayout(memory_norm=False)),
    "null slot": lambda: mmattn.GatedAdapter(**_SMALL, null_slot=True, qk_norm=True),
    "score bias": lambda: mmattn.GatedAdapter(**_SMALL, score_bias=True),
    "resampler": lambda: mmattn.GatedAdapter(**_SMALL, resampler=_LATENTS),
    "chunked": lambda: mmattn.ChunkedAdapter(**_SMALL, chunk_size=2),
    "joined": lambda: JoinedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2)),
    "inserted": lambda: InsertedAdapter(memory_dim=tiny.MEMORY_DIM),
}


@dataclass
class Batch:
    """Texts with memories, some of which are spoilt."""

    ids: Tensor
    sound: list[mmattn.Memory]
    spoilt: dict[int, mmattn.Memory]

    def memories(self) -> list[mmattn.Memory]:
        """With those that are spoilt."""
        return [self.spoilt.get(row, one) for row, one in enumerate(self.sound)]

    def others(self) -> list[int]:
        """The rows that are sound."""
        return [row for row in range(len(self.sound)) if row not in self.spoilt]

    def may_break(self) -> bool:
        """Whether a caller said that a memory need not be finite."""
        return not all(one.finite_checked for one in self.spoilt.values())


def make_model(kind: str, dtype: torch.dtype, family: str = "llama") -> Any:
    """A tiny host with an adapter that changes its answers."""
    model = tiny.open_gates(mmattn.attach(tiny.make(family), KINDS[kind]()))
    return model.to(dtype)


def make_batch(kind: str, rng: random.Random) -> Batch | None:
    """A random batch; None where a memory is refused before there is a batch."""
    seed = rng.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed)
    rows = rng.randint(2, 4)

    def make(row: int) -> mmattn.Memory:
        m = 4 if kind == "chunked" else rng.randint(1, 5)
        tokens = torch.randn(1, m, tiny.MEMORY_DIM, generator=generator)
        segments = torch.tensor([[0, 0, 1, 1]]) if kind == "chunked" else None
        scores = torch.randn(1, m, generator=generator) if kind == "score bias" else None
        return mmattn.Memory(tokens, None, segments, scores)

    sound = [make(row) for row in range(rows)]
    try:
        spoilt = {
            row: spoil(sound[row], rng) for row in rng.sample(range(rows), rng.choice((1, 1, 2)) if rows > 2 else 1)
        }
    except NonFiniteError:
        return None
    return Batch(tiny.text(rows, LENGTH, seed % 1000), sound, spoilt)


def spoil(memory: mmattn.Memory, rng: random.Random) -> mmattn.Memory:
    """A memory with values that are not finite, or will not be."""
    tokens, value = memory.tokens.clone(), rng.choice(VALUES)
    scores = None if memory.scores is None else memory.scores.clone()
    slot, place = rng.randrange(memory.length), rng.randrange(memory.dim)
    where = rng.choice(("number", "slot", "row", "score"))
    if where == "score" and scores is not None:
        scores[0, slot] = value
    elif where == "slot":
        tokens[0, slot] = value * tokens[0, slot].sign()
    elif where == "row":
        tokens[0] = value * tokens[0].sign()
    else:
        tokens[0, slot, place] = value
    check = rng.random() < 0.6
    spoilt = mmattn.Memory(tokens, None, memory.segments, scores, check_finite=check)
    # As vectors come from an encoder in half precision.
    return spoilt.to(torch.float16) if rng.random() < 0.2 else spoilt


class Found:
    """What became of spoilt rows, and how many others changed."""

    def __init__(self) -> None:
        self.spoilt: Counter[str] = Counter()
        self.others = self.changed = self.silent = self.batches = 0
        self.faults: list[str] = []

    def fault(self, what: str) -> None:
        self.faults.append(what)
        print("FAULT", what, file=sys.stderr, flush=True)


def compare_rows(found: Found, model: Any, batch: Batch, way: Callable[..., Tensor], name: str) -> None:
    """Ask with the spoilt rows: refused by name, or the others as they were; both, where a device refuses later."""
    want = way(model, batch, mmattn.Memory.stack(batch.sound))
    got, refused = None, None
    try:
        got = way(model, batch, mmattn.Memory.stack(batch.memories()))
        report_checks(wait=True)
    except NonFiniteError as error:
        refused = str(error)
        found.spoilt["refused"] += len(batch.spoilt)
        if not any(str(row) in refused for row in batch.spoilt):
            found.fault(f"{name}: none of the rows {sorted(batch.spoilt)} is named: {refused}")
    if got is None or (refused is not None and way is as_documents):  # documents of a row share attention
        return
    found.others += len(batch.others())
    for row in batch.others():
        if not torch.equal(got[row], want[row]):
            found.changed += 1
            found.fault(f"{name}: row {row} changed beside {sorted(batch.spoilt)}")
    for row in batch.spoilt if refused is None else ():
        finite = bool(got[row].isfinite().all())
        found.spoilt["answered" if finite else "asked for as it is"] += 1
        if not (finite or batch.may_break()):
            found.silent += 1
            found.fault(f"{name}: row {row} is answered with NaN")


@torch.no_grad()
def as_rows(model: Any, batch: Batch, memory: Any) -> Tensor:
    """A batch of rows."""
    return model(batch.ids, memory=memory).logits


def as_trained(model: Any, batch: Batch, memory: Any) -> Tensor:
    """A batch of rows in training."""
    logits: Tensor = model(batch.ids, memory=memory).logits
    assert logits.requires_grad
    return logits.detach()


@torch.no_grad()
def as_documents(model: Any, batch: Batch, memory: Any) -> Tensor:
    """The same as documents of one packed row."""
    ids, positions = batch.ids.flatten()[None], torch.arange(LENGTH).repeat(len(batch.ids))[None]
    logits: Tensor = model(ids, position_ids=positions, memory=memory).logits
    return logits.view(len(batch.ids), LENGTH, -1)


def as_texts(model: Any, batch: Batch, memory: Any) -> Tensor:
    """Texts that are generated."""
    return model.generate(batch.ids, memory=memory, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


class Requests:
    """Requests of one manager, as a server has it, or of `generate_batch`."""

    def __init__(self, model: Any, running: bool) -> None:
        self.model, self.alone = model, copy.deepcopy(model)
        self.manager = model.host.init_continuous_batching(**tiny.paged(NEW)) if running else None
        if self.manager is not None:
            self.manager.start()

    def stop(self) -> None:
        """End it."""
        if self.manager is not None:
            self.manager.stop(block=True)

    def ask(self, ids: Tensor, memories: list[Any]) -> list[Any]:
        """The tokens of each request; the error of one that is refused or ends with it."""
        if self.manager is None:
            out = self.model.generate_batch(ids.tolist(), memory=memories, **tiny.paged(NEW)).values()
            return [one.generated_tokens if one.error is None else RuntimeError(one.error) for one in out]
        answers: list[Any] = [None] * len(memories)
        waiting = {}
        for row, (text, memory) in enumerate(zip(ids.tolist(), memories, strict=True)):
            try:
                waiting[self.manager.add_request(text, memory=memory, max_new_tokens=NEW)] = row
            except NonFiniteError as error:
                answers[row] = error
        end = time.monotonic() + 60
        while waiting and self.manager.is_running() and time.monotonic() < end:
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                failed = result.error
                answers[waiting.pop(result.request_id)] = RuntimeError(failed) if failed else result.generated_tokens
        return answers

    def is_tie(self, ids: Tensor, memory: Any, one: list[int], other: list[int]) -> bool:
        """Whether two answers part at a token where, to rounding, one is as likely as the other."""
        at = next(number for number, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        text = torch.cat([ids, torch.tensor(one[:at], dtype=ids.dtype)])[None]
        with torch.no_grad():
            logits = self.alone(text, memory=memory).logits[0, -1].float()
        within = 1e-5 if self.alone.host.dtype is torch.float32 else 0.05
        return bool((logits[one[at]] - logits[other[at]]).abs() <= within * logits.abs().max())

    def compare(self, batch: Batch, found: Found, name: str) -> None:
        """Others must answer as they do beside sound requests, and a spoilt one as it does alone."""
        want, memories = self.ask(batch.ids, batch.sound), batch.memories()
        got = self.ask(batch.ids, memories)
        found.others += len(batch.others())
        for row in batch.others():
            text, memory = batch.ids[row], batch.sound[row]
            if got[row] != want[row]:
                lists = isinstance(got[row], list) and isinstance(want[row], list) and len(got[row]) == len(want[row])
                if not (lists and self.is_tie(text, memory, got[row], want[row])):
                    found.changed += 1
                    found.fault(f"{name}: request {row} said {got[row]!r}, and {want[row]!r} beside sound ones")
        for row, memory in batch.spoilt.items():
            if not isinstance(got[row], list):
                found.spoilt["ended with an error"] += 1
                continue
            found.spoilt["answered"] += 1
            text = batch.ids[row]
            try:
                out = self.alone.generate(
                    text[None], memory=memory, max_new_tokens=NEW, do_sample=False, pad_token_id=0
                )
                alone = out[0, LENGTH:].tolist()
                fine = alone == got[row] or self.is_tie(text, memory, got[row], alone)
            except NonFiniteError as error:
                alone, fine = [repr(error)], False
            if not fine:
                found.silent += 1
                found.fault(f"{name}: spoilt request {row} said {got[row]}, and alone {alone}")


def fuzz_one(kind: str, dtype: torch.dtype, batches: int, rng: random.Random, found: Found) -> None:
    """Batches of one kind of adapter in one dtype."""
    model = make_model(kind, dtype)
    # A host that reads memories itself does so before its requests run.
    ways = [as_rows, as_trained, as_texts] if kind == "inserted" else [as_rows, as_trained, as_documents, as_texts]
    running = None if kind == "chunked" else Requests(make_model(kind, dtype), kind != "inserted")
    try:
        for number in range(batches):
            batch = make_batch(kind, rng)
            found.batches += 1
            if batch is None:
                found.spoilt["refused"] += 1
                continue
            name = f"{kind}, {str(dtype)[6:]}, batch {number}"
            way = number % (len(ways) + (running is not None))
            if way == len(ways):
                assert running is not None
                running.compare(batch, found, f"{name}, as requests")
            else:
                compare_rows(found, model, batch, ways[way], f"{name}, {ways[way].__name__}")
    finally:
        if running is not None:
            running.stop()
