"""Compose a model that knows keys with one that reckons, and measure both: `mmattn train config.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmattn import training

from .expressions import END, PAD, TASKS, Pair, World
from .readers import Alone, Along, Leaky, PromptOnly, measure
from .settings import Config, ModelSettings

# What a composition is trained on: the paper's text has it in two ways; the third keeps what both could do.
WAYS = {"substitution": TASKS[:1], "KV-arithmetic": TASKS[2:], "all three": TASKS}
# arXiv 2401.02412, table 1.
PAPER = {
    "paper: m_A": (0.981, 0.042, 0.007),
    "paper: m_B": (0.0, 0.737, 0.0),
    "paper: composed": (0.929, 0.720, 0.843),
}
COLUMNS = {
    "substitution": ("KV-substitution", 100, ".1f", " %"),
    "arithmetic": ("numeric arithmetic", 100, ".1f", " %"),
    "KV-arithmetic": ("KV-arithmetic", 100, ".1f", " %"),
    "forced": ("KV-arithmetic, teacher-forced", 100, ".1f", " %"),
}
Texts = Sequence[Pair]


def main(settings: dict[str, Any]) -> Path:
    """Leave settings, metrics, the models, the adapter and the table with its controls in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    content = {"seed": config.seed, **Composition(config, run).table()}
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    print(text)
    return run.path


