"""All entries of an index as a memory: attention searches them, and is held to exact attention over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn import inspect
from mmattn.adapters.gated import GatedLayout
from mmattn.core.cross_attention import CrossAttention
from mmattn.errors import ConditionError, ConfigError, IndexMismatchError, ShapeError
from mmattn.retrieval import Index, IndexMemory
from mmattn.retrieval.attention_search import SearchedSlots
from tests import tiny

E, N, ROWS = tiny.MEMORY_DIM, 43, 3
PLAIN = GatedLayout(memory_norm=False)
SETTINGS: dict[str, dict[str, Any]] = {
    "normalised": {},
    "as they are": {"layout": PLAIN},
    "null slot": {"null_slot": True, "length_norm": 11.0},
    "fewer key heads": {"num_heads": 4, "num_kv_heads": 2, "gate": "head"},
}


def vectors(count: int = N, seed: int = 3) -> Tensor:
    """Of different lengths and means, so that a norm changes their order."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(count, 1, generator=generator) * 2 + 0.3
    return torch.randn(count, E, generator=generator) * spread + torch.randn(count, 1, generator=generator) * 0.2


def whole(rows: int = ROWS, scores: Tensor | None = None) -> mmattn.Memory:
    return mmattn.Memory(vectors().expand(rows, -1, -1), scores=scores)


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_found_is_exact_attention(setting: str, metric: str) -> None:
    """Invariant 90."""
    model, ids = tiny.attach(tiny.make("llama"), **SETTINGS[setting]), tiny.text(ROWS)
    index = Index.build(vectors(), metric=metric)
    with torch.no_grad():
        wanted = model(ids, memory=whole()).logits
        tiny.assert_close(model(ids, memory=index.as_memory(N)).logits, wanted, 1e-5)
        tiny.assert_close(model(ids, memory=index.as_memory(2 * N)).logits, wanted, 1e-5)
        assert tiny.differs(model(ids, memory=index.as_memory(2)).logits, wanted)


