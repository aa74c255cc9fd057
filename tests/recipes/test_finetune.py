"""The recipe of fine-tuning: both kinds of hosts from one file of settings each, controls, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from pydantic import ValidationError
from safetensors import safe_open

import mmattn
from mmattn import training
from mmattn.errors import AdapterFileError, ConfigError, MissingExtraError, TextError
from mmattn.recipes import read_settings
from mmattn.training.lora import load_lora
from tests.cli.running import call
from tests.recipes.runs import settings_of

RECIPE = "finetune"
ROOT = Path(__file__).parents[2]
FLORA = ROOT / "assets" / "flora"


def short(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that takes seconds."""
    settings = settings_of("finetune", folder) | {"out": str(folder / "run")}
    if changes.get("host") == "unet":
        for name in ("lm", "adapter", "caption"):
            del settings[name]
    return settings | changes


def tiny_lm(recipe: SimpleNamespace, **changes: Any) -> tuple[Any, Any]:
    """Settings with the shipped language model, and their arguments."""
    settings = recipe.settings.Config(lm="assets/lm", device="cpu", **changes)
    return settings, settings.arguments()


@pytest.mark.slow
class TestLanguage:
    def test_its_files(self, run: Path) -> None:
        assert {path.name for path in run.iterdir()} == {
            "adapter", "attention.safetensors", "checkpoints", "checkpoints_lora", "config.resolved.yaml", "loss.png",
            "metrics.jsonl", "samples.txt", "table.json", "table.md",
        }  # fmt: skip
        for name in ("adapter", "lora"):
            lines = [line for line in training.read_metrics(run / "metrics.jsonl") if line["model"] == name]
            for metric in ("loss", "eval_right_loss"):
                assert [line["step"] for line in lines if metric in line][:2] == [2, 4]
        assert len((run / "samples.txt").read_text().splitlines()) == 2
        assert {path.name for path in (run / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-4"}

    def test_the_metrics_show_the_adapter(self, run: Path) -> None:
        """Gates, gradients, attention, throughput, and the loss with other rows' memories at each evaluation."""
        lines = training.read_metrics(run / "metrics.jsonl")
        first, last = (line for line in lines if line["model"] == "adapter" and "loss" in line)
        layers = ["layer_2", "layer_5"]
        for kind in ("gate", "feed_forward_gate", "gradients", "memory_attention"):
            assert [name for name in last if name.startswith(f"{kind}/layer")] == [f"{kind}/{one}" for one in layers]
        assert 0 == first["gate/layer_2"] < last["gate/layer_2"] and last["tokens_per_second"] > 0
        names = ("eval_right_loss", "eval_shuffled_loss")
        right, shuffled = ([line[name] for line in lines if name in line][:2] for name in names)
        assert len(right) == 2 and right != shuffled
        assert not any("eval_loss" in line for line in lines if line["model"] == "adapter"), (
            "each loss names its memories"
        )
        lora = [line for line in lines if line["model"] == "lora"]
        assert not any("/" in name or "shuffled" in name for line in lora for name in line), "it has no memory"

    def test_no_memory_is_the_host(self, recipe: SimpleNamespace, run: Path) -> None:
        rows = {row["name"]: row["loss"] for row in json.loads((run / "table.json").read_text())["rows"]}
        settings = recipe.settings.Config(**short(run.parent))
        _, held_out = training.split_rows(training.read_rows(FLORA, split="train"), 2, 0)
        host = recipe.language.Language(settings, settings.arguments())
        total, count = training.sum_nats(host.lm, host.collator(text_only=True).batch(list(held_out)))
        assert rows["adapter, no memory"] == pytest.approx(float(total.detach()) / count, rel=1e-5)

    def test_its_adapter_captions(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = call(capsys, "caption", FLORA / "daffodil.png", "--adapter", run / "adapter")
        assert code == 0 and out.startswith(f"{FLORA / 'daffodil.png'}: "), err

    def test_again_is_nothing_and_anew_is_the_same(self, recipe: SimpleNamespace, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run, tmp_path / "run")
        file = Path("adapter") / "adapter_model.safetensors"
        asked = short(tmp_path, eval={"eval_steps": 2})
        asked["data"]["cache"] = str(run.parent / "cache")
        recipe.train.main(asked)
        assert (tmp_path / "run" / file).read_bytes() == (run / file).read_bytes()
        recipe.train.main(asked | {"resume": False})
        assert (tmp_path / "run" / file).read_bytes() == (run / file).read_bytes()
        with pytest.raises(ConfigError, match="seed: 0 there, 1 here"):
            recipe.train.main(asked | {"seed": 1})

    def test_a_lora_beside_the_adapter(self, recipe: SimpleNamespace, run: Path, tmp_path: Path) -> None:
        rows = [
            {"text": "It is red.", "passages": ["Roses are red.", "Violets are blue."]},
            {"text": "It is blue.", "prompt": "Say what it is:", "passage": "Violets are blue."},
            {"text": "It is not known."},
            {"text": "It is green.", "passage": "Grass is green."},
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        asked = short(tmp_path, lora={"rank": 2}, eval={"eval_steps": 0})
        asked["optim"]["bf16"] = True
        asked["data"] |= {"path": str(tmp_path / "rows.jsonl"), "held_out": 0}
        out = recipe.train.main(asked)
        assert (out / "lora" / "adapter_config.json").is_file() and not (out / "table.md").exists()
        with safe_open(out / "checkpoints" / "checkpoint-4" / "trained.safetensors", "pt") as file:
            names = list(file.keys())
        assert {name.split(".")[0] for name in names} == {"adapters", "host"}
        assert all("lora_" in name for name in names if name.startswith("host"))
        lm, _ = recipe.language.load_lm(*tiny_lm(recipe))
        model = mmattn.load(load_lora(lm, out / "lora"), out / "adapter")
        assert model.trainable_parameters()[0]
        with pytest.raises(AdapterFileError, match="has no pipeline_config.json"):
            mmattn.pipeline(out / "adapter")

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["int8", "bnb8", "bnb4"])
    def test_a_quantised_host(self, recipe: SimpleNamespace, run: Path, tmp_path: Path, kind: str) -> None:
        pytest.importorskip("torchao" if kind == "int8" else "bitsandbytes")
        asked = short(tmp_path, quantise=kind, lora={"rank": 2})
        asked["optim"]["bf16"] = True
        asked["data"]["cache"] = str(run.parent / "cache")
        out = recipe.train.main(asked)
        rows = {row["name"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
        own, lora = rows["adapter, its own memory"], rows["LoRA, text only"]
        assert lora["parameters"] == pytest.approx(own["parameters"], rel=0.05)
        assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows.values())
        assert len(mmattn.pipeline(out / "adapter")([FLORA / "daffodil.png"])) == 1

    @pytest.mark.parametrize(("kind", "package"), [("int8", "torchao"), ("bnb4", "bitsandbytes")])
    def test_a_quantising_library_that_is_missing(
        self, recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"{package} is needed here .* pip install 'mmattn\[quantised\]'"):
            recipe.language.load_lm(*tiny_lm(recipe, quantise=kind))


class TestData:
    @pytest.fixture
    def flowers(self, tmp_path: Path) -> Path:
        """Class folders of four flowers, in train and val, one picture of which is broken."""
        for split, each in (("train", 3), ("val", 1)):
            for name in ("daffodil", "snowdrop"):
                (tmp_path / "flowers" / split / name).mkdir(parents=True)
                for number in range(each):
                    with Image.open(FLORA / f"{name}.png") as picture:
                        picture.rotate(30 * number).save(tmp_path / "flowers" / split / name / f"{number}.png")
        broken = tmp_path / "flowers" / "train" / "daffodil" / "2.png"
        broken.write_bytes(broken.read_bytes()[:200])
        return tmp_path / "flowers"

    def test_class_folders_one_of_them_with_a_broken_picture(
        self, recipe: SimpleNamespace, flowers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = short(tmp_path, eval={"eval_steps": 0})
        asked["data"] |= {"path": str(flowers), "held_out": None, "template": "A painted {label}."}
        with pytest.raises(mmattn.errors.ImageError, match="2.png"):
            recipe.train.main(asked | {"data": asked["data"] | {"strict": True}})
        capsys.readouterr()
        out = recipe.train.main(asked)
        said = capsys.readouterr().out
        assert "num_rows: 6" in said and "held out, validation: " in said
        assert "5 rows to train on, 2 held out" in said
        assert said.count("1 left out, because it cannot be used (data.strict=true stops instead):") == 2
        broken = flowers / "train" / "daffodil" / "2.png"
        assert str(broken) in said and str(broken) in (out / "left_out.txt").read_text()
        assert len((out / "samples.txt").read_text().splitlines()) == 2

    def test_its_run_can_be_explored(self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        traces = mmattn.inspect.load_traces(run)
        assert len(traces) == 2 and all(trace.grid == (8, 8) and trace.picture for trace in traces)
        samples = (run / "samples.txt").read_text().splitlines()
        assert [line.split(": ", 1)[1] for line in samples] == [trace.title for trace in traces]
        code, out, err = call(capsys, "explore", run, "--out", tmp_path / "page.html")
        assert code == 0 and "page.html" in out, err

    def test_the_attention_to_passages(self, recipe: SimpleNamespace, tmp_path: Path) -> None:
        lm, tokenizer = recipe.language.load_lm(*tiny_lm(recipe))
        reader = mmattn.encoders.load_text_encoder(str(ROOT / "assets" / "clip"))
        passages = ["Roses are red.", "Violets are blue."]
        rows = Dataset.from_list([{"text": "It is red.", "prompt": "What is it?", "passages": passages}])
        rows = training.encode_dataset(rows, tmp_path, passages=reader).with_format("torch")
        model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=reader.dim, every=3, num_heads=2, head_dim=8))
        (trace,) = recipe.language.trace_texts(model, tokenizer, list(rows), ["It is blue."], None)
        assert trace.sources == tuple(passages) and "".join(trace.words).strip().startswith("It is blue.")
        resampled = mmattn.GatedAdapter(
            memory_dim=reader.dim, every=3, num_heads=2, head_dim=8, resampler=mmattn.Resampler(num_latents=2)
        )
        hidden = mmattn.attach(model.unload(), resampled)
        assert recipe.language.trace_texts(hidden, tokenizer, list(rows), ["It is blue."], None) == []


class TestUNet:
    @pytest.mark.slow
    def test_it_learns_to_draw(self, recipe: SimpleNamespace, tmp_path: Path) -> None:
        pictures = tmp_path / "pictures"
        pictures.mkdir()
        for number, name in enumerate(("zero", "one", "two", "three", "four")):
            shutil.copy(ROOT / "assets" / "digits" / "bold.png", pictures / f"{number}.png")
            (pictures / f"{number}.txt").write_text(f"a {name}")
        asked = short(tmp_path, host="unet")
        asked["data"]["path"] = str(pictures)
        out = recipe.train.main(asked)
        rows = {row["name"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
        assert len(rows) == 4 and rows["adapter, its own memory"]["loss"] != rows["adapter, no memory"]["loss"]
        with Image.open(out / "samples.png") as samples:
            assert min(samples.size) > 100
        assert rows["adapter, its own memory"]["parameters"] == pytest.approx(
            rows["LoRA, text only"]["parameters"], rel=0.05
        )
        drawn = mmattn.pipeline(out / "adapter", device="cpu")("a two", pictures / "1.png")
        assert drawn.size == (16, 16), "as the folder of the run says"

    def test_words_it_never_saw(
        self, recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A text encoder that knows them reads the captions, and they are a part of the memory."""
        pictures = tmp_path / "pictures"
        pictures.mkdir()
        for number, text in enumerate(("a hippopotamus", "a crocodile", "a zebra", "a lion")):
            shutil.copy(ROOT / "assets" / "digits" / "bold.png", pictures / f"{number}.png")
            (pictures / f"{number}.txt").write_text(text)
        asked = short(tmp_path, host="unet", text_encoder="assets/clip", eval={"eval_steps": 0})
        asked["data"] |= {"path": str(pictures), "held_out": 1}
        asked["optim"] |= {"max_steps": 2}
        with pytest.raises(mmattn.errors.TextError, match="has words this UNet's text encoder never saw"):
            recipe.train.main(asked | {"captions": "host"})
        out = recipe.train.main(asked)
        assert "captions are read by assets/clip, as a part of the memory" in capsys.readouterr().out
        assert read_settings(out / "config.resolved.yaml")["captions"] == "memory"
        settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
        text_tower = mmattn.encoders.load_text_encoder(str(ROOT / "assets" / "clip"))
        assert settings["encoder"] == text_tower.fingerprint, "no picture is an example for itself"
        zebra, lion = text_tower(["a zebra", "a lion"]).tokens
        assert not torch.equal(zebra, lion)


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"optim": {"stepz": 3}}, "stepz"),
            ({"nonsense": 1}, "nonsense"),
            ({"host": "unet", "lm": "gpt2"}, "lm is for another host"),
            ({"decoupled": {"tokens": 4}}, "decoupled is for another host"),
            ({"captions": "memory"}, "captions is for another host"),
            ({"host": "unet", "optim": {"torch_compile": True}}, "optim.torch_compile is for another host"),
            ({"fsdp": True, "optim": {"cache_hidden_states": True}}, "leave cache_hidden_states out"),
        ],
    )
    def test_unknown_or_useless_ones_are_refused(
        self, recipe: SimpleNamespace, changes: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ValidationError, match=said):
            recipe.settings.Config(**changes)

    def test_a_contradiction_is_named_without_all_settings(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = ROOT / "recipes" / "finetune" / "config_unet.yaml"
        code, _, err = call(capsys, "train", config, "lm=gpt2")
        assert (code, err) == (2, "mmattn: settings refused: lm is for another host than host: unet\n")

    def test_data_without_any_memory(self, recipe: SimpleNamespace, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"text": "alone"}\n{"text": "alone, too"}\n')
        asked = short(tmp_path)
        asked["data"] = {"path": str(tmp_path / "rows.jsonl"), "held_out": 1}
        with pytest.raises(ConfigError, match="no row of .* has a picture, a passage or a memory"):
            recipe.train.main(asked)


class TestBeforeTheFirstStep:
    """Invariant 131: what can be known before the first step is not found out after the last one."""

    @pytest.fixture
    def short_lm(self, tmp_path: Path) -> Path:
        """A language model with 64 learned positions."""
        from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

        tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "lm")
        torch.manual_seed(0)
        sizes = GPT2Config(vocab_size=2048, n_positions=64, n_embd=32, n_layer=3, n_head=2, bos_token_id=0)
        GPT2LMHeadModel(sizes).save_pretrained(tmp_path / "lm")
        tokenizer.save_pretrained(tmp_path / "lm")
        return tmp_path / "lm"

    def test_a_language_model_without_room_for_the_captions(
        self, recipe: SimpleNamespace, short_lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Invariant 131: they are shorter, in the samples and in the pipeline of the adapter, and it says so."""
        asked = short(tmp_path, lm=str(short_lm), eval={"eval_steps": 0}, caption={})
        recipe.train.main(asked)
        assert "at most 63 tokens instead of 64" in capsys.readouterr().out
        assert (tmp_path / "run" / "samples.txt").read_text()
        assert mmattn.pipeline(tmp_path / "run" / "adapter")(FLORA / "daffodil.png") is not None

    def test_a_prompt_without_room_is_refused(self, recipe: SimpleNamespace, short_lm: Path, tmp_path: Path) -> None:
        """Invariant 131."""
        asked = short(tmp_path, lm=str(short_lm), caption={"prompt": "a flower " * 40})
        with pytest.raises(TextError, match="leave no room to write in the 64 of"):
            recipe.train.main(asked)
        assert not (tmp_path / "run" / "checkpoints").exists()

    @pytest.mark.parametrize("package", ["peft", "matplotlib"])
    def test_what_a_control_or_a_plot_needs_is_missing(
        self, recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        """Invariant 131."""
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=package):
            recipe.train.main(short(tmp_path))
        assert not (tmp_path / "run" / "checkpoints").exists()
