"""Invariant 85: texts are taken literally, what is no text is refused by name, cutting is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from mmattn.adapters.composed.augmenting_model import retokenize
from mmattn.errors import TextError
from mmattn.inspect.doctor.questions import make_answer
from mmattn.pipelines.generation import chat_ids, template_ids
from mmattn.tokenization import ClipTokenizer, check_text, tokenize
from tests import tiny, tiny_texts


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with begin, end, an image token, and a word added as no special token."""
    made = tiny_texts.tiny_tokenizer()
    made.pad_token = made.eos_token
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.add_tokens(["<sound>"])
    return made


@pytest.mark.parametrize("text", ["</s>", "a <image> b", "<s><s></s>", "the</s>woods", "<image>" * 7])
def test_special_tokens_in_a_text_stay_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Invariant 85."""
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids("<image>")}
    assert special & set(tokenizer(text, add_special_tokens=False)["input_ids"])
    (ids,), cut = tokenize(tokenizer, text)
    assert not special & set(ids)
    assert tokenizer.decode(ids) == text
    assert cut == [False]


def test_the_tokenizers_own_ends_stand_around_the_text_only(tokenizer: PreTrainedTokenizerFast) -> None:
    (ids,), _ = tokenize(tokenizer, "a </s> b", add_special_tokens=True)
    assert (ids[0], ids[-1]) == (0, 1)
    assert not {0, 1} & set(ids[1:-1])
    (short,), cut = tokenize(tokenizer, "a </s> b", 5, add_special_tokens=True)
    assert short == [0, *ids[1:4], 1]
    assert cut == [True]
    with pytest.raises(TextError, match="no room"):
        tokenize(tokenizer, "a", 1, add_special_tokens=True)


WAYS = ("texts", "a template", "a conversation", "a model that is asked", "two tokenizers")


def _ways(tokenizer: Any) -> dict[str, Callable[[], object]]:
    """What reads a text with a tokenizer that it was given."""
    lm = tiny.make("llama", vocab_size=len(tokenizer))
    ids = torch.tensor([tokenizer("the woods", add_special_tokens=False)["input_ids"]])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}</s>"
    return {
        "texts": lambda: tokenize(tokenizer, ["a </s> b", "the woods"], 5, add_special_tokens=True),
        "a template": lambda: template_ids(tokenizer, "<s>{question}</s>", {"{question}": "a </s> b"}),
        "a conversation": lambda: chat_ids(tokenizer, [{"role": "user", "content": "a </s> b"}]),
        "a model that is asked": lambda: make_answer(lm, tokenizer, 1, True)(["the woods"], [[]]),
        "two tokenizers": lambda: retokenize(ids, torch.ones_like(ids).bool(), tokenizer, tokenizer),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_tokenizer_keeps_its_settings(tokenizer: PreTrainedTokenizerFast, way: str) -> None:
    """Invariant 163: settings of a call of the user's stay as they are, for they are those of all threads."""
    tokenizer = copy.deepcopy(tokenizer)
    read = _ways(tokenizer)[way]
    before = read()
    options = {"padding": True, "padding_side": "left", "truncation": True, "max_length": 7}
    for split in (True, False):
        tokenizer(["a </s> b", "the woods in spring"], split_special_tokens=split, **options)
        backend = tokenizer.backend_tokenizer
        state = backend.padding, backend.truncation, backend.encode_special_tokens
        assert state[0] is not None and state[1] is not None and state[2] is split
        assert repr(read()) == repr(before)
        assert (backend.padding, backend.truncation, backend.encode_special_tokens) == state


def test_a_tokenizer_that_changes_is_read_anew(tokenizer: PreTrainedTokenizerFast) -> None:
    """Invariant 163: tokens, ends and normalizers that come later count."""
    tokenizer = copy.deepcopy(tokenizer)
    (before,), _ = tokenize(tokenizer, "the Woods <picture>", add_special_tokens=True)
    tokenizer.add_tokens(["<picture>"])
    (ids,), _ = tokenize(tokenizer, "the Woods <picture>", add_special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<picture>") in ids and len(ids) < len(before)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    (lower,), _ = tokenize(tokenizer, "the Woods <picture>", add_special_tokens=True)
    assert lower == tokenizer("the woods <picture>")["input_ids"] != ids
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert tokenize(tokenizer, "the Woods <picture>", add_special_tokens=True)[0] == [lower[1:-1]]


def test_a_reserved_word_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    sound = tokenizer.convert_tokens_to_ids("<sound>")
    with pytest.raises(TextError, match="text 1 spells the token '<sound>'.*add_special_tokens"):
        tokenize(tokenizer, ["a", "b <sound>"], reserved=[sound])


def test_cutting_is_reported(tokenizer: PreTrainedTokenizerFast) -> None:
    """Invariant 85."""
    rows, cut = tokenize(tokenizer, ["the woods", "x" * 11, "x" * 12, ""], 11)
    assert cut == [False, False, True, False]
    assert [len(row) for row in rows[1:]] == [11, 11, 0]


@pytest.mark.parametrize("text", ["", " ", "a\0b", "\0", "ünï 🌼 \U0001f9d1\u200d\U0001f33e", "\r\n\t"])
def test_odd_texts_come_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    (ids,), _ = tokenize(tokenizer, text)
    assert tokenizer.decode(ids) == text


def test_a_megabyte_without_spaces(tokenizer: PreTrainedTokenizerFast) -> None:
    (ids,), cut = tokenize(tokenizer, "bluebell" * 131_072, 17)
    assert len(ids) == 17
    assert cut == [True]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (None, "got NoneType"),
        (7, "got int"),
        (b"abc", "got bytes"),
        ({"a": 1}, "got dict"),
        (["a", None], "text 1 must be a string, got None"),
        (["a", float("nan")], "text 1 must be a string, got nan"),
        ([b"a"], "decode it first"),
        (["a", "b\ud83c"], r"text 1 has half a surrogate pair \('\\ud83c'\) at character 1"),
    ],
)
def test_what_is_no_text_is_named(tokenizer: PreTrainedTokenizerFast, texts: Any, words: str) -> None:
    """Invariant 85."""
    with pytest.raises(TextError, match=words):
        check_text(texts)
    with pytest.raises(ValueError, match=words):
        tokenize(tokenizer, texts)


def test_nothing_gives_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenize(tokenizer, []) == ([], [])
    assert check_text(iter(["a", "b"])) == ["a", "b"]


def test_open_clips_hugging_face_tokenizer_is_literal_too(tokenizer: PreTrainedTokenizerFast, tmp_path: Any) -> None:
    from open_clip.tokenizer import HFTokenizer

    tokenizer.save_pretrained(tmp_path)
    literal = ClipTokenizer(HFTokenizer(str(tmp_path), context_length=17))
    ids = literal(["a </s> b", "the woods"])
    assert ids.shape == (2, 17)
    assert ids.dtype == torch.long
    inside = ids[0].tolist()
    assert inside[:1] == [0]
    end = inside.index(1)
    assert set(inside[end:]) == {1}
    assert tokenizer.decode(inside[1:end]) == "a </s> b"
    with pytest.warns(UserWarning, match=r"were cut: \[0\]"):
        literal(["x" * 40, "x"])
