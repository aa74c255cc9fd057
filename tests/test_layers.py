"""`CrossAttention` and `SelfAttention` against the slow definition, in every layout a memory may be kept in."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmattn.layers
from mmattn import ConfigError, CrossAttention, KeyValue, MaskError, SelfAttention, ShapeError, masks
from mmattn.positions import Rotary, grid
from tests.reference import TARGETS, assert_close, cross_attention_reference, gradients

B, L, M, D, E = 2, 5, 7, 19, 23
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["padded", "packed", "absorbed", "packed absorbed"]
# The second row sees nothing.
MASK = torch.tensor([[True, False, True, True, True, False, True], [False] * M])
RULE = torch.rand(L, M, generator=torch.Generator().manual_seed(3)) < 0.5
RULE[3], RULE[:, 2] = False, False
assert not MASK[1].any() and not RULE[3].any() and RULE.any()
# Real slots at the front, as padding leaves them, are read where they lie; scattered ones are gathered.
MASKS = {"scattered": MASK, "in front": torch.arange(M) < torch.tensor([[4], [0]])}


def make(dtype: torch.dtype = torch.float32, **settings_) -> CrossAttention:
    """A layer of awkward sizes whose every parameter matters."""
    sizes = {"memory_dim": E, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "bias": True} | settings_
    layer = CrossAttention(D, **sizes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def force(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(mmattn.projection, "_PACK_SAVES", -1 if "packed" in layout else float("inf"))
    for margin in ("_ABSORB_MARGIN", "_ABSORB_MARGIN_HALF"):
        monkeypatch.setattr(mmattn.projection, margin, float("inf") if "absorbed" in layout else 0)
    monkeypatch.setattr(mmattn.projection, "_ABSORB_LEAST_HALF", 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every way that a call has taken, in turn: a layout, or the short way for what nothing special is asked of."""
    made: list[str] = []
    prepare, short = CrossAttention._prepare, CrossAttention._look_plainly

    def spy(self: CrossAttention, *arguments) -> KeyValue:
        kept = prepare(self, *arguments)
        made.append(kind(kept))
        return kept

    def short_spy(self: CrossAttention, *arguments) -> Tensor:
        made.append("short")
        return short(self, *arguments)

    monkeypatch.setattr(CrossAttention, "_prepare", spy)
    monkeypatch.setattr(CrossAttention, "_look_plainly", short_spy)
    return made


def kind(kept: KeyValue) -> str:
    return " ".join(["packed"] * (kept.lengths is not None) + ["absorbed"] * kept.absorbed) or "padded"


def compare(
    layer: CrossAttention,
    x: Tensor,
    memory: Tensor,
    *,
    through=None,
    scale: float | None = None,
    small: float = 1e-9,
    **given_,
) -> Tensor:
    """`layer` against the definition: output, gradients of the inputs and of every parameter; returns the output."""
    dtype = layer.q_proj.weight.dtype
    slow = {name: parameter.detach().double().requires_grad_() for name, parameter in layer.named_parameters()}
    inputs = {"x": x, "memory": memory} | ({"values": given_.pop("values")} if "values" in given_ else {})
    fast_inputs = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    slow_inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in fast_inputs.items()}
    rotary = {} if layer.rotary is None else {"rotary_base": layer.rotary.base, "axes": layer.rotary.axes}
    expected, weights = cross_attention_reference(
        slow,
        **slow_inputs,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        scale=scale,
        length_norm=layer.length_norm,
        **rotary,
        **given_,
    )
    fast = dict(fast_inputs, **given_)
    out = layer(fast.pop("x"), fast.pop("memory"), **fast) if through is None else through(layer, **fast)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)
    upstream = torch.randn(expected.shape).to(dtype)
    leaves, slow_leaves = [*fast_inputs.values(), *layer.parameters()], [*slow_inputs.values(), *slow.values()]
    grads = gradients(out, leaves, upstream)
    expected_grads = gradients(expected, slow_leaves, upstream.double())
    largest = torch.stack([right.abs().max() for right in expected_grads if right.numel()]).max()
    for grad, right in zip(grads, expected_grads, strict=True):
        # Some gradients are 0 but for rounding: of a key bias, which every slot gets alike, or of the only slot's key.
        vanishing = right.numel() and right.abs().max() <= small * largest
        assert_close(grad, right, dtype, "grad", size=largest if vanishing else None)
    fast = dict(fast_inputs, **given_)
    again, found = layer(fast.pop("x"), fast.pop("memory"), **fast, return_weights=True)
    assert_close(again, expected, dtype)
    # The targets name outputs and gradients. Rounding q and k alone moves a single weight by more than an output.
    assert_close(found, weights, dtype, "grad")
    return out


