"""Pages of keys and values: the same numbers as in one piece, shared until written to, given back at the end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from mmattn.errors import ConfigError, ShapeError
from mmattn.seq2seq import EncoderDecoder, GrowingCache, PagePool

LAYERS, G, K, SIZE = 2, 3, 5, 4


def filled(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, G, length, K), torch.randn(rows, G, length, K)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 7)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 6), min_size=1, max_size=7)),
        st.tuples(st.just("fork"), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40)
@given(moves)
def test_any_life_of_a_cache_is_as_in_one_piece(done: list) -> None:
    pool = PagePool(LAYERS, G, K, page_size=SIZE)
    lives = [(GrowingCache(), pool.cache(rows=2), 2)]
    lives[0][0].append(0, *filled(2, 0)), lives[0][0].append(1, *filled(2, 0))
    for number, (move, what) in enumerate(done):
        at = number % len(lives)
        plain, paged, rows = lives[at]
        if move == "append":
            for layer in range(LAYERS):
                new = filled(rows, what)
                for mine, theirs in zip(paged.append(layer, *new), plain.append(layer, *new), strict=True):
                    assert torch.equal(mine, theirs)
        elif move == "reorder":
            picked = [row % rows for row in what]
            plain.reorder(picked), paged.reorder(picked)
            lives[at] = plain, paged, len(picked)
        else:
            length = min(what, paged.length)
            lives.append((plain.fork(length), paged.fork(length), rows))
        assert paged.length == plain.length
    for plain, paged, rows in lives:
        for layer in range(LAYERS):
            new = filled(rows, 1)
            assert torch.equal(paged.append(layer, *new)[0], plain.append(layer, *new)[0])
    assert pool.used <= sum(-(-paged.length // SIZE) * rows for _, paged, rows in lives)
    for _, paged, _ in lives:
        paged.free()
    assert pool.used == 0 and set(pool._holders) == {0}


def test_beams_share_what_they_have_in_common() -> None:
    pool = PagePool(LAYERS, G, K, page_size=SIZE)
    cache, plain = pool.cache(rows=1), GrowingCache()
    for one in (cache, plain):
        for layer in range(LAYERS):
            one.append(layer, *filled(1, 18))
        one.reorder([0] * 5)
    assert pool.used == 5 and plain.nbytes() == 5 * 18 * 2 * LAYERS * G * K * 4
    for layer in range(LAYERS):
        cache.append(layer, *filled(5, 1))
    assert pool.used == 4 + 5 == cache.nbytes() // pool.page_bytes, "four full pages shared, one each to write to"
    cache.reorder([3])
    assert pool.used == 5 and pool.peak == 9


def test_requests_with_a_common_prefix_read_it_once_and_write_what_they_would_alone() -> None:
    model = EncoderDecoder(53, 42, 3, LAYERS).double().eval()
    source, prefix = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, *range(20, 31)]])
    pool = model.make_pool(page_size=SIZE)
    begun = pool.cache(rows=1)
    with torch.no_grad():
        model.decode(prefix, model.prepare(model.encode(source)), cache=begun)
    assert pool.used == 3
    kept, requests = [], [torch.cat([prefix, torch.tensor([[id]])], 1) for id in (31, 37, 41)]
    for request in requests:
        kept.append(begun.fork())
        asked = {"start": 1, "end": 2, "max_length": 15, "prefix": request}
        assert model.generate(source, cache=kept[-1], **asked) == model.generate(source, cache=False, **asked)
    assert pool.used == 3 + len(requests), "twelve tokens once, and one page for each request"
    assert begun.length == 12
    del kept, begun
    assert pool.used == 0


def test_what_is_refused_changes_nothing() -> None:
    pool = PagePool(LAYERS, G, K, page_size=SIZE)
    cache = pool.cache(rows=2)
    cache.append(0, *filled(2, 3)), cache.append(1, *filled(2, 3))
    wrong = [
        (0, torch.randn(3, G, 1, K), "2 rows as now"),
        (0, torch.randn(2, G + 1, 1, K), "got"),
        (LAYERS, torch.randn(2, G, 1, K), "for layer 2"),
        (0, torch.randn(2, G, 1, K).double(), "make the pool as the model is"),
    ]
    for layer, keys, match in wrong:
        with pytest.raises(ShapeError, match=match):
            cache.append(layer, keys, keys)
    with pytest.raises(ConfigError, match="keep no gradients"):
        cache.append(0, torch.randn(2, G, 1, K, requires_grad=True), torch.randn(2, G, 1, K))
    with pytest.raises(ConfigError, match="length must be at most 3"):
        cache.fork(4)
    assert cache.length == 3 and pool.used == 2
    cache.free()
    with pytest.raises(ShapeError, match="0 rows as now"):
        cache.append(0, *filled(2, 1))


def test_pages_made_in_inference_mode_serve_outside_it() -> None:
    with torch.inference_mode():
        cache = PagePool(LAYERS, G, K, page_size=SIZE).cache(rows=1)
        cache.append(0, *filled(1, 3))
    keys, values = filled(1, 2)
    assert torch.equal(cache.append(0, keys, values)[0][:, :, 3:], keys)
