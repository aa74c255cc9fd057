"""Find the layers of a model of transformers, and check in one small forward that changes there reach its output."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.host_models import call_by_name, depth_of, device_of, dtype_of, embeddings_of, text_config
from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.context import Handle, LayerOutput, OpenBlocks, forward_resumed
from mmattn.hosts.hooks import LayerHook

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Tokens of the text in the forward of a probe.
LENGTH = 2
#: Relative error up to which two outputs count as equal, by bytes of a number.
TOLERANCE = {8: 1e-4, 4: 1e-4, 2: 5e-2}
#: Arguments to call a host with for a number of rows: the ways to try, one after the other.
Inputs = Callable[[int], Iterable[dict[str, Tensor]]]


@contextlib.contextmanager
def in_eval_mode(host: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode inside the block, without `train()`, in which some models do more."""
    modes = [(module, module.training) for module in host.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def bare_forward(host: nn.Module, open_blocks: OpenBlocks | None = None) -> Iterator[None]:
    """Run forwards of the host inside the block in evaluation mode and without a memory."""
    with (
        forward_resumed(None),
        contextlib.nullcontext() if open_blocks is None else open_blocks.conditioned(None),
        in_eval_mode(host),
    ):
        yield


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Return |output − expected| / |expected|."""
    return float((output - expected).norm() / expected.norm().clamp(min=1e-30))


def is_close(output: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs are equal but for rounding; NaN is not close."""
    return relative_error(output, expected) <= TOLERANCE[output.element_size()]


def disturb(x: Tensor, row: int) -> Tensor:
    """Return a copy of x (b, …, d) with a ramp over d added to one row."""
    changed = x.clone()
    changed[row] += torch.linspace(-1, 1, x.shape[-1], device=x.device).to(x.dtype)
    return changed


@torch.no_grad()
def unreached(host: nn.Module, sites: Sequence[Callable[[int], Handle]], output: Callable[[int], Tensor]) -> list[int]:
    """Return the positions of sites whose change does not reach the output.

    In one forward row r is changed at the r-th site only; row 0 and the last nowhere.
    """
    with contextlib.ExitStack() as hooks, in_eval_mode(host):
        for row, hook in enumerate(sites, 1):
            hooks.callback(hook(row).remove)
        changed = output(len(sites) + 2)  # more rows than tokens, so that axes can be told apart by their sizes
    if isinstance(changed, FakeTensor):
        return []  # a host without values only shows shapes
    return [site for site in range(len(sites)) if torch.equal(changed[site + 1], changed[0])]


def output_of(host: nn.Module, inputs: Iterable[Mapping[str, object]], rows: int, any_output: bool = False) -> Tensor:
    """Call the host with the first arguments that it accepts; return its logits, or every output (b, …)."""
    name, message, cause = type(host).__name__, "", None
    for kwargs in inputs:
        try:
            out = call_by_name(host, **kwargs)
        except MmattnError:
            raise
        except Exception as error:
            shapes = ", ".join(
                f"{key} {tuple(value.shape)}" for key, value in kwargs.items() if isinstance(value, Tensor)
            )
            if not message:
                message, cause = f"{name} cannot be called with {shapes}: {type(error).__name__}: {error}", error
            continue
        outputs = out.values() if any_output and isinstance(out, Mapping) else [getattr(out, "logits", None)]
        parts = [value.flatten(1) for value in outputs if isinstance(value, Tensor) and value.shape[:1] == (rows,)]
        if parts:
            return torch.cat(parts, 1)
        needed = "output with a row for each row of its input" if any_output else "logits"
        message = message or (
            f"{name} returns no {needed}, by which to see that memory matters: attach to the model with its head "
            "(AutoModelForCausalLM, AutoModelForSequenceClassification, …)"
        )
    raise AttachError(message or f"there are no example inputs for {name}") from cause


def probe_adapter(
    host: nn.Module,
    open_blocks: OpenBlocks,
    adapter: AdapterLayers,
    inputs: Inputs,
    length: int | None = LENGTH,
    any_output: bool = False,
) -> int | None:
    """Check that changes of the hidden states at an adapter's layers reach the output."""
    position = adapter.position
    numbers = [site.layer for site in adapter.sites]
    layers = [host.get_submodule(site.module) for site in adapter.sites]
    if any(hasattr(layer, "backward_pass") for layer in layers):
        raise AttachError(
            f"the layers of {type(host).__name__} are reversible: they run again in the backward pass without what "
            "adapters added, so gradients would be wrong; choose another host"
        )
    axes: dict[int, int | None] = {}
    shape = (len(layers) + 2, length, adapter.sites[0].width)

    class Change(LayerHook):
        def __init__(self, row: int) -> None:
            self.row = row

        def adapt(self, x: Any) -> Tensor:
            axes[self.row] = axis = stream_axis(x, *shape)
            states = x if axis is None else x.mean(axis)
            changed = disturb(states, self.row)
            return changed if axis is None else x + (changed - states).unsqueeze(axis)

    def hook(layer: nn.Module) -> Callable[[int], Handle]:
        return lambda row: Change(row).install(layer, position)

    with open_blocks.conditioned(None):
        hooks = [hook(layer) for layer in layers]
        lost = set(unreached(host, hooks, lambda rows: output_of(host, inputs(rows), rows, any_output)))
    lost |= {site for site in range(len(layers)) if site + 1 not in axes}
    if lost:
        raise ConditionError(
            f"changes {position} layers {[numbers[site] for site in sorted(lost)]} do not reach the output of "
            f"{type(host).__name__}, so memory would be lost: name the list of layers with path=, or other layers"
        )
    axis, *others = set(axes.values())
    if others:
        raise AttachError(
            f"some layers of {type(host).__name__} have several residual streams: choose layers of one kind"
        )
    return axis


# Hosts with several residual streams per token (hyper-connections, arXiv 2409.19606; AltUp, arXiv 2301.13310): adapters
# read the mean of the streams, and what they add is added to each.


def stream_axis(x: object, rows: int, length: int | None, width: int) -> int | None:
    """Return the axis of residual streams in hidden states of a text (rows, length, width), or None for (b, l, d)."""
    shape = tuple(x.shape) if isinstance(x, Tensor) else ()
    if len(shape) == 3 and shape[::2] == (rows, width):
        return None  # also with more tokens than the text, where the host puts a prompt before it
    if len(shape) == 4 and shape[3] == width:
        if shape[:2] == (rows, length):
            return 2
        if shape[1:3] == (rows, length):
            return 0
    raise AttachError(
        f"adapters act on hidden states (b, l, {width}) or residual streams of them; layers of this host return "
        f"{shape if isinstance(x, Tensor) else type(x).__name__} for {rows} rows of {length or 'some'} tokens: no "
        "adapter can be put on it"
    )


# Example inputs of models of transformers -----------------------------------------------------------------------------


def text_inputs(host: nn.Module, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield rows of the same few tokens."""
    ids = token_ids(host, rows)
    yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def token_ids(host: nn.Module, rows: int) -> Tensor:
    """Return ids (b, l) of a token that is not padding, and of the host's end token."""
    config = getattr(host, "config", None)
    end = getattr(config, "eos_token_id", None)
    ids = torch.full((rows, LENGTH), 2 if getattr(config, "pad_token_id", None) == 1 else 1)
    # A small model made from a config's defaults has the end of its large siblings, which is no token of its own.
    if isinstance(end, int) and 0 <= end < (getattr(text_config(host), "vocab_size", None) or math.inf):
        ids[:, -1] = end
    return ids.to(device_of(embeddings_of(host)))


def random_ids(host: nn.Module, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random ids (b, l) of the host's vocabulary."""
    size = getattr(text_config(host), "vocab_size", 2)
    ids = torch.randint(size, (rows, length), generator=generator, device=generator.device)
    return ids.to(device_of(embeddings_of(host)))


def host_inputs(host: nn.Module, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield inputs by the name of the host's main input: a text, pictures, or sounds in every layout."""
    name = getattr(host, "main_input_name", "input_ids")
    if name in ("input_ids", "inputs"):
        yield from text_inputs(host, rows)
        text = next(text_inputs(host, rows))
        for shape in _picture_shapes(host):  # models that compare texts with pictures need both
            yield text | {"pixel_values": _drawn(host, rows, shape)}
        yield {key: value[:, None] for key, value in text.items()}  # multiple choice
    names = ("input_values", "input_features") if name == "inputs" else (name,) if name != "input_ids" else ()
    for name in names:
        for shape in _picture_shapes(host) if name == "pixel_values" else _sound_shapes(host):
            yield {name: _drawn(host, rows, shape)}


def _drawn(host: nn.Module, rows: int, shape: tuple[int, ...]) -> Tensor:
    """Return the same random input in every row."""
    one = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return one.repeat(rows, *[1] * len(shape)).to(device_of(host), dtype_of(host))


def _picture_shapes(host: nn.Module) -> Iterator[tuple[int, ...]]:
    config: PreTrainedConfig | None = getattr(host, "config", None)
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    yield getattr(config, "num_channels", 3), height, width


def _sound_shapes(host: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield samples, features by time and times by feature; as long as the host has positions, or short."""
    config: PreTrainedConfig | None = getattr(host, "config", None)
    config = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "n_mels")
    features = {size for size in (getattr(config, name, None) for name in names) if isinstance(size, int)}
    times = [2 * positions for positions in [getattr(config, "max_source_positions", 0)] if isinstance(positions, int)]
    times += [size for size in [getattr(config, "max_length", None)] if isinstance(size, int)]
    for feature in sorted(features):
        for length in [*(time for time in times if 0 < time < 10_000), 256]:
            yield feature, length
            yield length, feature
    yield (4000,)
    yield 1, 4000


# Lists of layers ------------------------------------------------------------------------------------------------------


_ROWS = 3
_WIDTHS = ("hidden_size", "d_model")


def find_layers(host: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of the layers of a host; of a language model, of its decoder."""
    lists = _layer_lists(host)
    if path is not None:
        if path not in lists:
            raise AttachError(
                f"no list of layers at {path!r} in {type(host).__name__}; lists found: {describe_lists(lists)}"
            )
        return path, lists[path]
    depth, outermost = depth_of(host), outermost_lists(host)
    fitting = outermost_lists(host, depth)
    if depth is None or len(fitting) != 1:
        fitting = _passed(host, fitting or outermost)
    if len(fitting) != 1:
        raise AttachError(
            f"cannot tell which list holds the layers of {type(host).__name__} (num_hidden_layers = {depth}); "
            f"lists found: {describe_lists(lists)}; name one with path="
        )
    return next(iter(fitting.items()))


def outermost_lists(host: nn.Module, depth: int | None = None) -> dict[str, nn.ModuleList]:
    """Return the lists of layers, all or those of one length, that are not within another."""
    lists = {name: layers for name, layers in _layer_lists(host).items() if depth is None or len(layers) == depth}
    return {name: layers for name, layers in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}


def describe_lists(lists: Mapping[str, nn.ModuleList]) -> str:
    """Return the lists with their lengths and classes, for a message."""
    return ", ".join(f"{name} ({len(layers)} × {type(layers[0]).__name__})" for name, layers in lists.items()) or "none"


def _layer_lists(host: nn.Module) -> dict[str, nn.ModuleList]:
    return {name: module for name, module in host.named_modules() if isinstance(module, nn.ModuleList) and len(module)}


def _passed(host: nn.Module, lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """Return the lists whose layers a text passes one after the other; of several that take turns, the last.

    A part that reads pictures or sounds is not run by a text. Where attention and feed-forward layers have lists of
    their own, what a layer hands on is what the last of them does.
    """
    order = _order(host, lists)
    numbers_of = {name: [number for other, number in order if other == name] for name in lists}
    # Layers that attend to pictures do not run without them.
    passed = [name for name, numbers in numbers_of.items() if numbers and numbers == sorted(set(numbers))]
    turns = [name for name, _ in order if name in passed]
    # Lists that take turns hand the text back and forth; lists after one another are parts of their own.
    if len(passed) > 1 and turns == turns[: len(passed)] * len(lists[passed[0]]):
        passed = turns[-1:]
    return {name: lists[name] for name in passed}


@torch.no_grad()
def _order(host: nn.Module, lists: Mapping[str, nn.ModuleList]) -> list[tuple[str, int]]:
    """Return the layers of these lists in the order in which a text passes them."""
    order: list[tuple[str, int]] = []

    def listen(name: str, number: int) -> Callable[[nn.Module, object, LayerOutput], None]:
        def hook(module: nn.Module, args: object, output: LayerOutput) -> None:
            states = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(states, Tensor) and states.dim() >= 3:
                order.append((name, number))

        return hook

    with contextlib.ExitStack() as hooks, in_eval_mode(host):
        for name, module in lists.items():
            for number, layer in enumerate(module):
                hooks.enter_context(layer.register_forward_hook(listen(name, number)))
        for inputs in host_inputs(host, _ROWS):
            order.clear()
            with contextlib.suppress(Exception):  # the probe reports the cause
                host(**inputs)
                break
    return order


def layers_width(layers: nn.ModuleList, configs: Sequence[PreTrainedConfig | None]) -> int:
    """Width d of the hidden states: the one of a config that norms of a layer have, or what most of them have."""
    sizes = [size for size in map(_norm_width, layers[0].modules()) if size is not None]
    widths = [getattr(config, name, None) for config in configs for name in _WIDTHS]
    for width in widths:
        if isinstance(width, int) and (width in sizes or not sizes):
            return width
    if sizes:
        return max(set(sizes), key=sizes.count)
    raise AttachError(f"neither config nor norms tell the width of {type(layers[0]).__name__}")


def _norm_width(module: nn.Module) -> int | None:
    """Return the width of a norm, or None for other modules."""
    weight = getattr(module, "weight", None)
    norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and "norm" in type(module).__name__.lower()
    return len(weight) if norm else None  # type: ignore[arg-type]
