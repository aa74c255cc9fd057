"""Hosts sharded by FSDP2 learn what whole ones do, and nobody waits for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import mmattn
from mmattn import training
from mmattn.data.sampling import split_between_processes
from mmattn.errors import ConfigError
from tests import tiny
from tests.tiny import assert_close
from tests.training import small_run


def assert_same_run(found: Path, wanted: Path) -> None:
    """What several processes with parts of a host have learned is what one process has."""
    assert small_run.losses(found) == pytest.approx(small_run.losses(wanted), rel=1e-5)
    here, there = (
        training.checkpoints.load_checkpoint(at / "checkpoints" / "step-00000005")[0] for at in (wanted, found)
    )
    assert set(here) == set(there)
    for name, value in here.items():
        assert_close(there[name], value, 1e-2)
    config = json.loads((found / "adapter" / "adapter_config.json").read_text())
    assert config["host"]["fingerprint"] is None, "no process has all weights to tell the host by"


@pytest.mark.slow
def test_a_host_in_pieces_on_two_processes_is_one(tmp_path: Path) -> None:
    """Sharded by FSDP2: a process without a memory, a row, or as many held-out rows keeps no other waiting."""
    plain = {"dropout": 0.0, "max_steps": 5, "batch_size": 3, "gradient_accumulation_steps": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    small_run.run(one, **plain)
    found = small_run.start(two, processes=2, shard=True, **plain)
    assert found.returncode == 0, found.stderr
    steps = list(islice(training.RowBatches(small_run.rows(), 3, seed=3).epoch(0), 5))
    pieces = [[split_between_processes(batch, rank, 2, 2) for rank in (0, 1)] for batch in steps]
    assert any([] in parts for of_both in pieces for parts in of_both), "no row"
    learns = [[any(row.has_memory for row in sum(parts, [])) for parts in of_both] for of_both in pieces]
    assert [True, False] in learns or [False, True] in learns, "no memory"
    assert_same_run(two, one)


@pytest.mark.slow
def test_a_tensor_parallel_host_on_two_processes_is_one(tmp_path: Path) -> None:
    """Both compute each layer together, of the same rows: what is learned is what one process learns, in both alike."""
    plain = {"dropout": 0.0, "max_steps": 5, "batch_size": 3, "gradient_accumulation_steps": 2}
    one, two, host = tmp_path / "one", tmp_path / "two", tmp_path / "host"
    tiny.make("llama").save_pretrained(host)
    small_run.run(one, **plain)
    found = small_run.start(two, processes=2, tensor_parallel=str(host), **plain)
    assert found.returncode == 0, found.stderr
    assert_same_run(two, one)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process only."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_trained_parameters_in_pieces_are_refused(tmp_path: Path) -> None:
    host = training.add_lora(tiny.make("llama"), 2)
    fully_shard(host)
    with pytest.raises(ConfigError, match="42 trained parameters are sharded .* shard the frozen host first, then put"):
        small_run.run(tmp_path, model=tiny.attach(host))


@pytest.mark.usefixtures("alone")
def test_a_host_without_embedded_text_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"host": nn.Linear(5, 3).requires_grad_(False), "adapters": nn.Linear(3, 2)})
    fully_shard(model["host"])
    with pytest.raises(ConfigError, match="ModuleDict has no input embeddings"):
        small_run.run(tmp_path, model=model)


SHARDABLE = {
    "gated": mmattn.GatedAdapter(memory_dim=11, every=1),
    "joined": mmattn.adapters.JoinedAdapter(memory_dim=11),
    "inserted": mmattn.adapters.InsertedAdapter(memory_dim=11),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", SHARDABLE)
def test_an_adapted_model_is_sharded_as_a_whole(kind: str) -> None:
    """Invariant 203. FSDP2 takes every parameter of an adapter; values and a step are those of the whole model."""
    whole, pieces = (tiny.open_gates(mmattn.attach(tiny.make("llama"), SHARDABLE[kind])) for _ in range(2))
    pieces.adapters.load_state_dict(whole.adapters.state_dict())
    fully_shard(pieces)
    ids, memory = torch.arange(3, 10)[None], torch.randn(1, 5, 11)
    for model in (whole, pieces):
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01)
        model.train()(ids, labels=ids, memory=memory).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = whole.eval()(ids, memory=memory).logits
    assert_close(pieces.eval()(ids, memory=memory).logits, wanted, 1e-5)
    assert not torch.equal(wanted, whole(ids).logits)
