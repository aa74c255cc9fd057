"""Diffusion hosts as people load them: `from_pretrained(dtype=half)`, which keeps some weights in float32."""

from __future__ import annotations

import pytest
import torch

from mmattn.errors import AttachError
from mmattn.testing.case import cast
from tests import tiny, tiny_transformers
from tests.transformer_sizes import NAMES

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 2
#: diffusers itself makes none from this config.
FAMILIES = ["stable", *(family for family in NAMES if family != "Transformer2DModel")]
FAST = (
    "stable",
    "WanTransformer3DModel",
    "SD3Transformer2DModel",
    "PixArtTransformer2DModel",
    "QwenImageTransformer2DModel",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_hosts_in_half(family, dtype, tmp_path):
    """Invariant 129: a host that can be attached to in float32 can be in half, and answers with and without memory."""
    whole = tiny_transformers.make(family)
    whole.save_pretrained(tmp_path)
    host = type(whole).from_pretrained(tmp_path, dtype=dtype).eval()
    host.requires_grad_(False)  # torch chooses between matrix products by it, even without gradients
    try:
        tiny_transformers.attach(whole)
    except AttachError:
        with pytest.raises(AttachError):
            tiny_transformers.attach(host)
        return
    dtypes = {name: one.dtype for name, one in host.named_parameters()}
    model = tiny_transformers.attach(host)
    adapter = model.adapter("default")
    with torch.no_grad():
        for layer in adapter.layers:
            adapter.attention(layer).v_proj.weight.mul_(32)  # well above the rounding of halves
    assert {name: one.dtype for name, one in host.named_parameters()} == dtypes
    batch = tiny_transformers.given(model, ROWS)
    batch = cast(batch, dtype) if family == "stable" else batch
    alone, out = tiny_transformers.run(model, batch), tiny_transformers.run(model, batch, memory=tiny.memory(ROWS))
    assert out.dtype == dtype and out.isfinite().all() and tiny.differs(out, alone, 2e-3)
    assert torch.equal(tiny_transformers.run(model, batch, memory=tiny.memory(ROWS), adapter_scale=0.0), alone)
    model.unload()
    assert torch.equal(tiny_transformers.run(host, batch), alone)


def test_half_is_torchs():
    """`model.half()` casts an adapted host."""
    model = tiny_transformers.attach(tiny_transformers.make("FluxTransformer2DModel"))
    assert model.half() is model and model.host.dtype == torch.float16
