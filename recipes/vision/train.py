"""Does seeing help a language model with words? Train an adapter on pictures with descriptions, and its controls.

    mmattn train config.yaml                        # drawn flowers
    mmattn train config_flowers12.yaml data.path=…  # photographs

Every row of the table sees the same texts in the same order for the same number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, training

from . import report
from .data import Data, load_data
from .measure import Measure, Row, strangers, write_captions
from .seeing import adapter_settings, load_encoder, load_lm, see
from .settings import Config

EXPLORED = 6  # captions that `mmattn explore` shows, at most


def main(config: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    settings = Config.model_validate(config)
    run = training.RunFolder(settings.out)
    run.write_config(settings.model_dump())
    torch.manual_seed(settings.seed)
    data = load_data(settings.data, settings.seed)
    eye = load_encoder(settings.encoder, settings.device)
    seen, held_out = see(eye, data, settings)
    lm, tokenizer = load_lm(settings.lm, settings.device)
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
    fitted = train_adapter(model, data, ids, seen, settings, run)
    model.save_adapter(run.path / "adapter", encoder=eye.fingerprint)
    losses = {"adapter, with its picture": fitted.losses}
    report.plot_losses(run.path / "loss.png", losses)
    if fitted.interrupted:
        print(f"stopped after {fitted.steps} steps; the adapter as it was then is in {run.path / 'adapter'}")
        return run.path
    try:
        rows, captions = measure_looks(model, measure, held_out, settings, fitted)
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
            control, losses["LoRA, text only"] = train_lora(lm, parameters, data, ids, settings, run, measure)
            for row in rows:
                row.bits_saved = report.bits_saved(row, control)
            rows.insert(1, control)
            report.plot_losses(run.path / "loss.png", losses)
        print(report.write_table(run, rows, data, settings))
    except KeyboardInterrupt:
        print(f"stopped before the table was complete; the trained adapter is in {run.path / 'adapter'}")
    return run.path


def measure_looks(
    model: Any, measure: Measure, held_out: mmattn.Memory, settings: Config, fitted: training.FitResult
) -> tuple[list[Row], list[str]]:
    """The trained adapter with the right pictures, with shuffled ones, and without; the captions of the first."""
    other = held_out[torch.tensor(strangers(measure.data.held_out, settings.seed))]
    looks = {"adapter, right picture": held_out, "adapter, shuffled pictures": other, "adapter, no picture": None}
    measured = [measure.row(name, model, memory) for name, memory in looks.items()]
    for row, _ in measured:
        row.parameters, row.seconds = model.trainable_parameters()[0], fitted.seconds
    return [row for row, _ in measured], measured[0][1]


def train_adapter(
    model: Any, data: Data, ids: Sequence[Sequence[int]], seen: mmattn.Memory, settings: Config, run: Any
) -> training.FitResult:
    """Train on pairs of a picture (or its mirror image) and a text that is true of it."""
    optim = settings.optim
    order = pair_order(data, settings)

    def compute_loss(step: int) -> torch.Tensor:
        pairs = order.pairs(step)
        memory = seen[torch.tensor([item for item, _ in pairs])]
        seed = settings.seed * 1_000_003 + step
        memory = training.augment_memory(
            memory, keep_fraction=optim.keep_fraction, noise_std=optim.noise_std, seed=seed
        )
        batch = training.collate([ids[text] for _, text in pairs], memory)
        return training.mean_nats(model, batch.to(settings.device))

    groups = training.parameter_groups(
        model.adapters,
        optim.learning_rate,
        gate_learning_rate=optim.gate_learning_rate,
        weight_decay=optim.weight_decay,
    )
    model.train()
    fitted = training.fit(
        groups,
        compute_loss,
        optim.max_steps,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        label="adapter",
        log=lambda line: run.log(model="adapter", **line),
        progress=settings.progress,
    )
    model.eval()
    return fitted


def train_lora(
    lm: Any, parameters: int, data: Data, ids: Sequence[Sequence[int]], settings: Config, run: Any, measure: Measure
) -> tuple[Row, list[float]]:
    """The control: as many parameters, the same texts in the same order, no pictures. Its row and its losses."""
    torch.manual_seed(settings.seed)
    optim = settings.optim
    order = pair_order(data, settings)
    lora = training.matched_lora(lm, parameters)

    def compute_loss(step: int) -> torch.Tensor:
        batch = training.collate([ids[text] for _, text in order.pairs(step)])
        return training.mean_nats(lora, batch.to(settings.device))

    count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    print(f"LoRA, text only: {count:,} trained parameters beside {parameters:,} of the adapter")
    lora.train()
    fitted = training.fit(
        training.parameter_groups(lora, optim.lora_learning_rate, weight_decay=optim.weight_decay),
        compute_loss,
        optim.max_steps,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        label="LoRA   ",
        log=lambda line: run.log(model="lora", **line),
        progress=settings.progress,
    )
    lora.eval()
    if fitted.interrupted:
        raise KeyboardInterrupt  # a baseline that was stopped early would flatter the adapter
    row, _ = measure.row("LoRA, text only", lora)
    row.bits_saved, row.parameters, row.seconds = 0.0, count, fitted.seconds
    lora.unload()
    return row, fitted.losses


def pair_order(data: Data, settings: Config) -> training.PairSampler:
    """Pictures and, if asked for, their mirror images after them, each with one of its texts, once an epoch."""
    texts = [picture.texts for picture in data.train]
    return training.PairSampler(texts * (2 if settings.data.flip else 1), settings.optim.batch_size, settings.seed)


def samples(data: Data, count: int = 8) -> list[int]:
    """A few held-out pictures, spread over the species."""
    step = max(1, len(data.held_out) // count)
    return list(range(0, len(data.held_out), step))[:count]


if __name__ == "__main__":
    import sys

    from mmattn.recipes import read_settings

    began = time.perf_counter()
    given = read_settings(Path(sys.argv[1]), sys.argv[2:])
    main({key: value for key, value in given.items() if key != "recipe"})
    print(f"{time.perf_counter() - began:.0f} s")
