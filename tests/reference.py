"""The slow definition: attention written as loops in float64, which the fast code must equal.

Only the slots a query may look at are ever gathered, so what lies in the others cannot matter, forward or backward.
Everything is differentiable: round the inputs to the dtype under test, give the reference float64 copies of them,
compare values and gradients with `assert_close`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmattn.core.masks import Mask

# Error against float64 as max|a-b| / max|b| and as a ratio of norms, over the whole core, on the CPU.
TARGETS: dict[torch.dtype, dict[str, tuple[float, float]]] = {
    torch.float64: {"forward": (1e-12, 1e-13), "grad": (1e-11, 1e-12)},
    torch.float32: {"forward": (5e-6, 3e-6), "grad": (1e-5, 5e-6)},
    torch.float16: {"forward": (3e-3, 2e-3), "grad": (5e-3, 4e-3)},
    torch.bfloat16: {"forward": (2.5e-2, 2e-2), "grad": (4e-2, 3e-2)},
}


def assert_close(
    actual: Tensor, expected64: Tensor, dtype: torch.dtype, kind: str = "forward", *, size: Tensor | None = None
) -> None:
    """Assert that `actual`, computed in `dtype`, is finite and within both targets of `expected64`."""
    limits = TARGETS[dtype][kind]
    assert expected64.dtype == torch.float64, f"the reference must be float64, got {expected64.dtype}"
    assert actual.shape == expected64.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected64.shape)}"
    assert torch.isfinite(actual).all(), f"{int((~torch.isfinite(actual)).sum())} values of {kind} are not finite"
    assert torch.isfinite(expected64).all(), "the reference itself is not finite"
    if actual.numel() == 0:
        return
    yardstick = (expected64 if size is None else size).detach().double()
    difference = actual.detach().double() - expected64.detach()
    if not yardstick.any():
        assert not difference.any(), f"{kind} must be exactly 0, is up to {difference.abs().max():.2e}"
        return
    typical = math.sqrt(expected64.numel() / yardstick.numel())
    errors = (
        float(difference.abs().max() / yardstick.abs().max()),
        float(difference.norm() / (yardstick.norm() * typical)),
    )
    for error, limit, name in zip(errors, limits, ("max", "norm"), strict=True):
        assert error <= limit, f"{kind} in {dtype}: {name} error {error:.2e} above {limit:.1e}"


def gradients(out: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Gradients of sum(out × upstream) for each input; zeros where an input has no part in `out`."""
    if not out.requires_grad:
        return tuple(torch.zeros_like(each) for each in inputs)
    return torch.autograd.grad(out, list(inputs), upstream, allow_unused=True, materialize_grads=True)


