"""Encoders of transformers as hosts: BERT, ViT, CLIP, wav2vec 2.0 and their like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.host_models import device_of, text_config
from mmattn.adapters.protocols import BoundMemory, Scale, Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.attach import register_host
from mmattn.hosts.context import Call, ForwardStep, Handle, Keywords, Positional
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.probe import find_layers, host_inputs, layers_width, probe_adapter, random_ids
from mmattn.storage.tensor_cache import TensorVersion


def check_reads_at_once(adapter: AdapterLayers, host: nn.Module) -> None:
    """Refuse an adapter whose memory depends on the text so far, on a host that reads all of its input at once."""
    if adapter.traits.reads_whole_text or getattr(adapter.config, "visible_segments", "all") != "all":
        raise AttachError(
            f"{type(adapter.config).__name__} follows a text token by token (chunks, another model, images in the "
            f"text), but {type(host).__name__} reads its input at once: take a GatedAdapter with visible_segments='all'"
        )


def _drops_layers(host: nn.Module) -> bool:
    """Return whether a host leaves layers out at random in training (LayerDrop)."""
    configs = (vars(part.config) for part in host.modules() if hasattr(part, "config"))
    return any(value for config in configs for name, value in config.items() if name.endswith("layerdrop"))


@register_host
class AdaptedEncoder(AdaptedModel):
    """A model that classifies, embeds or fills in, with adapters; a memory has one row for each row of its input.

    Args:
        host: the model.
        path: dotted name of its list of layers, if it cannot be found: of CLIP "text_model.encoder.layers" or
            "vision_model.encoder.layers".
        require_memory: calls without a memory raise instead of giving the host's own answer.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> host = BertForSequenceClassification(BertConfig(vocab_size=97, hidden_size=32, intermediate_size=64,
    ...                                                 num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> import mmattn
    >>> model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=24, every=2))
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> torch.equal(model(ids, memory=mmattn.Memory(torch.randn(1, 11, 24))).logits, model(ids).logits)  # fresh
    True
    """

    kind: ClassVar[str] = "encoder"
    auto_class: ClassVar[str] = "AutoModel"

    def __init__(self, host: nn.Module, path: str | None = None, require_memory: bool = False) -> None:
        super().__init__(host, require_memory)
        self.path, layers = find_layers(host, path)
        part = host.get_submodule(self.path.rpartition(".")[0])
        self.width = layers_width(layers, [getattr(part, "config", None), text_config(host)])
        self.encoder_outputs = EncoderOutputs(self)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        can_generate: Callable[[], bool] | None = getattr(model, "can_generate", None)
        return can_generate is not None and hasattr(model, "main_input_name") and not can_generate()

    def sites(self, position: str) -> list[Site]:
        layers = self.host.get_submodule(self.path)
        assert isinstance(layers, nn.ModuleList)
        return [
            Site(index, position, f"{self.path}.{index}", self.width, device_of(layer))
            for index, layer in enumerate(layers)
        ]

    def is_apart(self, layer: int) -> bool:
        """Return True: the hidden states give the number of rows and tokens (patches, frames)."""
        return True

    def check_adapter(self, adapter: AdapterLayers) -> None:
        check_reads_at_once(adapter, self.host)
        inputs = partial(host_inputs, self.host)
        probe_adapter(self.host, self.open_blocks, adapter, inputs, None, any_output=True)

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: Positional, kwargs: Keywords
    ) -> ForwardStep:
        sources = self.encoder_outputs.sources(call, disabled)
        if any(self.encoder_outputs.match(value, sources) for value in kwargs.values()):
            return ForwardStep(self, host, None, {})  # the layers have run, with these memories
        sites = [(layer, self.adapter(name).position) for name in sources for layer in self.adapter(name).layers]
        return ForwardStep(self, host, None, {site: [] for site in sites})

    def check_reached(self, layers: Sequence[int]) -> None:
        """Refuse an output that memory did not reach at some layers, but for those that training drops."""
        super().check_reached(layers)
        if not (self.host.training and _drops_layers(self.host)):
            raise ConditionError(
                f"memory did not reach layers {list(layers)} of {type(self.host).__name__}, which did not run: give "
                "their inputs, not their outputs"
            )

    def install_hooks(self) -> list[Handle]:
        part = self.host.get_submodule(self.path.rpartition(".")[0])
        return [*super().install_hooks(), part.register_forward_hook(self.encoder_outputs.note)]

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: AdapterConfig, rows: int) -> dict[str, Tensor]:
        for inputs in host_inputs(self.host, rows):
            for name, value in inputs.items():
                if name == "input_ids":
                    inputs[name] = random_ids(self.host, rows, 7, generator).view(*value.shape[:-1], 7)
                elif value.is_floating_point():
                    inputs[name] = torch.randn(value.shape, generator=generator, device=generator.device).to(value)
            inputs.pop("attention_mask", None)
            try:
                with torch.no_grad(), self.open_blocks.conditioned(None):
                    self.host(**inputs)
            except Exception:  # the next way to call it
                continue
            return inputs
        return super().example_batch(generator, config, rows)


# Outputs of encoders, and the memories with which they were computed --------------------------------------------------


#: The output of an encoder, its last hidden states first or by name.
EncoderOutput = Tensor | tuple[object, ...] | Mapping[str, object]
#: By adapter, a memory and its scale.
Sources = Mapping[str, tuple[BoundMemory, Scale]]


class EncoderOutputs:
    """The memories with which outputs of an encoder were computed, for as long as the outputs live."""

    def __init__(self, model: AdaptedModel, part: str | None = None) -> None:
        self.model, self.part = model, part
        self._computed: MutableMapping[Tensor, tuple[Sources, dict[str, TensorVersion]]] = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[EncoderOutputs], tuple[AdaptedModel, str | None]]:
        return EncoderOutputs, (self.model, self.part)

    def sources(self, call: Call, disabled: frozenset[str]) -> Sources:
        """Return memory and scale of each adapter in this part that acts in a call."""
        return {
            name: (source, call.scales.get(name, 1.0))
            for name, source in call.sources.items()
            if name in self.model.active
            and name not in disabled
            and self.model.adapter(name).sites[0].part == self.part
        }

    def note(self, encoder: nn.Module, args: Positional, output: EncoderOutput) -> None:
        """A forward hook of the encoder: note with which memories it was run."""
        call, disabled = self.model.open_blocks.in_force()[1:]
        states = _first_states(output)
        if call is None or states is None or torch.compiler.is_compiling():
            return
        if sources := self.sources(call, disabled):
            versions = {name: TensorVersion(source.sources()) for name, (source, _) in sources.items()}
            self._computed[states] = sources, versions

    def match(self, output: object, sources: Sources) -> bool:
        """Return whether outputs are those that the encoder returned with these memories as they are now."""
        states = _first_states(output)
        earlier, versions = ({}, {}) if states is None else self._computed.get(states, ({}, {}))
        if sources.keys() != earlier.keys():
            return False
        for name, (source, scale) in sources.items():
            tensors = source.sources()
            same = versions[name].holds(tensors) if tensors else source is earlier[name][0]
            if not (same and bool(scale == earlier[name][1])):
                return False
        return True


def _first_states(output: object) -> Tensor | None:
    """Return the last hidden states (b, l, d) among the outputs of an encoder."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)
