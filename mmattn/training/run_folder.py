"""The folder of a run: settings, metrics, plots, tables; the trainings that write into it, and their cost forecast."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from mmattn.errors import ConfigError
from mmattn.inspect.plots import plot_curves
from mmattn.progress import tracked
from mmattn.storage.files import write_text
from mmattn.training.compare import flattened, read_metrics

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

IGNORED = 1e-3
"""Share of the loss by which shuffled memories must be worse than the right ones."""


class RunFolder:
    """The folder of a run. Files of an earlier run are overwritten.

    Args:
        path: path of the folder, created if missing.

    Raises:
        OSError: the folder cannot be created or written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def begin(self, settings: Mapping[str, object]) -> bool:
        """Start a run: write its settings, and remove metrics and table of an earlier run.

        A finished run with the same settings stays unchanged; a line is printed.

        Args:
            settings: settings of the run, as JSON values.

        Returns:
            False if the run is already finished.
        """
        if finished := self.finished(settings):
            print(finished)
            return False
        for name in ("table.json", "table.md"):
            (self.path / name).unlink(missing_ok=True)
        self.write_config(settings)
        self.write_text("metrics.jsonl", "")
        return True

    def finished(self, settings: Mapping[str, object]) -> str:
        """Return a message if a run with the same settings is finished here, else an empty string.

        Args:
            settings: as passed to `begin` or `write_config`.
        """
        earlier = self._read_config()
        if not (self.path / "table.json").is_file() or _learned_from(earlier) != _learned_from(settings):
            return ""
        return (
            f"{self.path} holds the finished run of these settings, and its table is left as it is; to begin anew "
            "remove that folder, or name another: out=FOLDER"
        )

    def check_settings(self, settings: Mapping[str, object], free: Sequence[str] = ()) -> None:
        """Refuse to continue a run with other settings.

        Args:
            settings: as passed to `write_config`.
            free: settings, or sections of them, that may differ.

        Raises:
            ConfigError: the run in this folder has other settings.
        """
        old, new = flattened(_learned_from(self._read_config())), flattened(_learned_from(settings))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        names = [name for name in names if name.split(".")[0] not in free]
        if old and names:
            differing = "; ".join(f"{name}: {old.get(name)!r} there, {new.get(name)!r} here" for name in names[:5])
            raise ConfigError(
                f"{self.path} holds a run with other settings ({differing}): start it with those, name another folder, "
                "or begin anew with resume=false"
            )

    def _read_config(self) -> dict[str, object]:
        """Return the settings that were written, empty where there are none."""
        import yaml

        config = self.path / "config.resolved.yaml"
        content = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
        return content if isinstance(content, dict) else {}

    def write_config(self, settings: Mapping[str, object]) -> None:
        """Write all settings as `config.resolved.yaml`."""
        import yaml

        self.write_text("config.resolved.yaml", yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))

    def log(self, **figures: object) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(figures)) + "\n")

    def forget(self, model: str, step: int) -> None:
        """Drop the lines of `metrics.jsonl` after a step of a model.

        Args:
            model: its name.
            step: the last step that stays.
        """
        lines: list[dict[str, Any]] = read_metrics(self.path / "metrics.jsonl")
        rest = [line for line in lines if line.get("model") != model or line["step"] <= step]
        self.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in rest))

    def train(
        self,
        trainer: Trainer,
        label: str,
        progress: bool = True,
        resume: bool = False,
        measure: Callable[[int], Mapping[str, float]] | None = None,
    ) -> float:
        """Train, with metrics in `metrics.jsonl`, and return the seconds.

        Args:
            trainer: the trainer to run.
            label: name of the model in the metrics and the progress bar.
            progress: show progress.
            resume: resume from the last checkpoint, if any.
            measure: called with the number of each logged step, with gradients present, in every process; its result is
                added to the metrics. See `mmattn.inspect.AdapterMetrics`.

        Raises:
            KeyboardInterrupt: Ctrl-C; the model has the weights of its last step.
            DryRunEnded: inside a `dry_run` block, after a few measured steps.
        """
        is_dry = _DRY_RUN.get()
        trackers = get_reporting_integration_callbacks(trainer.args.report_to) if is_dry else []
        for callback in (PrinterCallback, ProgressCallback, *trackers):
            trainer.remove_callback(callback)
        trainer.add_callback(CostForecast(label) if is_dry else RunLog(self, label, progress, measure))
        try:
            output = trainer.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            print(f"{label}: stopped after {trainer.state.global_step} steps", flush=True)
            raise
        return float(output.metrics["train_runtime"])

    def plot_losses(self) -> None:
        """Plot the loss of each model as `loss.png`."""
        losses: dict[str, dict[int, float]] = {}
        for line in read_metrics(self.path / "metrics.jsonl"):
            if isinstance(loss := line.get("loss"), float):
                losses.setdefault(str(line.get("model", "loss")), {})[int(str(line["step"]))] = loss
        plot_curves({"loss": losses}, self.path / "loss.png", log=True)

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file with a final line break, and return its path."""
        write_text(self.path / name, text if not text or text.endswith("\n") else text + "\n")
        return self.path / name

    def write_json(self, name: str, content: object) -> Path:
        """Write a JSON file and return its path; numbers that are not finite become null."""
        return self.write_text(name, json.dumps(_plain(content), indent=2, ensure_ascii=False))

    def finish(self, content: dict[str, object], table: Callable[[list[dict[str, object]]], str]) -> str:
        """Write the content of a finished run as `table.json` and its table as `table.md`, and print the table.

        Args:
            content: the input of `table`, as JSON values.
            table: a function from the contents of one or more runs to the text.
        """
        self.write_json("table.json", content)
        text = table([content])
        self.write_text("table.md", text)
        print(text)
        return text


# Callbacks of a training ----------------------------------------------------------------------------------------------


class RunLog(TrainerCallback):
    """Writes what a Trainer logs into `metrics.jsonl` of a run and shows progress; arguments of `RunFolder.train`."""

    def __init__(
        self,
        run: RunFolder,
        label: str,
        progress: bool = True,
        measure: Callable[[int], Mapping[str, float]] | None = None,
    ) -> None:
        self.run, self.label, self.progress, self.measure = run, label, progress, measure
        self.loss, self.measured = "", dict[str, float]()
        self.right, self.ignored = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the progress; of a run that goes on drop the lines of steps that come again."""
        first, last = state.global_step, state.max_steps
        if not state.is_world_process_zero:
            self.progress = False
        elif first:
            self.run.forget(self.label, first)
            print(f"{self.label} resumes at step {first} of {last}", file=sys.stderr, flush=True)
        self.bar = tracked(last, self.label, self.progress, lambda: self.loss, first)
        next(self.bar, None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure a step that is logged, while its gradients are there."""
        step = state.global_step + 1
        if self.measure is not None and (step % state.logging_steps == 0 or step == state.max_steps):
            self.measured = dict(self.measure(step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step, and have the last one logged."""
        control.should_log |= state.global_step == state.max_steps
        next(self.bar, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a line, in the first process."""
        logs = logs or {}
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"
            logs |= self.measured
        self.right = logs.get("eval_right_loss", self.right)
        if "eval_shuffled_loss" in logs:
            self._compare(logs["eval_shuffled_loss"], state.global_step)
        if state.is_world_process_zero:
            self.run.log(model=self.label, step=state.global_step, **logs)

    def _compare(self, shuffled: float, step: int) -> None:
        """Warn, once, after three evaluations in a row in which shuffled memories did as well as the right ones."""
        self.ignored = self.ignored + 1 if shuffled - self.right <= IGNORED * abs(self.right) else 0
        if self.ignored == 3 and self.progress:
            print(
                f"{self.label}: the adapter ignores its memory so far: up to step {step} the loss of held-out rows is "
                f"{self.right:.4f} with the right memories and {shuffled:.4f} with shuffled ones",
                flush=True,
            )


def _learned_from(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that a table depends on, as JSON has them."""
    return {name: _plain(value) for name, value in settings.items() if name not in ("out", "progress", "resume")}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


MEASURED = 10
"""Steps of a dry run that are measured; one more comes first, in which memory is allocated and kernels are chosen."""
_DRY_RUN: ContextVar[bool] = ContextVar("mmattn_dry_run", default=False)


class DryRunEnded(Exception):
    """Raised by a training inside `dry_run`; the message is the cost of the whole run."""


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside the block `RunFolder.train` measures its first steps and raises `DryRunEnded` with the cost of the run.

    It reads their batches and trains the model: give it a stream and a model of its own.
    """
    token = _DRY_RUN.set(True)
    try:
        yield
    finally:
        _DRY_RUN.reset(token)


class CostForecast(TrainerCallback):
    """Ends a training after a few steps, without evaluations and saves, and raises `DryRunEnded` with the cost."""

    def __init__(self, label: str) -> None:
        self.label = label

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the measurement; the second step begins it anew."""
        if state.global_step < 2:
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """End the measurement after the last measured step."""
        control.should_evaluate = control.should_save = False
        steps = state.global_step
        if steps == min(state.max_steps, 1 + MEASURED):
            seconds = (time.perf_counter() - self.began) / max(1, steps - 1)
            raise DryRunEnded(self._cost(model, args, state.max_steps, seconds))

    def _cost(self, model: nn.Module, args: TrainingArguments, steps: int, seconds: float) -> str:
        """Return the cost of so many steps of so many seconds as text."""
        parameters = list(model.parameters())
        trained = [weight for weight in parameters if weight.requires_grad]
        learned, total = (sum(weight.numel() for weight in part) for part in (trained, parameters))
        weights = sum(weight.nbytes for weight in parameters) / 1e9
        # AdamW has two moments for each weight.
        moments = 3 * sum(weight.nbytes for weight in trained) / 1e9
        if args.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(args.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return (
            f"{self.label}: {learned:,} of {total:,} parameters are trained\n"
            f"bytes on {args.device}: {weights:.2f} GB of weights, {moments:.2f} GB of gradients and moments, "
            f"{peak / 1e9:.2f} GB at most so far\n"
            f"steps: {steps:,} of {rows} rows in {args.world_size} process{'es' * (args.world_size > 1)}, "
            f"{seconds:.2f} s each\n"
            f"time: {steps * seconds / 3600:.2f} hours, without evaluations"
        )
