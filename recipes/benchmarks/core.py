"""The core against bare operations and the layers people use today: `python -m recipes.benchmarks core [--quick]`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmattn
from recipes.benchmarks.timing import Tables, interleaved, name_of, ratio

Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Size:
    """rows, query length, memory length, width of queries, width of memory, heads, share of real slots."""

    b: int
    l: int
    m: int
    d: int
    e: int
    h: int
    fill: float = 1.0

    def __str__(self) -> str:
        fill = "no mask" if self.fill == 1 else f"{self.fill:.0%} full"
        return f"b={self.b} l={self.l} m={self.m} d={self.d} e={self.e} h={self.h} {fill}"


SIZES = (
    Size(1, 1, 257, 768, 768, 12),
    Size(8, 1, 1024, 768, 768, 12),
    Size(2, 32, 64, 768, 768, 12),
    Size(2, 77, 257, 512, 768, 8),
    Size(2, 256, 257, 768, 768, 12),
    Size(1, 512, 1024, 768, 1024, 12),
    Size(4, 1024, 77, 320, 768, 8),
)
# Retrieved passages: as many slots as the longest row needs, 30 % of them real.
RAGGED = (*(Size(8, l, 1024, 768, 768, 12, 0.3) for l in (1, 16, 64, 256)), Size(2, 16, 4096, 768, 768, 12, 0.3))
QUICK = (SIZES[1], SIZES[3], RAGGED[2])


def competitors(size: Size, dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    """Yield (name, call) of layers of the same sizes; layers that are not installed or do not fit are left out."""
    d, e, h = size.d, size.e, size.h
    k = d // h
    ours = mmattn.CrossAttention(d, e, h).to(dtype).eval()
    yield "mmattn", lambda x, memory, mask: ours(x, memory, mask=mask)
    q, key, value, out = (nn.Linear(i, o, bias=False, dtype=dtype) for i, o in ((d, d), (e, d), (e, d), (d, d)))
    # Copies: weights of another candidate would still lie in the processor's cache.
    q2, key2, value2, out2 = copy.deepcopy([q, key, value, out])

    def split(tensor: Tensor) -> Tensor:
        return tensor.view(tensor.shape[0], -1, h, k).transpose(1, 2)

    def bare(x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        rule = None if mask is None else mask[:, None, None, :]
        heads = F.scaled_dot_product_attention(split(q(x)), split(key(memory)), split(value(memory)), rule)
        return out(heads.transpose(1, 2).reshape(x.shape[0], -1, d))

    yield "bare operations", bare

    def einsum(x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.einsum("bhlk,bhmk->bhlm", split(q2(x)), split(key2(memory))) * k**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        heads = torch.einsum("bhlm,bhmk->bhlk", scores.softmax(-1), split(value2(memory)))
        return out2(heads.transpose(1, 2).reshape(x.shape[0], -1, d))

    yield "einsum", einsum

    torch_layer = nn.MultiheadAttention(d, h, kdim=e, vdim=e, bias=False, batch_first=True, dtype=dtype).eval()

    def multihead(x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        drop = None if mask is None else ~mask
        return torch_layer(x, memory, memory, key_padding_mask=drop, need_weights=False)[0]

    yield "nn.MultiheadAttention", multihead
    yield from library_layers(size, dtype)


def library_layers(size: Size, dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    """Yield cross-attention layers of diffusers, and of transformers, whose queries and memory are of one width."""
    from diffusers.models.attention_processor import Attention
    from transformers.models.bart.modeling_bart import BartAttention, BartConfig
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config

    b, m, d, e, h = size.b, size.m, size.d, size.e, size.h
    layer = Attention(d, cross_attention_dim=e, heads=h, dim_head=d // h, out_bias=False).to(dtype).eval()

    def lowest(mask: Tensor | None, value: float) -> Tensor | None:  # what is added to scores
        return None if mask is None else torch.zeros(b, 1, m, dtype=dtype).masked_fill(~mask[:, None], value)

    yield "diffusers Attention", lambda x, memory, mask: layer(x, memory, attention_mask=lowest(mask, -10000.0))
    if d != e:
        return
    bart_config = BartConfig(d_model=d, decoder_attention_heads=h, attn_implementation="sdpa")
    bart = BartAttention(d, h, is_decoder=True, bias=False, is_causal=False, config=bart_config, layer_idx=0)
    bart = bart.to(dtype).eval()

    def run_bart(x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        rule = None if mask is None else mask[:, None, None, :].expand(-1, -1, x.shape[1], -1)
        return bart(x, key_value_states=memory, attention_mask=rule)[0]

    yield "BART layer", run_bart
    t5_config = T5Config(d_model=d, d_kv=d // h, num_heads=h, is_decoder=True, dropout_rate=0.0)
    t5 = T5Attention(t5_config, has_relative_attention_bias=False, layer_idx=0).to(dtype).eval()

    def run_t5(x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        rule = lowest(mask, torch.finfo(dtype).min)
        return t5(x, mask=None if rule is None else rule[:, None], key_value_states=memory)[0]

    yield "T5 layer", run_t5


def measure(
    size: Size, dtype: torch.dtype, backward: bool, only: Collection[str] = (), **rounds: float
) -> dict[str, float]:
    """Return the time of ours for each unit of each other layer, or of some."""
    torch.manual_seed(0)
    x = torch.randn(size.b, size.l, size.d, dtype=dtype)
    memory = torch.randn(size.b, size.m, size.e, dtype=dtype)
    mask = None
    if size.fill < 1:
        lengths = (torch.rand(size.b) * 0.5 + 0.75) * size.fill * size.m
        mask = torch.arange(size.m) < lengths.round().clamp(1, size.m)[:, None]
    if backward:
        x.requires_grad_()
    candidates: dict[str, Callable[[], object]] = {}
    for name, run in competitors(size, dtype):
        if only and name not in only:
            continue

        def once(run: Run = run) -> None:
            with torch.set_grad_enabled(backward):
                output = run(x, memory, mask)
                if backward:
                    output.sum().backward()

        candidates[name] = once
    times = interleaved(candidates, **rounds)
    return {name: ratio(times, "mmattn", name) for name in times if name != "mmattn"}


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield the time of ours for each unit of theirs: below 1 ours is faster."""
    for dtype in dtypes:
        for backward in (False, True):
            sizes, seconds = (QUICK, 0.2) if quick else (SIZES + RAGGED, 1.0)
            rows = {str(size): measure(size, dtype, backward, seconds=seconds) for size in sizes}
            what = f"{name_of(dtype)}, {'forward and backward' if backward else 'forward'}"
            yield f"Core, {what}: time of mmattn.CrossAttention for each unit of …", "size", rows
