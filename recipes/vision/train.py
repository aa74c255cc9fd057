"""Does seeing help a language model with words? Train an adapter on pictures with descriptions, and its controls.

    mmattn train config.yaml                        # drawn flowers
    mmattn train config_flowers12.yaml data.path=…  # photographs

Every row of the table sees the same texts in the same order for the same number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, training
from mmattn.errors import import_extra

from . import report
from .data import Data, load_data
from .measure import Measure, Row, strangers, write_captions
from .report import table
from .seeing import adapter_settings, describe, load_encoder, load_lm, see
from .settings import Config

EXPLORED = 6  # captions that `mmattn explore` shows, at most
Losses = list[tuple[int, float]]


def main(config: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    settings = Config.model_validate(config)
    import_extra("matplotlib", "viz")  # rather missed now than after the last step
    run = training.RunFolder(settings.out)
    if not run.begin(settings.model_dump(mode="json")):
        return run.path
    accelerator = training.make_accelerator(device=settings.device)
    torch.manual_seed(settings.seed)
    data = load_data(settings.data, settings.seed)
    eye = load_encoder(settings.encoder, accelerator.device)
    seen, held_out = see(eye, data, settings)
    held_out = held_out.to(accelerator.device)
    lm, tokenizer = load_lm(settings.lm, accelerator.device)
    ids = training.encode_texts(tokenizer, data.texts, getattr(lm.config, "max_position_embeddings", None))
    print(
        f"{len(data.train)} pictures to train on, {len(data.held_out)} held out, {len(data.texts)} texts, "
        f"{len(data.species)} species; memories of {seen.length} slots of width {seen.dim}"
    )
    measure = Measure(data, tokenizer, ids, **settings.caption.model_dump())
    frozen, _ = measure.row("frozen LM", lm)

    torch.manual_seed(settings.seed)
    model = mmattn.attach(lm, adapter_settings(settings.adapter, seen.dim))
    model.print_trainable_parameters()
    parameters = model.trainable_parameters()[0]
    shown = samples(data)
    before = write_captions(model, tokenizer, held_out[torch.tensor(shown)], settings.caption.max_new_tokens)
    run.write_text("samples_before.txt", report.samples(data, shown, before))
    done, losses = learn(model, "adapter", data, ids, seen, settings, run, accelerator)
    model.save_adapter(run.path / "adapter", encoder=eye.fingerprint)
    told = describe(settings, tokenizer, data)
    told.save(run.path / "adapter")
    if done.interrupted:
        print(f"stopped after {done.global_step} steps; the adapter as it was then is in {run.path / 'adapter'}")
        return run.path
    curves = {"adapter, with its picture": losses}
    report.plot_losses(run.path / "loss.png", curves)
    try:
        rows, captions = measure_looks(model, measure, held_out, settings.seed, done.seconds)
        report.picture_grid(run.path / "captions.png", model, tokenizer, data, held_out, shown, eye.grid)
        some = shown[:EXPLORED]
        images, said = [data.held_out[i].image for i in some], [captions[i] for i in some]
        traces = report.traces(model, tokenizer, images, said, held_out[torch.tensor(some)], eye.grid)
        if traces:
            inspect.save_traces(traces, run.path)
        run.write_text("samples_after.txt", report.samples(data, shown, [captions[i] for i in shown]))
        run.write_json("captions.json", report.all_captions(data, captions))
        model.unload()
        rows.insert(0, frozen)
        if settings.controls:
            torch.manual_seed(settings.seed)
            lora = training.matched_lora(lm, parameters)
            count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
            print(f"LoRA, text only: {count:,} trained parameters beside {parameters:,} of the adapter")
            done, curves["LoRA, text only"] = learn(lora, "lora", data, ids, None, settings, run, accelerator)
            if done.interrupted:
                raise KeyboardInterrupt  # a baseline that was stopped early would flatter the adapter
            control, _ = measure.row("LoRA, text only", lora)
            lora.unload()
            control.parameters, control.seconds = count, done.seconds
            rows.insert(1, control)
            for row in rows:
                row.bits_saved = report.bits_saved(row, control)
            report.plot_losses(run.path / "loss.png", curves)
    except KeyboardInterrupt:
        print(f"stopped before the table was complete; the trained adapter is in {run.path / 'adapter'}")
        return run.path
    content = report.content_of(rows, data, settings.seed)
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    told.model_copy(update={"results": text}).save(run.path / "adapter")
    print(text)
    return run.path


def learn(
    model: Any,
    name: str,
    data: Data,
    ids: Sequence[Sequence[int]],
    seen: mmattn.Memory | None,
    settings: Config,
    run: training.RunFolder,
    accelerator: Any,
) -> tuple[training.TrainingResult, Losses]:
    """Train on pairs of a picture (or its mirror image) and a text that is true of it; without `seen` on the texts."""
    optim, losses = settings.optim, []
    texts_of = [picture.texts for picture in data.train]
    order = training.PairSampler(texts_of * (2 if settings.data.flip else 1), optim.batch_size, settings.seed)
    batches = ([(step, *pair) for pair in order.pairs(step)] for step in range(optim.max_steps))

    def loss(rows: Sequence[tuple[int, int, int]], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
        (step, *_), items, texts = zip(*rows, strict=True)
        memory = None
        if seen is not None:
            varied = {"keep_fraction": optim.keep_fraction, "noise_std": optim.noise_std}
            memory = training.augment_memory(seen[torch.tensor(items)], **varied, seed=settings.seed * 1_000_003 + step)
        batch = training.collate([ids[text] for text in texts], memory)
        return training.sum_nats(model, batch.to(accelerator.device))

    def log(**figures: Any) -> None:
        losses.append((figures["step"], figures["loss"]))
        run.log(model=name, **figures)

    config = training.TrainingConfig(
        max_steps=optim.max_steps,
        learning_rate=optim.lora_learning_rate if seen is None else optim.learning_rate,
        gate_learning_rate=optim.gate_learning_rate,
        weight_decay=optim.weight_decay,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        seed=settings.seed,
    )
    done = training.train(model, loss, batches, config, accelerator, log=log, label=name, progress=settings.progress)
    return done, losses


def measure_looks(
    model: Any, measure: Measure, held_out: mmattn.Memory, seed: int, seconds: float
) -> tuple[list[Row], list[str]]:
    """The trained adapter with the right pictures, with shuffled ones, and without; the captions of the first."""
    other = held_out[torch.tensor(strangers(measure.data.held_out, seed))]
    looks = {"adapter, right picture": held_out, "adapter, shuffled pictures": other, "adapter, no picture": None}
    measured = [measure.row(name, model, memory) for name, memory in looks.items()]
    for row, _ in measured:
        row.parameters, row.seconds = model.trainable_parameters()[0], seconds
    return [row for row, _ in measured], measured[0][1]


def samples(data: Data, count: int = 8) -> list[int]:
    """A few held-out pictures, spread over the species."""
    step = max(1, len(data.held_out) // count)
    return list(range(0, len(data.held_out), step))[:count]
