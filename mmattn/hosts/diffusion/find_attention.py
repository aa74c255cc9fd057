"""Find the attention layers of a diffusion transformer that can read a memory, by one small forward.

The kind of an attention layer cannot be inferred from its class, of which there are as many as models, nor from its
sizes: text is often as wide as pictures. It follows from the inputs and outputs of the layer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.context import Arguments, Keywords, Positional
from mmattn.hosts.diffusion.example_inputs import TEXT, Layout, example_inputs, layouts
from mmattn.hosts.diffusion.heads import SHARED, attention_names, is_attention
from mmattn.hosts.diffusion.hooks import Output
from mmattn.hosts.diffusion.scale import Grid
from mmattn.hosts.probe import Handle, disturb, in_eval_mode, unreached

#: Kinds of attention layers: over text, one softmax over text and picture, or over what is in the layer's stream.
CROSS, JOINT, SELF = "cross", "joint", "self"


class LayerCall(NamedTuple):
    """Hidden states, text and output of a layer in one call."""

    x: object
    text: object
    output: object


@dataclass(frozen=True)
class PictureAttention:
    """An attention layer with queries of the picture."""

    name: str  # dotted name in the host
    kind: str  # "cross", "joint" or "self"
    stream: bool  # its tokens are those of picture and text
    width: int  # of the inputs of its keys and values: of the text, or of its stream if it reads no text
    part: int  # index of the picture among its outputs
    block: str = ""  # dotted name of the block around it
    block_part: int = 0  # index of the picture among the outputs of the block
    block_width: int = 0  # d of that output; 0 if none fits


@dataclass(frozen=True)
class TransformerLayers:
    """The attention layers of a diffusion transformer, and arguments that it accepts."""

    layers: tuple[PictureAttention, ...]  # attention layers that can read a memory, in the order of the host
    layout: Layout  # of its pictures
    grid: Grid  # of a picture that it accepts

    def inputs(self, host: nn.Module, rows: int, generator: torch.Generator) -> Arguments:
        """Return random arguments that the host accepts."""
        return example_inputs(host, self.layout, self.grid, rows, generator)


@torch.no_grad()
def find_attention(host: nn.Module) -> TransformerLayers:
    """Return the attention layers of a diffusion transformer at which a picture can attend to a memory."""
    name, rows = type(host).__name__, 2
    layers = [each for each in attention_names(host) if is_attention(host.get_submodule(each))]
    if not layers:
        raise AttachError(f"{name} has no attention layers with queries, so none can attend to a memory")
    watched = {each: host.get_submodule(each) for layer in layers for each in (layer, layer.rpartition(".")[0])}
    failure = ""
    for layout, grid in [(each, grid) for each in layouts(host) for grid in each.example_grids()]:
        kwargs = example_inputs(host, layout, grid, rows, torch.Generator().manual_seed(0))
        with _calls(watched) as calls, in_eval_mode(host):
            try:
                fits = _has_size_of(prediction(host, kwargs), kwargs["hidden_states"], layout)
            except MmattnError:
                raise
            except Exception as error:  # the first layout is that of most hosts
                failure = failure or f"{type(error).__name__}: {error}"
                continue
        if fits:
            return TransformerLayers(_choose(name, layers, calls, rows, math.prod(grid)), layout, grid)
    raise AttachError(
        f"there are no example inputs for {name}, by which to find the attention of its picture "
        f"({failure or 'it predicts nothing of the size of its picture'})"
    )


def prediction(host: nn.Module, kwargs: Keywords) -> Tensor:
    """Call a host and return what it predicts of its picture."""
    output = host(**kwargs)
    return output if isinstance(output, Tensor) else output[0]


def _has_size_of(output: Tensor, picture: Tensor, layout: Layout) -> bool:
    """Return whether a prediction has the rows and size of the picture: some hosts take any picture for a square."""
    sides = [at - len(layout.axes) for at, axis in enumerate(layout.axes) if axis in "hw"]
    return output.shape[0] == picture.shape[0] and all(output.shape[at] == picture.shape[at] for at in sides)


@contextlib.contextmanager
def _calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, LayerCall]]:
    """Record the first call of each module inside the block."""
    calls: dict[str, LayerCall] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Positional, kwargs: Arguments, output: object) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            text = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
            calls.setdefault(name, LayerCall(x, text, output))

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(record(name), with_kwargs=True))
        yield calls


def _choose(
    host: str, layers: Collection[str], calls: Mapping[str, LayerCall], rows: int, tokens: int
) -> tuple[PictureAttention, ...]:
    """Return one layer for each block: the one that reads text, else the one joined with it, else the first."""
    blocks: dict[str, list[PictureAttention]] = {}
    for name, call in calls.items():
        layer = _picture_attention(name, call, rows, tokens) if name in layers else None
        if layer is not None and isinstance(call.x, Tensor):
            block = name.rpartition(".")[0]
            part, width = _picture_output(calls[block].output if block in calls else None, call.x.shape[:2])
            blocks.setdefault(block, []).append(replace(layer, block=block, block_part=part, block_width=width))
    order = (CROSS, JOINT, SELF)
    best = [min(block, key=lambda layer: order.index(layer.kind)) for block in blocks.values()]
    if any(layer.kind != SELF for layer in best):
        best = [layer for layer in best if layer.kind != SELF or layer.stream]
    if not best:
        raise AttachError(
            f"{host} has no attention layer with a query for each token of its picture: its {len(layers)} are of "
            "another shape, or take frames of a film as rows"
        )
    return tuple(best)


def _picture_attention(name: str, call: LayerCall, rows: int, tokens: int) -> PictureAttention | None:
    x, text, output = call
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] != rows or x.shape[1] < tokens:
        return None
    part, width = _picture_output(output, x.shape[:2])
    if not width:
        return None
    if not isinstance(text, Tensor) or text is x:
        return PictureAttention(name, SELF, x.shape[1] >= tokens + TEXT, x.shape[-1], part)
    kind = JOINT if isinstance(output, (tuple, list)) and len(output) > 1 else CROSS
    return PictureAttention(name, kind, False, text.shape[-1], part)


def _picture_output(output: object, size: torch.Size) -> tuple[int, int]:
    """Return index and width of the output (b, l, d) of this size; 0 and 0 for none."""
    for part, value in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == size:
            return part, value.shape[-1]
    return 0, 0


@torch.no_grad()
def check_reaches(host: nn.Module, found: TransformerLayers, outputs: Sequence[tuple[str, int]]) -> None:
    """Check that changes of outputs, names of modules and indices, reach the prediction of a host."""

    def site(name: str, part: int) -> Callable[[int], Handle]:
        def change(row: int, output: Output) -> Output:
            if isinstance(output, Tensor):
                return disturb(output, row)
            return (*output[:part], disturb(output[part], row), *output[part + 1 :])

        module = host.get_submodule(name)
        return lambda row: module.register_forward_hook(lambda _, args, output: change(row, output))

    def output(rows: int) -> Tensor:
        inputs = found.inputs(host, 1, torch.Generator().manual_seed(0))
        return prediction(host, {name: _repeat(name, value, rows) for name, value in inputs.items()})

    lost = unreached(host, [site(name, part) for name, part in outputs], output)
    if lost:
        raise ConditionError(
            f"changes of {[outputs[each][0] for each in lost]} do not reach the prediction of {type(host).__name__}, "
            "so memory would be lost: choose other layers with blocks="
        )


def _repeat(name: str, value: object, rows: int) -> object:
    """Repeat an argument of one row; a list has a part for each row, or a tensor for each layer."""
    if isinstance(value, list):
        return [_repeat(name, item, rows) for item in value] if isinstance(value[0], Tensor) else value * rows
    if not isinstance(value, Tensor) or name in SHARED or value.shape[:1] != (1,):
        return value
    return value.repeat(rows, *[1] * (value.dim() - 1))
