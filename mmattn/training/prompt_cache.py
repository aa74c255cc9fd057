"""Prompts that a frozen language model read once without a memory: a training step costs the upper layers on one token.

Only the last token of a prompt sees the memory, so keys and values of the tokens before it are the same in every step,
and so are its hidden states below the lowest adapter.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmattn.adapters.host_models import cache_name, check_ids, device_of, given_cache
from mmattn.errors import ConditionError, ShapeError, TextError, check_int
from mmattn.hosts.causal_lm.generation import note
from mmattn.hosts.context import Keywords, Positional
from mmattn.hosts.host_state import HostState
from mmattn.hosts.keywords import signature_of
from mmattn.hosts.probe import bare_forward, is_close
from mmattn.training.lower_layers import LowerLayers, lower_layers

if TYPE_CHECKING:
    from transformers import Cache


class PromptCache:
    """Prompts that were read without a memory; `prompts[rows]` are arguments of a call that reads their last tokens."""

    def __init__(self, lower: LowerLayers, prompts: Sequence[Sequence[int]], batch_size: int) -> None:
        self.lower, self.host = lower, lower.model.host
        texts = list(dict.fromkeys(map(tuple, prompts)))
        for text in texts:
            check_ids("a prompt", text, self.host)
        number = {text: row for row, text in enumerate(texts)}
        self.length = max(map(len, texts)) - 1
        device = device_of(lower.reader)
        rows = list(map(torch.tensor, texts))
        self.ids = pad_sequence(rows, True, 0, "left").to(device)
        self.mask = pad_sequence(list(map(torch.ones_like, rows)), True, 0, "left").to(device)
        self._rows = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=device)
        self._state = HostState(self.host)
        #: By cache of a call the states from which it starts; None once it has run.
        self._calls: WeakKeyDictionary[object, Tensor | None] = WeakKeyDictionary()
        try:
            parts = [self._read(rows) for rows in torch.arange(len(texts), device=device).split(batch_size)]
        except IndexError as error:  # of embeddings of positions; on a CPU
            raise ShapeError(
                f"prompts of up to {self.length + 1} tokens are longer than {type(self.host).__name__} has positions"
            ) from error
        self.states, self.cache = torch.cat([states for states, _ in parts]), parts[0][1]
        for place, layer in enumerate(self.cache.layers[lower.count :], lower.count):
            layer.keys = torch.cat([cache.layers[place].keys for _, cache in parts])
            layer.values = torch.cat([cache.layers[place].values for _, cache in parts])

    @torch.no_grad()
    def _read(self, rows: Tensor) -> tuple[Tensor, Cache]:
        """Return hidden states of the last tokens after the lower layers, and the cache of all tokens before them."""
        reader, mask = self.lower.reader, self.mask[rows]
        with bare_forward(self.host, self.lower.model.open_blocks):
            output = reader(**self._arguments(rows, slice(self.length), mask[:, : self.length]), use_cache=True)
            cache: Any = given_cache(output)
            self._check_cache(cache)
            last = self._arguments(rows, slice(self.length, None), mask)
            states = self.lower.states_of(**last, **{cache_name(reader): copy.deepcopy(cache)})
        for layer in cache.layers[: self.lower.count]:  # only the length is read
            layer.keys, layer.values = layer.keys[:1].clone(), layer.values[:1].clone()
            layer.update = _refuse_update
        return states, cache

    def _check_cache(self, cache: Any) -> None:
        """Refuse a cache that holds anything but keys and values of each layer."""
        kinds = [type(layer).__name__ for layer in getattr(cache, "layers", [])]
        if len(kinds) != len(self.lower.layers) or not {"DynamicLayer", "DynamicSlidingWindowLayer"}.issuperset(kinds):
            raise ConditionError(
                f"{type(self.host).__name__} does not cache keys and values of each layer, as cached prompts need: "
                "give it the whole prompts, with arrived="
            )

    def _arguments(self, rows: Tensor, tokens: slice, mask: Tensor) -> dict[str, Any]:
        arguments = {"input_ids": self.ids[rows, tokens], "attention_mask": mask}
        if "position_ids" in signature_of(self.lower.reader).places:
            arguments["position_ids"] = (self.mask[rows].cumsum(1) - 1).clamp(min=0)[:, tokens]
        return arguments

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Sequence[int] | Tensor) -> dict[str, Any]:
        """Return the arguments of one call for some prompts, which may repeat.

        Args:
            rows: (b,) numbers of prompts.

        Raises:
            ShapeError: no rows.
            IndexError: a prompt that is not there.
        """
        numbers = torch.as_tensor(rows, device=self._rows.device)
        if not numbers.numel():
            raise ShapeError("a call reads at least one prompt, and rows is empty: give the numbers of some")
        chosen = self._rows[numbers]
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for number, layer in enumerate(cache.layers):
            upper = number >= self.lower.count
            layer.keys = layer.keys[chosen] if upper else layer.keys.expand(len(chosen), -1, -1, -1)
            layer.values = layer.values[chosen] if upper else layer.values.expand(len(chosen), -1, -1, -1)
        self._calls[cache] = self.states[chosen]
        note(cache, False)
        last = self._arguments(chosen, slice(self.length, None), self.mask[chosen])
        return last | {cache_name(self.lower.reader): cache}

    def states_for(self, args: Positional, kwargs: Keywords) -> Tensor | None:
        """Return the states from which a call with a cache of these prompts starts; None for other calls."""
        cache, reader = given_cache(kwargs), self.lower.reader
        if cache is None or cache not in self._calls:
            return None
        states = self._calls[cache]
        self._calls[cache] = None
        if states is None:
            raise ConditionError("arguments of cached prompts serve one call: take prompts[rows] for each call")
        checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in (reader, *self.lower.layers))
        if torch.compiler.is_compiling() or (reader.training and torch.is_grad_enabled() and checkpoints):
            raise ConditionError("a host that is compiled or checkpoints gradients cannot go on from cached prompts")
        if any(weight.requires_grad for weight in self.host.parameters()) or not self._state.holds():
            raise ConditionError(
                "the host is trained, or its weights, config, LoRA or autocast have changed since it read the "
                "prompts: open cached_prompts after that"
            )
        return states

    @torch.no_grad()
    def check(self) -> None:
        """Compare the logits of the first prompts, without a memory, with those of the whole text."""
        rows = self._rows[:2]
        with bare_forward(self.host, self.lower.model.open_blocks):
            whole = self.host(**self._arguments(rows, slice(None), self.mask[rows])).logits[:, self.length :]
            logits = self.host(**self[range(len(rows))]).logits
        if not is_close(logits, whole):
            raise ConditionError(
                f"{type(self.host).__name__} has other logits when it goes on from cached prompts: give it the whole "
                "prompts, with arrived="
            )


def _refuse_update(*_: object, **__: object) -> NoReturn:
    """Stand for the `update` of a lower layer's cache, which a host calls that does not start above the layer."""
    raise ConditionError(
        "arguments of cached prompts serve one call inside their block, and no copies of them do: take prompts[rows] "
        "for each call"
    )


