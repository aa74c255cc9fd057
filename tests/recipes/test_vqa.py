"""The recipe vqa: its data, a short run on the real models, and what cannot be known without a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmattn
from mmattn import models, pipelines, training
from tests.models.test_pretrained import need, need_espeak
from tests.recipes.runs import settings_of


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    for name in ("smollm2", "efficientnet-lite0", "easy-vqa"):
        need(name)
    return load_files("vqa", "settings", "data", "report", "train")


@pytest.fixture(scope="module")
def tokenizer(recipe: SimpleNamespace) -> Any:
    return pipelines.load_language_model("smollm2", "cpu")[1]


def test_without_a_picture_two_thirds_are_right(recipe: SimpleNamespace, tokenizer: Any) -> None:
    """The figures of the public split: what a model must be above."""
    data = recipe.data.load_data(tokenizer)
    assert (len(data.train), len(data.test), len(data.prompts), len(data.answers)) == (38575, 9673, 107, 13)
    assert not set(data.train.pictures) & set(data.test.pictures)
    rows = {row["name"]: row for row in recipe.train.prior_rows(data)}
    usual = rows["the usual answer to each question"]
    shares = [round(100 * usual[kind], 1) for kind in ("all", "yes or no", "shape", "colour")]
    assert shares == [66.9, 82.5, 34.3, 12.0], "of equally frequent answers the first one in the alphabet"
    assert tokenizer.decode(data.prompts[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_whole_answers_are_trained(recipe: SimpleNamespace, tokenizer: Any) -> None:
    """The first token of each answer, and at each eighth question the rest of it, to its end."""
    data = recipe.data.load_data(tokenizer, 173, 5)
    texts, tokens = recipe.data.training_tokens(data)
    firsts = tokens[tokens[:, 0] < len(data.prompts)]
    assert torch.equal(firsts[:, 0], data.train.prompt) and torch.equal(firsts[:, 1], data.train.picture)
    assert torch.equal(firsts[:, 2], data.tokens[data.train.answer])
    texts_of = [tokenizer.decode([*texts[row], token]) for row, _, token in tokens.tolist()]
    whole = [text for text in texts_of if text.endswith("<|im_end|>")]
    assert len(whole) == 22 == -(-173 // 8)
    answers = [data.answers[answer].capitalize() for answer in data.train.answer[::8].tolist()]
    assert [text.split("assistant\n")[1] for text in whole] == [f"{answer}<|im_end|>" for answer in answers]
    few = recipe.data.load_data(tokenizer, 173, 1)
    assert sorted(map(str, recipe.data.prior_rows(few)[0].values())).count("None") == 3, "two kinds have no question"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_shipped_adapter(recipe: SimpleNamespace, dtype: torch.dtype) -> None:
    """96 % of such questions are right; with the pictures of others, those that the usual answer fits."""
    pipe, rows = mmattn.pipeline("assets/vqa", device="cpu", dtype=dtype), models.load_easy_vqa("test")[::401]
    questions, pictures = [row.text.capitalize() for row in rows], [row.picture for row in rows]

    def right(seen: list[Path]) -> int:
        return sum(answer.lower() == row.answer for answer, row in zip(pipe(seen, questions), rows, strict=True))

    assert len(rows) == 25 and right(pictures) >= 22 and right([*pictures[7:], *pictures[:7]]) <= 20


@pytest.mark.slow
def test_the_adapter_of_a_run(recipe: SimpleNamespace, finished: Callable[[str], Path]) -> None:
    run = finished("vqa")
    assert (run / "answers.png").stat().st_size > 10_000 and (run / "loss.png").is_file()
    pipe, asked = mmattn.pipeline(run / "adapter", device="cpu"), models.load_easy_vqa("test")[0]
    data = recipe.data.load_data(pipe.tokenizer, 5, 5)
    assert pipe.make_prompt(data.texts[0].capitalize()) == data.prompts[0]
    memory = {"memory": pipe.make_memory([asked.picture])}
    logits = recipe.train.last_logits(pipe.model, [pipe.make_prompt(asked.text)], pipe.device, **memory)
    assert pipe(asked.picture, asked.text, max_new_tokens=1) == pipe.tokenizer.decode(logits.argmax(-1)).strip()
    model = mmattn.load(pipelines.load_language_model("smollm2", "cpu")[0], run / "adapter")
    block = model.adapter("default").block(28)
    assert block.calibration is not None and torch.isfinite(block.calibration.spread).all()


@pytest.mark.slow
def test_a_short_run_with_spoken_questions(recipe: SimpleNamespace, tmp_path: Path) -> None:
    need("whisper-base"), need_espeak()
    settings = settings_of("vqa", tmp_path)
    speech = {"voices": 1, "max_steps": 3, "adapter": settings["adapter"] | {"layers": [26]}}
    run = recipe.train.main(settings | {"train_questions": 9, "spoken": True, "speech": speech})
    content = json.loads((run / "table.json").read_text())
    rows = {row.pop("name"): row for row in content["rows"]}
    bare, neither = rows["frozen model, neither"], rows["adapters, neither"]
    assert [bare[kind] for kind in ("all", "yes or no")] == [neither[kind] for kind in ("all", "yes or no")]
    assert {f"adapters, {kind}" for kind in ("sounds shuffled", "pictures shuffled", "both right")} <= set(rows)
    assert (run / "loss.png").is_file()
    assert content["voices"] == {"train": 1, "test": 1} and "1 voices by turns" in (run / "table.md").read_text()
    lm = pipelines.load_language_model("smollm2", "cpu")[0]
    model = mmattn.load(lm, run / "speech", "speech")
    mmattn.load(lm, run / "picture", "picture")
    assert list(model.adapters) == ["speech", "picture"]


@pytest.mark.slow
def test_hidden_states_of_questions_differ_little(recipe: SimpleNamespace, tokenizer: Any) -> None:
    """The figures on the page of the gated adapter: why it is calibrated."""
    data = recipe.data.load_data(tokenizer)
    model = mmattn.attach(pipelines.load_language_model("smollm2", "cpu")[0], mmattn.GatedAdapter(112, layers=[24]))
    with training.cached_prompts(model, data.prompts) as prompts:
        states = prompts.states[:, -1]
    assert states.norm(dim=-1).median() == pytest.approx(484, rel=0.01)
    assert (states - states.mean(0)).norm(dim=-1).median() == pytest.approx(75, rel=0.01)
