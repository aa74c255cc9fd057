"""The retrieval recipe: documents in chunks with their neighbours, and questions about them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmattn
from mmattn import inspect
from tests.recipes.runs import TOPICS

RECIPE = "rag"


@pytest.fixture
def passages(recipe: SimpleNamespace, lm: Path) -> Any:
    """Three short documents in chunks of five tokens, encoded."""
    host, tokenizer = recipe.answering.load_lm(str(lm))
    passages = recipe.documents.Passages.of(list(TOPICS.values()), tokenizer, 5)
    passages.encode(mmattn.TextEncoder(), False)
    passages.read(host, 2)
    return passages


def test_neighbours_are_of_other_documents(recipe: SimpleNamespace, passages: Any) -> None:
    nearest = recipe.documents.neighbours(passages, passages, 3, same=True)
    assert len(nearest) == len(passages) > 12
    for row, line in enumerate(nearest):
        assert len(line) == 3 and all(passages.document[other] != passages.document[row] for other in line)
    itself = recipe.documents.neighbours(passages, passages, 1, same=False)
    assert sum(line == [row] for row, line in enumerate(itself)) > 0.9 * len(itself), "leakage where it is allowed"


def test_windows_keep_to_their_document_and_chunks_to_their_neighbours(recipe: SimpleNamespace, passages: Any) -> None:
    nearest = recipe.documents.neighbours(passages, passages, 2, same=True)
    made = recipe.documents.windows(passages, nearest, 3)
    assert [token for window in made for token in window.ids] == [token for one in passages.chunks for token in one]
    memory = recipe.documents.memory_of(made[:2], passages, "both", list)
    first = [passages.slots(row, "both") for row in made[0].neighbours[1]]
    assert torch.equal(memory.tokens[0][memory.segments[0] == 1][: sum(map(len, first))], torch.cat(first))
    assert len(passages.slots(len(passages) - 1, "continuations")) == 0
    both, size = passages.slots(0, "both"), len(passages.chunks[0])
    assert torch.equal(both, torch.cat([passages.slots(0, "neighbours"), passages.slots(0, "continuations")]))
    assert len(both) == size + len(passages.chunks[1]) and len(passages.slots(0, "neighbours")) == size


def test_slots_are_what_came_before_a_token_and_the_token(recipe: SimpleNamespace, lm: Path) -> None:
    host, _ = recipe.answering.load_lm(str(lm))
    texts = [[7, 11, 13, 17, 19], [23], [7, 11, 29]]
    slots = recipe.documents.read_passages(host, texts, 2, batch_size=2)
    width = host.config.hidden_size
    assert [one.shape for one in slots] == [(len(text), 2 * width) for text in texts]
    for one, text in zip(slots, texts, strict=True):
        states = host(torch.tensor([text]), output_hidden_states=True).hidden_states[2][0]
        scaled = torch.nn.functional.rms_norm(states, (width,))
        assert not one[0, :width].any() and torch.isfinite(one).all()
        torch.testing.assert_close(one[1:, :width], scaled[:-1])
        torch.testing.assert_close(
            one[:, width:],
            torch.nn.functional.rms_norm(host.get_input_embeddings().weight[torch.tensor(text)], (width,)),
        )
    torch.testing.assert_close(slots[0][:2], slots[2][:2])


@torch.no_grad()
def test_an_adapter_that_begins_as_a_lookup_says_the_word_that_followed(recipe: SimpleNamespace, lm: Path) -> None:
    host, _ = recipe.answering.load_lm(str(lm))
    width = host.config.hidden_size
    text = list(range(50, 71))
    read = recipe.documents.read_passages(host, [text], 2)[0]
    ids = torch.tensor([[*text[:7], *text[:7]]])
    memory = mmattn.Memory(read[None], segments=torch.zeros(1, len(text), dtype=torch.long))
    right = {}
    for lookup in (True, False):
        torch.manual_seed(0)
        model = mmattn.attach(
            host, mmattn.ChunkedAdapter(2 * width, layers=[1], chunk_size=7, num_heads=8, head_dim=64)
        )
        if lookup:
            recipe.train_docs.begin_as_lookup(model.adapters["default"], 60.0)
        assert torch.equal(model(ids, memory=memory).logits, host(ids).logits), "it adds nothing yet"
        with inspect.record(model) as weights:
            model(ids, memory=memory)
        # Of tokens 6 to 12, which see the chunk's memory, those from 7 on are the first ones again: after them the
        # text goes on with slots 1 to 6.
        rows = weights.mean()[0][0][1:7]
        right[lookup] = sum(int(row.argmax()) == slot for slot, row in enumerate(rows, start=1))
        model.unload()
    assert right[True] >= 4 and right[False] <= 1, right


def test_choices_of_neighbours(recipe: SimpleNamespace, passages: Any) -> None:
    some = recipe.documents.sample_of(2, Random(0))
    drawn = [some([3, 5, 7, 11]) for _ in range(30)]
    assert {row for two in drawn for row in two} == {3, 5, 7, 11} and all(len(set(two)) == 2 for two in drawn)
    assert some([3]) == [3]
    control = recipe.documents.random_passages(2, passages, Random(0))
    drawn = [control([3, 5, 7]) for _ in range(30)]
    assert all(len(two) == 2 for two in drawn) and len({row for two in drawn for row in two}) > 5
    assert control([]) == []


def test_a_text_without_letters_is_searched_as_a_full_stop(recipe: SimpleNamespace) -> None:
    texts = [recipe.documents.searchable(text) for text in ("", " \n\t", "\ufffd", "\x00\ufffd ", "a\ufffd", ".")]
    assert texts == [".", ".", ".", ".", "a\ufffd", "."]
    assert mmattn.TextEncoder().encode(texts).tokens.isfinite().all()


def test_every_paragraph_of_the_documents_stands_once(recipe: SimpleNamespace) -> None:
    train, held_out = recipe.documents.load_topics()
    texts = [*train.values(), *held_out.values()]
    parts = [recipe.documents.plain(part) for text in texts for part in recipe.documents.paragraphs(text)]
    assert len(parts) == len(set(parts)) > 1000 and not set(train) & set(held_out)
    assert len(held_out) == 12 and len(train) > 50
    whole, same = recipe.documents.load_topics(copies=True)
    assert same == held_out and all(len(text) <= len(whole[name]) for name, text in train.items())
    assert sum(map(len, train.values())) < 0.9 * sum(map(len, whole.values()))


@pytest.mark.slow
def test_the_share_of_copies(finished: Callable[[str], Path]) -> None:
    out = finished("rag documents")
    assert 0.1 < json.loads((out / "table.json").read_text())["copies"] < 0.3 and (out / "lora").is_dir()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the questions are about the documentation of Python 3.11")
def test_questions_about_topics_have_their_answers_in_the_folder(recipe: SimpleNamespace) -> None:
    """A hundred questions, none of which has its own answer, and each answer stands in the topic that is named."""
    topics = recipe.reading
    questions, texts = topics.load_questions(), topics.load_topics()
    assert len(questions) == len({one.text for one in questions}) == 100
    for one in questions:
        assert topics.is_right(one.answer, texts[one.topic]), one
        assert not topics.is_right(one.answer, one.text), one
    assert topics.is_right("8", "every\n 8 columns") and not topics.is_right("8", "128 columns")
    assert topics.is_right("(Pdb)", "It is (pdb).") and not topics.is_right("ss", "class")
