"""A `transformers.Trainer` for adapted models: memory reaches them, and checkpoints hold only what is trained."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments
from transformers.utils import find_labels

from mmattn.adapters.files import load_folder
from mmattn.adapters.host_models import call_by_name
from mmattn.core.tracing import may_read, report_checks
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from mmattn.hosts.calibration import calibrating, fresh_adapters
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.peft import inner_host
from mmattn.hosts.probe import bare_forward, in_eval_mode, is_close, text_inputs
from mmattn.hosts.saving import DEFAULT
from mmattn.hosts.stored import stored
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.training.losses import chunked_nats, has_chunks
from mmattn.training.lower_layers import wrapped_forwards
from mmattn.training.metrics import StepClock, flops_per_token

FORMAT = "mmattn-trained"
WEIGHTS = "trained.safetensors"


class AdapterTrainer(Trainer):
    """A `transformers.Trainer` for an adapted model.

    As `data_collator` use a `RowCollator` for rows of texts, pictures and passages, or a `MemoryCollator` for tokenised
    rows with a column of memories.

    A checkpoint has the adapters, for `mmattn.load`, all trained weights (including a LoRA) in `trained.safetensors`,
    and the usual files of a Trainer. On the CPU a resumed run ends bit for bit like an uninterrupted run;
    `resume_from_checkpoint=True` resumes from the last complete checkpoint. Gradient accumulation does not change a
    step, even if the host's loss is a mean. A NaN loss raises at each step on the CPU, and on a GPU when metrics are
    logged (`logging_nan_inf_filter` is off, because it reads the loss of each step).

    Args:
        args: positional arguments of the Trainer.
        gate_learning_rate: learning rate of the gates; None for `TrainingArguments.learning_rate`.
        calibrate: calibrate fresh gated adapters with the first batch, see `AdaptedModel.calibrate`.
        encoder: fingerprint of the encoder, saved with the adapters.
        kwargs: keyword arguments of the Trainer.

    Raises:
        ConfigError: the arguments have `ddp_find_unused_parameters=True`, or `dispatch_batches` in
            `accelerator_config`.
    """

    optimizer: torch.optim.Optimizer | None
    model_accepts_loss_kwargs: bool
    _loss_shifts_labels: bool
    _calibrates = False
    _chunks: bool | None  # None where the host's loss is still to be compared

    def __init__(
        self,
        *args: object,
        gate_learning_rate: float | None = None,
        calibrate: bool = True,
        encoder: str | None = None,
        **kwargs: object,
    ) -> None:
        self.gate_learning_rate, self.calibrate, self.encoder = gate_learning_rate, calibrate, encoder
        self._clock, self._flops = StepClock(), 0.0
        model = args[0] if args else kwargs.get("model")
        arguments = args[1] if len(args) > 1 else kwargs.get("args")
        if isinstance(arguments, TrainingArguments):
            if arguments.ddp_find_unused_parameters:
                raise ConfigError(
                    "ddp_find_unused_parameters=True does not go with AdapterTrainer, which gives every trained "
                    "parameter a gradient, of zeros if need be: leave it out"
                )
            if arguments.accelerator_config.dispatch_batches:
                raise ConfigError(
                    "dispatch_batches=True sends slices of tensors to other processes, and a memory cannot be sliced: "
                    "leave it out"
                )
            # Each process reads an `IterableDataset` and keeps its part of it, instead of being sent slices.
            arguments.accelerator_config.dispatch_batches = False
            # What is logged, and where a copy begins, must not have each step wait for the device.
            arguments.logging_nan_inf_filter = False
            arguments.accelerator_config.non_blocking |= arguments.dataloader_pin_memory
            arguments.ddp_find_unused_parameters = False  # the Trainer reads it while it is constructed
        if getattr(model, "is_quantized", False):
            # The Trainer trains a quantised model only where this attribute says that it has adapters.
            vars(model)["_hf_peft_config_loaded"] = True
        config: Any = getattr(model, "config", None)
        cached = getattr(config, "use_cache", None)
        super().__init__(*args, **kwargs)
        self.args.remove_unused_columns = False  # the collator reads them all
        if cached is not None:
            config.use_cache = cached  # the Trainer's is for the training alone
        if self.args.label_names is None:
            # Those of a host that answers questions, too, which the class of an adapted model does not name.
            host: Any = getattr(self.model, "host", self.model)
            self.label_names = find_labels(type(inner_host(host)))
        self._is_mean_of_targets = not (
            self.label_smoother or self.compute_loss_func or self.model._get_name().endswith("ForCTC")
        )
        of_tokens = getattr(self.model, "predicts_tokens", False) and not self.model.config.is_encoder_decoder
        self._chunks = None if of_tokens and self._is_mean_of_targets else False
        # Also of classes whose names the Trainer does not know; for a loss of your own labels may be anything.
        self._loss_shifts_labels = not self.compute_loss_func and (of_tokens or self._loss_shifts_labels)
        # Whether the host divides its loss by the targets of a whole step; None where a step must tell.
        self._divides: bool | None = None if self.model_accepts_loss_kwargs else False
        if self._is_mean_of_targets:
            self.model_accepts_loss_kwargs = True  # the Trainer counts the targets of a step
        else:
            self._divides = True
        self._evaluated: list[Tensor] = []  # of each batch the sum over its targets, and their number
        self._replicated: list[Any] = []  # trained parameters that are whole beside a sharded host

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the AdamW of the arguments, with the groups of `parameter_groups`."""
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
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[object, ...]:
        """Return the loss of a micro-batch: the sum over its targets, divided by the targets of the whole step.

        Where no row has a memory, and no adapter is reached, the gradients are zero.
        """
        items, share = num_items_in_batch, None
        if items is not None and not return_outputs and self._in_chunks(inputs):
            kwargs = {name: value for name, value in inputs.items() if name != "labels"}
            with self.accelerator.autocast():
                return self._of_every_parameter(chunked_nats(self.model, kwargs, inputs["labels"]).sum() / items)
        if self._divides is False and items is not None:
            # T5, BART and others return the mean over the targets of a micro-batch.
            share, items = self._targets(inputs) / items * self._averaged_over, None
        computed = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=items)
        loss, *outputs = computed if return_outputs else (computed,)
        if share is not None:
            loss = loss * share.to(loss.device)
        loss = self._of_every_parameter(loss)
        return (loss, *outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Evaluate a batch; if only the loss is needed, use `compute_loss`, without outputs."""
        inputs = self._prepare_inputs(inputs)
        items: Any = self._get_num_items_in_batch([inputs], self.args.device)
        if prediction_loss_only:
            with torch.no_grad(), self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, inputs, num_items_in_batch=items)
            predicted = loss.detach().mean(), None, None
        else:
            predicted = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if predicted[0] is not None and items is not None and self._is_mean_of_targets:
            # Losses are the targets' of this process, times the processes, divided by those of all.
            targets = items / self._averaged_over
            self._evaluated.append(torch.stack([predicted[0] * targets, targets]).double())
        return predicted

    @property
    def _averaged_over(self) -> int:
        """The processes over which a loss of all targets is averaged."""
        whole = self.args.average_tokens_across_devices
        return self.accelerator.num_processes // self.get_tp_size() if whole else 1

    def _of_every_parameter(self, loss: Tensor) -> Tensor:
        """Return a loss that depends on every parameter: DistributedDataParallel waits for all of them."""
        if not torch.is_grad_enabled():
            return loss
        parameters = trained_parameters(self.accelerator.unwrap_model(self.model)).values()
        return loss + sum(parameter.flatten()[:0].sum().to(loss) for parameter in parameters)

    def _in_chunks(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the host's loss is computed in chunks: not where it is compiled, or shared out."""
        if self._chunks is False or self.model_wrapped is not self.model or "labels" not in inputs:
            return False
        if not has_chunks(self.model):
            return False
        if self._chunks is None:
            self._chunks = self._is_mean_of_tokens()
        return self._chunks

    @torch.no_grad()
    def _is_mean_of_tokens(self) -> bool:
        """Return whether the host's loss is the mean of `token_nats`, without that of a router, for instance."""
        model: Any = self.model
        kwargs: dict[str, Any] = next(text_inputs(inner_host(model.host), 1)) | {"use_cache": False}
        with bare_forward(model.host, model.open_blocks), self.accelerator.autocast():
            loss = call_by_name(model.host, **kwargs, labels=kwargs["input_ids"]).loss
            return is_close(chunked_nats(model, kwargs, kwargs["input_ids"]).mean(), loss)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> object:
        """Train; with True, from the last complete checkpoint, or from the start without one.

        Warns if every gradient was 0, as without a memory in any batch.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete(Path(self.args.output_dir))
        # A checkpoint holds the calibration of the run that is resumed.
        self._calibrates = self.calibrate and not resume_from_checkpoint
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        state: Any = {} if self.optimizer is None or self.args.world_size > 1 else self.optimizer.state
        moments = [
            value for entry in state.values() for value in entry.values() if isinstance(value, Tensor) and value.dim()
        ]
        if moments and not any(bool(value.any()) for value in moments):
            warnings.warn(
                f"every gradient was 0, so nothing was trained. Give the batches a memory: they have only "
                f"{', '.join(self._names)}",
                stacklevel=2,
            )
        return output

    def _inner_training_loop(self, *args: object, **kwargs: object) -> object:
        """Train the model, which `model_init` may just have made, with its caches off and 4-bit weights as stored."""
        self._flops = flops_per_token(self.model)
        self._clock.begin()
        config: Any = getattr(self.model, "config", None)
        cached = getattr(config, "use_cache", None)
        if cached is not None:
            config.use_cache = self.args.use_cache
        try:
            with stored(self.model):
                return super()._inner_training_loop(*args, **kwargs)
        finally:
            if self._replicated:
                self._replicated = []
                self.model.disable_input_require_grads()
            self.model.eval()
            if cached is not None:
                config.use_cache = cached

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Learn a micro-batch; NonFiniteError where the loss can be read without a wait, and is NaN or infinite."""
        self._names = list(inputs)
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self._replicated and self.accelerator.sync_gradients:
            gradients = [parameter.grad for parameter in self._replicated]
            together = parameters_to_vector(gradients)
            torch.distributed.all_reduce(together)
            vector_to_parameters(together / self.args.world_size, gradients)
        if may_read(loss):
            self._check_finite(float(loss))
        return loss

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Have every process of a sharded host begin alike.

        Gradients are averaged after the backward pass: the Trainer's hooks do it parameter by parameter within it, and
        wait for ever, or mix parameters, where rows without a memory have another order.
        """
        parameters = trained_parameters(model).values()
        self._replicated = [parameter for parameter in parameters if not hasattr(parameter, "full_tensor")]
        for parameter in self._replicated:
            torch.distributed.broadcast(parameter.data, src=0)
        # So that every process runs the whole backward pass of the host, whose weights all gather together.
        model.enable_input_require_grads()

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            report_checks(wait=True)
            raise NonFiniteError(
                f"the loss is {loss} at step {self.state.global_step}: lower the learning rate (now "
                f"{self._get_learning_rate():.2e}), or look at the rows of this step"
            )

    def get_batch_samples(self, *args: object, **kwargs: object) -> tuple[list[Mapping[str, object]], object]:
        """The micro-batches of a step; by those of the first, fresh adapters are calibrated."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self._divides is None and batches and items is not None and not self._in_chunks(batches[0]):
            self._divides = self._reads_items(batches[0], items)
        if self._calibrates:
            self._calibrates = False
            self._calibrate(batches)
        return batches, items

    def _targets(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the number of targets of a micro-batch."""
        labels: Tensor = inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"]
        return labels.ne(-100).sum()

    @torch.no_grad()
    def _reads_items(self, batch: Mapping[str, Any], items: Tensor | int) -> bool:
        """Return whether the host's loss follows from `num_items_in_batch`, or is a mean whatever it is."""
        if self.args.gradient_accumulation_steps == self.args.world_size == 1:
            return True  # both are the same
        model = self.accelerator.unwrap_model(self.model)
        losses = []
        with torch.random.fork_rng(devices=[]), in_eval_mode(model), self.autocast_smart_context_manager():
            for count in (items, items * 2):
                output = model(**self._prepare_inputs(dict(batch)), num_items_in_batch=count)
                losses.append(output["loss"] if isinstance(output, Mapping) else output[0])
        return not torch.equal(*losses)

    def _calibrate(self, batches: Sequence[Mapping[str, object]]) -> None:
        """Calibrate fresh adapters by batches that are trained on next: a stream may give its rows once."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, AdaptedModel) or not fresh_adapters(model):
            return
        with (
            torch.random.fork_rng(devices=[]),
            calibrating(model, self.accelerator.num_processes),
            self.autocast_smart_context_manager(),
        ):
            for batch in batches:
                self.compute_loss(model, self._prepare_inputs(dict(batch)), num_items_in_batch=1)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Return the operations of a micro-batch by `flops_per_token`, and count them with its tokens."""
        ids = inputs.get("input_ids")
        tokens = 0 if ids is None else ids.numel()
        self._clock.count(tokens, tokens * self._flops)
        return tokens * self._flops

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log metrics, beside the loss `tokens_per_second` and, on a known card, `mfu` of this process.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        if "loss" in logs:
            self._check_finite(logs["loss"])
            logs |= self._clock.metrics(self.args.device)
            self._clock.begin()
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Evaluate like every Trainer; the time does not count as training."""
        with self._clock.aside(), stored(self.model):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate; the loss of a host that has labels is the mean over all targets, however rows are batched."""
        self._evaluated.clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._evaluated:
            loss, targets = self.accelerator.reduce(torch.stack(self._evaluated).sum(0)).tolist()
            self._evaluated.clear()
            output.metrics[f"{metric_key_prefix}_loss"] = loss / max(targets, 1.0)
        return output

    def _save_checkpoint(self, *args: object, **kwargs: object) -> None:
        with self._clock.aside():
            super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, AdaptedModel) and model.adapters:  # a host with a LoRA alone has none
            model.save_pretrained(folder, encoder=self.encoder)
        weights = {name: parameter.detach() for name, parameter in trained_parameters(model).items()}
        write_tensors(folder / WEIGHTS, weights, {"format": FORMAT})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        tensors, _ = read_tensors(os.path.join(resume_from_checkpoint, WEIGHTS), FORMAT)
        adapted: Any = self.accelerator.unwrap_model(self.model)
        fresh = fresh_adapters(adapted) if isinstance(adapted, AdaptedModel) else []
        load_weights(trained_parameters(adapted), tensors, resume_from_checkpoint)
        for adapter in fresh:
            folder = os.path.join(resume_from_checkpoint, "" if adapter.name == DEFAULT else adapter.name)
            adapter.load_state_dict(load_folder(folder)[1])  # its calibration, which is not trained

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


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


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that require gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_weights(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy values into the parameters of the same names; AdapterFileError for other names or shapes."""
    sizes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    shapes = {name: tuple(tensor.shape) if tensor.is_floating_point() else None for name, tensor in tensors.items()}
    if sizes != shapes:
        differing = [name for name in {**sizes, **shapes} if sizes.get(name) != shapes.get(name)]
        raise AdapterFileError(
            f"{where} does not fit this model: {len(differing)} of {len(sizes)} trained tensors differ "
            f"({', '.join(differing[:5])}). Use the same adapter and settings, or another folder"
        )
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def parameter_groups(
    module: nn.Module,
    learning_rate: float,
    *,
    gate_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer, of the parameters of a module that require gradients.

    Args:
        module: the module to train.
        learning_rate: learning rate of all parameters except the gates.
        gate_learning_rate: learning rate of the gates, which start at 0; None for `learning_rate`.
        weight_decay: weight decay of matrices; vectors and gates have none.

    Raises:
        ConfigError: no parameter of the module requires gradients.
    """
    gates: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            last = name.rsplit(".", 1)[-1]
            (gates if last == "gate" else matrices if parameter.dim() > 1 else vectors).append(parameter)
    gate_rate = learning_rate if gate_learning_rate is None else gate_learning_rate
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
        {"params": gates, "lr": gate_rate, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("no parameter of this module is trained: set requires_grad of the parameters to train")
    return groups


@contextlib.contextmanager
def gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """Use gradient checkpointing (arXiv 1604.06174) in every adapter block, inside this context.

    The gradients are bit for bit the same. For the host use `model.activation_checkpointing_enable()`.

    Args:
        model: an adapted model.

    Raises:
        ConfigError: the model has no adapters.
    """
    adapters = getattr(model, "adapters", None)
    if not adapters:
        raise ConfigError(f"{type(model).__name__} has no adapters to checkpoint: attach one")
    blocks = [block for adapter in adapters.values() for block in adapter.blocks.values()]
    with wrapped_forwards(blocks, lambda block: partial(_checkpointed, block.forward)):
        yield


def _checkpointed(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
