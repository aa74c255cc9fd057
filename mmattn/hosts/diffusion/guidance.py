"""Classifier-free guidance (arXiv 2207.12598) over the text and the memories of a diffusion model.

With ε(c) the prediction of the host under all conditions and ε(∅) that without any, equation 6 gives

    ε = ε(∅) + s (ε(c) − ε(∅)),     s = guidance_scale = 1 + w of the paper

s = 1 is no guidance, as in diffusers. The rows of ε(∅) attend to no text and no memory, unless a null text is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.errors import ConditionError, ConfigError, ShapeError, check_float
from mmattn.hosts.diffusion.heads import stack_rows
from mmattn.hosts.diffusion.model import AdaptedDenoiser
from mmattn.hosts.diffusion.scale import AdapterScale

Predict = Callable[[Tensor, Tensor | float], Tensor]


@dataclass(frozen=True)
class Guidance:
    """Settings of classifier-free guidance.

    Args:
        guidance_scale: s, the weight of ε(c) − ε(∅); 1 is no guidance.

    Raises:
        ConfigError: the scale is not a finite number.

    >>> Guidance(guidance_scale=3.0).guidance_scale
    3.0
    """

    guidance_scale: float = 2.0

    def __post_init__(self) -> None:
        check_float("guidance_scale", self.guidance_scale)

    @contextlib.contextmanager
    def run(
        self,
        model: AdaptedDenoiser,
        text: Tensor,
        *,
        text_mask: Tensor | None = None,
        null_text: Tensor | None = None,
        memory: object = None,
        adapter_scale: AdapterScale = 1.0,
        inputs: Mapping[str, object] | None = None,
        null_inputs: Mapping[str, object] | None = None,
    ) -> Iterator[Predict]:
        """Yield a function from a sample (b, …) and a timestep (a number or (b,)) to the guided prediction.

        K/V of the text (with `use_core`) and of every memory are computed once for all steps.

        Args:
            model: the adapted model.
            text: (b, m, e), the host's `encoder_hidden_states`.
            text_mask: (b, m) bool, True = may be attended to; needs `use_core`.
            null_text: (b or 1, n, e), the text of ε(∅) for hosts trained with one; n = m, or less with `use_core`.
            memory: as in `AdaptedDenoiser.condition`, with b rows.
            adapter_scale: as in `AdaptedDenoiser.condition`.
            inputs: further arguments of the host by name; tensors have b rows, except shared ones (`img_ids`,
                `txt_ids`, `padding_mask`).
            null_inputs: the inputs that differ for ε(∅), such as `pooled_projections` of the empty text.

        Raises:
            ConfigError: a name in `null_inputs` that `inputs` lacks.
            ShapeError: a mask or a null text that does not fit the text.
            ConditionError: neither `use_core` nor `null_text`.
        """
        inputs, null_inputs = dict(inputs or {}), dict(null_inputs or {})
        if unknown := set(null_inputs) - set(inputs):
            raise ConfigError(f"null_inputs names {sorted(unknown)}, which inputs lacks: give each to both")
        both_inputs = {name: stack_rows(name, [null_inputs.get(name, value), value]) for name, value in inputs.items()}
        both_text, both_mask = _both_texts(model, text, text_mask, null_text)
        prepared = None if memory is None else {name: source.shared for name, source in model.bind(memory).items()}
        conditional = model.make_call(prepared, adapter_scale, text_mask=text_mask)
        both = model.make_call(prepared, adapter_scale, text_mask=both_mask, guided=True)
        if both is not None:
            both.parts = (False, True)

        def predict(sample: Tensor, timestep: Tensor | float) -> Tensor:
            if self.guidance_scale == 1:
                with model.open_blocks.conditioned(conditional):
                    return model.predict(sample, timestep, text, **inputs)
            by_row = isinstance(timestep, Tensor) and timestep.dim() > 0 and len(timestep) == len(sample)
            times = torch.cat([timestep, timestep]) if by_row else timestep  # type: ignore[list-item]
            with model.open_blocks.conditioned(both):
                null, full = model.predict(torch.cat([sample, sample]), times, both_text, **both_inputs).chunk(2)
            return full + (self.guidance_scale - 1) * (full - null)

        yield predict


def _both_texts(
    model: AdaptedDenoiser, text: Tensor, mask: Tensor | None, null_text: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the text (2b, m, e) of the rows of ε(∅) and then of ε(c), and its mask (2b, m)."""
    if mask is not None and mask.shape != text.shape[:2]:
        raise ShapeError(f"text_mask must be (b, m) = {tuple(text.shape[:2])}, got {tuple(mask.shape)}")
    if null_text is None and not model.processors:
        raise ConditionError("guidance needs null_text=, the embedding of the empty text, or use_core(): give either")
    null = text[:, :0] if null_text is None else null_text
    missing = text.shape[1] - null.shape[1]
    if missing < 0 or (missing and not model.processors) or null.shape[0] not in (1, len(text)):
        raise ShapeError(
            f"null_text must be (b or 1, m, e) like the text {tuple(text.shape)}, or shorter with use_core(); got "
            f"{tuple(null.shape)}"
        )
    both = torch.cat([F.pad(null, (0, 0, 0, missing)).expand_as(text), text])
    if mask is None and not missing:
        return both, None
    whole = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    real = whole.clone()
    real[:, null.shape[1] :] = False
    return both, torch.cat([real, whole if mask is None else mask])
