"""Rules against their definitions in words, how they combine and draw, and the named converters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from mmattn import masks
from mmattn.core.masks import Mask
from mmattn.errors import ConfigError, MaskError, ShapeError


def rule(l: int, m: int, sees: Callable[[int, int], bool]) -> Tensor:
    """A (l, m) mask written out entry by entry."""
    return torch.tensor([[sees(i, j) for j in range(m)] for i in range(l)], dtype=torch.bool).reshape(l, m)


class TestRules:
    @pytest.mark.parametrize("m", [None, 3, 11])
    @pytest.mark.parametrize("offset", [-1, 0, 2])
    def test_causal(self, m: int | None, offset: int) -> None:
        mask = masks.causal(7, m, offset)
        slots = 7 + max(offset, 0) if m is None else m
        assert torch.equal(mask.tensor, rule(7, slots, lambda i, j: j <= i + offset))

    @pytest.mark.parametrize("size", [1, 3, 13])
    @pytest.mark.parametrize("offset", [0, 2])
    def test_window(self, size: int, offset: int) -> None:
        mask = masks.window(7, 11, size, offset)
        assert torch.equal(mask.tensor, rule(7, 11, lambda i, j: i + offset - size < j <= i + offset))

    @pytest.mark.parametrize("lengths", [[0, 5, 3], torch.tensor([0, 5, 3], dtype=torch.uint8)])
    def test_padding(self, lengths: list[int] | Tensor) -> None:
        mask = masks.padding(lengths, 5)
        assert mask.shape == (3, 1, 1, 5)
        assert mask.tensor[:, 0, 0].int().tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]

    def test_chunk_follows_the_shift_of_the_paper(self) -> None:
        size, r, chunks, l = 5, 3, 4, 23

        def sees(i: int, j: int) -> bool:
            c = j // r
            last_of_c, second_to_last_of_next = (c + 1) * size - 1, (c + 2) * size - 2
            return last_of_c <= i <= second_to_last_of_next

        mask = masks.chunk(l, size, r, chunks)
        assert torch.equal(mask.tensor, rule(l, chunks * r, sees))
        assert not mask.tensor[: size - 1].any()
        assert torch.equal(masks.chunk(l, size, r).tensor, mask.tensor)

    def test_block(self) -> None:
        documents, slots = torch.tensor([[0, 0, 1], [4, -1, 2]]), torch.tensor([[0, 1, 1, 0, 3], [2, -1, 4, 4, 2]])
        mask = masks.block(documents, slots)
        assert mask.shape == (2, 1, 3, 5)
        assert mask.tensor[:, 0].int().tolist() == [
            [[1, 0, 0, 1, 0], [1, 0, 0, 1, 0], [0, 1, 1, 0, 0]],
            [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]],
        ]

    @pytest.mark.parametrize("visible", masks.VISIBLE_SEGMENTS)
    def test_media(self, visible: str) -> None:
        images = torch.tensor([[0, 0, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1]])
        segments = torch.tensor([[0, 0, 1, 1, -1], [0, -1, -1, 1, 0]])
        mask = masks.media(images, segments, visible_segments=visible)
        assert mask.shape == (2, 1, 7, 5)
        for row in range(2):

            def sees(i: int, j: int, row: int = row) -> bool:
                begun, image = int(images[row, i]), int(segments[row, j])
                rules = {"latest": image == begun - 1, "previous": image < begun, "all": True}
                return image >= 0 and rules[visible]

            assert torch.equal(mask.tensor[row, 0], rule(7, 5, sees))


class TestMask:
    def test_rows_and_queries_combine_across_shapes(self) -> None:
        joined = masks.padding([5, 2], 5) & masks.causal(3, 5)
        assert joined.shape == (2, 1, 3, 5)
        assert joined.tensor[1, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]

    @given(st.integers(0, 2**31 - 1), st.sampled_from([(3, 5), (2, 3, 5), (2, 7, 3, 5), (2, 1, 1, 5), (1, 7, 3, 1)]))
    def test_operators_are_the_boolean_ones(self, seed: int, shape: tuple[int, ...]) -> None:
        maker = torch.Generator().manual_seed(seed)
        left = torch.rand(2, 7, 3, 5, generator=maker) < 0.5
        right = Mask(torch.rand(shape, generator=maker) < 0.5)
        assert torch.equal((Mask(left) & right).tensor, left & right.tensor)
        assert torch.equal((Mask(left) | right).tensor, left | right.tensor)
        assert torch.equal((~right).tensor, ~right.tensor)
        assert torch.equal((~(Mask(left) & right)).tensor, (~Mask(left) | ~right).tensor)

    def test_a_bool_tensor_joins_from_either_side(self) -> None:
        keep = torch.rand(3, 3) < 0.5
        assert torch.equal((masks.causal(3) & keep).tensor, (keep & masks.causal(3)).tensor)
        assert torch.equal((masks.causal(3) | keep).tensor, (keep | masks.causal(3)).tensor)
        assert torch.equal((masks.causal(3) & keep).tensor, masks.causal(3).tensor & keep)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
    @pytest.mark.parametrize("make", [Mask, masks.padding_mask])
    def test_only_bool_is_a_mask(self, make: Callable[[Tensor], Mask], dtype: torch.dtype) -> None:
        with pytest.raises(MaskError, match="must be bool, True = attend; got .*from_huggingface"):
            make(torch.ones(3, 5, dtype=dtype))
        with pytest.raises(MaskError, match="bool"):
            masks.causal(3, 5) & torch.ones(3, 5, dtype=dtype)

    @pytest.mark.parametrize("shape", [(), (5,), (1, 2, 3, 5, 7)])
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError, match=r"\(l, m\), \(b, l, m\) or \(b, h, l, m\), got .*padding_mask"):
            Mask(torch.ones(shape, dtype=torch.bool))

    @pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
    def test_a_padding_mask_has_two_dimensions(self, shape: tuple[int]) -> None:
        with pytest.raises(ShapeError, match="must be"):
            masks.padding_mask(torch.ones(shape, dtype=torch.bool))

    @pytest.mark.parametrize("operator", ["__and__", "__or__"])
    def test_sizes_that_do_not_meet_name_both(self, operator: str) -> None:
        with pytest.raises(ShapeError, match=r"\(3, 5\) . \(3, 7\)"):
            getattr(masks.causal(3, 5), operator)(masks.causal(3, 7))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: masks.causal(3.0), ConfigError, "l must be an int"),
        (lambda: masks.causal(True), ConfigError, "l must be an int"),
        (lambda: masks.causal(-1), ConfigError, "l must be at least 0"),
        (lambda: masks.causal(3, -5), ConfigError, "m must be at least 0"),
        (lambda: masks.causal(3, 5, 1.5), ConfigError, "offset must be an int"),
        (lambda: masks.window(3, 5, 0), ConfigError, "size must be at least 1"),
        (lambda: masks.chunk(3, 0, 5), ConfigError, "chunk_size must be at least 1"),
        (lambda: masks.chunk(3, 2, 0), ConfigError, "neighbour_length must be at least 1"),
        (lambda: masks.chunk(3, 2, 5, chunks=-1), ConfigError, "chunks must be at least 0"),
        (lambda: masks.padding([6], 5), ShapeError, r"lie in 0…5 .*got \[6\]"),
        (lambda: masks.padding([-1], 5), ShapeError, "lie in 0…5"),
        (lambda: masks.padding([[2]], 5), ShapeError, r"lengths must be \(b,\)"),
        (lambda: masks.padding([2.0], 5), ConfigError, "lengths must be ints, got float32"),
        (lambda: masks.padding([True], 5), ConfigError, "lengths must be ints, got bool"),
        (lambda: masks.block(torch.ones(2, 3), torch.ones(2, 5)), ConfigError, "query_ids must be ints"),
        (lambda: masks.block([[1]], torch.ones(1, 5)), ConfigError, "query_ids must be a tensor of ints, got list"),
        (
            lambda: masks.block(torch.ones(2, 3, dtype=torch.long), torch.ones(3, 5, dtype=torch.long)),
            ShapeError,
            r"query_ids must be \(b, l\) and memory_ids \(b, m\) with the same b, got \(2, 3\) and \(3, 5\)",
        ),
        (
            lambda: masks.media(torch.ones(2, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)),
            ShapeError,
            r"images must be \(b, l\) and segments",
        ),
        (
            lambda: masks.media(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 5, dtype=torch.long), "last"),
            ConfigError,
            "visible_segments must be one of 'all', 'previous', 'latest'; got 'last'",
        ),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Mask], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


class TestDraw:
    def test_batch_and_heads_are_labelled(self) -> None:
        mask = Mask(torch.tensor([[[[True, False]], [[False, True]]]] * 2))
        lines = mask.draw().splitlines()
        assert lines == [
            "2 rows, 2 heads, 1 query × 2 slots",
            "row 0, head 0",
            "█·",
            "row 0, head 1",
            "·█",
            "row 1, head 0",
            "█·",
            "row 1, head 1",
            "·█",
        ]


class TestConverters:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
    def test_huggingface(self, dtype: torch.dtype) -> None:
        keep = torch.rand(3, 5) < 0.5
        assert torch.equal(masks.from_huggingface(keep.to(dtype)), keep)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("drop", ["-inf", "min", "-1e4"])
    def test_additive(self, dtype: torch.dtype, drop: str) -> None:
        keep = torch.rand(3, 5) < 0.5
        value = torch.finfo(dtype).min if drop == "min" else float(drop)
        additive = torch.zeros(3, 5, dtype=dtype).masked_fill(~keep, value)
        converted = masks.from_additive(additive)
        assert converted.dtype == torch.bool
        assert torch.equal(converted, keep)

    @pytest.mark.parametrize(
        ("convert", "given", "words"),
        [
            (masks.from_huggingface, torch.tensor([[0.0, float("-inf")]]), "from_additive"),
            (masks.from_huggingface, torch.tensor([[0, 1, 2]]), "1 = keep and 0 = drop"),
            (masks.from_huggingface, torch.tensor([[1.0, float("nan")]]), "1 = keep and 0 = drop"),
            (masks.from_additive, torch.tensor([[0.0, 1.0]]), "from_huggingface"),
            (masks.from_additive, torch.tensor([[0.0, -0.5]]), "bias="),
            (masks.from_additive, torch.tensor([[0.0, float("nan")]]), "bias="),
            (masks.from_additive, torch.tensor([[0.0, float("inf")]]), "bias="),
            (masks.from_additive, torch.tensor([[0, 1]]), "got int64.*from_huggingface"),
            (masks.from_additive, torch.tensor([[False, True]]), "got bool.*from_key_padding"),
            (masks.from_key_padding, torch.tensor([[0, 1]]), "got int64.*from_huggingface"),
            (masks.from_key_padding, torch.tensor([[0.0, -1e9]]), "got float32.*from_additive"),
            (masks.from_huggingface, [[1, 0]], "takes a tensor, got list"),
            (masks.from_additive, None, "takes a tensor, got NoneType"),
            (masks.from_key_padding, [[True]], "takes a tensor, got list"),
        ],
    )
    def test_another_convention_is_refused_by_name(
        self, convert: Callable[[object], Tensor], given: object, words: str
    ) -> None:
        with pytest.raises(MaskError, match=words):
            convert(given)
