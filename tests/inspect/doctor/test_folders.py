"""`mmattn doctor DIR`: what it finds in a folder, what it finds with the host, and its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.inspect.doctor.run import random_batch
from tests import tiny, tiny_unets
from tests.adapters.chunked import chunks
from tests.inspect.doctor.test_looking import run


def save(folder: Path, model: Any, host: str = "host") -> Path:
    """A folder with an adapter, and beside it its host."""
    model.host.save_pretrained(folder / host)
    model.save_adapter(folder / "adapter")
    return folder / "adapter"


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = save(tmp_path, tiny.attach(tiny.make("llama")))
    code, out, _ = run(capsys, adapter, "-o", tmp_path / "report.html")
    assert code == 0 and "\nok    gates" in out and "padding" not in out
    assert "gates" in (tmp_path / "report.html").read_text()
    code, out, err = run(capsys, adapter, "--host", tmp_path / "host")
    assert code == 0, out + err
    for question in ("weights of the host", "each layer depends on the memory", "rows", "padding", "empty memory"):
        assert f"\nok    {question} " in out
    tiny.make("llama", seed=1).save_pretrained(tmp_path / "other")
    code, out, _ = run(capsys, adapter, "--host", tmp_path / "other")
    (bad,) = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert code == 1 and bad.startswith("FAIL  weights of the host ") and "another revision" in bad
    code, _, err = run(capsys, adapter, "--host", tmp_path / "absent")
    assert code == 2 and "no host of kind 'causal_lm' can be loaded from" in err and "absent" in err


def test_a_fresh_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = save(tmp_path, tiny.attach(tiny.make("llama"), opened=False))
    code, out, _ = run(capsys, adapter)
    assert code == 1 and "\nFAIL  gates" in out and "0.feed_forward_gate, 0.gate, 2.feed_forward_gate, 2.gate" in out


def test_a_unet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = save(tmp_path, tiny_unets.attach(tiny_unets.make()), "pipeline/unet")
    code, out, _ = run(capsys, adapter)
    assert code == 0 and "no gates; largest value weights 0 " in out
    for host in ("pipeline", "pipeline/unet"):
        code, out, err = run(capsys, adapter, "--host", tmp_path / host)
        assert code == 0, out + err
        assert "\nok    each layer depends on the memory " in out
    code, _, err = run(capsys, adapter, "--host", tmp_path)
    assert code == 2 and "no unet can be loaded from" in err


def test_a_folder_that_is_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = save(tmp_path, tiny.attach(tiny.make("llama")))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    code, out, _ = run(capsys, adapter, "--host", tmp_path / "host")
    assert code == 1 and out.startswith("FAIL  files") and out.count("\n") == 1


@pytest.mark.parametrize("kind", ["latest", "scores", "chunked", "sdxl"])
def test_a_random_batch_fits_any_adapter(kind: str) -> None:
    lm = tiny.make("llama")
    made = {
        "latest": lambda: tiny.attach(lm, visible_segments="latest", media_token=3),
        "scores": lambda: tiny.attach(lm, score_bias=True),
        "chunked": lambda: chunks.attach(lm),
        "sdxl": lambda: tiny_unets.attach(tiny_unets.make("sdxl")),
    }
    model: Any = made[kind]()
    batch = random_batch(model)
    with torch.no_grad():
        out = model(**batch)[0]
    assert out.isfinite().all()
    with torch.no_grad(), model.disable_adapter():
        assert tiny.differs(out, model(**batch)[0], 1e-3)
    report = mmattn.doctor(model, batch)
    assert report.ok, report
    assert isinstance(batch["memory"]["default"], mmattn.Memory)
