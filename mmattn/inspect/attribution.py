"""Attribution: for each word of a text, the sources it looked at, and what it would be without each of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConditionError, ConfigError, ShapeError, check_int
from mmattn.hosts.adapted import AdaptedModel
from mmattn.inspect.recording import record
from mmattn.inspect.rollout import own_weights, roll_out
from mmattn.inspect.trace import Trace
from mmattn.inspect.trial import real_slots, resting
from mmattn.memory import Memory


def attribute(
    model: AdaptedModel,
    ids: Tensor | Sequence[int],
    memory: Memory | Tensor,
    words: Sequence[str] | None = None,
    *,
    start: int = 1,
    sources: Sequence[str | None] | None = None,
    grid: tuple[int, int] | None = None,
    picture: Any = None,
    title: str = "",
    name: str = "default",
    batch: int = 32,
) -> Trace:
    """Which source each word of a text looked at, and the counterfactual: its probability without that source.

    A word's weights are those of the token that predicts it, the one before. Weights say where a model looked; whether
    it mattered is what the probabilities say. All sources are dropped once, in batches.

    Args:
        ids: (l,) or (1, l), such as `generate` returned. memory: one row.
        words: the text of each token of `ids`; its number by default.
        start: the first token to be explained, 1 or later: that behind the prompt.
        sources: what each slot is from; slots of one name are one source, None is shown nowhere. By default the
            memory's own sources, or the patches of `grid`, or the slots by number.
        grid, picture, title: as in `Trace`.
        name: of the adapter that looks; others get no memory. batch: rows of one call.

    Raises:
        ShapeError: more than one row, or names that do not fit. ConfigError: nothing to explain, or no source.
        ConditionError: the model is no language model, or its adapter does not look at the slots that it is given
            (a resampler, chunks).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> trace = attribute(model, [5, 6, 7], torch.randn(1, 4, 24), sources=["a", "a", "b", None])
    >>> trace.words, trace.sources, trace.weights.shape, trace.dropped.shape
    (('6', '7'), ('a', 'b'), torch.Size([2, 3, 2, 2]), torch.Size([2, 2]))
    """
    if not model.predicts_tokens:
        raise ConditionError(f"words of a language model are explained here, got {type(model).__name__}: use record()")
    adapter = model.adapter(name)
    device = adapter.weight.device
    row = torch.as_tensor(ids, device=device).reshape(1, -1) if not isinstance(ids, Tensor) else ids.to(device)
    row = row[None] if row.dim() == 1 else row
    memory = (memory if isinstance(memory, Memory) else Memory(memory)).to(device)
    if row.shape[0] != 1 or memory.batch != 1:
        raise ShapeError(f"one row of ids and of memory is explained, got {tuple(row.shape)} and {memory.batch} rows")
    length = row.shape[1]
    check_int("start", start)
    if start >= length:
        raise ConfigError(f"start={start} leaves nothing to explain of {length} tokens")
    texts = [str(one) for one in row[0].tolist()] if words is None else list(words)
    if len(texts) != length:
        raise ShapeError(f"words must name each of {length} tokens, got {len(texts)}")
    names, owner = named_sources(memory, sources, grid)
    model = _twin(model)
    with resting(model):
        asked = {"input_ids": row, "memory": {name: memory}}
        with record(model) as weights:
            probability = _probability(model, row, memory, name, start)[0]
        layers = {layer: calls[0] for (other, layer), calls in weights.items() if other == name}
        if not layers:
            raise ConditionError(f"the adapter {name!r} does not attend to its memory: it has no weights to explain by")
        for layer, seen in layers.items():
            if tuple(seen.shape[::2]) != (1, length) or seen.shape[3] != memory.length:
                raise ConditionError(
                    f"the adapter {name!r} looks at {seen.shape[3]} vectors in rows of {seen.shape[2]} at layer "
                    f"{layer}, not at the {memory.length} slots it is given (a resampler, chunks): they have no names"
                )
        with model.disable_adapter():
            without = _probability(model, row, None, name, start)[0]
        parts = torch.arange(len(names)).split(batch)
        dropped = [_probability(model, row, _without(memory, owner, part), name, start) for part in parts]
        own = own_weights(model, **asked)
    # From slots to sources: (m, s).
    belongs = (owner[:, None] == torch.arange(len(names))).float()
    by_layer = {layer: seen[0].float() @ belongs for layer, seen in sorted(layers.items())}
    depth = max(by_layer) + 1
    rolled = None
    if own is not None and len(own) >= depth:
        means = {layer: seen.mean(0) for layer, seen in by_layer.items()}
        rolled = roll_out(own, means, adapter.position == "before")[start - 1 : -1]
    return Trace(
        texts[start:],
        names,
        torch.stack([seen[:, start - 1 : -1] for seen in by_layer.values()]),
        [f"layer {layer}" for layer in by_layer],
        title,
        rollout=rolled,
        probability=probability,
        without=without,
        dropped=torch.cat(dropped).T,
        grid=grid,
        picture=picture,
    )


def _twin(model: AdaptedModel) -> AdaptedModel:
    """The model with modules of its own and the same parameters and buffers.

    What attribution changes (hooks, modes, how a host attends) belongs to a model, which other threads may be asking.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def named_sources(
    memory: Memory, sources: Sequence[str | None] | None = None, grid: tuple[int, int] | None = None
) -> tuple[list[str], Tensor]:
    """The names of a memory's sources, and the source (m,) of each slot, -1 for a slot that is masked or has none."""
    if grid is not None and (grid[0] * grid[1] != memory.length or sources is not None):
        raise ShapeError(
            f"a grid of {grid[0]} × {grid[1]} and names do not fit {memory.length} slots: give one of them"
        )
    if grid is not None:
        # A grid is drawn whole: a masked patch is one that nobody looks at.
        places = [f"row {i // grid[1] + 1}, column {i % grid[1] + 1}" for i in range(memory.length)]
        return places, torch.arange(memory.length)
    if sources is not None:
        if len(sources) != memory.length:
            raise ShapeError(f"sources must name each of {memory.length} slots, got {len(sources)}")
        given: Sequence[Any] = sources
    else:
        given = memory.sources[0] if memory.sources else [f"slot {slot}" for slot in range(memory.length)]
    numbers: dict[str, int] = {}
    labels: list[str] = []
    owner = torch.full((memory.length,), -1)
    for slot, (one, real) in enumerate(zip(given, real_slots(memory)[0].tolist(), strict=True)):
        if one is None or not real:
            continue
        # A source that names its slot is one passage all the same.
        whole = {key: value for key, value in one.items() if key != "slot"} if isinstance(one, dict) else one
        key = json.dumps(whole, sort_keys=True)
        if key not in numbers:
            numbers[key] = len(labels)
            labels.append(_label(whole))
        owner[slot] = numbers[key]
    if not labels:
        raise ConfigError("no slot of this memory may be looked at and has a source: there is nothing to explain it by")
    return labels, owner


def _label(source: Any) -> str:
    if isinstance(source, dict):
        return str(source.get("text") or source.get("id") or json.dumps(source))
    return source if isinstance(source, str) else json.dumps(source)


def _without(memory: Memory, owner: Tensor, sources: Tensor) -> Memory:
    """A row for each of these sources, in which it may not be looked at."""
    many = memory.expand(len(sources))
    gone = (owner == sources[:, None]).to(memory.device)
    return Memory(many.tokens, real_slots(many) & ~gone, many.segments, many.scores, check_finite=False)


def _probability(model: AdaptedModel, row: Tensor, memory: Memory | None, name: str, start: int) -> Tensor:
    """(b, t) of the tokens from `start` on, after those before them."""
    ids = row if memory is None else row.expand(memory.batch, -1)
    seen = {} if memory is None else {"memory": {name: memory}}
    logits = model(input_ids=ids, **seen).logits[:, start - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, ids[:, start:, None].to(logits.device))[..., 0].exp().cpu()
