"""The composition recipe: what is asked is what is meant, no held-out key is trained on, and a run has its controls."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mmattn
from mmattn.pipelines import load_language_model
from tests.recipes.runs import LM, settings_of
from tests.tiny_texts import tiny_tokenizer

RECIPE = "compose"


def make_world(recipe: SimpleNamespace, key_models: int = 1) -> Any:
    """Thirty keys, a fifth of them to train a composition on."""
    return recipe.data.World(recipe.settings.DataSettings(keys=30, values=11, key_models=key_models), seed=0)


@pytest.fixture
def world(recipe: SimpleNamespace) -> Any:
    return make_world(recipe)


def test_prompts_and_answers(recipe: SimpleNamespace) -> None:
    made = recipe.data.Expression(("kqz", "abt"), (7, 12), "-")
    pairs = {task: made.pair(task) for task in recipe.data.TASKS}
    assert {task: ("".join(asked), right) for task, (asked, right) in pairs.items()} == {
        "substitution": ("<kqz>-<abt>:", ["7", "-", "12"]),
        "arithmetic": ("<7>-<12>=", ["7", "-", "12", "=", "-", "5"]),
        "KV-arithmetic": ("<kqz>-<abt>=", ["7", "-", "12", "=", "-", "5"]),
    }
    in_the_head = recipe.data.Expression(("kqz", "abt"), (7, 12), "-", working=False)
    for task in ("arithmetic", "KV-arithmetic"):
        assert in_the_head.pair(task) == (pairs[task][0], ["-", "5"])
    assert "".join(made.pair("arithmetic", ("ab", ""))[0]) == "<ab7>-<12>="


def test_no_held_out_key_is_trained_on(world: Any) -> None:
    (keys,), (held_out,) = world.keys, world.held_out
    assert len(keys) == 6 and len(held_out) == 24 and not set(keys) & set(held_out)
    random = Random(0)
    drawn = {key for _ in range(200) for key in world.draw(world.keys, random).keys}
    assert drawn == set(keys)
    measured = {key for one in world.expressions("KV-arithmetic", 200, 0) for key in one.keys}
    assert measured <= set(held_out) and len(measured) > 20


def test_each_of_two_key_models_has_keys_and_brackets_of_its_own(recipe: SimpleNamespace) -> None:
    world = make_world(recipe, key_models=2)
    first, second = map(set, world.known)
    assert len(first) == len(second) == 15 and not first & second and first | second == set(world.values)
    for one in world.expressions("KV-arithmetic", 50, 0):
        assert one.keys[0] in first & {*world.held_out[0]} and one.keys[1] in second & {*world.held_out[1]}
        text = "".join(one.pair("KV-arithmetic")[0])
        assert text == f"<{one.keys[0]}>{one.operator}[{one.keys[1]}]="
    random = Random(0)
    for number, (begin, known) in enumerate((("<", first), ("[", second))):
        texts = [world.draw_key_text(random, key_model=number)[0] for _ in range(100)]
        assert {text[0] for text in texts} == {begin}
        assert {"".join(text[1:4]) for text in texts} == known
    asked = {"".join(token for token in world.draw_sum(random)[0] if token in "<>[]") for _ in range(50)}
    assert asked == {"<>[]"}
    batch = world.batch([[one.pair("KV-arithmetic")] for one in world.expressions("KV-arithmetic", 3, 0)])
    assert int(batch["input_ids"].max()) < len(world.ids)


def test_m_b_never_reads_a_key_with_its_value_and_m_a_never_a_result(world: Any) -> None:
    random = Random(0)
    for _ in range(200):
        asked, right = world.draw_key_text(random)
        assert "=" not in (*asked[:-1], *right) and len(right) == (1 if asked[-1] == ">" else 3)
        if asked[-1] == ">":
            assert right == [str(world.values["".join(asked[-4:-1])])]
        else:
            keys = "".join(asked)[1:4], "".join(asked)[7:10]
            assert [right[0], right[2]] == [str(world.values[key]) for key in keys]
        asked, right = world.draw_sum(random)
        assert ":" not in asked and not any(f"<{key}>" in "".join(asked) for key in world.values)
        numbers = [int(token) for token in asked if token.isdigit()]
        operator = next(token for token in asked if token in "+-*")
        assert asked[0] == "<" and asked.count("=") in (1, 2)
        if asked.count("=") == 1:
            assert right[:4] == [str(numbers[0]), operator, str(numbers[1]), "="]
            right = right[4:]
        assert int("".join(right)) == {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](*numbers)
    assert len({tuple(world.draw_key_text(Random(seed), known=False)[1]) for seed in range(60)}) > 20


def test_rows_learn_answers_alone(world: Any) -> None:
    pairs = [(["<", "a", ">"], ["7"]), (["<", "7", ">", "+", "<", "3", ">", "="], ["1", "0"])]
    batch = world.batch([pairs, pairs[:1]])
    learned = [[world.tokens[id] for id in row[row != -100].tolist()] for row in batch["labels"]]
    assert learned == [["7", "1", "0", "[end]"], ["7", "[end]"]]
    assert batch["attention_mask"].sum(1).tolist() == [3 + 1 + 8 + 2 + 1, 3 + 1 + 1]
    assert "".join(map(world.tokens.__getitem__, batch["input_ids"][0].tolist())) == "<a>7<7>+<3>=10[end]"
    prompts = world.prompts(pairs)
    assert [row[mask.bool()].tolist() for row, mask in zip(*prompts.values(), strict=True)] == [
        [world.ids[token] for token in asked] for asked, _ in pairs
    ]
    assert world.answer([world.ids["1"], world.ids["0"], world.ids["[end]"], world.ids["5"]]) == ["1", "0"]


@pytest.mark.slow
def test_the_saved_adapter_composes_the_saved_models(recipe: SimpleNamespace, run: Path) -> None:
    key_model, arithmetic_model = (AutoModelForCausalLM.from_pretrained(run / name) for name in ("m_A", "m_B"))
    model = mmattn.load(arithmetic_model, run / "adapter")
    ids = torch.tensor([[5, 9, 3, 7]])
    with torch.no_grad():
        assert model(ids, memory=mmattn.AugmentingModel(key_model)).logits.isfinite().all()


@pytest.fixture
def anchor(tmp_path: Path) -> Path:
    """A tiny language model with a token for each sign."""
    folder, tokenizer = tmp_path / "anchor", tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=24, intermediate_size=32, num_hidden_layers=3,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_pretrained_anchor_is_taught_and_reads_its_own_tokens(
    recipe: SimpleNamespace, anchor: Path, tmp_path: Path
) -> None:
    settings = settings_of("compose", tmp_path) | {
        "anchor": str(anchor), "fused": None, "controls": ["LoRA"], "ways": ["all three"],
        "hidden_states": str(tmp_path / "states"), "data": {"keys": 30, "values": 10, "ask": 7, "pool": 8},
    }  # fmt: skip
    run = recipe.train.main(settings)
    names = [row["name"] for row in json.loads((run / "table.json").read_text())["rows"]]
    assert names == [
        "m_B as it is, after 6 sums",
        "m_A, knows the keys",
        "m_B, does arithmetic",
        "ceiling: m_B with the values filled in",
        "composed, trained on all three",
        "LoRA on m_B",
    ]
    assert any((tmp_path / "states").rglob("*.safetensors")) and (run / "m_B" / "adapter_model.safetensors").is_file()
    settings, (lm, tokenizer) = (
        recipe.settings.DataSettings(keys=30, values=10),
        load_language_model(str(anchor), "cpu"),
    )
    small, world = recipe.data.World(settings, 0), recipe.data.World(settings, 0, "cpu", tokenizer, 3)
    assert small.values == world.values and world.spell(["12"]) == [world.ids["1"], world.ids["2"]]
    pair = (["<", "7", ">", "+", "<", "5", ">", "="], ["7", "+", "5", "=", "12"])
    examples, asked = tokenizer.decode(world.prompts([pair])["input_ids"][0]).rsplit("\n", 1)
    assert asked == "<7>+<5>=" and [line[3] + line[9] for line in examples.split("\n")] == ["++", "--", "**"]
    key_model = AutoModelForCausalLM.from_pretrained(run / "m_A")
    respelled = recipe.readers.respell(key_model, small, world, lm.config.vocab_size)
    with torch.no_grad():
        states = [
            model.model(torch.tensor([one.spell(pair[0])])).last_hidden_state
            for model, one in ((key_model, small), (respelled, world))
        ]
    assert torch.equal(*states)
    with pytest.raises(mmattn.errors.ConfigError, match=r"data\.values=10"):
        recipe.data.World(settings.model_copy(update={"values": 11}), 0, "cpu", tokenizer)


def test_controls_need_the_composition_whose_size_they_have(recipe: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add it to ways"):
        recipe.train.main({"out": str(tmp_path / "run"), "ways": ["substitution"]})
    recipe.settings.Config(ways=["substitution"], controls=[])


def test_readers_attend_to_no_answer(recipe: SimpleNamespace, world: Any) -> None:
    readers, settings = recipe.readers, recipe.settings
    small = settings.ModelSettings(**LM)
    key_model, arithmetic_model = (recipe.train.build(world, small, seed) for seed in (3, 5))
    adapter = settings.AdapterSettings(num_heads=2, head_dim=6)
    pair = world.expressions("KV-arithmetic", 1, 0)[0].pair("KV-arithmetic")
    batch = world.batch([[pair], [(pair[0], ["3"])]])
    at = len(pair[0]) - 1
    fused = settings.FusedSettings(hidden_dim=5)
    for kind, given in ((readers.Composed, adapter), (readers.Fused, fused)):
        reader = kind(arithmetic_model, [key_model], given)
        with torch.no_grad():
            for name, parameter in reader.model.adapters.named_parameters():
                parameter.fill_(0.7) if "gate" in name else parameter.add_(torch.randn_like(parameter) * 0.3)
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            first, second = reader.model(**given, **reader.beside(batch)).logits[:, at]
        assert torch.allclose(first, second, atol=1e-5), kind.__name__
        assert reader.write(world.prompts([pair]), 3).shape == (1, 3)
        reader.model.unload()


def test_an_expanded_model_says_the_same_and_caches_what_the_last_layer_computed(
    recipe: SimpleNamespace, world: Any
) -> None:
    lm = recipe.train.build(world, recipe.settings.ModelSettings(**LM), 3)
    made, ids = recipe.readers.expand(lm), torch.tensor([[5, 9, 3, 7]])
    with torch.no_grad():
        assert torch.equal(made(ids).logits, lm(ids).logits)
        states = lm(ids, output_hidden_states=True).hidden_states
        layer = made.model.layers[-1]
        value = made(ids, use_cache=True).past_key_values.layers[-1].values
        last = lm.model.layers[2](states[2], position_embeddings=lm.model.rotary_emb(states[2], torch.arange(4)[None]))
        wanted = layer.self_attn.v_proj(layer.input_layernorm(last))
    assert torch.allclose(value.transpose(1, 2).flatten(2), wanted, atol=1e-5)
