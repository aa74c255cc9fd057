"""Compose a model that knows keys with one that reckons, and measure both: `mmattn train CONFIG`, or this file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from mmattn import training

from .expressions import TASKS, World
from .models import build, teach, tune
from .readers import Alone, Along, Leaky, PromptOnly, measure
from .settings import Config
from .tables import table

# What a composition is trained on: the paper's text has it in two ways; the third keeps what both could do.
WAYS = {"substitution": TASKS[:1], "KV-arithmetic": TASKS[2:], "all three": TASKS}


def main(settings: dict[str, Any]) -> Path:
    """Leave settings, metrics, the models, the adapter and the table with its controls in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    run.write_config(config.model_dump(mode="json"))
    content = {"seed": config.seed, **compose(config, run)}
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    print(text)
    return run.path


def compose(config: Config, run: training.RunFolder) -> dict[str, Any]:
    """Every row of the table, and what was trained."""
    data = config.data
    world = World(data.keys, data.values, data.share, data.working, config.seed)
    knower = teach(config, world, config.knower, world.knowing, "m_A", run)
    reckoner = teach(config, world, config.reckoner, lambda random, _: world.reckoning(random), "m_B", run)
    for name, lm in (("m_A", knower), ("m_B", reckoner)):
        lm.save_pretrained(run.path / name)
    rows = [
        scores(config, world, "m_A, knows the keys", Alone(knower)),
        scores(config, world, "m_B, does arithmetic", Alone(reckoner)),
        ceiling(config, world, reckoner),
    ]
    seconds, parameters = [], 0
    for way, tasks in WAYS.items():
        reader = Along(reckoner, knower, config.adapter)
        parameters, _ = reader.model.trainable_parameters()
        label = f"composed, trained on {way}"
        seconds.append(learn(config, world, reader, reader.model.adapters, tasks, label, run))
        rows.append(scores(config, world, label, reader))
        if way == "all three":
            reader.model.save_adapter(run.path / "adapter")
        reader.model.unload()
    if config.controls:
        rows += controls(config, world, knower, reckoner, parameters, run)
    return {"rows": rows, "seconds": seconds, "parameters": parameters, "held": len(world.held)}


def controls(
    config: Config, world: World, knower: Any, reckoner: Any, parameters: int, run: training.RunFolder
) -> list[dict[str, Any]]:
    """The same composition data for what should not, or not as well, be able to use them."""
    rows = []
    lora = training.matched_lora(reckoner, parameters)
    learn(config, world, Alone(lora), lora, TASKS, "LoRA", run)
    rows.append(scores(config, world, "LoRA on m_B", Alone(lora)))
    lora.unload()
    # There is only the form to learn, which is soon done.
    short = config.knower.model_copy(update={"max_steps": max(1, config.knower.max_steps // 4)})
    vanilla = teach(config, world, short, partial(world.knowing, known=False), "vanilla m_A", run)
    random = build(world, config.knower, config.seed + 1)
    for name, kind, lm in (
        ("random m_A", Along, random),
        ("vanilla m_A, never taught the keys", Along, vanilla),
        ("m_A as encoder of the prompt", PromptOnly, knower),
        ("leaky, without the causal mask", Leaky, knower),
    ):
        reader = kind(reckoner, lm, config.adapter)
        learn(config, world, reader, reader.model.adapters, TASKS, name, run)
        rows.append(scores(config, world, name, reader))
        reader.model.unload()
    return rows


def learn(
    config: Config, world: World, reader: Alone, trained: Any, tasks: Any, label: str, run: training.RunFolder
) -> float:
    """Train on expressions of the first keys, for these tasks in turn; seconds."""
    random = Random(f"{config.seed} composition")

    def compute_loss(step: int) -> Any:
        drawn = [world.draw(world.keys, random) for _ in range(config.optim.batch_size)]
        return reader.loss(world.batch([[one.pair(tasks[row % len(tasks)])] for row, one in enumerate(drawn)]))

    return tune(config, reader.model, trained, compute_loss, label, run)


def scores(config: Config, world: World, name: str, reader: Alone) -> dict[str, Any]:
    """One row: what is written right in each task, and KV-arithmetic teacher-forced."""
    found = {task: measure(reader, world, task, config.data.ask, config.seed) for task in TASKS}
    forced = found["KV-arithmetic"]["forced"]
    return {"name": name, **{task: share["written"] for task, share in found.items()}, "forced": forced}


def ceiling(config: Config, world: World, reckoner: Any) -> dict[str, Any]:
    """m_B on the very expressions of KV-arithmetic, with the values in place of the keys."""
    found = measure(Alone(reckoner), world, "KV-arithmetic", config.data.ask, config.seed, filled=True)
    name = "ceiling: m_B with the values filled in"
    return {"name": name, **dict.fromkeys(TASKS), "KV-arithmetic": found["written"], "forced": found["forced"]}


if __name__ == "__main__":
    import sys

    from mmattn.recipes import read_settings

    given = read_settings(Path(sys.argv[1]), sys.argv[2:])
    main({key: value for key, value in given.items() if key != "recipe"})