@pytest.mark.parametrize("store", ["exact", "hnsw"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("null", [False, True])
def test_attention_over_what_is_found(store: str, bias: bool, null: bool) -> None:
    """Invariant 90: each token and head by itself, its best entries chosen and weighed in float64."""
    torch.manual_seed(5)
    settings: dict[str, Any] = {"null_slot": null, "length_norm": 7.0 if null else None}
    if bias:
        settings |= {"score_bias": True, "score_std": 0.5}
    layer = CrossAttention(17, E, num_heads=4, num_kv_heads=2, head_dim=5, bias=True, **settings).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    entries, asked, c = vectors(), torch.randn(2, E), 7
    index, x = Index.build(entries, metric="ip", store=store), torch.randn(2, 3, 17)
    memory = index.as_memory(c, queries=asked).entries(None, bias)
    found = SearchedSlots(memory, c, lambda memory: memory)
    out, weights = layer(x, found, return_weights=True)

    kv, wide = layer.kv_proj, entries.double()
    q = layer.q_proj(x).double().view(2, 3, 4, 5)
    keys, values = ((wide @ p.weight.double().T + p.bias.double()).view(N, 2, 5) for p in (kv.k_proj, kv.v_proj))
    heads = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for row in range(2):
        for token in range(3):
            for head in range(4):
                scores = keys[:, head // 2] @ q[row, token, head] * layer.kv_proj.scale
                if bias:
                    scores = scores + kv.score_scale.double() * (wide @ asked[row].double()) / 0.5
                best = scores.topk(c).indices
                shown = scores[best]
                if null:
                    own = kv.null_key[head // 2].double() @ q[row, token, head] * layer.kv_proj.scale
                    shown = torch.cat([own[None], shown + torch.tensor(7 / N, dtype=torch.float64).log()])
                share = shown.softmax(0)
                values_here = values[best, head // 2]
                if null:
                    values_here = torch.cat([kv.null_value[head // 2].double()[None], values_here])
                heads[row, token, head] = share @ values_here
                tiny.assert_close(weights[row, head, token, best], share[-c:].float(), 1e-5)
                assert int((weights[row, head, token] > 0).sum()) == c
    wanted = heads.flatten(2) @ layer.out_proj.weight.double().T + layer.out_proj.bias.double()
    tiny.assert_close(out, wanted.float(), 1e-5)


@pytest.mark.parametrize("metric", ["cosine", "ip"])
@pytest.mark.parametrize("setting", [{}, {"null_slot": True, "length_norm": 11.0}, {"layout": PLAIN}], ids=str)
def test_scores_for_what_each_row_is_looked_up_by(setting: dict[str, Any], metric: str) -> None:
    """Invariant 90."""
    index, asked = Index.build(vectors(), metric=metric), torch.randn(ROWS, E)
    hits = index.search(asked, N)
    scores = torch.zeros(ROWS, N)
    for row, (names, fit) in enumerate(zip(hits.ids, hits.scores, strict=True)):
        scores[row, torch.tensor(names)] = fit
    model, ids = tiny.attach(tiny.make("llama"), score_bias=True, score_std=0.5, **setting), tiny.text(ROWS)
    with torch.no_grad():
        wanted = model(ids, memory=whole(scores=scores)).logits
        tiny.assert_close(model(ids, memory=index.as_memory(N, queries=asked)).logits, wanted, 1e-5)
        turned = index.as_memory(N, queries=asked.roll(1, 0))
        assert tiny.differs(model(ids, memory=turned).logits, wanted), "each row has a query of its own"
        sharp = {name: one for name, one in model.named_parameters() if name.endswith("score_scale")}
        for one in sharp.values():
            one.fill_(300.0)
        # So sharp that only what fits the query counts: it must be among the few that are found.
        few = model(ids, memory=index.as_memory(3, queries=asked)).logits
        tiny.assert_close(few, model(ids, memory=whole(scores=scores)).logits, 1e-4)


@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_queries_mean_nothing_to_an_adapter_without_score_bias(metric: str) -> None:
    model, ids, index = tiny.attach(tiny.make("llama")), tiny.text(ROWS), Index.build(vectors(), metric=metric)
    with torch.no_grad():
        plain = model(ids, memory=index.as_memory(3)).logits
        assert torch.equal(model(ids, memory=index.as_memory(3, queries=torch.randn(ROWS, E))).logits, plain)


def test_gradients() -> None:
    """Invariant 90."""
    ids, index = tiny.text(ROWS), Index.build(vectors(), metric="ip")

    def gradients(memory: Any) -> dict[str, Tensor]:
        model = tiny.attach(tiny.make("llama"), null_slot=True, length_norm=5.0)
        model(ids, memory=memory, labels=ids).loss.backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    wanted, given = gradients(whole()), gradients(index.as_memory(N))
    assert wanted.keys() == given.keys() and any("memory_norm" in name for name in given)
    for name, one in given.items():
        tiny.assert_close(one, wanted[name], 1e-5)
    name = "adapters.default.memory_norm.weight"
    assert tiny.differs(gradients(index.as_memory(2))[name][None], wanted[name][None])


@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_generating(ways: dict[str, Any]) -> None:
    model, ids, asked = tiny.attach(tiny.make("llama"), score_bias=True), tiny.text(ROWS), torch.randn(ROWS, E)
    index = Index.build(vectors(), metric="ip")
    memory = whole(scores=asked @ vectors().T)
    given: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **ways}
    torch.manual_seed(0)
    wanted = model.generate(ids, memory=memory, **given)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, memory=index.as_memory(N, queries=asked), **given), wanted)
    torch.manual_seed(0)
    assert not torch.equal(model.generate(ids, **given), wanted)


@pytest.mark.parametrize("store", ["exact", "hnsw"])
@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_changes_are_seen_by_the_next_call(metric: str, store: str) -> None:
    """Invariant 91."""
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(ROWS)
    index = Index.build(vectors(), metric=metric, store=store)
    memory = index.as_memory(2 * N)

    def answer() -> Tensor:
        return model(ids, memory=memory).logits

    def anew() -> Tensor:
        kept = torch.stack([index[name].vector for name in index.ids])
        return model(ids, memory=kept.expand(ROWS, -1, -1)).logits

    with torch.no_grad():
        seen = [answer()]
        for change in (
            lambda: index.add(vectors(5, seed=8)),
            lambda: index.update([7, 2], vectors(2, seed=9)),
            lambda: index.delete([0, 20, N + 1]),
            lambda: index.add(vectors(1, seed=10), ids=[20]),
            lambda: index.update([5], texts=["a text changes no vector"]),
            lambda: index.delete(index.ids[1:]),
        ):
            with model.condition(memory):
                before = model.host(ids).logits
                change()
                assert torch.equal(model.host(ids).logits, before), "a block sees the entries of its beginning"
            assert torch.equal(before, seen[-1])
            seen.append(answer())
            tiny.assert_close(seen[-1], anew(), 1e-5)
        index.delete(index.ids)
        assert torch.equal(answer(), model.host(ids).logits), "nothing to find: the host as it is"


def test_a_change_does_not_build_everything_again() -> None:
    """Invariant 91."""
    index = Index.build(torch.randn(3000, E), store="hnsw")
    first = index.search_structures.get(index.store, 1e-5)[1].parts[0].structure
    index.add(vectors(3))
    index.delete([5])
    index.update([7, 2999], vectors(2, seed=9))
    parts = index.search_structures.get(index.store, 1e-5)[1].parts
    assert parts[0].structure is first and [len(part.rows) for part in parts] == [3000, 5]
    shown = torch.nn.functional.layer_norm(torch.stack([index[name].vector for name in index.ids]), (E,))
    for name in (7, 2999, 3001, 12):
        query = shown[index.ids.index(name)]
        found = index.as_memory().entries(1e-5).search(query[None, None], 1).item()
        assert found == (shown @ query).argmax(), "the entry as it is now"


@pytest.mark.parametrize("store", ["hnsw", "ivf", "ivfpq"])
def test_approximate_stores(store: str) -> None:
    """Most of the attention is found, and everything that is found is weighed exactly."""
    torch.manual_seed(0)
    centres = torch.randn(40, E)
    entries = centres[torch.arange(6000) % 40] + 0.4 * torch.randn(6000, E)
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(ROWS)
    with torch.no_grad():
        exact = model(ids, memory=Index.build(entries).as_memory(64)).logits
        found = model(ids, memory=Index.build(entries, store=store).as_memory(64)).logits
    assert (found - exact).abs().mean() < 0.1 * (exact - model.host(ids).logits).abs().mean()


@pytest.mark.parametrize("metric", ["cosine", "ip"])
@pytest.mark.parametrize("store", ["hnsw", "ivf", "ivfpq"])
def test_the_best_scores_are_never_missed(store: str, metric: str) -> None:
    """Also where the structure is too poor to find them, after changes of the index, and each of them once."""
    torch.manual_seed(0)
    poor = {"hnsw": {"links": 2, "build_effort": 1, "search_effort": 1}}.get(store, {"lists": 50, "visited": 1})
    index = Index.build(torch.randn(2003, 24), metric=metric, store=store, **poor)
    asked = torch.randn(3, 24)
    memory = index.as_memory(5, queries=asked)

    def check() -> None:
        given = memory.entries(1e-5, scored=True)
        found = given.search(1e-4 * torch.randn(3 * 2, 7, 24), 5, 10.0)
        wanted = given.scores(torch.arange(len(index))).topk(5).indices.repeat_interleave(2, 0)[:, None]
        assert torch.equal(found.sort().values, wanted.sort().values.expand_as(found))

    check()
    index.delete(index.search(asked, 2).ids[0])
    check()
    index.add(3 * asked)
    check()


def test_recorded_weights_and_the_memory_itself() -> None:
    model, ids = tiny.attach(tiny.make("llama"), null_slot=True), tiny.text(ROWS)
    index = Index.build(vectors(), texts=[f"entry {row}" for row in range(N)])
    with torch.no_grad():
        model.adapter("default").memory_norm.weight.uniform_(-1, 2)
        model.adapter("default").memory_norm.bias.normal_()
    with torch.no_grad(), inspect.record(model) as found:
        model(ids, memory=index.as_memory(5))
    with torch.no_grad(), inspect.record(model) as exact:
        model(ids, memory=whole())
    for key, (weights,) in found.items():
        assert weights.shape == exact[key][0].shape == (ROWS, 2, ids.shape[1], N)
        assert ((weights > 0).sum(-1) == 5).all()
    first = "default", 0  # the layers above are given other states
    assert torch.equal((found[first][0] > 0).nonzero(), best_of(exact[first][0], 5).nonzero())
    memory = index.as_memory(5).entries(None).memory()
    assert torch.equal(memory.tokens[0], vectors()) and memory.sources[0][7] == {"id": 7, "text": "entry 7"}


def best_of(weights: Tensor, count: int) -> Tensor:
    """Which slots have the largest weights."""
    return torch.zeros_like(weights).scatter_(3, weights.topk(count).indices, 1.0)


def test_rows_of_text() -> None:
    """Without queries it fits any text; with them it has their rows."""
    model, index = tiny.attach(tiny.make("llama")), Index.build(vectors())
    for rows in (1, 2, 5):
        model(tiny.text(rows), memory=index.as_memory(3))
    scored = tiny.attach(tiny.make("llama"), score_bias=True)
    with pytest.raises(ShapeError, match="the text has 2 rows"):
        scored(tiny.text(2), memory=index.as_memory(3, queries=torch.randn(3, E)))
    with pytest.raises(ShapeError, match=r"as_memory\(queries="):
        scored(tiny.text(2), memory=index.as_memory(3))


def test_what_is_refused(tmp_path: Any) -> None:
    index, ids = Index.build(vectors()), tiny.text(ROWS)
    memory = index.as_memory(3)
    for setting, why in (
        ({"qk_norm": True}, "qk_norm"),
        ({"resampler": {"num_latents": 3, "depth": 1}}, "reads no memory that is searched"),
        ({"visible_segments": "latest", "media_token": 5}, "some segments only"),
    ):
        model = tiny.attach(tiny.make("llama"), **setting)
        with pytest.raises(ConditionError, match=why):
            model(ids, memory=memory)
    model = tiny.attach(tiny.make("llama"))
    with pytest.raises(ShapeError, match="memory_dim"):
        model(ids, memory=Index.build(torch.randn(5, E + 1)).as_memory())
    with pytest.raises(ConditionError, match="arrived="):
        model(ids, memory=memory, arrived=torch.ones(ROWS, ids.shape[1], dtype=torch.long))
    with pytest.raises(ConditionError, match="continuous batching|condition block|generate"):
        model.generate_batch([[5, 6]], memory=[memory])
    with pytest.raises(ConditionError, match="belongs to one call"):
        model.prepare(memory)
    with pytest.raises(ConfigError, match="per_query"):
        index.as_memory(0)
    with pytest.raises(ConfigError, match="metric='l2'"):
        Index.build(vectors(), metric="l2").as_memory(queries=torch.randn(1, E))
    with pytest.raises(IndexMismatchError):
        index.as_memory(queries=torch.randn(1, E + 1))
    with pytest.raises(ConfigError, match="elsewhere"):
        Index.build(vectors(3), store="qdrant").as_memory()
    assert isinstance(memory, IndexMemory) and repr(memory) == f"IndexMemory({N} entries, e={E}, per_query=3)"
