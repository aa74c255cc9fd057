"""Where values cannot be read: fake and meta tensors, transforms of `torch.func`, traced graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mmattn import attend, positions
from mmattn.core.tracing import may_read, readable
from tests.core.random_inputs import MASK, RULE, B, D, E, L, M, make_heads, make_layer

OPTIONS: list[dict] = [
    {},
    {"null_slot": True, "length_norm": 5.0},
    {"qk_norm": True},
    {"rotary": positions.Rotary(8)},
    {"score_bias": True},
]
ASKED: dict[str, dict] = {
    "mask": {"mask": MASK},
    "rule": {"attention_mask": RULE},
    "both": {"mask": MASK, "attention_mask": RULE},
    "causal": {"causal": True},
    "bias": {"bias": torch.randn(6, L, M)},
    "eager": {"mask": MASK, "backend": "eager"},
    "weights": {"mask": MASK, "return_weights": True},
}


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def moved(given: dict, move: Callable[[Tensor], Tensor]) -> dict:
    return {name: move(value) if isinstance(value, Tensor) else value for name, value in given.items()}


def heads() -> list[Tensor]:
    return [tensor.detach() for tensor in make_heads(torch.float32, 6, 2)]


def test_what_can_be_read() -> None:
    x = torch.randn(3)
    assert readable(x) and may_read(x) and readable(torch.nn.Parameter(x))
    assert not readable(x.to("meta")) and not readable(FakeTensorMode().from_tensor(x))
    seen = []
    torch.vmap(lambda y: (seen.append(readable(y)), y)[1])(x)
    torch.func.grad(lambda y: (seen.append(readable(y)), y.sum())[1])(x)
    assert seen == [False, False]


@pytest.mark.parametrize("asked", list(ASKED))
def test_attend_on_meta_and_fake_tensors(asked: str) -> None:
    given, mode = ASKED[asked], FakeTensorMode()
    want = first(attend(*heads(), **given)).shape
    assert first(attend(*(x.to("meta") for x in heads()), **moved(given, lambda x: x.to("meta")))).shape == want
    fake = [mode.from_tensor(x) for x in heads()]
    with mode:
        assert first(attend(*fake, **moved(given, mode.from_tensor))).shape == want


@pytest.mark.parametrize("asked", list(ASKED))
def test_attend_in_a_batch_of_batches(asked: str) -> None:
    """`torch.vmap` over queries, over the memory, and over the mask: as one by one."""
    q, k, v = heads()
    given = ASKED[asked]
    for of, inputs in (("q", torch.randn(3, *q.shape)), ("k", torch.randn(3, *k.shape))):

        def one(x: Tensor, of: str = of) -> Tensor:
            return first(attend(x if of == "q" else q, x if of == "k" else k, v, **given))

        torch.testing.assert_close(torch.vmap(one)(inputs), torch.stack([one(x) for x in inputs]))
    for name in {"mask", "attention_mask"} & set(given):
        many = torch.rand(7, *given[name].shape) < 0.5
        many[2] = False

        def masked(rule: Tensor, name: str = name) -> Tensor:
            return first(attend(q, k, v, **{**given, name: rule}))

        torch.testing.assert_close(torch.vmap(masked)(many), torch.stack([masked(rule) for rule in many]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # by torch itself
def test_transforms_of_transforms() -> None:
    """Gradients of each of many masks, forward derivatives and Hessians, as autograd has them."""
    q, k, v = (tensor.double() for tensor in heads())
    rules = torch.rand(3, L, M) < 0.5

    def loss(q: Tensor, rule: Tensor) -> Tensor:
        return attend(q, k, v, attention_mask=rule, mask=MASK).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(q, rules)
    for rule, mine in zip(rules, found, strict=True):
        leaf = q.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(leaf, rule), leaf)
        torch.testing.assert_close(mine, want)
    tangent = torch.randn_like(q)
    _, slope = torch.func.jvp(lambda x: loss(x, rules[0]), (q,), (tangent,))
    torch.testing.assert_close(slope, (torch.func.grad(loss)(q, rules[0]) * tangent).sum())
    _, curve = torch.func.jvp(torch.func.grad(lambda x: loss(x, rules[0])), (q,), (tangent,))
    assert torch.isfinite(curve).all() and curve.any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer(options: dict) -> None:
    """Masks of many kinds through a whole layer, projected in the call and before, on every kind of tensor."""
    layer = make_layer(**options)
    x, memory, many = torch.randn(B, L, D), torch.randn(B, M, E), torch.rand(3, B, M) < 0.5
    many[1, 0] = False
    scores = {"scores": torch.randn(B, M)} if "score_bias" in options else {}

    def plain(mask: Tensor) -> Tensor:
        return layer(x, memory, mask=mask, attention_mask=RULE, **scores)

    def weights(mask: Tensor) -> Tensor:
        return layer(x, memory, mask=mask, return_weights=True, **scores)[1]

    def projected(mask: Tensor) -> Tensor:
        return layer(x, layer.project(memory, mask=mask, **scores))

    for way in (plain, weights, projected):
        torch.testing.assert_close(torch.vmap(way)(many), torch.stack([way(mask) for mask in many]))
    given = {"x": x, "memory": memory, "mask": MASK, "attention_mask": RULE, **scores}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        assert layer(**moved(given, mode.from_tensor)).shape == (B, L, D)
    assert layer.to("meta")(**moved(given, lambda tensor: tensor.to("meta"))).shape == (B, L, D)
