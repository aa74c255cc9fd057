"""Can a frozen model that does arithmetic use the keys that another frozen one knows? Compose them, and measure all.

mmattn train config.yaml        # one model that knows keys
mmattn train config_three.yaml  # two, each its own
mmattn train config_smollm2.yaml  # SmolLM2 does the arithmetic
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmattn import pipelines, training

from .data import END, PAD, TASKS, Pair, World
from .readers import Composed, Ensemble, Fused, Single, measure, respell, token_times
from .report import table
from .settings import Config, ModelSettings

# What a composition is trained on: the paper's text has it in two ways; the third keeps what both could do.
WAYS = {"substitution": TASKS[:1], "KV-arithmetic": TASKS[2:], "all three": TASKS}
SHOTS = 6  # examples before each prompt of an anchor as it is
PRETRAINING = {"max_steps", "learning_rate", "weight_decay"}
FUSED = "fused caches, trained on all three"
Texts = Sequence[Pair]


def main(settings: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    content = {"seed": config.seed, **Composition(config, run).table()}
    run.finish(content, table)
    return run.path


class Composition:
    """One run: the keys, the models that are trained from scratch, and the adapters on them."""

    def __init__(self, config: Config, run: training.RunFolder) -> None:
        self.config, self.run = config, run
        device = config.optim.arguments(config).device
        self.world = self.small = World(config.data, config.seed, device)  # `small` is of the models trained here
        if config.anchor is not None:
            self.anchor, self.tokenizer = pipelines.load_language_model(config.anchor, device)
            self.world = World(config.data, config.seed, device, self.tokenizer)

    def table(self) -> dict[str, Any]:
        """Return every row of the table, and what was trained."""
        config, world, small = self.config, self.world, self.small
        rows: list[dict[str, Any]] = []

        # Models: m_A and m_C know keys, m_B does arithmetic; all are frozen from then on.
        names = ["m_A", "m_C"][: config.data.key_models]
        key_models = [
            self.pretrain(config.key_model, partial(small.draw_key_text, key_model=number), name)
            for number, name in enumerate(names)
        ]
        if config.anchor is None:
            arithmetic_model = self.pretrain(config.arithmetic_model, lambda random, _: small.draw_sum(random), "m_B")
            arithmetic_model.save_pretrained(self.run.path / "m_B")
        else:
            examples = World(config.data, config.seed, world.device, self.tokenizer, SHOTS)
            rows = [self.row(f"m_B as it is, after {SHOTS} sums", Single(self.anchor), examples)]
            arithmetic_model = self.teach()
        for name, lm in zip(names, key_models, strict=True):
            lm.save_pretrained(self.run.path / name)
        rows += [
            self.row(f"{name}, knows the keys", Single(lm), small) for name, lm in zip(names, key_models, strict=True)
        ]
        key_models = self.respelled(key_models)
        rows.append(self.row("m_B, does arithmetic", Single(arithmetic_model)))
        filled = measure(Single(arithmetic_model), world, "KV-arithmetic", config.data.ask, config.seed, filled=True)
        ceiling = {"KV-arithmetic": filled["written"], "forced": filled["forced"], "token_ms": None}
        rows.append({"name": "ceiling: m_B with the values filled in", **dict.fromkeys(TASKS), **ceiling})
        with torch.random.fork_rng():
            readers = {
                "m_B, does arithmetic": Single(copy.deepcopy(arithmetic_model)),
                "composed, trained on all three": Composed(copy.deepcopy(arithmetic_model), key_models, config.adapter),
            }
            if config.fused is not None:
                readers[FUSED] = Fused(copy.deepcopy(arithmetic_model), key_models, config.fused)
            times = token_times(readers, world)

        # Training and measuring: m_B with adapters that read the other models, by what they are trained on.
        trained: dict[str, dict[str, float]] = {}
        ways = config.ways if len(key_models) == 1 else ["all three"]
        readers_of: list[tuple[str, Any, Sequence[str]]] = [
            (f"composed, trained on {way}", Composed, WAYS[way]) for way in ways
        ]
        if config.fused is not None:
            readers_of.append((FUSED, Fused, TASKS))
        for name, kind, tasks in readers_of:
            reader, settings = self.compose(kind, arithmetic_model, key_models, tasks, name)
            trained[name] = settings
            rows.append(self.row(name, reader))
            if name.endswith("all three"):
                folder = self.run.path / ("fused" if kind is Fused else "adapter")
                for one in reader.names:
                    reader.model.save_adapter(folder if len(reader.names) == 1 else folder / one, one)
                rows += self.without(name.partition(",")[0], reader)
            reader.model.unload()
        if config.controls:
            rows += self.controls(key_models, arithmetic_model, trained["composed, trained on all three"]["parameters"])
        for row in rows:
            row["token_ms"] = times.get(row["name"])
        return {"rows": rows, "trained": trained, "held": sum(map(len, world.held_out)), "key_models": len(key_models)}

    def without(self, way: str, reader: Ensemble) -> list[dict[str, Any]]:
        """Measure a reader of several models without one of them, and with the models swapped."""
        if len(reader.names) == 1:
            return []
        rows, lms = [], dict(reader.lms)
        for name, word in zip(lms, ("first", "second"), strict=True):
            reader.lms = {name: lms[name]}
            rows.append(self.row(f"{way}, only the {word} given", reader))
        reader.lms = dict(zip(lms, reversed(lms.values()), strict=True))
        return [*rows, self.row(f"{way}, each in the place of the other", reader)]

    def controls(self, key_models: Sequence[Any], arithmetic_model: Any, parameters: float) -> list[dict[str, Any]]:
        """Train on the same expressions without a second model, and with untaught ones."""
        config, rows = self.config, []
        if "LoRA" in config.controls:
            lora = training.matched_lora(arithmetic_model, int(parameters), layers=self.upper_layers())
            self.train_composition(Single(lora), TASKS, "LoRA", config.lora_learning_rate or config.optim.learning_rate)
            rows.append(self.row("LoRA on m_B", Single(lora)))
            lora.unload()
        kinds: list[tuple[str, Any, Sequence[Any]]] = []
        if "random" in config.controls:
            random = [
                build(self.small, config.key_model, config.seed + 1 + number) for number in range(len(key_models))
            ]
            kinds.append(("random m_A", Composed, random))
            if config.fused is not None:
                kinds.append(("fused caches of a random m_A", Fused, random))
        if "vanilla" in config.controls and len(key_models) == 1:
            # There is only the form to learn, which is soon done.
            short = config.key_model.model_copy(update={"max_steps": max(1, config.key_model.max_steps // 4)})
            vanilla = [self.pretrain(short, partial(self.small.draw_key_text, known=False), "vanilla m_A")]
            kinds.append(("vanilla m_A, never taught the keys", Composed, vanilla))
        for name, kind, lms in kinds:
            reader, _ = self.compose(kind, arithmetic_model, self.respelled(lms), TASKS, name)
            rows.append(self.row(name, reader))
            reader.model.unload()
        return rows

    def pretrain(self, settings: ModelSettings, draw: Callable[[Random, float], Pair], label: str) -> LlamaForCausalLM:
        """Return a frozen model, trained on the texts that `draw` returns at each share of its steps."""
        model, steps = build(self.small, settings, self.config.seed), settings.max_steps
        random = Random(f"{self.config.seed} {label}")

        def batches() -> Iterator[list[Texts]]:
            for step in range(steps):
                yield [[draw(random, step / steps) for _ in range(settings.pieces)] for _ in range(settings.batch_size)]

        self.train(Single(model), self.small, batches(), label, **settings.model_dump(include=PRETRAINING))
        return model.requires_grad_(False)

    def teach(self) -> Any:
        """Return the pretrained anchor, frozen, with a LoRA merged into it that was taught arithmetic."""
        config, random = self.config, Random(f"{self.config.seed} m_B")
        lora = training.add_lora(self.anchor, config.rank, layers=self.upper_layers())
        pool = [self.world.draw_sum(random) for _ in range(config.data.pool or 10_000)]

        def batches() -> Iterator[list[Texts]]:
            while True:
                yield [[pair] for pair in random.choices(pool, k=config.arithmetic_model.batch_size)]

        with self.hidden_states(lora):
            self.train(
                Single(lora), self.world, batches(), "m_B", **config.arithmetic_model.model_dump(include=PRETRAINING)
            )
        lora.save_pretrained(str(self.run.path / "m_B"))
        return lora.merge_and_unload().requires_grad_(False)

    def upper_layers(self) -> list[int] | None:
        """Return the layers of a LoRA: those above the lowest adapter if states below are cached, else None for all."""
        if self.config.hidden_states is None:
            return None
        return list(range(min(self.config.adapter.layers) + 1, self.anchor.config.num_hidden_layers))

    def hidden_states(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which states below the trained layers come from the cache, if set."""
        folder = self.config.hidden_states
        return contextlib.nullcontext() if folder is None else training.cached_hidden_states(model, folder)

    def respelled(self, lms: Sequence[Any]) -> list[Any]:
        """Return models of m_A's kind as they read the tokens of a pretrained anchor."""
        if self.world is self.small:
            return list(lms)
        return [respell(lm, self.small, self.world, self.anchor.config.vocab_size) for lm in lms]

    def compose(
        self, kind: Any, arithmetic_model: Any, lms: Sequence[Any], tasks: Sequence[str], label: str
    ) -> tuple[Any, dict[str, float]]:
        """Return a trained reader of this kind, with its number of parameters and the seconds of training."""
        fused = kind is Fused
        reader = kind(arithmetic_model, lms, self.config.fused if fused else self.config.adapter)
        rate = self.config.fused_learning_rate if fused else self.config.optim.learning_rate
        parameters = reader.model.trainable_parameters()[0]
        return reader, {"parameters": parameters, "seconds": self.train_composition(reader, tasks, label, rate)}

    def train_composition(self, reader: Single, tasks: Sequence[str], label: str, rate: float) -> float:
        """Train a reader with expressions of the first keys, for these tasks in turn; return the seconds."""
        world, optim, random = self.world, self.config.optim, Random(f"{self.config.seed} composition")
        pool = [world.draw(world.keys, random) for _ in range(self.config.data.pool or 0)]

        def batches() -> Iterator[list[Texts]]:
            while True:
                rows = range(optim.per_device_train_batch_size)
                drawn = [random.choice(pool) if pool else world.draw(world.keys, random) for _ in rows]
                yield [[one.pair(tasks[row % len(tasks)])] for row, one in enumerate(drawn)]

        fields = {"learning_rate": rate, "max_steps": optim.max_steps}
        with self.hidden_states(reader.model):
            return self.train(reader, world, batches(), label, optim.gate_learning_rate, **fields)

    def train(
        self,
        reader: Single,
        world: World,
        batches: Iterator[list[Texts]],
        label: str,
        gate_learning_rate: float | None = None,
        **fields: Any,
    ) -> float:
        """Train the weights of a reader that are not frozen; `fields` replace those of the settings."""

        class ReaderTrainer(training.AdapterTrainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                return reader.loss(world.batch(inputs["texts"]))

        optim, steps = self.config.optim, fields["max_steps"]
        # The next adapter begins as if nothing had been trained before it.
        with torch.random.fork_rng():
            trainer = ReaderTrainer(
                reader.model,
                optim.arguments(
                    self.config,
                    per_device_train_batch_size=1,
                    use_cache=True,
                    warmup_steps=min(optim.warmup_steps, steps // 2),
                    **fields,
                ),
                data_collator=lambda _: {"texts": next(batches)},
                train_dataset=range(steps),
                gate_learning_rate=gate_learning_rate,
            )
            return self.run.train(trainer, label, self.config.progress)

    def row(self, name: str, reader: Single, world: World | None = None) -> dict[str, Any]:
        """Return a row: the shares of right answers in each task, and those of KV-arithmetic teacher-forced."""
        data, seed = self.config.data, self.config.seed
        shares = {task: measure(reader, world or self.world, task, data.ask, seed) for task in TASKS}
        written = {task: share["written"] for task, share in shares.items()}
        return {"name": name, **written, "forced": shares["KV-arithmetic"]["forced"]}


def build(world: World, settings: ModelSettings, seed: int) -> LlamaForCausalLM:
    """Return a Llama of random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(world.ids), hidden_size=settings.width, intermediate_size=8 * settings.width // 3,
        num_hidden_layers=settings.depth, num_attention_heads=settings.heads, num_key_value_heads=settings.heads,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=world.ids[END],
        eos_token_id=world.ids[END], pad_token_id=world.ids[PAD],
    )  # fmt: skip
    return LlamaForCausalLM(config).to(world.device).eval()
