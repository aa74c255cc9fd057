"""Flora: the drawings, the descriptions, and the small models that were trained on them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmattn.recipes import load_recipe

ROOT = Path(__file__).parents[2]
RECIPE, ASSETS = ROOT / "recipes" / "vision", ROOT / "assets"


@pytest.fixture(scope="module")
def flora():
    return load_recipe(ASSETS / "flowers", "flora")


@pytest.fixture(scope="module")
def photographs() -> dict:
    return json.loads((RECIPE / "flowers12_descriptions.json").read_text(encoding="utf-8"))


def named(name: str, text: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", text, flags=re.IGNORECASE))


def test_descriptions_name_their_species_once_and_no_other(flora) -> None:
    names = [one.name for one in flora.species()]
    for one in flora.species():
        texts = flora.descriptions(one)
        assert len(texts) == len(set(texts)) >= 6, one.name
        for text in texts:
            assert 15 <= len(text.split()) <= 35, text
            assert [name for name in names if named(name, text)] == [one.name] and named(one.name, text) == 1, text
        said = " ".join(texts).lower()
        assert one.colour in said and one.season in said, one.name


def test_descriptions_of_the_photographs_name_their_species_once(photographs) -> None:
    assert len(photographs) == 12
    for key, one in photographs.items():
        texts = one["descriptions"]
        assert len(texts) == len(set(texts)) >= 8, key
        for text in texts:
            assert 15 <= len(text.split()) <= 35 and named(one["name"], text) == 1, text
        said = " ".join(texts).lower()
        assert one["attributes"]["colour"] in said and one["attributes"]["season"] in said, key


def test_the_same_seed_draws_the_same_picture_and_another_seed_another(flora) -> None:
    for one in flora.species():
        first, again, other = (flora.draw(one, seed, 37) for seed in (5, 5, 6))
        assert (first.mode, first.size) == ("RGB", (37, 37)), one.name
        first, again, other = map(np.asarray, (first, again, other))
        assert first.std() > 8, f"{one.name} is blank"
        assert np.array_equal(first, again) and not np.array_equal(first, other), one.name


def test_the_demo_pictures_are_those_that_were_drawn(flora, tmp_path: Path) -> None:
    flora.save_demo(tmp_path)
    shipped = ASSETS / "flora" / "metadata.jsonl"
    assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes()
    for file in tmp_path.glob("*.png"):
        with Image.open(file) as drawn, Image.open(ASSETS / "flora" / file.name) as picture:
            assert drawn.tobytes() == picture.tobytes(), file.name


def test_the_pictures_of_the_recipe_are_those_that_were_drawn(flora) -> None:
    folder = ASSETS / "flowers"
    about = json.loads((folder / "descriptions.json").read_text(encoding="utf-8"))
    for one in flora.species()[::7]:
        name = one.name.replace(" ", "-")
        assert about[name] == {
            "name": one.name, "attributes": one.attributes, "descriptions": flora.descriptions(one)
        }  # fmt: skip
        files = sorted((folder / "pictures" / name).iterdir())
        with Image.open(files[11]) as picture:
            away = np.asarray(picture, float) - np.asarray(flora.draw(one, "train/0/11"), float)
        assert len(files) == 46 and np.abs(away).mean() < 8, name


def test_the_assets_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 5e6 and sum(sizes.values()) < 23e6


def test_the_shipped_language_model_loads_offline_and_knows_the_kind_of_text(flora) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "lm", local_files_only=True)
    lm = AutoModelForCausalLM.from_pretrained(ASSETS / "lm", local_files_only=True)
    assert lm.dtype == torch.float32 and tokenizer.pad_token_id != tokenizer.eos_token_id
    text = "Naïve 花: the daffodil,\n  twice."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def loss(text: str) -> float:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            return lm(input_ids=ids, labels=ids).loss.item()

    said = next(flora.descriptions(one)[-1] for one in flora.species() if one.name == "daffodil")
    shuffled = " ".join(sorted(said.split()))
    assert np.isfinite(loss(said)) and loss(said) < 3 < loss(shuffled)


def test_the_shipped_clip_loads_by_folder_and_by_name_and_tells_flowers_apart(flora) -> None:
    import open_clip

    folder = ASSETS / "clip"
    clip, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    clip.eval()
    some = flora.species()[::4]
    images = torch.stack([preprocess(flora.draw(one, 11)) for one in some])
    with torch.no_grad():
        seen = clip.encode_image(images, normalize=True)
        read = clip.encode_text(tokenizer([flora.descriptions(one)[0] for one in some]), normalize=True)
    assert torch.isfinite(seen).all() and torch.isfinite(read).all()
    right = (seen @ read.T).argmax(1) == torch.arange(len(some))
    assert right.float().mean() > 0.7

    open_clip.add_model_config(folder / "tiny-flora.json")
    named_clip = open_clip.create_model("tiny-flora", pretrained=str(folder / "model.safetensors")).eval()
    with torch.no_grad():
        assert torch.equal(named_clip.encode_image(images, normalize=True), seen)
