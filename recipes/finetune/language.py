"""A language model that learns to write texts with a memory beside them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.errors import ConfigError, TextError
from mmattn.recipes import resolve_asset

from .settings import Config


class Language:
    """The frozen language model of the settings, and the loss of its rows.

    Attributes:
        host: the language model, with a LoRA where one is asked for. tokenizer: its own.
        max_new_tokens: of what it writes after a prompt.
    """

    def __init__(self, settings: Config, accelerator: Any) -> None:
        self.settings = settings
        if settings.tp_plan and accelerator.num_processes == 1:
            raise ConfigError(
                f"tp_plan={settings.tp_plan} is for several processes, and there is one: torchrun --nproc-per-node N "
                "-m mmattn train CONFIG, or leave it out"
            )
        self.lm, self.tokenizer = load_lm(settings, accelerator.device)
        if settings.fsdp:
            training.shard_host(self.lm, accelerator)
        self.host = self.lm
        known = getattr(self.lm.config, "max_position_embeddings", None)
        self.longest = min(filter(None, (settings.data.max_length, known)), default=None)
        self.max_new_tokens = settings.caption.max_new_tokens

    def collator(self, memories: training.MemorySource | None) -> training.RowCollator:
        """Rows to batches, with these memories beside them or none."""
        text_only, packing = memories is None, self.settings.data.packing
        truncation = self.settings.data.truncation
        return training.RowCollator(self.tokenizer, memories, self.longest, truncation, text_only, packing)

    def check(self, rows: Any) -> None:
        """Refuse rows that this host cannot learn, before anything is trained."""
        self.collator(None).check(rows)

    def check_prompts(self, prompts: Sequence[str]) -> str:
        """Shorten what is written after these prompts to what the language model has positions for; says if it did.

        Raises:
            TextError: a prompt fills them all.
        """
        positions = getattr(self.lm.config, "max_position_embeddings", None)
        counts = [len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0 for text in prompts]
        room = self.max_new_tokens if positions is None else positions - 1 - max(counts)
        if room < 1:
            raise TextError(
                f"a prompt of {max(counts)} tokens and its begin leave no room to write in the {positions} of "
                f"{self.settings.lm!r}: shorten it ({max(prompts, key=len)!r:.60})"
            )
        if room >= self.max_new_tokens:
            return ""
        asked, self.max_new_tokens = self.max_new_tokens, room
        return f"texts have at most {room} tokens instead of {asked}: {self.settings.lm!r} has no positions for more"

    def attach(self, memories: training.MemorySource) -> Any:
        """The language model with the adapter of the settings, and with a LoRA if asked for."""
        if self.settings.lora.rank:
            self.host = training.add_lora(self.lm, self.settings.lora.rank, dropout=self.settings.lora.dropout)
        given = self.settings.adapter.model_dump()
        latents = given.pop("latents")
        if given["every"] is None and given["layers"] is None:
            given["every"] = 1
        heads = {"num_heads": given["num_heads"], "head_dim": given["head_dim"]}
        resampler = None if latents is None else mmattn.Resampler(num_latents=latents, **heads)
        model = mmattn.attach(self.host, mmattn.GatedAdapter(memory_dim=memories.dim, resampler=resampler, **given))
        if self.settings.optim.host_gradient_checkpointing:
            host: Any = self.host  # since transformers 5.24 by another name
            enable = getattr(host, "activation_checkpointing_enable", None) or host.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model

    def collate(self, memories: training.MemorySource | None) -> training.Collate:
        """Texts and memories of rows as a batch, made in a thread beside the training."""
        collator = self.collator(memories)
        return lambda rows, seeds: collator.batch(rows)

    def loss(self, model: Any) -> training.Loss:
        """The loss that `training.train` asks for: minus log p of the texts, over their tokens."""
        chunk_size = self.settings.optim.loss_chunk_size
        return lambda batch, seeds: training.sum_nats(model, batch, chunk_size)

    def control(self, parameters: int) -> tuple[Any, Any]:
        """The text-only LoRA with as many parameters, and what takes it off again; the host is bare before it."""
        if self.host is not self.lm:
            self.host.unload()
            self.host = self.lm
        lora = training.matched_lora(self.lm, parameters)
        return lora, lora.unload

    def pipeline_config(self, results: str = "", pooled: bool = False) -> pipelines.PipelineConfig:
        """How to run the trained adapter from pictures, pooled or not, to texts, with the table of its run."""
        settings = self.settings
        given = settings.caption.model_dump() | {"max_new_tokens": self.max_new_tokens}
        data = settings.data.path
        return pipelines.PipelineConfig(
            task="image-to-text",
            host=pipelines.ModelReference.of(
                settings.lm,
                self.tokenizer,
                quantization=settings.quantise,
                lora="../lora" if settings.lora.rank else None,
            ),
            encoder=pipelines.EncoderReference.of(settings.encoder, pooled=pooled),
            prompt=given.pop("prompt"),
            generation=given,
            trained_on=f"{Path(data).name or data}, a part of it held out.",
            training={"recipe": "finetune", "seed": settings.seed, "learning_rate": settings.optim.learning_rate},
            results=results,
        )


def load_lm(settings: Config, device: torch.device | str) -> tuple[Any, Any]:
    """The frozen language model of the settings and its tokenizer.

    Raises:
        ConfigError: neither a folder nor a name on the hub, its quantisation is not installed, or it has no plan for
            several processes.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, quantise = resolve_asset(settings.lm), settings.quantise
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype)}
    if settings.tp_plan is not None:
        options |= _tensor_parallel(settings.tp_plan)
    try:
        if quantise is not None:
            options |= {"quantization_config": pipelines.quantization_config(quantise), "device_map": {"": str(device)}}
        tokenizer = AutoTokenizer.from_pretrained(name)
        lm = AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        asked = "" if quantise is None else f" as {quantise}"
        raise ConfigError(f"lm={name!r} cannot be loaded{asked}: {error}") from error
    return (lm.to(device) if quantise is None and settings.tp_plan is None else lm).eval(), tokenizer


