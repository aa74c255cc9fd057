"""`attach_check` from a config alone, beside `attach` with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import LlamaConfig

import mmattn
from mmattn.errors import AdapterFileError, AttachError
from mmattn.hosts import attach_check
from tests.cli.running import call
from tests.families.building import tiny_config, tiny_model

HOSTS = [
    ("llama", "AutoModelForCausalLM", None),
    ("gemma3", "AutoModelForImageTextToText", None),
    ("deepseek_v4", "AutoModelForCausalLM", None),
    ("t5", "AutoModelForSeq2SeqLM", "encoder"),
    ("whisper", "AutoModelForSpeechSeq2Seq", "decoder"),
    ("bert", "AutoModelForSequenceClassification", None),
    ("vit", "AutoModelForImageClassification", None),
]


@pytest.mark.parametrize(("family", "auto", "where"), HOSTS)
def test_it_tells_what_attach_does(family: str, auto: str, where: str | None) -> None:
    host = tiny_model(family, getattr(transformers, auto))
    config = host.config
    config.architectures = [type(host).__name__]
    report = attach_check(config, memory_dim=13, every=2, where=where)
    assert report.ok and report.undecided is None
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=13, every=2, where=where))
    adapter = model.adapter("default")
    assert (report.host, report.kind, report.layers) == (type(host).__name__, model.kind, adapter.layers)
    trained, whole = model.trainable_parameters()
    assert report.parameters == (trained, whole - trained)
    paths = {site.module.rpartition(".")[0] for site in model.sites("after")}
    assert {path for _, path, _, _ in report.stacks} == paths


@pytest.mark.parametrize(("family", "why"), [("xlnet", "no adapter can be put on it"), ("reformer", "reversible")])
def test_it_refuses_what_attach_refuses(family: str, why: str) -> None:
    report = attach_check(tiny_config(family), every=1)
    assert not report.ok and why in str(report)
    with pytest.raises(AttachError, match=why):
        mmattn.attach(tiny_model(family, transformers.AutoModelForCausalLM), mmattn.GatedAdapter(memory_dim=5, every=1))


def test_what_depends_on_values_is_said() -> None:
    """Which experts are asked, Jet MoE reads off the tensors themselves."""
    report = attach_check(tiny_config("jetmoe"), every=2)
    assert report.ok and report.undecided is not None and "undecided without weights" in str(report)


def test_a_model_of_any_size_takes_no_memory() -> None:
    config = LlamaConfig(hidden_size=65536, intermediate_size=212992, num_hidden_layers=2, num_attention_heads=128)
    report = attach_check(config)
    assert report.parameters[1] > 100e9 and report.layers == (1,)


def test_what_is_no_model() -> None:
    config = LlamaConfig(num_attention_heads=4, hidden_size=32)
    config.architectures = ["LlamaForCausalLM"]
    config.hidden_act = "nothing"
    with pytest.raises(AdapterFileError, match="transformers makes no model of this LlamaConfig.*nothing"):
        attach_check(config)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    code, out, _ = call(capsys, "attach-check", tmp_path, "--every", 2, "--memory-dim", 13)
    assert code == 0 and "model.layers, 5 of width 64" in out and "at layers [1, 3]" in out
    code, out, _ = call(capsys, "attach-check", tmp_path, "--where", "encoder")
    assert code == 1 and "where='encoder'" in out
    code, _, said = call(capsys, "attach-check", tmp_path / "nothing")
    assert code == 2 and said.count("\n") == 1 and "is no config of transformers" in said
