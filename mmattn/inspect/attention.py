"""Attention weights: recorded call by call, as metrics of a training, and by source of the memory (`attribute`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import call_by_name
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_float, check_int
from mmattn.hosts.context import Arguments, Positional
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.probe import in_eval_mode
from mmattn.inspect.doctor.checks import emptied, twin
from mmattn.inspect.trace import Picture, Trace
from mmattn.memory import Memory


class Attends(Protocol):
    """A model with named attention layers: a host with its adapters, an `EncoderDecoder`."""

    def attentions(self) -> Mapping[tuple[str, int], nn.Module]:
        """Return the attention modules by adapter (or "source") and layer."""


class RecordedWeights(dict[tuple[str, int], list[Tensor]]):
    """Attention weights: from (adapter, host layer) to a list with the weights (b, h, l, m) of each call.

    The attention of the host over its own text has the key ("text", number of the attention layer), where it is
    computed by the core.
    """

    def mean(self) -> list[Tensor]:
        """Return for each call (b, l, m) the mean over layers and heads."""
        calls = zip(*self.values(), strict=True)
        return [torch.stack([weights.mean(1) for weights in call]).mean(0) for call in calls]


_blocks: ContextVar[tuple[object, ...]] = ContextVar("mmattn_record", default=())


@contextlib.contextmanager
def record(model: Attends) -> Iterator[RecordedWeights]:
    """Record the attention weights of each call of a model inside the block; its outputs do not change by a bit.

    The weights are computed a second time beside the output, without gradients, and moved to the CPU. Calls by other
    threads are not recorded.

    Args:
        model: an adapted model, or an `EncoderDecoder`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> from mmattn.inspect import record
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> with record(model) as weights:
    ...     _ = model(torch.tensor([[5, 6, 7]]), memory=torch.randn(1, 11, 24))
    >>> {layer: [call.shape for call in calls] for layer, calls in weights.items()}
    {('default', 1): [torch.Size([1, 3, 3, 11])], ('default', 3): [torch.Size([1, 3, 3, 11])]}
    """
    weights, block = RecordedWeights(), object()

    def note(key: tuple[str, int], attention: nn.Module, args: Positional, kwargs: Arguments, *output: object) -> None:
        # torch registers a hook in two steps: a call by another thread in between may come without kwargs.
        if block not in _blocks.get():
            return
        # A dropout of its own must not change the random numbers of the model.
        with torch.no_grad(), torch.random.fork_rng():
            _, shares = attention.forward(*args, **{**kwargs, "return_weights": True})
        weights.setdefault(key, []).append(shares.cpu())

    with contextlib.ExitStack() as hooks:
        for key, attention in model.attentions().items():
            hooks.enter_context(attention.register_forward_hook(partial(note, key), with_kwargs=True))
        hooks.callback(_blocks.reset, _blocks.set((*_blocks.get(), block)))
        yield weights


class AdapterMetrics:
    """Metrics of adapters in a training step, for `RunFolder.train(measure=…)`.

    Names have the metric and the host layer: "gate/layer_3" and "feed_forward_gate/layer_3", the mean of |tanh α|;
    "gradients/layer_3", the L2 norm of the gradients of its parameters, and "gradients/shared" of parameters outside
    the layers; "memory_attention/layer_3", the mean share of the attention on the memory, and "null_attention/layer_3"
    on a null slot. For an adapter other than "default": "gate/NAME/layer_3".

    Args:
        model: the adapted model.
        forward: calls the model on a few rows with their memories, to measure the attention; None to skip it. Hosts
            that do not return attention weights have no attention metrics.
        attention_steps: steps between two measurements of the attention; each calls `forward`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> metrics = AdapterMetrics(model, lambda: model(torch.tensor([[5, 6, 7]]), memory=torch.randn(1, 11, 24)))
    >>> {name: round(value, 6) for name, value in metrics(step=1).items() if "grad" not in name}
    {'gate/layer_1': 0.0, 'feed_forward_gate/layer_1': 0.0, 'memory_attention/layer_1': 1.0}
    """

    def __init__(
        self, model: AdaptedModel, forward: Callable[[], object] | None = None, attention_steps: int = 1
    ) -> None:
        self.model, self.forward = model, forward
        self.attention_steps = check_int("attention_steps", attention_steps)

    def __call__(self, step: int) -> dict[str, float]:
        """Return the figures of this step; gradients are those that the optimizer is given.

        Args:
            step: its number.
        """
        figures = {**self._gates(), **self._gradients()}
        if self.forward is not None and step % self.attention_steps == 0:
            figures |= self._attention(self.forward)
        return figures

    def _parameters(self) -> Iterator[tuple[str, list[str], nn.Parameter]]:
        """Yield the place of each parameter of an adapter, the rest of its name, and itself."""
        for owner, adapter in self.model.adapters.items():
            for name, parameter in adapter.named_parameters():
                first, *rest = name.split(".")
                if first == "blocks":
                    yield _place(owner, rest[0]), rest[1:], parameter
                else:
                    yield _place(owner), [first, *rest], parameter

    def _gates(self) -> dict[str, float]:
        return {
            f"{rest[-2]}/{place}": float(parameter.detach().float().tanh().abs().mean())
            for place, rest, parameter in self._parameters()
            if rest[-1] == "gate" and len(rest) > 1
        }

    def _gradients(self) -> dict[str, float]:
        gradients: dict[str, list[Tensor]] = {}
        for place, _, parameter in self._parameters():
            gradients.setdefault(place, []).extend([] if parameter.grad is None else [parameter.grad.float()])
        return {f"gradients/{place}": float(nn.utils.get_total_norm(parts)) for place, parts in gradients.items()}

    def _attention(self, forward: Callable[[], object]) -> dict[str, float]:
        try:
            with torch.no_grad(), record(self.model) as weights:
                forward()
        except ConditionError:  # the host's own attention does not give its weights
            return {}
        shares = {}
        for (owner, layer), calls in weights.items():
            if owner not in self.model.adapters:
                continue
            null = sum(_null_share(recorded) for recorded in calls) / len(calls)
            shares[f"memory_attention/{_place(owner, layer)}"] = round(1 - null, 6)
            if getattr(self.model.adapter(owner).config, "null_slot", False):
                shares[f"null_attention/{_place(owner, layer)}"] = round(null, 6)
        return shares


def _null_share(weights: Tensor) -> float:
    """Return the mean share of weights (b, h, l, m) on no slot, over the queries that attend to a slot."""
    total = weights.float().sum(-1)
    attending = total > 0
    return float((1 - total)[attending].mean()) if attending.any() else 0.0


def _place(owner: str, layer: str | int | None = None) -> str:
    return ("" if owner == "default" else f"{owner}/") + ("shared" if layer is None else f"layer_{layer}")


def attribute(
    model: AdaptedModel,
    ids: Tensor | Sequence[int],
    memory: Memory | Tensor,
    words: Sequence[str] | None = None,
    *,
    start: int = 1,
    sources: Sequence[str | None] | None = None,
    grid: tuple[int, int] | None = None,
    picture: Picture | None = None,
    title: str = "",
    name: str = "default",
    batch: int = 32,
) -> Trace:
    """Compute the attention of each token of a text to each source, and the token's probability without that source.

    The weights of a token are those at the position before it, which predicts it. Weights show where the model attends;
    the probabilities show whether this matters. Each source is masked once, in batches.

    Args:
        model: an adapted language model.
        ids: (l,) or (1, l), such as `generate` returns.
        memory: one row.
        words: the text of each token of `ids`; its id by default.
        start: the first token to explain, 1 or later, usually the first after the prompt.
        sources: the source name of each slot; slots with the same name are one source, and slots with None are skipped.
            By default the sources of the memory, or the patches of `grid`, or the slot numbers.
        grid: as in `Trace`.
        picture: as in `Trace`.
        title: as in `Trace`.
        name: name of the adapter that attends to the memory; other adapters get none.
        batch: rows per call.

    Raises:
        ShapeError: more than one row, or names that do not fit.
        ConfigError: no token to explain, or no source.
        ConditionError: the model predicts no tokens, or its adapter does not attend to the slots directly (a resampler,
            chunks).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> from mmattn.inspect import attribute
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> trace = attribute(model, [5, 6, 7], torch.randn(1, 4, 24), sources=["a", "a", "b", None])
    >>> trace.words, trace.sources, trace.weights.shape, trace.dropped.shape
    (('6', '7'), ('a', 'b'), torch.Size([2, 3, 2, 2]), torch.Size([2, 2]))
    """
    if not model.predicts_tokens:
        raise ConditionError(f"attribute explains tokens of a language model, got {type(model).__name__}: use record()")
    adapter = model.adapter(name)
    if all(adapter.attention(layer) is None for layer in adapter.layers):
        raise ConditionError(
            f"adapter {name!r} (kind {adapter.config.kind!r}) has no weights over a memory to be drawn: compare calls "
            "with other memories"
        )
    memory = (memory if isinstance(memory, Memory) else Memory(memory)).to(adapter.weight.device)
    row, texts = _text(torch.as_tensor(ids, device=memory.device), words, memory, start)
    names, owner = named_sources(memory, sources, grid)
    model = twin(model)  # hooks and modes would change calls of other threads
    with in_eval_mode(model), torch.no_grad():
        with record(model) as recorded:
            probability = _probability(model, row, memory, name, start)[0]
        weights = {layer: calls[0] for (adapter_name, layer), calls in recorded.items() if adapter_name == name}
        _check_slots(weights, name, row.shape[1], memory.length)
        with model.disable_adapter():
            without = _probability(model, row, None, name, start)[0]
        parts = torch.arange(len(names)).split(batch)
        memories = (emptied(memory.expand(len(part)), owner == part[:, None]) for part in parts)
        dropped = [_probability(model, row, one, name, start) for one in memories]
    # From slots to sources: (m, s).
    belongs = (owner[:, None] == torch.arange(len(names))).float()
    by_layer = {layer: recorded[0].float() @ belongs for layer, recorded in sorted(weights.items())}
    return Trace(
        texts[start:],
        names,
        torch.stack([shares[:, start - 1 : -1] for shares in by_layer.values()]),
        [f"layer {layer}" for layer in by_layer],
        title,
        probability=probability,
        without=without,
        dropped=torch.cat(dropped).T,
        grid=grid,
        picture=picture,
    )


def _text(ids: Tensor, words: Sequence[str] | None, memory: Memory, start: int) -> tuple[Tensor, list[str]]:
    """Return the ids (1, l) of a text and the text of each token, or refuse those that cannot be explained."""
    row = ids[None] if ids.dim() == 1 else ids
    if row.shape[0] != 1 or memory.batch != 1:
        raise ShapeError(f"one row of ids and of memory is explained, got {tuple(row.shape)} and {memory.batch} rows")
    length = row.shape[1]
    if check_int("start", start) >= length:
        raise ConfigError(f"start={start} leaves nothing to explain of {length} tokens")
    texts = [str(token) for token in row[0].tolist()] if words is None else list(words)
    if len(texts) != length:
        raise ShapeError(f"words must name each of {length} tokens, got {len(texts)}")
    return row, texts


def _check_slots(weights: dict[int, Tensor], name: str, length: int, slots: int) -> None:
    """Refuse weights that are not those of each token over each slot."""
    if not weights:
        raise ConditionError(f"the adapter {name!r} does not attend to its memory: it has no weights to explain by")
    for layer, recorded in weights.items():
        vectors, tokens = recorded.shape[3], recorded.shape[2]
        if tuple(recorded.shape[::2]) != (1, length) or vectors != slots:
            raise ConditionError(
                f"the adapter {name!r} attends to {vectors} vectors in rows of {tokens} at layer {layer}, "
                f"not to the {slots} slots it is given (a resampler, chunks): these vectors have no names"
            )


def _probability(model: AdaptedModel, row: Tensor, memory: Memory | None, name: str, start: int) -> Tensor:
    """Compute the probabilities (b, t) of the tokens from `start` on, each after those before it."""
    ids = row if memory is None else row.expand(memory.batch, -1)
    options = {} if memory is None else {"memory": {name: memory}}
    logits = call_by_name(model, input_ids=ids, **options).logits[:, start - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, ids[:, start:, None].to(logits.device))[..., 0].exp().cpu()


def named_sources(
    memory: Memory, sources: Sequence[str | None] | None = None, grid: tuple[int, int] | None = None
) -> tuple[list[str], Tensor]:
    """Return the names of a memory's sources, and the source (m,) of each slot, -1 for a masked slot or one without."""
    if grid is not None:
        if grid[0] * grid[1] != memory.length or sources is not None:
            raise ShapeError(
                f"a grid of {grid[0]} × {grid[1]} and names do not fit {memory.length} slots: give one of them"
            )
        # A grid is drawn whole: the weights of a masked patch are 0.
        patches = [f"row {i // grid[1] + 1}, column {i % grid[1] + 1}" for i in range(memory.length)]
        return patches, torch.arange(memory.length)
    slots: Sequence[object] | None = sources
    if slots is None:
        slots = memory.sources[0] if memory.sources else [f"slot {slot}" for slot in range(memory.length)]
    if len(slots) != memory.length:
        raise ShapeError(f"sources must name each of {memory.length} slots, got {len(slots)}")
    # The slots of one passage are one source, although each names its slot.
    wholes = [{k: v for k, v in one.items() if k != "slot"} if isinstance(one, dict) else one for one in slots]
    real = memory.real_slots()[0].tolist()
    keys = [json.dumps(one, sort_keys=True) if real[n] and one is not None else None for n, one in enumerate(wholes)]
    named = {key: slot_name(one) for key, one in zip(keys, wholes, strict=True) if key is not None}
    if not named:
        raise ConfigError("no visible slot of this memory has a source to explain: give sources=")
    numbers = {key: number for number, key in enumerate(named)}
    return list(named.values()), torch.tensor([-1 if key is None else numbers[key] for key in keys])


