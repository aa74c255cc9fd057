"""Hosts that read and do not write: texts, pictures and sounds, classified or embedded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
)

import mmattn
from mmattn.errors import AttachError, ConditionError, ConfigError, ShapeError
from tests import tiny
from tests.families.building import MEMORY_DIM, tiny_model

SETTINGS: dict[str, Any] = {"memory_dim": MEMORY_DIM, "layers": (0, 2), "num_heads": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
CLIP: dict[str, Any] = {
    "text_config": SIZES | {"vocab_size": 101, "eos_token_id": 2, "max_position_embeddings": 16, "projection_dim": 24},
    "vision_config": SIZES | {"image_size": 32, "patch_size": 8, "projection_dim": 24},
    "projection_dim": 24,
}
IDS = torch.tensor([[5, 9, 2], [4, 6, 2]])
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class PassedOn(torch.nn.Module):
    """A layer that changes nothing."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def clip() -> CLIPModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIPModel(CLIPConfig(**CLIP)).eval()


@pytest.mark.parametrize("part", ["text", "vision"])
def test_a_model_of_two_parts_is_told_which(part: str) -> None:
    with pytest.raises(AttachError, match=r"text_model.encoder.layers.*vision_model.encoder.layers.*path="):
        mmattn.attach(clip(), mmattn.GatedAdapter(**SETTINGS))
    model = mmattn.attach(clip(), mmattn.GatedAdapter(**SETTINGS), path=f"{part}_model.encoder.layers")
    tiny.open_gates(model)
    given = {"input_ids": IDS, "pixel_values": PICTURES}
    with torch.no_grad():
        alone, seeing = model(**given), model(**given, memory=tiny.memory(2))
    assert torch.equal(alone.text_embeds, seeing.text_embeds) == (part == "vision")
    assert torch.equal(alone.image_embeds, seeing.image_embeds) == (part == "text")


def test_what_is_refused() -> None:
    host = tiny_model("bert", AutoModelForSequenceClassification)
    with pytest.raises(AttachError, match="token by token.*BertForSequenceClassification"):
        mmattn.attach(host, mmattn.ChunkedAdapter(**SETTINGS, chunk_size=3))
    model = tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(**SETTINGS)))
    with pytest.raises(ShapeError, match="2 rows and the memory of adapter 'default' has 3"):
        model(input_ids=IDS, memory=tiny.memory(3))
    with pytest.raises(ConfigError, match="memroy=.*did you mean memory="):
        model(input_ids=IDS, memroy=tiny.memory(2))
    layers = host.bert.encoder.layer
    layers[2] = PassedOn()
    with pytest.raises(ConditionError, match=r"layers \[2\] of BertForSequenceClassification were replaced"):
        model(input_ids=IDS, memory=tiny.memory(2))


@pytest.mark.parametrize("family", ["convnext", "resnet"])
def test_hosts_of_maps_are_refused(family: str) -> None:
    with pytest.raises(AttachError, match=r"\(b, l, \d+\)"):
        mmattn.attach(tiny_model(family, AutoModelForImageClassification), mmattn.GatedAdapter(**SETTINGS))


def whisper() -> Any:
    """A host that classifies sounds, with an open adapter at every layer."""
    host = tiny_model("whisper", AutoModelForAudioClassification)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, every=1, num_heads=2))
    sounds = torch.randn(2, 16, 2 * host.config.max_source_positions, generator=torch.Generator().manual_seed(1))
    return host, tiny.open_gates(model), sounds


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_outputs_of_the_layers_are_refused_unless_the_memory_is_in_them(training: bool) -> None:
    """Invariant 148."""
    host, model, sounds = whisper()
    host.train(training)
    blind, wanted = host.encoder(sounds), model(sounds, memory=tiny.memory(2)).logits
    assert not torch.allclose(model(sounds).logits, wanted)
    for given in (blind, (blind.last_hidden_state,)):
        with pytest.raises(
            ConditionError,
            match=r"did not reach layers \[0, 1, 2, 3\].*did not run: give their inputs, not their outputs",
        ):
            model(encoder_outputs=given, memory=tiny.memory(2))
        with pytest.raises(ConditionError, match="did not run"), model.condition(tiny.memory(2)):
            host(encoder_outputs=given)
    assert torch.equal(model(encoder_outputs=blind).logits, model(sounds).logits)
    with model.condition(tiny.memory(2)):
        seeing = host.encoder(sounds)
        assert torch.equal(host(encoder_outputs=seeing).logits, wanted)
    with pytest.raises(ConditionError, match="did not run"):
        model(encoder_outputs=seeing, memory=tiny.memory(2, seed=1))


def test_layers_that_training_drops_need_not_run() -> None:
    """Invariant 148."""
    host, model, sounds = whisper()
    host.encoder.layerdrop = host.config.encoder_layerdrop = 1.0
    assert model.train()(sounds, memory=tiny.memory(2)).logits.isfinite().all()


@torch.no_grad()
def test_embeddings_that_stand_for_a_part_are_refused_beside_a_memory_for_it() -> None:
    """Invariant 148: CLIPSeg runs no text where it is given embeddings of one."""
    torch.manual_seed(0)
    host = CLIPSegForImageSegmentation(CLIPSegConfig(**CLIP, extract_layers=[0, 1, 2], reduce_dim=8)).eval()
    path = "clip.text_model.encoder.layers"
    model = tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(**SETTINGS), path=path))
    embeddings = torch.randn(2, 24)
    bare = model(pixel_values=PICTURES, input_ids=IDS).logits
    assert not torch.allclose(model(pixel_values=PICTURES, input_ids=IDS, memory=tiny.memory(2)).logits, bare)
    with pytest.raises(ConditionError, match=r"did not reach layers \[0, 2\] of CLIPSegForImageSegmentation"):
        model(pixel_values=PICTURES, conditional_embeddings=embeddings, memory=tiny.memory(2))
