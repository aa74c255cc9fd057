"""kNN-LM against its definition, and the datastore that a host's hidden states make."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, NonFiniteError, ShapeError
from tests import tiny
from tests.tiny import assert_close

B, L, N, D, V = 3, 5, 61, 7, 11


def store(seed: int = 0, offset: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(N, D, generator=generator, dtype=torch.float64) + offset
    values = torch.randint(0, V - 1, (N,), generator=generator)  # one word nobody votes for
    queries = torch.randn(B, L, D, generator=generator, dtype=torch.float64) + offset
    return keys, values, queries, torch.randn(B, L, V, generator=generator, dtype=torch.float64)


def slow(keys, values, queries, logits, top_k, temperature, weight):
    """Equations 2 and 3 of the paper, one token and one key at a time."""
    out = torch.empty_like(logits)
    for row in range(B):
        for token in range(L):
            distances = [float(((queries[row, token] - key) ** 2).sum()) for key in keys]
            order = sorted(range(len(keys)), key=distances.__getitem__)[:top_k]
            votes = [0.0] * V
            for i in order:
                votes[int(values[i])] += float(torch.tensor(-distances[i] / temperature, dtype=torch.float64).exp())
            own = logits[row, token].exp() / logits[row, token].exp().sum()
            out[row, token] = weight * torch.tensor(votes).double() / sum(votes) + (1 - weight) * own
    return out.log()


@pytest.mark.parametrize("at_once", [1, 17 * B * L, 1 << 24], ids=["one key", "17 keys", "all keys"])
@pytest.mark.parametrize(("top_k", "temperature", "weight"), [(1, 1.0, 0.25), (13, 0.7, 0.5), (67, 3.0, 0.9)])
def test_the_slow_definition(top_k, temperature, weight, at_once, monkeypatch):
    monkeypatch.setattr("mmattn.retrieval.knn_lm._AT_ONCE", at_once)
    given = store()
    got = mmattn.retrieval.knn_log_probs(*given, top_k=top_k, temperature=temperature, weight=weight)
    assert_close(got, slow(*given, top_k, temperature, weight), 1e-6)
    assert_close(got.exp().sum(-1), torch.ones(B, L, dtype=torch.float64), 1e-12)
    keys, values, queries, logits = given
    narrow = mmattn.retrieval.knn_log_probs(
        keys.float(), values, queries.float(), logits.float(), top_k=top_k, temperature=temperature, weight=weight
    )
    assert narrow.dtype == torch.float32
    assert_close(narrow, got.float(), 1e-5)


def test_what_all_states_share_costs_no_digits():
    keys, values, queries, logits = store()
    want = mmattn.retrieval.knn_log_probs(keys, values, queries, logits, top_k=13, weight=0.9)
    shift = 128.0 * torch.arange(1, D + 1)
    got = mmattn.retrieval.knn_log_probs(
        (keys + shift).float(), values, (queries + shift).float(), logits.float(), top_k=13, weight=0.9
    )
    assert_close(got, want.float(), 1e-3)


def test_without_weight_or_keys_the_host_answers():
    keys, values, queries, logits = store()
    own = logits.log_softmax(-1)
    assert torch.equal(mmattn.retrieval.knn_log_probs(keys[:0], values[:0], queries, logits), own)
    assert_close(mmattn.retrieval.knn_log_probs(keys, values, queries, logits, weight=0.0), own, 1e-12)
    # Far from everything the nearest still vote, and nothing becomes NaN.
    far = mmattn.retrieval.knn_log_probs(keys, values, queries + 1e4, logits, weight=0.5)
    assert torch.isfinite(far).all()


def test_gradients_reach_the_logits():
    keys, values, queries, logits = store()
    logits.requires_grad_()
    mixed = mmattn.retrieval.knn_log_probs(keys, values, queries, logits, top_k=5, weight=0.3)
    upstream = torch.randn_like(mixed)
    (got,) = torch.autograd.grad(mixed, logits, upstream)
    near = (mixed.exp() - 0.7 * logits.log_softmax(-1).exp()).detach()
    assert (near == 0).sum() or (near.abs() < 1e-12).any(), "some word got no vote"
    (want,) = torch.autograd.grad((near + 0.7 * logits.log_softmax(-1).exp()).log(), logits, upstream)
    assert torch.isfinite(got).all()
    assert_close(got, want, 1e-10)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bloom", "mamba"])
@pytest.mark.parametrize("with_adapter", [False, True])
@torch.no_grad()
def test_the_datastore_of_a_host(family, with_adapter):
    host = tiny.attach(tiny.make(family)) if with_adapter else tiny.make(family)
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 7, 1)]
    ids, keep = tiny.left_padded(rows)
    more = tiny.text(2, 5, seed=1)
    keys, values = mmattn.retrieval.next_token_states(
        host, [{"input_ids": ids, "attention_mask": keep}, {"input_ids": more}]
    )
    assert keys.shape == (2 + 6 + 0 + 8, 32) and not keys.requires_grad
    assert values.tolist() == [token for row in [*rows, *more] for token in row[1:].tolist()]
    want = [host(row[None], output_hidden_states=True).hidden_states[-1][0, :-1] for row in [*rows, *more]]
    assert_close(keys, torch.cat(want), 1e-4)


@torch.no_grad()
def test_a_text_it_has_read_is_foretold():
    """The paper's point: a host that knows nothing foretells, word by word, a text that is in its datastore."""
    host, ids = tiny.make("llama"), tiny.text(3, 17)
    keys, values = mmattn.retrieval.next_token_states(host, [{"input_ids": ids}])
    out = host(ids, output_hidden_states=True)
    mixed = mmattn.retrieval.knn_log_probs(
        keys, values, out.hidden_states[-1], out.logits, top_k=5, temperature=0.1, weight=0.9
    )
    assert torch.equal(mixed[:, :-1].argmax(-1), ids[:, 1:])
    assert not torch.equal(out.logits[:, :-1].argmax(-1), ids[:, 1:])
    loss, own = (-one[:, :-1].gather(-1, ids[:, 1:, None]).mean() for one in (mixed, out.logits.log_softmax(-1)))
    assert loss < 0.2 < own


def test_mistakes():
    keys, values, queries, logits = store()
    spoilt = keys.clone()
    spoilt[17, 2] = float("inf")
    table = [
        (ShapeError, "7.*11|11.*7", (keys, values, logits, logits), {}),
        (ShapeError, r"\(61, 7\).*\(3,\)", (keys, values[:3], queries, logits), {}),
        (ShapeError, "same tokens", (keys, values, queries[:, 1:], logits), {}),
        (ShapeError, "vocabulary", (keys, values + 5, queries, logits), {}),
        (ShapeError, "vocabulary", (keys, values - 5, queries, logits), {}),
        (NonFiniteError, "key 17", (spoilt, values, queries, logits), {}),
        (ConfigError, "weight", (keys, values, queries, logits), {"weight": 1.0}),
        (ConfigError, "temperature", (keys, values, queries, logits), {"temperature": 0.0}),
        (ConfigError, "top_k", (keys, values, queries, logits), {"top_k": 0}),
    ]
    for error, match, given, options in table:
        with pytest.raises(error, match=match):
            mmattn.retrieval.knn_log_probs(*given, **options)
    host = tiny.make("llama")
    with pytest.raises(ConfigError, match="at least one"):
        mmattn.retrieval.next_token_states(host, [])
    with pytest.raises(ConfigError, match="eval"):
        mmattn.retrieval.next_token_states(host.train(), [{"input_ids": tiny.text(1)}])
