"""Causal language models of transformers as hosts: adapters act on the output of chosen decoder layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.chunked import ChunkedAdapter, ChunkedLayers
from mmattn.adapters.gated import BlockLayers, BlockSettings, GatedAdapter
from mmattn.attention import combine_masks, visible_rows
from mmattn.errors import AttachError, ConditionError, check_float
from mmattn.hosts import calls
from mmattn.hosts.bank import Bank
from mmattn.hosts.calls import Call, Piece
from mmattn.hosts.families import find_layers, host_width
from mmattn.hosts.handle import Handle, Memories, check_host, forget_compiled
from mmattn.hosts.neighbours import Blocks, Given, Neighbours
from mmattn.hosts.texts import forget_texts, inner_host, note_texts, past_length, refuse_packed, text_of
from mmattn.masks import media
from mmattn.memory import Memory


class LanguageModel(Handle):
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

    def add_adapter(self, name: str, adapter: GatedAdapter | ChunkedAdapter) -> None:
        """Put another adapter on the host, active beside those that are.

        Raises:
            AttachError: the name is taken, or the host has no such layers. ConditionError: memory cannot reach them, or
            this handle was detached.
        """
        self._check_new(name)
        if not isinstance(adapter, (GatedAdapter, ChunkedAdapter)):
            raise AttachError(
                f"a language model takes a GatedAdapter or a ChunkedAdapter, got {type(adapter).__name__}"
            )
        picked = pick_layers(adapter, len(self.layers))
        built = adapter.build(host_width(self.host), picked)
        probe(self, picked)
        for index in picked:
            # A block lives where the output of its layer is: with a device map, on several devices.
            built.block(index).to(device_of(self.layers[index]))
        built.memory_norm.to(device_of(self.layers[picked[0]]))
        if built.resampler is not None:
            built.resampler.to(device_of(self.layers[picked[0]]))
        built.train(self.host.training)
        self.adapters[name] = built
        self.active.append(name)
        self._refresh_hooks()

    def _refresh_hooks(self) -> None:
        forget_compiled()
        for hook in self._hooks:
            hook.remove()
        used = sorted({index for name in self.adapters for index in self._adapter(name).layers})
        self._hooks = []
        # peft's generate calls the model inside its own.
        for host in dict.fromkeys((self.host, inner_host(self.host))):
            self._hooks.append(host.register_forward_pre_hook(BeforeHost(self), with_kwargs=True))
            self._hooks.append(host.register_forward_hook(AfterHost(), always_call=True))
        forget_texts(self.host)
        if any(isinstance(self._adapter(name), ChunkedLayers) for name in self.adapters):
            note_texts(self, self.host)
        # First among the hooks of a layer: those that record hidden states must see what the adapters added.
        self._hooks += [
            self.layers[index].register_forward_hook(AfterLayer(self, index), prepend=True) for index in used
        ]

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
                function that finds the neighbours of chunks.
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
    ) -> Iterator[LanguageModel]:
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

    def adapt(self, index: int, x: Tensor) -> Tensor:
        """What the hidden states x (b, l, d) behind layer `index` become in the current call."""
        call = self._current()
        if call is None:
            return x
        if call.probe is not None:
            if index not in call.probe:
                return x
            disturbed = x.clone()
            disturbed[call.probe[index]] += torch.linspace(-1, 1, x.shape[-1], device=x.device).to(x.dtype)
            return disturbed
        for name in call.memories:
            adapter = self._adapter(name)
            if name in self.active and index in adapter.layers and not calls.is_off(self._key, name):
                x = self._look(x, call, name, adapter, index)
        return x

    def _look(self, x: Tensor, call: Call, name: str, adapter: nn.Module, index: int) -> Tensor:
        prepared = call.memories[name]
        assert isinstance(adapter, BlockLayers)
        if isinstance(prepared, Neighbours):
            assert isinstance(adapter, ChunkedLayers)
            return prepared.adapt(x, name, adapter, index, calls.blocks_of_piece(name), call.strength)
        rows, length = x.shape[:2]
        calls.check_rows(rows, call, name, prepared)
        queries = rows // max(prepared.batch, 1) * length
        memory, kept = prepared.look(name, adapter, index, queries)
        attention_mask = None
        if adapter.config.look == "latest":
            images = calls.images_of_piece(call, adapter.config.media_token, rows, length).to(x.device)
            segments = memory.segments
            assert segments is not None
            attention_mask = media(images, segments.repeat_interleave(rows // prepared.batch, 0)).tensor
        sizes = (rows, prepared.batch, 1, length, memory.length)
        allowed = combine_masks(memory.mask, attention_mask, sizes)
        seen = visible_rows(allowed, rows, memory.length, device=x.device)
        return adapter.block(index)(
            x,
            memory.tokens if kept is None else kept,
            mask=memory.mask if kept is None else None,
            scores=memory.scores if adapter.config.score_bias and kept is None else None,
            attention_mask=attention_mask,
            seen=seen,
            strength=call.strength,
        )


class BeforeHost:
    """Notes, for the call under way, which piece of the text the host is about to read."""

    def __init__(self, handle: LanguageModel) -> None:
        self.handle = handle

    def __call__(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.handle._current()
        if call is None or call.probe is not None:
            return
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        refuse_packed(kwargs)
        blocks = self.blocks(call, input_ids, kwargs)
        # Only where it matters: a compiler cannot follow the note.
        if blocks or any(getattr(self.handle._adapter(name).config, "look", "") == "latest" for name in call.memories):
            calls.reading(Piece(input_ids, past_length(kwargs), blocks))

    def blocks(self, call: Call, input_ids: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Blocks]:
        """Which tokens read which neighbours, for each adapter that reads chunks; new chunks get theirs here."""
        handle, out = self.handle, {}
        reading = {name: one for name, one in call.memories.items() if isinstance(one, Neighbours)}
        if not reading:
            return {}
        piece = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        text = text_of(call, piece, kwargs)
        for name, neighbours in reading.items():
            calls.check_rows(len(text.real), call, name, neighbours)
            adapter = handle._adapter(name)
            if isinstance(adapter, ChunkedLayers) and name in handle.active and not calls.is_off(handle._key, name):
                # What finds neighbours may ask this very host, which then reads no memory.
                with calls.entered(handle._key, None):
                    out[name] = neighbours.blocks(text, piece.shape[1], name, adapter)
        return out


class AfterHost:
    """Forgets the piece, also when the host failed."""

    def __call__(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.reading(None)


class AfterLayer:
    """Hands the hidden states behind one decoder layer to the adapters."""

    def __init__(self, handle: LanguageModel, index: int) -> None:
        self.handle, self.index = handle, index

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if layer.training and getattr(layer, "gradient_checkpointing", False) and runs_hooks_again(layer):
            raise ConditionError(
                "gradient checkpointing of this transformers runs hooks a second time in the backward pass, when the "
                "memory may be another: upgrade transformers, or call gradient_checkpointing_disable()"
            )
        if isinstance(output, Tensor):
            return self.handle.adapt(self.index, output)
        return (self.handle.adapt(self.index, output[0]), *output[1:])


def runs_hooks_again(layer: nn.Module) -> bool:
    """Whether checkpointing wraps the call of a layer, hooks included, as in transformers 5.0, and not its forward."""
    return any(
        base.__name__ == "GradientCheckpointingLayer" and "__call__" in vars(base) for base in type(layer).__mro__
    )


def pick_layers(adapter: BlockSettings, depth: int) -> list[int]:
    """The host layers an adapter asks for.

    Raises:
        AttachError: the host is not that deep.
    """
    if adapter.layers is not None:
        if adapter.layers[-1] >= depth:
            raise AttachError(f"layers {list(adapter.layers)} were asked for and the host has layers 0 to {depth - 1}")
        return list(adapter.layers)
    every = 4 if adapter.every is None else adapter.every
    if every > depth:
        raise AttachError(f"every={every} was asked for and the host has only {depth} layers: choose at most {depth}")
    return list(range(every - 1, depth, every))


@torch.no_grad()
def probe(model: LanguageModel, picked: Sequence[int]) -> None:
    """Prove that what is written behind each picked layer changes the host's answer.

    One forward of two tokens; row r is disturbed behind the r-th picked layer only, row 0 nowhere.

    Raises:
        ConditionError: a layer whose output does not matter. ShapeError: hidden states of another width.
    """
    host, layers = model.host, model.layers
    modes = [(module, module.training) for module in host.modules()]
    hooks = [layers[index].register_forward_hook(AfterLayer(model, index), prepend=True) for index in picked]
    get_embeddings: Any = getattr(host, "get_input_embeddings", None)
    embeddings = host if get_embeddings is None else get_embeddings()
    rows = {index: row + 1 for row, index in enumerate(picked)}
    ids = torch.ones(len(picked) + 1, 2, dtype=torch.long, device=device_of(embeddings))
    try:
        for module, _ in modes:
            module.training = False
        with calls.entered(model._key, Call({}, probe=rows)):
            logits = host(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    finally:
        for module, mode in modes:
            module.training = mode
        for hook in hooks:
            hook.remove()
    blind = [index for index, row in rows.items() if torch.equal(logits[row], logits[0])]
    if blind:
        raise ConditionError(
            f"what is written behind layers {blind} does not reach the answer of {type(host).__name__}: memory would "
            "be lost there; name the list of decoder layers with path=, or choose other layers"
        )


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight, the CPU where it has none or is offloaded."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
