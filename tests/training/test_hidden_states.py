"""Cached hidden states: the step of the whole host, found in any order, never served of another host or text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from mmattn import training
from mmattn.errors import ConditionError
from mmattn.training import TextBatch, cached_hidden_states
from tests import tiny
from tests.training import small_run

LENGTHS = (11, 7, 5)
Step = tuple[Tensor, dict[str, Tensor]]


def attach(family: str = "llama", host: Any = None, **settings: Any) -> Any:
    """A host in training mode with adapters at its second and third layer."""
    model = tiny.attach(tiny.make(family) if host is None else host, **{"layers": (1, 2)} | settings)
    model.train()
    return model


def batch(rows: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> TextBatch:
    """Texts of unequal length, padded, each with its own memory."""
    ids = tiny.text(3, LENGTHS[0], seed)
    texts = [ids[row, : LENGTHS[row]].tolist() for row in rows]
    return training.collate(texts, tiny.memory(3, lengths=[5, 2, 3])[list(rows)])


def step(model: Any, given: TextBatch) -> Step:
    """The loss of a batch, and the gradient of each trained parameter."""
    model.zero_grad()
    loss, _ = training.sum_nats(model, given, None)
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert found and loss.isfinite()
    return loss.detach(), found


def same(one: Step, other: Step) -> bool:
    return (
        torch.equal(one[0], other[0])
        and one[1].keys() == other[1].keys()
        and all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    )


def assert_near(got: Step, want: Step, tolerance: float) -> None:
    tiny.assert_close(got[0], want[0], tolerance)
    for name, value in want[1].items():
        if value.norm() > 1e-3:  # some are rounding alone
            tiny.assert_close(got[1][name], value, tolerance)


class TestAStepIsTheHosts:
    @pytest.mark.parametrize("family", tiny.FAMILIES)
    def test_bit_for_bit_for_each_text(self, family: str, tmp_path: Path) -> None:
        """Computed and read again; and within rounding in a padded batch, which is cut otherwise."""
        model = attach(family)
        texts, padded = [batch((row,)) for row in range(3)], batch()
        want, whole = [step(model, one) for one in texts], step(model, padded)
        with cached_hidden_states(model, tmp_path) as cache:
            computed = [step(model, one) for one in texts]
            assert (cache.layers, cache.computed, cache.found) == (2, 3, 0)
            read, together = [step(model, one) for one in texts], step(model, padded)
            assert (cache.computed, cache.found) == (3, 6)
        assert all(map(same, computed, want)) and all(map(same, read, want))
        assert_near(together, whole, 1e-3)
        assert same(step(model, padded), whole), "after the block it is the host as it was"

    def test_in_another_process_another_order_and_another_batch(self, tmp_path: Path) -> None:
        """Bit for bit: what is cached is a function of the text alone."""
        model = attach()
        with cached_hidden_states(model, tmp_path / "a"):
            want = step(model, batch((2, 0, 1)))
        with cached_hidden_states(model, tmp_path / "b") as cache:
            step(model, batch((1, 2)))
            step(model, batch((0, 1)))
            assert cache.computed == 3
        with cached_hidden_states(attach(), tmp_path / "b") as cache:
            assert same(step(cache.lower.model, batch((2, 0, 1))), want)
            assert (cache.computed, cache.found) == (0, 3)

    def test_packed_rows(self, tmp_path: Path) -> None:
        """Documents of packed rows are the texts that they are in rows of their own."""
        model, ids = attach(), tiny.text(3, LENGTHS[0])
        texts = [ids[row, :length].tolist() for row, length in enumerate(LENGTHS)]
        packed = training.pack(texts, tiny.memory(3))
        want = step(model, packed)
        with cached_hidden_states(model, tmp_path) as cache:
            got, again = step(model, packed), step(model, packed)
            step(model, training.collate(texts, tiny.memory(3)))
            assert cache.computed == 5, "the rest of a row is a text of padding: of 4 tokens here, and of 6"
        assert same(got, again)
        assert_near(got, want, 1e-4)

    def test_rows_as_the_trainers_of_trl_pack_them(self, tmp_path: Path) -> None:
        """One row with `position_ids`, and where documents begin said besides."""
        model, ids = attach(), tiny.text(3, LENGTHS[0])
        documents = [{"input_ids": ids[row, :length].tolist()} for row, length in enumerate(LENGTHS)]
        given = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(documents)
        want = model(**given, memory=tiny.memory(3)).logits
        with cached_hidden_states(model, tmp_path) as cache:
            tiny.assert_close(model(**given, memory=tiny.memory(3)).logits, want)
            assert cache.computed == 3

    def test_left_padding_with_positions(self, tmp_path: Path) -> None:
        """Refused without: what a host makes of a text in the middle of a row is its own affair."""
        model, ids = attach("gpt2"), tiny.text(3, LENGTHS[0])
        ids, mask = tiny.left_padded([ids[row, :length] for row, length in enumerate(LENGTHS)])
        given = {"input_ids": ids, "attention_mask": mask, "memory": tiny.memory(3)}
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        want = model(**given, position_ids=positions).logits[mask.bool()]
        with cached_hidden_states(model, tmp_path) as cache:
            got = model(**given, position_ids=positions).logits[mask.bool()]
            with pytest.raises(ConditionError, match="does not stand at positions 0, 1, 2, …: pad on the right"):
                model(**given)
            step(model, batch())
            assert (cache.computed, cache.found) == (3, 3)
        tiny.assert_close(got, want)

    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
    def test_a_lora_alone(self, tmp_path: Path) -> None:
        """Trained in the third layer; an adapter's states serve it, for below both lies the same host."""
        texts = training.collate([[5, 6, 7]]), training.collate([[5, 6, 7], [8, 9]])
        with cached_hidden_states(attach(), tmp_path) as adapters:
            adapters.lower.model(**texts[1].kwargs())
        model = training.matched_lora(tiny.make("llama"), 3001, layers=[2])
        model.train()
        want = [step(model, one) for one in texts]
        with cached_hidden_states(model, tmp_path) as cache:
            got = [step(model, one) for one in texts]
            assert (cache.layers, cache.computed, cache.found) == (2, 0, 3)
        assert same(got[0], want[0])
        assert_near(got[1], want[1], 1e-3)

    def test_half_precision(self, tmp_path: Path) -> None:
        """Cold and warm are equal."""
        model = attach(host=tiny.make("llama").to(torch.bfloat16))
        want = step(model, batch())
        with cached_hidden_states(model, tmp_path) as cache:
            cold, warm = step(model, batch()), step(model, batch())
            assert cache.found == 3
        assert same(cold, warm)
        assert_near(cold, want, 6e-2)

    def test_dropout_of_the_lower_layers_does_not_act(self, tmp_path: Path) -> None:
        """That of the upper ones and of the adapter does."""
        host = tiny.make("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
        model = attach(host=host)
        for layer in (model.layers[2], model.adapters):
            layer.eval()
        with cached_hidden_states(model, tmp_path):
            assert same(step(model, batch()), step(model, batch()))
            model.layers[2].train()
            assert not same(step(model, batch()), step(model, batch()))
        assert not same(step(model, batch()), step(model, batch()))


class TestNothingStale:
    def test_an_edit_inside_the_block(self, tmp_path: Path) -> None:
        """Edited in place as torch counts it, and undone: the earlier states are those of the earlier host again."""
        model, weight = attach(), attach
        with cached_hidden_states(model, tmp_path) as cache:
            first = step(model, batch((0,)))
            weight = model.layers[0].mlp.up_proj.weight
            with torch.no_grad():
                weight.mul_(2)
            edited = step(model, batch((0,)))
            assert cache.computed == 2 and not same(first, edited)
            with torch.no_grad():
                weight.div_(2)
            assert same(step(model, batch((0,))), first) and cache.computed == 2
        with torch.no_grad():
            weight.mul_(2)
        assert same(step(model, batch((0,))), edited)

    def test_other_ids(self, tmp_path: Path) -> None:
        """Invariant 145: texts that begin or end alike, and a token that is also the padding."""
        model = attach()
        texts = [[5, 6, 7], [5, 6], [6, 7], [5, 6, 7, 0], [0, 5, 6, 7]]
        batches = [training.collate([text], tiny.memory(1)) for text in texts]
        want = [step(model, one) for one in batches]
        with cached_hidden_states(model, tmp_path) as cache:
            assert all(map(same, [step(model, one) for one in batches], want)) and cache.computed == 5

    def test_a_weight_that_is_trained_by_now(self, tmp_path: Path) -> None:
        model = attach()
        with cached_hidden_states(model, tmp_path):
            step(model, batch())
            model.layers[1].mlp.up_proj.weight.requires_grad_(True)
            with pytest.raises(ConditionError, match="something is trained in layer 1 by now"):
                step(model, batch())


class TestOtherForwards:
    def test_writing_runs_the_whole_host(self, tmp_path: Path) -> None:
        """With a cache of keys and values, and without one where there is a memory; nothing of it is cached."""
        model, ids, memory = attach(), tiny.text(3), tiny.memory(3)
        model.eval()
        for given in ({"memory": memory}, {"memory": memory, "use_cache": False}, {}, {"num_beams": 3}):
            want = model.generate(ids, max_new_tokens=5, do_sample=False, **given)
            with cached_hidden_states(model, tmp_path) as cache:
                assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, **given), want)
                assert cache.computed == 0
        out = model(ids, memory=memory, use_cache=True)
        with cached_hidden_states(model, tmp_path):
            again = model(ids, memory=memory, use_cache=True)
            longer = model(ids[:, :1], memory=memory, **tiny.going_on(again.past_key_values))
        assert torch.equal(longer.logits, model(ids[:, :1], memory=memory, **tiny.going_on(out.past_key_values)).logits)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"output_hidden_states": True}, "called with output_hidden_states"),
            ({"attention_mask": torch.ones(3, 1, 7, 7)}, r"attention_mask is \(3, 1, 7, 7\)"),
            ({"position_ids": torch.arange(7)[None] + 2}, "positions 0, 1, 2, …"),
            ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 3)}, "positions 0, 1, 2, …"),
        ],
    )
    def test_what_is_no_text_from_its_beginning_is_refused(
        self, given: dict[str, Any], match: str, tmp_path: Path
    ) -> None:
        model = attach()
        with cached_hidden_states(model, tmp_path):
            with pytest.raises(ConditionError, match=match):
                model(tiny.text(3), memory=tiny.memory(3), **given)
            step(model, batch())

    def test_an_interrupted_forward_leaves_no_states_behind(self, tmp_path: Path) -> None:
        """torch runs no hooks after Ctrl-C; the forward after it is of another text, or writes one."""
        model = attach()
        want = [step(model, batch()), model(tiny.text(3), use_cache=True).logits]
        with cached_hidden_states(model, tmp_path):
            hook = model.layers[2].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(model, batch(seed=5))
            hook.remove()
            assert torch.equal(model(tiny.text(3), use_cache=True).logits, want[1])
            assert_near(step(model, batch()), want[0], 1e-4)
        assert same(step(model, batch()), want[0])


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@torch.no_grad()
def test_lower_layers_on_the_disk(tmp_path: Path) -> None:
    """A host whose lower layers accelerate has left on the disk: the same states, and no weight of them in memory."""
    host = tiny.make("llama")
    host.save_pretrained(tmp_path / "host")
    where = {"model.layers.0": "disk", "model.layers.1": "disk", "model.layers.2": "cpu", "model.embed_tokens": "cpu"}
    where |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "host", device_map=where, offload_folder=tmp_path / "disk", dtype=torch.float32
    )
    models = [attach(host=AutoModelForCausalLM.from_pretrained(tmp_path / "host")), attach(host=spread)]
    losses = []
    for model in models:
        with cached_hidden_states(model, tmp_path / "states") as cache:
            losses += [training.sum_nats(model, batch(), None)[0] for _ in range(2)]
    assert (cache.computed, cache.found) == (0, 6), "the first host computed them"
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    with cached_hidden_states(models[1], tmp_path / "others") as cache:
        losses += [training.sum_nats(models[1], batch(), None)[0] for _ in range(2)]
        assert (cache.computed, cache.found) == (3, 3)
        assert torch.equal(losses[-1], losses[0]) and torch.equal(losses[-2], losses[0])
    assert {one.device.type for one in spread.model.layers[:2].parameters()} == {"meta"}


@pytest.mark.slow
def test_cold_and_warm_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """Invariant 76: what was in the cache changes nothing that is learned."""

    def run(name: str, **settings: Any) -> str:
        given = {"every": None, "layers": [1, 2]}
        small_run.run(tmp_path / name, hidden_states=tmp_path / "states", adapter=given, **settings)
        return small_run.sha256(tmp_path / name)

    cold = run("a")
    files = sorted((tmp_path / "states").rglob("*.safetensors"))
    assert run("b") == cold != run("c", max_steps=3)
    assert sorted((tmp_path / "states").rglob("*.safetensors")) == files, "nothing was computed again"
