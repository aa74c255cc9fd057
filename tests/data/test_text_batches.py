"""Pairs of text and memory: batches, order, augmentation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmattn import Index, Memory, training
from mmattn.data.text_batches import check_prompt
from mmattn.errors import ConfigError, ShapeError, TextError
from tests.training.small_run import Letters


class TestEncodeTexts:
    def test_between_begin_and_end(self) -> None:
        assert training.encode_texts(Letters(), ["ab", "c"]) == [[1, 3, 4, 2], [1, 5, 2]]

    def test_neither(self) -> None:
        tokenizer = Letters()
        tokenizer.bos_token_id = None
        assert training.encode_texts(tokenizer, ["ab"]) == [[2, 3, 4, 2]]
        tokenizer.eos_token_id = None
        with pytest.raises(TextError, match="set tokenizer.eos_token"):
            training.encode_texts(tokenizer, ["a"])

    def test_empty_or_too_long(self) -> None:
        with pytest.raises(TextError, match="text 1 is empty"):
            training.encode_texts(Letters(), ["a", ""])
        assert len(training.encode_texts(Letters(), ["abcde"], 7)[0]) == 7
        with pytest.raises(TextError, match="text 0 has 8 tokens .* at most 7 fit"):
            training.encode_texts(Letters(), ["abcdef"], 7)


class TestCollate:
    def test_padding_is_ignored(self) -> None:
        batch = training.collate([[5, 6, 7], [8]], pad=3)
        assert batch.input_ids.tolist() == [[5, 6, 7], [8, 3, 3]]
        assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch.labels.tolist() == [[5, 6, 7], [8, -100, -100]]
        assert "memory" not in batch.kwargs()

    def test_memory_goes_with_the_rows(self) -> None:
        memory = Memory(torch.randn(2, 3, 5))
        assert training.collate([[5], [8]], memory).kwargs()["memory"] is memory
        for batch in (training.collate([[5], [8]], memory.tokens), training.pack([[5], [8]], memory.tokens)):
            assert torch.equal(batch.kwargs()["memory"].tokens, memory.tokens)
        with pytest.raises(ShapeError, match="3 texts need 3 rows of memory, got 2"):
            training.collate([[5], [8], [9]], memory)

    def test_an_index_that_attention_searches(self) -> None:
        index = Index.build(torch.randn(7, 5))
        batch = training.collate([[5], [8]], index.as_memory(3)).to("cpu")
        assert batch.kwargs()["memory"].store is index.store
        with pytest.raises(ShapeError, match="2 texts need 2 rows of memory, got 3"):
            training.collate([[5], [8]], index.as_memory(3, queries=torch.randn(3, 5)))

    @pytest.mark.parametrize("rows", [[], [[5], []]])
    def test_nothing_to_read(self, rows: list[list[int]]) -> None:
        with pytest.raises(ShapeError, match="leave empty texts out"):
            training.collate(rows)


class TestPairOrder:
    CHOICES = ([0, 1], [2], [3, 4, 5], [6], [7, 8], [9, 10], [11])

    def test_every_item_once_an_epoch(self) -> None:
        order = training.PairSampler(self.CHOICES, batch_size=3, seed=5)
        pairs = [pair for step in range(7) for pair in order.pairs(step)]
        for epoch in range(3):
            items = [item for item, _ in pairs[7 * epoch : 7 * epoch + 7]]
            assert sorted(items) == list(range(7))
        assert all(text in self.CHOICES[item] for item, text in pairs)
        assert pairs[:7] != pairs[7:14]

    def test_any_step_without_those_before(self) -> None:
        whole = training.PairSampler(self.CHOICES, batch_size=3, seed=5)
        steps = [whole.pairs(step) for step in range(11)]
        assert [training.PairSampler(self.CHOICES, batch_size=3, seed=5).pairs(step) for step in (10, 2, 7)] == [
            steps[10],
            steps[2],
            steps[7],
        ]


class TestAugmentMemory:
    def test_some_slots_stay(self) -> None:
        """Half of the real slots of each row, others in each."""
        memory = Memory.pad([torch.randn(m, 5) for m in (4, 10, 1)])
        kept = training.augment_memory(memory, keep_fraction=0.5, seed=3)
        assert kept.mask.sum(1).tolist() == [2, 5, 1] and not (kept.mask & ~memory.mask).any()
        assert torch.equal(kept.tokens, memory.tokens)

    @pytest.mark.parametrize("keep", [0.0, 1.5])
    def test_a_share(self, keep: float) -> None:
        with pytest.raises(ConfigError, match="keep_fraction"):
            training.augment_memory(Memory(torch.randn(2, 7, 5)), keep_fraction=keep)


@pytest.mark.parametrize(
    ("ids", "mask", "new", "said"),
    [
        (torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0), 0, "empty"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]), 0, r"rows \[1\]"),
        (torch.full((2, 3), 101), torch.ones(2, 3), 0, "knows 0 to 100"),
        (torch.full((2, 3), -1), torch.ones(2, 3), 0, "from -1"),
        (torch.ones(2, 13, dtype=torch.long), torch.ones(2, 13), 5, "17 positions"),
    ],
)
def test_prompts_a_model_cannot_read_are_refused(ids: torch.Tensor, mask: torch.Tensor, new: int, said: str) -> None:
    """Invariant 59."""
    config = SimpleNamespace(vocab_size=101, max_position_embeddings=17)
    check_prompt(torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12), config, 5)
    with pytest.raises(TextError, match=said):
        check_prompt(ids, mask, config, new)
