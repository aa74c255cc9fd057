"""Weights of the attention layers of other libraries, in the names and sizes of `CrossAttention`."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Source:
    """Settings for the constructor of `CrossAttention`, and the weights to load into it.

    Args:
        settings: by name.
        state: weights by the names of its state dict.
    """

    settings: dict[str, Any]
    state: dict[str, Tensor]


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
        return cls._filled(read_multihead(attention), settings)

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
        return cls._filled(read_fused(weight, bias, out_weight, out_bias, num_heads, num_kv_heads), settings)

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
        return cls._filled(read_separate(q, k, v, out, num_heads, num_kv_heads), settings)

    @classmethod
    def _filled(cls, source: Source, settings: dict[str, Any]) -> Self:
        layer = cls._from_settings(**{**source.settings, **settings})
        own = layer.state_dict()
        for name, weight in source.state.items():
            if name not in own or own[name].shape != weight.shape:
                raise ConfigError(f"{settings} leave no room for {name} {tuple(weight.shape)} of the source")
            own[name].copy_(weight)
        return layer

    @classmethod
    def _from_settings(cls, **settings: Any) -> Any:
        return cls(**settings)


def read_multihead(attention: nn.MultiheadAttention) -> Source:
    """The weights of an `nn.MultiheadAttention`, of one width or with `kdim` and `vdim`."""
    if attention.bias_k is not None or attention.add_zero_attn:
        raise ConfigError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn adds keys that no mask hides; CrossAttention has "
            "none (null_slot=True is the nearest, and has to be trained)"
        )
    if attention.in_proj_weight is not None:
        weights = tuple(attention.in_proj_weight.chunk(3))
    else:
        weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    biases = (None, None, None) if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    source = _source(weights, biases, attention.out_proj.weight, attention.out_proj.bias, attention.num_heads, None)
    source.settings["dropout"] = attention.dropout
    return source


def read_fused(
    weight: Tensor,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    num_heads: int,
    num_kv_heads: int | None,
) -> Source:
    """The weights of one projection whose rows are all queries, then all keys, then all values."""
    h, g = _heads(num_heads, num_kv_heads)
    if weight.dim() != 2 or weight.shape[0] % (h + 2 * g):
        raise ShapeError(
            f"weight must be ((h + 2g)·k, d) with h = {h} and g = {g}, got {tuple(weight.shape)}; transpose it "
            "if it is (d, (h + 2g)·k)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be {(weight.shape[0],)} as weight has rows, got {tuple(bias.shape)}")
    k = weight.shape[0] // (h + 2 * g)
    parts = (h * k, g * k, g * k)
    biases = (None, None, None) if bias is None else bias.split(parts)
    return _source(weight.split(parts), biases, out_weight, out_bias, h, g)


def read_separate(
    q: Projection, k: Projection, v: Projection, out: Projection, num_heads: int, num_kv_heads: int | None
) -> Source:
    """The weights of four layers, nn.Linear or alike."""
    weights, biases = [], []
    for layer in (q, k, v, out):
        # transformers' Conv1D keeps (in, out), which a square matrix does not show.
        weights.append(layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight)
        biases.append(layer.bias)
    return _source(weights[:3], biases[:3], weights[3], biases[3], num_heads, num_kv_heads)


def _heads(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    h = check_int("num_heads", num_heads)
    return h, h if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)


def _source(
    weights: Any, biases: Any, out_weight: Tensor, out_bias: Tensor | None, num_heads: int, num_kv_heads: int | None
) -> Source:
    h, g = _heads(num_heads, num_kv_heads)
    q, k, v = (weight.detach() for weight in weights)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, out {tuple(out_weight.shape)}"
    width = q.shape[0] // h
    rows_fit = (q.shape[0], k.shape[0], v.shape[0]) == (h * width, g * width, g * width)
    if not (rows_fit and out_weight.shape == (q.shape[1], h * width)):
        raise ShapeError(
            f"weights must be q (h·k, d), k (g·k, e), v (g·k, e), out (d, h·k) with h = {h} and g = {g}, got {shapes}"
        )
    some = any(bias is not None for bias in biases)
    state = {"out_proj.weight": out_weight.detach()}
    names = ("q_proj", "kv_proj.k_proj", "kv_proj.v_proj")
    for name, weight, bias in zip(names, (q, k, v), biases, strict=True):
        state[f"{name}.weight"] = weight
        if some:
            # Whisper's keys and others have no bias where their neighbours have one: the same as zeros.
            state[f"{name}.bias"] = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach()
    if out_bias is not None:
        state["out_proj.bias"] = out_bias.detach()
    settings = {
        "query_dim": q.shape[1],
        "memory_dim": k.shape[1],
        "value_dim": v.shape[1],
        "num_heads": h,
        "num_kv_heads": g,
        "head_dim": width,
        "bias": some,
        "out_bias": out_bias is not None,
        "device": q.device,
        "dtype": q.dtype,
    }
    return Source(settings, state)
