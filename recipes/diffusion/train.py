"""One stage of training: `mmattn train CONFIG`, or `python train.py` with the default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, training
from mmattn.recipes import assets_folder

from .attributes import Subject, style_words
from .data import Pictures, load_data
from .measure import Judge
from .models import Models, load_models, save_models
from .pictures import grid, plot_losses, word_maps
from .sampling import draw, traces, word_attention
from .settings import Config
from .style import StyleEncoder, save_encoder, train_encoder
from .tables import style_rows, table, text_rows
from .train_style import Concatenated, train_style
from .train_text import shown, train_text

EXPLORED = 4  # sentences, or examples, that `mmattn explore` shows, at most


def main(settings: dict[str, Any]) -> None:
    """Train one stage and leave settings, metrics, plots, samples, weights and the table in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    run.write_config(config.model_dump(mode="json"))
    (stage_text if config.stage == "text" else stage_style)(config, run)


def stage_text(config: Config, run: training.RunFolder) -> None:
    """Stage A: UNet and text encoder from nothing, then obedience by guidance."""
    data, held_out, subject = load_data(config.data, config.model.size)
    models, fitted = train_text(config, data, subject, run)
    save_models(run.path, models.unet, models.words)
    models = load_models(run.path)
    model = mmattn.attach(models.unet).use_core()
    judge = Judge(data, subject)
    rows = text_rows(model, models, judge, config.sample.steps, config.seed, config.sample.each)
    sentence = shown(subject)[0]
    given = {"steps": config.sample.steps, "seed": config.seed}
    word_maps(*word_attention(model, models, sentence, **given), run.path / "words.png")
    found = [traces(model, models, one, **given) for one in shown(subject)[:EXPLORED]]
    inspect.save_traces([one for some in found for one in some], run.path)
    finish(run, config, rows, judge.credentials(held_out), {"UNet and text encoder": fitted})


def stage_style(config: Config, run: training.RunFolder) -> None:
    """Stage B: a UNet frozen, an adapter that follows an example, and the other way beside it."""
    models = load_models(place(config.unet))
    data, held_out, subject = load_data(config.data, models.size, models.channels)
    encoder = train_encoder(data, config.style.encoder_steps, config.seed, config.progress)
    save_encoder(encoder, run.path / "style.safetensors")
    models.words.requires_grad_(False)
    torch.manual_seed(config.seed)
    adapter = mmattn.DecoupledAdapter(memory_dim=encoder.head.in_features)
    model = mmattn.attach(models.unet, adapter).use_core()
    given = (config, data, subject, model, models, encoder)
    fitted = {"decoupled": train_style(*given, model.adapters, "stage B", run)}
    model.save_adapter(run.path / "adapter")
    concatenated = None
    if config.style.control:
        wanted, _ = model.trainable_parameters()
        concatenated = Concatenated(wanted, models.unet.config.cross_attention_dim)
        fitted["concatenated"] = train_style(*given, concatenated, "concatenated")
    plot_losses(fitted["decoupled"].losses, run.path / "loss.png")
    judge, examples = Judge(data, subject), held_out[: config.sample.examples]
    sampling = (config.sample.steps, config.sample.guidance_scale, config.seed)
    rows = style_rows(model, models, judge, encoder, examples, concatenated, *sampling)
    show(model, models, encoder, subject, held_out, config, run)
    finish(run, config, rows, judge.credentials(held_out), fitted)


def show(
    model: mmattn.hosts.AdaptedUNet,
    models: Models,
    encoder: StyleEncoder,
    subject: Subject,
    held_out: Pictures,
    config: Config,
    run: training.RunFolder,
) -> None:
    """A grid: in each row an example, then up to ten classes in its style; of some, their attention as traces."""
    rows = held_out.measures.abs().sum(1).topk(min(8, len(held_out))).indices.tolist()
    sentences = [subject.plain(number) for number in range(min(10, len(subject.classes)))]
    pictures = []
    for row in rows:
        memory = encoder.encode(held_out.pictures[row : row + 1]).expand(len(sentences))
        made = draw(
            model, models, sentences, config.sample.steps, config.sample.guidance_scale, seed=config.seed, memory=memory
        )
        pictures += [held_out.pictures[row], *made]
    labels = [style_words(subject.attributes, held_out.measures[row]) for row in rows]
    grid(torch.stack(pictures), len(sentences) + 1, run.path / "examples.png", labels, ["example", *sentences])
    found = []
    for row in rows[:EXPLORED]:
        other = subject.plain((int(held_out.classes[row]) + 1) % len(subject.classes))
        example = held_out.pictures[row]
        given = {"memory": encoder.encode(example[None]), "example": example}
        found += traces(model, models, other, config.sample.steps, seed=config.seed, **given)
    inspect.save_traces(found, run.path)


def finish(
    run: training.RunFolder,
    config: Config,
    rows: list[dict[str, Any]],
    judge: str,
    fitted: dict[str, training.FitResult],
) -> None:
    """Write and print the table, and what the training took."""
    took = {name: {"steps": one.steps, "seconds": round(one.seconds)} for name, one in fitted.items()}
    content = {"stage": config.stage, "seed": config.seed, "rows": rows, "training": took, "judge": judge}
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    print(text)


def place(path: str) -> Path:
    """`path`, or for "assets/…" where the installation keeps it."""
    here = Path(path)
    return here if here.exists() or here.parts[0] != "assets" else assets_folder().joinpath(*here.parts[1:])


if __name__ == "__main__":
    main({})