@contextlib.contextmanager
def cached_prompts(
    model: nn.Module, prompts: Sequence[Sequence[int]] | Tensor, *, batch_size: int = 32
) -> Iterator[PromptCache]:
    """Read prompts once without a memory; inside the block a call reads only their last token, which sees the memory.

    `prompts[rows]` has the arguments of a call for these rows: ids (b, 1), their mask and positions, and the cache of
    the tokens before them. The logits equal those of the whole prompts with `arrived=` 0 for all tokens except the
    last. A call computes only the layers above the lowest adapter for the last token. Equal prompts are read once. Keys
    and values of the upper layers stay in memory, padded to the longest prompt.

    Args:
        model: a causal language model with all its adapters attached, and nothing trained in the host.
        prompts: the ids of each prompt, two at least.
        batch_size: number of prompts that are read together.

    Raises:
        ConditionError: no layer is below the lowest adapter, the host is trained, or its answer from a cached prompt
            differs (checked with a probe of two prompts).
        ConfigError: not a language model with adapters.
        TextError: no prompt, or a prompt of one token.
        ShapeError: ids beyond the vocabulary, or prompts longer than the host has positions.

    >>> import mmattn
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4)).eval()
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, layers=[2, 3]))
    >>> with cached_prompts(model, [[5, 6, 7], [5, 9], [5, 6, 7]]) as prompts:
    ...     logits = model(**prompts[[2, 1]], memory=mmattn.Memory(torch.randn(2, 11, 24))).logits
    >>> logits.shape
    torch.Size([2, 1, 97])
    """
    check_int("batch_size", batch_size)
    prompts = prompts.tolist() if isinstance(prompts, Tensor) else [list(prompt) for prompt in prompts]
    short = [row for row, prompt in enumerate(prompts) if len(prompt) < 2]
    if short or not len(prompts):
        raise TextError(f"prompts {short[:5]} have no token before the last, which sees the memory")
    lower = lower_layers(model)
    if any(parameter.requires_grad for parameter in lower.model.host.parameters()):
        raise ConditionError(f"{type(lower.model.host).__name__} is trained, so no prompt can be cached: freeze it")
    with lower.installed():
        cache = PromptCache(lower, prompts, batch_size)
    with lower.skipped_by(cache.states_for):
        cache.check()
        yield cache
