"""Prompts and examples to pictures: the shipped adapter by its folder, in batches, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops

import mmattn
from mmattn.encoders import StyleEncoder
from mmattn.errors import AdapterFileError, ConfigError, ImageError, TextError
from tests.cli.running import call

SLANTED, BOLD = (str(Path("assets") / "digits" / f"{name}.png") for name in ("slanted", "bold"))


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmattn.pipeline("assets/diffusion/adapter")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def apart(a: Image.Image, b: Image.Image) -> int:
    """The largest difference of two grey pictures, of 255."""
    return int(ImageChops.difference(a, b).getextrema()[1])


def ink(picture: Image.Image) -> float:
    return sum(255 - value for value in picture.tobytes()) / 255 / len(picture.tobytes())


def test_a_picture_is_what_the_models_draw_in_single_steps(pipe: Any) -> None:
    drawn = pipe("a seven", SLANTED, num_inference_steps=3, guidance_scale=1.5, generator=seeded())
    memory = pipe.encoder(SLANTED)
    (states, mask), scheduler = pipe.host.prompts(["a seven"]), pipe.host.sampler(3)
    x = torch.randn(1, 1, 16, 16, generator=seeded())
    with torch.no_grad():
        for time in scheduler.timesteps:
            plain = pipe.model(x, time, states, text_mask=torch.zeros_like(mask)).sample
            found = plain + 1.5 * (pipe.model(x, time, states, text_mask=mask, memory=memory).sample - plain)
            x = scheduler.step(found, time, x, use_clipped_model_output=True).prev_sample
    grey = Image.frombytes("L", (16, 16), bytes((127.5 * (1 - x.clamp(-1, 1))).round().byte().flatten().tolist()))
    assert drawn.size == (16, 16) and apart(drawn, grey) <= 1


def test_prompts_of_a_batch_have_their_own_examples(pipe: Any) -> None:
    given = {"num_inference_steps": 4}
    first, second = pipe(["a three", "a four"], [SLANTED, BOLD], generator=seeded(), **given)
    assert apart(first, pipe("a three", SLANTED, generator=seeded(), **given)) <= 1
    assert apart(first, pipe("a three", BOLD, generator=seeded(), **given)) > 20
    same, other = pipe(["a three", "a four"], BOLD, generator=seeded(), **given)
    assert apart(other, second) <= 1 and apart(same, first) > 20, "one example is for all prompts"


def test_an_example_is_followed_as_far_as_asked(pipe: Any) -> None:
    digits = [f"a {number}" for number in range(10)]
    plain, none, bold = (
        pipe(digits, example, adapter_scale=scale, num_inference_steps=6, generator=seeded())
        for example, scale in ((None, 1.0), (BOLD, 0.0), (BOLD, 1.0))
    )
    assert [one.tobytes() for one in plain] == [one.tobytes() for one in none]
    assert sum(ink(thick) > ink(thin) for thick, thin in zip(bold, plain, strict=True)) >= 9


def test_what_cannot_be_drawn_is_said(pipe: Any, tmp_path: Path) -> None:
    for error, message, prompts, given in (
        (TextError, "words this model never saw", "a purple seven", {}),
        (TextError, "must be a string", [None], {}),
        (ConfigError, "3 examples for 2 prompts", ["a 1", "a 2"], {"images": [BOLD] * 3}),
        (ConfigError, "num_inference_steps must be at least 1", "a 1", {"num_inference_steps": 0}),
        (ConfigError, "guidance_scale must be a finite", "a 1", {"guidance_scale": float("nan")}),
        (ConfigError, "adapter_scale must be a finite", "a 1", {"adapter_scale": float("inf")}),
        (ImageError, "there is no file", "a 1", {"images": str(tmp_path / "nowhere.png")}),
        (ImageError, "shows nothing", "a 1", {"images": Image.new("RGB", (9, 9))}),
    ):
        with pytest.raises(error, match=message):
            pipe(prompts, **given)
    with pytest.raises(ConfigError, match="does not: leave it out"):
        mmattn.pipeline("assets/diffusion/adapter", index=tmp_path)


def test_the_command_draws_and_refuses_other_adapters(pipe: Any, tmp_path: Path, capsys: Any) -> None:
    given = ("--num-inference-steps", 3, "--seed", 5, "-o", tmp_path / "a.png")
    assert call(capsys, "draw", "a seven", "--like", SLANTED, *given)[:2] == (0, f"{tmp_path / 'a.png'}\n")
    with Image.open(tmp_path / "a.png") as image:
        again = pipe("a seven", SLANTED, num_inference_steps=3, generator=seeded(5)).resize((256, 256))
        assert image.tobytes() == again.tobytes()
    code, _, err = call(capsys, "draw", "a seven", "--adapter", "assets/rag/adapter", "-o", tmp_path / "b.png")
    assert code == 2 and "is for question-answering, and this command for text-to-image" in err
    assert not (tmp_path / "b.png").exists()


def test_another_encoder_or_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(Path("assets") / "diffusion" / "adapter", tmp_path / "adapter")
    shutil.copy(Path("assets") / "diffusion" / "style.safetensors", tmp_path)
    assert mmattn.pipeline(tmp_path / "adapter").encoder.dim == 64
    described = tmp_path / "adapter" / "pipeline_config.json"
    config = json.loads(described.read_text())
    config["host"]["tokenizer_fingerprint"] = "0" * 64
    described.write_text(json.dumps(config))
    with pytest.raises(AdapterFileError, match="the tokenizer of 'assets/diffusion' is not the one"):
        mmattn.pipeline(tmp_path / "adapter")
    shutil.copy(Path("assets") / "diffusion" / "adapter" / "pipeline_config.json", described)
    encoder = StyleEncoder.load(tmp_path / "style.safetensors")
    encoder.model.body[0].weight.data.mul_(1.5)
    encoder.save(tmp_path / "style.safetensors")
    with pytest.raises(AdapterFileError, match="memories of another encoder than ../style.safetensors"):
        mmattn.pipeline(tmp_path / "adapter")
