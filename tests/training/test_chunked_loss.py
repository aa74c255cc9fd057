"""The loss in chunks is the loss, with the same gradients, and its logits never stand whole."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

from mmattn import training
from mmattn.errors import ConditionError
from mmattn.training import TextBatch, losses
from mmattn.training.losses import has_chunks, output_head
from tests import tiny
from tests.training.small_run import Shapes

LENGTHS = (11, 7, 5)
#: What families do to their logits: a cap, scales of logits and of what the head is given, a bias.
CHANGED: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "gemma2": ({"final_logit_softcapping": 3.0}, 1.0, 3.0),
    "granite": ({"logits_scaling": 7.0}, 1 / 7, None),
    "cohere": ({"logit_scale": 0.3}, 0.3, None),
    "gptj": ({}, 1.0, None),
}


def attach(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = tiny.attach(tiny.make(family, **changes).to(dtype), layers=(1, 2))
    model.train()
    return model


def batch(memory: bool = True) -> TextBatch:
    """Padded texts, of which the second has a prompt of three tokens."""
    ids = tiny.text(3, LENGTHS[0])
    made = training.collate([ids[row, :length].tolist() for row, length in enumerate(LENGTHS)])
    labels = made.labels.clone()
    labels[1, :3] = -100
    return TextBatch(made.input_ids, made.attention_mask, labels, tiny.memory(3, lengths=[5, 0, 3]) if memory else None)


def step(model: Any, chunk_size: int | str | None) -> tuple[Tensor, int, dict[str, Tensor]]:
    model.zero_grad()
    loss, count = training.sum_nats(model, batch(), chunk_size)
    (loss / 7).backward()
    assert loss.isfinite()
    return loss.detach(), count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradient_vector(taken: tuple[Tensor, int, dict[str, Tensor]]) -> Tensor:
    return torch.cat([gradient.flatten().float() for gradient in taken[2].values()])


def assert_equal(got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float) -> None:
    tiny.assert_close(got[0], want[0], tolerance)
    assert got[1] == want[1] and got[2].keys() == want[2].keys() and want[2]
    for name, value in want[2].items():
        if value.norm() > 1e-4:  # some are rounding alone
            tiny.assert_close(got[2][name], value, tolerance)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_loss_and_its_gradients(family: str) -> None:
    """In chunks that do not divide the tokens, and in one."""
    model = attach(family)
    want = step(model, None)
    for chunk_size in (4, 1000):
        assert_equal(step(model, chunk_size), want, 2e-4)


@pytest.mark.parametrize("family", CHANGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_families_do_to_logits(family: str, dtype: torch.dtype) -> None:
    changes, scale, softcap = CHANGED[family]
    model = attach(family, dtype, **changes)
    if family == "gptj":
        nn.init.normal_(model.lm_head.bias)
    head = output_head(model)
    assert head.scale == pytest.approx(scale, rel=1e-6) and head.linear is model.get_output_embeddings()
    assert head.softcap == (None if softcap is None else pytest.approx(softcap, rel=1e-6))
    if dtype is torch.float32:
        assert_equal(step(model, 4), step(model, None), 2e-4)
        return
    # In half precision both are rounded, each in its own places: neither more than the other.
    chunks, whole = (gradient_vector(step(model, chunk_size)) for chunk_size in (4, None))
    model.float()
    exact = gradient_vector(step(model, None))
    assert (chunks - exact).norm() < 1.5 * (whole - exact).norm()


@pytest.mark.parametrize("on_a_device", [False, True])
def test_logits_never_stand_whole(monkeypatch: pytest.MonkeyPatch, on_a_device: bool) -> None:
    """No tensor is made that is larger than a chunk of logits; without chunks there is one.

    Invariant 215: the same where labels are on a device.
    """
    if on_a_device:
        monkeypatch.setattr(losses, "may_read", lambda tensor: False)
    model, tokens = attach(vocab_size=997), sum(length - 1 for length in LENGTHS) - 2
    training.sum_nats(model, batch(), 4)  # the head is checked once
    monkeypatch.setattr(losses, "AUTO_CHUNK", 4)
    for chunk_size, whole in ((4, False), ("auto", False), (None, True)):
        with Shapes() as shapes:
            step(model, chunk_size)
        largest = max(one.numel() for one in shapes.made if one.numel() != model.lm_head.weight.numel())
        assert (largest >= tokens * 997) == whole
        assert whole or largest <= 4 * 997


def test_texts_without_a_memory_or_anything_to_learn() -> None:
    """They teach nothing, as without chunks; in evaluation nothing is computed for gradients."""
    model = attach()
    loss, count = training.sum_nats(model, batch(memory=False), 4)
    assert not loss.requires_grad and count == 18
    tiny.assert_close(loss, training.sum_nats(model, batch(memory=False), None)[0].detach())
    nothing = TextBatch(torch.tensor([[5, 6, 7]]), None, torch.full((1, 3), -100), tiny.memory(1))
    loss, count = training.sum_nats(model, nothing, 4)
    loss.backward()
    assert (float(loss.detach()), count) == (0, 0)
    with torch.no_grad():
        tiny.assert_close(training.token_nats(model, batch(), 4), training.token_nats(model, batch(), None))
    host = tiny.make("llama")
    tiny.assert_close(
        training.mean_nats(host.requires_grad_(False), batch(memory=False), 4),
        training.mean_nats(host, batch(memory=False), None),
    )


def test_chunks_where_the_host_permits_them() -> None:
    """By "auto" a large vocabulary never stands whole; where the head is trained, it does."""
    model = attach()
    assert has_chunks(model)
    assert_equal(step(model, "auto"), step(model, None), 2e-4)
    model.get_output_embeddings().requires_grad_(True)
    assert not has_chunks(model)
    assert_equal(step(model, "auto"), step(model, None), 0)
    with pytest.raises(ConditionError, match="is trained"):
        step(model, 4)


class Doubled(nn.Linear):
    """A subclass, whose output is no plain product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def subclassed(host: Any) -> None:
    host.lm_head.__class__ = Doubled


