"""What a run leaves behind besides the adapter: the table with its controls, the plot of the losses, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mmattn
from mmattn import training
from mmattn.errors import import_extra

from .data import sample_rows


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


PANELS = {
    "loss": {"loss": "training", "eval_loss": "held out", "eval_loss_shuffled": "held out, other rows' memories"},
    "gate": "gate/",
    "share of attention": ("memory_attention/", "null_attention/"),
    "norm of the gradient": "gradients/",
}
"""Of each panel what it shows: metrics with their labels, or what the names of metrics begin with."""


def plot_metrics(path: Path, metrics: Path) -> None:
    """Losses, gates, attention and gradients over steps: a panel for each of which there is something."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    lines = training.read_metrics(metrics)
    known = list(dict.fromkeys(name for line in lines for name in line))
    shown = {
        title: what if isinstance(what, dict) else {name: name for name in known if name.startswith(what)}
        for title, what in PANELS.items()
    }
    shown = {title: names for title, names in shown.items() if title == "loss" or names}
    figure, axes = plt.subplots(len(shown), figsize=(7, 3.4 * len(shown)), squeeze=False, constrained_layout=True)
    for (title, names), axis in zip(shown.items(), axes[:, 0], strict=True):
        for name, label in names.items():
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, marker="o", markersize=3)
        axis.set(xlabel="step", ylabel=title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7, ncols=1 + len(axis.lines) // 7)
    figure.savefig(path, dpi=110)
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


def check_end(run: Any, memories: training.MemorySource, say: Callable[[str], None]) -> None:
    """Refuse before the first step what would fail after the last one."""
    import_extra("matplotlib", "viz")
    prompts = [run.settings.caption.prompt, *(row.prompt for row in sample_rows(run.held_out))]
    if run.settings.host == "language" and (warning := run.host.check_prompts(prompts)):
        say(warning)
    if run.pictures_alone:
        run.host.pipeline_config("", run.pooled)
    if run.held_out and run.settings.eval.controls:
        model = run.host.attach(memories)
        parameters = model.trainable_parameters()[0]
        model.unload()
        run.host.control(parameters)[1]()
