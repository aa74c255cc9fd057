"""Which attention layers of a diffusion transformer can read a memory: seen in one small forward, proved in another.

What a layer is cannot be told from its class, of which there are as many as models, nor from its shape alone: in many
models text is as wide as pictures. It is told from what the layer is given and gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.diffusion.example_inputs import TEXT, Layout, example_inputs, layouts
from mmattn.hosts.diffusion.heads import SHARED, attention_names, is_attention
from mmattn.hosts.diffusion.scale import Grid
from mmattn.hosts.eval_mode import in_eval_mode

#: What an attention layer does with text: reads it, has one softmax with it, or knows none but what its stream holds.
CROSS, JOINT, SELF = "cross", "joint", "self"


@dataclass(frozen=True)
class PictureAttention:
    """An attention layer with queries of the picture.

    Args:
        name: dotted name in the host.
        kind: "cross", "joint" or "self".
        stream: its tokens are those of the picture and of the text.
        width: of what its keys and values of the text are projected from; of its stream where it reads none.
        part: which of its outputs is the picture's.
        block: dotted name of the block that it is in.
        block_part: which of the outputs of that block is the picture's, −1 where it has one output; None where none is.
        block_width: d of that output.
    """

    name: str
    kind: str
    stream: bool
    width: int
    part: int
    block: str = ""
    block_part: int | None = None
    block_width: int = 0


@dataclass(frozen=True)
class Found:
    """What is known of a diffusion transformer.

    Args:
        layers: the attention layers that can read a memory, in the order of the host.
        layout: how it is given a picture.
        grid: of a picture that it takes.
        way: which of the `example_inputs` it takes.
    """

    layers: tuple[PictureAttention, ...]
    layout: Layout
    grid: Grid
    way: int

    def inputs(self, host: nn.Module, rows: int, generator: torch.Generator) -> dict[str, Any]:
        """Arguments that the host takes, with random contents."""
        ways = example_inputs(host, self.layout, self.grid, rows, generator)
        return next(given for way, given in enumerate(ways) if way == self.way)


@torch.no_grad()
def find_attention(host: nn.Module) -> Found:
    """The attention layers of a diffusion transformer in which a picture can look at a memory.

    Raises:
        AttachError: it is not known what the host is called with, or it has no such layers.
    """
    name, rows = type(host).__name__, 2
    named = {each: host.get_submodule(each) for each in attention_names(host)}
    layers = {each: attn for each, attn in named.items() if is_attention(attn)}
    if not layers:
        raise AttachError(
            f"{name} has no attention layers from which queries could be read, so that none can attend to a memory"
        )
    around = {each.rpartition(".")[0]: host.get_submodule(each.rpartition(".")[0]) for each in layers}
    tried = ""
    for layout in layouts(host):
        for grid in layout.example_grids():
            ways = example_inputs(host, layout, grid, rows, torch.Generator().manual_seed(0))
            for way, given in enumerate(ways):
                with _noted(layers | around) as notes, in_eval_mode(host):
                    try:
                        fits = _is_whole(answer_of(host, given), given["hidden_states"], layout)
                    except MmattnError:
                        raise
                    except Exception as error:
                        # The first way is that of most hosts.
                        tried = tried or f"{type(error).__name__}: {error}"
                        continue
                if fits:
                    return Found(_chosen(name, layers, notes, rows, grid), layout, grid, way)
    raise AttachError(
        f"it is not known what {name} is called with, so that nothing tells which of its {len(layers)} attention "
        f"layers are the picture's ({tried or 'it gives no answer of the size of its picture'})"
    )


def answer_of(host: nn.Module, given: Mapping[str, Any]) -> Tensor:
    """What a host predicts of its picture."""
    answer = host(**given)
    found: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return found


def _is_whole(answer: Tensor, picture: Tensor, layout: Layout) -> bool:
    """Whether a host's answer is of its picture's rows and size: some take any picture for a square one."""
    sides = [at - len(layout.axes) for at, axis in enumerate(layout.axes) if axis in "hw"]
    return answer.shape[0] == picture.shape[0] and all(answer.shape[at] == picture.shape[at] for at in sides)


@contextlib.contextmanager
def _noted(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """By layer, the hidden states, the text and the output of its first call inside the block."""
    notes: dict[str, tuple[Any, Any, Any]] = {}
    hooks = []

    def listen(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            text = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
            notes.setdefault(name, (x, text, output))

        return hook

    try:
        for name, module in layers.items():
            hooks.append(module.register_forward_hook(listen(name), with_kwargs=True))
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def _chosen(
    host: str, layers: Collection[str], notes: Mapping[str, tuple[Any, Any, Any]], rows: int, grid: Grid
) -> tuple[PictureAttention, ...]:
    """One layer for each block: that which reads text, else that which is joined with it, else its first."""
    tokens = grid[0] * grid[1] * grid[2]
    blocks: dict[str, list[PictureAttention]] = {}
    for name, (x, text, output) in notes.items():
        if name not in layers:
            continue
        layer = _picture_attention(name, x, text, output, rows, tokens)
        if layer is not None:
            block = name.rpartition(".")[0]
            handed_on = notes[block][2] if block in notes else None
            part, width = _picture_output(handed_on, x.shape[:2])
            blocks.setdefault(block, []).append(replace(layer, block=block, block_part=part, block_width=width))
    order = (CROSS, JOINT, SELF)
    best = [min(block, key=lambda layer: order.index(layer.kind)) for block in blocks.values()]
    if any(layer.kind != SELF for layer in best):
        best = [layer for layer in best if layer.kind != SELF or layer.stream]
    if not best:
        raise AttachError(
            f"{host} has no attention layer with a query for each token of its picture, at which an adapter could "
            f"attend to a memory: its {len(layers)} are of another shape, or see several pictures of a film as rows"
        )
    return tuple(best)


def _picture_attention(name: str, x: Any, text: Any, output: Any, rows: int, tokens: int) -> PictureAttention | None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] != rows or x.shape[1] < tokens:
        return None
    outputs = (output,) if isinstance(output, Tensor) else tuple(output)
    part, _ = _picture_output(output, x.shape[:2])
    if part is None:
        return None
    reads = isinstance(text, Tensor) and text is not x
    kind = SELF if not reads else CROSS if len(outputs) == 1 else JOINT
    width = text.shape[-1] if reads else x.shape[-1]
    return PictureAttention(name, kind, x.shape[1] >= tokens + TEXT and not reads, int(width), max(part, 0))


def _picture_output(output: Any, size: torch.Size) -> tuple[int | None, int]:
    """Which output is (b, l, any) of this size, −1 where it is the only one, None where none is; and its width."""
    if isinstance(output, Tensor):
        return (-1, output.shape[-1]) if output.dim() == 3 and output.shape[:2] == size else (None, 0)
    if not isinstance(output, (tuple, list)):
        return None, 0
    parts = [
        at for at, one in enumerate(output) if isinstance(one, Tensor) and one.dim() == 3 and one.shape[:2] == size
    ]
    return (parts[0], output[parts[0]].shape[-1]) if parts else (None, 0)


@torch.no_grad()
def check_reaches(host: nn.Module, found: Found, layers: Sequence[tuple[str, int]]) -> None:
    """Prove that what is added to each output changes the host's prediction.

    One forward; row r is disturbed at the r-th module only, row 0 nowhere.

    Args:
        host: the transformer.
        found: what is known of it.
        layers: names of modules, and which of their outputs.

    Raises:
        ConditionError: a layer whose output does not matter.
    """
    rows, hooks = len(layers) + 1, []

    def disturb(row: int, part: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            outputs = [output] if isinstance(output, Tensor) else list(output)
            outputs[part] = outputs[part].clone()
            outputs[part][row] += torch.linspace(-1, 1, outputs[part].shape[-1]).to(outputs[part])
            return outputs[0] if isinstance(output, Tensor) else tuple(outputs)

        return hook

    # The same picture and text in every row.
    inputs = found.inputs(host, 1, torch.Generator().manual_seed(0))
    given = {name: _repeated(name, value, rows) for name, value in inputs.items()}
    try:
        for row, (name, part) in enumerate(layers, 1):
            hooks.append(host.get_submodule(name).register_forward_hook(disturb(row, part)))
        with in_eval_mode(host):
            answer = answer_of(host, given)
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(answer, FakeTensor):
        return
    blind = [name for row, (name, _) in enumerate(layers, 1) if torch.equal(answer[row], answer[0])]
    if blind:
        raise ConditionError(
            f"what is added to {blind} does not reach the prediction of {type(host).__name__}: memory "
            "would be lost there; choose other layers with blocks="
        )


def _repeated(name: str, value: Any, rows: int) -> Any:
    """An argument of one row for several: a list has a part for each row, or a tensor for each layer."""
    if isinstance(value, list):
        return [_repeated(name, one, rows) for one in value] if isinstance(value[0], Tensor) else value * rows
    return value.repeat(rows, *[1] * (value.dim() - 1)) if _has_rows(name, value, 1) else value


def _has_rows(name: str, value: Any, rows: int) -> bool:
    """Whether this argument has a row for each picture: positions, which all of them share, have not."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows and name not in SHARED
