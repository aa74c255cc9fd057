"""What a run leaves behind besides the adapter: the table with its controls, the plot of the losses, and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmattn
from mmattn import training


def table(lines: Sequence[Any], host: str) -> str:
    """The held-out loss of each line, and what it saves over the text-only LoRA where there is one."""
    writes = host == "language"
    measures = ["held-out loss", *(["perplexity"] if writes else []), "less than the LoRA"]
    control = next((one.loss for one in lines if one.name.startswith("LoRA")), math.nan)
    rows = []
    for one in lines:
        saved = control - one.loss
        rows.append(
            [
                one.name,
                "–" if math.isnan(one.loss) else f"{one.loss:.4f}",
                *(["–" if math.isnan(one.loss) else f"{math.exp(min(one.loss, 700.0)):.2f}"] if writes else []),
                "–" if math.isnan(saved) else f"{saved:+.4f}",
                f"{one.parameters:,}",
                f"{one.seconds:.0f}",
            ]
        )
    unit = "nats per token" if writes else "weighted squared error per picture"
    notes = [f"- Loss in {unit}, over rows that were never trained on."]
    if len(lines) > 1:
        notes.append(
            "- Shuffled: each row with the memory of another. LoRA: as many trained parameters, the same texts."
        )
    if any(math.isnan(one.loss) for one in lines):
        notes.append("- –: fewer than two held-out rows have a memory, so there is none to exchange; hold out more.")
    return training.markdown_table(["", *measures, "trained parameters", "seconds"], rows) + "\n\n" + "\n".join(notes)


def plot_losses(path: Path, metrics: Path) -> None:
    """Training and held-out loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4))
    for key, label in (("loss", "training"), ("eval_loss", "held out")):
        seen = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if seen:
            axes.plot(*zip(*seen, strict=True), label=label, marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if lines:
        axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def plot_pictures(path: Path, rows: Sequence[Any], drawn: Any) -> None:
    """For each row the picture it was shown, if it was, and below it what was drawn as its text says."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(rows), figsize=(1.6 * len(rows), 3.6), squeeze=False)
    for row, picture, (above, below) in zip(rows, drawn, axes.T, strict=True):
        if row.images:
            above.imshow(mmattn.load_image(row.images[0]))
        below.imshow(picture.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
        below.set_xlabel((row.text or " ".join(row.passages))[:40], fontsize=7)
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
    axes[0][0].set_ylabel("shown", fontsize=8)
    axes[1][0].set_ylabel("drawn", fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
