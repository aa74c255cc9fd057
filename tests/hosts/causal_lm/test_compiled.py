"""A conditioned host as a graph: exported with the memory as an input, and compiled for decoding and other batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.source
import torch._dynamo.testing
from torch import nn
from torch.export import Dim, export
from transformers import CompileConfig, StaticCache

import mmattn
from mmattn.errors import ConditionError, MmattnError, ShapeError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs

ROWS, LENGTH, NEW = 3, 7, 4
#: torch 2.14 and newer.
READS_CONTEXT = hasattr(torch._dynamo.source, "ContextVarGetSource")


def shallow():
    """A host that is traced quickly."""
    return tiny.make("llama", num_hidden_layers=1)


@pytest.fixture
def read():
    """A shallow host with an open adapter, and a text."""
    return tiny.attach(shallow(), layers=(0,)), tiny.text(ROWS, LENGTH)


class Reader(nn.Module):
    """A host with adapters as a function of text and memory: all that exporting needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, tokens, mask):
        memory = mmattn.Memory(tokens, mask, check_finite=False)
        return self.model(input_ids, memory=memory, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.skipif(not READS_CONTEXT, reason="torch.export of this torch does not take the text's length as dynamic")
@pytest.mark.parametrize("settings", [{}, {"position": "before", "num_heads": 4, "num_kv_heads": 2, "qk_norm": True}])
@torch.no_grad()
def test_an_exported_host_takes_its_memory_as_an_input(settings):
    """Invariant 24."""
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


@pytest.mark.slow
@pytest.mark.skipif(not READS_CONTEXT, reason="torch.export of this torch does not take the text's length as dynamic")
@torch.no_grad()
def test_an_onnx_file_takes_its_memory_as_an_input(tmp_path):
    """Invariant 24, in onnxruntime."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = Reader(tiny.attach(shallow(), layers=(0,))).eval()
    axes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    memory = tiny.memory(ROWS, lengths=[5, 0, 3])
    given = (tiny.text(ROWS, LENGTH), memory.tokens, memory.mask)
    torch.onnx.export(model, given, dynamo=True, dynamic_shapes=(axes, axes, axes)).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    for rows, length, slots in ((ROWS, LENGTH, 5), (5, 11, 13), (2, 2, 101)):
        memory = tiny.memory(rows, m=slots, lengths=[0, slots, 1, 2, 2][:rows])
        given = (tiny.text(rows, length), memory.tokens, memory.mask)
        [logits] = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
        assert_close(torch.from_numpy(logits), model(*given), 1e-5)


class Graphs:
    """A backend that keeps what it was asked to compile."""

    def __init__(self):
        self.inputs = []

    def __call__(self, graph, example):
        self.inputs.append({node.name for node in graph.graph.nodes if node.op == "placeholder"})
        return graph

    def __deepcopy__(self, memo):
        return self  # transformers copies what it compiles with

    def projects(self, number):
        """Whether a graph reads the weights that project the memory."""
        return any("kv_proj" in name and "k_proj" in name for name in self.inputs[number])


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


GIVEN = {
    "tensor": lambda model, tokens: {"memory": tokens},
    "Memory": lambda model, tokens: {"memory": mmattn.Memory(tokens)},
    "prepared": lambda model, tokens: {"memory": model.prepare(tokens)},
    "by name": lambda model, tokens: {"memory": {"default": tokens}, "adapter_scale": {"default": 1.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@torch.no_grad()
def test_the_adapted_model_itself_is_one_graph(read, dynamo, given):
    """Invariant 143: each call has its own memory, or none, and a call outside of the graph is as before."""
    model, ids = read
    compiled = torch.compile(model, backend=dynamo, fullgraph=True)
    bare = model(ids).logits
    for seed in range(2):
        tokens = tiny.memory(ROWS, seed=seed).tokens
        want = model(ids, memory=tokens).logits
        assert differs(want, bare)
        assert_close(compiled(ids, **given(model, tokens)).logits, want)
        assert_close(compiled(ids).logits, bare)
        with model.condition(tokens):
            assert_close(compiled(ids).logits, want)
        assert torch.equal(model(ids).logits, bare)


@torch.no_grad()
def test_other_memories_compile_nothing_again(read, dynamo):
    """Invariant 201: each an object of its own and of another length: one graph, and one for all lengths."""
    model, ids = read
    compiled = torch.compile(model, backend=dynamo, fullgraph=True)
    for slots in (5, 2, 11, 13):
        memory = tiny.memory(ROWS, slots, seed=slots)
        assert_close(compiled(ids, memory=memory).logits, model(ids, memory=memory).logits)
    assert dynamo.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("by_keyword", [True, False])
@torch.no_grad()
def test_generate_with_a_static_cache_replays_one_graph(read, graphs, by_keyword):
    """Invariant 213: for every token and memory of a length, and one more for memories of any length."""
    model, ids = read
    compiled = CompileConfig(fullgraph=True, backend=graphs, mode=None)
    compiled._compile_all_devices = True
    settings = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    static = settings | {"cache_implementation": "static", "compile_config": compiled}
    for slots, expected in ((5, 1), (5, 1), (7, 2), (11, 2), (2, 2)):
        memory = model.prepare(tiny.memory(ROWS, slots, seed=slots))
        want = model.generate(ids, memory=memory, **settings)
        if by_keyword:
            got = model.generate(ids, memory=memory, **static)
        else:
            with model.condition(memory):
                got = model.generate(ids, **static)
        assert torch.equal(got, want)
        assert len(graphs.inputs) == expected


@pytest.mark.parametrize("in_block", [True, False])
@torch.no_grad()
def test_a_token_is_one_graph_wherever_it_stands(read, dynamo, in_block):
    """Invariants 24, 213: and for memories of all lengths, with padding."""
    model, ids = read
    fast = torch.compile(model, backend=dynamo, fullgraph=True)
    for slots in (5, 11, 7):
        memory = model.prepare(tiny.memory(ROWS, slots, lengths=[slots, 0, 3]))
        text, cache = ids, StaticCache(config=model.host.config, max_cache_len=LENGTH + NEW)
        word = model(ids, **tiny.going_on(cache), memory=memory).logits[:, -1:].argmax(-1)
        for place in range(LENGTH, LENGTH + NEW):
            text = torch.cat([text, word], 1)
            given = tiny.going_on(cache) | {"position_ids": torch.full((ROWS, 1), place)}
            if in_block:
                with model.condition(memory):
                    logits = fast(word, **given).logits
            else:
                logits = fast(word, **given, memory=memory).logits
            word = logits[:, -1:].argmax(-1)
        assert_close(logits[:, -1], model(text, memory=memory).logits[:, -1])
    assert dynamo.frame_count == 2


@torch.no_grad()
def test_a_block_of_an_export_holds_in_its_thread_alone(read):
    """Invariant 201: exporting runs the code, while other threads call the host."""
    (model, ids), seen = read, []
    bare = model(ids).logits

    @torch.no_grad()
    def call():
        seen.append(model(ids).logits)

    class Meanwhile(nn.Module):
        def forward(self, input_ids, tokens):
            with model.condition(mmattn.Memory(tokens, check_finite=False)):
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(call).result()
                return model.host(input_ids, use_cache=False).logits

    memory = tiny.memory(ROWS)
    exported = export(Meanwhile(), (ids, memory.tokens), strict=False).module()
    assert len(seen) == 1 and torch.equal(seen[0], bare)
    assert_close(exported(ids, memory.tokens), model(ids, memory=memory).logits, 1e-6)


def test_a_compiled_host_is_given_keys_and_values(read, graphs):
    """Invariant 38: in a block without gradients its graph projects nothing; where weights are trained it does."""
    model, ids = read
    fast, memory = torch.compile(model.host, backend=graphs, fullgraph=True), tiny.memory(ROWS, lengths=[5, 0, 3])
    with torch.no_grad(), model.condition(memory):
        got = fast(ids).logits
    assert_close(got, model(ids, memory=memory).logits)
    assert len(graphs.inputs) == 1 and not graphs.projects(0)
    model(ids, labels=ids, memory=memory).loss.backward()
    wanted = {name: weight.grad for name, weight in model.adapters.named_parameters()}
    model.zero_grad()
    with model.condition(memory):
        fast(ids, labels=ids).loss.backward()
    assert graphs.projects(1)
    for name, weight in model.adapters.named_parameters():
        assert_close(weight.grad, wanted[name])


@torch.no_grad()
def test_a_compiled_model_is_given_keys_and_values(read, graphs):
    """Invariant 213: a graph projects a tensor, which is new in each call, and no memory; edits between calls count."""
    (model, ids), memory = read, tiny.memory(ROWS)
    fast = torch.compile(model, backend=graphs, fullgraph=True)
    weight = model.adapter("default").attention(0).kv_proj.k_proj.weight
    for given in (memory, model.prepare(memory), memory):
        assert_close(fast(ids, memory=given).logits, model(ids, memory=given).logits)
        weight.mul_(1.5)
        memory.tokens.add_(0.5)
    assert len(graphs.inputs) == 1 and not graphs.projects(0)
    assert_close(fast(ids, memory=memory.tokens).logits, model(ids, memory=memory).logits)
    assert graphs.projects(1)
    with pytest.raises(ShapeError, match="width 7"):
        fast(ids, memory=mmattn.Memory(torch.randn(ROWS, 5, 7)))
    assert_close(fast(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_change_that_a_graph_cannot_see_is_refused(read, graphs):
    """Invariant 38."""
    (model, ids), memory = read, tiny.memory(ROWS)
    fast = torch.compile(model.host, backend=graphs, fullgraph=True)
    weight = model.adapter("default").attention(0).kv_proj.k_proj.weight
    for changed in (weight, memory.tokens):
        with pytest.raises(ConditionError, match="begin a new block"), model.condition(memory):
            fast(ids)
            changed.mul_(2)
            fast(ids)
        with model.condition(memory):
            got = fast(ids).logits
        assert_close(got, model(ids, memory=memory).logits)
    # What is computed anew for `generate` does not hide what was answered before.
    with pytest.raises(ConditionError, match="begin a new block"), model.condition(memory):
        fast(ids)
        weight.mul_(2)
        fast(ids)
        model.generate(ids, max_new_tokens=1, pad_token_id=0)
    with model.condition(memory):  # the host as it is sees every change
        model.host(ids)
        weight.mul_(2)
        assert_close(model.host(ids).logits, model(ids, memory=memory).logits)
    assert len(graphs.inputs) == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_host_reads_each_memory_it_is_given(read, dynamo):
    """Invariant 38: lengths, masks and absence in turn, with a bounded number of graphs."""
    model, ids = read
    memories = [tiny.memory(ROWS, m=m, lengths=lengths, seed=m) for m in (5, 7, 9, 11) for lengths in (None, [m, 0, 3])]
    fast = torch.compile(model.host, backend=dynamo, fullgraph=True)
    for memory in (*memories, None) * 2:
        with model.condition(memory):
            got = fast(ids).logits
        assert_close(got, model(ids, memory=memory).logits, 1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]
    # One for each of: no memory, and with or without a mask, of a first length and of any.
    assert 1 <= dynamo.frame_count <= 5, f"{dynamo.frame_count} graphs for {len(memories)} memories"


@pytest.mark.slow
@torch.no_grad()
def test_attaching_after_the_host_was_compiled_is_never_silent(ids, dynamo):
    """Invariant 37."""
    lm = shallow()
    fast = torch.compile(lm, backend=dynamo)
    plain = fast(ids).logits
    assert_close(plain, shallow()(ids).logits, 1e-6)
    try:
        model = tiny.attach(lm, layers=(0,))
        with model.condition(tiny.memory(ROWS)):
            got = fast(ids).logits
    except MmattnError as error:
        assert "compile" in str(error)
    else:
        assert_close(got, model(ids, memory=tiny.memory(ROWS)).logits, 1e-6)
        assert differs(got, plain)
        model.unload()
        assert_close(fast(ids).logits, plain, 1e-6)


@pytest.mark.parametrize(
    ("make", "attach"),
    [(shallow, lambda host: tiny.attach(host, layers=(0,))), (tiny_unets.make, tiny_unets.attach)],
)
def test_a_compiled_model_is_not_a_host(make, attach, dynamo):
    """Invariant 37."""
    with pytest.raises(MmattnError, match="compile"):
        attach(torch.compile(make(), backend=dynamo))
    host = make()
    host.compile(backend=dynamo)
    with pytest.raises(MmattnError, match="compile"):
        attach(host)
