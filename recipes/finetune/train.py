"""Fine-tune an adapter on your own data: a language model that writes, or a UNet that draws, with a memory beside.

    mmattn train config.yaml data.path=FOLDER                                 # one process
    torchrun --nproc-per-node 2 -m mmattn train config.yaml data.path=FOLDER  # two: the same losses and weights

Killed at any moment and started again with the same command, it goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_said

from mmattn import inspect, training
from mmattn.errors import ConfigError, TextError

from . import data, looks, report
from .language import Language, hidden_states, write_texts
from .memories import captions_in_memory, row_memories, shown_pictures, without
from .painting import Painting
from .settings import Config

EPOCHS, STEPS = 20, 400
"""As long as a run is where nothing else is asked for: so many epochs, and so many steps at least."""


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
        # Their bars are not asked whether they may.
        transformers_said.disable_progress_bar()
    if finished:
        accelerator.print(finished)
    else:
        Run(settings, accelerator).run()
    training.end_training(accelerator)
    return Path(settings.out)


@dataclass
class Line:
    """One line of the table."""

    name: str
    loss: float
    parameters: int
    seconds: float


def table(contents: list[dict[str, Any]]) -> str:
    """The lines of several `table.json`, each figure as mean ± half the range."""
    columns = {
        "loss": ("held-out loss", 1, ".4f", ""),
        "parameters": ("trained parameters", 1, ",.0f", ""),
        "seconds": ("seconds", 1, ".0f", ""),
    }
    return training.spread_table("", columns, [content["rows"] for content in contents])


class Run:
    """One run: its data, its host, and what the first of its processes writes down."""

    def __init__(self, settings: Config, accelerator: Any) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.out, self.first = Path(settings.out), accelerator.is_main_process
        self.progress = settings.progress and self.first
        optim = settings.optim
        self.config = training.TrainingConfig(
            max_steps=optim.max_steps,
            num_train_epochs=optim.num_train_epochs if optim.num_train_epochs or optim.max_steps else EPOCHS,
            gradient_accumulation_steps=optim.gradient_accumulation_steps,
            learning_rate=optim.learning_rate,
            gate_learning_rate=optim.gate_learning_rate,
            weight_decay=optim.weight_decay,
            warmup_steps=optim.warmup_steps,
            lr_scheduler_type=optim.lr_scheduler_type,
            max_grad_norm=optim.max_grad_norm,
            ema_decay=optim.ema_decay,
            gradient_checkpointing=optim.gradient_checkpointing,
            torch_compile=optim.torch_compile,
            eval_steps=settings.eval.eval_steps,
            early_stopping_patience=settings.eval.early_stopping_patience,
            save_steps=optim.save_steps,
            save_total_limit=optim.save_total_limit,
            logging_steps=optim.logging_steps,
            dataloader_prefetch_factor=optim.dataloader_prefetch_factor,
            seed=settings.seed,
        )

    def run(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        rows = data.read(settings, accelerator.print)
        if not rows.held_out:
            self.config = replace(self.config, eval_steps=0, early_stopping_patience=0)
        self.host: Any = (Language if settings.host == "language" else Painting)(settings, accelerator)
        unknown = [text for part in rows.parts if (text := self.host.check(part)) is not None]
        if unknown and settings.captions == "host":
            raise TextError(
                f"{unknown[0]!r} has words this UNet's text encoder never saw: with captions=auto, text_encoder="
                f"{settings.text_encoder} reads them as a part of the memory"
            )
        if settings.captions == "memory" or unknown:
            rows = self._captions_in_memory(rows, unknown)
        memories = row_memories(settings, rows.rows, accelerator.device)
        self.pictures_alone = training.memory_kinds(rows.rows) == {"pictures"}
        self.pooled = rows.encoded is not None and self.pictures_alone and rows.encoded.encoders["pictures"].pooled
        rows = data.encode(rows, memories, settings, accelerator, self.progress)
        self.held_out, self.left_out = rows.held_out, rows.left_out
        self.shuffled = training.shuffle_memories(rows.held_out)
        order: Any = training.RowBatches if rows.encoded is None else training.EncodedBatches
        self.batches = order(rows.rows, settings.optim.batch_size, settings.seed)
        optim, an_epoch = settings.optim, self.batches.batches_per_epoch
        if not (optim.max_steps or optim.num_train_epochs) and an_epoch is not None and EPOCHS * an_epoch < STEPS:
            self.config = replace(self.config, max_steps=STEPS, num_train_epochs=None)
        self.folder = self._begin()
        count = "a stream of" if rows.streamed else len(rows.rows)
        accelerator.print(f"{count} rows to train on, {len(self.held_out)} held out; memories of width {memories.dim}")
        self._say_left_out()
        report.check_end(self, memories, accelerator.print)
        torch.manual_seed(settings.seed)
        model = self.host.attach(memories)
        if self.first:
            model.print_trainable_parameters()
        done = self._train(model, memories, "adapter", self.config)
        if self.first:
            self._write_config(self.folder)
            model.save_adapter(self.out / "adapter", encoder=memories.fingerprint)
            if settings.lora.rank:
                self.host.host.save_pretrained(str(self.out / "lora"))
            self._save_pipeline()
            report.plot_metrics(self.out / "loss.png", self.out / "metrics.jsonl")
        if done.interrupted:
            accelerator.print(
                f"stopped after {done.global_step} steps; the same command resumes from the last checkpoint"
            )
            return
        if self.held_out:
            self._samples(model, memories)
            self._table(model, memories, done)
        self._say_left_out()
        accelerator.print(f"the adapter is in {self.out / 'adapter'}")

    def _save_pipeline(self, results: str = "") -> None:
        """What `mmattn.pipeline` needs of the adapter, where all its memories are of pictures."""
        if self.pictures_alone:
            self.host.pipeline_config(results, self.pooled).save(self.out / "adapter")

    def _captions_in_memory(self, rows: data.Data, unknown: Sequence[str]) -> data.Data:
        """Texts that the UNet's own text encoder cannot read go into the memory, read by one that knows the words."""
        if rows.streamed:
            raise ConfigError("captions=memory needs rows that are not streamed: leave data.streaming out")
        why = f": {unknown[0]!r} has words that the UNet's own never saw" if unknown else ""
        self.accelerator.print(f"captions are read by {self.settings.text_encoder}, as a part of the memory{why}")
        # So that what draws with the adapter knows it, too.
        self.settings = self.settings.model_copy(update={"captions": "memory"})
        return replace(rows, rows=captions_in_memory(rows.rows), held_out=captions_in_memory(rows.held_out))

    def _say_left_out(self) -> None:
        """Name what was left out, where it is seen before the training and after it, and in a file."""
        if self.left_out:
            self.accelerator.print(data.describe_left_out(self.left_out))
            if self.first:
                self.folder.write_text("left_out.txt", "\n".join(self.left_out))

    def _begin(self) -> Any:
        """The run's folder, in the first process."""
        if not self.first:
            return None
        folder = training.RunFolder(self.out)
        # A run that is to go on may yet be refused for its settings, and must not leave them here then.
        if not (self.settings.resume and training.last_step(self.out / "checkpoints")):
            self._write_config(folder)
        return folder

    def _write_config(self, folder: Any) -> None:
        folder.write_config({"recipe": "finetune", **self.settings.model_dump()})

    def _train(
        self, model: Any, memories: training.MemorySource | None, name: str, config: training.TrainingConfig
    ) -> training.TrainingResult:
        """Train, with checkpoints and metrics of this name."""
        own, encoder = name == "adapter", None if memories is None else memories.fingerprint
        checkpoints = self.out / ("checkpoints" if own else f"checkpoints_{name}")
        named = {"name": "metrics" if own else f"metrics_{name}", "prefix": name}
        if self.settings.host == "language":
            named["targets"] = "tokens"
        step = training.last_step(checkpoints) if self.settings.resume else 0
        with hidden_states(self.settings, model if own else None):
            done = training.train(
                model,
                self.host.loss(model),
                self.batches,
                config,
                self.accelerator,
                collate=self.host.collate(memories),
                eval_rows=self.held_out,
                shuffled_rows=self.shuffled if own and self.settings.eval.shuffled_memory else (),
                folder=checkpoints,
                identity={"encoder": encoder},
                resume=self.settings.resume,
                log=training.MetricsLog(self.accelerator, self.out, step, **named),
                measure=looks.adapter_metrics(model, self.host, memories, self.held_out, self.accelerator, config)
                if own
                else None,
                label=name,
                progress=self.progress,
                save_more=(lambda where: model.save_adapter(where / "adapter", encoder=encoder)) if own else None,
            )
        if done.stopped_early:
            self.accelerator.print(
                f"{name}: stopped early after {done.global_step} steps, since {done.evals_without_improvement} "
                f"evaluations were no better; the weights are those of step {done.best_global_step}"
            )
        return done

    def _samples(self, model: Any, memories: training.MemorySource) -> None:
        """What is written or drawn of the first few held-out rows."""
        rows, together = data.sample_rows(self.held_out), self.settings.called_together
        if not rows or not (self.first or together):
            return
        if self.settings.host == "unet":
            drawn = self.host.draw(model, memories.of(rows), [row.text for row in rows], self.settings.seed)
            report.plot_pictures(self.out / "samples.png", rows, drawn)
            traces = looks.unet_traces(self.host, model, rows, memories, self.settings.seed)
        else:
            tokenizer, texts = self.host.tokenizer, []
            for row in rows:
                texts += write_texts(model, tokenizer, memories.of([row]), row.prompt, **self._length())
            shown = [", ".join(shown_pictures(row)) or row.prompt or "row" for row in rows]
            lines = [f"{name}: {text}" for name, text in zip(shown, texts, strict=True)]
            if self.first:
                self.folder.write_text("samples.txt", "\n".join(lines))
            # What examines a host works on a copy of it, which one in several processes has not.
            traces = [] if together else looks.language_traces(model, tokenizer, rows, texts, memories)
        if traces:
            inspect.save_traces(traces, self.out)

    def _length(self) -> dict[str, int]:
        return {"max_new_tokens": self.host.max_new_tokens, "num_beams": self.settings.caption.num_beams}

    def _table(self, model: Any, memories: training.MemorySource, done: training.TrainingResult) -> None:
        """The held-out loss, and beside it the controls, where they are asked for."""
        parameters = model.trainable_parameters()[0]

        def line(name: str, rows: Sequence[training.Row]) -> Line:
            return Line(name, self._measured(model, memories, rows), parameters, done.seconds)

        lines = [line("adapter, its own memory", self.held_out)]
        if self.settings.eval.controls:
            name = "adapter, shuffled memory"
            none = Line(name, math.nan, parameters, done.seconds)
            lines.append(line(name, self.shuffled) if self.shuffled else none)
            lines.append(line("adapter, no memory", without(self.held_out)))
            model.unload()
            lines.insert(0, self._control(parameters))
        if self.first:
            text = report.table(lines, self.settings.host)
            self.folder.write_text("table.md", text)
            self.folder.write_json("table.json", {"seed": self.settings.seed, "rows": [vars(one) for one in lines]})
            self._save_pipeline(text)
            print(text)

    def _control(self, parameters: int) -> Line:
        """The text-only LoRA of equal size, on the same rows in the same order for as long."""
        torch.manual_seed(self.settings.seed)
        lora, undo = self.host.control(parameters)
        rate = self.settings.optim.lora_learning_rate
        of_adapters = {"gate_learning_rate": None, "gradient_checkpointing": False, "torch_compile": False}
        config = replace(self.config, learning_rate=rate, **of_adapters)
        done = self._train(lora, None, "lora", config)
        found = self._measured(lora, None, self.held_out)
        count = sum(parameter.numel() for parameter in lora.parameters() if parameter.requires_grad)
        undo()
        return Line("LoRA, text only", found if not done.interrupted else math.nan, count, done.seconds)

    def _measured(self, model: Any, memories: training.MemorySource | None, rows: Sequence[training.Row]) -> float:
        optim, loss, collate = self.settings.optim, self.host.loss(model), self.host.collate(memories)
        with hidden_states(self.settings, None if memories is None else model):
            return training.mean_loss(
                model, loss, rows, optim.batch_size, self.accelerator, optim.gradient_accumulation_steps,
                self.settings.seed, collate=collate,
            )  # fmt: skip