def visible_slots(
    b: int,
    h: int,
    l: int,
    m: int,
    *,
    mask: Tensor | None = None,
    attention_mask: Tensor | Mask | None = None,
    causal: bool = False,
) -> Tensor:
    """Which slots each query may look at, (b, h, l, m) bool; the rows of `mask` divide b (beams)."""
    seen = torch.ones(b, h, l, m, dtype=torch.bool)
    if mask is not None:
        assert mask.dtype == torch.bool and mask.dim() == 2 and mask.shape[1] == m
        for row in range(b):
            seen[row] &= mask[row // (b // len(mask))]
    if attention_mask is not None:
        rule = attention_mask.tensor if isinstance(attention_mask, Mask) else attention_mask
        assert rule.dtype == torch.bool and rule.dim() in (2, 3, 4)
        seen = seen & (rule.unsqueeze(1) if rule.dim() == 3 else rule)
    if causal:
        for i in range(l):
            for j in range(m):
                if j > i + m - l:
                    seen[:, :, i, j] = False
    return seen


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    attention_mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    null_key: Tensor | None = None,
    null_value: Tensor | None = None,
    length_norm: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query over the slots it may look at, one query at a time.

    Args:
        q: (b, h, l, k).
        k: (b, g, m, k); query head i reads key head i // (h / g); fewer rows by a whole multiple are of beams.
        softcap: bounds the scores, before the bias, as Gemma 2 does.
        null_key: (g, k), one slot more that every query sees, never biased; a row without real slots stays 0.
        length_norm: C; the scores of the real slots gain log C − log M, M = slots the query sees.

    Returns:
        (b, h, l, v) and the weights of the real slots (b, h, l, m), both float64 and 0 where a query sees nothing.
    """
    b, h, l, width = q.shape
    memories, g, m = k.shape[:3]
    assert h % g == 0 and v.shape[:3] == k.shape[:3]
    assert b == memories or b % memories == 0
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(width) if scale is None else scale
    seen = visible_slots(b, h, l, m, mask=mask, attention_mask=attention_mask, causal=causal)
    biases = None if bias is None else bias.double().expand(b, h, l, m)
    outs: list[Tensor] = []
    weights: list[Tensor] = []
    for row in range(b):
        source = row // (b // memories)
        for head in range(h):
            group = head // (h // g)
            for i in range(l):
                slots = seen[row, head, i].nonzero().flatten()
                if len(slots) == 0:
                    outs.append(torch.zeros(v.shape[3], dtype=torch.float64))
                    weights.append(torch.zeros(m, dtype=torch.float64))
                    continue
                scores = scale * (k[source, group, slots] @ q[row, head, i])
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                values = v[source, group, slots]
                if biases is not None:
                    scores = scores + biases[row, head, i, slots]
                if length_norm is not None:
                    scores = scores + math.log(length_norm) - math.log(len(slots))
                if null_key is not None:
                    assert null_value is not None
                    nothing = scale * (null_key[group].double() @ q[row, head, i])
                    scores = torch.cat((scores, nothing.reshape(1)))
                    values = torch.cat((values, null_value[group].double().reshape(1, -1)))
                share = (scores - scores.detach().max()).exp()
                share = share / share.sum()
                outs.append(share @ values)
                nowhere = torch.zeros(m, dtype=torch.float64)
                weights.append(nowhere.index_put((slots,), share[: len(slots)]))
    if not outs:
        return torch.zeros(b, h, l, v.shape[3], dtype=torch.float64), torch.zeros(b, h, l, m, dtype=torch.float64)
    return torch.stack(outs).reshape(b, h, l, v.shape[3]), torch.stack(weights).reshape(b, h, l, m)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` divided by its root mean square over the last dimension, times `weight`."""
    x = x.double()
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotary_reference(x: Tensor, positions: Tensor, base: float = 10000.0, axes: int = 1) -> Tensor:
    """Channels i and i + k/2 of `x` (b, h, l, k) as one complex number, turned by its position's angle.

    Of the k/2 pairs the first share turns by the first of the `axes` coordinates, and so on; shares are equal.
    """
    x = x.double()
    pairs = x.shape[-1] // 2
    places = positions.double().reshape(*positions.shape, 1) if axes == 1 else positions.double()
    turns = []
    each = pairs // axes
    for axis in range(axes):
        turns += [places[..., axis] * base ** (-n / each) for n in range(each)]
    angles = torch.stack(turns, dim=-1)
    if angles.dim() == 3:
        angles = angles.unsqueeze(1)
    turned = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def cross_attention_reference(
    state: Mapping[str, Tensor],
    x: Tensor,
    memory: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: Tensor | None = None,
    attention_mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    scores: Tensor | None = None,
    score_mean: float = 0.0,
    score_std: float = 1.0,
    query_positions: Tensor | None = None,
    memory_positions: Tensor | None = None,
    rotary_base: float | None = None,
    axes: int = 1,
    length_norm: float | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`CrossAttention` with the weights in `state`: project, normalise, rotate, attend, project back."""
    b, l = x.shape[:2]
    m = memory.shape[1]
    h, g = num_heads, num_kv_heads or num_heads
    seen = visible_slots(b, h, l, m, mask=mask, attention_mask=attention_mask, causal=causal)
    # A projection of NaN has NaN gradients even where nobody reads it: slots no query sees are emptied first.
    memories = memory.shape[0]
    used = torch.stack([seen[row * (b // memories) : (row + 1) * (b // memories)].any(0) for row in range(memories)])
    used = used.any(dim=1).any(dim=1)
    memory = torch.where(used[..., None], memory.double(), 0.0)

    def project(name: str, tensor: Tensor) -> Tensor:
        projected = tensor.double() @ state[f"{name}.weight"].double().T
        return projected + state[f"{name}.bias"].double() if f"{name}.bias" in state else projected

    def heads(tensor: Tensor, number: int) -> Tensor:
        return tensor.reshape(*tensor.shape[:2], number, tensor.shape[2] // number).transpose(1, 2)

    q, k, v = heads(project("q_proj", x), h), heads(project("k_proj", memory), g), heads(project("v_proj", memory), g)
    if "q_norm.weight" in state:
        q = rms_norm_reference(q, state["q_norm.weight"], norm_eps)
        k = rms_norm_reference(k, state["k_norm.weight"], norm_eps)
    if rotary_base is not None:
        q = rotary_reference(q, torch.arange(l) if query_positions is None else query_positions, rotary_base, axes)
        k = rotary_reference(k, torch.arange(m) if memory_positions is None else memory_positions, rotary_base, axes)
    if scores is not None:
        standardised = (scores.double() - score_mean) / score_std
        learned = state["score_scale"].double() * torch.where(used, standardised, 0.0)
        learned = learned.repeat_interleave(b // memories, dim=0).reshape(b, 1, 1, m)
        bias = learned if bias is None else bias.double() + learned
    attended, weights = attend_reference(
        q,
        k,
        v,
        bias=bias,
        scale=scale,
        null_key=state.get("null_key"),
        null_value=state.get("null_value"),
        length_norm=length_norm,
        mask=mask,
        attention_mask=attention_mask,
        causal=causal,
    )
    out = project("out_proj", attended.transpose(1, 2).reshape(b, l, -1))
    return torch.where(seen.any(dim=3).any(dim=1)[..., None], out, 0.0), weights
