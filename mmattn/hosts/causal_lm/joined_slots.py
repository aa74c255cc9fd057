"""Slots before or beside the text of a language model: their sites, the positions after them, probes, a reader."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import call_by_name, device_of, embeddings_of, text_config
from mmattn.adapters.joined.host_attention import ExtraSlots, HostAttention, JoinSlots
from mmattn.adapters.joined.rotation import Rotations, read_rotations
from mmattn.adapters.joined.slots import Capture, JoinedSlots, JoinedView
from mmattn.adapters.protocols import HeadSizes, Site
from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.causal_lm.continuous_batching import paused
from mmattn.hosts.causal_lm.generation import fewest_logits
from mmattn.hosts.context import Arguments, Call, ForwardStep, refuse_reentrant
from mmattn.hosts.hooks import AttentionHook, attention_hooks, check_function
from mmattn.hosts.host_state import HostState
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.peft import inner_host
from mmattn.hosts.probe import bare_forward, in_eval_mode, is_close, output_of, relative_error, text_inputs, unreached

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Tokens of the passage and of the text in the forwards of a probe.
PASSAGE, TEXT = 7, 5
#: Tokens of the vocabulary whose embeddings are measured.
MEASURED = 4096
_ADVICE = "take a GatedAdapter for this host"


def joined_sites(host: nn.Module, layers: nn.ModuleList, path: str, width: int) -> list[Site]:
    """Return the attention of every decoder layer, as a short text finds it."""
    by_layer: list[set[Site]] = [set() for _ in layers]

    def listener(layer: int, name: str) -> Callable[[HostAttention], HostAttention]:
        def note(x: HostAttention) -> HostAttention:
            heads = HeadSizes(x.query.shape[1], x.key.shape[1], x.key.shape[3], x.value.shape[3])
            device = device_of(host.get_submodule(name))
            by_layer[layer].add(Site(layer, "joined", name, width, device, heads))
            return x

        return note

    listeners = {
        module: listener(layer, f"{path}.{layer}.{name}")
        for layer, part in enumerate(layers)
        for name, module in part.named_modules()
        if hasattr(vars(module).get("config"), "_attn_implementation")
    }
    with attention_hooks(listeners), in_eval_mode(host), torch.no_grad():
        output_of(host, [inputs | {"use_cache": False} for inputs in text_inputs(host, 1)], 1)
    if missing := [layer for layer, sites in enumerate(by_layer) if len(sites) != 1]:
        kinds = sorted({type(layers[layer]).__name__ for layer in missing})
        raise AttachError(
            f"layers {missing} of {type(host).__name__} ({', '.join(kinds)}) do not use the attention functions of "
            "transformers, in which keys and values are joined: take a GatedAdapter for this host"
        )
    return [site for sites in by_layer for site in sites]


def shift_text(step: ForwardStep, text: TextState, kwargs: Arguments) -> Arguments:
    """Return the arguments of a forward with the positions of tokens that have slots before them."""
    by_id = {id(view): view for site in step.actions.values() for view, *_ in site if view.stands_in_text}
    # Shift positions before anything reads them.
    views: list[Any] = sorted(by_id.values(), key=lambda view: not view.moves_text)
    if not views:
        return kwargs
    moving = sum(view.moves_text for view in views)
    if moving > 1:
        raise ConditionError(
            f"{moving} adapters put their memories before one text, and each takes its first positions: give one of "
            "them a memory, or select all passages together"
        )
    positions = kwargs.get("position_ids")
    if positions is None:
        if text.past is None or text.inputs is None:
            raise ConditionError("the host does not say how much text is in its cache: give position_ids=(b, l)")
        positions = torch.arange(text.past, text.past + text.length, device=text.inputs.device)[None]
    for view in views:
        positions = view.shift_positions(positions)
    return kwargs | {"position_ids": positions}


# Probes ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def probe_joined(model: AdaptedModel, sites: Sequence[Site]) -> None:
    """Check that a slot joined in the attention of each layer reaches the output."""
    host = model.host
    modules = [host.get_submodule(site.module) for site in sites]
    _check_masks(modules)
    hooks = [partial(_join_slot, module) for module in modules]
    with model.open_blocks.conditioned(None):
        lost = unreached(host, hooks, lambda rows: output_of(host, text_inputs(host, rows), rows))
    if lost:
        raise ConditionError(
            f"slots joined in the attention of layers {[sites[site].layer for site in lost]} do not reach the output "
            f"of {type(host).__name__}, so memory would be lost: choose other layers"
        )


def _join_slot(module: nn.Module, row: int) -> AttentionHook:
    """Join a slot with keys and values that one row can attend to."""

    def join(x: HostAttention) -> HostAttention:
        device = x.value.device
        value = torch.linspace(-1, 1, x.value.shape[3], device=device).expand(1, x.value.shape[1], 1, -1)
        key = torch.zeros(1, x.key.shape[1], 1, x.key.shape[3], device=device)
        return x.join(ExtraSlots(key, value, sees=torch.arange(x.query.shape[0], device=device)[:, None] == row))

    return AttentionHook(module, join)


@torch.no_grad()
def probe_before_text(model: AdaptedModel, sites: Sequence[Site]) -> Rotations:
    """Check that a text after the K/V of a passage is as in one forward; return how each layer rotates keys.

    None for a layer whose keys do not follow positions; None for all where keys cannot be moved (learned positions).
    """
    host, modules = model.host, _attention_modules(model, sites)
    name, ids = type(host).__name__, short_text(host)
    positions = torch.arange(PASSAGE + TEXT, device=ids.device)[None]
    try:
        with bare_forward(host, model.open_blocks):
            expected = _logits(host, ids, positions)[:, PASSAGE:]
            passage = _captured(host, modules, ids, positions[:, :PASSAGE])
            rotations = _rotations(host, modules, ids)
            places = torch.arange(PASSAGE)[None]
            slots = JoinedSlots(passage.keys, passage.values, places >= 0, places, torch.tensor([PASSAGE]))
            view = JoinedView(slots)
            with attention_hooks(_listeners(modules, view)):
                output = _logits(host, ids[:, PASSAGE:], view.shift_positions(positions[:, :TEXT]))
    except MmattnError:
        raise
    except Exception as error:
        raise AttachError(
            f"{name} takes no keys and values before its text: {type(error).__name__}: {error}"
        ) from error
    if not is_close(output, expected):
        raise AttachError(
            f"{name} does not read a text after keys and values as it reads both (relative error "
            f"{relative_error(output, expected):.0e}): it has other states or positions; {_ADVICE}"
        )
    return rotations


@torch.no_grad()
def probe_rotations(model: AdaptedModel) -> Rotations:
    """Return how each layer rotates keys with their positions, as `probe_before_text` does."""
    modules = _attention_modules(model, model.sites("joined"))
    with bare_forward(model.host, model.open_blocks):
        return _rotations(model.host, modules, short_text(model.host))


@torch.no_grad()
def check_reads_embeddings(model: AdaptedModel, width: int) -> None:
    """Check that the embeddings of a text give the output of its ids."""
    host, name, ids = model.host, type(model.host).__name__, short_text(model.host)
    mask = torch.ones_like(ids)
    try:
        embedded = embeddings_of(host)(ids)
        with bare_forward(host, model.open_blocks):
            expected = call_by_name(host, input_ids=ids, attention_mask=mask, use_cache=False).logits
            output = call_by_name(host, inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits
    except Exception as error:
        raise AttachError(f"{name} reads no embeddings: {type(error).__name__}: {error}; {_ADVICE}") from error
    if embedded.shape[-1] != width:
        raise AttachError(
            f"the embeddings of {name} have width {embedded.shape[-1]}, and its hidden states {width}: {_ADVICE}"
        )
    if not is_close(output, expected):
        raise AttachError(
            f"{name} does not read embeddings as it reads their tokens (relative error "
            f"{relative_error(output, expected):.0e}): its layers need ids as well; {_ADVICE}"
        )


def short_text(host: nn.Module) -> Tensor:
    """Return random ids (1, l) of the host's vocabulary."""
    size = getattr(text_config(host), "vocab_size", None) or 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, size - 1), size, (1, PASSAGE + TEXT), generator=generator, device="cpu")
    return ids.to(device_of(embeddings_of(host)))


