"""Inserted tokens belong to the call: ways to generate, other adapters, edits, files, and no trace after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

import mmattn
from tests import tiny
from tests.adapters.inserted.reference import attach, embedded, slots
from tests.adapters.joined.reference import CLOSE, answer, distance

NEW = 6
WAYS = tiny.WAYS | {"several beams": {"num_beams": 4, "num_return_sequences": 2}}
GIVEN: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def written(family: str, before: Tensor, ids: Tensor, **given: Any) -> Tensor:
    """What a host without adapters writes after embeddings in front of a text."""
    host: Any = tiny.make(family)
    with torch.no_grad():
        result: Tensor = host.generate(inputs_embeds=embedded(host, before, ids), **GIVEN | given)
    return result


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("family", "gate"), [("llama", False), ("llama", True), ("gpt2", False), ("gemma3_text", False), ("cohere", True)]
)
def test_generate(family: str, gate: bool, way: str) -> None:
    """`generate` in every way writes what the host writes with the embeddings in front."""
    model, ids, memory = attach(tiny.make(family), gate=gate), tiny.text(1, 13), tiny.memory(1)
    plain = {"num_beams", "num_return_sequences"} & set(WAYS[way])
    expected = written(family, slots(model, memory), ids, **{name: WAYS[way][name] for name in plain})
    result = model.generate(ids, memory=memory, **GIVEN | WAYS[way])
    assert torch.equal(result[:, ids.shape[1] :], expected)
    with model.condition(memory):
        assert torch.equal(model.host.generate(ids, **GIVEN | WAYS[way]), result)
    alone = tiny.make(family).generate(ids, **GIVEN | WAYS[way])
    assert torch.equal(model.generate(ids, **GIVEN | WAYS[way]), alone)
    assert distance(answer(model, ids, memory=memory), answer(model, ids)) > 100 * CLOSE


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
@pytest.mark.parametrize("gate", [False, True])
def test_padded_prompts(family: str, gate: bool) -> None:
    """Prompts padded on the left, with memories of several lengths, write what each writes alone."""
    model, rows = attach(tiny.make(family), gate=gate), [tiny.text(1, 13)[0], tiny.text(1, 5, seed=1)[0]]
    ids, mask = tiny.left_padded(rows)
    memory = tiny.memory(2, lengths=[2, 5])
    result = model.generate(ids, attention_mask=mask, memory=memory, **GIVEN)
    for row, prompt in enumerate(rows):
        alone = model.generate(prompt[None], memory=memory[row : row + 1], **GIVEN)
        assert torch.equal(result[row, -NEW - len(prompt) :], alone[0])
        if not gate:
            assert torch.equal(alone[:, len(prompt) :], written(family, slots(model, memory, row), prompt[None]))


@pytest.mark.parametrize(
    ("family", "gate"),
    [
        ("llama", False),
        ("gpt2", True),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (("llama", True), ("gpt2", False), ("mistral", True))
        ),
    ],
)
def test_continuous_batching(family: str, gate: bool) -> None:
    """Requests that transformers schedules together write what each writes alone; one without slots, as the host."""
    model = attach(tiny.make(family), gate=gate)
    tiny.open_gates(model)
    prompts = [tiny.text(1, length, seed=length)[0].tolist() for length in (4, 13, 7, 5, 4)]
    memories = [tiny.memory(1), tiny.memory(1, m=3, seed=1), None, tiny.memory(1, lengths=[0]), tiny.memory(1, seed=2)]
    settings = {
        "generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
    }
    result = [one.generated_tokens for one in model.generate_batch(prompts, memory=memories, **settings).values()]
    for ids, memory, output in zip(prompts, memories, result, strict=True):
        alone = model.generate(torch.tensor([ids]), memory=memory, **GIVEN)
        assert output == alone[0, len(ids) :].tolist()


@pytest.mark.parametrize("gate", [False, True])
def test_text_goes_on_in_a_cache_of_the_caller(gate: bool) -> None:
    """Text given in two pieces with a cache of the caller's stands where it stands in one."""
    for family in ("llama", "gpt2", "mistral"):
        model, ids, memory = attach(tiny.make(family), gate=gate), tiny.text(2, 13), tiny.memory(2, lengths=[5, 2])
        expected = answer(model, ids, memory=memory)
        with torch.no_grad():
            first = model(ids[:, :5], memory=memory, use_cache=True)
            second = model(ids[:, 5:], memory=memory, **tiny.going_on(first.past_key_values))
        assert distance(second.logits, expected[:, 5:]) <= CLOSE


def test_the_host_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory is read once for many calls and steps of `generate`, and again after an edit of what it depends on."""
    model, ids = attach(tiny.make("llama")), tiny.text(1, 7)
    memory = tiny.memory(1)
    prepared, reader = model.prepare(memory), type(model.adapter("default").reader)
    count, original = [0], reader.read

    def read(self: Any, *args: Any) -> Any:
        count[0] += 1
        return original(self, *args)

    monkeypatch.setattr(reader, "read", read)
    for _ in range(2):
        model.generate(ids, memory=prepared, **GIVEN)
        answer(model, ids, memory=prepared)
    assert count == [1] and prepared.nbytes() == 2 * 4 * 5 * 16 * tiny.LAYERS
    edited = [
        memory.tokens,
        model.adapter("default").projector[2].weight,
        model.adapter("default").memory_norm.bias,
        model.host.model.layers[1].self_attn.v_proj.weight,
    ]
    random = torch.Generator().manual_seed(0)
    with model.condition(prepared):
        before = answer(model, ids)
        for number, tensor in enumerate(edited, 2):
            with torch.no_grad():
                tensor.add_(torch.randn(tensor.shape, generator=random))
            result = answer(model, ids)
            assert count == [number] and distance(result, before) > 100 * CLOSE
            assert torch.equal(answer(model, ids, memory=mmattn.Memory(memory.tokens.clone())), result)
            count[0], before = number, result


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_another_lora_reads_anew() -> None:
    """What the host has read with a LoRA is not used without it, and is there again with it."""
    from peft import LoraConfig, get_peft_model

    host = get_peft_model(tiny.make("llama"), LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model, ids = attach(host.eval()), tiny.text(1, 7)
    prepared = model.prepare(tiny.memory(1))
    with_lora = answer(model, ids, memory=prepared)
    with host.disable_adapter():
        without = answer(model, ids, memory=prepared)
        assert torch.equal(without, answer(model, ids, memory=tiny.memory(1)))
    assert distance(without, with_lora) > 100 * CLOSE
    assert torch.equal(answer(model, ids, memory=prepared), with_lora)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_beside_passages(family: str) -> None:
    """Gated tokens stand beside passages, whose positions they leave alone: fresh ones change nothing, bit for bit."""
    model = mmattn.attach(tiny.make(family), mmattn.adapters.PassageAdapter(), "read")
    passages = mmattn.hosts.PassageCache(model)
    passages.add([[5, 6, 7, 8]], progress=False)
    expected = answer(model, tiny.text(1), memory=passages.select([[0]]))
    attach(model, opened=False, name="seen")
    both = {"read": passages.select([[0]]), "seen": tiny.memory(1)}
    assert torch.equal(answer(model, tiny.text(1), memory=both), expected)
    tiny.open_gates(model)
    result = answer(model, tiny.text(1), memory=both)
    assert distance(result, expected) > 100 * CLOSE
    assert distance(result, answer(model, tiny.text(1), memory={"seen": tiny.memory(1)})) > 100 * CLOSE
