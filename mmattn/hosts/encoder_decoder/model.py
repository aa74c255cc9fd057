"""Models of transformers with an encoder and a decoder as hosts: T5, BART, Marian, Whisper and their like."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.cache_argument import given_cache
from mmattn.adapters.language_models import text_config
from mmattn.adapters.protocols import Site
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.causal_lm.generation import bound_method, inner_host, past_length
from mmattn.hosts.causal_lm.model import AdaptedCausalLM
from mmattn.hosts.context import Action, Call, ForwardStep
from mmattn.hosts.encoder_decoder.encoder_outputs import EncoderOutputs
from mmattn.hosts.encoder_decoder.stacks import DECODER, ENCODER, find_stacks
from mmattn.hosts.generation_rows import RowsLeft, RowsView, whole_text
from mmattn.hosts.probe import LENGTH, check_sees_all, probe_adapter
from mmattn.hosts.probe_inputs import host_inputs, token_ids
from mmattn.hosts.registry import register_host
from mmattn.storage.hub import load_model


@register_host
class AdaptedEncoderDecoder(AdaptedCausalLM):
    """A model with an encoder and a decoder, and adapters in either: `GatedAdapter(…, where="encoder")`.

    Its layers are numbered from the first of the decoder on; those of the encoder come after. `generate` runs the
    encoder once for each row and gives the decoder's beams the memory of their row.

    Args:
        host: the model.
        require_memory: calls without a memory raise instead of giving the host's own answer.

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> lm = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
    ...                                          decoder_start_token_id=0)).eval()
    >>> import mmattn
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2))
    >>> model = mmattn.attach(model, mmattn.GatedAdapter(memory_dim=24, every=2, where="encoder"), "pictures")
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> memory = mmattn.Memory(torch.randn(1, 11, 24))
    >>> model.generate(ids, memory=memory, num_beams=2, max_new_tokens=4).shape[0], model.active
    (1, ['default', 'pictures'])
    """

    kind: ClassVar[str] = "encoder_decoder"
    positions: ClassVar[tuple[str, ...]] = ("after", "before")
    replaced = (*AdaptedCausalLM.replaced, "generate_with_fallback", "_need_fallback")

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        AdaptedModel.__init__(self, host, require_memory)
        self.stacks = find_stacks(host)
        self.encoder_outputs = EncoderOutputs()

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """A model of transformers whose config says so, and which has both."""
        host: Any = model
        if not getattr(getattr(host, "config", None), "is_encoder_decoder", False) or not hasattr(host, "get_decoder"):
            return False
        parts = [host, getattr(host, "base_model", host)]
        return all(part not in parts for part in (host.get_decoder(), host.get_encoder()))

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the host."""
        return self.stacks[0].layers

    def sites(self, position: str) -> list[Site]:
        """Every layer of the decoder, and every layer of the encoder."""
        return [site for stack in self.stacks for site in stack.sites(position)]

    def is_apart(self, layer: int) -> bool:
        """Whether it is a layer of the encoder."""
        return layer >= self.stacks[1].first

    def check_adapter(self, adapter: AdapterLayers) -> None:
        """Prove with one forward that what the adapter writes at its layers reaches the answer.

        Raises:
            AttachError: the adapter follows a text, the host cannot be called, or hands on states of another shape.
            ConditionError: a layer whose output does not matter.
        """
        check_sees_all(adapter, self.host)
        length = LENGTH if adapter.sites[0].part == DECODER else None
        probe_adapter(self, adapter, partial(_inputs, self.host), length)

    def text_state(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TextState:
        """The decoder's ids or embeddings of this forward, and what is cached."""
        names = ["decoder_input_ids", "decoder_inputs_embeds"]
        if getattr(kwargs.get("labels"), "ndim", 0) == 2 and not kwargs["labels"].is_floating_point():
            names.append("labels")  # else they are classes, and no text
        read = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        if read is None:
            read = args[0] if args else kwargs.get("input_ids")  # which T5's relatives then take for both
        if read is None:
            return TextState(0, 0)  # the host says itself what it misses
        return TextState(
            rows=read.shape[0],
            length=read.shape[1],
            inputs=read,
            past=past_length(given_cache(kwargs)),
            arrivals=call.arrivals,
            expansions=call.expansions,
        )

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ForwardStep:
        """What the adapters do in one forward of the host.

        Raises:
            ConditionError: what an encoder said without the memory is given, or with another.
        """
        if call.rows is None:  # inside generate it was checked before, or is what the encoder said there
            self._check_encoded(call, disabled, kwargs.get("encoder_outputs"))
        text = self.text_state(call, args, kwargs)
        return ForwardStep(self, host, None, self.actions(call, disabled, text))

    def _encoder_sources(self, call: Call, disabled: frozenset[str]) -> dict[str, tuple[Any, Any]]:
        """By adapter that acts in the encoder, what it reads and what multiplies its result."""
        return {
            name: (source, call.scales.get(name, 1.0))
            for name, source in call.sources.items()
            if name in self.active and name not in disabled and self.adapter(name).sites[0].part == ENCODER
        }

    def _check_encoded(self, call: Call, disabled: frozenset[str], outputs: Any) -> None:
        """Refuse outputs of the encoder that are not what it says with these memories.

        Raises:
            ConditionError: they are of other memories, or of none, or it is not known of which.
        """
        sources = self._encoder_sources(call, disabled)
        if outputs is None or self.encoder_outputs.saw(outputs, sources):
            return
        fault = f"did not see the memory of {list(sources)} as it is in this call" if sources else "saw a memory"
        raise ConditionError(
            f"encoder_outputs were given, and the encoder {fault}: run it inside the same block, with "
            "model.condition(memory): model.get_encoder()(…), model(encoder_outputs=…), and give what it returned"
        )

    def install_hooks(self) -> list[Any]:
        """Hook the adapters to the host and its layers, and note with which memories the encoder was run."""
        hooks = super().install_hooks()
        if any(self.is_apart(layer) for layer, _ in self.hooked):
            host: Any = self.host
            hooks.append(host.get_encoder().register_forward_hook(self._note_encoder))
        return hooks

    def _note_encoder(self, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call, disabled = self.open_blocks.in_force()[1:]
        if call is not None and not torch.compiler.is_compiling():
            self.encoder_outputs.add(output, self._encoder_sources(call, disabled))

    def _host_generate(self, *args: Any, **kwargs: Any) -> Any:
        call, disabled = self.current_call()
        if call is not None:
            self._check_encoded(call, disabled, kwargs.get("encoder_outputs"))
        return super()._host_generate(*args, **kwargs)

    def actions(
        self, call: Call, disabled: frozenset[str], text: TextState, site: tuple[int, str] | None = None
    ) -> dict[tuple[int, str], list[Action]]:
        """What the active adapters do at each site of the decoder, or at one site."""
        left = call.rows_left
        if left is None:
            actions = AdaptedModel.actions(self, call, disabled, text, site)
        else:
            text, places = whole_text(left, text)
            actions = {
                own: [(RowsView(view, places, text.rows), *rest) for view, *rest in those]
                for own, those in AdaptedModel.actions(self, call, disabled, text, site).items()
            }
        return actions if site is not None else {own: one for own, one in actions.items() if not self.is_apart(own[0])}

    def join(self) -> None:
        """Freeze the host, and follow the rows that its `generate` goes on with, where it says which."""
        super().join()
        inner = inner_host(self.host)
        if hasattr(type(inner), "generate_with_fallback"):
            own = {"generate_with_fallback": self._write_segment, "_need_fallback": self._written}
            inner.__dict__.update(own)

    def _write_segment(self, *args: Any, **kwargs: Any) -> Any:
        """What Whisper's `generate_with_fallback` is: one segment of the recordings that have not ended."""
        inner = inner_host(self.host)
        own = bound_method(inner, "generate_with_fallback")
        call = self.open_blocks.in_force().call
        if call is None or call.rows is None:
            return own(*args, **kwargs)
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        is_static = given["generation_config"].cache_implementation == "static"
        left = RowsLeft(given["batch_idx_map"], len(given["seek"]), given["batch_size"] if is_static else 0)
        with self.open_blocks.conditioned(replace(call, rows_left=left)):
            return own(*args, **kwargs)

    def _written(self, seek_sequence: Any, seek_outputs: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        """What Whisper's `_need_fallback` is: whether a row of a segment is written again."""
        own = bound_method(inner_host(self.host), "_need_fallback")
        again, skipped = own(seek_sequence, seek_outputs, index, *args, **kwargs)
        call = self.open_blocks.in_force().call
        if call is not None and call.rows_left is not None:
            call.rows_left.wrote(index, again)
        return again, skipped

    def generate_batch(self, inputs: Sequence[list[int]], *, memory: Any = None, **kwargs: Any) -> Any:
        """Refused: transformers batches requests continuously for decoder-only models.

        Raises:
            ConditionError: always.
        """
        raise ConditionError(
            f"generate_batch is for models without an encoder, and {type(self.host).__name__} has one: use "
            "generate(inputs, memory=memory)"
        )

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: Any, rows: int) -> dict[str, Any]:
        """Ids of random texts to read and to write; of another encoder the inputs it was tried with."""
        size = getattr(text_config(self.host), "vocab_size", 2)
        given = next(host_inputs(self.host, rows))
        if "input_ids" in given:
            given = {"input_ids": torch.randint(size, (rows, 5), generator=generator).to(given["input_ids"].device)}
        ids = torch.randint(size, (rows, 7), generator=generator)
        return given | {"decoder_input_ids": ids.to(next(iter(given.values())).device)}

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        """The model of this name or in this folder.

        Raises:
            AdapterFileError: there is none.
        """
        model: nn.Module = load_model("AutoModelForSeq2SeqLM", name, "encoder–decoder")
        return model


def _inputs(host: nn.Module, rows: int) -> Any:
    """What the encoder reads, and a text for the decoder."""
    for given in host_inputs(host, rows):
        yield given | {"decoder_input_ids": token_ids(host, rows)}
