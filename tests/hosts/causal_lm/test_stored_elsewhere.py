"""Language models whose weights are brought in while a layer runs: group offloading of diffusers, 8-bit storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting

import mmattn
from mmattn import training
from mmattn.errors import AttachError, ConditionError
from tests import tiny
from tests.tiny import assert_close

CPU = torch.device("cpu")


def store(host: Any, way: str, folder: Path) -> Any:
    """Keep its weights on the disk, or in 8 bits, while no layer runs."""
    if way == "float8":
        apply_layerwise_casting(host, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=("norm",))
    else:
        apply_group_offloading(host, CPU, offload_type=way, offload_to_disk_path=str(folder))
    return host


def test_no_loss_in_chunks_of_a_head_that_is_brought_in(tmp_path: Path) -> None:
    """Invariant 155: the gradient of such a loss multiplies the weight itself."""
    batch = training.collate([[5, 6, 7, 8]], tiny.memory(1))
    for way in ("leaf_level", "float8"):
        model = tiny.attach(store(tiny.make("llama"), way, tmp_path))
        with pytest.raises(ConditionError, match="no loss in chunks: "):
            training.token_nats(model, batch, chunk_size=2)
        with torch.no_grad():
            assert torch.equal(training.token_nats(model, batch, "auto"), training.token_nats(model, batch, None))
    hooked = tiny.attach(tiny.make("llama"))
    hooked.host.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ConditionError, match="hooks"):
        training.token_nats(hooked, batch, chunk_size=2)


@torch.no_grad()
def test_packed_rows_of_a_host_in_8_bits(tmp_path: Path) -> None:
    """Invariant 155: the mask that keeps documents of MPT apart has the dtype in which it computes."""
    model = tiny.attach(store(tiny.make("mpt"), "float8", tmp_path))
    ids, memory = tiny.text(1), tiny.memory(2)
    packed = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), use_cache=False, memory=memory).logits
    parts = [
        model(ids[:, part], memory=memory[torch.tensor([n])]).logits for n, part in enumerate((slice(3), slice(3, 7)))
    ]
    assert packed.isfinite().all()
    assert_close(packed, torch.cat(parts, 1))


@pytest.mark.parametrize(
    "adapter",
    [mmattn.adapters.InsertedAdapter(tiny.MEMORY_DIM), mmattn.adapters.PrefixAdapter(3)],
    ids=lambda x: x.kind,
)
def test_frequencies_on_the_disk(adapter: Any, tmp_path: Path) -> None:
    """Invariant 155: they are read at attach, and are not there."""
    host = store(tiny.make("llama"), "leaf_level", tmp_path)
    with pytest.raises(AttachError, match="leave offload_to_disk_path out, or attach before"):
        mmattn.attach(host, adapter)
    assert "_mmattn" not in vars(host)
    ids = tiny.text(2)
    with torch.no_grad():
        assert_close(host(ids).logits, tiny.own(ids))
