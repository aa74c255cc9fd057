"""Causal language models of transformers as hosts: adapters act behind or before chosen decoder layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.chunked import ChunkedAdapter, ChunkedLayers
from mmattn.adapters.composed import ComposedAdapter, ComposedLayers
from mmattn.adapters.gated import BlockLayers, GatedAdapter
from mmattn.core.attention import combine_masks, visible_rows
from mmattn.core.masks import media
from mmattn.errors import AttachError, check_float
from mmattn.hosts import calls
from mmattn.hosts.adapted import AdaptedModel, Memories, check_host, forget_compiled
from mmattn.hosts.augmenting import AugmentingModel, Reading
from mmattn.hosts.bank.bank import Bank
from mmattn.hosts.calls import Call, Piece
from mmattn.hosts.causal_lm.decoder_layers import device_of, listen, maker_of, pick_layers, probe
from mmattn.hosts.causal_lm.layer_search import find_layers, host_width
from mmattn.hosts.causal_lm.text_state import forget_texts, inner_host, note_texts, past_length, refuse_packed, text_of
from mmattn.hosts.neighbours import Blocks, Given, Neighbours
from mmattn.memory import Memory


class AdaptedCausalLM(AdaptedModel):
    """A causal language model with adapters.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4)).eval()
    >>> import mmattn
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2))
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> torch.equal(model(ids, memory=mmattn.Memory(torch.randn(1, 11, 24))).logits, model(ids).logits)  # fresh
    True
    >>> model.detach() is lm
    True
    """

    def __init__(self, host: nn.Module, path: str | None = None, require_memory: bool = False) -> None:
        super().__init__(check_host(host), require_memory)
        self._path, _ = find_layers(host, path)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the host."""
        layers = self.host.get_submodule(self._path)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def place(self, index: int) -> nn.Module:
        """The decoder layer of this number."""
        return self.layers[index]

    def add_adapter(self, name: str, adapter: GatedAdapter | ChunkedAdapter | ComposedAdapter) -> None:
        """Put another adapter on the host, active beside those that are.

        Raises:
            AttachError: the name is taken, or the host has no such layers. ConditionError: memory cannot reach them, or
            this handle was detached.
        """
        self._check_new(name)
        if not isinstance(adapter, (GatedAdapter, ChunkedAdapter, ComposedAdapter)):
            raise AttachError(
                "a language model takes a GatedAdapter, a ChunkedAdapter or a ComposedAdapter, got "
                f"{type(adapter).__name__}"
            )
        picked = pick_layers(adapter, len(self.layers))
        built = adapter.build(host_width(self.host), picked)
        probe(self, picked, adapter.place)
        # A block lives where the states that it changes are: with a device map, on several devices.
        devices = [device_of(maker_of(self, index, adapter.place)) for index in picked]
        for index, device in zip(picked, devices, strict=True):
            built.block(index).to(device)
        for part in (built.memory_norm, built.resampler):
            if part is not None:
                part.to(devices[0])
        built.train(self.host.training)
        self.adapters[name] = built
        self.active.append(name)
        self._refresh_hooks()

    def _refresh_hooks(self) -> None:
        forget_compiled()
        for hook in self._hooks:
            hook.remove()
        parts = [self._adapter(name) for name in self.adapters]
        used = sorted({(index, part.config.place) for part in parts for index in part.layers})
        self._hooks = []
        # peft's generate calls the model inside its own.
        for host in dict.fromkeys((self.host, inner_host(self.host))):
            self._hooks.append(host.register_forward_pre_hook(BeforeHost(self), with_kwargs=True))
            self._hooks.append(host.register_forward_hook(AfterHost(), always_call=True))
        forget_texts(self.host)
        if any(isinstance(part, (ChunkedLayers, ComposedLayers)) for part in parts):
            note_texts(self, self.host)
        self._hooks += [listen(self, index, place) for index, place in used]

    # Entries that many requests look at ------------------------------------------------------------------------------

    def bank(self, memory: Memory | Tensor, dtype: torch.dtype | None = None) -> Bank:
        """Keep the keys and values of every row of a memory (n, m, e), for requests that gather some of them.

        The bank is a copy on the device of the memory, and changes by its own verbs only.

        Args:
            dtype: of the kept keys and values; that of the weights by default, to which they are cast when gathered.

        Raises:
            ShapeError, NonFiniteError: a memory that the active adapters cannot read, or one with scores or segments.
            ConditionError: no adapter is active. ConfigError: keys depend on their place in the memory.
        """
        return Bank.make(self, memory, dtype)

    def load_bank(self, path: str | PathLike[str], *, mapped: bool = False) -> Bank:
        """Read what `Bank.save` wrote.

        Args:
            mapped: leave entries and pages in the file, so that they need not fit in memory; the file is read through
                once for its checksums. What is changed afterwards is kept in memory, and all of it once `add` or
                `refresh` needs more room.

        Raises:
            AdapterFileError: the file is torn, changed or something else, or its pages are of another adapter.
        """
        return Bank.load(self, path, mapped)

    # Calls ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        memory: Memories | None = None,
        images: Tensor | None = None,
        strength: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            memory: (b, m, e), one row for each row of text; one for all adapters or one by adapter name. None: the
                memory of the surrounding `condition` block, or the host's own output. For a `ChunkedAdapter` also a
                function that finds the neighbours of chunks, for a `ComposedAdapter` an `AugmentingModel` model.
            images, strength: as in `condition`.
            kwargs: the host's own.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        kwargs.update({name: value for name, value in given.items() if value is not None})
        if memory is None:
            return self.host(**kwargs)
        with calls.entered(self._key, self._call(memory, images, strength)):
            return self.host(**kwargs)

    @contextlib.contextmanager
    def condition(
        self, memory: Memories | None, *, images: Tensor | None = None, strength: float = 1.0
    ) -> Iterator[AdaptedCausalLM]:
        """Every call of the host inside the block, in this thread, sees this memory; None is no memory.

        Args:
            memory: one for all active adapters, or one by adapter name.
            images: (b, l) how many images began at or before each token, for look="latest".
            strength: multiplies what the adapters add; 0 is exactly nothing.

        Raises:
            ShapeError, NonFiniteError: a memory that does not fit.
        """
        with calls.entered(self._key, self._call(memory, images, strength)):
            yield self

    def _call(self, memory: Memories | None, images: Tensor | None, strength: float) -> Call | None:
        self._check_reachable()
        strength = check_float("strength", strength)
        if memory is None:
            self._check_not_needed()
            return None
        memories = self._prepare(memory)
        for name, one in memories.items():
            if isinstance(self._adapter(name), ChunkedLayers) and not isinstance(one, Neighbours):
                memories[name] = Given(one, name)
        return None if strength == 0 else Call(memories, images, strength)

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        memory: Memories | None = None,
        images: Tensor | None = None,
        strength: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        """The host's `generate` with a memory, one row for each row of the prompt; beams share their row's.

        With `guidance_scale` both passes see the memory: it weighs the prompt, not the memory.
        """
        if inputs is not None:
            kwargs["inputs"] = inputs
        if memory is None:
            return self._host_generate(**kwargs)
        with calls.entered(self._key, self._call(memory, images, strength)):
            return self._host_generate(**kwargs)

    def _host_generate(self, *args: Any, **kwargs: Any) -> Any:
        """What `host.generate` is while adapters are attached: rows are checked, then beams may multiply them."""
        call = self._current()
        if call is None:
            return self._own_generate(*args, **kwargs)
        prompt = (
            args[0]
            if args
            else next(
                (kwargs[name] for name in ("inputs", "input_ids", "inputs_embeds") if kwargs.get(name) is not None),
                None,
            )
        )
        rows = 1 if prompt is None else prompt.shape[0]
        for name, prepared in call.memories.items():
            calls.check_rows(rows, call, name, prepared)
        inner = Call(call.memories, call.images, call.strength, expands=True)
        inner.prompt = prompt
        if prompt is not None and not prompt.is_floating_point():
            for config in (self._adapter(name).config for name in call.memories):
                if isinstance(config, GatedAdapter) and config.media_token is not None:
                    inner.prompt_images[config.media_token] = calls.images_so_far(prompt, config.media_token)
        with calls.entered(self._key, inner):
            return self._own_generate(*args, **kwargs)

    def _own_generate(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = type(self.host)
        return own.generate(self.host, *args, **kwargs)

    def _join(self) -> None:
        super()._join()
        if hasattr(type(self.host), "generate"):
            self.host.__dict__["generate"] = self._host_generate

    def detach(self) -> nn.Module:
        """Give back the very same host with no trace of the adapters."""
        forget_texts(self.host)
        return super().detach()

    def adapt(self, index: int, x: Tensor, place: str) -> Tensor:
        """What the hidden states x (b, l, d) behind or before layer `index` become in the current call."""
        call = self._current()
        if call is None:
            return x
        if call.probe is not None:
            if (place, index) not in call.probe:
                return x
            disturbed = x.clone()
            disturbed[call.probe[place, index]] += torch.linspace(-1, 1, x.shape[-1], device=x.device).to(x.dtype)
            return disturbed
        for name in call.memories:
            adapter = self._adapter(name)
            here = index in adapter.layers and adapter.config.place == place
            if here and name in self.active and not calls.is_off(self._key, name):
                x = self._look(x, call, name, adapter, index)
        return x

    def _look(self, x: Tensor, call: Call, name: str, adapter: nn.Module, index: int) -> Tensor:
        prepared = call.memories[name]
        assert isinstance(adapter, BlockLayers)
        if isinstance(prepared, Neighbours):
            assert isinstance(adapter, ChunkedLayers)
            return prepared.adapt(x, name, adapter, index, calls.part_of_piece(name), call.strength)
        if isinstance(prepared, AugmentingModel):
            assert isinstance(adapter, ComposedLayers)
            reading: Reading = calls.part_of_piece(name)
            return reading.adapt(x, adapter, index, call.strength)
        rows, length = x.shape[:2]
        calls.check_rows(rows, call, name, prepared)
        queries = rows // max(prepared.batch, 1) * length
        memory, kept = prepared.look(name, adapter, index, queries)
        attention_mask = None
        look = adapter.config.look
        if look != "all":
            images = calls.images_of_piece(call, adapter.config.media_token, rows, length).to(x.device)
            segments = memory.segments
            assert segments is not None
            segments = segments.repeat_interleave(rows // prepared.batch, 0)
            attention_mask = media(images, segments, look).tensor
        sizes = (rows, prepared.batch, 1, length, memory.length)
        allowed = combine_masks(memory.mask, attention_mask, sizes)
        seen = visible_rows(allowed, rows, memory.length, device=x.device)
        return adapter.block(index)(
            x,
            memory.tokens if kept is None else kept,
            mask=memory.mask if kept is None else None,
            scores=memory.scores if adapter.config.score_bias and kept is None else None,
            attention_mask=attention_mask,
            seen=None if adapter.config.feed_forward_all else seen,
            strength=call.strength,
        )


class BeforeHost:
    """Notes, for the call under way, which piece of the text the host is about to read."""

    def __init__(self, handle: AdaptedCausalLM) -> None:
        self.handle = handle

    def __call__(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.handle._current()
        if call is None or call.probe is not None:
            return
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        refuse_packed(kwargs)
        parts = self.parts(call, input_ids, kwargs)
        # Only where it matters: a compiler cannot follow the note.
        if parts or any(getattr(self.handle._adapter(name).config, "look", "all") != "all" for name in call.memories):
            calls.reading(Piece(input_ids, past_length(kwargs), parts))

    def parts(self, call: Call, input_ids: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Blocks | Reading]:
        """What is there for the tokens of this piece, for each adapter whose memory grows with the text.

        New chunks get their neighbours here, and other models read on.
        """
        handle = self.handle
        out: dict[str, Blocks | Reading] = {}
        reading = {name: one for name, one in call.memories.items() if isinstance(one, (Neighbours, AugmentingModel))}
        if not reading:
            return {}
        piece = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        text = text_of(call, piece, kwargs)
        for name, one in reading.items():
            calls.check_rows(len(text.real), call, name, one)
            adapter = handle._adapter(name)
            if name not in handle.active or calls.is_off(handle._key, name):
                continue
            # This very host may be asked, which then reads no memory.
            with calls.entered(handle._key, None):
                if isinstance(one, AugmentingModel):
                    assert isinstance(adapter, ComposedLayers)
                    out[name] = one.follow(text, name, adapter, call, past_length(kwargs) == 0)
                elif isinstance(adapter, ChunkedLayers):
                    out[name] = one.blocks(text, piece.shape[1], name, adapter)
        return out


class AfterHost:
    """Forgets the piece, also when the host failed."""

    def __call__(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.reading(None)