class Composition:
    """One run: the keys, the two models that it makes from nothing, and what is put on them."""

    def __init__(self, config: Config, run: training.RunFolder) -> None:
        self.config, self.run, data = config, run, config.data
        self.accelerator = training.make_accelerator(device=config.device)
        device = self.accelerator.device
        self.world = World(data.keys, data.values, data.share, data.working, config.seed, device)

    def table(self) -> dict[str, Any]:
        """Every row of the table, and what was trained."""
        config, world, rows = self.config, self.world, []
        knower = self.teach(config.knower, world.knowing, "m_A")
        reckoner = self.teach(config.reckoner, lambda random, _: world.reckoning(random), "m_B")
        for name, lm in (("m_A", knower), ("m_B", reckoner)):
            lm.save_pretrained(self.run.path / name)
        rows.append(self.scores("m_A, knows the keys", Alone(knower)))
        rows.append(self.scores("m_B, does arithmetic", Alone(reckoner)))
        filled = measure(Alone(reckoner), world, "KV-arithmetic", config.data.ask, config.seed, filled=True)
        ceiling = {"KV-arithmetic": filled["written"], "forced": filled["forced"]}
        rows.append({"name": "ceiling: m_B with the values filled in", **dict.fromkeys(TASKS), **ceiling})
        seconds, parameters = [], 0
        for way, tasks in WAYS.items():
            reader = Along(reckoner, knower, config.adapter)
            parameters, _ = reader.model.trainable_parameters()
            name = f"composed, trained on {way}"
            seconds.append(self.compose(reader, tasks, name))
            rows.append(self.scores(name, reader))
            if way == "all three":
                reader.model.save_adapter(self.run.path / "adapter")
            reader.model.unload()
        if config.controls:
            rows += self.controls(knower, reckoner, parameters)
        return {"rows": rows, "seconds": seconds, "parameters": parameters, "held": len(world.held)}

    def controls(self, knower: Any, reckoner: Any, parameters: int) -> list[dict[str, Any]]:
        """The same composition data for what should not, or not as well, be able to use them."""
        rows, config, world = [], self.config, self.world
        lora = training.matched_lora(reckoner, parameters)
        self.compose(Alone(lora), TASKS, "LoRA")
        rows.append(self.scores("LoRA on m_B", Alone(lora)))
        lora.unload()
        # There is only the form to learn, which is soon done.
        short = config.knower.model_copy(update={"max_steps": max(1, config.knower.max_steps // 4)})
        vanilla = self.teach(short, partial(world.knowing, known=False), "vanilla m_A")
        random = build(world, config.knower, config.seed + 1)
        for name, kind, lm in (
            ("random m_A", Along, random),
            ("vanilla m_A, never taught the keys", Along, vanilla),
            ("m_A as encoder of the prompt", PromptOnly, knower),
            ("leaky, without the causal mask", Leaky, knower),
        ):
            reader = kind(reckoner, lm, config.adapter)
            self.compose(reader, TASKS, name)
            rows.append(self.scores(name, reader))
            reader.model.unload()
        return rows

    def teach(self, settings: ModelSettings, draw: Callable[[Random, float], Pair], label: str) -> LlamaForCausalLM:
        """A model that has learned what `draw` tells at each share of its steps; frozen from then on."""
        model, steps = build(self.world, settings, self.config.seed), settings.max_steps
        random = Random(f"{self.config.seed} {label}")

        def batches() -> Iterator[list[Texts]]:
            for step in range(steps):
                yield [[draw(random, step / steps) for _ in range(settings.pieces)] for _ in range(settings.batch_size)]

        learning = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
        self.train(Alone(model), batches(), label, max_steps=steps, **learning)
        return model.requires_grad_(False)

    def compose(self, reader: Alone, tasks: Sequence[str], label: str) -> float:
        """Train what was put on a frozen model with expressions of the first keys, for these tasks in turn; seconds."""
        world, optim, random = self.world, self.config.optim, Random(f"{self.config.seed} composition")

        def batches() -> Iterator[list[Texts]]:
            for _ in count():
                drawn = [world.draw(world.keys, random) for _ in range(optim.batch_size)]
                yield [[one.pair(tasks[row % len(tasks)])] for row, one in enumerate(drawn)]

        learning = {"learning_rate": optim.learning_rate, "gate_learning_rate": optim.gate_learning_rate}
        return self.train(
            reader, batches(), label, max_steps=optim.max_steps, weight_decay=optim.weight_decay, **learning
        )

    def train(self, reader: Alone, batches: Iterator[list[Texts]], label: str, **learning: Any) -> float:
        """Train the weights of a reader that are not frozen; seconds."""

        def loss(rows: Sequence[Texts], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
            batch = self.world.batch(rows)
            targets = int((batch["labels"][:, 1:] != -100).sum())
            return reader.loss(batch) * targets, targets

        optim = self.config.optim
        config = training.TrainingConfig(
            warmup_steps=min(optim.warmup_steps, learning["max_steps"] // 2),
            max_grad_norm=optim.max_grad_norm,
            seed=self.config.seed,
            **learning,
        )
        # The next adapter begins as if nothing had been trained before it.
        with torch.random.fork_rng():
            done = training.train(
                reader.model,
                loss,
                batches,
                config,
                self.accelerator,
                log=lambda **figures: self.run.log(model=label, **figures),
                label=label,
                progress=self.config.progress,
            )
        if done.interrupted:
            raise KeyboardInterrupt
        return done.seconds

    def scores(self, name: str, reader: Alone) -> dict[str, Any]:
        """One row: what is written right in each task, and KV-arithmetic teacher-forced."""
        found = {task: measure(reader, self.world, task, self.config.data.ask, self.config.seed) for task in TASKS}
        forced = found["KV-arithmetic"]["forced"]
        return {"name": name, **{task: share["written"] for task, share in found.items()}, "forced": forced}


def build(world: World, settings: ModelSettings, seed: int) -> LlamaForCausalLM:
    """A Llama of random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(world.ids), hidden_size=settings.width, intermediate_size=8 * settings.width // 3,
        num_hidden_layers=settings.depth, num_attention_heads=settings.heads, num_key_value_heads=settings.heads,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=world.ids[END],
        eos_token_id=world.ids[END], pad_token_id=world.ids[PAD],
    )  # fmt: skip
    return LlamaForCausalLM(config).to(world.device).eval()


def table(contents: list[dict[str, Any]]) -> str:
    """The rows of one or several `table.json`, the paper's first, and what was trained."""
    paper = [{"name": name, **dict(zip(COLUMNS, (*row, None), strict=True))} for name, row in PAPER.items()]
    made = training.spread_table("", COLUMNS, [paper + one["rows"] for one in contents])
    # The paper's figures are of one run, whatever the number of ours.
    made = "\n".join(line.replace(" ± 0.0", "") if line.startswith("| paper") else line for line in made.splitlines())
    seconds = training.mean_and_spread([one["seconds"][-1] for one in contents], 1, ".0f", " s")
    return (
        f"{made}\n\nadapter: {contents[0]['parameters']:,} trained parameters in {seconds}; every expression measured "
        f"is of {contents[0]['held']:,} keys that no composition was trained on."
    )
