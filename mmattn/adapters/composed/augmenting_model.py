"""A frozen language model that reads the text of a host: all of it along with the host, or its prompt before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import (
    cache_name,
    call_by_name,
    depth_of,
    device_of,
    embeddings_of,
    given_cache,
    text_config,
    width_of,
)
from mmattn.adapters.joined.rotation import Rotations, read_rotations
from mmattn.adapters.text_state import TextState
from mmattn.core.key_values import KeyValue
from mmattn.core.positions import token_positions
from mmattn.errors import AttachError, ConditionError, ConfigError, ShapeError
from mmattn.memory import Memory
from mmattn.tokenization import call_tokenizer

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedTokenizerBase


@dataclass(frozen=True)
class AugmentedText:
    """The states that an augmenting model has computed in one call, of t tokens with padding."""

    real: Tensor  # (b, t) bool, which tokens are no padding
    ids: Tensor  # (b, t) token ids
    states: dict[int, Tensor]  # (b, t, e) by layer of the model
    cache: DynamicCache | None  # the model's own; None if nothing is cached
    projected: dict[int, KeyValue]  # keys and values of the first tokens, by layer of the host

    @property
    def length(self) -> int:
        """Number of tokens t, padding included."""
        return self.real.shape[1]

    def shared_with(self, real: Tensor, ids: Tensor) -> AugmentedText | None:
        """Return the part with which all rows of a text begin, in their order, or None; the cache is cut in place."""
        rows, length = common_beginning((self.real, self.ids), (real, ids))
        if not length or self.cache is None:
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


@dataclass(frozen=True)
class AugmentedPrompt:
    """Prompts that `AugmentingModel.prefill` read: the memory of a `FusedCacheAdapter`, for any number of calls.

    Args:
        states: by layer of the model (b, p, e), keys of all heads, turned to position 0, and values.
        real: (b, p) bool, which tokens are no padding.
        ids: (b, p), of the tokens; a text that begins with others is refused. None if they are not known.
    """

    states: tuple[Tensor, ...]
    real: Tensor
    ids: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.real)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> AugmentedPrompt:
        """Return some rows, by number, slice or list."""
        return self._map(lambda one: one[torch.arange(self.batch)[rows].reshape(-1)])

    def repeated(self, times: int) -> AugmentedPrompt:
        """Return each row several times, for the beams of a text."""
        return self if times == 1 else self._map(lambda one: one.repeat_interleave(times, 0))

    def states_of(self, layers: Sequence[int], numbers: Tensor) -> Tensor:
        """Return the states of some layers one after the other (b, m, …) of tokens by number (b, m); −1 is like 0."""
        index = numbers.clamp(min=0)[..., None]
        parts = [self.states[layer].to(numbers.device) for layer in layers]
        return torch.cat([one.gather(1, index.expand(-1, -1, one.shape[2])) for one in parts], 2)

    def _map(self, change: Callable[[Tensor], Tensor]) -> AugmentedPrompt:
        ids = None if self.ids is None else change(self.ids)
        return AugmentedPrompt(tuple(map(change, self.states)), change(self.real), ids)

    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(one.nbytes for one in self.states)

    def left_aligned(self) -> AugmentedPrompt:
        """Return the prompts with the real tokens of each row first, 0 after them."""
        longest = int(self.real.sum(1).max()) if self.real.numel() else 0
        order = torch.sort((~self.real).to(torch.uint8), dim=1, stable=True).indices[:, :longest]
        real = self.real.gather(1, order)
        states = tuple(
            one.gather(1, order[..., None].expand(-1, -1, one.shape[2])).masked_fill(~real[..., None], 0)
            for one in self.states
        )
        return AugmentedPrompt(states, real, None if self.ids is None else self.ids.gather(1, order))

    def check_begins(self, ids: Tensor, places: Tensor, visible: Tensor, name: str) -> None:
        """Check that a text begins with these prompts, which are left-aligned.

        Raises:
            ConditionError: another token.
        """
        if self.ids is None:
            return
        prompt = self.ids.to(ids.device)
        read = prompt.gather(1, places.clamp(max=max(prompt.shape[1] - 1, 0)))
        wrong = ((read != ids) & visible).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise ConditionError(
                f"adapter {name!r} got the cache of another prompt: token {token} of row {row} is "
                f"{int(ids[row, token])}, in the cache it is {int(read[row, token])}; prefill the prompt at the "
                "start of the text"
            )


def common_beginning(before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return for each row of a text the row of an earlier one that begins most like it, and how many tokens ALL share.

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


class AugmentingModel:
    """A language model as the memory of a `ComposedAdapter`: it reads the text of the call so far.

    It is not part of the host or the adapter, is never trained, and forgets the text after the call.

    Args:
        lm: a causal language model of transformers in eval mode, whose tokenizer is the host's.
        tokenizers: for a `FusedCacheAdapter`, the fast tokenizers of the host and of `lm`, if they differ. A token of
            the host then gets the mean of the cache of `lm` over its characters.

    Raises:
        AttachError: not a language model, or one whose tokens see later ones.
        ConfigError: a tokenizer that is not fast.
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

    def __init__(
        self,
        lm: nn.Module,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
    ) -> None:
        if not isinstance(lm, nn.Module):
            raise AttachError(f"an augmenting model is a language model of transformers, got {type(lm).__name__}")
        self.dim, self.depth = width_of(lm), depth_of(lm) or 0
        self.lm, self.tokenizers = lm, tokenizers
        if not all(getattr(one, "is_fast", False) for one in tokenizers or ()):
            raise ConfigError(
                "spans of characters come from two fast tokenizers (is_fast), the host's and that of the lm"
            )
        # The head is not needed, and LoRA stands in the model that peft wraps.
        wrapped: Callable[[], nn.Module] | None = getattr(lm, "get_base_model", None)
        inner = lm if wrapped is None else wrapped()
        self._body: nn.Module = getattr(inner, "base_model", inner)
        self._positions = "position_ids" in inspect.signature(self._body.forward).parameters
        self._cache_name = cache_name(self._body)
        self._check_eval()
        self._probe()

    def _check_eval(self) -> None:
        if self.lm.training:
            raise ConditionError(
                f"the augmenting {type(self.lm).__name__} is in training mode, where dropout gives a token other "
                "states each time: call .eval() on it"
            )

    @cached_property
    def cache_dim(self) -> int:
        """Width e of what it caches of a token in a layer: keys and values of all heads."""
        text = torch.ones(1, 1, dtype=torch.long, device=device_of(embeddings_of(self.lm)))
        keys, values = self._cached(text, text.bool(), torch.zeros_like(text))[0]
        return keys.shape[1] * (keys.shape[3] + values.shape[3])

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> AugmentedPrompt:
        """Read prompts once: keys and values of every layer, as the memory of a `FusedCacheAdapter`.

        Args:
            input_ids: (b, p), the prompts at the start of later calls, in tokens of the host.
            attention_mask: (b, p), 1 = a real token; all by default.

        Raises:
            ShapeError: no ids (b, p), or a mask of another shape.
            ConditionError: the model is in training mode, or has no keys and values of a token; or the host's tokenizer
                has other ids for the text.
            NonFiniteError: keys or values that are not finite.
        """
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ShapeError(f"input_ids must be ids (b, p), got {input_ids.dtype} {tuple(input_ids.shape)}")
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if real.shape != input_ids.shape:
            raise ShapeError(
                f"attention_mask must be {tuple(input_ids.shape)}, as input_ids are, got {tuple(real.shape)}"
            )
        self._check_eval()
        device = device_of(embeddings_of(self.lm))
        host_ids, host_real = input_ids.to(device), real.to(device).bool()
        ids, real, shares = host_ids, host_real, None
        if self.tokenizers is not None:
            ids, real, shares = (one.to(device) for one in retokenize(host_ids, host_real, *self.tokenizers))
        places, layers = token_positions(real), []
        for number, (keys, values) in enumerate(self._cached(ids, real, places)):
            rotation = None if self._rotations is None else self._rotations[number]
            # As they are at position 0: what is learned of a key does not depend on where its token stands.
            turned = keys if rotation is None else rotation(keys, -places[:, None])
            layers.append(torch.cat([one.transpose(1, 2).flatten(2) for one in (turned, values)], 2))
            Memory(layers[-1], real, check_finite=False).check_finite()
        if shares is not None:
            layers = [shares.to(one) @ one.masked_fill(~real[..., None], 0) for one in layers]
        return AugmentedPrompt(tuple(layers), host_real, host_ids.clone())

    @cached_property
    def _rotations(self) -> Rotations:
        """Rotation of keys by position in its layers; None if keys depend on positions otherwise."""
        if not self._positions:
            return None
        places = torch.arange(7, device=device_of(embeddings_of(self.lm)))[None]
        most = getattr(text_config(self.lm), "max_position_embeddings", None)
        return read_rotations(self.lm, self._keys_at, places, most)

    def _keys_at(self, positions: Tensor) -> dict[int, Tensor]:
        """Return keys by layer of a short text whose tokens stand at these positions (1, l)."""
        size = getattr(text_config(self.lm), "vocab_size", None) or 2
        ids = torch.randint(size, (1, 8), generator=torch.Generator().manual_seed(0), device="cpu")
        ids = ids[:, : positions.shape[1]].to(positions.device)
        real = torch.ones_like(ids, dtype=torch.bool)
        return {layer: keys for layer, (keys, _) in enumerate(self._cached(ids, real, positions))}

    def _cached(self, ids: Tensor, real: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values (b, g, p, k) that it caches of a text in each layer."""
        inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": real.long()}
        if self._positions:
            inputs["position_ids"] = positions
        layers: list[tuple[Tensor, Tensor]] = []
        if self.caches:
            with torch.inference_mode(False), torch.no_grad():
                out = call_by_name(self._body, **inputs, **{self._cache_name: new_cache()}, use_cache=True)
            cached = getattr(given_cache(out), "layers", ())
            layers = [(one.keys, one.values) for one in cached if hasattr(one, "keys")]
        if len(layers) != self.depth or any(keys is None or keys.shape[2] != ids.shape[1] for keys, _ in layers):
            raise ConditionError(
                f"{type(self.lm).__name__} does not cache keys and values of each token in every layer, as a "
                "FusedCacheAdapter reads them: take a ComposedAdapter, which reads states"
            )
        return layers

    def _probe(self) -> None:
        """Prove with two texts of two tokens that the first token's state does not depend on the second token."""
        ids = torch.tensor([[1, 1], [1, 0]], device=device_of(embeddings_of(self.lm)))
        with torch.inference_mode(False), torch.no_grad():
            out = call_by_name(
                self._body, input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
            )
        one, other = out.hidden_states[-1][:, 0]
        rounding = 16 * torch.finfo(one.dtype).eps * float(one.abs().max())
        if bool(((one - other).abs() > rounding).any()):
            raise AttachError(
                f"tokens of this {type(self.lm).__name__} see later ones, and its states would tell the host of words "
                "that are not yet written: take a causal language model"
            )

    def check(self, name: str, memory_dim: int, deepest: int, host: nn.Module) -> None:
        """Check that an adapter on a host can read this model.

        Raises:
            ShapeError: another width, fewer layers or another vocabulary.
            ConditionError: the model is being trained.
        """
        kind = type(self.lm).__name__
        if self.dim != memory_dim:
            raise ShapeError(
                f"adapter {name!r} was made for memory_dim={memory_dim}, got a {kind} of width {self.dim}: use the "
                "augmenting model it was trained with"
            )
        if deepest >= self.depth:
            raise ShapeError(
                f"adapter {name!r} reads layer {deepest} of the augmenting model, got a {kind} with layers 0 to "
                f"{self.depth - 1}: use the one it was trained with, or name other augmenting_layers"
            )
        size, lm_size = (getattr(text_config(lm), "vocab_size", None) for lm in (host, self.lm))
        if size != lm_size or self.tokenizers is not None:
            raise ShapeError(
                f"the augmenting model reads the ids of the host, whose vocabulary has {size} entries, got a {kind} "
                f"with {lm_size}: the two must have one tokenizer"
            )
        self._check_eval()

    def read(
        self, text: TextState, layers: list[int], before: AugmentedText | None, name: str, keep: bool
    ) -> AugmentedText:
        """Return a text with the states of its tokens at some layers; only new tokens are computed.

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
            earlier = None if before is None else before.shared_with(real, ids)
            past = 0 if earlier is None else earlier.length
            if earlier is not None and past == real.shape[1]:
                return replace(earlier, real=real, ids=ids)
            inputs: dict[str, Tensor] = {"input_ids": ids[:, past:], "attention_mask": real.long()}
            if self._positions:
                inputs["position_ids"] = token_positions(real)[:, past:]
            cache = earlier.cache if earlier is not None else new_cache() if keep else None
            out = call_by_name(
                self._body, **inputs, **{self._cache_name: cache}, use_cache=keep, output_hidden_states=True
            )
            # Hidden states begin with the embeddings.
            states = {layer: out.hidden_states[layer + 1] for layer in layers}
            for new in states.values():
                Memory(new, real[:, past:], check_finite=False).check_finite()
            if earlier is not None:
                states = {layer: torch.cat([earlier.states[layer], new], 1) for layer, new in states.items()}
        return AugmentedText(real, ids, states, cache, {} if earlier is None else earlier.projected)

    @property
    def caches(self) -> bool:
        """Return True if the model's cache can be cut and reordered."""
        return not getattr(self.lm, "_is_stateful", False)


def new_cache() -> DynamicCache:
    """Return a cache that can be cut anywhere: made without a config, sliding windows are masked and not forgotten."""
    import transformers

    return transformers.DynamicCache()


def retokenize(
    input_ids: Tensor, real: Tensor, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the text of ids (b, p) in the tokens of another tokenizer; both are fast ones, which know spans.

    Returns:
        ids (b, q) of the other tokenizer, which of them are real (b, q), and the share (b, p, q) that each has of the
        characters of a token; those of a real token add up to 1.

    Raises:
        ConditionError: ids that the tokenizer does not give for the text that they spell.
    """
    rows: list[tuple[list[int], Tensor]] = []
    for number, (all_ids, mask) in enumerate(zip(input_ids.tolist(), real.tolist(), strict=True)):
        ids = [token for token, is_real in zip(all_ids, mask, strict=True) if is_real]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        again, new = (call_tokenizer(one, text, **options) for one in (tokenizer, other))
        if again["input_ids"] != ids:
            raise ConditionError(
                f"row {number} has ids that its tokenizer does not give for their text {text!r:.40}, so that spans of "
                "characters are not known: tokenize the text anew"
            )
        rows.append((new["input_ids"], _shares(again["offset_mapping"], new["offset_mapping"])))
    longest = max((len(ids) for ids, _ in rows), default=0)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], dtype=torch.long)
    new_real = torch.arange(longest) < torch.tensor([len(ids) for ids, _ in rows])[:, None]
    shares = torch.zeros(*input_ids.shape, longest)
    for row, (ids, share) in enumerate(rows):
        shares[row, real[row].cpu(), : len(ids)] = share
    return padded, new_real, shares


def _shares(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> Tensor:
    """Return the share of each other token in the characters of each token (p, q); of no common one the nearest."""
    begin, end = torch.tensor(spans, dtype=torch.float).view(-1, 2).T
    other_begin, other_end = torch.tensor(others, dtype=torch.float).view(-1, 2).T
    common = torch.minimum(end[:, None], other_end) - torch.maximum(begin[:, None], other_begin)
    nearest = common == common.amax(1, keepdim=True) if common.numel() else common
    shares = torch.where((common > 0).any(1, keepdim=True), common.clamp(min=0), nearest.to(common))
    return shares / shares.sum(1, keepdim=True)
