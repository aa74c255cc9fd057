"""Fine-tune an adapter on your own data: a language model that writes, or a UNet that draws, with a memory beside.

    mmattn train config.yaml data.path=FOLDER                                 # one process
    torchrun --nproc-per-node 2 -m mmattn train config.yaml data.path=FOLDER  # two: the same losses and weights

Killed at any moment and started again with the same command, it goes on where it was.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback
from transformers.utils import logging as transformers_logging

from mmattn import inspect, training
from mmattn.errors import ConfigError, TextError, import_extra

from . import data, probe, report
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
    run = Run(settings)
    if not run.first:
        transformers_logging.disable_progress_bar()
    finished = run.folder.finished(run.written()) if settings.resume else ""
    if finished:
        run.say(finished)
    else:
        run.run()
    return Path(settings.out)


class Run:
    """One run: its data, its host, and the files that the first of its processes writes."""

    def __init__(self, settings: Config) -> None:
        self.settings, self.arguments = settings, settings.arguments()
        self.out, self.first = Path(settings.out), self.arguments.process_index == 0
        self.folder = training.RunFolder(self.out)

    def say(self, text: str) -> None:
        """Print in the first process."""
        if self.first:
            print(text, flush=True)

    def written(self) -> dict[str, Any]:
        """Return the settings as they are written into the folder."""
        return {"recipe": "finetune", **self.settings.model_dump()}

    def run(self) -> None:
        """Read the data, attach the adapter, train and measure."""
        settings = self.settings

        # Data: rows, and their memories by frozen encoders. The host refuses rows that it cannot learn.
        encoding = self.read_data()
        self.name_left_out()

        # Model: the frozen host with the adapter. Errors of the last steps are raised before the first one.
        self.check_end(encoding)
        if goes_on := settings.resume and any((self.out / "checkpoints").glob("checkpoint-*")):
            self.folder.check_settings(self.written(), free=("eval", "caption"))
        if self.first and not goes_on:
            for folder in self.out.glob("checkpoints*"):
                shutil.rmtree(folder)
            self.folder.write_config(self.written())
            self.folder.write_text("metrics.jsonl", "")
        torch.manual_seed(settings.seed)
        model = self.host.attach(encoding.dim)
        if self.first:
            model.print_trainable_parameters()

        # Training.
        trainer = self.trainer(model, "adapter", encoder=encoding.fingerprint)
        checkpointed = settings.optim.checkpoint_adapters
        with (
            hidden_states(settings, model),
            training.gradient_checkpointing(model) if checkpointed else contextlib.nullcontext(),
        ):
            seconds = self.train(trainer, "adapter", self.adapter_metrics(trainer))
            if self.first:
                self.save(model, encoding)
            if seconds is None:
                self.say("the same command resumes from the last checkpoint, or starts again if there is none")
                return
            losses = self.losses(trainer) if len(self.held_out) else {}

        # Measuring.
        if losses:
            self.write_samples(model, encoding)
            self.write_table(model, losses, seconds)
        self.name_left_out()
        self.say(f"the adapter is in {self.out / 'adapter'}")

    def read_data(self) -> training.Encoding:
        """Read the rows and encode their memories; return what made these."""
        rows = data.read(self.settings, self.say)
        self.host: Any = (Language if self.settings.host == "language" else Painting)(self.settings, self.arguments)
        if self.settings.host == "unet":
            unknown = [text for part in rows.parts if (text := self.host.check(part)) is not None]
            if self.settings.captions == "memory" or unknown:
                rows = self.captions_in_memory(rows, unknown)
        rows = data.encode(rows, self.settings, self.arguments.device, self.arguments.main_process_first)
        encoding = rows.encoding
        if self.settings.host == "language":
            for part in rows.parts:
                self.host.check(part)
        self.pictures_alone = set(encoding.encoders) == {"pictures"} and not encoding.saved_memories
        self.pooled = self.pictures_alone and encoding.encoders["pictures"].pooled
        self.rows, self.held_out, self.left_out = rows.rows, rows.held_out, rows.left_out
        self.shuffled = training.shuffle_memories(rows.held_out)
        count = "a stream of" if rows.streamed else len(rows.rows)
        self.say(f"{count} rows to train on, {len(self.held_out)} held out; memories of width {encoding.dim}")
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
        self.say(f"captions are read by {encoder}, as a part of the memory{why}")
        # The settings that are written say so to those who draw with the adapter.
        self.settings = self.settings.model_copy(update={"captions": "memory"})
        parts = (rows.rows, rows.held_out)
        return data.Data(*(None if part is None else data.captions_in_memory(part) for part in parts))

    def check_end(self, encoding: training.Encoding) -> None:
        """Refuse before the first step what would fail after the last one."""
        import_extra("matplotlib", "viz")
        prompts = [self.settings.caption.prompt, *(row.get("prompt") or "" for row in data.sample_rows(self.held_out))]
        if self.settings.host == "language" and (warning := self.host.check_prompts(prompts)):
            self.say(warning)
        if self.pictures_alone:
            self.host.pipeline_config("", self.pooled)
        if self.held_out and self.settings.eval.controls:
            model = self.host.attach(encoding.dim)
            parameters = model.trainable_parameters()[0]
            model.unload()
            self.host.control(parameters)[1]()

    def save(self, model: Any, encoding: training.Encoding) -> None:
        """Save the adapter with its LoRA and its pipeline, the settings and the plot."""
        self.folder.write_config(self.written())
        model.save_adapter(self.out / "adapter", encoder=encoding.fingerprint)
        if self.settings.lora.rank:
            self.host.host.save_pretrained(str(self.out / "lora"))
        self.save_pipeline()
        self.folder.plot_losses()

    def save_pipeline(self, results: str = "") -> None:
        """Write the file that `mmattn.pipeline` reads, if all memories of the adapter are of pictures."""
        if self.pictures_alone:
            self.host.pipeline_config(results, self.pooled).save(self.out / "adapter")
        elif results:
            self.say(
                "no pipeline_config.json, as memories are not pictures alone: load the adapter with "
                f"mmattn.load(host, {str(self.out / 'adapter')!r})"
            )

    def name_left_out(self, shown: int = 10) -> None:
        """Print the rows that were left out, before the training and after it, and write them to a file."""
        if self.left_out:
            lines = [f"{len(self.left_out)} left out, because it cannot be used (data.strict=true stops instead):"]
            more = [f"and {len(self.left_out) - shown} more: see left_out.txt"] if len(self.left_out) > shown else []
            self.say("\n  ".join([*lines, *self.left_out[:shown], *more]))
            if self.first:
                self.folder.write_text("left_out.txt", "\n".join(self.left_out))

    def trainer(self, model: Any, name: str, **fields: Any) -> training.AdapterTrainer:
        """Return the trainer of the adapter, or of the control without memories."""
        settings, control = self.settings, name != "adapter"
        optim, evaluation = settings.optim, settings.eval
        if optim.max_steps < 1 and optim.num_train_epochs is None:
            per_step = optim.per_device_train_batch_size * optim.gradient_accumulation_steps * self.arguments.world_size
            short = hasattr(self.rows, "__len__") and EPOCHS * -(-len(self.rows) // per_step) < STEPS
            fields |= {"max_steps": STEPS} if short else {"num_train_epochs": EPOCHS}
        if control:
            fields |= {"learning_rate": optim.lora_learning_rate, "torch_compile": False}
            fields["output_dir"] = f"{self.out}/checkpoints_{name}"
        if not len(self.held_out):
            fields |= {"eval_strategy": "no", "load_best_model_at_end": False}
        held_out = {"right": self.held_out}
        if evaluation.shuffled_memory and not control and len(self.shuffled):
            held_out["shuffled"] = self.shuffled
        encoder = fields.pop("encoder", None)
        trainer = self.host.trainer(
            model,
            settings.arguments(**fields),
            text_only=control,
            train_dataset=self.rows,
            eval_dataset=held_out if len(self.held_out) else None,
            gate_learning_rate=None if control else optim.gate_learning_rate,
            encoder=encoder,
        )
        if evaluation.early_stopping_patience and len(self.held_out):
            trainer.add_callback(EarlyStoppingCallback(evaluation.early_stopping_patience))
        return trainer

    def train(self, trainer: training.AdapterTrainer, name: str, measure: Any = None) -> float | None:
        """Train from the last checkpoint on; return the seconds, None after Ctrl-C."""
        settings = self.settings
        try:
            return self.folder.train(trainer, name, settings.progress, resume=settings.resume, measure=measure)
        except KeyboardInterrupt:
            return None

    def adapter_metrics(self, trainer: training.AdapterTrainer) -> inspect.AdapterMetrics:
        """Measure gates, gradients and, as often as there are evaluations, the attention of a few held-out rows."""
        rows = list(itertools.islice((row for row in self.held_out if data.has_memory(row)), MEASURED))

        def forward() -> None:
            # One row at a time, so that no padding attends to anything.
            for row in rows:
                trainer.prediction_step(trainer.model, trainer.data_collator([row]), prediction_loss_only=True)

        steps = self.settings.eval.eval_steps or self.settings.optim.logging_steps
        return inspect.AdapterMetrics(trainer.model, forward if rows else None, steps)

    def losses(self, trainer: training.AdapterTrainer) -> dict[str, float]:
        """Return the held-out loss, that with shuffled memories if it is measured, and as a control that without."""
        evaluation, parts = self.settings.eval, {"its own memory": self.held_out}
        if (evaluation.shuffled_memory or evaluation.controls) and len(self.shuffled):
            parts["shuffled memory"] = self.shuffled
        if evaluation.controls:
            parts["no memory"] = self.held_out.remove_columns(["memory", "segments", "scores", "sources"])
        metrics = trainer.evaluate({name.replace(" ", "_"): part for name, part in parts.items()})
        return {name: metrics[f"eval_{name.replace(' ', '_')}_loss"] for name in parts}

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
        texts = self.host.write(model, training.stack_memories(rows), prompts)
        names = [", ".join(data.picture_files(row)) or row.get("prompt") or "row" for row in rows]
        if self.first:
            self.folder.write_text("samples.txt", "\n".join(map(": ".join, zip(names, texts, strict=True))))
        # Attribution works on a copy of the host, and a host in several processes has none.
        grid = encoding.encoders["pictures"].grid if "pictures" in encoding.encoders else None
        if not together and (traces := trace_texts(model, self.host.tokenizer, rows, texts, grid)):
            inspect.save_traces(traces, self.out)

    def write_table(self, model: Any, losses: dict[str, float], seconds: float) -> None:
        """Write the held-out losses, the words that are right, and beside them what the controls have."""
        parameters, host = model.trainable_parameters()[0], self.settings.host
        rows = [report.table_row(f"adapter, {name}", loss, parameters, seconds, host) for name, loss in losses.items()]
        if host == "language" and hasattr(self.rows, "__len__") and (self.first or self.settings.called_together):
            rows = report.with_words(rows, probe.measure(self.host, model, self.rows, self.held_out))
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
        trainer = self.trainer(lora, "lora")
        seconds = self.train(trainer, "lora")
        if seconds is None:
            raise KeyboardInterrupt  # a baseline that was stopped early would flatter the adapter
        loss = trainer.evaluate(self.held_out)["eval_loss"]
        count = sum(parameter.numel() for parameter in lora.parameters() if parameter.requires_grad)
        remove()
        return report.table_row("LoRA, text only", loss, count, seconds, self.settings.host)
