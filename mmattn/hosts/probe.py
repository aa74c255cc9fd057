"""Proof, before an adapter is put on a model of transformers, that what it writes at its layers reaches the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.eval_mode import in_eval_mode
from mmattn.hosts.residual_streams import change_streams, stream_axis

#: Tokens of a text that a host is tried with.
LENGTH = 2
#: Arguments to call a host with for a number of rows: the ways to try, one after the other.
Inputs = Callable[[int], Iterable[dict[str, Any]]]


class _Disturbance:
    """Changes one row of the hidden states that pass a layer.

    Args:
        row: which.
        shape: (b, l, d) that the hidden states must have; l is None where the host decides it.
        axes: is told, for this row, along which axis the hidden states have several streams.
    """

    def __init__(self, row: int, shape: tuple[int, int | None, int], axes: dict[int, int | None]) -> None:
        self.row, self.shape, self.axes = row, shape, axes

    def change(self, x: Any) -> Tensor:
        axis = stream_axis(x, *self.shape)
        self.axes[self.row] = axis
        return self._disturb(x) if axis is None else change_streams(x, axis, self._disturb)

    def _disturb(self, x: Tensor) -> Tensor:
        changed = x.clone()
        changed[self.row] += torch.linspace(-1, 1, x.shape[-1], device=x.device).to(x.dtype)
        return changed

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.change(output)
        return (self.change(output[0]), *output[1:])

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.change(kwargs.get("hidden_states"))}


def check_sees_all(adapter: Any, host: nn.Module) -> None:
    """Refuse an adapter that follows a text token by token on a host that reads all of its input at once.

    Args:
        adapter: the trainable part.
        host: the model.

    Raises:
        AttachError: what a token sees depends on the text so far.
    """
    if adapter.reads_whole_text or getattr(adapter.config, "visible_segments", "all") != "all":
        raise AttachError(
            f"what {type(adapter.config).__name__} reads depends on the text so far (chunks, another model reading "
            f"along, images in the text), and {type(host).__name__} reads its input all at once: take a GatedAdapter "
            "with visible_segments='all'"
        )


def probe_adapter(
    model: Any, adapter: Any, inputs: Inputs, length: int | None = LENGTH, answers: Sequence[str] = ("logits",)
) -> int | None:
    """Prove with one forward of a host, without a memory, that what an adapter writes at its layers reaches the answer.

    Args:
        model: the adapted model.
        adapter: the trainable part, not yet on it.
        inputs: as for `probe`.
        length: as for `probe`.
        answers: as for `probe`.

    Returns:
        as `probe` does.

    Raises:
        AttachError: as `probe` does.
        ConditionError: as `probe` does.
    """
    layers = [(site.layer, model.host.get_submodule(site.module)) for site in adapter.sites]
    with model.open_blocks.conditioned(None):
        return probe(model.host, layers, adapter.position, adapter.sites[0].width, inputs, length, answers)


@torch.no_grad()
def probe(
    host: nn.Module,
    layers: Sequence[tuple[int, nn.Module]],
    position: str,
    width: int,
    inputs: Inputs,
    length: int | None = LENGTH,
    answers: Sequence[str] = ("logits",),
) -> int | None:
    """Prove that what is written at each layer changes the host's answer.

    One forward; row r is disturbed at the r-th layer only, row 0 and the last nowhere.

    Args:
        host: the model, without a memory.
        layers: number and module of each.
        position: "before" or "after" them.
        width: d of the hidden states.
        inputs: what the host is called with.
        length: l of the hidden states; None where the host decides it.
        answers: names under which its output may have an answer to each row.

    Returns:
        the axis of residual streams in the hidden states; None where they are (b, l, d).

    Raises:
        AttachError: the host cannot be called, gives no answer, hands on other states, or is reversible.
        ConditionError: a layer whose output does not matter.
    """
    if any(hasattr(layer, "backward_pass") for _, layer in layers):
        raise AttachError(
            f"the layers of {type(host).__name__} are reversible: the backward pass runs them again without what "
            "adapters added, and gradients would be wrong; no adapter can be put on it"
        )
    hooks = []
    axes: dict[int, int | None] = {}
    rows = len(layers) + 2  # more than tokens, so that a shape tells which is which
    try:
        for row, (_, layer) in enumerate(layers, 1):
            disturb = _Disturbance(row, (rows, length, width), axes)
            if position == "before":
                hooks.append(layer.register_forward_pre_hook(disturb.before, with_kwargs=True))
            else:
                hooks.append(layer.register_forward_hook(disturb.after))
        with in_eval_mode(host):
            answer = answer_to(host, inputs(rows), rows, answers)
    finally:
        for hook in hooks:
            hook.remove()
    # A host without values is asked for shapes alone.
    known = not isinstance(answer, FakeTensor)
    blind = [
        layer
        for row, (layer, _) in enumerate(layers, 1)
        if row not in axes or (known and torch.equal(answer[row], answer[0]))
    ]
    if blind:
        raise ConditionError(
            f"what is written {position} layers {blind} does not reach the answer of {type(host).__name__}: memory "
            "would be lost there; name the list of layers with path=, or choose other layers"
        )
    first, *others = set(axes.values())
    if others:
        raise AttachError(
            f"some layers of {type(host).__name__} hand on several residual streams and others one: name layers of one "
            "kind"
        )
    return first


def answer_to(host: nn.Module, ways: Iterable[dict[str, Any]], rows: int, answers: Sequence[str]) -> Tensor:
    """What the host answers to each row (b, any), called in the first of these ways that it takes."""
    name, tried, cause = type(host).__name__, "", None
    for given in ways:
        try:
            out = host(**given)
        except MmattnError:
            raise
        except Exception as error:
            told = ", ".join(f"{key} {tuple(value.shape)}" for key, value in given.items())
            tried = tried or f"{name} cannot be called with {told}: {type(error).__name__}: {error}"
            cause = cause or error
            continue
        found = [getattr(out, answer, None) for answer in answers]
        parts = [one.flatten(1) for one in found if isinstance(one, Tensor) and one.shape[:1] == (rows,)]
        if not parts:
            raise AttachError(
                f"{name} gives no {' or '.join(answers)}, so that nothing tells whether memory reaches its answer: "
                "attach to the model with its head (AutoModelForCausalLM, AutoModelForSequenceClassification, …)"
            )
        return torch.cat(parts, 1)
    raise AttachError(tried or f"it is not known what {name} is called with") from cause
