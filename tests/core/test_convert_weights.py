"""Weights of other libraries' attention layers, loaded: the outputs and gradients of the originals."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, GPT2Config, LlamaConfig, T5Config
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from mmattn import CrossAttention, SelfAttention, attend
from mmattn.core.masks import from_additive, from_huggingface, from_key_padding
from mmattn.core.positions import Rotary
from mmattn.errors import ConfigError, ShapeError

B, L, M, H, K = 3, 5, 7, 2, 11
D = H * K
KEEP = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 1]])
DROP = KEEP == 0
ADDITIVE = torch.zeros(B, 1, 1, M).masked_fill(DROP[:, None, None], torch.finfo(torch.float32).min)


def sharp(layer: nn.Module) -> nn.Module:
    """Weights and biases large enough that a wrong scale, head order or missing bias shows."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.4)
    return layer.eval()


def same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Assert equal outputs and gradients of the inputs, relative to the largest value; returns the output."""
    results = []
    for function in (ours, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, weight)])
    for mine, original in zip(*results, strict=True):
        assert mine.shape == original.shape
        assert torch.isfinite(mine).all() and torch.isfinite(original).all()
        size = float(original.abs().max())
        assert size > 1e-3, "an original of zeros proves nothing"
        assert float((mine - original).abs().max()) <= 1e-5 * size
    return results[0][0]


def inputs(e: int = D) -> tuple[Tensor, Tensor]:
    return torch.randn(B, L, D), torch.randn(B, M, e)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kdim,vdim", [(None, None), (13, 17)])
def test_multihead(bias, kdim, vdim):
    """Invariant 3: nn.MultiheadAttention of one width and of three, its key_padding_mask by the named converter."""
    theirs = sharp(nn.MultiheadAttention(D, H, bias=bias, kdim=kdim, vdim=vdim, batch_first=True))
    ours = CrossAttention.from_multihead(theirs)
    x, keys, values = torch.randn(B, L, D), torch.randn(B, M, kdim or D), torch.randn(B, M, vdim or D)
    out = same(
        lambda x, k, v: ours(x, k, values=v, mask=from_key_padding(DROP)),
        lambda x, k, v: theirs(x, k, v, key_padding_mask=DROP, need_weights=False)[0],
        x,
        keys,
        values,
    )
    routes = (from_huggingface(KEEP), from_additive(ADDITIVE[:, 0, 0]))
    assert all(torch.equal(ours(x, keys, values=values, mask=mask), out) for mask in routes)
    assert not torch.allclose(ours(x, keys, values=values), out, atol=1e-2)


def test_multihead_weights_and_attention_mask():
    """A bool attn_mask (True = drop) and the averaged weights agree too."""
    theirs = sharp(nn.MultiheadAttention(D, H, batch_first=True))
    ours = CrossAttention.from_multihead(theirs)
    x, memory = inputs()
    drop = torch.rand(L, M) < 0.4
    drop[:, 3] = False
    out, weights = ours(x, memory, attention_mask=from_key_padding(drop), return_weights=True)
    expected, expected_weights = theirs(x, memory, memory, attn_mask=drop, average_attn_weights=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)


def test_multihead_as_causal_self_attention():
    theirs = sharp(nn.MultiheadAttention(D, H, batch_first=True))
    ours = SelfAttention.from_multihead(theirs, causal=True)
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    same(ours, lambda x: theirs(x, x, x, attn_mask=later, need_weights=False)[0], torch.randn(B, L, D))


def test_multihead_copies_its_weights():
    """The copy shares nothing with the original, keeps dropout and dtype, and trains."""
    theirs = nn.MultiheadAttention(D, H, dropout=0.25, dtype=torch.float64)
    ours = CrossAttention.from_multihead(theirs)
    assert ours.kv_proj.dropout == 0.25 and {weight.dtype for weight in ours.parameters()} == {torch.float64}
    assert all(weight.requires_grad for weight in ours.parameters())
    before = ours.q_proj.weight.clone()
    with torch.no_grad():
        theirs.in_proj_weight.zero_()
    assert torch.equal(ours.q_proj.weight, before)


@pytest.mark.parametrize("setting", ["add_bias_kv", "add_zero_attn"])
def test_multihead_with_keys_of_its_own_is_refused(setting):
    with pytest.raises(ConfigError, match=setting):
        CrossAttention.from_multihead(nn.MultiheadAttention(D, H, **{setting: True}))


def t5(**settings) -> T5Attention:
    config = T5Config(d_model=D, d_kv=5, num_heads=H, dropout_rate=0.0, is_decoder=False)
    config._attn_implementation = "eager"
    return sharp(T5Attention(config, **settings))


def test_t5_cross_attention():
    """T5 neither scales nor biases, and its heads together are narrower than the model."""
    theirs = t5()
    ours = CrossAttention.from_separate(theirs.q, theirs.k, theirs.v, theirs.o, H, scale=1.0)
    assert ours.head_dim == 5 and ours.out_proj.bias is None
    same(
        lambda x, memory: ours(x, memory, mask=from_huggingface(KEEP)),
        lambda x, memory: theirs(x, mask=ADDITIVE, key_value_states=memory)[0],
        *inputs(),
    )


def test_t5_position_bias():
    """T5's relative positions are a bias of `attend`; its gradient reaches the table."""
    theirs = t5(has_relative_attention_bias=True)
    x = torch.randn(B, M, D)

    def ours(x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (H, -1)).transpose(1, 2) for part in (theirs.q, theirs.k, theirs.v))
        bias = theirs.compute_bias(M, M)
        return theirs.o(attend(q, k, v, mask=from_huggingface(KEEP), bias=bias, scale=1.0).transpose(1, 2).flatten(2))

    same(ours, lambda x: theirs(x, mask=ADDITIVE)[0], x)
    table = theirs.relative_attention_bias.weight
    grad, expected = (
        torch.autograd.grad(out.square().sum(), table)[0] for out in (ours(x), theirs(x, mask=ADDITIVE)[0])
    )
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_bart_cross_attention():
    config = BartConfig(d_model=D)
    config._attn_implementation = "eager"
    theirs = sharp(BartAttention(D, H, config=config))
    ours = CrossAttention.from_separate(theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.out_proj, H)
    same(
        lambda x, memory: ours(x, memory, mask=from_huggingface(KEEP)),
        lambda x, memory: theirs(x, key_value_states=memory, attention_mask=ADDITIVE)[0],
        *inputs(),
    )


