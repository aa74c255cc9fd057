"""The base model of a language model, called with a memory: TRL's trainers call it, and losses in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mmattn.errors import ConditionError
from mmattn.hosts.hooks import AfterHost, BeforeHost
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.model import AdaptedModel, check_unused

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


class HeadlessHost:
    """The `base_model` of an adapted language model; other attributes are those of the host's own."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        host: PreTrainedModel = inner_host(model.host)
        self._own: PreTrainedModel = host.base_model

    def __call__(self, *args: object, memory: object = None, **kwargs: object) -> ModelOutput:
        """Call the host's base model with a memory; returns what it returns."""
        model = self._model
        options = model.options_of(kwargs)
        if getattr(getattr(model.host, "active_peft_config", None), "is_prompt_learning", False):
            raise ConditionError(
                "the base model of a host with prompts of peft was called, and would leave the prompts out: call the "
                "adapted model"
            )
        if memory is None:
            check_unused(**options)
            self._check_trains()
            return self._own(*args, **kwargs)
        with model.open_blocks.conditioned(model.make_call(memory, **options)):
            return self._forward(*args, **kwargs)

    def _forward(self, *args: object, **kwargs: object) -> ModelOutput:
        """Run the base model; adapters act as in a forward of the whole host."""
        output = None
        args, kwargs = BeforeHost(self._model)(self._own, args, kwargs) or (args, kwargs)
        try:
            output = self._own(*args, **kwargs)
        finally:
            AfterHost(self._model)(self._own, args, output)
        return output

    def _check_trains(self) -> None:
        """Refuse a step of training without a memory: the host is frozen, and the adapters would not be reached."""
        model = self._model
        if not (torch.is_grad_enabled() and model.training) or model.open_blocks.in_force().is_set:
            return
        if not any(parameter.requires_grad for parameter in model.host.parameters()):
            raise ConditionError(
                f"{type(model.host).__name__} was called in training without a memory. Give "
                "SFTConfig(remove_unused_columns=False) and data_collator=mmattn.training.MemoryCollator(…)"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
