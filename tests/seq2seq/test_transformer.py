"""`TransformerBlock` against torch's own layers, and what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from mmattn import SelfAttention, masks
from mmattn.core.positions import Rotary, alibi
from mmattn.errors import ConfigError, ShapeError
from mmattn.seq2seq import TransformerBlock

B, L, M, D, H = 2, 5, 7, 42, 3


def copied(theirs: nn.TransformerDecoderLayer, **settings) -> TransformerBlock:
    """Our block on the weights of torch's layer, whose attention biases are set to 0."""
    ours = TransformerBlock(D, H, memory_dim=D, causal=True, feed_forward=11 / 6, **settings).double()
    pairs = ((ours.self_attention, theirs.self_attn), (ours.cross_attention, theirs.multihead_attn))
    with torch.no_grad():
        for attention, source in pairs:
            source.in_proj_bias.zero_()
            source.out_proj.bias.zero_()
            parts = (attention.q_proj, attention.kv_proj.k_proj, attention.kv_proj.v_proj)
            for part, weight in zip(parts, source.in_proj_weight.chunk(3), strict=True):
                part.weight.copy_(weight)
            attention.out_proj.weight.copy_(source.out_proj.weight)
    for part, name in ((0, "linear1"), (2, "linear2")):
        ours.feed_forward[part].load_state_dict(getattr(theirs, name).state_dict())
    norms = (ours.self_norm, ours.cross_norm, ours.feed_forward_norm)
    for number, norm in enumerate(norms, 1):
        nn.init.normal_(getattr(theirs, f"norm{number}").weight)
        norm.load_state_dict(getattr(theirs, f"norm{number}").state_dict())
    return ours


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_as_torch_computes_it(norm: str) -> None:
    given = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "dtype": torch.float64}
    theirs = nn.TransformerDecoderLayer(D, H, 77, norm_first=norm == "pre", **given)
    ours = copied(theirs, norm=norm)
    x, memory = torch.randn(B, L, D, dtype=torch.float64), torch.randn(B, M, D, dtype=torch.float64)
    mask, memory_mask = torch.tensor([[True] * L, [True] * 3 + [False] * 2]), torch.arange(M) < torch.tensor([[4], [7]])
    wanted = theirs(
        x,
        memory,
        tgt_mask=~masks.causal(L).tensor,
        tgt_key_padding_mask=~mask,
        memory_key_padding_mask=~memory_mask,
    )
    made = ours(x, memory, mask=mask, memory_mask=memory_mask)
    assert wanted.isfinite().all() and made.isfinite().all()
    torch.testing.assert_close(made[mask], wanted[mask])
    projected = ours.cross_attention.project(memory, mask=memory_mask)
    torch.testing.assert_close(ours(x, projected, mask=mask), made)


@pytest.mark.parametrize("code", ["none", "rotary", "alibi"])
def test_a_text_read_in_pieces_is_the_text_read_at_once(code: str) -> None:
    layer = SelfAttention(D, H, bias=True, rotary=Rotary(D // H) if code == "rotary" else None).double()
    x = torch.randn(B, L, D, dtype=torch.float64)
    mask = torch.tensor([[True] * L, [False, False, True, True, True]])
    whole = layer(x, mask=mask, positions=torch.arange(L), bias=alibi(H, L, L).double() if code == "alibi" else None)
    cache, parts = DynamicCache(), []
    for begin, end in ((0, 3), (3, 4), (4, 5)):
        bias = alibi(H, end - begin, end, offset=begin).double() if code == "alibi" else None
        given = {"mask": mask[:, :end], "bias": bias, "positions": torch.arange(begin, end)}
        parts.append(layer(x[:, begin:end], cache=partial(cache.update, layer_idx=0), **given))
    made = torch.cat(parts, 1)
    assert made.isfinite().all() and cache.get_seq_length() == L
    torch.testing.assert_close(made, whole)
    assert made[1, :2].eq(0).all(), "a token that sees nothing gives exactly 0, the output's bias included"


def test_the_weights_of_a_biased_look_and_its_rules() -> None:
    layer = SelfAttention(D, H)
    x, rule = torch.randn(B, L, D), masks.window(L, L, 2)
    _, weights = layer(x, attention_mask=rule, bias=alibi(H, L, L), return_weights=True)
    assert weights.shape == (B, H, L, L) and weights[..., ~rule.tensor].eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L))


def test_what_is_refused() -> None:
    block, plain = TransformerBlock(D, H, memory_dim=M), TransformerBlock(D, H)
    with pytest.raises(ShapeError, match="needs a memory"):
        block(torch.randn(B, L, D))
    with pytest.raises(ShapeError, match="cannot read a memory"):
        plain(torch.randn(B, L, D), torch.randn(B, M, D))
    with pytest.raises(ConfigError, match="norm must be one of"):
        TransformerBlock(D, H, norm="both")
    with pytest.raises(ConfigError, match="feed_forward"):
        TransformerBlock(D, H, feed_forward=0)
    cache = DynamicCache()
    with pytest.raises(ConfigError, match="does not start at 0"):
        SelfAttention(D, H, rotary=Rotary(D // H))(torch.randn(B, L, D), cache=partial(cache.update, layer_idx=0))
    with pytest.raises(ConfigError, match="null slot"):
        SelfAttention(D, H, null_slot=True)(torch.randn(B, L, D), cache=partial(cache.update, layer_idx=0))
    with pytest.raises(ShapeError, match=r"x must be \(b, l, 42\)"):
        SelfAttention(D, H)(torch.randn(B, L, D + 1), cache=partial(cache.update, layer_idx=0))
    assert cache.get_seq_length() == 0
