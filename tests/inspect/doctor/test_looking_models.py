"""`doctor` on a Llava-shaped model that learns to name colours and shapes here, and on a chain over facts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

import mmattn
from tests.inspect.doctor.test_looking import faults, run
from tests.inspect.doctor.tiny_readers import ANSWERS, NAMES, picture_rows

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}Answer:"
)
STEPS = 700


def make_processor() -> LlavaProcessor:
    """Pictures of 24 × 24 in nine patches, and a tokenizer of words."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "Which", "colour", "shape", ",", "?", "Answer", ":"]
    vocabulary = {word: number for number, word in enumerate([*words, *ANSWERS, *NAMES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    size = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    pictures = CLIPImageProcessor(**size, image_mean=[0.5] * 3, image_std=[0.5] * 3)  # alike for all channels
    return LlavaProcessor(
        pictures,
        fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


@cache
def trained() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A model of 0.2 M parameters after its training."""
    torch.manual_seed(0)
    processor = make_processor()
    tokenizer = processor.tokenizer
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=24,
            patch_size=8,
            projection_dim=48,
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=9,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    rows = picture_rows(3000, 17)
    chats = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}] for row in rows
    ]
    texts = [f"{processor.apply_chat_template(chat)} {row['text']} </s>" for chat, row in zip(chats, rows, strict=True)]
    inputs = processor(text=texts, images=[row["images"] for row in rows], padding=True, return_tensors="pt")
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100  # every text has as many tokens
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(rows), (37,))
        loss = model(**{name: one[batch] for name, one in inputs.items()}, labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), processor


def test_a_sound_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, processor = trained()
    rows = picture_rows(300, 5)
    report = mmattn.doctor(model, rows, processor=processor)
    print(report)
    assert report.ok and sum(report.figures["… by looking"]) > 40, report
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    for number, row in enumerate(rows):
        row["images"][0].save(tmp_path / f"{number}.png")
    lines = [json.dumps({**row, "images": None, "file_name": f"{n}.png"}) for n, row in enumerate(rows)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    code, out, err = run(capsys, "--model", tmp_path / "model", "--data", tmp_path)
    assert code == 0 and "\nok    looks" in out, out + err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pixels: pixels * 0, "does not arrive"),
        (lambda pixels: pixels.roll(1, 0), "rows or requests are mixed"),
        (lambda pixels: pixels.flip(1), "channels are read in another order"),
    ],
)
def test_faults(change: Any, words: str) -> None:
    model, processor = trained()
    tower = model.model.vision_tower

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (
            (tuple(map(change, args)), kwargs)
            if args
            else (args, kwargs | {"pixel_values": change(kwargs["pixel_values"])})
        )

    hook = tower.register_forward_pre_hook(before, with_kwargs=True)
    try:
        report = mmattn.doctor(model, picture_rows(300, 5), processor=processor)
    finally:
        hook.remove()
    print(report)
    assert words in faults(report), report


def test_a_pipeline() -> None:
    from transformers import pipeline

    model, processor = trained()
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    assert mmattn.doctor(pipe, picture_rows(300, 5), max_questions=31).ok


def test_a_chain_over_facts() -> None:
    """MiniLM finds the fact, the shipped adapter answers from it; then the chain has the first passage only."""
    from mmattn.pipelines import build_index
    from recipes.rag.data import PROPERTIES, load_facts

    ask = mmattn.pipeline("assets/rag/adapter")
    rows = []
    for fact in load_facts()[1]:
        title, question = (text.format(key=fact.key) for text in PROPERTIES[fact.property][:2])
        rows.append({"prompt": question, "passages": [f"{title}: {fact.value}"], "text": fact.value})

    def chain(question: str, evidence: list[str]) -> str:
        pairs = [text.split(": ", 1) for text in evidence if ": " in text] or [["nothing", "nothing"]]
        facts = [{"title": title, "value": value} for title, value in pairs]
        return ask(question, index=build_index(facts, ask.config, ask.encoder)).text

    report = mmattn.doctor(chain, rows, max_questions=31)
    print(report)
    assert report.ok and sum(report.figures["… by looking"]) > 24, report
    report = mmattn.doctor(lambda question, evidence: chain(question, evidence[:1]), rows, max_questions=31)
    print(report)
    assert "what stands last is not read" in faults(report), report
