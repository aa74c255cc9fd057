"""The comparison of ways: nothing that is asked can be guessed, every way trains as many parameters, with controls."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import mmattn
from tests.recipes.runs import WAY_ROWS, settings_of
from tests.tiny_texts import tiny_tokenizer

RECIPE = "ways"


@pytest.fixture(scope="module")
def small(finished: Callable[[str], Path], run_folder: Path) -> dict[str, Any]:
    """Settings of runs that take seconds, with a reader that has hardly learned to read."""
    finished("ways reader")
    settings = settings_of("ways passages", run_folder)
    return {name: value for name, value in settings.items() if name not in ("task", "out")}


@pytest.fixture
def texts(recipe: SimpleNamespace, small: dict[str, Any]) -> Any:
    """Requests about passages."""
    config = recipe.settings.Config(**small, task="passages")
    return recipe.texts.Texts(config, *recipe.reader.load_lm(config, torch.device("cpu")))


def test_the_reader(recipe: SimpleNamespace, small: dict[str, Any], tmp_path: Path) -> None:
    """A run leaves the reader and how well it reads; without one nothing is read, and the error says what to run."""
    content = json.loads((Path(small["texts"]["lm"]).parent / "table.json").read_text())
    again = {**small, "task": "reader", "reader": {"lm": small["texts"]["lm"]}, "out": str(tmp_path / "measured")}
    measured = json.loads((recipe.train.main(again) / "table.json").read_text())
    assert (measured["rows"], measured["parameters"]) == (content["rows"], content["parameters"]), "of a trained one"
    with pytest.raises(mmattn.errors.ConfigError, match=r"config_reader\.yaml"):
        recipe.train.main({**small, "texts": {"lm": str(tmp_path / "none")}, "out": str(tmp_path / "run")})


def _tokenizer(pieces: str) -> PreTrainedTokenizerFast:
    """A BPE whose pieces are bytes, as GPT-2's, or characters with a mark for spaces, as Llama 2's."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    if pieces == "bytes":
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    random = Random(0)
    words = ["home", "friend", "food", "colour", "trade", "tool", "tree", "music", "unheardofword", "Up", "x1"]
    words += ["".join(random.sample("abcdefghijklmno", 5)) for _ in range(90)]
    texts = [
        f"A {first} {second} ? {third}"
        for first, second, third in zip(words, words[3:] + words[:3], words[7:] + words[:7], strict=True)
    ]
    special = ["<s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=["."], show_progress=False)
    raw.train_from_iterator(texts * 5, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("pieces", ["bytes", "characters"])
def test_words_of_another_language_model(recipe: SimpleNamespace, pieces: str) -> None:
    """Each word is the token that its tokenizer makes of it in a text; words of several tokens are not among them."""
    tokenizer = _tokenizer(pieces)
    world = recipe.data.World(tokenizer)
    assert world.properties == ["home", "friend", "food", "colour", "trade", "tool", "tree", "music"]
    assert len(world.names) >= 64 and not {*world.names} & {*world.properties, "unheardofword"}
    reading = world.draw(Random(0), world.some_names(True), 2, 7, 3)
    text = "".join(f" {one.property} {one.name} {one.value}." for one in reading.passages[1])
    assert world.passages(reading)[1] == tokenizer(f".{text}", add_special_tokens=False)["input_ids"][-28:]
    asked = "".join(f" ? {one.property} {one.name} {one.value}." for one in reading.asked)
    assert world.questions(reading.asked)[0] == tokenizer(f".{asked}", add_special_tokens=False)["input_ids"][-15:]


def test_a_language_model_without_the_words(recipe: SimpleNamespace) -> None:
    with pytest.raises(mmattn.errors.ConfigError, match="0 of 8 properties.*take another language model"):
        recipe.data.World(tiny_tokenizer())


@pytest.mark.slow
def test_another_language_model(recipe: SimpleNamespace, small: dict[str, Any], tmp_path: Path) -> None:
    """A GPT-2 with its own tokenizer reads the texts; what its learned positions cannot do is refused beforehand."""
    tokenizer = _tokenizer("bytes")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 307, "vocab_size": len(tokenizer)}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    small = small | {"texts": {**small["texts"], "lm": str(tmp_path / "lm"), "recomputed_tokens": 0}}
    run = recipe.train.main({**small, "task": "facts", "out": str(tmp_path / "run")})
    rows = {row["name"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    assert list(rows) == [name for name in WAY_ROWS if "read again" not in name]
    with pytest.raises(mmattn.errors.ConditionError, match="cannot be turned to stand one after the other"):
        one_step = {**small, "optim": {"max_steps": 1, "per_device_train_batch_size": 3}}
        recipe.train.main({**one_step, "task": "documents", "out": str(tmp_path / "documents")})
    assert (tmp_path / "documents" / "metrics.jsonl").read_text() == "", "nothing was trained"


def test_the_last_statement_holds(recipe: SimpleNamespace) -> None:
    """A question is the beginning of a statement, and its answer what the last statement with it says."""
    world, random = recipe.data.World(recipe.reader.make_tokenizer()), Random(0)
    words = {token: word for word, token in world.ids.items()}
    anew = 0
    for _ in range(50):
        reading = world.draw(random, world.some_names(False), 3, 7, 6)
        said = [one for passage in reading.passages for one in passage]
        assert [len(passage) for passage in reading.passages] == [7, 7, 7] and len(reading.asked) == 6
        for one in reading.asked:
            same = [other for other in said if (other.property, other.name) == (one.property, one.name)]
            assert same[-1] == one
            anew += len({other.value for other in same}) > 1
        ids, labels = world.questions(reading.asked)
        assert [words[label] for label in labels if label != -100] == [one.value for one in reading.asked]
        first = reading.asked[0]
        assert [words[one] for one in ids[:5]] == ["?", first.property, first.name, first.value, "."]
        assert [ids[place] for place, label in enumerate(labels) if label != -100] == [x for x in labels if x != -100]
    assert anew > 20, "what was said before and holds no more is asked for, too"


def test_no_held_out_name_is_trained_on(texts: Any) -> None:
    """Rows to train on are about other names than those that are measured."""
    world = texts.world
    trained, held_out = set(world.some_names(False)), set(world.some_names(True))
    assert not trained & held_out and trained | held_out == set(world.names)
    seen = {one.name for rows in texts.batches() for row in rows for passage in row.passages for one in passage}
    words = {token: word for word, token in world.ids.items()}
    asked = {words[row[2]] for row in texts.asked.ids.tolist()}
    assert seen <= trained and asked <= held_out and seen and asked


def test_a_slot_is_the_state_before_a_token_and_its_embedding(texts: Any) -> None:
    """Each passage is read by itself: another passage in the request changes no slot of this one."""
    passages = texts.held_out.passages
    assert passages is not None
    slots = texts.held_out.slots.tokens.view(3, 3, 20, -1)
    ids = torch.tensor(passages[1][2])[None]
    with torch.no_grad():
        states = texts.lm(ids, output_hidden_states=True).hidden_states[1]
    wanted = torch.cat([states[:, 3], texts.lm.get_input_embeddings()(ids)[:, 4]], -1)
    assert torch.allclose(slots[1, 2, 4, :64], wanted[0], atol=1e-6)
    places = slots[0, :, 0, 64:]
    assert torch.equal(places, slots[1, :, 0, 64:]) and len(places.unique(dim=0)) == 3


@pytest.mark.parametrize("task", ["passages", "facts"])
def test_every_way_trains_as_many_parameters(
    recipe: SimpleNamespace, small: dict[str, Any], task: str, tmp_path: Path
) -> None:
    """Adapter and LoRA together are within 5 %; afterwards the language model is what it was, bit for bit."""
    config = recipe.settings.Config(**small, task=task, out=str(tmp_path / "run"))
    study = recipe.train.Study(config, mmattn.training.RunFolder(config.out), torch.device("cpu"))
    before = copy.deepcopy(study.task.lm.state_dict())
    for name, make in study.makers().items():
        way = make(study.task.lm, config.parameters)
        assert abs(way.parameters - 30_000) <= 1500, name
        batch = study.task.batch(next(iter(study.task.batches())))
        nats = way.nats(batch, batch.memories)
        assert torch.isfinite(nats).all() and int((nats > 0).sum()) == int((batch.labels != -100).sum())
        nats.sum().backward()
        found = [one for one in way.model.parameters() if one.requires_grad]
        assert any(one.grad is not None and bool(one.grad.any()) for one in found), name
        way.close()
        after = study.task.lm.state_dict()
        assert set(after) == set(before) and all(torch.equal(after[key], before[key]) for key in before), name
        assert not any(one.requires_grad for one in study.task.lm.parameters())


@pytest.mark.parametrize("recomputed_tokens", [0, 7, 20])
def test_what_is_trained_apart_is_what_is_read_apart(
    recipe: SimpleNamespace, texts: Any, recomputed_tokens: int
) -> None:
    """The mask of training and keys and values that were read before give the same logits; with all 20 tokens of
    passages read again they are those of the prompt."""
    way = recipe.ways.Passages(texts.lm, 30_000, recomputed_tokens)
    ids, mask = texts.asked.ids[:2], torch.ones_like(texts.asked.ids[:2])
    memories = texts.held_out[[0, 1]]
    trained = way.logits(ids, mask, memories)
    with torch.no_grad():
        read = way.logits(ids, mask, memories)
        together = recipe.ways.Prompt(texts.lm, None, 0).logits(ids, mask, memories)
    assert torch.isfinite(read).all() and torch.allclose(trained, read, atol=1e-5)
    assert torch.allclose(together, read, atol=1e-4) == (recomputed_tokens == 20)
    way.close()


@pytest.mark.slow
def test_pictures(recipe: SimpleNamespace, small: dict[str, Any], tmp_path: Path) -> None:
    """Ways that take vectors are compared on a folder of pictures; passages are for texts."""
    described, folder = {}, tmp_path / "pictures"
    for place, name in enumerate(("aster", "broom", "clover")):
        described[name] = [f"The {name} is a flower.", f"This is a {name}."]
        (folder / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (17, 19), (10 * place, 3 * number, 50)).save(folder / name / f"{number}.png")
    (tmp_path / "said.json").write_text(json.dumps(described))
    vision = {
        "encoder": "assets/clip",
        "data": {
            "path": str(folder), "descriptions": str(tmp_path / "said.json"), "held_out": 0.3,
            "cache": str(tmp_path / "cache"),
        },
    }  # fmt: skip
    run = recipe.train.main(
        {
            **small,
            "task": "pictures",
            "parameters": 300_000,
            "joined": {"layers": [1, 3]},
            "vision": vision,
            "optim": {"max_steps": 1, "per_device_train_batch_size": 2},
            "out": str(tmp_path / "run"),
        }
    )
    rows = {row["name"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    assert list(rows) == ["no memory", "LoRA, no memory", *WAY_ROWS[6:10]]
    assert all(abs(row["parameters"] - 300_000) <= 15_000 for row in rows.values() if row["parameters"])
