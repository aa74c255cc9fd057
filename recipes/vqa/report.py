"""The table of a run, and answers with the patches that they attended to."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import inspect, training

from .data import Data

COLUMNS = {
    "all": ("all questions", 100, ".1f", " %"),
    "yes or no": ("yes or no", 100, ".1f", " %"),
    "shape": ("shape", 100, ".1f", " %"),
    "colour": ("colour", 100, ".1f", " %"),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}
SAMPLES = 8


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with notes on how to read it."""
    notes = [f"{len(contents)} seeds, mean ± half the range."] if len(contents) > 1 else []
    notes += spoken_notes(contents) if "heard" in contents[0] else text_notes(contents)
    rows = training.spread_table("", COLUMNS, [content["rows"] for content in contents])
    return "\n".join([rows, "", *(f"- {note}" for note in notes)])


def mean_percent(contents: list[dict[str, Any]], name: str) -> str:
    """Return the mean of a share over runs."""
    return f"{100 * sum(content[name] for content in contents) / len(contents):.1f} %"


def text_notes(contents: list[dict[str, Any]]) -> list[str]:
    """Return the notes of runs whose questions are texts."""
    first = contents[0]
    spellings = [content["spellings"] for content in contents]
    by_spelling = ", ".join(f'"{text}" {mean_percent(spellings, text)}' for text in spellings[0])
    return [
        f"Right answers to {first['test_questions']:,} questions of the public test split, about other pictures "
        "than in training: the first token that the model generates, greedily from its whole vocabulary.",
        "The usual answer to each question is all that can be known without a picture. Shuffled: another question's "
        "picture. No picture: the same model called without a memory, bit for bit the frozen one.",
        *([f"Spelled at random: {by_spelling}."] if len(spellings[0]) > 1 else []),
    ]


def spoken_notes(contents: list[dict[str, Any]]) -> list[str]:
    """Return the notes of runs with spoken questions."""
    first = contents[0]
    return [
        f"Right answers to {first['test_questions']:,} questions of the public test split, about other pictures than "
        f"in training, in {first['voices']['test']} voices by turns that are none of the {first['voices']['train']} of "
        "training: the first token that the model generates, greedily from its whole vocabulary.",
        "Shuffled: the sound, or the picture, of another question.",
        f"Of the sounds of the test, a linear probe of the mean of Whisper's states names "
        f"{mean_percent(contents, 'probe')}; {mean_percent(contents, 'heard')} have a state, behind the adapter of the "
        "sound, that is nearest to the one of the same question as a text.",
    ]


def draw_answers(
    run: training.RunFolder,
    model: Any,
    prompts: training.PromptCache,
    encoder: Any,
    data: Data,
    memory: mmattn.Memory,
    predicted: Tensor,
) -> None:
    """Draw some test pictures with a question each, its answer, and the attention of the answer to the patches."""
    from matplotlib.figure import Figure

    chosen = choose(data)
    figure = Figure(figsize=(15, 2.35 * (len(chosen) // 4)), layout="constrained")
    axes = figure.subplots(len(chosen) // 4, 8).reshape(-1, 2)
    traces = [trace_answer(model, prompts, encoder, data, memory, number, int(predicted[number])) for number in chosen]
    for (left, right), number, trace in zip(axes, chosen, traces, strict=True):
        question, answer = data.test.rows[number], trace.words[0]
        picture, correct = mmattn.load_image(question.picture), answer.lower() == question.answer
        left.set_title("\n".join(textwrap.wrap(data.spelled[data.test.prompt[number]], 24)), fontsize=10, loc="left")
        text = answer if correct else f"{answer} ✗\nit is {question.answer}"
        right.set_title(text, fontsize=13, loc="left", color="#1b7837" if correct else "#b3261e", fontweight="bold")
        left.imshow(picture)
        right.imshow(picture)
        if encoder.grid is not None:  # what is not attended to lies in the dark
            weights = trace.mean()[0].view(1, 1, *encoder.grid)
            light = F.interpolate(weights / weights.max(), size=(picture.height, picture.width), mode="bicubic")[0, 0]
            right.imshow(torch.zeros(*light.shape, 3).numpy(), alpha=(0.85 * (1 - light.clamp(0, 1))).numpy())
    for ax in axes.flat:
        ax.axis("off")
    figure.savefig(run.path / "answers.png", dpi=110)
    inspect.save_traces(traces, run.path)


def choose(data: Data) -> list[int]:
    """Return test questions of every kind by turns, about other pictures each; nothing is known of their answers."""
    order = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0)).tolist()
    kinds = {number: kind for kind, rows in data.test.kinds(data.answers).items() for number in rows.tolist()}
    chosen: list[int] = []
    for kind in ["yes or no", "shape", "colour", "yes or no"] * (SAMPLES // 4):
        pictures = {data.test.rows[number].picture for number in chosen}
        answers = {data.test.rows[number].answer for number in chosen}
        # Of equals the first is taken.
        chosen.append(
            min(
                (number for number in order if number not in chosen),
                key=lambda number: (
                    kinds[number] != kind,
                    data.test.rows[number].picture in pictures,
                    data.test.rows[number].answer in answers,
                ),
            )
        )
    return chosen


@torch.no_grad()
def trace_answer(
    model: Any,
    prompts: training.PromptCache,
    encoder: Any,
    data: Data,
    memory: mmattn.Memory,
    number: int,
    token: int,
) -> inspect.Trace:
    """Return the attention of the answer to a test question to the patches of its picture."""
    question, answers = data.test.rows[number], dict(zip(data.tokens.tolist(), data.answers, strict=True))
    with inspect.record(model) as weights:
        model(**prompts[[int(data.test.prompt[number])]], memory=memory[int(data.test.picture[number])])
    rows, columns = encoder.grid or (1, memory.length)
    answer = answers.get(token, "?").capitalize()
    return inspect.Trace(
        [answer],
        [f"row {row + 1}, column {column + 1}" for row in range(rows) for column in range(columns)],
        torch.stack([calls[0][0, :, -1:] for _, calls in sorted(weights.items())]).cpu(),
        [f"layer {layer}" for _, layer in sorted(weights)],
        f"{data.spelled[data.test.prompt[number]]} {answer}",
        grid=encoder.grid,
        picture=mmattn.load_image(question.picture),
    )
