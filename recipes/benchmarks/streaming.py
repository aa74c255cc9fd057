"""A memory that grows: the time of a token after many frames, and an answer that is revised when a frame arrives.

    python -m recipes.benchmarks streaming [--quick]

Time: a token of a host of four layers and width 256 with two gated adapters, so that the memory has a large share in
it; one frame a token, of ten thousand frames.

Answer: frames are noise, but now and then a frame shows one of eight things; each token of the text names the thing of
the last eight frames. A frozen random host, an adapter trained on whole texts under boundaries (`arrived=`), and a
`MemoryStream` inside `generate`. Controls: the same adapter with the memory as it was at the first token,
with another's stream, with none, and a text-only LoRA of equal size.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import training
from recipes.benchmarks.bank import WIDTH
from recipes.benchmarks.decoding import open_gates
from recipes.benchmarks.timing import Rows, Tables

THINGS, NOTHING, DIM, WINDOW, LENGTH = 8, 8, 24, 8, 32
WITHIN = 2


@torch.no_grad()
def measure(frames: int = 10_000, window: int = 64, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return the milliseconds of a token by tenths of the stream, for each unit of the second tenth."""
    model = make_small_reader().to(dtype).eval()
    stream = mmattn.MemoryStream(WIDTH, window=window)
    ids, times = torch.ones(1, 1, dtype=torch.long), []
    for frame in torch.randn(frames, 1, 1, WIDTH).to(dtype):
        begin = time.perf_counter()
        stream.append(frame)
        model(ids, memory=stream)
        times.append(time.perf_counter() - begin)
    tenth = frames // 10
    medians = [statistics.median(times[number * tenth : (number + 1) * tenth]) for number in range(10)]
    held = stream.computed.nbytes()
    return {
        "milliseconds": 1e3 * medians[1],
        "slowest tenth": max(medians[1:]) / medians[1],
        "last tenth": medians[9] / medians[1],
        "megabytes held": held / 1e6,
    }


def make_small_reader() -> Any:
    """Return a random host with two gated adapters with open gates."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    host = GPT2LMHeadModel(
        GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=1000, bos_token_id=None, eos_token_id=None)
    )
    model = mmattn.attach(host, mmattn.GatedAdapter(WIDTH, every=2, num_heads=8, head_dim=64))
    open_gates(model, torch.float32)
    return model


def streams(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return frames (b, l, e), the right token after each (b, l), and the number of the frame with the thing (b,)."""
    vectors = torch.randn(THINGS, DIM, generator=torch.Generator().manual_seed(1))
    frames = 0.3 * torch.randn(count, LENGTH, DIM, generator=generator)
    thing = torch.randint(THINGS, (count,), generator=generator)
    frame = torch.randint(3, LENGTH - WINDOW - 2, (count,), generator=generator)
    frames[torch.arange(count), frame] += vectors[thing]
    place = torch.arange(LENGTH)
    inside = (place >= frame[:, None]) & (place < frame[:, None] + WINDOW)
    return frames, torch.where(inside, thing[:, None], NOTHING), frame


def make_host() -> Any:
    """Return a random language model of nine words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NOTHING + 2, bos_token_id=None, eos_token_id=None, **sizes))


def train(model: Any, steps: int, seed: int, with_memory: bool = True) -> None:
    """Train on the right tokens, each under its own boundary."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, generator = torch.optim.AdamW(weights, lr=3e-3), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        frames, right, _ = streams(64, generator)
        ids = torch.cat([torch.full((64, 1), NOTHING + 1), right[:, :-1]], 1)
        arrived = torch.arange(1, LENGTH + 1).expand(64, -1)
        options = {"memory": frames, "arrived": arrived, "window": WINDOW} if with_memory else {}
        loss = F.cross_entropy(model(input_ids=ids, **options).logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Arriving:
    """A logits processor that appends one frame for each token."""

    def __init__(self, stream: mmattn.MemoryStream | None, frames: Tensor) -> None:
        self.stream, self.frames, self.at = stream, frames, 1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.stream is not None and self.at < self.frames.shape[1]:
            self.stream.append(self.frames[:, self.at : self.at + 1])
            self.at += 1
        return scores


@torch.no_grad()
def ask(model: Any, frames: Tensor, kind: str) -> Tensor:
    """Return the tokens after each frame (b, l)."""
    stream = mmattn.MemoryStream(DIM, window=WINDOW, rows=len(frames))
    stream.append(frames[:, :1])
    memory = {"stream": stream, "frozen": frames[:, :1], "none": None}[kind]
    options = {} if memory is None else {"memory": memory}
    written = model.generate(
        torch.full((len(frames), 1), NOTHING + 1),
        max_new_tokens=LENGTH,
        do_sample=False,
        pad_token_id=0,
        logits_processor=[Arriving(stream if kind == "stream" else None, frames)],
        **options,
    )
    return written[:, 1:]


def revised(written: Tensor, right: Tensor, frame: Tensor) -> dict[str, float]:
    """Return the shares of streams with the thing soon after its frame, and before it; and of right tokens."""
    rows = torch.arange(len(written))
    thing = right[rows, frame]
    late = torch.stack([written[rows, frame + step] == thing for step in range(WITHIN + 1)]).any(0)
    early = torch.stack([(row[: int(at)] == what).any() for row, at, what in zip(written, frame, thing, strict=True)])
    return {
        "named within two tokens": float(late.float().mean()),
        "named before": float(early.float().mean()),
        "all tokens right": float((written == right).float().mean()),
    }


def answers(steps: int = 400, count: int = 200, seeds: int = 3) -> Rows:
    """Return the table, each figure the mean over seeds."""
    figures: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        frames, right, frame = streams(count, torch.Generator().manual_seed(1000 + seed))
        model = mmattn.attach(make_host(), mmattn.GatedAdapter(memory_dim=DIM, every=1, num_heads=4, head_dim=16))
        parameters, _ = model.trainable_parameters()
        train(model, steps, seed)
        other = frames.roll(count // 2, 0)
        written = {
            "a stream": ask(model, frames, "stream"),
            "as it was at the first token": ask(model, frames, "frozen"),
            "another's stream": ask(model, other, "stream"),
            "no memory": ask(model, frames, "none"),
        }
        model.unload()
        lora = training.matched_lora(make_host(), parameters)
        train(lora, steps, seed, with_memory=False)
        written["LoRA, text only"] = ask(lora, frames, "none")
        for name, text in written.items():
            figures.setdefault(name, []).append(revised(text, right, frame))
    return {name: {key: statistics.mean(row[key] for row in rows) for key in rows[0]} for name, rows in figures.items()}


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield the time of a token with a growing memory, and answers that are revised."""
    times = {"64 of 10,000 frames seen": measure(*((100, 8) if quick else ()))}
    yield "Streaming: time of a token", "memory", times
    yield "Streaming: what is written when a frame arrives", "memory", answers(*((20, 20, 1) if quick else ()))
