"""Compose models that know keys with one that reckons, and measure all: `mmattn train config.yaml`."""

from __future__ import annotations

import copy
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
from .measure import measure, token_times
from .readers import Alone, Along, Fused, Leaky, PromptOnly, Several
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
    "token_ms": ("ms a token", 1, ".2f", ""),
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
    """One run: the keys, the models that it makes from nothing, and what is put on them."""

    def __init__(self, config: Config, run: training.RunFolder) -> None:
        self.config, self.run, data = config, run, config.data
        self.accelerator = training.make_accelerator(device=config.device)
        device = self.accelerator.device
        self.world = World(data.keys, data.values, data.share, data.working, config.seed, device, data.knowers)

    def table(self) -> dict[str, Any]:
        """Every row of the table, and what was trained."""
        config, world, rows = self.config, self.world, []
        names = ["m_A", "m_C"][: config.data.knowers]
        knowers = [
            self.teach(config.knower, partial(world.knowing, knower=number), name) for number, name in enumerate(names)
        ]
        reckoner = self.teach(config.reckoner, lambda random, _: world.reckoning(random), "m_B")
        for name, lm in zip([*names, "m_B"], [*knowers, reckoner], strict=True):
            lm.save_pretrained(self.run.path / name)
        rows += [self.scores(f"{name}, knows the keys", Alone(lm)) for name, lm in zip(names, knowers, strict=True)]
        rows.append(self.scores("m_B, does arithmetic", Alone(reckoner)))
        filled = measure(Alone(reckoner), world, "KV-arithmetic", config.data.ask, config.seed, filled=True)
        ceiling = {"KV-arithmetic": filled["written"], "forced": filled["forced"], "token_ms": None}
        rows.append({"name": "ceiling: m_B with the values filled in", **dict.fromkeys(TASKS), **ceiling})
        with torch.random.fork_rng():
            readers = {
                "m_B, does arithmetic": Alone(copy.deepcopy(reckoner)),
                "composed, trained on all three": Along(copy.deepcopy(reckoner), knowers, config.adapter),
                "fused caches, trained on all three": Fused(copy.deepcopy(reckoner), knowers, config.fused),
            }
            spent = token_times(readers, world)
        trained: dict[str, dict[str, float]] = {}
        ways = WAYS if len(knowers) == 1 else {"all three": TASKS}
        made: list[tuple[str, Any, Any, Sequence[str], float]] = [
            (f"composed, trained on {way}", Along, config.adapter, tasks, config.optim.learning_rate)
            for way, tasks in ways.items()
        ]
        made.append(("fused caches, trained on all three", Fused, config.fused, TASKS, config.fused_learning_rate))
        for name, kind, settings, tasks, rate in made:
            reader = kind(reckoner, knowers, settings)
            parameters = reader.model.trainable_parameters()[0]
            trained[name] = {"parameters": parameters, "seconds": self.compose(reader, tasks, name, rate)}
            rows.append(self.scores(name, reader))
            if name.endswith("all three"):
                folder = self.run.path / ("fused" if kind is Fused else "adapter")
                for one in reader.names:
                    reader.model.save_adapter(folder if len(reader.names) == 1 else folder / one, one)
                rows += self.without(name.partition(",")[0], reader)
            reader.model.unload()
        if config.controls:
            rows += self.controls(knowers, reckoner, trained["composed, trained on all three"]["parameters"])
        for row in rows:
            row["token_ms"] = spent.get(row["name"])
        return {"rows": rows, "trained": trained, "held": sum(map(len, world.held)), "knowers": len(knowers)}

    def without(self, way: str, reader: Several) -> list[dict[str, Any]]:
        """A reader of several models with one of them missing, and with each in the place of another."""
        if len(reader.names) == 1:
            return []
        rows, given = [], dict(reader.given)
        for name, word in zip(given, ("first", "second"), strict=True):
            reader.given = {name: given[name]}
            rows.append(self.scores(f"{way}, only the {word} given", reader))
        reader.given = dict(zip(given, reversed(given.values()), strict=True))
        return [*rows, self.scores(f"{way}, each in the place of the other", reader)]

    def controls(self, knowers: Sequence[Any], reckoner: Any, parameters: float) -> list[dict[str, Any]]:
        """The same composition data for what should not, or not as well, be able to use them."""
        rows, config, world = [], self.config, self.world
        lora = training.matched_lora(reckoner, int(parameters))
        self.compose(Alone(lora), TASKS, "LoRA", config.optim.learning_rate)
        rows.append(self.scores("LoRA on m_B", Alone(lora)))
        lora.unload()
        random = [build(world, config.knower, config.seed + 1 + number) for number in range(len(knowers))]
        kinds: list[tuple[str, Any, Any, Sequence[Any]]] = [
            ("random m_A", Along, config.adapter, random),
            ("fused caches of a random m_A", Fused, config.fused, random),
        ]
        if len(knowers) == 1:
            # There is only the form to learn, which is soon done.
            short = config.knower.model_copy(update={"max_steps": max(1, config.knower.max_steps // 4)})
            vanilla = [self.teach(short, partial(world.knowing, known=False), "vanilla m_A")]
            kinds += [
                ("vanilla m_A, never taught the keys", Along, config.adapter, vanilla),
                ("m_A as encoder of the prompt", PromptOnly, config.adapter, knowers),
                ("leaky, without the causal mask", Leaky, config.adapter, knowers),
            ]
        for name, kind, settings, lms in kinds:
            reader = kind(reckoner, lms, settings)
            rate = config.fused_learning_rate if kind is Fused else config.optim.learning_rate
            self.compose(reader, TASKS, name, rate)
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

    def compose(self, reader: Alone, tasks: Sequence[str], label: str, rate: float) -> float:
        """Train what was put on a frozen model with expressions of the first keys, for these tasks in turn; seconds."""
        world, optim, random = self.world, self.config.optim, Random(f"{self.config.seed} composition")

        def batches() -> Iterator[list[Texts]]:
            for _ in count():
                drawn = [world.draw(world.keys, random) for _ in range(optim.batch_size)]
                yield [[one.pair(tasks[row % len(tasks)])] for row, one in enumerate(drawn)]

        learning = {"learning_rate": rate, "gate_learning_rate": optim.gate_learning_rate}
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
    paper = [
        dict.fromkeys(COLUMNS) | {"name": name} | dict(zip(TASKS, row, strict=True)) for name, row in PAPER.items()
    ]
    if contents[0]["knowers"] > 1:
        paper = []
    made = training.spread_table("", COLUMNS, [paper + one["rows"] for one in contents])
    # The paper's figures are of one run, whatever the number of ours.
    made = "\n".join(line.replace(" ± 0.0", "") if line.startswith("| paper") else line for line in made.splitlines())
    trained = "; ".join(
        f"{name}: {one['parameters']:,} parameters in "
        + training.mean_and_spread([content["trained"][name]["seconds"] for content in contents], 1, ".0f", " s")
        for name, one in contents[0]["trained"].items()
        if name.endswith("all three")
    )
    return (
        f"{made}\n\n{trained}. Every expression measured is of {contents[0]['held']:,} keys that nothing put on m_B "
        "was trained on; ms a token: medians of one request, all in turn."
    )
