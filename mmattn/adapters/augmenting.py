"""A frozen language model that reads the text of a host beside it: its states of that text as a memory.

It has a key/value cache of its own, which follows the host's: begun anew where the host begins anew, put in the order
of the beams, cut where a draft was rejected. Which rows and tokens stay cached is told by the text itself.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import depth_of, device_of, embeddings_of, text_config, width_of
from mmattn.adapters.text_state import TextState
from mmattn.core.attention import combine_masks, visible_rows
from mmattn.core.kv import KeyValue
from mmattn.core.masks import causal
from mmattn.core.tracing import may_read
from mmattn.errors import AttachError, ConditionError, ConfigError, ShapeError
from mmattn.memory import Memory


class AugmentingModel:
    """A language model as the memory of a `ComposedAdapter`: it reads the text of the call, as far as that has come.

    It becomes no part of host or adapter, is never trained, and what it has read is forgotten with the call.

    Args:
        lm: a causal language model of transformers in eval mode, whose tokenizer is the host's.

    Raises:
        AttachError: not a language model, or one whose tokens see later ones.
        ConditionError: it is in training mode.

    >>> import mmattn
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=97, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    >>> anchor = LlamaForCausalLM(LlamaConfig(hidden_size=32, **sizes)).eval()
    >>> lm = LlamaForCausalLM(LlamaConfig(hidden_size=24, **sizes)).eval()
    >>> model = mmattn.attach(anchor, mmattn.ComposedAdapter(memory_dim=24, layers=[1, 2], augmenting_layers=[0, 2]))
    >>> model.generate(torch.tensor([[5, 6, 7]]), memory=mmattn.AugmentingModel(lm), max_new_tokens=4).shape
    torch.Size([1, 7])
    """

    def __init__(self, lm: nn.Module) -> None:
        if not isinstance(lm, nn.Module):
            raise AttachError(f"an augmenting model is a language model of transformers, got {type(lm).__name__}")
        self.dim, self.depth = width_of(lm), depth_of(lm) or 0
        self.lm = lm
        # Without its head, whose answer nobody asks for.
        self._body: Any = getattr(lm, "base_model", lm)
        self._positions = "position_ids" in inspect.signature(self._body.forward).parameters
        self._check_eval()
        self._probe()

    def _check_eval(self) -> None:
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
                f"tokens of this {type(self.lm).__name__} see later ones, and its states would tell the host of words "
                "that are not yet written: take a causal language model"
            )

    def check(self, adapter: Any, host: nn.Module) -> None:
        """Refuse an adapter on a host that cannot read this model.

        Args:
            adapter: the trainable part of a composed adapter.
            host: the frozen model that it is on.

        Raises:
            ShapeError: another width, fewer layers or another vocabulary.
            ConditionError: the model is being trained.
        """
        kind, wanted = type(self.lm).__name__, adapter.config.memory_dim
        if self.dim != wanted:
            raise ShapeError(
                f"adapter {adapter.name!r} was made for memory_dim={wanted}, got a {kind} of width {self.dim}: use the "
                "augmenting model it was trained with"
            )
        deepest = max(adapter.augmenting_layers.values())
        if deepest >= self.depth:
            raise ShapeError(
                f"adapter {adapter.name!r} reads layer {deepest} of the augmenting model, got a {kind} with layers 0 "
                f"to {self.depth - 1}: use the one it was trained with, or name other augmenting_layers"
            )
        here, there = (getattr(text_config(lm), "vocab_size", None) for lm in (host, self.lm))
        if here != there:
            raise ShapeError(
                f"the augmenting model reads the ids of the host, whose vocabulary has {here} entries, got a {kind} "
                f"with {there}: the two must have one tokenizer"
            )
        self._check_eval()

    def read(
        self, text: TextState, layers: list[int], before: AugmentedText | None, name: str, keep: bool
    ) -> AugmentedText:
        """A text with the states of its tokens at some layers; only what was not read before is computed.

        Args:
            text: what the host is given.
            layers: of this model.
            before: what was read of an earlier text, to go on from.
            name: of the adapter that reads, for messages.
            keep: fill a key/value cache, so that this can be gone on from.

        Raises:
            ConditionError: the ids of the whole text are not known.
            NonFiniteError: states that are not finite.
        """
        real, ids = text.whole
        if ids is None:
            raise ConditionError(
                f"adapter {name!r} has another model read along, and this call does not tell the ids of the whole "
                "text: give input_ids from the first token on, or use generate"
            )
        device = device_of(embeddings_of(self.lm))
        real, ids = real.to(device), ids.to(device)
        # What is cached must serve calls outside inference mode, too.
        with torch.inference_mode(False), torch.no_grad():
            known = None if before is None else before.shared_with(real, ids)
            past = 0 if known is None else known.length
            if known is not None and past == real.shape[1]:
                return replace(known, real=real, ids=ids)
            given: dict[str, Any] = {"input_ids": ids[:, past:], "attention_mask": real.long()}
            if self._positions:
                given["position_ids"] = token_places(real)[:, past:]
            cache = known.cache if known is not None else new_cache() if keep else None
            out = self._body(**given, past_key_values=cache, use_cache=keep, output_hidden_states=True)
            # Hidden states begin with the embeddings.
            states = {layer: out.hidden_states[layer + 1] for layer in layers}
            for new in states.values():
                Memory(new, real[:, past:], check_finite=False).check_finite()
            if known is not None:
                states = {layer: torch.cat([known.states[layer], new], 1) for layer, new in states.items()}
        return AugmentedText(real, ids, states, cache, {} if known is None else known.projected)

    @property
    def caches(self) -> bool:
        """Whether its cache can be cut and reordered."""
        return not getattr(self.lm, "_is_stateful", False)


@dataclass(frozen=True)
class AugmentedText:
    """What an augmenting model has read in one call, t tokens with padding.

    Args:
        real: (b, t) bool, which tokens are no padding.
        ids: (b, t) token ids.
        states: (b, t, e) by layer of the model.
        cache: the model's own, None where nothing is cached.
        projected: keys and values of the first tokens, by layer of the host.
    """

    real: Tensor
    ids: Tensor
    states: dict[int, Tensor]
    cache: Any
    projected: dict[int, KeyValue]

    @property
    def length(self) -> int:
        """Number of tokens t, padding included."""
        return self.real.shape[1]

    def shared_with(self, real: Tensor, ids: Tensor) -> AugmentedText | None:
        """The part of this with which all rows of a text begin, in their order; None where there is none.

        The cache is changed in place: what is not shared is gone.
        """
        rows, length = common_beginning((self.real, self.ids), (real, ids))
        if not length:
            return None
        if rows.tolist() != list(range(self.real.shape[0])):
            self.cache.reorder_cache(rows)
        if length < self.length:
            self.cache.crop(length - self.length)
        return AugmentedText(
            real[:, :length],
            ids[:, :length],
            {layer: states[rows.to(states.device), :length] for layer, states in self.states.items()},
            self.cache,
            {layer: one.pick(rows.to(one.keys.device), length) for layer, one in self.projected.items()},
        )


class AugmentedSource:
    """An augmenting model bound to the adapter that reads it, for one call.

    Args:
        model: the augmenting model.
        adapter: the trainable part of a composed adapter.
    """

    rows: int | None = None
    follows_text = True

    def __init__(self, model: AugmentingModel, adapter: Any) -> None:
        self.model, self.adapter = model, adapter
        self._read: dict[None, AugmentedText] = {}

    def step(self, text: TextState) -> AugmentedStates:
        """What this forward sees: the model reads as far as the text has come.

        Raises:
            ConditionError: the ids of the whole text are not known.
            NonFiniteError: states that are not finite.
        """
        keep = not torch.is_grad_enabled() and self.model.caches
        # Taken out: no two threads ever fill one cache.
        before = self._read.pop(None, None)
        if text.past == 0 or not keep:
            before = None
        layers = sorted(set(self.adapter.augmenting_layers.values()))
        read = self.model.read(text, layers, before, self.adapter.name, keep)
        if keep:
            self._read[None] = read
        return AugmentedStates(read, self.adapter)

    def as_memory(self, text: TextState) -> Memory:
        """There is none: the states change with the text.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"adapter {self.adapter.name!r} reads the states of another model, which no other memory can stand for: "
            "give a batch with a memory for the other adapters"
        )


