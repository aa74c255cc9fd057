"""A frozen language model that reads along with a host: what it has read of a text, and its states as a memory.

It has a key/value cache of its own, which follows the host's: begun anew where the host begins anew, put in the order
of the beams, cut where a draft was refused. Which rows and tokens are kept is told by the text itself.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.composed import ComposedLayers
from mmattn.core.attention import combine_masks, visible_rows
from mmattn.core.kv import KeyValue
from mmattn.core.masks import causal
from mmattn.core.tracing import may_read
from mmattn.errors import AttachError, ConditionError, ShapeError
from mmattn.hosts.causal_lm.decoder_layers import device_of, embeddings_of
from mmattn.hosts.causal_lm.layer_search import host_depth, host_width, text_config
from mmattn.hosts.causal_lm.text_state import Text
from mmattn.memory import Memory

if TYPE_CHECKING:
    from mmattn.hosts.calls import Call


class AugmentingModel:
    """A language model as the memory of a `ComposedAdapter`: it reads the text of the call, as far as that has come.

    It becomes no part of host or adapter, is never trained, and what it has read is forgotten with the call.

    Args:
        lm: a causal language model of transformers in eval mode, whose tokenizer is the host's.

    Raises:
        AttachError: not a language model, or one whose tokens see later ones. ConditionError: it is in training mode.

    >>> import mmattn
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=97, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    >>> anchor = LlamaForCausalLM(LlamaConfig(hidden_size=32, **sizes)).eval()
    >>> lm = LlamaForCausalLM(LlamaConfig(hidden_size=24, **sizes)).eval()
    >>> model = mmattn.attach(anchor, mmattn.ComposedAdapter(memory_dim=24, layers=[1, 2], augmenting_layers=[0, 2]))
    >>> model.generate(torch.tensor([[5, 6, 7]]), memory=mmattn.AugmentingModel(lm), max_new_tokens=4).shape
    torch.Size([1, 7])
    """

    batch: int | None = None

    def __init__(self, lm: nn.Module) -> None:
        if not isinstance(lm, nn.Module):
            raise AttachError(f"an augmenting model is a language model of transformers, got {type(lm).__name__}")
        self.dim, self.depth = host_width(lm), host_depth(lm) or 0
        self.lm = lm
        # Without its head, whose answer nobody asks for.
        self._body: Any = getattr(lm, "base_model", lm)
        self._positions = "position_ids" in inspect.signature(self._body.forward).parameters
        self._check_resting()
        self._probe()

    def _check_resting(self) -> None:
        if self.lm.training:
            raise ConditionError(
                f"the augmenting {type(self.lm).__name__} is in training mode, where dropout gives a token other "
                "states each time: call .eval() on it"
            )

    def _probe(self) -> None:
        """Prove with two texts of two tokens that the first token's state does not depend on the second token."""
        ids = torch.tensor([[1, 1], [1, 0]], device=device_of(embeddings_of(self.lm)))
        with torch.inference_mode(False), torch.no_grad():
            out = self._body(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        one, other = out.hidden_states[-1][:, 0]
        rounding = 16 * torch.finfo(one.dtype).eps * float(one.abs().max())
        if bool(((one - other).abs() > rounding).any()):
            raise AttachError(
                f"tokens of this {type(self.lm).__name__} see later ones, and what it reads along would tell the host "
                "of words that are not yet written: take a causal language model"
            )

    def check(self, name: str, adapter: ComposedLayers, host: nn.Module) -> None:
        """Refuse an adapter, attached as `name` to `host`, that cannot read this model.

        Raises:
            ShapeError: another width, fewer layers or another vocabulary. ConditionError: the model is being trained.
        """
        kind, wanted = type(self.lm).__name__, adapter.config.memory_dim
        if self.dim != wanted:
            raise ShapeError(
                f"adapter {name!r} was made for memory_dim={wanted}, got a {kind} of width {self.dim}: use the "
                "augmenting model it was trained with"
            )
        deepest = max(adapter.augmenting_layers.values())
        if deepest >= self.depth:
            raise ShapeError(
                f"adapter {name!r} reads layer {deepest} of the augmenting model, got a {kind} with layers 0 to "
                f"{self.depth - 1}: use the one it was trained with, or name other augmenting_layers"
            )
        here, there = (getattr(text_config(lm), "vocab_size", None) for lm in (host, self.lm))
        if here != there:
            raise ShapeError(
                f"the augmenting model reads the ids of the host, whose vocabulary has {here} entries, got a {kind} "
                f"with {there}: the two must have one tokenizer"
            )
        self._check_resting()

    def follow(self, text: Text, name: str, adapter: ComposedLayers, call: Call, fresh: bool) -> Reading:
        """Read the text that the host is at, for the adapter attached as `name`.

        Args:
            call: keeps what was read for the next piece, unless gradients are asked for. fresh: the host begins anew.

        Raises:
            ConditionError: the ids of the whole text are not told. NonFiniteError: states that are no numbers.
        """
        if text.ids is None:
            raise ConditionError(
                f"adapter {name!r} has another model read along, and this call does not tell the ids of the whole "
                "text: give input_ids from the first token on, or use generate"
            )
        keep = not torch.is_grad_enabled() and not getattr(self.lm, "_is_stateful", False)
        # Taken out: no two threads ever fill one cache.
        before = call.readings.pop(name, None)
        device = device_of(embeddings_of(self.lm))
        text = Text(text.real.to(device), text.ids.to(device))
        # What is kept must serve calls outside inference mode, too.
        with torch.inference_mode(False), torch.no_grad():
            known = None if fresh or before is None or not keep else before.kept(text)
            reading = self._read(text, sorted(set(adapter.augmenting_layers.values())), known, keep)
        if keep:
            call.readings[name] = reading
        return reading

    def _read(self, text: Text, layers: list[int], known: Reading | None, keep: bool) -> Reading:
        """A text with the states of its tokens at some layers; only what is not `known` is read."""
        assert text.ids is not None
        past = 0 if known is None else known.length
        if known is not None and past == text.real.shape[1]:
            return replace(known, text=text)
        given: dict[str, Any] = {"input_ids": text.ids[:, past:], "attention_mask": text.real.long()}
        if self._positions:
            given["position_ids"] = places(text.real)[:, past:]
        cache = known.cache if known is not None else new_cache() if keep else None
        out = self._body(**given, past_key_values=cache, use_cache=keep, output_hidden_states=True)
        states = {layer: out.hidden_states[layer + 1] for layer in layers}
        for new in states.values():
            Memory(new, text.real[:, past:], check_finite=False).check_finite()
        if known is None:
            return Reading(text, states, cache, {})
        return Reading(
            text, {layer: torch.cat([known.states[layer], new], 1) for layer, new in states.items()}, cache, known.made
        )


@dataclass(frozen=True)
class Reading:
    """What an augmenting model has read in one call.

    Args:
        text: all of it, t tokens. states: (b, t, e) by layer of the model. cache: the model's own, None where nothing
            is kept. made: the keys and values of the first tokens, by layer of the host.
    """

    text: Text
    states: dict[int, Tensor]
    cache: Any
    made: dict[int, KeyValue]

    @property
    def length(self) -> int:
        """Number of tokens t, padding included."""
        return self.text.real.shape[1]

    def kept(self, text: Text) -> Reading | None:
        """The part of this with which the rows of a text begin, in their order, None where there is none.

        The cache is changed in place: what is not kept is gone.
        """
        rows, length = common(self.text, text)
        if not length:
            return None
        if rows.tolist() != list(range(self.text.real.shape[0])):
            self.cache.reorder_cache(rows)
        if length < self.length:
            self.cache.crop(length - self.length)
        assert text.ids is not None
        return Reading(
            Text(text.real[:, :length], text.ids[:, :length]),
            {layer: states[rows.to(states.device), :length] for layer, states in self.states.items()},
            self.cache,
            {layer: made.pick(rows.to(made.keys.device), length) for layer, made in self.made.items()},
        )

    def adapt(self, x: Tensor, adapter: ComposedLayers, layer: int, strength: float) -> Tensor:
        """What the hidden states x (b, l, d) of the last l tokens become behind or before a host layer.

        A token sees the states of real tokens up to its own; padding sees nothing and stays bit for bit.
        """
        rows, length = x.shape[:2]
        real = self.text.real.to(x.device)
        mask = None if may_read(real) and bool(real.all()) else real
        rule = causal(length, self.length, self.length - length, device=x.device).tensor if length > 1 else None
        allowed = combine_masks(mask, rule, (rows, rows, 1, length, self.length))
        memory = self._memory(adapter, layer, mask, x.device)
        projected = isinstance(memory, KeyValue)
        return adapter.block(layer)(
            x,
            memory,
            mask=None if projected else mask,
            attention_mask=rule,
            query_positions=places(real)[:, self.length - length :],
            memory_positions=None if projected else places(real),
            seen=visible_rows(allowed, rows, self.length, device=x.device),
            strength=strength,
        )

    def _memory(
        self, adapter: ComposedLayers, layer: int, mask: Tensor | None, device: torch.device
    ) -> Tensor | KeyValue:
        """The states that a host layer reads, as the adapter reads them; projected where nothing is trained."""
        states = self.states[adapter.augmenting_layers[layer]]
        made = self.made.get(layer)
        past = 0 if made is None else made.slots
        new = Memory(states[:, past:], self.text.real[:, past:], check_finite=False)
        if self.cache is None:
            return adapter.read(new).tokens.to(device)
        if past < self.length:
            with torch.inference_mode(False), torch.no_grad():
                more = adapter.attention(layer).project(
                    adapter.read(new).tokens.to(device), memory_positions=places(self.text.real.to(device))[:, past:]
                )
                made = self.made[layer] = more if made is None else made.append(more)
        assert made is not None
        return replace(made, mask=mask)


def common(before: Text, now: Text) -> tuple[Tensor, int]:
    """For each row of a text the row of an earlier one that begins most like it, and how many tokens all rows share so.

    >>> before, now = torch.tensor([[5, 6, 7], [5, 8, 9]]), torch.tensor([[5, 8, 9, 1], [5, 8, 3, 1]])
    >>> common(*(Text(torch.ones_like(ids, dtype=torch.bool), ids) for ids in (before, now)))
    (tensor([1, 1]), 2)
    """
    assert before.ids is not None and now.ids is not None
    rows, length = now.ids.shape[0], min(before.ids.shape[1], now.ids.shape[1])
    if not (before.ids.shape[0] and rows):
        return torch.zeros(rows, dtype=torch.long, device=now.ids.device), 0
    same = now.ids[:, None, :length] == before.ids[:, :length]
    same &= now.real[:, None, :length] == before.real[:, :length]
    most, index = same.long().cumprod(2).sum(2).max(1)
    return index, int(most.min())


def places(real: Tensor) -> Tensor:
    """The place of each token (b, t) among the real ones of its row.

    >>> places(torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    return (real.cumsum(1) - 1).clamp(min=0)


def new_cache() -> Any:
    """A cache that can be cut anywhere: made without a config, sliding windows are masked and not forgotten."""
    import transformers

    return transformers.DynamicCache()
