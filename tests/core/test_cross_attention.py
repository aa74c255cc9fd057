"""`CrossAttention` and `SelfAttention` against the slow definition, in every layout a memory may be kept in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.profiler import profile

import mmattn
from mmattn import CrossAttention, SelfAttention, masks
from mmattn.core.key_values import KeyValue
from mmattn.core.positions import Rotary
from mmattn.core.projection import KeyValueProjection
from mmattn.errors import ShapeError
from tests.core.random_inputs import (
    DTYPES,
    LAYOUTS,
    MASK,
    MASKS,
    RULE,
    B,
    D,
    E,
    L,
    M,
    compare_layer as compare,
    data,
    force,
    kind,
    make_layer as make,
    named_weights,
)
from tests.reference import assert_close, attend_reference, cross_attention_reference, gradients


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every way that a call has taken, in turn: a layout, or the short way for what nothing special is asked of."""
    made: list[str] = []
    prepare, attend = KeyValueProjection.lay_out, KeyValueProjection.attend

    def spy(self: KeyValueProjection, *arguments, **more) -> KeyValue:
        kept = prepare(self, *arguments, **more)
        made.append(kind(kept))
        return kept

    def attend_spy(self: KeyValueProjection, q: Tensor, memory: Tensor, **given_) -> tuple:
        before = len(made)
        out = attend(self, q, memory, **given_)
        if len(made) == before:
            made.append("short")
        return out

    monkeypatch.setattr(KeyValueProjection, "lay_out", spy)
    monkeypatch.setattr(KeyValueProjection, "attend", attend_spy)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("h,g", [(5, 5), (6, 2), (3, 1)])
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(dtype, size, h, g, layout, monkeypatch, taken):
    """Invariants 4, 9: every layout within the numeric targets, forward and backward, with a row that sees nothing."""
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
        kept = layer.project(memory, mask=mask, scores=scores, queries=0 if "absorbed" in layout else None)
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
        kept = layer.project(memory, mask=MASK, queries=0 if "absorbed" in layout else None)
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
    kept = layer.project(memory, mask=MASKS["in front"], queries=0)
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
    "rotary over time, row and column": {"rotary": Rotary(18, axes=3), "head_dim": 18},
    "null slot": {"null_slot": True},
    "length norm": {"null_slot": True, "length_norm": 29.0},
    "score bias": {"score_bias": True},
    "standardised scores": {"score_bias": True, "score_mean": 0.7, "score_std": 0.3, "null_slot": True},
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
    if layer.kv_proj.score_scale is not None:
        given_["scores"] = torch.randn(B, M, dtype=torch.float64)
    if layer.kv_proj.rotary is not None:
        places = () if layer.kv_proj.rotary.axes == 1 else (layer.kv_proj.rotary.axes,)
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [None, 13])
def test_multihead(bias, width):
    """Invariant 3: `nn.MultiheadAttention`, its masks by the named converters, on copies of its weights."""
    theirs = nn.MultiheadAttention(12, 3, bias=bias, kdim=width, vdim=width, batch_first=True, dropout=0.25).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.4)
    ours, theirs = CrossAttention(12, width or 12, 3, bias=bias).double().eval(), theirs.eval()
    weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
    weights = weights if width else list(theirs.in_proj_weight.chunk(3))
    biases = [*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias] if bias else []
    for name, values in (("weight", [*weights, theirs.out_proj.weight]), ("bias", biases)):
        layers = (ours.q_proj, ours.kv_proj.k_proj, ours.kv_proj.v_proj, ours.out_proj)
        for layer, value in zip(layers, values, strict=False):
            getattr(layer, name).data.copy_(value)
    x = torch.randn(B, L, 12, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(B, M, width or 12, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([[1, 1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 0, 1]])
    drop = torch.rand(L, M) < 0.4
    drop[:, 1] = False
    for given_, other in (
        ({"mask": masks.from_key_padding(keep == 0)}, {"key_padding_mask": keep == 0}),
        ({"mask": masks.from_huggingface(keep)}, {"key_padding_mask": keep == 0}),
        ({"attention_mask": masks.from_key_padding(drop)}, {"attn_mask": drop}),
    ):
        expected, expected_weights = theirs(x, memory, memory, **other, average_attn_weights=False)
        out, weights = ours(x, memory, **given_, return_weights=True)
        assert_close(out, expected.detach(), torch.float64)
        assert_close(weights, expected_weights.detach(), torch.float64)
        upstream = torch.randn_like(out)
        for grad, right in zip(
            gradients(out, [x, memory], upstream), gradients(expected, [x, memory], upstream), strict=True
        ):
            assert_close(grad, right, torch.float64, "grad")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("h,g", [(5, 5), (6, 2)])
def test_self_attention(h, g, causal):
    layer = SelfAttention(D, h, causal=causal, num_kv_heads=g, head_dim=8, rotary=Rotary(8)).double()
    x = torch.randn(B, M, D, dtype=torch.float64, requires_grad=True)
    state = {name: value.double() for name, value in named_weights(layer).items()}
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
    """Invariant 8."""
    layer = make()
    x, memory = torch.randn(B, M, D), torch.randn(B, M, E)
    assert layer(x, memory, return_weights=True)[1][:, :, 0].gt(0).all()
    for l in (M, L, M + 4):
        compare(layer, torch.randn(B, l, D), memory, causal=True, mask=MASK)


@settings(max_examples=50)
@given(data_=st.data())
def test_any_shape(data_):
    """Invariants 7, 13, 14 and the numeric targets over random sizes, dtypes, options, layouts and masks."""
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
    if layer.kv_proj.score_scale is not None:
        given_["scores"] = torch.randn(b, m, dtype=dtype)
    if layer.kv_proj.rotary is not None and (axes := layer.kv_proj.rotary.axes) > 1:
        given_["query_positions"], given_["memory_positions"] = torch.randint(9, (l, axes)), torch.randint(9, (m, axes))
    given_["scale"] = options.get("scale")
    with pytest.MonkeyPatch.context() as monkeypatch:
        force(monkeypatch, draw(st.sampled_from(LAYOUTS)))
        compare(layer, torch.randn(b * beams, l, D), torch.randn(b, m, layer.memory_dim), floor=1e-1, **given_)


def alone(h: int = 6, g: int = 2, k: int = 11) -> KeyValueProjection:
    linears = (nn.Linear(E, g * k, bias=False) for _ in range(2))
    return KeyValueProjection(*linears, num_heads=h, num_kv_heads=g, head_dim=k, memory_dim=E).double()


@pytest.mark.parametrize("queries", [None, 0])
def test_queries_of_another_layer(queries: int | None) -> None:
    """Queries of anyone over K = M Wk and V = M Wv; a row that sees nothing gives exactly 0."""
    projection, memory = alone(), torch.randn(B, M, E, dtype=torch.float64)
    q = torch.randn(B, 6, L, 11, dtype=torch.float64)
    keys, values = projection.keys_and_values(memory)
    expected, expected_weights = attend_reference(q, keys.detach(), values.detach(), mask=MASK)
    for inputs in (
        {"memory": memory, "mask": MASK},
        {"memory": projection.project(memory, mask=MASK, queries=queries)},
    ):
        out, weights = projection(q, **inputs, return_weights=True)
        assert_close(out, expected, torch.float64)
        assert_close(weights, expected_weights, torch.float64)
        assert not out[1].any() and torch.equal(projection(q, **inputs), projection(q, **inputs))
    assert projection(q.float(), memory).dtype == torch.float32, "the dtype of the queries"
    with pytest.raises(ShapeError, match="memory must be a tensor"):
        projection(q, memory[..., 1:])


SLOTS, QUERIES, HEADS, WIDTH = 10_240, 3, 2, 7


def test_ten_thousand_slots_equal_the_plain_definition():
    """Invariant 21."""
    q, k, v = (torch.randn(1, HEADS, length, WIDTH) for length in (QUERIES, SLOTS, SLOTS))
    out = mmattn.attend(q, k, v)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(
        out.double(), F.scaled_dot_product_attention(*(one.double() for one in (q, k, v))), rtol=0, atol=5e-6
    )


def test_memory_grows_with_queries_times_slots_and_no_faster():
    """Invariant 21."""
    layer = mmattn.CrossAttention(23, memory_dim=19, num_heads=HEADS, head_dim=WIDTH)
    memory, mask = torch.randn(1, SLOTS, 19), torch.rand(1, SLOTS) > 0.5
    with torch.no_grad(), profile(profile_memory=True) as profiled:
        layer(torch.randn(1, QUERIES, 23), memory, mask=mask)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profiled.events())
    floats = SLOTS * (2 * 19 + 4 * HEADS * WIDTH + 4 * HEADS * QUERIES + 8)
    assert 0 < taken < 4 * floats
