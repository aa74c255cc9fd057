"""A `transformers.Trainer` for adapted models: memory reaches them, and checkpoints hold only what is trained."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mmattn.adapters.serialization import load_folder
from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.hosts.calibration import calibrating, fresh_adapters
from mmattn.hosts.saving import DEFAULT
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.training.checkpoints import load_weights, trained_parameters
from mmattn.training.optimization import parameter_groups

if TYPE_CHECKING:
    from transformers import TrainingArguments

FORMAT = "mmattn-trained"
WEIGHTS = "trained.safetensors"

T = TypeVar("T")


@functools.cache
def adapter_trainer() -> type:
    """The class `AdapterTrainer`; transformers is imported here and not before."""
    transformers = import_extra("transformers", "train")

    class AdapterTrainer(transformers.Trainer):  # type: ignore[name-defined]
        """A `transformers.Trainer` for what `mmattn.attach` returned.

        As `data_collator` it takes a `RowCollator` for rows of texts, pictures and passages, a `MemoryCollator` for
        tokenised ones with a column of memories.

        A checkpoint holds the adapters as `save_pretrained` writes them, for `mmattn.load`, and all trained weights (a
        LoRA's among them) in `trained.safetensors`, beside what every Trainer writes there. A resumed run ends bit for
        bit where the uninterrupted one does on the CPU; `resume_from_checkpoint=True` resumes from the last complete
        checkpoint.

        Args:
            args: positional arguments of the Trainer.
            gate_learning_rate: of the gates; None for `TrainingArguments.learning_rate`.
            encoder: fingerprint of the encoder, written with the adapters.
            kwargs: keyword arguments of the Trainer.

        Raises:
            ConfigError: `ddp_find_unused_parameters` of the arguments is True, or `dispatch_batches` of their
                `accelerator_config`.
        """

        optimizer: torch.optim.Optimizer | None

        def __init__(
            self,
            *args: object,
            gate_learning_rate: float | None = None,
            encoder: str | None = None,
            **kwargs: object,
        ) -> None:
            self.gate_learning_rate, self.encoder = gate_learning_rate, encoder
            model = args[0] if args else kwargs.get("model")
            arguments = args[1] if len(args) > 1 else kwargs.get("args")
            if isinstance(arguments, transformers.TrainingArguments):
                if arguments.ddp_find_unused_parameters:
                    raise ConfigError(
                        "ddp_find_unused_parameters=True does not go with AdapterTrainer, which gives every trained "
                        "parameter a gradient, of zeros if need be: leave it out"
                    )
                arguments.ddp_find_unused_parameters = False  # the Trainer reads it while it is constructed
                _read_in_every_process(arguments)
            if getattr(model, "is_quantized", False):
                # The Trainer trains a quantised model only where this attribute says that it has adapters.
                vars(model)["_hf_peft_config_loaded"] = True
            super().__init__(*args, **kwargs)

        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            """AdamW as asked for in the arguments, with the groups of `parameter_groups`."""
            if self.optimizer is None:
                optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
                groups = parameter_groups(
                    self.model,
                    self.args.learning_rate,
                    gate_learning_rate=self.gate_learning_rate,
                    weight_decay=self.args.weight_decay,
                )
                self.optimizer = optimizer_class(groups, **options)
            return self.optimizer

        def compute_loss(
            self, model: nn.Module, inputs: object, return_outputs: bool = False, *args: object, **kwargs: object
        ) -> Tensor | tuple[object, ...]:
            """The Trainer's loss; where no row has a memory, and no adapter is reached, with gradients of zero."""
            computed = super().compute_loss(model, inputs, return_outputs, *args, **kwargs)
            loss, *outputs = computed if return_outputs else (computed,)
            if torch.is_grad_enabled():
                parameters = trained_parameters(self.accelerator.unwrap_model(self.model)).values()
                # Of every parameter: DistributedDataParallel waits for all of them in each process.
                loss = loss + sum(parameter.flatten()[:0].sum().to(loss) for parameter in parameters)
            return (loss, *outputs) if return_outputs else loss

        def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> object:
            """Train; with True, from the last complete checkpoint, or from the beginning where there is none."""
            if resume_from_checkpoint is True:
                resume_from_checkpoint = last_complete(Path(self.args.output_dir))
            # A checkpoint holds the calibration of the run that is resumed.
            self._calibrates = not resume_from_checkpoint
            config = getattr(self.model, "config", None)
            cached = getattr(config, "use_cache", None)
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                if config is not None and cached is not None:
                    config.use_cache = cached

        def get_batch_samples(self, *args: object, **kwargs: object) -> tuple[list[Mapping[str, object]], object]:
            """The micro-batches of a step; by those of the first, fresh adapters are calibrated."""
            batches, items = super().get_batch_samples(*args, **kwargs)
            if self._calibrates:
                self._calibrates = False
                self._calibrate(batches)
            return batches, items

        def _calibrate(self, batches: Sequence[Mapping[str, object]]) -> None:
            """Calibrate fresh adapters by batches that are trained on next: a stream may give its rows once."""
            model: Any = self.accelerator.unwrap_model(self.model)
            if not fresh_adapters(model):
                return
            with (
                torch.random.fork_rng(devices=[]),
                calibrating(model, self.accelerator.num_processes),
                self.autocast_smart_context_manager(),
            ):
                for batch in batches:
                    model(**self._prepare_inputs(dict(batch)))

        # Rows become arguments of the host in the collator: their own keys are none, and all of them are needed.
        def _remove_unused_columns(self, dataset: T, description: str | None = None) -> T:
            return dataset

        def _get_collator_with_removed_columns(self, data_collator: T, description: str | None = None) -> T:
            return data_collator

        def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
            if not self.args.should_save:
                return
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            model = self.accelerator.unwrap_model(self.model)
            model.save_pretrained(folder, encoder=self.encoder)
            weights = {name: parameter.detach() for name, parameter in trained_parameters(model).items()}
            write_tensors(folder / WEIGHTS, weights, {"format": FORMAT})

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
            tensors, _ = read_tensors(os.path.join(resume_from_checkpoint, WEIGHTS), FORMAT)
            adapted: Any = self.accelerator.unwrap_model(self.model)
            for adapter in fresh_adapters(adapted):
                folder = os.path.join(resume_from_checkpoint, "" if adapter.name == DEFAULT else adapter.name)
                adapter.load_state_dict(load_folder(folder)[1])  # its calibration, which is not trained
            load_weights(trained_parameters(adapted), tensors, resume_from_checkpoint)

        def _load_best_model(self) -> None:
            self._load_from_checkpoint(self.state.best_model_checkpoint)

    return AdapterTrainer


def _read_in_every_process(arguments: TrainingArguments) -> None:
    """Have each process read an `IterableDataset` and keep its part of it, instead of being sent slices of tensors."""
    config = arguments.accelerator_config
    if config.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True sends slices of tensors to other processes, and a memory is none: leave it out, so "
            "that each process reads the dataset and keeps its part"
        )
    config.dispatch_batches = False


def last_complete(folder: Path) -> str | None:
    """The checkpoint of the last step whose files are all there and sound; None where there is none.

    The Trainer writes its own state last, so a process killed in a save leaves a folder without it.
    """
    paths = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for path in sorted(paths, key=lambda path: -int(path.name.removeprefix("checkpoint-"))):
        if (path / "trainer_state.json").is_file():
            try:
                read_tensors(path / WEIGHTS, FORMAT)
            except AdapterFileError:
                continue
            return str(path)
    return None
