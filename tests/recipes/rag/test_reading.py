"""The retrieval recipe: a language model that reads the texts itself, without an adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmattn.encoders import NameEncoder
from tests.models.test_pretrained import need


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the questions are about the documentation of Python 3.11")
def test_questions_about_topics_have_their_answers_in_the_folder(load_files: Callable[..., SimpleNamespace]) -> None:
    """A hundred questions, none of which has its own answer, and each answer stands in the topic that is named."""
    topics = load_files("rag", "reading").reading
    questions, texts = topics.load_questions(), topics.load_topics()
    assert len(questions) == len({one.text for one in questions}) == 100
    for one in questions:
        assert topics.is_right(one.answer, texts[one.topic]), one
        assert not topics.is_right(one.answer, one.text), one
    assert topics.is_right("8", "every\n 8 columns") and not topics.is_right("8", "128 columns")
    assert topics.is_right("(Pdb)", "It is (pdb).") and not topics.is_right("ss", "class")


@pytest.mark.slow
def test_smollm2_reads_facts_itself(recipe: SimpleNamespace, tmp_path: Path) -> None:
    """One fact in the prompt is the same fact read beforehand, and answers; without it nothing does."""
    need("smollm2")
    facts = [recipe.data.Fact("Zubrowka", "currency", "Krone", "fr")]
    entries = recipe.data.Entries.of(facts, 1, NameEncoder(), tmp_path)
    one = recipe.data.EntrySet([0], [0], [True])
    lm, tokenizer = recipe.answering.load_lm("smollm2")
    reader = recipe.reading.Reader(recipe.settings.Config(lm="smollm2", data={"in_prompt": 1}), lm, tokenizer)
    answers = [reader.answers(entries, one, way)[0] for way in ("prompt", "passages", "closed")]
    assert answers[:2] == ["Krone", "Krone"] != answers[1:]
