"""`accelerate launch` of a loop of one's own: two processes end where one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from transformers import default_data_collator

import mmattn
from mmattn import training
from mmattn.errors import ConditionError
from tests import tiny
from tests.interop import tokenised

ROOT = Path(__file__).resolve().parents[2]
# With --cpu accelerate starts several processes by MPI only; the script itself asks for the CPU.
OPTIONS = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
OPTIONS += ["--mixed_precision", "no", "--dynamo_backend", "no"]


def in_this_process() -> dict[str, torch.Tensor]:
    """The weights that a plain loop over the same rows ends with."""
    model = tiny.attach(tiny.make("llama"))
    optimizer = torch.optim.AdamW(training.parameter_groups(model, 1e-2))
    rows, collator = tokenised.rows(12, lengths=False), training.MemoryCollator(default_data_collator)
    for _ in range(2):
        for start in (0, 6):
            optimizer.zero_grad()
            model(**collator(rows[start : start + 6])).loss.backward()
            optimizer.step()
    return tokenised.weights(model)


@pytest.mark.slow
def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    script = Path(__file__).with_name("launched.py")
    words = [sys.executable, "-m", "accelerate.commands.launch", *OPTIONS, str(script), str(tmp_path / "run")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "processes 2" in done.stdout
    before, one = tokenised.weights(tiny.attach(tiny.make("llama"))), in_this_process()
    # As `save_pretrained` wrote it, and as `save_state` did.
    for folder in (tmp_path / "run", tmp_path / "run" / "state"):
        two = tokenised.weights(mmattn.load(tiny.make("llama"), folder))
        for name, value in two.items():
            tiny.assert_close(value - before[name], one[name] - before[name], 1e-3)


@pytest.mark.parametrize("verb", ["cpu_offload", "disk_offload"])
def test_the_host_is_offloaded_and_the_adapted_model_refused(verb: str, tmp_path: Path) -> None:
    """Invariant 159: refused before a weight is moved, or accelerate would find none to bring back."""
    folder = [str(tmp_path)] if verb == "disk_offload" else []
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(2), tiny.memory(2)
    before = set(vars(model))
    with torch.no_grad():
        want = model(ids, memory=memory).logits
        with pytest.raises(ConditionError, match=r"give model\.host to cpu_offload"):
            getattr(accelerate, verb)(model, *folder, execution_device="cpu")
        assert set(vars(model)) == before and not any(one.is_meta for one in model.parameters())
        assert torch.equal(model(ids, memory=memory).logits, want)
        getattr(accelerate, verb)(model.host, *(f"{one}/host" for one in folder), execution_device="cpu")
        assert all(one.is_meta for one in model.host.parameters())
        assert torch.equal(model(ids, memory=memory).logits, want)
        other = tiny.attach(tiny.make("llama"))
        accelerate.cpu_offload_with_hook(other, "cpu")  # moves the whole model, as diffusers' pipelines ask
        assert torch.equal(other(ids, memory=memory).logits, want)
