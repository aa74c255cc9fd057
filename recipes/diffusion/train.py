"""One stage of training, from the pictures to the table: `mmattn train config.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, training
from mmattn.encoders import StyleEncoder
from mmattn.errors import import_extra
from mmattn.pipelines import DiffusionHost, EncoderReference, ModelReference, PipelineConfig, load_diffusion_host
from mmattn.recipes import resolve_asset

from .attributes import Subject, style_words
from .data import Pictures, load_data
from .measure import Judge, style_rows, text_rows
from .models import Denoiser, attach_bare, save_models
from .pictures import grid, word_maps
from .sampling import draw, traces, word_attention
from .settings import Config
from .style import style_memory, train_encoder
from .train_style import Concatenated, train_style
from .train_text import shown, train_text

EXPLORED = 4  # sentences, or examples, that `mmattn explore` shows, at most


def main(settings: dict[str, Any]) -> Path:
    """Train one stage and leave settings, metrics, plots, samples, weights and the table in the run's folder."""
    config = Config(**settings)
    import_extra("matplotlib", "viz")  # rather missed now than after the last step
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
    """Stage A: UNet or transformer and text encoder from nothing, then obedience by guidance."""
    data, held_out, subject = load_data(config.data, config.model.size)
    host, seconds = train_text(config, data, subject, run, accelerator.device)
    save_models(run.path, host.unet, host.prompts)
    host = load_diffusion_host(run.path, device=accelerator.device)
    model = attach_bare(host)
    judge = Judge(data, subject)
    rows = text_rows(model, host, judge, config.sample.steps, config.seed, config.sample.each)
    sentence = shown(subject)[0]
    given = {"steps": config.sample.steps, "seed": config.seed}
    if model.through_core:
        word_maps(*word_attention(model, host, sentence, **given), run.path / "words.png")
        found = [traces(model, host, one, **given) for one in shown(subject)[:EXPLORED]]
        inspect.save_traces([one for some in found for one in some], run.path)
    name = {"unet": "UNet", "transformer": "transformer"}[config.model.kind]
    took = {f"{name} and text encoder": {"steps": config.optim.max_steps, "seconds": round(seconds)}}
    return {"rows": rows, "training": took, "judge": judge.credentials(held_out)}


def stage_style(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Stage B: a UNet or transformer frozen, an adapter that follows an example, and the other way beside it."""
    host = load_diffusion_host(resolve_asset(config.unet), device=accelerator.device)
    data, held_out, subject = load_data(config.data, host.size, host.channels)
    encoder = train_encoder(data, subject.attributes, config.style.encoder_steps, config.seed, config.progress)
    encoder.save(run.path / "style.safetensors")
    encoder.to(accelerator.device)
    torch.manual_seed(config.seed)
    adapter = mmattn.DecoupledAdapter(memory_dim=encoder.dim)
    model = mmattn.attach(host.unet, adapter).use_core()
    given = (config, data, subject, model, host, encoder)
    done, generator = {}, torch.Generator()
    shared = (run, accelerator, generator)
    generator.manual_seed(config.seed)
    done["decoupled"], losses = train_style(*given, model.adapters, "decoupled", *shared)
    inspect.plot_curves({"loss": {"training": [dict(losses)]}}, run.path / "loss.png", log=True)
    model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
    describe(config, host, len(data)).save(run.path / "adapter")
    concatenated = None
    if config.style.control:
        wanted, _ = model.trainable_parameters()
        torch.set_rng_state(generator.get_state())  # its first weights are those of the published table
        concatenated = Concatenated(wanted, host.prompts.encoder.config.hidden_size).to(accelerator.device)
        generator.manual_seed(config.seed)
        done["concatenated"], _ = train_style(*given, concatenated, "concatenated", *shared)
    judge, examples = Judge(data, subject), held_out[: config.sample.examples]
    sampling = (config.sample.steps, config.sample.guidance_scale, config.seed)
    rows = style_rows(model, host, judge, encoder, examples, concatenated, *sampling)
    show(model, host, encoder, subject, held_out, config, run)
    took = {name: {"steps": one.global_step, "seconds": round(one.seconds)} for name, one in done.items()}
    return {"rows": rows, "training": took, "judge": judge.credentials(held_out)}


def describe(config: Config, host: DiffusionHost, count: int) -> PipelineConfig:
    """How to run the adapter, trained on so many pictures, from sentences and examples to pictures."""
    return PipelineConfig(
        task="text-to-image",
        host=ModelReference.of(config.unet, host.prompts.tokenizer),
        encoder=EncoderReference(name="../style.safetensors"),
        generation={"num_inference_steps": config.sample.steps, "guidance_scale": config.sample.guidance_scale},
        trained_on=f"{count:,} pictures of {config.data.path or 'handwritten digits, of scikit-learn'}.",
        training={"recipe": "diffusion", "seed": config.seed, "steps": config.optim.max_steps},
    )


def show(
    model: Denoiser,
    host: DiffusionHost,
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
        memory = style_memory(encoder, held_out.pictures[row : row + 1]).expand(len(sentences))
        made = draw(
            model, host, sentences, config.sample.steps, config.sample.guidance_scale, seed=config.seed, memory=memory
        )
        pictures += [held_out.pictures[row], *made]
    labels = [style_words(subject.attributes, held_out.measures[row]) for row in rows]
    grid(torch.stack(pictures), len(sentences) + 1, run.path / "examples.png", labels, ["example", *sentences])
    found = []
    for row in rows[:EXPLORED]:
        other = subject.plain((int(held_out.classes[row]) + 1) % len(subject.classes))
        example = held_out.pictures[row]
        given = {"memory": style_memory(encoder, example[None]), "example": example}
        found += traces(model, host, other, config.sample.steps, seed=config.seed, **given)
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
