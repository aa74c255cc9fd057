"""One stage of training, from the pictures to the table: `mmattn train config.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, training
from mmattn.recipes import assets_folder

from .attributes import Subject, style_words
from .data import Pictures, load_data
from .measure import Judge, style_rows, text_rows
from .models import Models, load_models, save_models
from .pictures import grid, plot_losses, word_maps
from .sampling import draw, traces, word_attention
from .settings import Config
from .style import StyleEncoder, save_encoder, train_encoder
from .train_style import Concatenated, train_style
from .train_text import shown, train_text

EXPLORED = 4  # sentences, or examples, that `mmattn explore` shows, at most


def main(settings: dict[str, Any]) -> Path:
    """Train one stage and leave settings, metrics, plots, samples, weights and the table in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if run.begin(config.model_dump(mode="json")):
        accelerator = training.make_accelerator(device=config.device)
        content = {"stage": config.stage, "seed": config.seed}
        content |= (stage_text if config.stage == "text" else stage_style)(config, run, accelerator)
        run.write_json("table.json", content)
        text = table([content])
        run.write_text("table.md", text)
        print(text)
    return run.path


def stage_text(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Stage A: UNet and text encoder from nothing, then obedience by guidance."""
    data, held_out, subject = load_data(config.data, config.model.size)
    models, seconds = train_text(config, data, subject, run, accelerator.device)
    save_models(run.path, models.unet, models.words)
    models = load_models(run.path).to(accelerator.device)
    model = mmattn.attach(models.unet).use_core()
    judge = Judge(data, subject)
    rows = text_rows(model, models, judge, config.sample.steps, config.seed, config.sample.each)
    sentence = shown(subject)[0]
    given = {"steps": config.sample.steps, "seed": config.seed}
    word_maps(*word_attention(model, models, sentence, **given), run.path / "words.png")
    found = [traces(model, models, one, **given) for one in shown(subject)[:EXPLORED]]
    inspect.save_traces([one for some in found for one in some], run.path)
    took = {"UNet and text encoder": {"steps": config.optim.max_steps, "seconds": round(seconds)}}
    return {"rows": rows, "training": took, "judge": judge.credentials(held_out)}


def stage_style(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Stage B: a UNet frozen, an adapter that follows an example, and the other way beside it."""
    models = load_models(place(config.unet)).to(accelerator.device)
    data, held_out, subject = load_data(config.data, models.size, models.channels)
    encoder = train_encoder(data, config.style.encoder_steps, config.seed, config.progress)
    save_encoder(encoder, run.path / "style.safetensors")
    encoder.to(accelerator.device)
    models.words.requires_grad_(False)
    torch.manual_seed(config.seed)
    adapter = mmattn.DecoupledAdapter(memory_dim=encoder.head.in_features)
    model = mmattn.attach(models.unet, adapter).use_core()
    given = (config, data, subject, model, models, encoder)
    done, generator = {}, torch.Generator()
    shared = (run, accelerator, generator)
    generator.manual_seed(config.seed)
    done["decoupled"], losses = train_style(*given, model.adapters, "decoupled", *shared)
    plot_losses(losses, run.path / "loss.png")
    model.save_adapter(run.path / "adapter")
    concatenated = None
    if config.style.control:
        wanted, _ = model.trainable_parameters()
        torch.set_rng_state(generator.get_state())  # its first weights are those of the published table
        concatenated = Concatenated(wanted, models.unet.config.cross_attention_dim).to(accelerator.device)
        generator.manual_seed(config.seed)
        done["concatenated"], _ = train_style(*given, concatenated, "concatenated", *shared)
    judge, examples = Judge(data, subject), held_out[: config.sample.examples]
    sampling = (config.sample.steps, config.sample.guidance_scale, config.seed)
    rows = style_rows(model, models, judge, encoder, examples, concatenated, *sampling)
    show(model, models, encoder, subject, held_out, config, run)
    took = {name: {"steps": one.global_step, "seconds": round(one.seconds)} for name, one in done.items()}
    return {"rows": rows, "training": took, "judge": judge.credentials(held_out)}


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


def text_table(contents: list[dict[str, Any]]) -> str:
    """The rows of `text_rows` in markdown, of one or several runs."""
    columns = {
        "read": ("read as asked", 100, ".1f", " %"),
        "attribute": ("attribute on the asked side", 100, ".1f", " %"),
        "clearly": ("attribute clearly", 100, ".1f", " %"),
        "diversity": ("diversity", 1, ".2f", ""),
        "frechet": ("Fréchet", 1, ".2f", ""),
    }
    return training.spread_table("guidance_scale", columns, [table["rows"] for table in contents])


def style_table(contents: list[dict[str, Any]]) -> str:
    """The rows of `style_rows` in markdown, of one or several runs."""
    measures = [name for name in contents[0]["rows"][0] if name not in ("name", "likeness", "read")]
    columns = {
        **{name: (name, 1, "+.2f", "") for name in measures},
        "likeness": ("mean likeness", 1, "+.2f", ""),
        "read": ("read as asked", 100, ".1f", " %"),
    }
    return training.spread_table("", columns, [table["rows"] for table in contents])


def table(contents: list[dict[str, Any]]) -> str:
    """The table of one stage from one or several `table.json`, and what its training took."""
    made = (text_table if contents[0]["stage"] == "text" else style_table)(contents)
    took = []
    for name in contents[0]["training"]:
        runs = [run["training"][name] for run in contents]
        seconds = training.mean_and_spread([run["seconds"] for run in runs], 1, ".0f", " s")
        took.append(f"{name}: {runs[0]['steps']} steps in {seconds}")
    return "\n\n".join([made, "; ".join(took) + ".", contents[0]["judge"]])


def place(path: str) -> Path:
    """`path`, or for "assets/…" where the installation keeps it."""
    here = Path(path)
    return here if here.exists() or here.parts[0] != "assets" else assets_folder().joinpath(*here.parts[1:])