def data(beams: int = 1, l: int = L, m: int = M) -> tuple[Tensor, Tensor]:
    return torch.randn(B * beams, l, D), torch.randn(B, m, E)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("h,g", [(5, 5), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype, size, h, g, layout, monkeypatch, taken):
    """FAULTS 1, 2: every layout within the numeric targets, forward and backward, with a row that sees nothing."""
    force(monkeypatch, layout)
    # Enough queries: over a handful of them a gradient may all but cancel.
    layer = CrossAttention(D, E, h, num_kv_heads=g, head_dim=8, bias=True).to(dtype)
    x, memory = data(l=17)
    for mask in MASKS.values():
        taken.clear()
        out = compare(layer, size * x, size * memory, mask=mask)
        assert taken[0] == layout
        assert not out[1].any() and out[0].any(), "exactly 0, the output bias included"
    taken.clear()
    compare(layer, size * x, size * memory)
    assert taken[0] == ("absorbed" if "absorbed" in layout else "short")


@pytest.mark.parametrize("real", list(MASKS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("l", [1, L])
def test_projected_once(l, beams, layout, real, monkeypatch):
    """A memory projected once gives what it gives projected in the call, per-query rules and beams included."""
    force(monkeypatch, layout)
    layer = make(torch.float64, score_bias=True)
    given_scores = torch.randn(B, M)
    rule = torch.rand(B * beams, 6, l, M) < 0.6
    rule[0, :, 0], rule[:, :, -1, 0] = False, True
    given_ = {
        "none": {},
        "(l, m)": {"attention_mask": rule[1, 0]},
        "(b, l, m)": {"attention_mask": rule[:, 0]},
        "(b, h, l, m)": {"attention_mask": rule},
        "Mask (b, 1, 1, m)": {"attention_mask": masks.padding_mask(rule[:, 0, -1])},
    }

    def through(layer, x, memory, *, mask, scores, **rest):
        kept = layer.project(memory, mask=mask, scores=scores, absorb="absorbed" in layout)
        assert kind(kept) == layout and (kept.batch, kept.slots) == (B, M)
        out, weights = layer(x, kept, **rest, return_weights=True)
        assert weights.shape == (B * beams, 6, l, M)
        torch.testing.assert_close(out, layer(x, kept, **rest), rtol=0, atol=1e-5)
        return out

    for name, rules in given_.items():
        x, memory = data(beams, l)
        out = compare(layer, x, memory, through=through, mask=MASKS[real], scores=given_scores, **rules)
        assert not out[beams:].any() and out[:beams].any(), name


def test_layouts_hold_what_they_say(monkeypatch):
    """Padded and packed keep K and V in (b, g, m, k); absorbed keeps the memory once; packed keeps real slots only."""
    layer, (_, memory) = make(), data()
    sizes = {}
    for layout in LAYOUTS:
        force(monkeypatch, layout)
        kept = layer.project(memory, mask=MASK, absorb="absorbed" in layout)
        assert kept.keys.is_contiguous() or kept.absorbed
        sizes[layout] = kept.nbytes()
    real = int(MASK.sum())
    kv = 2 * 2 * 8 * 4
    assert sizes == {
        "padded": B * M * kv,
        "packed": real * kv,
        "absorbed": B * M * E * 4,
        "packed absorbed": real * E * 4,
    }
    force(monkeypatch, "packed absorbed")
    kept = layer.project(memory, mask=MASKS["in front"], absorb=True)
    assert kept.keys.data_ptr() == memory.data_ptr(), "read where it lies, not copied"


def test_the_cheap_layout_is_chosen_by_size(taken):
    """One query does not project a memory of its own; many do; half-empty long memories are packed."""
    layer = CrossAttention(128, 128, 4)
    memory, empty = torch.randn(3, 512, 128), torch.zeros(3, 512, dtype=torch.bool)
    empty[:, :50] = True
    layer(torch.randn(3, 1, 128), memory)
    layer(torch.randn(3, 256, 128), memory)
    layer(torch.randn(3, 256, 128), memory, mask=empty)
    assert taken == ["absorbed", "short", "packed"]


VARIANTS = {
    "plain": {"bias": False},
    "output bias only": {"bias": False, "out_bias": True},
    "one width": {"memory_dim": D},
    "qk_norm": {"qk_norm": True},
    "rotary": {"rotary": Rotary(8)},
    "rotary on a grid": {"rotary": Rotary(8, base=50.0, axes=2)},
    "null slot": {"null_slot": True},
    "length norm": {"null_slot": True, "length_norm": 29.0},
    "score bias": {"score_bias": True},
    "scale": {"scale": 0.7},
    "all": {"qk_norm": True, "rotary": Rotary(8), "null_slot": True, "length_norm": 5.0, "score_bias": True},
}


@pytest.mark.parametrize("rules", ["none", "mask", "mask and attention mask", "per head"])
@pytest.mark.parametrize("layout", ["padded", "packed absorbed"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_variants(variant, layout, rules, monkeypatch):
    """Every option, alone and together, with and without masks: values and gradients of everything."""
    force(monkeypatch, layout)
    layer = make(torch.float64, **VARIANTS[variant])
    x, memory = data(beams=3)
    memory = memory[..., : layer.memory_dim]
    given_: dict = {}
    if layer.score_scale is not None:
        given_["scores"] = torch.randn(B, M, dtype=torch.float64)
    if layer.rotary is not None:
        places = (2,) if layer.rotary.axes == 2 else ()
        given_["query_positions"] = torch.randint(0, 97, (B * 3, L, *places))
        given_["memory_positions"] = torch.randint(0, 97, (B, M, *places))
    if rules != "none":
        given_["mask"] = MASK
    if rules == "mask and attention mask":
        given_["attention_mask"] = RULE
    if rules == "per head":
        given_["attention_mask"] = torch.rand(B * 3, 6, L, M) < 0.3
        blind = ~(given_["attention_mask"] & MASK.repeat_interleave(3, 0)[:, None, None]).any(-1)
        assert (blind.any(1) & ~blind.all(1)).any(), "some query must be blind in some heads only"
    scale = VARIANTS[variant].get("scale")
    out = compare(layer, x, memory, scale=scale, **given_)
    if rules != "none":
        assert not out[3:].any() and out[:3].any()
    if rules == "mask and attention mask":
        assert not out[:, 3].any()

    def through(layer, x, memory, *, attention_mask=None, query_positions=None, **rest):
        return layer(x, layer.project(memory, **rest), attention_mask=attention_mask, query_positions=query_positions)

    compare(layer, x, memory, through=through, scale=scale, **given_)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_values_of_another_width(layout, monkeypatch):
    force(monkeypatch, layout)
    x, memory = data()
    compare(make(value_dim=29), x, memory, values=torch.randn(B, M, 29), mask=MASK)


def test_positions_are_counted_from_zero_unless_given():
    layer = make(rotary=Rotary(8))
    x, memory = data()
    expected = layer(x, memory, query_positions=torch.arange(L), memory_positions=torch.arange(M))
    assert torch.equal(layer(x, memory), expected)
    moved = layer(x, memory, query_positions=torch.arange(L) + 31, memory_positions=torch.arange(M) + 31)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(layer(x, memory, query_positions=torch.arange(L) + 31), expected, atol=1e-2)
    on_grid = make(rotary=Rotary(8, axes=2))
    places = {"query_positions": grid(1, L), "memory_positions": grid(M, 1)}
    assert on_grid(x, memory, **places).shape == x.shape


def test_a_null_slot_takes_part_of_the_attention():
    """Weights of real slots sum to less than 1, and length normalisation keeps that share as the memory grows."""
    x, memory = data()
    memory = memory[:, :1]
    shares = {}
    for length_norm in (None, 29.0):
        layer = make(null_slot=True, length_norm=length_norm)
        for times in (1, 64):
            shares[length_norm, times] = layer(x, memory.expand(-1, times, -1), return_weights=True)[1].sum(-1)
            assert (shares[length_norm, times] < 1).all()
    assert (shares[None, 64] - shares[None, 1]).max() > 0.1
    torch.testing.assert_close(shares[29.0, 64], shares[29.0, 1], rtol=0, atol=1e-5)


def test_length_norm_counts_what_each_query_sees():
    """A query gives the same answer alone, in a batch, and over a memory projected before."""
    layer = make(torch.float64, null_slot=True, length_norm=29.0)
    x, memory = (tensor.double() for tensor in data())
    whole = layer(x, memory, attention_mask=RULE)
    kept = layer.project(memory)
    for i in range(L):
        alone = layer(x[:, i : i + 1], memory, attention_mask=RULE[i : i + 1])
        assert_close(alone, whole[:, i : i + 1].detach(), torch.float64)
        later = layer(x[:, i : i + 1], kept, attention_mask=RULE[i : i + 1])
        assert_close(later, whole[:, i : i + 1].detach(), torch.float64)


def test_head_scale():
    """Each head's find is multiplied; 0 leaves the output bias, and nothing where nothing is seen."""
    layer = make()
    x, memory = data()
    scale = torch.randn(6)
    with torch.no_grad():
        scaled = copy.deepcopy(layer)
        scaled.out_proj.weight.mul_(scale.repeat_interleave(8))
    torch.testing.assert_close(layer(x, memory, head_scale=scale), scaled(x, memory), rtol=0, atol=1e-5)
    nothing = layer(x, memory, mask=MASK, head_scale=torch.zeros(6))
    assert torch.equal(nothing[0], layer.out_proj.bias.expand(L, D)) and not nothing[1].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("h,g", [(5, 5), (6, 2)])
def test_self_attention(h, g, causal):
    layer = SelfAttention(D, h, causal=causal, num_kv_heads=g, head_dim=8, rotary=Rotary(8)).double()
    x = torch.randn(B, M, D, dtype=torch.float64, requires_grad=True)
    state = {name: value.double() for name, value in layer.named_parameters()}
    for mask in (None, MASK):
        slow = {"num_heads": h, "num_kv_heads": g, "causal": causal, "rotary_base": 10000.0, "mask": mask}
        expected, weights = cross_attention_reference(state, x, x, **slow)
        out, found = layer(x, mask=mask, return_weights=True)
        assert_close(out, expected.detach(), torch.float64)
        assert_close(found, weights.detach(), torch.float64)
        upstream = torch.randn_like(out)
        for grad, right in zip(gradients(out, [x], upstream), gradients(expected, [x], upstream), strict=True):
            assert_close(grad, right, torch.float64, "grad")
        torch.testing.assert_close(layer(x, mask=mask), out, rtol=0, atol=1e-12)
    assert bool(weights.triu(1).any()) != causal


def test_cross_attention_is_never_causal_unless_asked():
    layer = make()
    x, memory = torch.randn(B, M, D), torch.randn(B, M, E)
    assert layer(x, memory, return_weights=True)[1][:, :, 0].gt(0).all()
    for l in (M, L, M + 4):
        compare(layer, torch.randn(B, l, D), memory, causal=True, mask=MASK)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_look_at(layout, backend, monkeypatch):
    """FAULTS 3: a memory of length 0 adds exactly nothing, with biases, null slot and weights asked for too."""
    force(monkeypatch, layout)
    for options in ({}, {"null_slot": True, "length_norm": 5.0}, {"qk_norm": True}):
        layer = make(backend=backend, **options)
        x, memory = (tensor.requires_grad_() for tensor in data(m=0))
        for mask in (None, torch.ones(B, 0, dtype=torch.bool)):
            out, weights = layer(x, memory, mask=mask, return_weights=True)
            assert torch.equal(x + out, x) and weights.shape == (B, 6, L, 0)
            assert torch.equal(x + layer(x, memory, mask=mask), x)
            assert torch.equal(x + layer(x, layer.project(memory, mask=mask)), x)
            for grad in torch.autograd.grad(out.sum(), [x, memory, *layer.parameters()], allow_unused=True):
                assert grad is None or not grad.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("b,l", [(0, L), (B, 0), (0, 0)])
def test_empty_batches(b, l, layout, monkeypatch):
    """FAULTS 18: no rows or no queries give an empty output of the right shape, and no gradient fails."""
    force(monkeypatch, layout)
    layer = make()
    x, memory = torch.randn(b, l, D), torch.randn(b, M, E, requires_grad=True)
    for mask in (None, torch.ones(b, M, dtype=torch.bool), torch.zeros(b, M, dtype=torch.bool)):
        out, weights = layer(x, memory, mask=mask, return_weights=True)
        assert out.shape == x.shape and weights.shape == (b, 6, l, M)
        out = layer(x, memory, mask=mask)
        assert out.shape == x.shape
        (grad,) = torch.autograd.grad(out.sum(), memory, allow_unused=True)
        assert grad is None or not grad.any()
        assert layer(x, layer.project(memory, mask=mask)).shape == x.shape


@pytest.mark.parametrize("real", list(MASKS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 6e4])
def test_garbage_behind_the_mask(garbage, layout, real, monkeypatch):
    """What lies in masked slots, in their values and scores too, changes nothing: forward and backward, bit for bit."""
    force(monkeypatch, layout)
    absorbed = "absorbed" in layout
    layer = make(score_bias=True, value_dim=None if absorbed else 29)
    x, memory = data()
    parts = {"scores": torch.randn(B, M)} | ({} if absorbed else {"values": torch.randn(B, M, 29)})
    for rules in ({}, {"attention_mask": RULE}):
        results = []
        hidden = ~(MASKS[real] if not rules else MASKS[real] & RULE.any(0))
        for value in (0.0, garbage):
            leaf = memory.masked_fill(hidden[..., None], value).requires_grad_()
            rest = {
                name: tensor.masked_fill(hidden if tensor.dim() == 2 else hidden[..., None], value).requires_grad_()
                for name, tensor in parts.items()
            }
            out = layer(x, leaf, mask=MASKS[real], **rules, **rest)
            leaves = [leaf, *rest.values(), *layer.parameters()]
            results.append([out, *gradients(out, leaves, torch.ones_like(out))])
        for mine, other in zip(*results, strict=True):
            assert torch.isfinite(other).all() and torch.equal(mine, other)
        assert results[0][0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bitwise(layout, dtype, monkeypatch):
    """FAULTS 6: a mask that is all True, the same call twice, and a deep copy are equal bit for bit."""
    force(monkeypatch, layout)
    layer = make(dtype)
    x, memory = (tensor.to(dtype) for tensor in data())
    out = layer(x, memory)
    assert torch.isfinite(out).all()
    assert torch.equal(layer(x, memory, mask=torch.ones(B, M, dtype=torch.bool)), out)
    assert torch.equal(layer(x, memory), out) and torch.equal(copy.deepcopy(layer)(x, memory), out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rearranged(dtype, layout, monkeypatch):
    """FAULTS 8, 9, 10: slots permuted, doubled, joined by masked ones; rows and queries one at a time."""
    force(monkeypatch, layout)
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    # The absorbed form passes through the memory's own width, so its sums are longer than those the rule measured.
    tolerance = tolerance * (4 if "absorbed" in layout else 1)
    layer = CrossAttention(D, E, 6, num_kv_heads=2, head_dim=8, bias=True).to(dtype)
    x, memory = (tensor.to(dtype) for tensor in data())
    mask = torch.rand(B, M) < 0.6
    mask[:, 2], mask[:, 3] = True, False
    out = layer(x, memory, mask=mask)
    order = torch.randperm(M)
    junk = torch.cat([memory, 30 * torch.randn(B, 7, E).to(dtype)], 1)
    others = {
        "permuted": layer(x, memory[:, order], mask=mask[:, order]),
        "doubled": layer(x, torch.cat([memory, memory], 1), mask=torch.cat([mask, mask], 1)),
        "joined": layer(x, junk, mask=F.pad(mask, (0, 7))),
        "by row": torch.cat([layer(x[i : i + 1], memory[i : i + 1], mask=mask[i : i + 1]) for i in range(B)]),
        "by query": torch.cat([layer(x[:, i : i + 1], memory, mask=mask) for i in range(L)], 1),
    }
    for name, other in others.items():
        assert torch.isfinite(other).all()
        error = (other.double() - out.double()).abs().max() / out.double().abs().max()
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout, monkeypatch):
    """FAULTS 14: memories that are expanded (stride 0), transposed or sliced count as their contiguous copies do."""
    force(monkeypatch, layout)
    layer, x = make(), torch.randn(B, L, D)
    for m in (31, 32, 33, 65, 577):
        mask = torch.rand(B, m) < 0.6
        memory = torch.randn(B, m, E)
        for other in (
            memory[:1].expand(B, m, E),
            memory.transpose(1, 2).contiguous().transpose(1, 2),
            torch.cat([memory, memory], 2)[..., :E],
        ):
            assert not other.is_contiguous()
            for given_ in ({}, {"mask": mask}):
                expected = layer(x, other.contiguous(), **given_)
                torch.testing.assert_close(layer(x, other, **given_), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("memory_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layer_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES[1:], ids=str)
def test_mixed_dtypes(x_dtype, layer_dtype, memory_dtype):
    """FAULTS 15: memory and x are cast to the weights' dtype, the output to that of x."""
    layer = make(layer_dtype, score_bias=True, null_slot=True, qk_norm=True)
    x, memory = data()
    given_ = {"mask": MASK, "scores": torch.randn(B, M).to(memory_dtype)}
    out = layer(x.to(x_dtype), memory.to(memory_dtype), **given_)
    assert out.dtype == x_dtype and torch.isfinite(out).all() and not out[1].any()
    expected = layer.double()(x.to(x_dtype).double(), memory.to(memory_dtype).double(), **given_)
    loosest = max(TARGETS[each]["forward"][0] for each in (x_dtype, layer_dtype, memory_dtype))
    assert (out.double() - expected).abs().max() <= 2 * loosest * expected.abs().max()


def test_another_device():
    """FAULTS 15: x and memory on two devices are refused, naming both."""
    x, memory = data()
    with pytest.raises(ShapeError, match="x is on cpu and memory on meta"):
        make()(x, memory.to("meta"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(x_dtype, layout, monkeypatch):
    """FAULTS 16: under bf16 autocast it runs, trains, and the stream beside it keeps its dtype."""
    force(monkeypatch, layout)
    for options in ({"score_bias": True}, {"qk_norm": True, "null_slot": True, "length_norm": 5.0, "score_bias": True}):
        layer = make(**options)
        x, memory = data()
        given_ = {"mask": MASK, "scores": torch.randn(B, M)}
        expected = layer(x, memory, **given_)
        seen: list[torch.dtype] = []
        after = nn.Identity()
        after.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0].dtype))
        x = x.to(x_dtype)
        with torch.autocast("cpu", torch.bfloat16):
            out = after(x + layer(x, memory, **given_)) - x
        assert seen == [x_dtype] and torch.isfinite(out).all()
        assert (out.float() - expected).abs().max() <= 5e-2 * expected.abs().max()
        out.sum().backward()
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all() and parameter.grad.dtype == torch.float32, name
        assert layer.v_proj.weight.grad.any() and layer.score_scale.grad.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_values(dtype, layout, monkeypatch):
    """FAULTS 13: queries and keys of 300 in half precision stay finite, forward and backward."""
    force(monkeypatch, layout)
    layer = CrossAttention(8, 8, 1).to(dtype)
    with torch.no_grad():
        for part in (layer.q_proj, layer.k_proj):
            part.weight.copy_(torch.eye(8))
    x, memory = torch.full((B, L, 8), 300.0, dtype=dtype), torch.full((B, M, 8), 300.0, dtype=dtype)
    memory[:, ::2] *= -1
    memory.requires_grad_()
    out = layer(x, memory, mask=MASK)
    (out / 1000).sum().backward()
    assert torch.isfinite(out).all() and out[0].any() and torch.isfinite(memory.grad).all()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout(layout, backend, monkeypatch):
    """FAULTS 17: training draws anew, evaluation does not, before and after training alike."""
    force(monkeypatch, layout)
    layer = make(dropout=0.5, backend=backend)
    x, memory = data()
    for mask in (MASK, None):
        before = layer.eval()(x, memory, mask=mask)
        assert torch.equal(layer(x, memory, mask=mask), before)
        layer.train()
        drawn = [layer(x, memory, mask=mask) for _ in range(2)]
        assert not torch.equal(*drawn) and not torch.equal(drawn[0], before)
        assert bool(drawn[0][1].any()) == (mask is None)
        assert torch.equal(layer.eval()(x, memory, mask=mask), before)


@pytest.mark.parametrize("mode", ["plain", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainable_projector_learns(layout, mode, monkeypatch):
    """FAULTS 19: the gradient reaches what made the memory, through both kinds of checkpointing."""
    force(monkeypatch, layout)
    layer, projector = make(), nn.Linear(11, E)
    x, raw = torch.randn(B, L, D), torch.randn(B, M, 11)

    def step(x: Tensor, memory: Tensor) -> Tensor:
        return layer(x, memory, mask=MASK)

    expected = torch.autograd.grad(step(x, projector(raw)).square().sum(), projector.weight)[0]
    memory = projector(raw)
    if mode == "plain":
        out = step(x, memory)
    else:
        out = checkpoint(step, x, memory, use_reentrant=mode.startswith("reentrant"))
    out.square().sum().backward()
    assert expected.any() and torch.equal(projector.weight.grad, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_learns_after_an_evaluation(layout, monkeypatch):
    """Nothing is kept from a call without gradients that a later call with them would read."""
    force(monkeypatch, layout)
    layer = make(score_bias=True, bias=False, out_bias=True)
    x, memory = data()
    given_ = {"mask": MASK, "scores": torch.randn(B, M)}
    with torch.no_grad():
        before = layer(x, memory, **given_)
    layer(x, memory, **given_).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
    assert not torch.allclose(layer(x, memory, **given_), before, atol=1e-3)


@pytest.mark.parametrize("name", ["mask", "attention_mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.uint8], ids=str)
def test_mask_of_another_dtype(name, dtype):
    """FAULTS 4: masks must be bool, in `forward` and in `project`."""
    x, memory = data()
    shape = (B, M) if name == "mask" else (L, M)
    with pytest.raises(MaskError, match=f"{name} must be bool, True = attend; got {str(dtype)[6:]}"):
        make()(x, memory, **{name: torch.ones(shape, dtype=dtype)})
    with pytest.raises(MaskError, match="mask must be bool"):
        make().project(memory, mask=torch.ones(B, M, dtype=dtype))


@pytest.mark.parametrize("shape", [(L, M), (M,), (B,), (B, 1), (M, B), (B, M + 1), (1, M), (B, 1, M), (B, 1, 1, M)])
def test_mask_of_another_shape(shape):
    """FAULTS 5: a padding mask is (b, m) and nothing else; the message names both shapes."""
    x, memory = data()
    for call in (lambda mask: make()(x, memory, mask=mask), lambda mask: make().project(memory, mask=mask)):
        with pytest.raises(ShapeError, match="attention_mask") as error:
            call(torch.ones(shape, dtype=torch.bool))
        assert str((B, M)) in str(error.value) and str(shape) in str(error.value)


@pytest.mark.parametrize(
    "settings_,match",
    [
        ({"num_heads": 5}, "num_heads must divide query_dim, got 5 and 32"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 and 4"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"num_heads": -4}, "num_heads must be at least 1"),
        ({"num_heads": True}, "num_heads must be an int, got True"),
        ({"num_heads": 4.0}, "num_heads must be an int, got 4.0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ({"query_dim": 0}, "query_dim must be at least 1"),
        ({"memory_dim": "8"}, "memory_dim must be an int"),
        ({"head_dim": False}, "head_dim must be an int, got False"),
        ({"value_dim": 0}, "value_dim must be at least 1"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"dropout": float("nan")}, "dropout must be a finite number"),
        ({"length_norm": 0.5}, "length_norm must be in"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"backend": "flash"}, "backend must be one of 'sdpa', 'eager'; got 'flash'"),
        ({"rotary": Rotary(4)}, "rotary must be made for head_dim 8, got one for 4"),
    ],
)
def test_bad_settings(settings_, match):
    """FAULTS 11: refused when the layer is made, naming what was given."""
    with pytest.raises(ValueError, match=match):
        CrossAttention(**({"query_dim": 32, "num_heads": 4} | settings_))


def test_bad_calls():
    """FAULTS 5, 11: widths, rows and options that do not fit this layer, each named."""
    layer, (x, memory) = make(), data()
    kept = layer.project(memory)
    with pytest.raises(ShapeError, match=r"x must be \(b, l, 19\), got \(2, 5, 23\)"):
        layer(torch.randn(B, L, E), memory)
    with pytest.raises(ShapeError, match=r"memory must be a tensor \(b, m, 23\), got \(2, 7, 19\)"):
        layer(x, torch.randn(B, M, D))
    with pytest.raises(ShapeError, match="got list"):
        layer(x, [memory])
    with pytest.raises(ShapeError, match="multiple of them .beams., got 3 and 2"):
        layer(torch.randn(3, L, D), memory)
    with pytest.raises(ShapeError, match="got 3 and 2"):
        layer(torch.randn(3, L, D), kept)
    with pytest.raises(ShapeError, match=r"values must be \(b, m, 23\) = \(2, 7, 23\), got \(2, 6, 23\)"):
        layer(x, memory, values=memory[:, 1:])
    with pytest.raises(ShapeError, match="got none"):
        make(value_dim=29)(x, memory)
    with pytest.raises(ShapeError, match="give them to project"):
        layer(x, kept, mask=MASK)
    with pytest.raises(ConfigError, match="without score_bias"):
        layer(x, memory, scores=torch.zeros(B, M))
    with pytest.raises(ConfigError, match="give it scores"):
        make(score_bias=True)(x, memory)
    with pytest.raises(ShapeError, match=r"scores must be \(b, m\) = \(2, 7\), got \(7, 2\)"):
        make(score_bias=True)(x, memory, scores=torch.zeros(M, B))
    for options in ({"qk_norm": True}, {"rotary": Rotary(8)}, {"null_slot": True}):
        with pytest.raises(ConfigError, match="absorbed"):
            make(**options).project(memory, absorb=True)
    with pytest.raises(ConfigError, match="absorbed"):
        layer.project(memory, values=memory, absorb=True)


def test_a_wrapped_projection_is_used_as_it_is(monkeypatch):
    """A projection that somebody replaced (LoRA) is called, not read around."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer, (x, memory) = make(bias=False), data()
    force(monkeypatch, "padded")
    expected = 2 * layer(x, memory)
    doubled = Doubled(E, 16, bias=False)
    doubled.weight = layer.v_proj.weight
    layer.v_proj = doubled
    force(monkeypatch, "absorbed")
    torch.testing.assert_close(layer(x, memory), expected, rtol=0, atol=1e-5)


@settings(max_examples=50)
@given(data_=st.data())
def test_any_shape(data_):
    """FAULTS 8–10 and the numeric targets over random sizes, dtypes, options, layouts and masks."""
    draw = data_.draw
    torch.manual_seed(draw(st.integers(0, 10**6)))
    b, beams, g, n = (draw(st.integers(1, 3)) for _ in range(4))
    l, m = draw(st.integers(1, 5)), draw(st.integers(0, 8))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    options = draw(st.sampled_from(list(VARIANTS.values())))
    sizes = {"num_heads": g * n, "num_kv_heads": g, **options}
    layer = make(dtype, **sizes)
    given_: dict = {}
    if draw(st.booleans()):
        given_["mask"] = torch.rand(b, m) < 0.6
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(l, m), (b * beams, l, m), (b * beams, g * n, l, m)]))
        given_["attention_mask"] = torch.rand(shape) < 0.6
    if layer.score_scale is not None:
        given_["scores"] = torch.randn(b, m, dtype=dtype)
    if layer.rotary is not None and layer.rotary.axes == 2:
        given_["query_positions"], given_["memory_positions"] = torch.randint(9, (l, 2)), torch.randint(9, (m, 2))
    given_["scale"] = options.get("scale")
    with pytest.MonkeyPatch.context() as monkeypatch:
        force(monkeypatch, draw(st.sampled_from(LAYOUTS)))
        compare(layer, torch.randn(b * beams, l, D), torch.randn(b, m, layer.memory_dim), small=1e-2, **given_)
