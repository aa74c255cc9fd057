"""What stands before the text of a call: at which positions the text then begins, and proof that a host reads it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.joined.joint_softmax import Capture, JoinedSlots, JoinedView
from mmattn.adapters.joined.record import JoinSlots
from mmattn.adapters.language_models import device_of, embeddings_of, text_config
from mmattn.adapters.protocols import Site
from mmattn.adapters.text_state import TextState
from mmattn.core.key_rotation import BEYOND, DISTANCE, KeyRotation, check_frequencies, find_rotations, has_frequencies
from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.attention_hooks import attention_hooks, attention_layers, check_function
from mmattn.hosts.context import ForwardStep
from mmattn.hosts.eval_mode import in_eval_mode

#: Tokens of the passage and of the text with which a host is tried.
PASSAGE, TEXT = 7, 5
#: Relative errors of an answer, by bytes of a number.
WITHIN = {8: 1e-4, 4: 1e-4, 2: 5e-2}


def joined_sites(host: nn.Module, layers: nn.ModuleList, path: str, width: int) -> list[Site]:
    """The attention of every decoder layer.

    Args:
        host: the language model.
        layers: its decoder layers.
        path: dotted name of their list.
        width: d.

    Raises:
        AttachError: a layer has none that can be reached.
    """
    return [
        Site(layer, "joined", name, width, device_of(host.get_submodule(name)), sizes)
        for layer, (name, sizes) in attention_layers(host, layers, path).items()
    ]


def shift_text(step: ForwardStep, text: TextState, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward with the positions of tokens that have something before them.

    Args:
        step: the forward.
        text: what the host is given.
        kwargs: with which it is called.

    Raises:
        ConditionError: several adapters put something before the text, or it is not known where the text continues.
    """
    known = {id(view): view for own in step.actions.values() for view, *_ in own if view.stands_in_text}
    # First what moves the text, then what only looks where it stands.
    views: list[Any] = sorted(known.values(), key=lambda view: not view.moves_text)
    if not views:
        return kwargs
    moving = [view for view in views if view.moves_text]
    if len(moving) > 1:
        raise ConditionError(
            f"{len(moving)} adapters put their memories before one text, and each takes its first positions: give one "
            "of them a memory, or select all passages together"
        )
    positions = kwargs.get("position_ids")
    if positions is None:
        if text.past is None or text.inputs is None:
            raise ConditionError("the host does not say how much text is in its cache: give position_ids=(b, l)")
        positions = torch.arange(text.past, text.past + text.length, device=text.inputs.device)[None]
    for view in views:
        positions = view.shift_positions(positions)
    return kwargs | {"position_ids": positions}


@torch.no_grad()
def probe_before_text(model: Any, sites: Iterable[Site]) -> dict[int, KeyRotation | None] | None:
    """Prove that a passage before a text, read by itself, is what it is in the text; and see how keys are moved.

    Args:
        model: the adapted model.
        sites: the attention of every layer.

    Returns:
        what turns the keys of each layer to other positions, None where a layer's keys have none; None for all where
        keys cannot be moved, as with learned positions.

    Raises:
        AttachError: the host does not read a text after a passage as it reads both.
        ConditionError: its attention takes no mask.
    """
    host = model.host
    modules = _reached(model, sites)
    name = type(host).__name__
    try:
        with model.open_blocks.conditioned(None), in_eval_mode(host):
            ids, positions = _short_text_at(host, 0)
            wanted = _logits(host, ids, positions)[:, PASSAGE:]
            here, rotations = _read_at_two_places(host, modules)
            view = JoinedView(_slots(here))
            with attention_hooks(_listeners(modules, view)):
                found = _logits(host, ids[:, PASSAGE:], view.shift_positions(positions[:, :TEXT]))
    except MmattnError:
        raise
    except Exception as error:
        raise AttachError(
            f"{name} does not take keys and values before its text: {type(error).__name__}: {error}"
        ) from error
    distance_found = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if not distance_found <= WITHIN[found.element_size()]:
        raise AttachError(
            f"{name} does not read a text after keys and values as it reads both ({distance_found:.0e} apart): states "
            "of another kind beside its attention, or positions that are no rotation and not in position_ids; take a "
            "GatedAdapter for this host"
        )
    return rotations