@dataclass(frozen=True)
class AugmentedStates:
    """What the tokens of one forward see of an augmenting model: the states of the text up to each token's own.

    Args:
        text: what the model has read.
        adapter: the trainable part of a composed adapter.
    """

    text: AugmentedText
    adapter: Any

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What a block gives for the hidden states x (b, l, d) of the last l tokens; padding stays bit for bit."""
        rows, length = x.shape[:2]
        total, real = self.text.length, self.text.real.to(x.device)
        mask = None if may_read(real) and bool(real.all()) else real
        rule = causal(length, total, total - length, device=x.device).tensor if length > 1 else None
        allowed = combine_masks(mask, rule, (rows, rows, 1, length, total))
        out: Tensor = block(
            x,
            self._memory(layer, mask, x.device),
            attention_mask=rule,
            query_positions=token_places(real)[:, total - length :],
            seen=visible_rows(allowed, rows, total, device=x.device),
            adapter_scale=adapter_scale,
        )
        return out

    def _memory(self, layer: int, mask: Tensor | None, device: torch.device) -> KeyValue:
        """Keys and values of the states that a host layer attends to; cached where nothing is trained."""
        text, adapter = self.text, self.adapter
        states = text.states[adapter.augmenting_layers[layer]]
        cached = text.projected.get(layer)
        past = 0 if cached is None else cached.slots
        positions = token_places(text.real.to(device))[:, past:]

        def project() -> KeyValue:
            new = Memory(states[:, past:], text.real[:, past:], check_finite=False)
            tokens = adapter.read(new).tokens.to(device)
            projected: KeyValue = adapter.attention(layer).project(tokens, memory_positions=positions)
            return projected

        if text.cache is None:
            return replace(project(), mask=mask, seen=None)
        if past < text.length:
            with torch.inference_mode(False), torch.no_grad():
                more = project()
                cached = text.projected[layer] = more if cached is None else cached.append(more)
        assert cached is not None
        return replace(cached, mask=mask, seen=None)


def common_beginning(before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """For each row of a text the row of an earlier one that begins most like it, and how many tokens ALL rows share so.

    Args:
        before: which tokens of the earlier text are real (n, t) bool, and their ids (n, t).
        now: the same of the text, (b, t').

    >>> before, now = torch.tensor([[5, 6, 7], [5, 8, 9]]), torch.tensor([[5, 8, 9, 1], [5, 8, 3, 1]])
    >>> common_beginning(*((torch.ones_like(ids, dtype=torch.bool), ids) for ids in (before, now)))
    (tensor([1, 1]), 2)
    """
    rows, length = now[1].shape[0], min(before[1].shape[1], now[1].shape[1])
    if not (before[1].shape[0] and rows):
        return torch.zeros(rows, dtype=torch.long, device=now[1].device), 0
    same = now[1][:, None, :length] == before[1][:, :length]
    same &= now[0][:, None, :length] == before[0][:, :length]
    most, index = same.long().cumprod(2).sum(2).max(1)
    return index, int(most.min())


def token_places(real: Tensor) -> Tensor:
    """The index of each token (b, t) among the real ones of its row.

    >>> token_places(torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    return (real.cumsum(1) - 1).clamp(min=0)


def new_cache() -> Any:
    """A cache that can be cut anywhere: made without a config, sliding windows are masked and not forgotten."""
    import transformers

    return transformers.DynamicCache()
