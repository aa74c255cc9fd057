"""Collation of rows into padded batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import mmattn
from mmattn import training
from mmattn.errors import ConfigError, TextError
from tests.training import small_run
from tests.training.small_run import Letters


class TestCollator:
    def test_prompts_are_read_and_not_learned(self) -> None:
        rows = [{"text": "cd", "prompt": "ab", "memory": mmattn.Memory(torch.ones(1, 3, 5))}, {"text": "e"}]
        batch = training.RowCollator(Letters())(rows)
        assert batch["input_ids"].tolist() == [[1, 3, 4, 5, 6, 2], [1, 7, 2, 0, 0, 0]]
        assert batch["labels"].tolist() == [[-100, -100, -100, 5, 6, 2], [1, 7, 2, -100, -100, -100]]
        assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
        assert batch["memory"].lengths == [3, 0]
        assert "memory" not in training.RowCollator(Letters())(rows[1:])
        assert "memory" not in training.RowCollator(Letters(), text_only=True)(rows)

    def test_memories_are_not_dropped(self) -> None:
        rows = [{"text": "b"}, {"text": "a", "passages": ["c"]}]
        with pytest.raises(ConfigError, match="encode_dataset, or give text_only=True"):
            training.RowCollator(Letters())(rows)
        assert "memory" not in training.RowCollator(Letters(), text_only=True)(rows)

    def test_rows_of_a_dataset(self) -> None:
        """Their memories are tables of numbers; None and an empty table are none."""
        collator = training.RowCollator(Letters())
        rows = [
            {"text": "cd", "prompt": "ab", "memory": [[1.0] * 5] * 3},
            {"text": "e", "memory": torch.ones(2, 5), "segments": [0, 1], "scores": None, "sources": ["a", "b"]},
            {"text": "e", "memory": None},
            {"text": "f", "memory": []},
        ]
        batch = collator(rows)
        assert batch["input_ids"].tolist()[1] == [1, 7, 2, 0, 0, 0] and batch["memory"].lengths == [3, 2, 0, 0]
        assert batch["memory"].tokens[:2].sum() == 5 * 5 and batch["memory"].segments[1, :2].tolist() == [0, 1]
        cases: list[tuple[dict[str, Any], str]] = [
            ({"text": "a", "memory": [[1.0], [1.0, 2.0]]}, r"must be vectors \(m, e\)"),
            ({"text": "a", "memory": torch.ones(2, 3, 5)}, r"\(2, 3, 5\)"),
            ({"txt": "a"}, "unknown column 'txt'"),
        ]
        for row, values in cases:
            with pytest.raises(ConfigError, match=values):
                collator([row])

    def test_too_long(self) -> None:
        rows = [training.Row("ab"), training.Row("abcdef", prompt="a")]
        with pytest.raises(TextError, match="row 1 has 9 tokens .* at most 7 fit"):
            training.RowCollator(Letters(), max_length=7).check(rows)
        made = training.RowCollator(Letters(), max_length=7, truncation=True)(rows)["input_ids"]
        assert made[1].tolist() == [1, 3, 3, 4, 5, 6, 2]
        with pytest.raises(TextError, match="row 0 has 11 tokens"):
            training.RowCollator(Letters(), max_length=7, truncation=True).check([training.Row("a", prompt="abcdefgh")])


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.slow
def test_workers_of_a_data_loader(start: str) -> None:
    """Invariant 78: the same batches, memories included, as without workers."""
    rows = small_run.rows(7)
    given = {"batch_size": 3, "collate_fn": small_run.collator()}
    alone = list(DataLoader(rows, **given))
    beside = list(DataLoader(rows, **given, num_workers=1, multiprocessing_context=start))
    assert len(beside) == len(alone) == 3
    for want, got in zip(alone, beside, strict=True):
        assert set(got) == set(want)
        memories = [batch.pop("memory", None) for batch in (want, got)]
        assert all(torch.equal(got[name], value) for name, value in want.items())
        if memories[0] is not None:
            assert all(torch.equal(a, b) for a, b in zip(*(m.tensors() for m in memories), strict=True))