def gpt2(**settings) -> GPT2Attention:
    config = GPT2Config(n_embd=D, n_head=H, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "eager"
    return sharp(GPT2Attention(config, layer_idx=0, **settings))


def test_gpt2_cross_attention():
    """GPT-2's Conv1D keeps (in, out), and keys and values in one matrix."""
    theirs = gpt2(is_cross_attention=True)
    weights, biases = theirs.c_attn.weight.T.chunk(2), theirs.c_attn.bias.chunk(2)
    keys, values = (SimpleNamespace(weight=weight, bias=bias) for weight, bias in zip(weights, biases, strict=True))
    ours = CrossAttention.from_separate(theirs.q_attn, keys, values, theirs.c_proj, H)
    same(
        lambda x, memory: ours(x, memory, mask=from_huggingface(KEEP)),
        lambda x, memory: theirs(x, encoder_hidden_states=memory, encoder_attention_mask=ADDITIVE)[0],
        *inputs(),
    )


def test_gpt2_self_attention_from_fused_weights():
    theirs = gpt2()
    ours = SelfAttention.from_fused_qkv(
        theirs.c_attn.weight.T, theirs.c_attn.bias, theirs.c_proj.weight.T, theirs.c_proj.bias, H
    )
    later = torch.zeros(L, L).masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    same(ours, lambda x: theirs(x, attention_mask=later[None, None])[0], torch.randn(B, L, D))


@pytest.mark.parametrize("bias", [True, False])
def test_diffusers_cross_attention(bias):
    """diffusers' Attention: no bias on q, k, v as a rule, always one on the output, a memory of another width."""
    processors = pytest.importorskip("diffusers.models.attention_processor")
    theirs = sharp(processors.Attention(D, cross_attention_dim=13, heads=H, dim_head=K, bias=bias))
    ours = CrossAttention.from_separate(theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out[0], H)
    assert (ours.q_proj.bias is not None) == bias and ours.out_proj.bias is not None
    same(
        lambda x, memory: ours(x, memory, mask=from_huggingface(KEEP)),
        lambda x, memory: theirs(x, encoder_hidden_states=memory, attention_mask=ADDITIVE[:, 0].expand(-1, L, -1)),
        *inputs(13),
    )


def test_llama_grouped_heads_with_rotary_positions():
    """Four query heads on two key heads, turned by position, causal, left-padded."""
    config = LlamaConfig(hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=10)
    config._attn_implementation = "eager"
    theirs = sharp(LlamaAttention(config, layer_idx=0))
    ours = SelfAttention.from_separate(
        theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj, 4, num_kv_heads=2, rotary=Rotary(10)
    )
    positions = torch.arange(M) + 3
    later = torch.zeros(M, M).masked_fill(torch.ones(M, M, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    turn = LlamaRotaryEmbedding(config)
    same(
        lambda x: ours(x, positions=positions),
        lambda x: theirs(x, turn(x, positions[None]), attention_mask=later[None, None])[0],
        torch.randn(B, M, 24),
    )


def test_fused_grouped_rows():
    """((h + 2g)·k, d): the rows of all queries, then all keys, then all values."""
    q, k, v, out = (sharp(nn.Linear(*sizes)) for sizes in ((13, 4 * 3), (13, 2 * 3), (13, 2 * 3), (4 * 3, 13)))
    fused = CrossAttention.from_fused_qkv(
        torch.cat([q.weight, k.weight, v.weight]),
        torch.cat([q.bias, k.bias, v.bias]),
        out.weight,
        out.bias,
        4,
        num_kv_heads=2,
    )
    separate = CrossAttention.from_separate(q, k, v, out, 4, num_kv_heads=2)
    x, memory = torch.randn(B, L, 13), torch.randn(B, M, 13)
    assert torch.equal(fused(x, memory), separate(x, memory))
    for name, expected in separate.state_dict().items():
        assert torch.equal(fused.state_dict()[name], expected), name


def test_one_missing_bias_is_zeros():
    """Whisper's keys have no bias beside queries and values that have."""
    q, k, v, out = (sharp(nn.Linear(D, D, bias=name != "k")) for name in "qkvo")
    ours = CrossAttention.from_separate(q, k, v, out, H)
    assert not ours.kv_proj.k_proj.bias.any() and torch.equal(ours.kv_proj.v_proj.bias, v.bias)


def test_sizes_that_do_not_fit():
    """Every message names the sizes it was given."""
    q, k, v, out = (nn.Linear(D, D) for _ in range(4))
    with pytest.raises(ShapeError, match=r"h = 3 and g = 3, got q \(22, 22\)"):
        CrossAttention.from_separate(q, k, v, out, 3)
    with pytest.raises(ShapeError, match="g = 1"):
        CrossAttention.from_separate(q, k, v, out, H, num_kv_heads=1)
    with pytest.raises(ShapeError, match=r"got \(23, 22\)"):
        CrossAttention.from_fused_qkv(torch.zeros(23, D), None, out.weight, None, H)
    with pytest.raises(ShapeError, match=r"bias must be \(66,\)"):
        CrossAttention.from_fused_qkv(torch.zeros(66, D), torch.zeros(22), out.weight, None, H)
    with pytest.raises(ConfigError, match="q_proj.bias"):
        CrossAttention.from_separate(q, k, v, out, H, bias=False)
    with pytest.raises(ShapeError, match="one width"):
        SelfAttention.from_multihead(nn.MultiheadAttention(D, H, kdim=13, vdim=13))
