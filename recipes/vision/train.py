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

import report
import torch
from data import Data, load_data
from measure import Measure, Row, strangers, write_captions
from seeing import adapter_settings, load_encoder, load_lm, see
from settings import Config

import mmattn
from mmattn import training


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
    report.plot_losses(run.path / "loss.png", {"adapter, with its picture": fitted.losses})
    if fitted.interrupted:
        print(f"stopped after {fitted.steps} steps; the adapter as it was then is in {run.path / 'adapter'}")
        return run.path

    rows = [frozen]
    losses = {"adapter, with its picture": fitted.losses}
    other = held_out[torch.tensor(strangers(data.held_out, settings.seed))]
    looks = {"adapter, right picture": held_out, "adapter, shuffled pictures": other, "adapter, no picture": None}
    measured = {name: measure.row(name, model, memory) for name, memory in looks.items()}
    report.picture_grid(run.path / "captions.png", model, tokenizer, data, held_out, shown, eye.grid)
    captions = measured["adapter, right picture"][1]
    run.write_text("samples_after.txt", report.samples(data, shown, [captions[i] for i in shown]))
    run.write_json("captions.json", report.all_captions(data, captions))
    model.detach()
    for row, _ in measured.values():
        row.parameters, row.seconds = parameters, fitted.seconds

    if settings.controls:
        control, fitted = train_lora(lm, parameters, data, ids, settings, run, measure)
        losses["LoRA, text only"] = fitted.losses
        rows.append(control)
        for row in (frozen, *(row for row, _ in measured.values())):
            row.bits_saved = report.bits_saved(row, control)
        report.plot_losses(run.path / "loss.png", losses)
    rows += [row for row, _ in measured.values()]
    print(report.write_table(run, rows, data, settings))
    return run.path


def train_adapter(
    model: Any, data: Data, ids: Sequence[Sequence[int]], seen: mmattn.Memory, settings: Config, run: Any
) -> training.Fitted:
    """Train on pairs of a picture (or its mirror image) and a text that is true of it."""
    optim = settings.optim
    order = pair_order(data, settings)

    def loss_at(step: int) -> torch.Tensor:
        pairs = order.pairs(step)
        memory = seen[torch.tensor([item for item, _ in pairs])].to(settings.device)
        memory = training.disturb(memory, keep=optim.keep, noise=optim.noise, seed=settings.seed * 1_000_003 + step)
        return training.mean_nats(model, on_device(training.collate([ids[t] for _, t in pairs], memory), settings))

    groups = training.parameter_groups(model.adapters, optim.lr, gate_lr=optim.gate_lr, weight_decay=optim.weight_decay)
    model.train()
    fitted = training.fit(
        groups,
        loss_at,
        optim.steps,
        warmup=optim.warmup,
        clip=optim.clip,
        label="adapter",
        log=lambda line: run.log(model="adapter", **line),
        progress=settings.progress,
    )
    model.eval()
    return fitted


def train_lora(
    lm: Any, parameters: int, data: Data, ids: Sequence[Sequence[int]], settings: Config, run: Any, measure: Measure
) -> tuple[Row, training.Fitted]:
    """The control: as many parameters, the same texts in the same order, no pictures."""
    torch.manual_seed(settings.seed)
    optim = settings.optim
    order = pair_order(data, settings)
    lora = training.matched_lora(lm, parameters)

    def loss_at(step: int) -> torch.Tensor:
        batch = training.collate([ids[text] for _, text in order.pairs(step)])
        return training.mean_nats(lora, on_device(batch, settings))

    count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    print(f"LoRA, text only: {count:,} trained parameters beside {parameters:,} of the adapter")
    lora.train()
    fitted = training.fit(
        training.parameter_groups(lora, optim.lora_lr, weight_decay=optim.weight_decay),
        loss_at,
        optim.steps,
        warmup=optim.warmup,
        clip=optim.clip,
        label="LoRA   ",
        log=lambda line: run.log(model="lora", **line),
        progress=settings.progress,
    )
    lora.eval()
    row, _ = measure.row("LoRA, text only", lora)
    row.bits_saved, row.parameters, row.seconds = 0.0, count, fitted.seconds
    lora.unload()
    return row, fitted


def pair_order(data: Data, settings: Config) -> training.PairOrder:
    """Pictures and, if asked for, their mirror images behind them, each with one of its texts, once an epoch."""
    texts = [picture.texts for picture in data.train]
    return training.PairOrder(texts * (2 if settings.data.flip else 1), settings.optim.batch, settings.seed)


def on_device(batch: training.TextBatch, settings: Config) -> training.TextBatch:
    """The batch where the model is."""
    if settings.device == "cpu":
        return batch
    tensors = (batch.input_ids, batch.attention_mask, batch.labels)
    return training.TextBatch(*(tensor.to(settings.device) for tensor in tensors), batch.memory)


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
