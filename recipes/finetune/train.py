"""Fine-tune an adapter on your own data: a language model that writes, or a UNet that draws, with a memory beside.

    mmattn train config.yaml data.path=FOLDER                                 # one process
    torchrun --nproc-per-node 2 -m mmattn train config.yaml data.path=FOLDER  # two: the same losses and weights

Killed at any moment and started again with the same command, it goes on where it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from mmattn import inspect, training
from mmattn.errors import ConfigError, TextError, import_extra

from . import data, report
from .language import Language, hidden_states, trace_texts
from .painting import Painting
from .report import table
from .settings import Config

__all__ = ["Config", "main", "table"]

EPOCHS, STEPS = 20, 400  # the length of a run by default: so many epochs, and so many steps at least
MEASURED = 4  # held-out rows whose attention is measured during the training


def main(config: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    settings = Config.model_validate(config)
    written = {"recipe": "finetune", **settings.model_dump()}
    finished = training.RunFolder(settings.out).finished(written) if settings.resume else ""
    accelerator = training.make_accelerator(
        settings.out,
        mixed_precision=settings.mixed_precision,
        device=settings.device,
        trackers=() if finished else tuple(settings.trackers),
        settings=written,
        resumed_step=training.last_step(Path(settings.out) / "checkpoints") if settings.resume else 0,
    )
    if not accelerator.is_main_process:
        transformers_logging.disable_progress_bar()
    if finished:
        accelerator.print(finished)
    else:
        Run(settings, accelerator).run()
    training.end_training(accelerator)
    return Path(settings.out)


class Run:
    """One run: its data, its host, and the files that the first of its processes writes."""

    def __init__(self, settings: Config, accelerator: Any) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.out, self.first = Path(settings.out), accelerator.is_main_process
        self.progress = settings.progress and self.first
        others = {"batch_size", "lora_learning_rate", "host_gradient_checkpointing", "cache_hidden_states"}
        optim = settings.optim.model_dump(exclude={*others, "loss_chunk_size"})
        if not (optim["max_steps"] or optim["num_train_epochs"]):
            optim["num_train_epochs"] = EPOCHS
        evaluations = settings.eval.model_dump(include={"eval_steps", "early_stopping_patience"})
        self.config = training.TrainingConfig(**optim, **evaluations, seed=settings.seed)

    def run(self) -> None:
        """Read the data, attach the adapter, train and measure."""
        settings, accelerator = self.settings, self.accelerator

        # Data: rows, and their memories by frozen encoders. The host refuses rows that it cannot learn.
        encoding = self.read_data()
        self.folder = training.RunFolder(self.out) if self.first else None
        self.name_left_out()

        # Model: the frozen host with the adapter. Errors of the last steps are raised before the first one.
        self.check_end(encoding)
        # A run that is to go on may yet be refused for its settings, and must not leave them here then.
        if self.first and not (settings.resume and training.last_step(self.out / "checkpoints")):
            self.write_config()
        torch.manual_seed(settings.seed)
        model = self.host.attach(encoding.dim)
        if self.first:
            model.print_trainable_parameters()

        # Training.
        result = self.train(model, encoding, "adapter", self.config)
        if self.first:
            self.save(model, encoding)
        if result.interrupted:
            steps = f"stopped after {result.global_step} steps"
            accelerator.print(f"{steps}; the same command resumes from the last checkpoint")
            return

        # Measuring.
        if self.held_out:
            self.write_samples(model, encoding)
            self.write_table(model, result)
        self.name_left_out()
        accelerator.print(f"the adapter is in {self.out / 'adapter'}")

    def read_data(self) -> training.Encoding:
        """Read the rows and encode their memories; return what made these."""
        accelerator, optim = self.accelerator, self.settings.optim
        rows = data.read(self.settings, accelerator.print)
        self.host: Any = (Language if self.settings.host == "language" else Painting)(self.settings, accelerator)
        if self.settings.host == "unet":
            unknown = [text for part in rows.parts if (text := self.host.check(part)) is not None]
            if self.settings.captions == "memory" or unknown:
                rows = self.captions_in_memory(rows, unknown)
        rows = data.encode(rows, self.settings, accelerator.device, accelerator.main_process_first)
        encoding = rows.encoding
        if self.settings.host == "language":
            for part in rows.parts:
                self.host.check(part)
        self.pictures_alone = set(encoding.encoders) == {"pictures"} and not encoding.saved_memories
        self.pooled = self.pictures_alone and encoding.encoders["pictures"].pooled
        self.held_out, self.left_out = rows.held_out, rows.left_out
        self.shuffled = training.shuffle_memories(rows.held_out)
        self.batches = training.RowBatches(rows.rows, optim.batch_size, self.settings.seed)
        an_epoch = self.batches.batches_per_epoch
        if not (optim.max_steps or optim.num_train_epochs) and an_epoch is not None and EPOCHS * an_epoch < STEPS:
            self.config = replace(self.config, max_steps=STEPS, num_train_epochs=None)
        if not self.held_out:
            self.config = replace(self.config, eval_steps=0, early_stopping_patience=0)
        count = "a stream of" if rows.streamed else len(rows.rows)
        accelerator.print(f"{count} rows to train on, {len(self.held_out)} held out; memories of width {encoding.dim}")
        return encoding

    def captions_in_memory(self, rows: data.Data, unknown: Sequence[str]) -> data.Data:
        """Move texts that the UNet's own text encoder cannot read into the memory, read by one that knows the words."""
        encoder = self.settings.text_encoder
        if unknown and self.settings.captions == "host":
            raise TextError(
                f"{unknown[0]!r} has words this UNet's text encoder never saw: with captions=auto, text_encoder="
                f"{encoder} reads them as a part of the memory"
            )
        if rows.streamed:
            raise ConfigError("captions=memory needs rows that are not streamed: leave data.streaming out")
        why = f": {unknown[0]!r} has words that the UNet's own never saw" if unknown else ""
        self.accelerator.print(f"captions are read by {encoder}, as a part of the memory{why}")
        # The settings that are written say so to those who draw with the adapter.
        self.settings = self.settings.model_copy(update={"captions": "memory"})
        parts = (rows.rows, rows.held_out)
        return data.Data(*(None if part is None else data.captions_in_memory(part) for part in parts))

    def check_end(self, encoding: training.Encoding) -> None:
        """Refuse before the first step what would fail after the last one."""
        import_extra("matplotlib", "viz")
        prompts = [self.settings.caption.prompt, *(row.get("prompt") or "" for row in data.sample_rows(self.held_out))]
        if self.settings.host == "language" and (warning := self.host.check_prompts(prompts)):
            self.accelerator.print(warning)
        if self.pictures_alone:
            self.host.pipeline_config("", self.pooled)
        if self.held_out and self.settings.eval.controls:
            model = self.host.attach(encoding.dim)
            parameters = model.trainable_parameters()[0]
            model.unload()
            self.host.control(parameters)[1]()

    def write_config(self) -> None:
        """Write the settings."""
        self.folder.write_config({"recipe": "finetune", **self.settings.model_dump()})

    def save(self, model: Any, encoding: training.Encoding) -> None:
        """Save the adapter with its LoRA and its pipeline, the settings and the plot."""
        self.write_config()
        model.save_adapter(self.out / "adapter", encoder=encoding.fingerprint)
        if self.settings.lora.rank:
            self.host.host.save_pretrained(str(self.out / "lora"))
        self.save_pipeline()
        report.plot_metrics(self.out / "loss.png", self.out / "metrics.jsonl")

    def save_pipeline(self, results: str = "") -> None:
        """Write the file that `mmattn.pipeline` reads, if all memories of the adapter are of pictures."""
        if self.pictures_alone:
            self.host.pipeline_config(results, self.pooled).save(self.out / "adapter")

    def name_left_out(self, shown: int = 10) -> None:
        """Print the rows that were left out, before the training and after it, and write them to a file."""
        if self.left_out:
            lines = [f"{len(self.left_out)} left out, because it cannot be used (data.strict=true stops instead):"]
            more = [f"and {len(self.left_out) - shown} more: see left_out.txt"] if len(self.left_out) > shown else []
            self.accelerator.print("\n  ".join([*lines, *self.left_out[:shown], *more]))
            if self.first:
                self.folder.write_text("left_out.txt", "\n".join(self.left_out))

    def train(
        self, model: Any, encoding: training.Encoding | None, name: str, config: training.TrainingConfig
    ) -> training.TrainingResult:
        """Train the adapter, or the control without memories, with checkpoints and metrics of this name."""
        control, encoder = encoding is None, None if encoding is None else encoding.fingerprint
        suffix, targets = f"_{name}" if control else "", "tokens" if self.settings.host == "language" else "targets"
        checkpoints = self.out / f"checkpoints{suffix}"
        step = training.last_step(checkpoints) if self.settings.resume else 0
        log = training.MetricsLog(
            self.accelerator, self.out, step, name=f"metrics{suffix}", prefix=name, targets=targets
        )
        with hidden_states(self.settings, None if control else model):
            result = training.train(
                model,
                self.host.loss(model),
                self.batches,
                config,
                self.accelerator,
                collate=self.host.collate(text_only=control),
                eval_rows=self.held_out,
                shuffled_rows=self.shuffled if not control and self.settings.eval.shuffled_memory else (),
                folder=checkpoints,
                identity={"encoder": encoder},
                resume=self.settings.resume,
                log=log,
                measure=None if control else self.adapter_metrics(model, config),
                label=name,
                progress=self.progress,
                save_more=None if control else lambda folder: model.save_adapter(folder / "adapter", encoder=encoder),
            )
        if result.stopped_early:
            self.accelerator.print(
                f"{name}: stopped early after {result.global_step} steps, since {result.evals_without_improvement} "
                f"evaluations were no better; the weights are those of step {result.best_global_step}"
            )
        return result

    def adapter_metrics(self, model: Any, config: training.TrainingConfig) -> inspect.AdapterMetrics:
        """Measure gates, gradients and, as often as there are evaluations, the attention of a few held-out rows."""
        rows = list(itertools.islice((row for row in self.held_out if data.has_memory(row)), MEASURED))
        loss, collate = self.host.loss(model), self.host.collate(text_only=False)

        def forward() -> None:
            # One row at a time, so that no padding attends to anything.
            training.mean_loss(model, loss, rows, 1, self.accelerator, collate=collate)

        return inspect.AdapterMetrics(model, forward if rows else None, config.eval_steps or config.logging_steps)

    def write_samples(self, model: Any, encoding: training.Encoding) -> None:
        """Generate texts or pictures for the first few held-out rows."""
        rows, together = data.sample_rows(self.held_out), self.settings.called_together
        if not rows or not (self.first or together):
            return
        if self.settings.host == "unet":
            pictures = self.host.draw(
                model, training.stack_memories(rows), [row["text"] for row in rows], self.settings.seed
            )
            report.plot_pictures(self.out / "samples.png", rows, pictures)
            return
        prompts = [row.get("prompt") or "" for row in rows]
        memories = [training.stack_memories([row]) for row in rows]
        texts = [self.host.write(model, *both) for both in zip(memories, prompts, strict=True)]
        names = [", ".join(data.picture_files(row)) or row.get("prompt") or "row" for row in rows]
        if self.first:
            self.folder.write_text("samples.txt", "\n".join(map(": ".join, zip(names, texts, strict=True))))
        # Attribution works on a copy of the host, and a host in several processes has none.
        grid = encoding.encoders["pictures"].grid if "pictures" in encoding.encoders else None
        traces = [] if together else trace_texts(model, self.host.tokenizer, rows, texts, grid)
        if traces:
            inspect.save_traces(traces, self.out)

    def write_table(self, model: Any, result: training.TrainingResult) -> None:
        """Measure the held-out loss, and beside it the controls: no memory, shuffled memory, a text-only LoRA."""
        parameters, host = model.trainable_parameters()[0], self.settings.host
        parts = {"its own memory": self.held_out}
        if self.settings.eval.controls:
            alone = self.held_out.remove_columns(["memory", "segments", "scores", "sources"])
            parts |= {"shuffled memory": self.shuffled, "no memory": alone}
        losses = {name: self.loss(model, part) if len(part) else math.nan for name, part in parts.items()}
        rows = [
            report.table_row(f"adapter, {name}", loss, parameters, result.seconds, host)
            for name, loss in losses.items()
        ]
        if self.settings.eval.controls:
            model.unload()
            rows.insert(0, self.control(parameters))
        if self.first:
            self.folder.write_json("table.json", {"seed": self.settings.seed, "rows": rows})
            text = table([{"rows": rows}])
            self.folder.write_text("table.md", text)
            self.save_pipeline(text)
            print(text)

    def control(self, parameters: int) -> dict[str, Any]:
        """Train the text-only LoRA of equal size on the same rows in the same order for as long, and measure it."""
        torch.manual_seed(self.settings.seed)
        lora, remove = self.host.control(parameters)
        options = {"gate_learning_rate": None, "gradient_checkpointing": False, "torch_compile": False}
        rate = self.settings.optim.lora_learning_rate
        result = self.train(lora, None, "lora", replace(self.config, learning_rate=rate, **options))
        loss = math.nan if result.interrupted else self.loss(lora, self.held_out, text_only=True)
        count = sum(parameter.numel() for parameter in lora.parameters() if parameter.requires_grad)
        remove()
        return report.table_row("LoRA, text only", loss, count, result.seconds, self.settings.host)

    def loss(self, model: Any, rows: Any, text_only: bool = False) -> float:
        """Return the mean loss of rows."""
        optim, loss, collate = self.settings.optim, self.host.loss(model), self.host.collate(text_only)
        with hidden_states(self.settings, None if text_only else model):
            return training.mean_loss(
                model, loss, rows, optim.batch_size, self.accelerator, optim.gradient_accumulation_steps,
                self.settings.seed, collate=collate,
            )  # fmt: skip
