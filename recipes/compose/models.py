"""The small language models, made from nothing, and the loop that trains them and whatever is put on them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from mmattn import training

from .expressions import END, PAD, Pair, World
from .settings import Config, ModelSettings


def build(world: World, settings: ModelSettings, seed: int) -> LlamaForCausalLM:
    """A Llama of random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(world.tokens), hidden_size=settings.width, intermediate_size=8 * settings.width // 3,
        num_hidden_layers=settings.depth, num_attention_heads=settings.heads, num_key_value_heads=settings.heads,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=world.ids[END],
        eos_token_id=world.ids[END], pad_token_id=world.ids[PAD],
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def teach(
    config: Config,
    world: World,
    settings: ModelSettings,
    draw: Callable[[Random, float], Pair],
    label: str,
    run: training.RunFolder,
) -> LlamaForCausalLM:
    """A model that has learned what `draw` tells at each share of its steps; frozen from then on."""
    model = build(world, settings, config.seed)
    random = Random(f"{config.seed} {label}")

    def compute_loss(step: int) -> Tensor:
        done = step / settings.max_steps
        texts = [[draw(random, done) for _ in range(settings.pieces)] for _ in range(settings.batch_size)]
        return model(**world.batch(texts)).loss

    model.train()
    groups = training.parameter_groups(model, settings.learning_rate, weight_decay=settings.weight_decay)
    fit(config, groups, compute_loss, settings.max_steps, label, run)
    return model.eval().requires_grad_(False)


def tune(
    config: Config,
    model: Any,
    trained: nn.Module,
    compute_loss: Callable[[int], Tensor],
    label: str,
    run: training.RunFolder,
) -> float:
    """Train what was put on a frozen model; seconds."""
    optim = config.optim
    model.train()
    groups = training.parameter_groups(
        trained, optim.learning_rate, gate_learning_rate=optim.gate_learning_rate, weight_decay=optim.weight_decay
    )
    seconds = fit(config, groups, compute_loss, optim.max_steps, label, run)
    model.eval()
    return seconds


def fit(
    config: Config,
    groups: list[dict[str, Any]],
    compute_loss: Callable[[int], Tensor],
    steps: int,
    label: str,
    run: training.RunFolder,
) -> float:
    """The loop, its metrics in the run's folder; seconds."""
    return training.fit(
        groups,
        compute_loss,
        steps,
        warmup_steps=min(config.optim.warmup_steps, steps // 2),
        max_grad_norm=config.optim.max_grad_norm,
        label=label,
        log=lambda line: run.log(model=label, **line),
        progress=config.progress,
    ).seconds
