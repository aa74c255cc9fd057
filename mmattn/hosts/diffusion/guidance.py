"""Classifier-free guidance (arXiv 2207.12598) over the text and the memories of a diffusion model.

With ε(c) the prediction of the host under all conditions and ε(∅) that without the dropped ones, equation 6 gives

    ε = ε(∅) + s (ε(c) − ε(∅)),     s = guidance_scale = 1 + w of the paper

s = 1 is no guidance, as in diffusers. In the rows of ε(∅) dropped conditions are masked: they attend to no text and no
memory at all, unless a null text is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.errors import ConditionError, ConfigError, ShapeError, check_float
from mmattn.hosts.diffusion.base import AdaptedDenoiser
from mmattn.hosts.diffusion.heads import SHARED
from mmattn.hosts.diffusion.scale import doubled
from mmattn.memory import Memory

Predict = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Guidance:
    """Settings of classifier-free guidance.

    Args:
        guidance_scale: s, the weight of ε(c) − ε(∅); 1 is no guidance.
        drop: the conditions that ε(∅) is computed without: "text" and names of adapters; None is all of them.
        rescale: φ from 0 to 1, how far the standard deviation is moved back to that of ε(c) (arXiv 2305.08891,
            equations 15 and 16).
        interval: time steps (from, to) between which guidance acts (arXiv 2404.07724); outside it the prediction is
            ε(c).

    Raises:
        ConfigError: a setting outside what is allowed.

    >>> Guidance(guidance_scale=3.0, interval=(200, 800)).guidance_scale
    3.0
    """

    guidance_scale: float = 2.0
    drop: tuple[str, ...] | None = None
    rescale: float = 0.0
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_float("guidance_scale", self.guidance_scale)
        check_float("rescale", self.rescale, at_least=0)
        if self.rescale > 1:
            raise ConfigError(f"rescale must be from 0 to 1, got {self.rescale}")
        if self.interval is not None and not self.interval[0] <= self.interval[1]:
            raise ConfigError(f"interval must be (from, to) with from ≤ to, got {self.interval}")

    @contextlib.contextmanager
    def run(
        self,
        model: AdaptedDenoiser,
        text: Tensor,
        *,
        text_mask: Tensor | None = None,
        null_text: Tensor | None = None,
        memory: Any = None,
        adapter_scale: Any = 1.0,
        inputs: Mapping[str, Any] | None = None,
        null_inputs: Mapping[str, Any] | None = None,
    ) -> Iterator[Predict]:
        """Yield a function from a sample (b, …) and a timestep, one or (b,), to the guided prediction.

        K/V of the text (with `use_core`) and of every memory are computed once for all steps.

        Args:
            model: the adapted model.
            text: (b, m, e), the host's `encoder_hidden_states`.
            text_mask: (b, m) bool, True = may be attended to; needs `use_core`.
            null_text: (b or 1, n, e), the text of ε(∅) for hosts trained with one; n = m, or less with `use_core`.
            memory: as in `AdaptedDenoiser.condition`, with b rows.
            adapter_scale: as in `AdaptedDenoiser.condition`.
            inputs: further arguments of the host by name; tensors have b rows, but for those that all rows share
                (`img_ids`, `txt_ids`, `padding_mask`).
            null_inputs: those that differ for ε(∅), such as `pooled_projections` of no text.

        Raises:
            ConfigError: an unknown name in `drop`, or one in `null_inputs` that `inputs` lacks.
            ShapeError: a mask or a null text that does not fit the text.
            ConditionError: the text is to be dropped, and neither `use_core` nor `null_text` allows it.
        """
        drop = self._dropped(model)
        prepared: dict[str, Any] | None = (
            None if memory is None else {name: bound.shared for name, bound in model.bind(memory).items()}
        )
        whole = model.make_call(prepared, adapter_scale, text_mask=text_mask)
        both_text, both_mask = _halves(model, text, text_mask, null_text, "text" in drop)
        conditional_inputs = dict(inputs or {})
        both_inputs = _both_inputs(conditional_inputs, dict(null_inputs or {}))
        memories: dict[str, Any] = {}
        scales: dict[str, Any] = {}
        if whole is not None and prepared is not None:
            for name in whole.sources:
                scale = whole.scales[name]
                memories[name] = prepared[name] if name in drop else _twice(prepared[name].memory)
                scales[name] = scale if name in drop else doubled(scale)
        both = model.make_call(memories or None, scales, text_mask=both_mask, guided=True)
        if both is not None:
            both.parts = (False, True)

        def predict(sample: Tensor, timestep: Any) -> Tensor:
            inside = self._acts_at(timestep)
            if self.guidance_scale == 1 or not bool(inside.any()):
                with model.open_blocks.conditioned(whole):
                    return model.predict(sample, timestep, text, **conditional_inputs)
            by_row = isinstance(timestep, Tensor) and timestep.dim() > 0 and len(timestep) == len(sample)
            times = torch.cat([timestep, timestep]) if by_row else timestep
            with model.open_blocks.conditioned(both):
                null, conditional = model.predict(torch.cat([sample, sample]), times, both_text, **both_inputs).chunk(2)
            out = self._combine(conditional, null)
            return torch.where(inside.to(out.device).view(-1, *[1] * (out.dim() - 1)), out, conditional)

        yield predict

    def _dropped(self, model: AdaptedDenoiser) -> set[str]:
        """Return the names of the dropped conditions."""
        names = {"text", *model.adapters}
        if self.drop is not None and (unknown := set(self.drop) - names):
            raise ConfigError(f"drop names {sorted(unknown)}; there are {sorted(names)}")
        return names if self.drop is None else set(self.drop)

    def _combine(self, conditional: Tensor, null: Tensor) -> Tensor:
        """Return the guided prediction, rescaled."""
        out = conditional + (self.guidance_scale - 1) * (conditional - null)
        if self.rescale:
            axes = tuple(range(1, out.dim()))
            matched = out * (conditional.std(axes, keepdim=True) / out.std(axes, keepdim=True))
            out = self.rescale * matched + (1 - self.rescale) * out
        return out

    def _acts_at(self, timestep: Any) -> Tensor:
        """Return whether guidance acts on each row (b,), or (1,) on all, at a timestep for all, (b,) or (b, frames)."""
        times = torch.as_tensor(timestep)
        times = times.flatten(1) if times.dim() > 1 else times.reshape(-1, 1)
        if self.interval is None:
            return torch.ones(1, dtype=torch.bool)
        return ((self.interval[0] <= times) & (times <= self.interval[1])).all(1)


def _halves(
    model: AdaptedDenoiser, text: Tensor, mask: Tensor | None, null_text: Tensor | None, dropped: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the text (2b, m, e) of the rows of ε(∅) and then of ε(c), and its mask (2b, m)."""
    if mask is not None and mask.shape != text.shape[:2]:
        raise ShapeError(f"text_mask must be (b, m) = {tuple(text.shape[:2])}, got {tuple(mask.shape)}")
    if not dropped:
        return torch.cat([text, text]), None if mask is None else torch.cat([mask, mask])
    if null_text is not None:
        missing = text.shape[1] - null_text.shape[1]
        if missing < 0 or (missing and not model.through_core) or null_text.shape[0] not in (1, len(text)):
            raise ShapeError(
                f"null_text must be (b or 1, m, e) like the text {tuple(text.shape)}, or shorter with use_core(); got "
                f"{tuple(null_text.shape)}"
            )
        null = F.pad(null_text, (0, 0, 0, missing)).expand_as(text)
        if mask is None and not missing:
            return torch.cat([null, text]), None
        whole = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        real = whole.clone()
        real[:, text.shape[1] - missing :] = False
        return torch.cat([null, text]), torch.cat([real, whole if mask is None else mask])
    if not model.through_core:
        raise ConditionError(
            "guidance that drops the text masks it in the core: call use_core(), or give null_text= (for Stable "
            "Diffusion the embedding of the empty text)"
        )
    real = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask
    return torch.cat([text, text]), torch.cat([torch.zeros_like(real), real])


def _both_inputs(inputs: dict[str, Any], null: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments of the host for the rows of ε(∅) and then of ε(c)."""
    if unknown := set(null) - set(inputs):
        raise ConfigError(f"null_inputs names {sorted(unknown)}, which inputs lacks: give each to both")
    return {name: _both(name, null.get(name, value), value) for name, value in inputs.items()}


def _both(name: str, null: Any, value: Any) -> Any:
    """Return an argument for the rows of ε(∅) and then of ε(c); of a list by layer, each of them."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [_both(name, *each) for each in zip(null, value, strict=True)]
    return torch.cat([null, value]) if isinstance(value, Tensor) and value.dim() and name not in SHARED else value


def _twice(memory: Memory) -> Memory:
    rows = list(range(memory.batch))
    return memory[rows + rows]
