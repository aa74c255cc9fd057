"""A conditioned host as a graph: exported with the memory as an input, and compiled for decoding and other batches."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.export import Dim, export
from transformers import StaticCache

import mmattn
from tests import tiny
from tests.tiny import assert_close, differs

ROWS, LENGTH, NEW = 3, 7, 4


def shallow():
    """A host that is traced quickly."""
    return tiny.make("llama", num_hidden_layers=1)


class Reader(nn.Module):
    """A host with adapters as a function of text and memory: all that exporting needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, tokens, mask):
        memory = mmattn.Memory(tokens, mask, check_finite=False)
        return self.model(input_ids, memory=memory, use_cache=False).logits


@pytest.mark.parametrize("settings", [{}, {"position": "before", "num_heads": 4, "num_kv_heads": 2, "qk_norm": True}])
@torch.no_grad()
def test_an_exported_host_takes_its_memory_as_an_input(settings):
    ids = tiny.text(ROWS, LENGTH)
    own = shallow()(ids).logits
    model = tiny.attach(shallow(), layers=(0,), **settings)
    b, l, m = Dim("b"), Dim("l", max=128), Dim("m", max=4096)
    memory = tiny.memory(ROWS, lengths=[5, 0, 3])
    given = (ids, memory.tokens, memory.mask)
    run = export(Reader(model), given, dynamic_shapes=({0: b, 1: l}, {0: b, 1: m}, {0: b, 1: m})).module()
    out = run(*given)
    assert_close(out, model(ids, memory=memory).logits, 1e-6)
    assert_close(out[1], own[1], 1e-6)
    other = tiny.memory(ROWS, seed=1)
    assert differs(run(ids, other.tokens, memory.mask)[::2], out[::2])
    assert torch.equal(run(ids, other.tokens, memory.mask)[1], out[1])
    for rows, length, slots in ((5, 11, 13), (2, 2, 101), (4, 101, 2)):
        ids = tiny.text(rows, length)
        memory = tiny.memory(rows, m=slots, lengths=[0, slots, 1, 2, 2][:rows])
        assert_close(run(ids, memory.tokens, memory.mask), model(ids, memory=memory).logits, 1e-6)
    names = {name for name, _ in run.named_parameters()}
    assert any("adapters" in name for name in names) and any("embed_tokens" in name for name in names)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.testing.CompileCounterWithBackend("eager")
    torch._dynamo.reset()


@torch.no_grad()
def test_decoding_with_a_static_cache_is_one_graph(dynamo):
    model, ids = tiny.attach(shallow(), layers=(0,)), tiny.text(ROWS, LENGTH)
    step = torch.compile(model.host, backend=dynamo, fullgraph=True)
    seen = []
    for memory in (tiny.memory(ROWS, lengths=[5, 0, 3]), tiny.memory(ROWS, lengths=[2, 5, 1], seed=1)):
        text, cache = ids, StaticCache(config=model.host.config, max_cache_len=LENGTH + NEW)
        with model.condition(memory):
            word = model.host(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            for place in range(LENGTH, LENGTH + NEW):
                text = torch.cat([text, word], 1)
                positions = torch.full((ROWS, 1), place)
                logits = step(word, past_key_values=cache, position_ids=positions).logits
                word = logits[:, -1:].argmax(-1)
                seen.append(dynamo.frame_count)
            assert_close(logits[:, -1], model.host(text).logits[:, -1])
    assert not torch._dynamo.utils.counters["graph_break"]
    assert seen == [seen[0]] * len(seen), f"graphs after each step: {seen}"


@torch.no_grad()
@pytest.mark.slow
def test_a_new_batch_size_is_at_most_one_graph_more(dynamo):
    model = tiny.attach(shallow(), layers=(0,))
    fast = torch.compile(model.host, backend=dynamo, fullgraph=True)
    graphs = []
    for rows in (3, 2, 5, 7):
        ids = tiny.text(rows, LENGTH)
        for m in (5, 7, 9, 11):
            memory = tiny.memory(rows, m=m, lengths=[m, 0, 3, 1, 2, 4, 5][:rows], seed=m)
            with model.condition(memory):
                got = fast(ids).logits
            assert_close(got, model(ids, memory=memory).logits, 1e-6)
        graphs.append(dynamo.frame_count)
    assert not torch._dynamo.utils.counters["graph_break"]
    more = [after - before for before, after in zip(graphs, graphs[1:], strict=False)]
    assert max(more) <= 1 and graphs[0] <= 2, f"graphs after each batch size: {graphs}"