def media_names(memory: Memory, every: float | None = None, *, row: int = 0) -> list[str | None]:
    """Return a name for each slot of a memory of a sound, a series or a video, by its time; None for padding.

    Args:
        memory: of an encoder, with its sources.
        every: gather slots in stretches of so many seconds, or time steps of a series, by where they begin: slots of
            one name are one source to `attribute`.
        row: of the memory.

    Raises:
        ConfigError: sources that have no times.

    >>> sources = [[{"audio": 0, "start": 0.3, "end": 0.34}, {"video": 0, "frame": 2, "time": 1.0, "patch": [0, 3]}]]
    >>> media_names(Memory(torch.zeros(1, 2, 3), sources=sources))
    ['0.30–0.34 s', '1.00 s, row 1, column 4']
    >>> media_names(Memory(torch.zeros(1, 1, 3), sources=[sources[0][:1]]), every=0.25)
    ['0.25–0.50 s']
    """
    sources = memory.sources[row] if memory.sources is not None else [{}]
    if not all(source is None or isinstance(source, dict) and source.keys() & {"start", "time"} for source in sources):
        raise ConfigError(
            "this memory has no sources that say when its slots are: give one of an encoder of sounds, series or videos"
        )
    if every is not None:
        check_float("every", every, at_least=1e-6)
        sources = [_stretch(place, every) if place is not None and "start" in place else place for place in sources]
    return [None if source is None else slot_name(source) for source in sources]


def _stretch(source: Mapping[str, float], every: float) -> dict[str, float]:
    # A little later, so that the rounding of times does not count as the stretch before.
    start = int((source["start"] + 1e-6) / every) * every
    kind = "series" if "series" in source else "audio"
    return {kind: source[kind], "start": start, "end": start + every}


def slot_name(source: object) -> str:
    """Return the name of a source: text or id, times in a sound or series, time and patch in a video, or its JSON.

    >>> slot_name({"text": "a rose", "id": 7}), slot_name({"series": 0, "start": 16, "end": 32})
    ('a rose', '16–32')
    """
    if not isinstance(source, dict):
        return source if isinstance(source, str) else json.dumps(source)
    if "start" in source and "end" in source:
        series = "series" in source
        span = f"{source['start']:g}–{source['end']:g}" if series else f"{source['start']:.2f}–{source['end']:.2f} s"
        return f"{span}, band {source['band'] + 1}" if "band" in source else span
    if "video" in source and "time" in source:
        place = "".join(
            f", {name} {at + 1}" for name, at in zip(("row", "column"), source.get("patch", ()), strict=False)
        )
        return f"{source['time']:.2f} s{place}"
    return str(source.get("text") or source.get("id") or json.dumps(source))