def lora(host: Any) -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, host)
    host.requires_grad_(False)


def wrapped_forward(host: Any) -> None:
    own = host.lm_head.forward
    host.lm_head.forward = lambda x: own(x) * 2


def hook_of_accelerate(host: Any) -> None:
    class Twice(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    add_hook_to_module(host.lm_head, Twice())


def hook_of_the_host(host: Any) -> None:
    def change(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    host.register_forward_hook(change)


def squared_logits(host: Any) -> None:
    own = type(host).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(host, *args, **kwargs)
        out.logits = out.logits.square()
        return out

    host.forward = forward


def twice(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient * 2


#: What can hang on a head, or on its host, and change logits or gradients.
HANGING: dict[str, Any] = {
    "forward hook": lambda host: host.lm_head.register_forward_hook(lambda head, args, out: out * 2),
    "forward pre-hook": lambda host: host.lm_head.register_forward_pre_hook(lambda head, args: (args[0] * 2,)),
    "backward hook": lambda host: host.lm_head.register_full_backward_hook(
        lambda head, inputs, outputs: tuple(map(twice, inputs))
    ),
    "backward pre-hook": lambda host: host.lm_head.register_full_backward_pre_hook(
        lambda head, outputs: tuple(map(twice, outputs))
    ),
    "replaced forward": wrapped_forward,
    "replaced forward of the host": squared_logits,
    "another module": lambda host: setattr(host, "lm_head", nn.Sequential(host.lm_head, nn.Tanh())),
    "hook of accelerate": hook_of_accelerate,
    "hook of the host": hook_of_the_host,
    "subclass": subclassed,
    "parametrization": lambda host: nn.utils.parametrizations.weight_norm(host.lm_head),
    "LoRA": lora,
}


@pytest.mark.parametrize("hanging", HANGING)
@pytest.mark.parametrize("checked", [False, True], ids=["before", "after a first loss"])
def test_what_hangs_on_a_head_is_in_the_loss_and_its_gradients(hanging: str, checked: bool) -> None:
    """Invariant 152: by "auto" the logits stand whole; a chunk size is refused."""
    model = attach()
    if checked:
        step(model, 4)
    bare = gradient_vector(step(model, None))
    HANGING[hanging](model.host)
    assert_equal(step(model, "auto"), step(model, None), 0)
    if hanging != "parametrization":
        assert not torch.allclose(gradient_vector(step(model, None)), bare)
    with pytest.raises(ConditionError, match="no loss in chunks: .*Leave chunk_size"):
        step(model, 4)


def test_a_hook_of_all_modules() -> None:
    """Invariant 152."""
    model = attach()
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inputs, outputs: None)
    try:
        with pytest.raises(ConditionError, match="hooks"):
            step(model, 4)
    finally:
        handle.remove()
    assert_equal(step(model, 4), step(model, None), 2e-4)


def test_a_config_that_changes_after_a_first_loss() -> None:
    """Invariant 152."""
    model = attach("gemma2", final_logit_softcapping=3.0)
    step(model, 4)
    model.host.config.final_logit_softcapping = 1.0
    assert_equal(step(model, 4), step(model, None), 2e-4)


def test_a_head_that_accelerate_places() -> None:
    """Invariant 152: its hook moves inputs and outputs, and changes none."""
    host = dispatch_model(tiny.make("llama"), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert "forward" in vars(host.lm_head) or "forward" in vars(host)
    model = tiny.attach(host, layers=(1, 2)).train()
    assert has_chunks(model)
    assert_equal(step(model, 4), step(model, None), 2e-4)
