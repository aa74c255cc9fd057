"""The tables: obedience to the text by guidance, and likeness to an example by strength, beside their controls."""

from __future__ import annotations

from typing import Any

import torch
from digits import NUMBERS, Digits
from measure import Judge, diversity, mean, questions, similarity
from models import Words
from sampling import draw
from style import StyleEncoder
from train_style import Concatenated

import mmattn
from mmattn import training

GUIDANCE = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def text_rows(
    model: mmattn.hosts.UNet, words: Words, judge: Judge, real: Digits, steps: int, seed: int, each: int = 6
) -> list[dict[str, Any]]:
    """For each guidance: digits and attributes as asked, diversity, and the distance to real pictures."""
    asked, rows = questions(each, seed), []
    for w in GUIDANCE:
        made = draw(model, words, asked.sentences, steps, w, seed=seed)
        found = judge.obedience(asked, made)
        rows.append({"w": w, **found, "diversity": diversity(made, asked.digits, real)})
    return rows


def style_rows(
    model: mmattn.hosts.UNet,
    words: Words,
    judge: Judge,
    encoder: StyleEncoder,
    held_out: Digits,
    concatenated: Concatenated | None,
    steps: int,
    w: float,
    seed: int,
) -> list[dict[str, Any]]:
    """For each strength: likeness to a held-out example of another digit, and the digit read as the text asked."""
    generator = torch.Generator().manual_seed(seed)
    n = len(held_out)
    asked = (held_out.digits + torch.randint(1, 10, (n,), generator=generator)) % 10
    sentences = [f"a {NUMBERS[digit]}" for digit in asked.tolist()]
    wanted = judge.style(held_out.pictures)
    memory = encoder.encode(held_out.pictures)
    # Each example exchanged for the one half the pictures further on.
    shuffled = memory[[(index + n // 2) % n for index in range(n)]]

    def row(name: str, **given: Any) -> dict[str, Any]:
        made = draw(model, words, sentences, steps, w, seed=seed, **given)
        found = similarity(wanted, judge.style(made))
        return {
            "name": name,
            "stroke": found[0],
            "slant": found[1],
            "width": found[2],
            "style": mean(found),
            "digit": float((judge.read(made) == asked).float().mean()),
        }

    rows = [row("no example")]
    rows += [row(f"decoupled, strength {strength}", memory=memory, strength=strength) for strength in STRENGTHS]
    rows.append(row("decoupled, strength 1.0, shuffled examples", memory=shuffled))
    if concatenated is not None:
        rows.append(row("concatenated with the text", concatenated=concatenated, memory=memory))
        rows.append(row("concatenated, shuffled examples", concatenated=concatenated, memory=shuffled))
    return rows


def text_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `text_rows` in markdown."""
    header = ["w", "digit read as asked", "attribute on the asked side", "attribute clearly", "diversity", "Fréchet"]
    return training.markdown_table(
        header,
        [
            [
                f"{row['w']:g}",
                *(f"{100 * row[name]:.1f} %" for name in ("digit", "attribute", "clearly")),
                f"{row['diversity']:.2f}",
                f"{row['frechet']:.2f}",
            ]
            for row in rows
        ],
    )


def style_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `style_rows` in markdown."""
    header = ["", "stroke", "slant", "width", "mean likeness", "digit read as asked"]
    return training.markdown_table(
        header,
        [
            [
                row["name"],
                *(f"{row[name]:+.2f}" for name in ("stroke", "slant", "width", "style")),
                f"{100 * row['digit']:.1f} %",
            ]
            for row in rows
        ],
    )
