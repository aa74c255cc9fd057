"""`mmattn.doctor`: a healthy model passes, each sickness is found by its own line, and the patient does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.adapters.gated import block as gated_block
from mmattn.adapters.joined.slots import JoinedView
from mmattn.core import projection
from mmattn.hosts.hooks import CrossAttentionHook
from tests import tiny, tiny_unets
from tests.adapters.chunked import chunks

ROWS, LENGTH, SLOTS = 3, 7, 5


def batch(**memory: Any) -> dict[str, Any]:
    """A text and its memory, every slot of it real unless given otherwise."""
    return {"input_ids": tiny.text(ROWS, LENGTH), "memory": tiny.memory(ROWS, SLOTS, **memory)}


def pictures(**memory: Any) -> dict[str, Any]:
    """What a UNet is given, with a memory."""
    sample, time, text = tiny_unets.given()[0]
    memory = tiny.memory(tiny_unets.ROWS, **memory)
    return {"sample": sample, "timestep": time, "encoder_hidden_states": text, "memory": memory}


def answer(report: Any, question: str) -> str:
    """What a report says to one question."""
    (found,) = [line[2] for line in report.lines if line[1] == question]
    return found


def latest(visible: str = "latest", **settings: Any) -> tuple[Any, dict[str, Any]]:
    """A model whose tokens attend to images before them, and a batch with two images."""
    token = 3
    model = tiny.attach(tiny.make("llama"), visible_segments=visible, media_token=token, **settings)
    ids = tiny.text(ROWS, 11).masked_fill_(tiny.text(ROWS, 11) == token, 4)
    ids[:, 1] = token
    ids[:2, 6] = token
    segments = torch.tensor([0, 0, 0, 1, 1]).expand(ROWS, -1)
    tokens = tiny.memory(ROWS, SLOTS).tokens
    return model, {"input_ids": ids, "memory": mmattn.Memory(tokens, segments=segments)}


#: Beyond the contract suite, which asks the doctor about every kind of adapter.
HEALTHY: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "bfloat16": lambda: (tiny.attach(tiny.make("llama")).to(torch.bfloat16), batch(lengths=[5, 0, 4])),
    "latest": latest,
    "resampled": lambda: latest(resampler=mmattn.Resampler(num_latents=2, num_heads=2, head_dim=4)),
    "chunked, a function": lambda: (
        chunks.attach(tiny.make("gpt2")),
        {"input_ids": tiny.text(chunks.ROWS, chunks.LENGTH), "memory": chunks.Library()},
    ),
    "unet, core": lambda: (tiny_unets.attach(tiny_unets.make()).use_core(), pictures()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_passes(name: str) -> None:
    model, given = HEALTHY[name]()
    report = mmattn.doctor(model, given)
    assert report.ok, report
    asked = {question: ok for ok, question, _ in report.lines}
    must = ("gates", "each layer adds something", "each layer depends on the memory", "another memory", "padding")
    assert all(asked[question] is True for question in (*must, "rows", "empty memory", "disabled")), report
    waits = name in ("latest", "resampled", "chunked, a function")
    assert asked["slots for later tokens"] is (True if waits else None)


def test_the_table() -> None:
    model = tiny.attach(tiny.make("llama"), null_slot=True)
    report = mmattn.doctor(model, batch(lengths=[5, 2, 4]))
    lines = str(report).splitlines()
    assert len(lines) == len(report.lines) == 12
    begin = len("ok    ") + max(len(question) for _, question, _ in report.lines) + 2
    assert all(line[begin - 2 : begin] == "  " and line[begin] != " " for line in lines), "answers are not aligned"
    assert all(line.startswith(("ok    ", "note  ")) for line in lines)
    trained, total = model.trainable_parameters()
    assert answer(report, "trainable parameters").startswith(f"{trained:,} of {total:,}")
    assert f"torch {torch.__version__.split('+')[0]}" in answer(report, "versions")


@pytest.mark.parametrize("mode", [True, False])
def test_the_patient_does_not_notice(mode: bool) -> None:
    model = tiny.attach(tiny.make("llama"), dropout=0.5)
    model.train(mode)
    model.host.model.layers[1].train(not mode)
    given = batch(lengths=[5, 2, 4]) | {"labels": tiny.text(ROWS, LENGTH)}

    def state() -> Any:
        hooks = [(name, sorted(m.__dict__), list(m._forward_hooks), m.training) for name, m in model.named_modules()]
        return hooks, [list(m._forward_pre_hooks) for m in model.modules()], [p.grad for p in model.parameters()]

    before, weights = state(), {name: value.clone() for name, value in model.state_dict().items()}
    random, keys = torch.random.get_rng_state(), set(given)
    assert mmattn.doctor(model, given).ok
    assert state() == before and set(given) == keys
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()


class TestSickness:
    def test_a_gate_at_zero(self) -> None:
        model = tiny.attach(tiny.make("gpt2"))
        block = model.adapters["default"].block(2)
        with torch.no_grad():
            block.gate.gate.zero_()
            block.feed_forward_gate.gate.zero_()
        report = mmattn.doctor(model, batch(lengths=[5, 2, 4]))
        assert report.failed == ["gates", "each layer adds something"]
        assert "2.gate" in answer(report, "gates") and "0.gate" not in answer(report, "gates")
        assert "layers [2]" in answer(report, "each layer adds something")

    def test_a_fresh_adapter(self) -> None:
        for model, given in (
            (tiny.attach(tiny.make("llama"), opened=False), batch()),
            (tiny_unets.attach(tiny_unets.make(), opened=False), pictures()),
        ):
            report = mmattn.doctor(model, given)
            assert report.failed == ["gates", "each layer adds something", "another memory"]
            assert "fresh" in answer(report, "gates") and "rows [0, 1, 2]" in answer(report, "another memory")

    def test_a_block_that_ignores_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.attach(tiny.make("llama"))

        def constant(x: Tensor, *args: Any, has_memory: Tensor | None = None, **kwargs: Any) -> Tensor:
            return x + 0.5 if has_memory is None else torch.where(has_memory, x + 0.5, x)

        monkeypatch.setattr(model.adapters["default"].block(2), "forward", constant)
        report = mmattn.doctor(model, batch(lengths=[5, 2, 4]))
        assert report.failed == ["each layer depends on the memory"]
        assert "layers [2]" in answer(report, "each layer depends on the memory")
        monkeypatch.setattr(model.adapters["default"].block(0), "forward", constant)
        assert mmattn.doctor(model, batch()).failed == ["each layer depends on the memory", "another memory"]

    @pytest.mark.parametrize("leak", [lambda x: x.roll(1, 0), lambda x: x.mean(0, True).expand_as(x)])
    @pytest.mark.parametrize("kind", ["llama", "gpt2", "unet"])
    def test_rows_that_mix(self, kind: str, leak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        unet = kind == "unet"
        model = tiny_unets.attach(tiny_unets.make()) if unet else tiny.attach(tiny.make(kind))
        adapter, given = model.adapters["default"], pictures() if unet else batch()
        read = adapter.read
        monkeypatch.setattr(adapter, "read", lambda memory: read(memory.replace(leak(memory.tokens))))
        report = mmattn.doctor(model, given)
        assert report.failed == ["rows"]
        assert "rows are mixed" in answer(report, "rows")

    def test_one_row_that_looks_into_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.attach(tiny.make("llama"))
        adapter, ids = model.adapters["default"], tiny.text(7, LENGTH)
        read = adapter.read

        def peeping(memory: mmattn.Memory) -> mmattn.Memory:
            tokens = memory.tokens.clone()
            tokens[6, :1] += tokens[4, :1]
            return read(memory.replace(tokens))

        monkeypatch.setattr(adapter, "read", peeping)
        report = mmattn.doctor(model, {"input_ids": ids, "memory": tiny.memory(7, SLOTS)})
        assert report.failed == ["rows"]
        assert "row 6" in answer(report, "rows") and answer(report, "rows").count("row ") == 1

    @pytest.mark.parametrize("unet", [False, True])
    def test_padding_that_is_attended_to(self, unet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_unets.attach(tiny_unets.make()) if unet else tiny.attach(tiny.make("llama"))
        given = pictures() if unet else batch()
        attend = projection.attend_by_rule

        def without_mask(q, k, v, rule, options):
            return attend(q, k, v, replace(rule, allowed=None, visible=True), options)

        monkeypatch.setattr(projection, "attend_by_rule", without_mask)
        report = mmattn.doctor(model, given)
        assert report.failed == ["padding"]
        assert "presence" in answer(report, "padding")

    def test_what_lies_in_padding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.attach(tiny.make("llama"))
        adapter = model.adapters["default"]
        read = adapter.read

        def mixing(memory: mmattn.Memory) -> mmattn.Memory:
            made = read(memory)
            return made.replace(made.tokens + 1e-3 * memory.tokens.mean(1, keepdim=True))

        monkeypatch.setattr(adapter, "read", mixing)
        report = mmattn.doctor(model, batch(lengths=[5, 2, 4]))
        assert "padding" in report.failed and "rows" not in report.failed
        assert "large numbers" in answer(report, "padding") and "NaN inf" in answer(report, "padding")

    @pytest.mark.parametrize("unet", [False, True])
    def test_something_where_there_is_nothing(self, unet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_unets.attach(tiny_unets.make()) if unet else tiny.attach(tiny.make("llama"))
        adapter = model.adapters["default"]
        part = adapter.attention(1) if unet else adapter.block(2)
        forward = part.forward

        def biased(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            return (found[0] + 0.1, *found[1:]) if isinstance(found, tuple) else found + 0.1

        monkeypatch.setattr(part, "forward", biased)
        report = mmattn.doctor(model, pictures(lengths=[5, 2, 3]) if unet else batch(lengths=[5, 2, 4]))
        assert report.failed == ["empty memory"]
        assert all(word in answer(report, "empty memory") for word in ("0 slots", "all slots masked", "rows without"))

    def test_a_token_that_sees_the_next_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, given = latest()
        rule = gated_block.media
        monkeypatch.setattr(gated_block, "media", lambda images, *rest: rule(images + 1, *rest))
        report = mmattn.doctor(model, given)
        assert "slots for later tokens" in report.failed and "padding" not in report.failed
        assert "before token 6" in answer(report, "slots for later tokens")

    def test_a_token_that_sees_what_its_own_chunk_found(self) -> None:
        model = chunks.attach(tiny.make("llama"))
        given = {"input_ids": tiny.text(chunks.ROWS, chunks.LENGTH), "memory": chunks.neighbours()}
        with early(model):
            report = mmattn.doctor(model, given)
        assert report.failed == ["slots for later tokens"]

    def test_an_experiment_that_breaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.attach(tiny.make("llama"))
        adapter = model.adapters["default"]
        read = adapter.read
        monkeypatch.setattr(adapter, "read", lambda memory: memory.tokens[0, 0, 0] and read(memory))
        report = mmattn.doctor(model, batch())
        assert report.failed == ["empty memory"]
        assert "stopped with IndexError" in answer(report, "empty memory")

    def test_an_adapter_that_cannot_be_disabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.attach(tiny.make("llama"))
        adapt = CrossAttentionHook.adapt
        monkeypatch.setattr(CrossAttentionHook, "adapt", lambda self, x: adapt(self, x) + 0.1)
        report = mmattn.doctor(model, batch())
        assert {"disabled", "empty memory"} <= set(report.failed)


@contextmanager
def early(model: Any) -> Iterator[None]:
    """Inside the block tokens read the neighbours of their own chunk: as if the text were a chunk longer."""
    from mmattn.adapters.chunked import MemoryNeighbours

    places = MemoryNeighbours.places
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MemoryNeighbours,
            "places",
            lambda self, wanted, *rest: places(self, [(row, min(chunk + 1, 2)) for row, chunk in wanted], *rest),
        )
        yield


def test_each_of_two_adapters_has_its_own_lines() -> None:
    lm = tiny.make("llama")
    model = tiny.attach(lm)
    tiny.attach(lm, name="second", opened=False, layers=(1,))
    report = mmattn.doctor(model, batch())
    assert report.failed == [f"second: {q}" for q in ("gates", "each layer adds something", "another memory")]
    model.set_adapter("default")
    assert mmattn.doctor(model, batch()).ok


def test_what_cannot_be_asked() -> None:
    model = tiny.attach(tiny.make("llama"))
    with pytest.raises(mmattn.errors.ConfigError, match=r"with a memory .* got \['input_ids'\]"):
        mmattn.doctor(model, {"input_ids": tiny.text(2)})
    with pytest.raises(mmattn.errors.ConfigError, match="got Memory"):
        mmattn.doctor(model, tiny.memory(2))
    with pytest.raises(mmattn.errors.ConfigError, match="every slot .* is masked"):
        mmattn.doctor(model, batch(lengths=[0, 0, 0]))
    with pytest.raises(mmattn.errors.ShapeError, match="2 rows"):
        mmattn.doctor(model, batch() | {"input_ids": tiny.text(2)})
    with pytest.raises(mmattn.errors.ConditionError, match="fill its cache"):
        mmattn.doctor(model, batch() | tiny.going_on(model(tiny.text(ROWS, LENGTH)).past_key_values))
    model.set_adapter([])
    with pytest.raises(mmattn.errors.ConditionError, match="no active adapter"):
        mmattn.doctor(model, batch())
    one = mmattn.doctor(tiny.attach(tiny.make("llama")), {"input_ids": tiny.text(1), "memory": tiny.memory(1)})
    assert one.ok and answer(one, "rows").startswith("not checked")


def test_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory of rows without slots: another memory is that of the next row, and what mixes rows is found."""
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model)
    passages.add([[5, 6, 7], [9, 11], [13]], progress=False)
    given = {"input_ids": tiny.text(3, 7), "memory": passages.select([[0, 1], [2], [1, 2]])}
    report = mmattn.doctor(model, given)
    asked = {question: ok for ok, question, _ in report.lines}
    assert report.ok and asked.pop("gates") in (True, None), report
    wanted = ("the same call again", "each layer adds something", "each layer depends on the memory", "another memory")
    assert {question for question, ok in asked.items() if ok} == {*wanted, "rows", "disabled"}
    alike = given | {"memory": given["memory"][[1, 1, 1]]}
    said = {question: (ok, text) for ok, question, text in mmattn.doctor(model, alike).lines}
    assert said["another memory"][0] is None and "different memories" in said["another memory"][1]
    own = JoinedView.apply

    def mixed(self: Any, x: Any, block: Any, layer: int, adapter_scale: Any) -> Any:
        values = {number: one + one.mean(0) for number, one in self.slots.values.items()}
        self.slots = replace(self.slots, values=values)
        return own(self, x, block, layer, adapter_scale)

    monkeypatch.setattr(JoinedView, "apply", mixed)
    assert "rows" in mmattn.doctor(model, given).failed
