"""Weights of the attention layers of other libraries, in the names and sizes of `CrossAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, ShapeError, check_int

if TYPE_CHECKING:
    from typing_extensions import Self


class Projection(Protocol):
    """A linear layer: `weight` (out, in) and `bias` (out,) or None."""

    weight: Any
    bias: Any


class FromWeights:
    """Constructors of an attention layer from the weights of another library's."""

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, **settings: Any) -> Self:
        """The same attention as an `nn.MultiheadAttention`, on copies of its weights; batches always come first here.

        Its `key_padding_mask` goes through `mmattn.masks.from_key_padding`.

        Args:
            attention: whose weights are copied.
            settings: of the class, by name, such as `rotary`, `backend` or `causal`.

        Raises:
            ConfigError: it adds keys of its own (`add_bias_kv`, `add_zero_attn`).

        >>> from mmattn import CrossAttention
        >>> layer = CrossAttention.from_multihead(nn.MultiheadAttention(32, 4, kdim=24, vdim=20))
        >>> layer.memory_dim, layer.value_dim
        (24, 20)
        """
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ConfigError(
                "nn.MultiheadAttention with add_bias_kv or add_zero_attn adds keys that no mask hides; CrossAttention "
                "has none (null_slot=True is the nearest, and has to be trained)"
            )
        weights: list[Tensor] = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
        if attention.in_proj_weight is not None:
            weights = list(attention.in_proj_weight.chunk(3))
        biases = [None] * 3 if attention.in_proj_bias is None else list(attention.in_proj_bias.chunk(3))
        out = attention.out_proj
        settings = {"dropout": attention.dropout, **settings}
        return cls._filled([*weights, out.weight], [*biases, out.bias], attention.num_heads, None, settings)

    @classmethod
    def from_fused_qkv(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        **settings: Any,
    ) -> Self:
        """From one matrix ((h + 2g)·k, d) that holds the rows of all queries, then all keys, then all values.

        Args:
            weight: ((h + 2g)·k, d).
            bias: ((h + 2g)·k,), or None.
            out_weight: (d, h·k), of the output projection.
            out_bias: (d,), or None.
            num_heads: h.
            num_kv_heads: g, h by default.
            settings: of the class, by name.

        Raises:
            ShapeError: sizes that do not fit.
        """
        h, g = _heads(num_heads, num_kv_heads)
        if weight.dim() != 2 or weight.shape[0] % (h + 2 * g):
            raise ShapeError(
                f"weight must be ((h + 2g)·k, d) with h = {h} and g = {g}, got {tuple(weight.shape)}; transpose it "
                "if it is (d, (h + 2g)·k)"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(f"bias must be {(weight.shape[0],)} as weight has rows, got {tuple(bias.shape)}")
        k = weight.shape[0] // (h + 2 * g)
        sizes = (h * k, g * k, g * k)
        biases = [None] * 3 if bias is None else list(bias.split(sizes))
        return cls._filled([*weight.split(sizes), out_weight], [*biases, out_bias], h, g, settings)

    @classmethod
    def from_separate(
        cls,
        q: Projection,
        k: Projection,
        v: Projection,
        out: Projection,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        **settings: Any,
    ) -> Self:
        """From four layers with a `weight` (out, in) and a `bias` or None; T5's have `scale=1.0`.

        Args:
            q: projection of the queries; here and below, a transformers `Conv1D`, whose weight is (in, out), too.
            k: of the keys.
            v: of the values.
            out: of the output.
            num_heads: h.
            num_kv_heads: g, h by default.
            settings: of the class, by name.

        Raises:
            ShapeError: sizes that do not fit.
        """
        layers = (q, k, v, out)
        # transformers' Conv1D keeps (in, out), which a square matrix does not show.
        weights = [layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight for layer in layers]
        return cls._filled(weights, [layer.bias for layer in layers], num_heads, num_kv_heads, settings)

    @classmethod
    def _filled(
        cls,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        num_heads: int,
        num_kv_heads: int | None,
        settings: dict[str, Any],
    ) -> Self:
        """Build the layer for weights and biases of q, k, v and out, and copy them into it."""
        h, g = _heads(num_heads, num_kv_heads)
        q, k, v, out = weights
        width = q.shape[0] // h
        rows = (q.shape[0], k.shape[0], v.shape[0])
        if rows != (h * width, g * width, g * width) or out.shape != (q.shape[1], h * width):
            shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, out {tuple(out.shape)}"
            raise ShapeError(
                f"weights must be q (h·k, d), k (g·k, e), v (g·k, e), out (d, h·k) with h = {h} and g = {g}, got "
                f"{shapes}"
            )
        biased = any(bias is not None for bias in biases[:3])
        sizes = {
            "query_dim": q.shape[1],
            "memory_dim": k.shape[1],
            "value_dim": v.shape[1],
            "num_heads": h,
            "num_kv_heads": g,
            "head_dim": width,
            "bias": biased,
            "out_bias": biases[3] is not None,
            "device": q.device,
            "dtype": q.dtype,
        }
        layer = cls._from_settings(**{**sizes, **settings})
        state = layer.state_dict()
        for name, weight, bias in zip(_NAMES, weights, biases, strict=True):
            _copy(state, f"{name}.weight", weight)
            if bias is not None:
                _copy(state, f"{name}.bias", bias)
            elif biased and name != "out_proj":
                # Whisper's keys and others have no bias where their neighbours have one: the same as zeros.
                _copy(state, f"{name}.bias", torch.zeros_like(weight[:, 0]))
        return layer

    @classmethod
    def _from_settings(cls, **settings: Any) -> Any:
        return cls(**settings)


_NAMES = ("q_proj", "kv_proj.k_proj", "kv_proj.v_proj", "out_proj")


def _heads(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    h = check_int("num_heads", num_heads)
    return h, h if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)


def _copy(state: dict[str, Tensor], name: str, weight: Tensor) -> None:
    if name not in state or state[name].shape != weight.shape:
        raise ConfigError(f"these settings leave no room for {name} {tuple(weight.shape)} of the source")
    state[name].copy_(weight.detach())
