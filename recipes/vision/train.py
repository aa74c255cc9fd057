"""Do pictures help a language model with words? Train an adapter on pictures with descriptions, and its controls.

    mmattn train config.yaml                        # drawn flowers
    mmattn train config_flowers12.yaml data.path=…  # photographs

A frozen language model attends to the patches of a picture. Each row of the table is trained on the same texts in the
same order for as many steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, pipelines, training
from mmattn.errors import import_extra
from mmattn.recipes import resolve_asset

from . import report
from .data import Data, encode, load_data
from .measure import Measure, Row, bits_saved, other_species, write_captions
from .report import table
from .settings import AdapterSettings, Config

SAMPLES, TRACES = 8, 6  # held-out pictures in captions.png, and in attention.safetensors


def main(config: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    settings = Config.model_validate(config)
    import_extra("matplotlib", "viz")  # fail now rather than after the last step
    run = training.RunFolder(settings.out)
    if not run.begin(settings.model_dump(mode="json")):
        return run.path
    accelerator = training.make_accelerator(device=settings.device)
    torch.manual_seed(settings.seed)

    # Data: each picture becomes a memory of one slot per patch.
    data = load_data(settings.data, settings.seed)
    encoder = pipelines.load_image_encoder(resolve_asset(settings.encoder), accelerator.device)
    memory, held_out = encode_pictures(encoder, data, settings)
    held_out = held_out.to(accelerator.device)

    # Model: a frozen language model with gated cross-attention.
    lm, tokenizer = pipelines.load_language_model(settings.lm, accelerator.device)
    ids = training.encode_texts(tokenizer, data.texts, getattr(lm.config, "max_position_embeddings", None))
    print(
        f"{len(data.train)} pictures to train on, {len(data.held_out)} held out, {len(data.texts)} texts, "
        f"{len(data.species)} species; memories of {memory.length} slots of width {memory.dim}"
    )
    measure = Measure(data, tokenizer, ids, **settings.caption.model_dump())
    rows = [measure.row("frozen LM", lm)[0]]
    torch.manual_seed(settings.seed)
    model = mmattn.attach(lm, make_adapter(settings.adapter, memory.dim))
    model.print_trainable_parameters()
    parameters = model.trainable_parameters()[0]
    samples = list(range(0, len(data.held_out), max(1, len(data.held_out) // SAMPLES)))[:SAMPLES]
    captions = write_captions(model, tokenizer, held_out[torch.tensor(samples)], settings.caption.max_new_tokens)
    run.write_text("samples_before.txt", report.name_captions(data, samples, captions))

    # Training.
    result, losses = train(model, "adapter", data, ids, memory, settings, run, accelerator)
    model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
    pipeline_config = make_pipeline_config(settings, tokenizer, data)
    pipeline_config.save(run.path / "adapter")
    if result.interrupted:
        print(f"stopped after {result.global_step} steps; the adapter as it was then is in {run.path / 'adapter'}")
        return run.path
    curves = {"adapter, with its picture": [losses]}
    inspect.plot_curves({"loss": curves}, run.path / "loss.png", log=True)

    # Measuring: the right picture, shuffled pictures, no picture, and a text-only LoRA of equal size.
    try:
        shuffled = held_out[torch.tensor(other_species(data.held_out, settings.seed))]
        for name, pictures in (("right picture", held_out), ("shuffled pictures", shuffled), ("no picture", None)):
            row, texts = measure.row(f"adapter, {name}", model, pictures)
            row.parameters, row.seconds = parameters, result.seconds
            captions = texts if pictures is held_out else captions
            rows.append(row)
        report.save_captions(run, model, tokenizer, data, held_out, captions, samples, encoder.grid, traces=TRACES)
        model.unload()
        if settings.controls:
            control, losses = train_lora(lm, parameters, data, ids, measure, settings, run, accelerator)
            curves[control.name] = [losses]
            rows.insert(1, control)
            for row in rows:
                row.bits_saved = bits_saved(row, control)
            inspect.plot_curves({"loss": curves}, run.path / "loss.png", log=True)
    except KeyboardInterrupt:
        print(f"stopped before the table was complete; the trained adapter is in {run.path / 'adapter'}")
        return run.path
    content = report.table_content(rows, data, settings.seed)
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    pipeline_config.model_copy(update={"results": text}).save(run.path / "adapter")
    print(text)
    return run.path


def encode_pictures(encoder: Any, data: Data, settings: Config) -> tuple[mmattn.Memory, mmattn.Memory]:
    """Return the memories of the training pictures (then of their mirror images, if set) and of the held-out ones."""
    folder, options = Path(settings.data.cache or settings.out), {"progress": settings.progress}
    memory = encode(encoder, data.train, folder, mirror=False, **options)
    if settings.data.flip:
        memory = mmattn.Memory.stack([memory, encode(encoder, data.train, folder, mirror=True, **options)])
    return memory, encode(encoder, data.held_out, folder, mirror=False, **options)


def make_adapter(settings: AdapterSettings, memory_dim: int) -> mmattn.GatedAdapter:
    """Return the adapter of the settings; without `every` and `layers` it acts after every layer."""
    options = settings.model_dump(exclude={"latents"})
    if settings.every is None and settings.layers is None:
        options["every"] = 1
    if settings.latents is not None:
        heads = {"num_heads": settings.num_heads, "head_dim": settings.head_dim}
        options["resampler"] = mmattn.Resampler(num_latents=settings.latents, **heads)
    return mmattn.GatedAdapter(memory_dim=memory_dim, **options)


def train(
    model: Any,
    name: str,
    data: Data,
    ids: Sequence[Sequence[int]],
    memory: mmattn.Memory | None,
    settings: Config,
    run: training.RunFolder,
    accelerator: Any,
) -> tuple[training.TrainingResult, dict[int, float]]:
    """Train on pairs of a picture and one of its descriptions, without `memory` on the descriptions alone."""
    optim, losses = settings.optim, {}
    pairs = training.PairSampler(
        [data.texts_of(picture) for picture in data.train] * (2 if settings.data.flip else 1),
        optim.batch_size,
        settings.seed,
    )
    batches = ([(step, *pair) for pair in pairs.pairs(step)] for step in range(optim.max_steps))

    def loss(rows: Sequence[tuple[int, int, int]], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
        (step, *_), pictures, texts = zip(*rows, strict=True)
        batch_memory = None
        if memory is not None:
            batch_memory = training.augment_memory(
                memory[torch.tensor(pictures)],
                keep_fraction=optim.keep_fraction,
                noise_std=optim.noise_std,
                seed=settings.seed * 1_000_003 + step,
            )
        batch = training.collate([ids[text] for text in texts], batch_memory)
        return training.sum_nats(model, batch.to(accelerator.device))

    def log(**metrics: Any) -> None:
        losses[metrics["step"]] = metrics["loss"]
        run.log(model=name, **metrics)

    config = training.TrainingConfig(
        max_steps=optim.max_steps,
        learning_rate=optim.lora_learning_rate if memory is None else optim.learning_rate,
        gate_learning_rate=optim.gate_learning_rate,
        weight_decay=optim.weight_decay,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        seed=settings.seed,
    )
    result = training.train(model, loss, batches, config, accelerator, log=log, label=name, progress=settings.progress)
    return result, losses


def train_lora(
    lm: Any,
    parameters: int,
    data: Data,
    ids: Sequence[Sequence[int]],
    measure: Measure,
    settings: Config,
    run: training.RunFolder,
    accelerator: Any,
) -> tuple[Row, dict[int, float]]:
    """Train and measure the control: a LoRA on the texts, with as many parameters as the adapter."""
    torch.manual_seed(settings.seed)
    lora = training.matched_lora(lm, parameters)
    count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    print(f"LoRA, text only: {count:,} trained parameters beside {parameters:,} of the adapter")
    result, losses = train(lora, "lora", data, ids, None, settings, run, accelerator)
    if result.interrupted:
        raise KeyboardInterrupt  # a baseline that was stopped early would flatter the adapter
    row, _ = measure.row("LoRA, text only", lora)
    row.parameters, row.seconds = count, result.seconds
    lora.unload()
    return row, losses


def make_pipeline_config(settings: Config, tokenizer: Any, data: Data) -> pipelines.PipelineConfig:
    """Return the file that lets `mmattn caption` load the adapter with its models."""
    return pipelines.PipelineConfig(
        task="image-to-text",
        host=pipelines.ModelReference.of(settings.lm, tokenizer),
        encoder=pipelines.EncoderReference.of(settings.encoder),
        generation=settings.caption.model_dump(),
        trained_on=f"{len(data.train)} pictures of {len(data.species)} species ({settings.data.kind}).",
        training={"recipe": "vision", "seed": settings.seed, "steps": settings.optim.max_steps},
    )
