"""Make the small CLIP of `assets/clip`: an open_clip model of our own shape, trained with open_clip's loss on flora.

Each batch holds every species once, so no two captions of a batch fit the same picture. Afterwards the figures that
matter to the recipe: a linear probe on the mean of the patch tokens, and zero-shot names, both on held-out pictures.

    python assets/clip/make_clip.py --seed 0
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import open_clip
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmattn.recipes import load_recipe

HERE = Path(__file__).parent
flora = load_recipe(Path(__file__).resolve().parents[1] / "flowers", "flora")
make_lm = load_recipe(Path("assets/lm"), "make_lm")
NAME, SIZE, CONTEXT = "tiny-flora", 64, 64
MEAN, STD = (0.45, 0.45, 0.4), (0.27, 0.25, 0.27)


def shape(vocabulary: int, end: int, pad: int) -> dict[str, Any]:
    """The model in open_clip's terms: 64 patches of 8 pixels, four layers of width 128; a smaller text tower."""
    return {
        "embed_dim": 96,
        "vision_cfg": {
            "image_size": SIZE, "patch_size": 8, "layers": 4, "width": 128, "head_width": 32, "mlp_ratio": 3.0,
            "pool_type": "avg",
        },
        "text_cfg": {
            "context_length": CONTEXT, "vocab_size": vocabulary, "width": 96, "heads": 3, "layers": 2, "mlp_ratio": 3.0,
            "pool_type": "eos", "eos_id": end, "pad_id": pad, "hf_tokenizer_name": NAME,
        },
    }  # fmt: skip


def tokenizer_for_captions() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose every text closes with the end token, where the text tower is read."""
    texts = [text for one in flora.species() for text in flora.descriptions(one)]
    tokenizer = make_lm.train_tokenizer(texts, 1024)
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {make_lm.END}", special_tokens=[(make_lm.END, end)]
    )
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def pictures(split: str, per_species: int, seed: int) -> Tensor:
    """Drawn pictures as uint8 (species, per_species, 3, SIZE, SIZE)."""
    drawn = [np.array(image) for image, _, _ in flora.dataset(split, per_species, seed, SIZE)]
    stacked = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2)
    return stacked.reshape(-1, per_species, 3, SIZE, SIZE).contiguous()


def normalise(images: Tensor) -> Tensor:
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (images.float() / 255 - mean) / std


def varied(images: Tensor, picks: torch.Generator) -> Tensor:
    """The pictures moved by up to six pixels, mirrored and lit a little differently."""
    moved = torch.empty_like(images)
    padded = torch.nn.functional.pad(images.float(), (6, 6, 6, 6), mode="replicate").to(images.dtype)
    for i in range(len(images)):
        top, left, mirror = torch.randint(0, 13, (3,), generator=picks).tolist()
        one = padded[i, :, top : top + SIZE, left : left + SIZE]
        moved[i] = one.flip(-1) if mirror > 6 else one
    return normalise(moved) * (0.85 + 0.3 * torch.rand(len(images), 1, 1, 1, generator=picks))


@torch.no_grad()
def patch_means(model: open_clip.CLIP, images: Tensor) -> Tensor:
    """The mean of the patch tokens of each picture, (pictures, width)."""
    means = []
    for part in normalise(images).split(96):
        tokens = model.visual.forward_intermediates(part, indices=1, intermediates_only=True, output_fmt="NLC")
        means.append(tokens["image_intermediates"][-1].mean(1))
    return torch.cat(means)


def probe(train: Tensor, train_labels: Tensor, held: Tensor, held_labels: Tensor) -> tuple[float, float]:
    """Accuracy and bits of surprise per picture of a linear probe."""
    mean, std = train.mean(0), train.std(0)
    train, held = (train - mean) / std, (held - mean) / std
    layer = torch.nn.Linear(train.shape[1], int(train_labels.max()) + 1)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.02, weight_decay=0.02)
    for _ in range(250):
        loss = torch.nn.functional.cross_entropy(layer(train), train_labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        logits = layer(held)
        bits = torch.nn.functional.cross_entropy(logits, held_labels).item() / np.log(2)
        return float((logits.argmax(1) == held_labels).float().mean()), float(bits)


@torch.no_grad()
def zero_shot(model: open_clip.CLIP, tokenizer: PreTrainedTokenizerFast, images: Tensor, labels: Tensor) -> float:
    """Share of the pictures whose own species has the nearest descriptions."""
    said = [flora.descriptions(one) for one in flora.species()]
    ids = encode(tokenizer, [text for texts in said for text in texts])
    texts = model.encode_text(ids, normalize=True).reshape(len(said), -1, 96).mean(1)
    seen = torch.cat([model.encode_image(part, normalize=True) for part in normalise(images).split(96)])
    return float(((seen @ texts.T).argmax(1) == labels).float().mean())


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    given = tokenizer(texts, padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt")
    return given["input_ids"]


CARD = """# A small CLIP of drawn flowers

