"""One stage of training: `mmattn train CONFIG`, or `python train.py` with the default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from digits import Digits, Scale, load_digits
from measure import Judge
from models import load_models
from pictures import grid, plot_losses
from sampling import draw
from settings import Config
from style import save_encoder, train_encoder
from tables import style_rows, style_table, text_rows, text_table
from train_style import Concatenated, train_style
from train_text import save_text, train_text

import mmattn
from mmattn import training
from mmattn.recipes import assets_folder


def main(settings: dict[str, Any]) -> None:
    """Train one stage and leave settings, metrics, plots, samples, weights and the table in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    run.write_config(config.model_dump(mode="json"))
    data, held_out, scale = load_digits(config.model.size, config.held_out)
    (stage_text if config.stage == "text" else stage_style)(config, data, held_out, scale, run)


def stage_text(config: Config, data: Digits, held_out: Digits, scale: Scale, run: training.RunFolder) -> None:
    """Stage A: UNet and text encoder from nothing, then obedience by guidance."""
    model, words, fitted = train_text(config, data, run)
    save_text(model, words, run.path)
    unet, words = load_models(run.path)
    model = mmattn.attach(unet).use_core()
    judge = Judge(data, scale)
    rows = text_rows(model, words, judge, data, config.sample.steps, config.seed, config.sample.each)
    table = text_table(rows) + "\n\n" + judge.credentials(held_out)
    finish(run, config, rows, table, {"UNet and text encoder": fitted})


def stage_style(config: Config, data: Digits, held_out: Digits, scale: Scale, run: training.RunFolder) -> None:
    """Stage B: the UNet of stage A frozen, an adapter that follows an example, and the other way beside it."""
    unet, words = load_models(place(config.base))
    encoder = train_encoder(data, config.style.encoder_steps, config.seed, config.progress)
    save_encoder(encoder, run.path / "style.safetensors")
    words.requires_grad_(False)
    torch.manual_seed(config.seed)
    model = mmattn.attach(unet, mmattn.DecoupledAdapter(memory_dim=encoder.head.in_features)).use_core()
    fitted = {"decoupled": train_style(config, data, model, words, encoder, model.adapters, "stage B", run)}
    model.save_adapter(run.path / "adapter")
    concatenated = None
    if config.style.control:
        concatenated = Concatenated(sum(weight.numel() for weight in model.adapters.parameters()))
        fitted["concatenated"] = train_style(config, data, model, words, encoder, concatenated, "concatenated")
    plot_losses(fitted["decoupled"].losses, run.path / "loss.png")
    judge, shown = Judge(data, scale), held_out[: config.sample.examples]
    rows = style_rows(
        model, words, judge, encoder, shown, concatenated, config.sample.steps, config.sample.w, config.seed
    )
    show(model, words, encoder, held_out, config, run)
    finish(run, config, rows, style_table(rows) + "\n\n" + judge.credentials(held_out), fitted)


def show(
    model: mmattn.hosts.UNet, words: Any, encoder: Any, held_out: Digits, config: Config, run: training.RunFolder
) -> None:
    """A grid: in each row an example, then the ten digits in its style."""
    rows = held_out.measures.abs().sum(1).topk(8).indices.tolist()
    pictures = []
    for row in rows:
        sentences = [f"a {digit}" for digit in range(10)]
        memory = encoder.encode(held_out.pictures[row : row + 1]).expand(10)
        made = draw(model, words, sentences, config.sample.steps, config.sample.w, seed=config.seed, memory=memory)
        pictures += [held_out.pictures[row], *made]
    grid(torch.stack(pictures), 11, run.path / "examples.png")


def finish(
    run: training.RunFolder, config: Config, rows: list[dict[str, Any]], table: str, fitted: dict[str, training.Fitted]
) -> None:
    """Write and print the table, and what the training took."""
    took = {name: {"steps": one.steps, "seconds": round(one.seconds)} for name, one in fitted.items()}
    run.write_json("table.json", {"seed": config.seed, "rows": rows, "training": took})
    run.write_text("table.md", table)
    print(table)
    for name, one in took.items():
        print(f"{name}: {one['steps']} steps in {one['seconds']} s")


def place(path: str) -> Path:
    """`path`, or for "assets/…" where the installation keeps it."""
    here = Path(path)
    return here if here.exists() or here.parts[0] != "assets" else assets_folder().joinpath(*here.parts[1:])


if __name__ == "__main__":
    main({})
