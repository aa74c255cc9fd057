"""On a GPU: torch's four kernels, every layout of a memory, recomputed layers, graphs, and no wait for a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

import mmattn
from mmattn import attend
from mmattn.adapters import ChunkedAdapter, GatedAdapter, InsertedAdapter, PassageAdapter, PrefixAdapter
from mmattn.adapters.host_models import cache_name
from mmattn.adapters.settings import AdapterConfig
from mmattn.errors import NonFiniteError
from mmattn.hosts import PassageCache
from mmattn.testing import stir
from tests import tiny
from tests.core.random_inputs import make_heads
from tests.reference import assert_close, attend_reference, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNELS = [
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
B, L, H, G, WIDTH = 3, 5, 6, 2, 16


def rules(m: int) -> dict[str, dict[str, Tensor]]:
    """Masks by name, as arguments of `attend`; the second row and the fourth query see nothing."""
    mask, rule = torch.rand(B, m) < 0.6, torch.rand(L, m) < 0.6
    mask[1], rule[3] = False, False
    return {"no mask": {}, "rows": {"mask": mask}, "queries": {"mask": mask, "attention_mask": rule}}


def leaves(m: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """By the name of a layout what `laid_out` makes keys or values of."""
    for name in ("contiguous", "expanded", "transposed", "strided"):
        rows, columns = (1 if name == "expanded" else B), WIDTH * (2 if name == "strided" else 1)
        shape = (rows, m, G, columns) if name == "transposed" else (rows, G, m, columns)
        yield name, torch.randn(shape).to(dtype)


def laid_out(name: str, leaf: Tensor) -> Tensor:
    """Keys or values (b, g, m, k)."""
    if name == "expanded":
        return leaf.expand(B, -1, -1, -1)
    if name == "transposed":
        return leaf.transpose(1, 2)
    return leaf[..., ::2] if name == "strided" else leaf


@pytest.mark.filterwarnings("ignore::UserWarning")  # why a kernel does not take an input
@pytest.mark.parametrize("m", [1, 31, 32, 33, 65, 577, 1025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels(dtype: torch.dtype, m: int) -> None:
    """Each kernel of torch that takes the inputs, over every layout, masked or not, against the definition."""
    ran = set()
    q = make_heads(dtype, H, G, b=B, l=L, m=m, k=WIDTH)[0]
    upstream = torch.randn(B, H, L, WIDTH).to(dtype)
    for (layout, keys), (_, values) in zip(leaves(m, dtype), leaves(m, dtype), strict=True):
        wide = [leaf.detach().double().requires_grad_() for leaf in (q, keys, values)]
        for masks, rule in rules(m).items():
            expected, _ = attend_reference(wide[0], *(laid_out(layout, leaf) for leaf in wide[1:]), **rule)
            expected_grads = gradients(expected, wide, upstream.double())
            largest = torch.stack([grad.abs().max() for grad in expected_grads]).max()
            inputs = [leaf.detach().cuda().requires_grad_() for leaf in (q, keys, values)]
            heads = [inputs[0], *(laid_out(layout, leaf) for leaf in inputs[1:])]
            for kernel in KERNELS:
                with sdpa_kernel(kernel):
                    try:
                        out = attend(*heads, **{name: mask.cuda() for name, mask in rule.items()})
                    except RuntimeError as error:
                        assert "No available kernel" in str(error)
                        continue
                    grads = gradients(out, inputs, upstream.cuda())
                ran.add((kernel, layout, masks))
                assert_close(out.cpu(), expected, dtype)
                for grad, right in zip(grads, expected_grads, strict=True):
                    # Over one slot the softmax is constant: gradients of queries and keys are 0 but for rounding.
                    vanishing = right.abs().max() <= 1e-9 * largest
                    assert_close(grad.cpu(), right, dtype, "grad", size=largest if vanishing else None)
    for layout in ("contiguous", "expanded", "transposed"):
        assert {(kernel, layout, masks) for kernel in KERNELS[:2] for masks in rules(m)} <= ran
        # FlashAttention has no masks and no float32, nor has cuDNN a single slot.
        assert dtype is torch.float32 or {(kernel, layout, "no mask") for kernel in KERNELS[: 3 + (m > 1)]} <= ran


@pytest.mark.parametrize("way", tiny.ways_of_checkpointing())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputed_layers(dtype: torch.dtype, way: bool) -> None:
    """Layers that the thread of the device runs again in the backward pass see the memory of their own call."""
    texts = [tiny.text(3, seed=seed).cuda() for seed in (0, 1)]
    found = []
    for checkpointed in (False, True):
        model = tiny.attach(tiny.make("llama").to(dtype).cuda()).train()
        model.adapters.to(dtype)
        if checkpointed:
            tiny.checkpoint(model.host, way)
            model.host.enable_input_require_grads()
        memories = [
            mmattn.Memory(tiny.memory(3, m=m, seed=m).tokens.to("cuda", dtype).requires_grad_()) for m in (5, 11)
        ]
        losses = [
            model(ids, memory=one).logits.float().square().mean() for ids, one in zip(texts, memories, strict=True)
        ]
        for loss in reversed(losses):
            loss.backward()
        found.append([one.tokens.grad for one in memories] + [one.grad for one in model.adapters.parameters()])
    for plain, again in zip(*found, strict=True):
        tiny.assert_close(again, plain, 1e-5 if dtype is torch.float32 else 2e-2)
        assert plain.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of what it does not follow
@pytest.mark.parametrize(
    "adapter",
    [GatedAdapter(tiny.MEMORY_DIM), ChunkedAdapter(tiny.MEMORY_DIM, chunk_size=3), PrefixAdapter(5, num_prefixes=3)],
    ids=lambda adapter: adapter.kind,
)
@torch.no_grad()
def test_compiled_hosts(adapter: AdapterConfig) -> None:
    """A host compiled into CUDA graphs, as `generate` does for a static cache, attends to the memory of each call."""
    torch._dynamo.reset()
    model, ids = mmattn.attach(tiny.make("llama").cuda(), adapter), tiny.text(3).cuda()
    stir(model.adapter("default"))
    compiled = torch.compile(model.host, mode="reduce-overhead")
    new = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    for seed in (0, 1, 0):
        memory = adapter.example_memory(torch.Generator().manual_seed(seed), 3)
        memory = memory.to("cuda") if isinstance(memory, mmattn.Memory) else memory
        with model.condition(memory):
            tiny.assert_close(compiled(ids).logits, model.host(ids).logits)
        wanted = model.generate(ids, memory=memory, **new)
        assert torch.equal(model.generate(ids, memory=memory, cache_implementation="static", **new), wanted)


def test_default_device() -> None:
    """Adapters are attached where tensors are made on the GPU by default."""
    memory, ids = tiny.memory(3).to("cuda"), tiny.text(3).cuda()
    lm = tiny.make("llama").cuda()
    with torch.device("cuda"):
        model = mmattn.attach(lm, InsertedAdapter(tiny.MEMORY_DIM))
        assert model(ids, memory=memory).logits.isfinite().all()


@torch.no_grad()
def test_streams_on_the_cpu() -> None:
    """A stream that nothing has arrived in, or slots on the CPU, is attended to on the GPU."""
    lm, ids = tiny.make("llama").cuda(), tiny.text(2).cuda()
    alone = lm(ids).logits
    model, stream = tiny.attach(lm, null_slot=True), mmattn.MemoryStream(tiny.MEMORY_DIM, rows=2)
    assert torch.equal(model(ids, memory=stream).logits, alone)
    slots = tiny.memory(2)
    stream.append(slots.tokens)
    tiny.assert_close(model(ids, memory=stream).logits, model(ids, memory=slots).logits)


@torch.no_grad()
def test_files_of_passages(tmp_path: Path) -> None:
    """Passages from a file, which lie on the CPU, are saved with those that the host reads now."""
    model, path = mmattn.attach(tiny.make("llama").cuda(), PassageAdapter()), tmp_path / "passages"
    passages = PassageCache(model)
    passages.add([[5, 6, 7]], progress=False)
    passages.save(path)
    passages = PassageCache.load(model, path)
    passages.add([[8, 9]], progress=False)
    passages.save(path)
    assert PassageCache.load(model, path).lengths == [3, 2]


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Inside the block torch raises where the CPU would wait for the card."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attach() -> Any:
    return tiny.open_gates(tiny.attach(tiny.make("llama").cuda(), layers=(1, 2)))


def memories(model: Any) -> dict[str, Any]:
    """Memories of three rows by kind, on the card."""
    padded = tiny.memory(3, 7, lengths=[7, 2, 5]).to("cuda")
    return {
        "none": None, "tensor": padded.tokens, "padded": padded, "prepared": model.prepare(padded),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "tensor", "padded", "prepared"])
@torch.no_grad()
def test_a_text_and_a_token(kind: str) -> None:
    """Invariant 219: with every kind of memory, one that is new among them."""
    model, ids = attach(), tiny.text(3, 5).cuda()
    cache = DynamicCache(config=model.config)
    name = cache_name(model.host)
    for _ in range(2):  # the first call chooses kernels, and may check a host once
        memory = memories(model)[kind]
        with no_waits():
            logits = model(ids, memory=memory, use_cache=True, **{name: cache}).logits
            model(ids[:, :1], memory=memory, use_cache=True, **{name: cache})
        assert logits.isfinite().all()
        cache = DynamicCache(config=model.config)


@torch.no_grad()
def test_passages() -> None:
    """Invariant 219: passages that the host has read are selected and attended to."""
    model = mmattn.attach(tiny.make("llama").cuda(), PassageAdapter())
    passages, question = PassageCache(model), tiny.text(1, 3).cuda()
    passages.add([[5, 6, 7], [8, 9], [11, 12, 13, 14, 15]], progress=False)
    model(question, memory=passages.select([[0, 2]]))
    with no_waits():
        logits = model(question, memory=passages.select([[2, 1]])).logits
    assert logits.isfinite().all()


@torch.no_grad()
def test_a_memory_that_is_not_finite() -> None:
    """Invariant 219: it is refused by the end of `generate`, and no later call is refused for it."""
    model, ids = attach(), tiny.text(3, 5).cuda()
    new = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    good = tiny.memory(3, 7).to("cuda")
    want = model.generate(ids, memory=good, **new)
    bad = good.tokens.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(NonFiniteError):
        model.generate(ids, memory=mmattn.Memory(bad), **new)
    assert torch.equal(model.generate(ids, memory=good, **new), want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of what it does not follow
@torch.no_grad()
def test_one_graph_for_each_token() -> None:
    """Invariant 219: compiled as a whole, into CUDA graphs, with the memory of each call."""
    torch._dynamo.reset()
    model, ids = attach(), tiny.text(3, 5).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for seed in (0, 1, 0, 2):
        memory = model.prepare(tiny.memory(3, 7, seed=seed).to("cuda"))
        tiny.assert_close(compiled(ids, memory=memory).logits.clone(), model(ids, memory=memory).logits)