open_clip shape `tiny-flora` (64 patches of 8 pixels, vision width 128), {parameters:,} parameters, stored in float16.

    open_clip.create_model_and_transforms("local-dir:assets/clip")        # shape, weights, preprocessing, tokenizer
    open_clip.add_model_config("assets/clip/tiny-flora.json")             # or by name, with the file as `pretrained`
    open_clip.create_model("tiny-flora", pretrained="assets/clip/model.safetensors")

- made by: `assets/clip/make_clip.py --seed {seed} --steps {steps}` in {seconds:.0f} s on {threads} CPU thread(s)
- data: {per_species} drawn pictures of each of 48 species, seven descriptions a species, open_clip's ClipLoss
- held-out pictures: linear probe on the mean of the patch tokens {accuracy:.1%} ({bits:.2f} bits left of 5.58),
  zero-shot by descriptions {zero:.1%} (chance 2.1 %)
"""


def save(out: Path, model: open_clip.CLIP, tokenizer: PreTrainedTokenizerFast, config: dict[str, Any]) -> None:
    """Write weights, shape, preprocessing and tokenizer, as a folder that open_clip reads."""
    out.mkdir(parents=True, exist_ok=True)
    save_file({key: value.half().contiguous() for key, value in model.state_dict().items()}, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)  # written as a private temporary file
    tokenizer.save_pretrained(out)
    whole = {"model_cfg": config, "preprocess_cfg": {"mean": MEAN, "std": STD, "interpolation": "bicubic"}}
    for file, content in (("open_clip_config.json", whole), (f"{NAME}.json", config)):
        (out / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--per-species", type=int, default=120)
    parser.add_argument("--held-out", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()

    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    began = time.time()
    images = pictures("train", given.per_species, given.seed)
    species = len(images)
    print(f"{species} species, {images.shape[1]} pictures each, {time.time() - began:.0f} s", flush=True)

    tokenizer = tokenizer_for_captions()
    said = [encode(tokenizer, flora.descriptions(one)) for one in flora.species()]
    config = shape(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = open_clip.CLIP(**config)
    loss_of = open_clip.ClipLoss()
    optimiser = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, given.learning_rate, given.steps, pct_start=0.1)
    picks, order = torch.Generator().manual_seed(given.seed), Random(given.seed)
    model.train()
    for step in range(given.steps):
        which = torch.randint(0, images.shape[1], (species,), generator=picks)
        batch = varied(images[torch.arange(species), which], picks)
        texts = torch.stack([ids[order.randrange(len(ids))] for ids in said])
        seen, read, scale = model(batch, texts)
        loss = loss_of(seen, read, scale)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.logit_scale.clamp_(0, np.log(100))
        if step % 50 == 0 or step == given.steps - 1:
            right = (seen @ read.T).argmax(1).eq(torch.arange(species)).float().mean().item()
            print(f"step {step} loss {loss.item():.3f} right {right:.2f} {time.time() - began:.0f} s", flush=True)

    model.eval()
    seconds = time.time() - began
    held, labels = pictures("held-out", given.held_out, given.seed), torch.arange(species)
    some = images[:, :60].flatten(0, 1)
    held_labels = labels.repeat_interleave(given.held_out)
    accuracy, bits = probe(
        patch_means(model, some), labels.repeat_interleave(60), patch_means(model, held.flatten(0, 1)), held_labels
    )
    figures = {
        "accuracy": accuracy, "bits": bits, "zero": zero_shot(model, tokenizer, held.flatten(0, 1), held_labels),
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds, "seed": given.seed,
        "steps": given.steps, "threads": given.threads, "per_species": given.per_species,
    }  # fmt: skip
    print(figures)
    save(given.out, model, tokenizer, config)
    (given.out / "README.md").write_text(CARD.format(**figures), encoding="utf-8")


if __name__ == "__main__":
    main()
