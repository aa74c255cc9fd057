"""The host `language`: a causal language model that learns to write texts with a memory beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import inspect, models, pipelines, training
from mmattn.errors import ConfigError, TextError

from .data import picture_files, slot_names
from .settings import Config

EXPLORED = 6  # rows that `mmattn explore` shows


class Language:
    """The frozen language model `lm` of the settings, `host` with its LoRA, and the loss of rows."""

    def __init__(self, settings: Config, arguments: Any) -> None:
        self.settings = settings
        if settings.called_together and arguments.world_size == 1:
            raise ConfigError(
                "fsdp and tp_plan are for several processes, and there is one: torchrun --nproc-per-node N -m mmattn "
                "train CONFIG, or leave them out"
            )
        if settings.tp_plan and arguments.device.type == "cpu":  # accelerate's
            raise ConfigError("tp_plan=auto trains on GPUs, and the processes have none: use fsdp=true")
        self.lm, self.tokenizer = load_lm(settings, arguments)
        self.host = self.lm
        self.positions: int | None = getattr(self.lm.config, "max_position_embeddings", None)
        self.max_new_tokens = settings.caption.max_new_tokens

    def collator(self, text_only: bool = False) -> training.RowCollator:
        """Return the collator of rows with their memories, or of their texts alone."""
        data = self.settings.data
        longest = min(filter(None, (data.max_length, self.positions)), default=None)
        return training.RowCollator(self.tokenizer, longest, data.truncation, text_only=text_only, packing=data.packing)

    def check(self, rows: Any) -> None:
        """Refuse rows that this host cannot learn, before anything is trained."""
        self.collator(text_only=True).check(rows)

    def check_prompts(self, prompts: Sequence[str]) -> str:
        """Shorten texts to be generated to the positions of the language model; return a warning if that was needed."""
        counts = [len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0 for text in prompts]
        room = self.max_new_tokens if self.positions is None else self.positions - 1 - max(counts)
        if room < 1:
            raise TextError(
                f"a prompt of {max(counts)} tokens and its begin leave no room to write in the {self.positions} of "
                f"{self.settings.lm!r}: shorten it ({max(prompts, key=len)!r:.60})"
            )
        if room >= self.max_new_tokens:
            return ""
        before, self.max_new_tokens = self.max_new_tokens, room
        return f"texts have at most {room} tokens instead of {before}: {self.settings.lm!r} has no positions for more"

    def attach(self, memory_dim: int) -> Any:
        """Return the language model with the adapter of the settings, and with their LoRA."""
        settings = self.settings
        if settings.lora.rank:
            self.host = training.add_lora(self.lm, settings.lora.rank, dropout=settings.lora.dropout)
        options = settings.adapter.model_dump()
        latents = options.pop("latents")
        if options["every"] is None and options["layers"] is None:
            depth = self.lm.config.get_text_config().num_hidden_layers
            options["layers"] = [layer for layer in (depth - 6, depth - 4, depth - 2) if layer >= 0] or [0]
        if latents is not None:
            heads = {name: options[name] for name in ("num_heads", "head_dim")}
            options["resampler"] = mmattn.Resampler(num_latents=latents, **heads)
        model = mmattn.attach(self.host, mmattn.GatedAdapter(memory_dim=memory_dim, **options))
        if settings.optim.checkpoint_host:
            host: Any = self.host  # since transformers 5.24 by another name
            enable = getattr(host, "activation_checkpointing_enable", None) or host.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model

    def trainer(self, *args: Any, text_only: bool = False, **kwargs: Any) -> training.AdapterTrainer:
        """Return the trainer, whose loss is that of the language model."""
        return training.AdapterTrainer(*args, data_collator=self.collator(text_only), **kwargs)

    def control(self, parameters: int) -> tuple[Any, Any]:
        """Return the text-only LoRA with as many parameters, and the function that removes it."""
        if self.host is not self.lm:
            self.host.unload()
            self.host = self.lm
        lora = training.matched_lora(self.lm, parameters)
        return lora, lora.unload

    def write(self, model: Any, memory: mmattn.Memory, prompts: Sequence[str]) -> list[str]:
        """Generate a text after each prompt."""
        options = {"max_new_tokens": self.max_new_tokens, "num_beams": self.settings.caption.num_beams}
        return pipelines.generate_texts(model, self.tokenizer, prompts, memory, options=options)

    def pipeline_config(self, results: str = "", pooled: bool = False) -> pipelines.PipelineConfig:
        """Return the file that lets `mmattn caption` load the adapter with its models."""
        settings, data = self.settings, self.settings.data.path
        options = settings.caption.model_dump(exclude={"prompt"}) | {"max_new_tokens": self.max_new_tokens}
        lora = "../lora" if settings.lora.rank else None
        return pipelines.PipelineConfig(
            task="image-to-text",
            host=pipelines.ModelReference.of(settings.lm, self.tokenizer, quantization=settings.quantise, lora=lora),
            encoder=pipelines.EncoderReference.of(settings.encoder, pooled=pooled),
            prompt=settings.caption.prompt,
            generation=options,
            trained_on=f"{Path(data).name or data}, a part of it held out.",
            training={"recipe": "finetune", "seed": settings.seed, "learning_rate": settings.optim.learning_rate},
            results=results,
        )


def load_lm(settings: Config, arguments: Any) -> tuple[Any, Any]:
    """Load the frozen language model of the settings and its tokenizer; its weights may lie in several processes."""
    name, dtype = settings.lm, getattr(torch, settings.dtype)
    if not settings.called_together:
        reference = pipelines.ModelReference(name=name, quantization=settings.quantise)
        lm, tokenizer = pipelines.load_host(reference, Path(), arguments.device, None if settings.quantise else dtype)
        return lm, tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig

    sharing = {"fsdp_size": arguments.world_size} if settings.fsdp else {"tp_plan": settings.tp_plan}
    name = models.resolve(name)
    try:
        lm = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, distributed_config=DistributedConfig(**sharing))
        return lm.requires_grad_(False).eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"lm={name!r} cannot be loaded with {sharing}: {error}") from error


def hidden_states(settings: Config, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the block in which hidden states below the adapter come from the cache, if the settings say so."""
    if not settings.optim.cache_hidden_states:
        return contextlib.nullcontext()
    return training.cached_hidden_states(model, Path(settings.data.cache) / "hidden_states")


def trace_texts(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], texts: Sequence[str], grid: Sequence[int] | None
) -> list[inspect.Trace]:
    """Return the attention of each word of the texts of rows; nothing if a resampler hides the slots."""
    if any(adapter.resampler is not None for adapter in model.adapters.values()):
        return []
    longest = getattr(model.config, "max_position_embeddings", None)
    collator, traces = training.RowCollator(tokenizer, max_length=longest, truncation=True), []
    for row, text in zip(rows[:EXPLORED], texts, strict=False):
        (ids,), (start,) = collator.ids([training.Row(text or " ", row.get("prompt") or "")])
        memory = training.stack_memories([row])
        words = [tokenizer.decode([token]) for token in ids]
        options: dict[str, Any] = {"sources": slot_names(row, memory.segments[0].tolist())}
        pictures = picture_files(row)
        if len(pictures) == 1 and grid is not None and grid[0] * grid[1] == memory.length:
            options = {"grid": grid, "picture": mmattn.load_image(pictures[0])}
        traces.append(inspect.attribute(model, ids, memory, words, start=max(1, start), title=text, **options))
    return traces