def _tensor_parallel(plan: str) -> dict[str, Any]:
    """What `from_pretrained` is given for a tensor parallel plan, which transformers before 5.18 takes by itself."""
    from transformers.distributed import DistributedConfig

    if "tp_plan" in {field.name for field in dataclasses.fields(DistributedConfig)}:
        return {"distributed_config": DistributedConfig(tp_plan=plan)}
    return {"tp_plan": plan}


def hidden_states(settings: Config, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside the block what is below the adapter comes from the cache, where the settings ask for that.

    Args:
        settings: of the run.
        model: the adapted language model; None for one of which all layers are trained.
    """
    if model is None or not settings.optim.cache_hidden_states:
        return contextlib.nullcontext()
    return training.cached_hidden_states(model, Path(settings.data.cache) / "hidden_states")


@torch.no_grad()
def write_texts(
    model: Any, tokenizer: Any, memory: mmattn.Memory, prompt: str = "", max_new_tokens: int = 64, num_beams: int = 1
) -> list[str]:
    """What the model writes after a prompt, a text for each row of the memory."""
    begin, end = training.bos_and_eos(tokenizer)
    ids = [begin, *(tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else [])]
    device = next(model.parameters()).device
    texts: list[str] = []
    for start in range(0, memory.batch, 64):
        part = memory[slice(start, start + 64)]
        given = torch.tensor([ids] * part.batch, device=device)
        training.check_prompt(given, torch.ones_like(given), model.config, max_new_tokens)
        made = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            memory=part,
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        )
        texts += [text.strip() for text in tokenizer.batch_decode(made[:, len(ids) :], skip_special_tokens=True)]
    return texts
