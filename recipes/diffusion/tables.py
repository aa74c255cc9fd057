"""The tables: obedience to the text by guidance, and likeness to an example by adapter_scale, beside their controls."""

from __future__ import annotations

from typing import Any

import torch

import mmattn
from mmattn import training

from .data import Pictures
from .measure import Judge, mean, questions, similarity
from .models import Models
from .sampling import draw
from .style import StyleEncoder
from .train_style import Concatenated

GUIDANCE_SCALES = (1.0, 1.1, 1.3, 2.0, 3.0, 5.0)
ADAPTER_SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def text_rows(
    model: mmattn.hosts.AdaptedUNet, models: Models, judge: Judge, steps: int, seed: int, each: int
) -> list[dict[str, Any]]:
    """For each guidance scale: classes and attributes as asked, diversity, and the distance to real pictures."""
    asked, rows = questions(judge.subject, each, seed), []
    for guidance_scale in GUIDANCE_SCALES:
        made = draw(model, models, asked.sentences, steps, guidance_scale, seed=seed)
        rows.append({"name": f"{guidance_scale:g}", **judge.obedience(asked, made)})
    return rows


def style_rows(
    model: mmattn.hosts.AdaptedUNet,
    models: Models,
    judge: Judge,
    encoder: StyleEncoder,
    held_out: Pictures,
    concatenated: Concatenated | None,
    steps: int,
    guidance_scale: float,
    seed: int,
) -> list[dict[str, Any]]:
    """For each adapter_scale: likeness to a held-out example of another class, and the class read as the text asked."""
    generator = torch.Generator().manual_seed(seed)
    n, classes = len(held_out), len(judge.subject.classes)
    asked = (held_out.classes + torch.randint(1, classes, (n,), generator=generator)) % classes
    sentences = [judge.subject.plain(number) for number in asked.tolist()]
    wanted = judge.style(held_out.pictures)
    memory = encoder.encode(held_out.pictures)
    # Each example exchanged for the one half the pictures further on.
    shuffled = memory[[(index + n // 2) % n for index in range(n)]]

    def row(name: str, **given: Any) -> dict[str, Any]:
        made = draw(model, models, sentences, steps, guidance_scale, seed=seed, **given)
        found = similarity(wanted, judge.style(made))
        return {
            "name": name,
            **dict(zip(judge.subject.attributes.names, found, strict=True)),
            "likeness": mean(found),
            "read": float((judge.read(made) == asked).float().mean()),
        }

    rows = [row("no example")]
    rows += [
        row(f"decoupled, adapter_scale {adapter_scale}", memory=memory, adapter_scale=adapter_scale)
        for adapter_scale in ADAPTER_SCALES
    ]
    rows.append(row("decoupled, adapter_scale 1.0, shuffled examples", memory=shuffled))
    if concatenated is not None:
        rows.append(row("concatenated with the text", concatenated=concatenated, memory=memory))
        rows.append(row("concatenated, shuffled examples", concatenated=concatenated, memory=shuffled))
    return rows


def text_table(tables: list[dict[str, Any]]) -> str:
    """The rows of `text_rows` in markdown, of one or several runs."""
    columns = {
        "read": ("read as asked", 100, ".1f", " %"),
        "attribute": ("attribute on the asked side", 100, ".1f", " %"),
        "clearly": ("attribute clearly", 100, ".1f", " %"),
        "diversity": ("diversity", 1, ".2f", ""),
        "frechet": ("Fréchet", 1, ".2f", ""),
    }
    return training.spread_table("guidance_scale", columns, [table["rows"] for table in tables])


def style_table(tables: list[dict[str, Any]]) -> str:
    """The rows of `style_rows` in markdown, of one or several runs."""
    measures = [name for name in tables[0]["rows"][0] if name not in ("name", "likeness", "read")]
    columns = {
        **{name: (name, 1, "+.2f", "") for name in measures},
        "likeness": ("mean likeness", 1, "+.2f", ""),
        "read": ("read as asked", 100, ".1f", " %"),
    }
    return training.spread_table("", columns, [table["rows"] for table in tables])


def table(tables: list[dict[str, Any]]) -> str:
    """The table of one stage from one or several `table.json`, and what its training took."""
    made = (text_table if tables[0]["stage"] == "text" else style_table)(tables)
    took = []
    for name in tables[0]["training"]:
        runs = [run["training"][name] for run in tables]
        seconds = training.mean_and_spread([run["seconds"] for run in runs], 1, ".0f", " s")
        took.append(f"{name}: {runs[0]['steps']} steps in {seconds}")
    return "\n\n".join([made, "; ".join(took) + ".", tables[0]["judge"]])
