"""Encoders and encoder-decoders as hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    CLIPConfig,
    CLIPModel,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    GenerationConfig,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConditionError, ConfigError, ShapeError
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
    model = tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(**SETTINGS)))
    with pytest.raises(ShapeError, match="2 rows and the memory of adapter 'default' has 3"):
        model(input_ids=IDS, memory=tiny.memory(3))
    with pytest.raises(ConfigError, match="memroy=.*did you mean memory="):
        model(input_ids=IDS, memroy=tiny.memory(2))
    layers = host.bert.encoder.layer
    layers[2] = PassedOn()
    with pytest.raises(ConditionError, match=r"layers \[2\] of BertForSequenceClassification were replaced"):
        model(input_ids=IDS, memory=tiny.memory(2))


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


# Hosts with an encoder and a decoder: which part sees a memory, and what is refused there


READ = torch.tensor([[5, 9, 3, 7, 2], [4, 4, 6, 12, 9]])
WRITTEN = torch.tensor([[8, 11, 6], [3, 20, 2]])


def adapted(where: str | None = None, family: str = "t5") -> Any:
    model = mmattn.attach(tiny_model(family, AutoModelForSeq2SeqLM), mmattn.GatedAdapter(**SETTINGS, where=where))
    return tiny.open_gates(model)


@torch.no_grad()
def logits(model: Any, **given: Any) -> torch.Tensor:
    answer: torch.Tensor = model(input_ids=READ, decoder_input_ids=WRITTEN, **given).logits
    return answer


@pytest.mark.parametrize("where", ["decoder", "encoder"])
def test_the_part_that_is_named_sees_the_memory(where: str, tmp_path: Any) -> None:
    """Invariant 93: also after loading."""
    model = adapted(where)
    with torch.no_grad():
        read = model.host.get_encoder()(input_ids=READ).last_hidden_state
        with model.condition(tiny.memory(2)):
            seen = model.host.get_encoder()(input_ids=READ).last_hidden_state
    assert torch.equal(read, seen) == (where == "decoder")
    assert tiny.differs(logits(model, memory=tiny.memory(2)), logits(model))
    assert [site.part for site in model.adapter("default").sites] == [where] * 2
    assert model.adapter("default").layers == ((0, 2) if where == "decoder" else (4, 6))
    model.save_adapter(tmp_path)
    again = mmattn.load(tiny_model("t5", AutoModelForSeq2SeqLM), tmp_path)
    assert torch.equal(logits(again, memory=tiny.memory(2)), logits(model, memory=tiny.memory(2)))
    with pytest.raises(AdapterFileError, match=f"where='{where}' needs a host with an encoder and a decoder"):
        mmattn.load(tiny.make("llama"), tmp_path)


@pytest.mark.parametrize("position", ["after", "before"])
def test_the_decoder_is_the_default(position: str) -> None:
    """Invariant 93: without `where` no block is in the encoder."""
    model = tiny_model("t5", AutoModelForSeq2SeqLM)
    sites = (
        mmattn.attach(model, mmattn.GatedAdapter(memory_dim=13, every=1, position=position)).adapter("default").sites
    )
    assert {site.part for site in sites} == {"decoder"}


def test_both_parts_with_a_memory_of_their_own() -> None:
    model = adapted()
    mmattn.attach(model, mmattn.GatedAdapter(**SETTINGS, where="encoder"), "sounds")
    tiny.open_gates(model)
    both = logits(model, memory={"default": tiny.memory(2, seed=1), "sounds": tiny.memory(2, seed=2)})
    assert tiny.differs(both, logits(model, memory={"default": tiny.memory(2, seed=1)}))
    assert tiny.differs(both, logits(model, memory={"sounds": tiny.memory(2, seed=2)}))
    made = {"max_new_tokens": 4, "do_sample": False, "num_beams": 3}
    texts = model.generate(READ, memory={"default": tiny.memory(2, seed=1), "sounds": tiny.memory(2, seed=2)}, **made)
    for row in range(2):
        own = {"default": tiny.memory(2, seed=1)[row], "sounds": tiny.memory(2, seed=2)[row]}
        assert torch.equal(model.generate(READ[row : row + 1], memory=own, **made)[0], texts[row])


@pytest.mark.parametrize(
    ("family", "auto"), [("whisper", AutoModelForSpeechSeq2Seq), ("seamless_m4t", AutoModelForSeq2SeqLM)]
)
def test_a_generate_of_the_hosts_own(family: str, auto: Any) -> None:
    """Whisper's repeats its sounds for each text before beams do, SeamlessM4T's gives rows to that of transformers."""
    host = tiny_model(family, auto)
    model = tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(**SETTINGS)))
    inputs = torch.randn(2, 16, 2 * host.config.max_source_positions) if family == "whisper" else READ
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "num_beams": 2, "num_return_sequences": 2, "do_sample": False}
    texts = model.generate(inputs, memory=tiny.memory(2), **settings)
    for row in range(2):
        alone = model.generate(inputs[row : row + 1], memory=tiny.memory(2)[row], **settings)
        assert torch.equal(alone, texts[2 * row : 2 * row + 2])


def long_whisper(where: str | None = None) -> Any:
    """One that writes recordings of more than a segment, of which the rows end at different times."""
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = WhisperConfig(
        vocab_size=120, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=50,
        max_target_positions=40, decoder_start_token_id=1, pad_token_id=5, bos_token_id=2, eos_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None, **sizes,
    )  # fmt: skip
    host: Any = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.mul_(3)
    host.generation_config = GenerationConfig(
        decoder_start_token_id=1, pad_token_id=5, eos_token_id=2, no_timestamps_token_id=60, max_length=None,
        begin_suppress_tokens=[], suppress_tokens=[],
    )  # fmt: skip
    host.generation_config.is_multilingual, host.generation_config.max_initial_timestamp_index = False, None
    host.generation_config.prev_sot_token_id = 3
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, every=1, num_heads=2, where=where))
    return tiny.open_gates(model, 2.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("where", ["decoder", "encoder"])
@pytest.mark.parametrize("ways", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_recordings_that_are_left_are_refused(where: str, ways: dict[str, Any]) -> None:
    """Invariant 118: recordings end at different times; each alone is written with its memory."""
    model, frames = long_whisper(where), (110, 260)
    sounds = torch.randn(2, 8, 260, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(260) < torch.tensor(frames)[:, None]).long()
    options = {"return_timestamps": True, "max_new_tokens": 12, "return_segments": True} | ways

    def written(rows: list[int], length: int, seed: int = 1, **more: Any) -> Any:
        inputs = {"input_features": sounds[rows, :, :length], "attention_mask": mask[rows, :length]}
        return model.generate(**inputs, memory=tiny.memory(len(rows), seed=seed), **options, **more)["segments"]

    with pytest.raises((ConditionError, ShapeError), match="one row at a time"):
        written([0, 1], 260)
    with pytest.raises(ConditionError, match="row by row"):
        written([0, 1], 260, cache_implementation="static")
    texts = [[t for one in written([1], 260, seed)[0] for t in one["tokens"].tolist()] for seed in (1, 2)]
    assert texts[0] != texts[1]


class Halves(T5ForConditionalGeneration):
    """A host whose `generate` goes through its rows one by one."""

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return [super(Halves, self).generate(row[None], **kwargs) for row in input_ids]


@pytest.mark.parametrize("ways", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("where", ["decoder", "encoder"])
def test_rows_that_are_left_and_not_known_are_refused(ways: dict[str, Any], where: str) -> None:
    """Invariant 118: never the memory of another row, where rows and beams happen to be as many."""
    host = tiny_model("t5", AutoModelForSeq2SeqLM)
    host.__class__ = Halves
    model = tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(**SETTINGS, where=where)))
    refused = (ConditionError, ShapeError) if where == "encoder" else ConditionError
    with pytest.raises(refused, match="one row at a time|give one row of memory"):
        model.generate(READ, memory=tiny.memory(2), max_new_tokens=2, **ways)
    assert len(model.generate(READ[:1], memory=tiny.memory(1), max_new_tokens=2, **ways)) == 1


@torch.no_grad()
def test_outputs_of_an_encoder_belong_to_a_memory() -> None:
    """Invariants 94, 120."""
    model, seen = adapted("encoder"), tiny.memory(2, seed=2)
    encoder, wanted = model.host.get_encoder(), logits(model, memory=seen)
    decoder = adapted("decoder")
    read = (decoder.host.get_encoder()(input_ids=READ)[0],)
    found = decoder(encoder_outputs=read, decoder_input_ids=WRITTEN, memory=seen).logits
    assert torch.equal(found, logits(decoder, memory=seen)), "what was encoded before serves adapters of the decoder"

    def answer(states: Any, **given: Any) -> torch.Tensor:
        found: torch.Tensor = model(encoder_outputs=(states,), decoder_input_ids=WRITTEN, **given).logits
        return found

    blind = encoder(input_ids=READ)[0]
    assert torch.equal(answer(blind), logits(model))
    with model.disable_adapter():
        assert torch.equal(answer(blind, memory=seen), logits(model))
    with model.condition(tiny.memory(2, seed=1)):
        other = encoder(input_ids=READ)[0]
    with model.condition(seen, adapter_scale=0.5):
        weak = encoder(input_ids=READ)[0]
    with model.condition(seen):
        states = encoder(input_ids=READ)[0]
        with model.disable_adapter():
            off = encoder(input_ids=READ)[0]
        for wrong in (blind, other, weak, off, states.clone()):
            with pytest.raises(ConditionError, match=r"without the memory of \['default'\] as it is in this call"):
                answer(wrong)
            with pytest.raises(ConditionError, match="without the memory"):
                model.generate(encoder_outputs=(wrong,), max_new_tokens=2)
        assert torch.equal(answer(states), wanted)
        beams = {"max_new_tokens": 3, "num_beams": 3, "do_sample": False}
        made = model.generate(encoder_outputs=BaseModelOutput(states), **beams)
        assert torch.equal(made, model.generate(READ, **beams))
    assert torch.equal(answer(states, memory=seen), wanted), "the same memory in another call"
    seen.tokens.mul_(2)
    with pytest.raises(ConditionError, match="as it is in this call"):
        answer(states, memory=seen)


def test_calls_that_are_refused() -> None:
    model = adapted()
    for more in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ShapeError, match="2 rows .*'default' has 3"):
            model.generate(READ, memory=tiny.memory(3), max_new_tokens=2, **more)
    with pytest.raises(ConditionError, match="generate_batch"):
        model.generate_batch([[1, 2]], memory=tiny.memory(1))


@torch.no_grad()
def test_labels_that_are_classes() -> None:
    """Invariant 122: labels of a head for classes are no text, whose length would be asked."""
    host = tiny_model("bart", AutoModelForSequenceClassification)
    host.config.eos_token_id = 2
    ids = torch.tensor([[5, 9, 3, 2], [4, 6, 8, 2]])
    labels, memory = torch.tensor([0, 1]), torch.randn(2, 5, 13)
    want = host(ids, labels=labels).loss
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=13, every=1))
    assert torch.equal(model(ids, labels=labels, memory=memory).loss, want)
