"""Captions through the pipeline of a run's folder, beside the same steps by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, TextError
from tests.cli.running import call
from tests.serving.servers import captioning_pipe

pytest.importorskip("open_clip", reason="open_clip is not installed; it comes with mmattn[vision]")
FLOWERS = sorted(str(path) for path in Path("assets/flora").glob("*.png"))[:3]
NEW = 9


@pytest.fixture(scope="module")
def encoder() -> Any:
    return mmattn.OpenCLIPEncoder("local-dir:assets/clip")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "adapter"


@pytest.fixture(scope="module")
def pipe(adapter: Path) -> Any:
    return captioning_pipe(adapter)


@torch.no_grad()
def by_hand(pipe: Any, encoder: Any, image: Any) -> str:
    ids = torch.tensor([[pipe.tokenizer.bos_token_id, *pipe.tokenizer("A photo of")["input_ids"]]])
    end = pipe.tokenizer.eos_token_id
    out = pipe.model.generate(
        ids, memory=encoder([image]), max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=end
    )
    return str(pipe.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def test_captions_are_those_of_the_single_steps(pipe: Any, encoder: Any) -> None:
    want = [by_hand(pipe, encoder, flower) for flower in FLOWERS]
    assert len(set(want)) > 1, "the pictures must matter"
    assert pipe(FLOWERS) == want and pipe(FLOWERS, batch_size=2) == want
    assert [pipe(flower) for flower in FLOWERS] == want
    assert pipe(mmattn.load_image(FLOWERS[0])) == want[0] == pipe(Path(FLOWERS[0]).read_bytes())
    assert "".join(pipe.stream(FLOWERS[1])).strip() == want[1]
    assert pipe(FLOWERS[0], max_new_tokens=2) != want[0] and want[0].startswith(pipe(FLOWERS[0], max_new_tokens=2))
    trace = pipe.trace(FLOWERS[0])
    assert trace.title == want[0] and "".join(trace.words).strip() == want[0]


def ask_about(pipe: Any, prompt: str, **fields: object) -> Any:
    """Return the pipeline with another prompt."""
    return type(pipe)(
        pipe.config.model_copy(update={"prompt": prompt, **fields}), pipe.model, pipe.tokenizer, pipe.folder
    )


def test_a_question_about_a_picture(pipe: Any) -> None:
    """It stands in the template, whose special tokens are tokens; those in the question are plain text."""
    begin, end = pipe.tokenizer.bos_token, pipe.tokenizer.eos_token
    asked = ask_about(pipe, f"{begin}Question: {{question}}{end}Answer:")
    question = f"a red flower{end}?"
    literal = pipe.tokenizer(f"Question: {question}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    rest = pipe.tokenizer("Answer:", add_special_tokens=False)["input_ids"]
    ids = asked.make_prompt(f" {question} ")
    assert ids == [pipe.tokenizer.bos_token_id, *literal, pipe.tokenizer.eos_token_id, *rest]
    texts = ["a red flower", "what leaves"]
    one_by_one = [asked(flower, text) for flower, text in zip(FLOWERS, texts, strict=False)]
    assert asked(FLOWERS[:2], texts) == one_by_one
    assert asked(FLOWERS[:2], texts[0]) == [one_by_one[0], asked(FLOWERS[1], texts[0])]
    assert (
        "".join(asked.stream(FLOWERS[0], texts[0])).strip() == one_by_one[0] == asked.trace(FLOWERS[0], texts[0]).title
    )
    with pytest.raises(TextError, match='none was asked: give text="…"'):
        asked(FLOWERS[0])
    with pytest.raises(TextError, match="2 images have 1 texts"):
        asked(FLOWERS[:2], texts[:1])


def test_the_last_token_of_a_prompt_alone_sees_the_picture(pipe: Any, encoder: Any) -> None:
    """Invariant 220: in a batch, one by one, streamed, traced."""
    prompt, end = "What leaves and which flowers has this picture of a garden", pipe.tokenizer.eos_token_id
    asked = ask_about(pipe, prompt, visible_from="last_token")
    ids = torch.tensor([[pipe.tokenizer.bos_token_id, *pipe.tokenizer(prompt)["input_ids"]]])
    arrived = torch.tensor([[0] * (ids.shape[1] - 1) + [encoder.length]])
    want = []
    for flower in FLOWERS:
        given = {"memory": encoder([flower]), "arrived": arrived, "max_new_tokens": NEW, "pad_token_id": end}
        out = pipe.model.generate(ids, do_sample=False, eos_token_id=end, **given)
        want.append(str(pipe.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip())
    assert want != ask_about(pipe, prompt)(FLOWERS), "which tokens see the picture must matter"
    assert [asked(flower) for flower in FLOWERS] == want == asked(FLOWERS)
    assert ["".join(asked.stream(flower)).strip() for flower in FLOWERS] == want
    assert [asked.trace(flower).title for flower in FLOWERS] == want
    assert asked(FLOWERS, [" a", "", " a"])[1] == want[1]


@pytest.mark.parametrize("text", [None, 5, [None], [b"a"], ["a", float("nan")]], ids=repr)
@pytest.mark.parametrize("template", ["{question}", "A photo of"])
def test_what_is_no_text(pipe: Any, template: str, text: Any) -> None:
    """Invariant 167: in a call, a stream, a trace."""
    asked = ask_about(pipe, f"{pipe.tokenizer.bos_token}{template}")
    pictures = FLOWERS[: len(text)] if isinstance(text, list) else FLOWERS[:1]
    with pytest.raises(TextError, match="must be (a string|strings)"):
        asked(pictures, text)
    for call_ in (asked.stream, asked.trace, asked.inputs):
        with pytest.raises(TextError, match="must be a string"):
            list(call_(FLOWERS[0], text))


def test_the_start_of_a_caption(pipe: Any) -> None:
    assert pipe(FLOWERS[0], " a red") == ask_about(pipe, f"{pipe.config.prompt} a red")(FLOWERS[0])


def test_an_instruction_to_an_adapter_that_captions_is_refused() -> None:
    """The shipped adapter ends its caption at once after it; an empty answer would tell nothing."""
    pipe, picture = mmattn.pipeline("assets/vision/adapter", device="cpu"), "assets/flora/snowdrop.png"
    for ask in (pipe, lambda *inputs: list(pipe.stream(*inputs))):
        with pytest.raises(TextError, match="adds nothing to 'Describe the picture.': it captions pictures"):
            ask(picture, "Describe the picture.")
    assert pipe(picture, "This flower")


def test_a_trace_ends_before_the_end_token() -> None:
    pipe = mmattn.pipeline("assets/vision/adapter")
    trace = pipe.trace("assets/flora/snowdrop.png")
    assert "".join(trace.words).strip() == trace.title == pipe("assets/flora/snowdrop.png")


def test_a_trace_by_an_encoder_with_pixels_of_its_own(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """How its pixels become a picture again is not known."""
    want, processor = pipe.trace(FLOWERS[0]), pipe.encoder.image_processor
    monkeypatch.setattr(pipe.encoder, "image_processor", lambda images, **options: processor(images, **options))
    trace = pipe.trace(FLOWERS[0])
    assert (trace.title, trace.words, trace.picture) == (want.title, want.words, None) and want.picture is not None


def test_an_index_is_refused(pipe: Any) -> None:
    with pytest.raises(ConfigError, match="ImageToTextPipeline reads no index: leave index= out"):
        type(pipe)(pipe.config, pipe.model, pipe.tokenizer, pipe.folder, index="an index")


def test_the_command_line(pipe: Any, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "pictures" / "one.png"
    copy.parent.mkdir()
    copy.write_bytes(Path(FLOWERS[1]).read_bytes())
    code, out, err = call(capsys, "caption", FLOWERS[0], copy.parent, "--adapter", adapter)
    assert code == 0 and "Loading weights" not in err, err
    assert out.splitlines() == [f"{FLOWERS[0]}: {pipe(FLOWERS[0])}", f"{copy}: {pipe(FLOWERS[1])}"]
    code, out, _ = call(capsys, "caption", FLOWERS[0], "--text", " a red", "--adapter", adapter)
    assert (code, out.strip()) == (0, f"{FLOWERS[0]}: {pipe(FLOWERS[0], ' a red')}".strip())
    code, _, err = call(capsys, "caption", "nowhere.png", "--adapter", adapter)
    assert code == 2 and "there is no file 'nowhere.png'" in err
    code, _, err = call(capsys, "caption", FLOWERS[0], "--adapter", Path("assets/rag/adapter"))
    assert code == 2 and "is for question-answering" in err
    code, _, err = call(capsys, "ask", "a?", "--index", tmp_path, "--adapter", adapter)
    assert code == 2 and "does not: leave it out" in err


def test_the_adapter_that_is_shipped_names_what_it_sees() -> None:
    """Seven of the eight shipped pictures, and none from the picture of another."""
    lines = Path("assets/flora/metadata.jsonl").read_text(encoding="utf-8").splitlines()
    known = [json.loads(line) for line in lines]
    pipe = mmattn.pipeline("assets/vision/adapter", device="cpu")
    texts = pipe([f"assets/flora/{one['file_name']}" for one in known])
    assert sum(one["species"] in text for one, text in zip(known, texts, strict=True)) == 7
    assert not any(one["species"] in text for one, text in zip(known, texts[1:] + texts[:1], strict=True))
