"""`attribute`: attention weights and leave-one-out probabilities of the tokens of a text, by source of the memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError, ConfigError, ShapeError, check_int
from mmattn.hosts.base import AdaptedModel
from mmattn.inspect.record_attention import record
from mmattn.inspect.source_names import named_sources
from mmattn.inspect.trace import Trace
from mmattn.inspect.trial import evaluating
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
    """The attention of each token of a text to each source, and the token's probability without that source.

    The weights of a token are those at the position that predicts it, the one before. Weights tell what a model attends
    to; the probabilities tell whether that matters. Each source is masked once, in batches.

    Args:
        model: an adapted language model.
        ids: (l,) or (1, l), such as `generate` returns.
        memory: one row.
        words: the text of each token of `ids`; its id by default.
        start: the first token to be explained, 1 or later: the one after the prompt.
        sources: the name of the source of each slot; slots of one name are one source, None is left out. By default
            the memory's own sources, or the patches of `grid`, or the slots by number.
        grid: as in `Trace`.
        picture: as in `Trace`.
        title: as in `Trace`.
        name: of the adapter that attends to the memory; others get none.
        batch: rows of one call.

    Raises:
        ShapeError: more than one row, or names that do not fit.
        ConfigError: no token to explain, or no source.
        ConditionError: the model predicts no tokens, or its adapter does not attend to the slots that it is given
            themselves (a resampler, chunks).

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
    model = _twin(model)
    with evaluating(model):
        with record(model) as recorded:
            probability = _probability(model, row, memory, name, start)[0]
        weights = {layer: calls[0] for (other, layer), calls in recorded.items() if other == name}
        _check_slots(weights, name, row.shape[1], memory.length)
        with model.disable_adapter():
            without = _probability(model, row, None, name, start)[0]
        parts = torch.arange(len(names)).split(batch)
        dropped = [_probability(model, row, _without(memory, owner, part), name, start) for part in parts]
        # Slots that are joined have their share of the text's own softmax, which rollout does not add up.
        joined = adapter.position == "joined"
        host_weights = None if joined else own_weights(model, input_ids=row, memory={name: memory})
    # From slots to sources: (m, s).
    belongs = (owner[:, None] == torch.arange(len(names))).float()
    by_layer = {layer: one[0].float() @ belongs for layer, one in sorted(weights.items())}
    rolled = None
    if host_weights is not None and len(host_weights) > max(by_layer):
        means = {layer: one.mean(0) for layer, one in by_layer.items()}
        rolled = roll_out(host_weights, means, adapter.position == "before")[start - 1 : -1]
    return Trace(
        texts[start:],
        names,
        torch.stack([one[:, start - 1 : -1] for one in by_layer.values()]),
        [f"layer {layer}" for layer in by_layer],
        title,
        rollout=rolled,
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
    texts = [str(one) for one in row[0].tolist()] if words is None else list(words)
    if len(texts) != length:
        raise ShapeError(f"words must name each of {length} tokens, got {len(texts)}")
    return row, texts


def _twin(model: AdaptedModel) -> AdaptedModel:
    """The model with modules of its own and the same parameters and buffers.

    What attribution changes (hooks, modes, the implementation of attention) would change calls of other threads.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def _check_slots(weights: dict[int, Tensor], name: str, length: int, slots: int) -> None:
    """Refuse weights that are not those of each token over each slot."""
    if not weights:
        raise ConditionError(f"the adapter {name!r} does not attend to its memory: it has no weights to explain by")
    for layer, one in weights.items():
        if tuple(one.shape[::2]) != (1, length) or one.shape[3] != slots:
            raise ConditionError(
                f"the adapter {name!r} attends to {one.shape[3]} vectors in rows of {one.shape[2]} at layer {layer}, "
                f"not to the {slots} slots it is given (a resampler, chunks): these vectors have no names"
            )


def _without(memory: Memory, owner: Tensor, sources: Tensor) -> Memory:
    """A memory with a row for each of these sources, in which the slots of that source are masked."""
    many = memory.expand(len(sources))
    masked = (owner == sources[:, None]).to(memory.device)
    return Memory(many.tokens, many.real_slots() & ~masked, many.segments, many.scores, check_finite=False)


def _probability(model: AdaptedModel, row: Tensor, memory: Memory | None, name: str, start: int) -> Tensor:
    """The probabilities (b, t) of the tokens from `start` on, each after those before it."""
    ids = row if memory is None else row.expand(memory.batch, -1)
    given = {} if memory is None else {"memory": {name: memory}}
    logits = model(input_ids=ids, **given).logits[:, start - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, ids[:, start:, None].to(logits.device))[..., 0].exp().cpu()


def roll_out(own: Sequence[Tensor], memory: Mapping[int, Tensor], before: bool = False) -> Tensor:
    """Shares (l, s) of the sources in the last states of the tokens.

    Args:
        own: A (l, l), the host's own weights at each of its layers.
        memory: C (l, s), the weights of the sources, by number of the host layer.
        before: whether the adapter's blocks come before their layer instead of after it.

    >>> own, memory = [torch.tensor([[1.0, 0.0], [0.5, 0.5]])] * 2, {0: torch.tensor([[0.8], [0.0]])}
    >>> roll_out(own, memory).tolist()  # the second token reads the source from the first
    [[0.4000000059604645], [0.10000000149011612]]
    """
    shares = torch.zeros_like(next(iter(memory.values())))
    for layer, weights in enumerate(own):
        if before:
            shares = _after_block(shares, memory.get(layer))
        shares = (shares + weights @ shares) / 2
        if not before:
            shares = _after_block(shares, memory.get(layer))
    return shares


def _after_block(shares: Tensor, weights: Tensor | None) -> Tensor:
    return shares if weights is None else (1 - weights.sum(-1, keepdim=True) / 2) * shares + weights / 2


def own_weights(model: nn.Module, **call: Any) -> list[Tensor] | None:
    """The host's own weights (l, l) at each layer in a call of one row, the mean over heads; None where it gives none.

    The host is left with the eager implementation of attention, which gives weights.
    """
    implementation = getattr(getattr(model.host, "config", None), "_attn_implementation", None)
    change = getattr(model.host, "set_attn_implementation", None)
    if implementation is None or change is None:
        return None
    if implementation != "eager":
        change("eager")
    by_layer = getattr(model(**call, output_attentions=True), "attentions", None)
    if not by_layer or any(weights is None or weights.dim() != 4 for weights in by_layer):
        return None
    return [weights[0].float().mean(0).cpu() for weights in by_layer]