@torch.no_grad()
def probe_rotations(model: Any, sites: Iterable[Site]) -> dict[int, KeyRotation | None] | None:
    """What turns the keys of each layer to their positions, as `probe_before_text` finds it.

    Args:
        model: the adapted model.
        sites: the attention of every layer.

    Raises:
        AttachError: the host takes no positions.
        ConditionError: its attention takes no mask.
    """
    modules = _reached(model, sites)
    with model.open_blocks.conditioned(None), in_eval_mode(model.host):
        return _read_at_two_places(model.host, modules)[1]


def _reached(model: Any, sites: Iterable[Site]) -> dict[int, nn.Module]:
    """The attention of each layer, of a host that takes positions and a mask.

    Raises:
        AttachError: it takes no positions.
        ConditionError: its attention takes no mask.
    """
    _check_kind(model.host)
    modules: dict[int, nn.Module] = {site.layer: model.host.get_submodule(site.module) for site in sites}
    for module in modules.values():
        config: Any = module.config
        check_function(getattr(config, "own", config))
    return modules


def _short_text_at(host: nn.Module, start: int) -> tuple[Tensor, Tensor]:
    """Ids of a passage and a text (1, l), and their positions from a number on."""
    ids = short_text(host)
    return ids, torch.arange(start, start + PASSAGE + TEXT, device=ids.device)[None]


def _read_at_two_places(
    host: nn.Module, modules: Mapping[int, nn.Module]
) -> tuple[Capture, dict[int, KeyRotation | None] | None]:
    """What the host computes of a short passage, and how its keys are turned with their positions."""
    most = getattr(text_config(host), "max_position_embeddings", None) or PASSAGE + DISTANCE
    distance = max(min(DISTANCE, most - PASSAGE), 1)
    ids = short_text(host)[:, : PASSAGE + 1]
    places = torch.arange(PASSAGE, device=ids.device)[None]

    def read(positions: Tensor) -> Capture:
        captured = Capture()
        with attention_hooks(_listeners(modules, captured)):
            _logits(host, ids[:, : positions.shape[1]], positions)
        return captured

    longer = read(torch.cat([places, places[:, :1] + BEYOND], 1)) if has_frequencies(host) else None
    here, there = read(places), read(places + distance)
    if longer is not None:
        check_frequencies(type(host).__name__, here.keys, longer.keys)
    return here, find_rotations(host, here.keys, there.keys, distance)


def _check_kind(host: nn.Module) -> None:
    """Refuse hosts in which a short text does not show that it cannot be.

    Raises:
        AttachError: attention in chunks of the text, or positions that the host does not take.
    """
    config, name = text_config(host), type(host).__name__
    kinds = getattr(config, "layer_types", None) or ()
    if any("chunked" in str(kind) for kind in kinds):
        raise AttachError(
            f"layers of {name} attend within chunks of the text (layer_types), whose borders what stands before it "
            "would move: take a GatedAdapter for this host"
        )
    if "position_ids" not in inspect.signature(type(host).forward).parameters:
        inner: Any = getattr(host, "get_base_model", None)
        if inner is None or "position_ids" not in inspect.signature(type(inner()).forward).parameters:
            raise AttachError(
                f"{name} takes no position_ids, so that its text cannot stand after something else (ALiBi, or "
                "positions counted by itself): take a GatedAdapter for this host"
            )


def short_text(host: nn.Module) -> Tensor:
    """Random ids (1, l) that the host knows."""
    size = getattr(text_config(host), "vocab_size", None) or 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, size - 1), size, (1, PASSAGE + TEXT), generator=generator)
    return ids.to(device_of(embeddings_of(host)))


def _logits(host: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    logits: Tensor = host(
        input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False
    ).logits
    return logits


def _listeners(modules: Mapping[int, nn.Module], view: Any) -> dict[nn.Module, Any]:
    block = JoinSlots()

    def listener(layer: int) -> Any:
        def apply(x: HostAttention) -> HostAttention:
            joined: HostAttention = view.apply(x, block, layer, 1.0)
            return joined

        return apply

    return {module: listener(layer) for layer, module in modules.items()}


def _slots(captured: Capture) -> JoinedSlots:
    length = next(iter(captured.keys.values())).shape[2]
    one = torch.ones(1, length, dtype=torch.bool)
    return JoinedSlots(captured.keys, captured.values, one, torch.arange(length)[None], torch.tensor([length]))