def _attention_modules(model: AdaptedModel, sites: Sequence[Site]) -> dict[int, nn.Module]:
    """Return the attention of each layer, of a host that takes positions and a mask."""
    host, name = model.host, type(model.host).__name__
    kinds = getattr(text_config(host), "layer_types", None) or ()
    if any("chunked" in str(kind) for kind in kinds):  # which a short text does not show
        raise AttachError(
            f"layers of {name} attend within chunks of the text (layer_types), whose borders slots before it would "
            f"move: {_ADVICE}"
        )
    if not any(
        "position_ids" in inspect.signature(type(model_part).forward).parameters
        for model_part in (host, inner_host(host))
    ):
        raise AttachError(f"{name} takes no position_ids, so its text cannot begin after slots (ALiBi): {_ADVICE}")
    modules = {site.layer: host.get_submodule(site.module) for site in sites}
    _check_masks(modules.values())
    return modules


def _check_masks(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        config: PreTrainedConfig = module.config
        check_function(getattr(config, "own", config))


def _rotations(host: nn.Module, modules: Mapping[int, nn.Module], ids: Tensor) -> Rotations:
    return read_rotations(
        host,
        lambda positions: _captured(host, modules, ids, positions).keys,
        torch.arange(PASSAGE, device=ids.device)[None],
        getattr(text_config(host), "max_position_embeddings", None),
    )


def _captured(host: nn.Module, modules: Mapping[int, nn.Module], ids: Tensor, positions: Tensor) -> Capture:
    """Return the keys and values that the host computes of the first ids at these positions."""
    captured = Capture()
    with attention_hooks(_listeners(modules, captured)):
        _logits(host, ids[:, : positions.shape[1]], positions)
    return captured


def _logits(host: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    return call_by_name(host, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def _listeners(
    modules: Mapping[int, nn.Module], view: Capture | JoinedView
) -> dict[nn.Module, Callable[[HostAttention], HostAttention]]:
    block = JoinSlots()

    def listener(layer: int) -> Callable[[HostAttention], HostAttention]:
        return lambda x: view.apply(x, block, layer, 1.0)

    return {module: listener(layer) for layer, module in modules.items()}


def capture(model: AdaptedModel, name: str, captured: Capture, **inputs: Tensor) -> None:
    """Record the keys and values of an input of the host for one adapter, in a forward without the other adapters."""
    with paused(model), model.open_blocks.conditioned(Call({name: captured}, reads_memory=True)):
        model.host(**inputs, use_cache=False, **fewest_logits(model.host))


# Embeddings before the text -------------------------------------------------------------------------------------------


class HostEmbeddingReader:
    """Run a host on embeddings, in a forward without adapters; `turns_keys` if keys follow positions."""

    def __init__(self, model: AdaptedModel, turns_keys: bool) -> None:
        self.model, self.turns_keys = model, turns_keys
        self._state: HostState | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HostEmbeddingReader:
        # In a copy of the model it reads with the copy's host; a copy of an adapter alone stays with its host.
        twin = copy.copy(self)
        twin.model, twin._state = memo.get(id(self.model), self.model), None
        return twin

    @property
    def is_training(self) -> bool:
        """Return whether a part of the host is in training mode."""
        return any(module.training for module in self.model.host.modules())

    @torch.no_grad()
    def embedding_size(self) -> float:
        """Return the root mean square of the embeddings of the host's tokens."""
        size = getattr(text_config(self.model.host), "vocab_size", None) or 1
        ids = torch.arange(0, size, max(size // MEASURED, 1))[None]
        return float(self._embed(ids).float().square().mean().sqrt())

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights of the host."""
        return self.model.host.parameters()

    def unchanged(self) -> Callable[[], bool]:
        """Return a function that tells whether the host still computes as it does now."""
        if self._state is None or not self._state.holds():
            self._state = HostState(self.model.host)
        return self._state.holds

    def read(
        self, name: str, embeddings: Tensor, real: Tensor, positions: Tensor
    ) -> tuple[Mapping[int, Tensor], Mapping[int, Tensor]]:
        """Return keys (b, g, m, k) and values (b, g, m, v) of each layer."""
        host, captured = self.model.host, Capture()
        function = str(getattr(text_config(host), "_attn_implementation", ""))
        if function.startswith("paged|"):
            raise ConditionError(
                f"the host reads the memory of adapter {name!r}, but is in continuous batching: give memories to "
                "model.generate_batch(inputs, memory=[…])"
            )
        if torch.is_grad_enabled() and host.training:
            refuse_reentrant(host)
        device, like = device_of(embeddings_of(host)), self._embed(torch.zeros(1, 1, dtype=torch.long))
        # A row without slots gets one that no token attends to, so that its numbers are finite.
        mask = (real | (torch.arange(real.shape[1], device=real.device) == 0)).long()
        embeddings, mask, positions = embeddings.to(device, like.dtype), mask.to(device), positions.to(device)
        capture(self.model, name, captured, inputs_embeds=embeddings, attention_mask=mask, position_ids=positions)
        return dict(captured.keys), dict(captured.values)

    @torch.no_grad()
    def _embed(self, ids: Tensor) -> Tensor:
        embeddings = embeddings_of(self.model.host)
        return embeddings(ids.to(device_of(embeddings)))


def embedding_reader(model: AdaptedModel, sites: Sequence[Site]) -> HostEmbeddingReader:
    """Return a reader of embeddings before the text of a host, after a check that it reads them as tokens."""
    reader = HostEmbeddingReader(model, probe_before_text(model, sites) is not None)
    check_reads_embeddings(model, sites[0].width)
    return reader
