"""Encoder-decoders of transformers as hosts: T5, BART, Marian, Whisper and their like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.host_models import device_of, given_cache
from mmattn.adapters.protocols import Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.attach import register_host
from mmattn.hosts.causal_lm.generation import asked, check_with_memory, noted, shrinks_batches
from mmattn.hosts.causal_lm.model import AdaptedCausalLM, past_length
from mmattn.hosts.context import Call, ForwardStep, Keywords, Positional
from mmattn.hosts.encoder import EncoderOutput, EncoderOutputs, check_reads_at_once
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.probe import (
    LENGTH,
    Handle,
    describe_lists,
    host_inputs,
    layers_width,
    outermost_lists,
    probe_adapter,
    random_ids,
    token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

DECODER, ENCODER = "decoder", "encoder"
#: Names in configs of the number of layers.
_DEPTHS = {
    DECODER: ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers"),
    ENCODER: ("encoder_layers", "num_layers", "encoder_num_hidden_layers", "num_hidden_layers"),
}


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
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    positions: ClassVar[tuple[str, ...]] = ("after", "before")

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        AdaptedModel.__init__(self, host, require_memory)
        parts: PreTrainedModel = host
        decoder = _stack(host, DECODER, parts.get_decoder(), 0)
        self.stacks = decoder, _stack(host, ENCODER, parts.get_encoder(), len(decoder.layers))
        self.encoder_outputs = EncoderOutputs(self, ENCODER)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        host: PreTrainedModel = model
        if not getattr(getattr(host, "config", None), "is_encoder_decoder", False) or not hasattr(host, "get_decoder"):
            return False
        parts = [host, getattr(host, "base_model", host)]
        return all(part not in parts for part in (host.get_decoder(), host.get_encoder()))

    @property
    def layers(self) -> nn.ModuleList:
        return self.stacks[0].layers

    def sites(self, position: str) -> list[Site]:
        """Return every layer of the decoder, then every layer of the encoder."""
        return [site for stack in self.stacks for site in stack.sites(position)]

    def is_apart(self, layer: int) -> bool:
        return layer >= self.stacks[1].first

    def check_adapter(self, adapter: AdapterLayers) -> None:
        check_reads_at_once(adapter, self.host)
        length = LENGTH if adapter.sites[0].part == DECODER else None
        host: PreTrainedModel = self.host
        inputs, any_output = partial(_inputs, host), not host.can_generate()
        probe_adapter(host, self.open_blocks, adapter, inputs, length, any_output)

    def text_state(self, call: Call, args: Positional, kwargs: Keywords) -> TextState:
        names = ["decoder_input_ids", "decoder_inputs_embeds"]
        if getattr(kwargs.get("labels"), "ndim", 0) == 2 and not kwargs["labels"].is_floating_point():
            names.append("labels")  # else they are classes, and no text
        read = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        if read is None:
            read = args[0] if args else kwargs.get("input_ids")  # which T5's relatives then take for both
        if read is None:
            return TextState(0, 0)  # the host raises by itself
        cache = given_cache(kwargs)
        return TextState(
            rows=read.shape[0],
            length=read.shape[1],
            inputs=read,
            past=0 if cache is None else past_length(cache),
            cache=cache,
            arrivals=call.arrivals,
            expansions=call.expansions,
        )

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: Positional, kwargs: Keywords
    ) -> ForwardStep:
        if call.rows is None:  # inside generate they were checked before, or computed
            self._check_encoded(call, disabled, kwargs.get("encoder_outputs"))
        text = self.text_state(call, args, kwargs)
        if text.cache is not None and noted(text.cache) is None:
            check_with_memory(self.host, call, text)
        actions = self.actions(call, disabled, text)
        return ForwardStep(
            self,
            host,
            None,
            {site: site_actions for site, site_actions in actions.items() if not self.is_apart(site[0])},
        )

    def _check_encoded(self, call: Call, disabled: frozenset[str], outputs: EncoderOutput | None) -> None:
        """Refuse outputs of the encoder that were not computed with these memories."""
        sources = self.encoder_outputs.sources(call, disabled)
        if outputs is None or self.encoder_outputs.match(outputs, sources):
            return
        fault = f"without the memory of {list(sources)} as it is in this call" if sources else "with a memory"
        raise ConditionError(
            f"encoder_outputs were computed {fault}: run the encoder inside the same block, with "
            "model.condition(memory): model.get_encoder()(…), model(encoder_outputs=…)"
        )

    def install_hooks(self) -> list[Handle]:
        hooks = super().install_hooks()
        if any(self.is_apart(layer) for layer, _ in self.hooked):
            host: PreTrainedModel = self.host
            hooks.append(host.get_encoder().register_forward_hook(self.encoder_outputs.note))
        return hooks

    def _host_generate(self, *args: object, **kwargs: Any) -> Tensor | ModelOutput:
        call, disabled = self.open_blocks.of_call(self.require_memory)[1:]
        if call is not None:
            self._check_encoded(call, disabled, kwargs.get("encoder_outputs"))
            # Whisper pads the recordings that have not ended to a static batch, so their rows are not known.
            if (
                shrinks_batches(self.host)
                and asked(self.host, kwargs, "cache_implementation") == "static"
                and any(source.rows not in (None, 1) for source in call.sources.values())
            ):
                raise ConditionError("Whisper with a static cache takes a memory of one row: generate row by row")
        return super()._host_generate(*args, **kwargs)

    def generate_batch(self, inputs: Sequence[list[int]], *, memory: object = None, **kwargs: object) -> NoReturn:
        """Raise ConditionError: transformers batches requests continuously for decoder-only models."""
        raise ConditionError(
            f"generate_batch is for models without an encoder, and {type(self.host).__name__} has one: use "
            "generate(inputs, memory=memory)"
        )

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: AdapterConfig, rows: int) -> dict[str, Tensor]:
        inputs = next(host_inputs(self.host, rows))
        if "input_ids" in inputs:
            inputs = {"input_ids": random_ids(self.host, rows, 5, generator)}
        return inputs | {"decoder_input_ids": random_ids(self.host, rows, 7, generator)}


def _inputs(host: nn.Module, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of the encoder with a text for the decoder."""
    for inputs in host_inputs(host, rows):
        yield inputs | {"decoder_input_ids": token_ids(host, rows)}


@dataclass(frozen=True)
class Stack:
    """The layers of encoder or decoder, numbered from `first` among those of the host."""

    part: str
    path: str
    layers: nn.ModuleList
    width: int
    first: int

    def sites(self, position: str) -> list[Site]:
        """Return every layer."""
        return [
            Site(self.first + index, position, f"{self.path}.{index}", self.width, device_of(layer), part=self.part)
            for index, layer in enumerate(self.layers)
        ]


def _stack(host: nn.Module, part: str, module: nn.Module, first: int) -> Stack:
    """Return the layers of a part: its outermost list that is as long as the config says, or the longest."""
    lists = outermost_lists(module)
    configs = [config for config in (getattr(module, "config", None), getattr(host, "config", None)) if config]
    depths = [getattr(config, name, None) for config in configs for name in _DEPTHS[part]]
    for depth in [*depths, max(map(len, lists.values()), default=0)]:
        fitting = [layers for layers in lists.values() if len(layers) == depth]
        if len(fitting) == 1:
            path = next(name for name, module_list in host.named_modules() if module_list is fitting[0])
            return Stack(part, path, fitting[0], layers_width(fitting[0], configs), first)
    raise AttachError(
        f"cannot tell which list holds the layers of the {part} of {type(host).__name__}; lists found: "
        f"{describe_lists(lists)}"
    )
