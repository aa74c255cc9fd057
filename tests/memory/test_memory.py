"""Memory: what is let in, and every verb that makes one memory of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmattn import Memory
from mmattn.errors import ConfigError, MaskError, NonFiniteError, ShapeError

B, M, E = 3, 5, 7
LENGTHS = [5, 2, 0]


def full(b: int = B, m: int = M, *, lengths: list[int] | None = LENGTHS, seed: int = 0) -> Memory:
    """A memory with everything a memory can hold."""
    generator = torch.Generator().manual_seed(seed)
    return Memory(
        torch.randn(b, m, E, generator=generator),
        None if lengths is None else torch.arange(m) < torch.tensor(lengths)[:, None],
        segments=torch.arange(m).expand(b, m) // 2,
        scores=torch.randn(b, m, generator=generator),
        sources=[[{"row": i, "slot": j} for j in range(m)] for i in range(b)],
    )


def same(left: Memory, right: Memory) -> None:
    """Every part equal, absent parts absent."""
    assert left.sources == right.sources
    for name in ("tokens", "mask", "segments", "scores"):
        mine, other = getattr(left, name), getattr(right, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype and torch.equal(mine, other), name


def test_sizes():
    memory = full()
    assert (memory.batch, memory.length, memory.dim, len(memory)) == (B, M, E, B)
    assert memory.lengths == LENGTHS
    assert full(lengths=None).lengths == [M] * B
    assert memory.dtype == torch.float32 and memory.device.type == "cpu"
    assert repr(memory) == "Memory(b=3, m=5, e=7, float32, lengths=[5, 2, 0], segments, scores, sources)"


TOKENS = torch.randn(B, M, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.uint8, torch.bfloat16])
def test_mask_of_another_dtype(dtype):
    """Invariant 1: a mask that is not bool is refused, naming what it is and how to convert it."""
    with pytest.raises(MaskError, match=f"bool, True = attend; got {str(dtype)[6:]}.*from_huggingface"):
        Memory(TOKENS, mask=torch.ones(B, M, dtype=dtype))


@pytest.mark.parametrize("shape", [(M,), (M, M), (B, 1), (B, M, 1), (M, B), (B, M + 1)])
def test_mask_of_another_shape(shape):
    """Invariant 2: only (b, m), and the message names both shapes."""
    with pytest.raises(ShapeError) as error:
        Memory(TOKENS, mask=torch.ones(shape, dtype=torch.bool))
    assert str((B, M)) in str(error.value) and str(shape) in str(error.value)


def test_other_bad_input():
    for make, error, words in (
        (lambda: Memory(TOKENS[0]), ShapeError, r"tokens\[None\]"),
        (lambda: Memory(TOKENS.tolist()), ShapeError, "list"),
        (lambda: Memory(torch.ones(B, M, E, dtype=torch.long)), ShapeError, "embed them"),
        (lambda: Memory(TOKENS, segments=torch.zeros(B, M)), MaskError, "integers"),
        (lambda: Memory(TOKENS, scores=torch.zeros(M, B)), ShapeError, r"scores must be \(b, m\) = \(3, 5\)"),
        (lambda: Memory(TOKENS, scores=torch.zeros(B, M, dtype=torch.long)), ShapeError, "scores must be floating"),
        (lambda: Memory(TOKENS, sources=[[0] * 5, [0] * 5, [0] * 4]), ShapeError, r"rows of \[5, 5, 4\]"),
    ):
        with pytest.raises(error, match=words):
            make()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite(value, dtype):
    """Invariant 22: NaN or infinity where one may look is refused by row; in masked slots, or on request, it is not."""
    tokens = TOKENS.to(dtype, copy=True)
    tokens[1, 3, 2] = value
    mask = torch.ones(B, M, dtype=torch.bool)
    with pytest.raises(NonFiniteError, match=r"non-finite values at row 1 \(slot 3\)"):
        Memory(tokens)
    with pytest.raises(ValueError, match="row 1"):
        Memory(tokens, mask)
    assert Memory(tokens, check_finite=False).batch == B
    mask[1, 3] = False
    assert Memory(tokens, mask).lengths == [5, 4, 5]


def test_infinities_that_cancel_and_sums_that_overflow():
    """Invariant 22: opposite infinities are found, large finite values are let in."""
    tokens = TOKENS.clone()
    tokens[2, 0, :2] = torch.tensor([float("inf"), -float("inf")])
    with pytest.raises(NonFiniteError, match="row 2"):
        Memory(tokens)
    assert Memory(torch.full((B, M, E), 3e38)).batch == B


def test_pad():
    """Ragged rows: values kept, the rest is padding, the mask says which is which."""
    rows = [torch.randn(n, E) for n in (2, 5, 0, 3)]
    memory = Memory.pad(rows)
    assert memory.lengths == [2, 5, 0, 3] and memory.length == 5
    for i, row in enumerate(rows):
        assert torch.equal(memory.tokens[i][memory.mask[i]], row)
    assert Memory.pad([TOKENS[0], TOKENS[1]]).mask is None, "nothing is padded, so nothing is masked"
    assert Memory.pad([torch.zeros(0, E)] * 2).tokens.shape == (2, 0, E)
    with pytest.raises(NonFiniteError, match="row 1"):
        Memory.pad([torch.zeros(3, E), torch.full((1, E), float("nan"))])


@pytest.mark.parametrize("rows", [[], [torch.ones(2, 3), torch.ones(2, 4)], [torch.ones(2, 3, 1)]])
def test_pad_refuses(rows):
    with pytest.raises(ShapeError, match="Memory.pad"):
        Memory.pad(rows)


def test_cat():
    """Slots one after the other; a memory without mask is all real, without segments one segment."""
    first, second = full(), Memory(torch.randn(B, 2, E))
    joined = Memory.cat([first, second])
    assert joined.length == M + 2 and joined.lengths == [n + 2 for n in LENGTHS]
    assert torch.equal(joined.tokens[:, :M], first.tokens) and torch.equal(joined.tokens[:, M:], second.tokens)
    assert joined.segments.tolist() == [[0, 0, 1, 1, 2, 3, 3]] * B
    assert torch.equal(joined.scores[:, :M], first.scores) and not joined.scores[:, M:].any()
    assert joined.sources[1] == [*first.sources[1], None, None]
    assert Memory.cat([second, second]).segments is None
    same(Memory.cat([first, first])[1], Memory.cat([first[1], first[1]]))


def test_cat_counts_segments_on_in_each_row():
    """Rows with different numbers of segments count on from their own; a slot of no segment stays one."""
    first = Memory(torch.randn(2, 3, E), segments=torch.tensor([[0, 1, 2], [0, -1, -1]]))
    second = Memory(torch.randn(2, 2, E), segments=torch.tensor([[0, -1], [-1, -1]]))
    third = Memory(torch.randn(2, 1, E), segments=torch.tensor([[0], [0]]))
    assert Memory.cat([first, second, third]).segments.tolist() == [[0, 1, 2, 3, -1, 4], [0, -1, -1, -1, -1, 1]]


def test_stack():
    """Rows under each other, the shorter ones padded."""
    first, second = full(2, 3, lengths=[3, 1], seed=1), full(1, 5, lengths=None, seed=2)
    stacked = Memory.stack([first, second])
    assert stacked.lengths == [3, 1, 5] and stacked.length == 5
    assert torch.equal(stacked.tokens[:2, :3], first.tokens) and torch.equal(stacked.tokens[2:], second.tokens)
    assert torch.equal(stacked.scores[:2, :3], first.scores) and torch.equal(stacked.segments[2:], second.segments)
    assert stacked.sources[0] == [*first.sources[0], None, None] and stacked.sources[2] == second.sources[0]
    assert Memory.stack([second, second]).mask is None


@pytest.mark.parametrize("verb", [Memory.cat, Memory.stack])
def test_joining_refuses(verb):
    with pytest.raises(ShapeError, match="at least one"):
        verb([])
    with pytest.raises(ShapeError, match=r"one width e, got \[7, 11\]"):
        verb([full(), Memory(torch.randn(B, M, 11))])
    with pytest.raises(ShapeError, match="Tensor"):
        verb([full(), TOKENS])


def test_expand_shares_one_row_without_a_copy():
    one = full()[0]
    shared = one.expand(11)
    assert shared.batch == 11 and len(shared.sources) == 11
    assert shared.tokens.data_ptr() == one.tokens.data_ptr() and shared.tokens.stride(0) == 0
    same(shared[7], one)
    assert one.expand(0).tokens.shape == (0, M, E)
    with pytest.raises(ShapeError, match="3 rows"):
        full().expand(6)


@pytest.mark.parametrize(
    "pick,rows",
    [
        (1, [1]),
        (-1, [2]),
        (slice(1, None), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([2, 0, 2], [2, 0, 2]),
        ([], []),
        (torch.tensor(1), [1]),
        (torch.tensor([0, -1]), [0, 2]),
        (torch.tensor([True, False, True]), [0, 2]),
    ],
)
def test_rows(pick, rows):
    """Rows by number, slice, list, index and mask; a number keeps the row dimension."""
    memory = full()
    picked = memory[pick]
    assert picked.batch == len(rows) and picked.sources == [memory.sources[i] for i in rows]
    for name in ("tokens", "mask", "segments", "scores"):
        assert torch.equal(getattr(picked, name), getattr(memory, name)[rows].reshape(getattr(picked, name).shape))


@pytest.mark.parametrize("pick", [3, -4, [3], torch.tensor([-4]), torch.tensor([True])], ids=str)
def test_rows_that_are_not_there(pick):
    with pytest.raises(IndexError):
        full()[pick]


def test_scores_that_are_not_finite_are_refused_where_they_may_be_read():
    """Invariant 186."""
    scores, mask = torch.zeros(B, M), torch.ones(B, M, dtype=torch.bool)
    scores[1, 2], mask[1, 2] = torch.nan, False
    assert Memory(TOKENS, mask, scores=scores).finite_checked
    with pytest.raises(NonFiniteError, match="non-finite scores at row 1 .slot 2"):
        Memory(TOKENS, scores=scores)


def test_a_memory_of_checked_and_unchecked_parts_is_unchecked():
    """Invariant 186."""
    checked, unchecked = Memory(TOKENS), Memory(TOKENS, check_finite=False)
    for join in (Memory.cat, Memory.stack):
        assert join([checked, checked]).finite_checked
        assert not join([checked, unchecked]).finite_checked and not join([unchecked, checked]).finite_checked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_another_dtype_is_that_of_tokens_and_scores(dtype):
    """Invariant 186: masks and segments keep theirs, and no value changes but by rounding."""
    memory = full()
    found = memory.to(dtype)
    assert found.tokens.dtype == found.scores.dtype == dtype
    assert found.mask.dtype == torch.bool and found.segments.dtype == memory.segments.dtype
    assert torch.equal(found.scores, memory.scores.to(dtype)) and torch.equal(found.tokens, memory.tokens.to(dtype))
    assert torch.equal(found.segments, memory.segments) and found.sources == memory.sources


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_save_and_load(tmp_path, dtype):
    """Bit for bit, with everything it holds, and with nothing more."""
    path = tmp_path / "memory.safetensors"
    memory = full().to(dtype)
    memory.save(path)
    same(Memory.load(path), memory)
    bare = Memory(TOKENS.to(dtype).expand(B, M, E)[:, ::2])
    bare.save(path)
    same(Memory.load(path), bare)
    assert [file.name for file in tmp_path.iterdir()] == ["memory.safetensors"]


def test_load_checks_values(tmp_path):
    path = tmp_path / "memory.safetensors"
    tokens = TOKENS.clone()
    tokens[2, 1, 0] = float("nan")
    Memory(tokens, check_finite=False).save(path)
    with pytest.raises(NonFiniteError, match="row 2"):
        Memory.load(path)
    assert Memory.load(path, check_finite=False).tokens.isnan().sum() == 1
    mask = torch.ones(B, M, dtype=torch.bool)
    mask[2, 1] = False
    Memory(tokens, mask).save(path)
    assert Memory.load(path).lengths == [5, 5, 4], "masked slots do not matter"


@pytest.mark.parametrize("source", [(1, 2), {1: 2}, float("nan"), b"x", Path("a"), {1}, torch.tensor(1)])
def test_sources_that_a_file_cannot_hold_are_refused(tmp_path: Path, source: object) -> None:
    memory = Memory(torch.randn(1, 2, 3), sources=[[source, None]])
    with pytest.raises(ConfigError, match="sources must be plain JSON"):
        memory.save(tmp_path / "memory")
    assert not list(tmp_path.iterdir())
