"""TextEncoder of a folder of sentence-transformers: its vectors, its prompts, its fingerprint, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model

import mmattn
from mmattn.encoders import TextEncoder
from mmattn.encoders.text import load_text_encoder
from mmattn.errors import AdapterFileError, ConfigError, IndexMismatchError, MissingExtraError, TextError
from tests.tiny_texts import VOCAB, WIDTH, tiny_tokenizer

library = pytest.importorskip("sentence_transformers", minversion="6")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
TEXTS = ["the woods", "In Spring the bluebell flowers in the woods", "a", "Ünï 🌼", "flowers in the"]
NARROW = 5
QUERY, PASSAGE = "query: ", "a passage of the woods: "


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model whose tokenizer pads on the left, as that of Qwen3-Embedding."""
    torch.manual_seed(13)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 3}
    heads = {"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 131}
    model = Qwen3Model(Qwen3Config(vocab_size=VOCAB, **sizes, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(9)
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(folder)
    return folder


def save(inner: Path, folder: Path, parts: list[Any], prompts: Any = None, default: Any = None, **options: Any) -> Path:
    """Save an encoder of sentence-transformers; parts with weights are made here, by their functions."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(17)
        made = [part if isinstance(part, nn.Module) else part() for part in parts]
        transformer = modules.Transformer(str(inner), **options)
        model = library.SentenceTransformer(
            modules=[transformer, *made], device="cpu", prompts=prompts, default_prompt_name=default
        )
        model.save(str(folder))
    return folder


def theirs(folder: Path, texts: list[str], kind: str = "encode") -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = library.SentenceTransformer(str(folder), device="cpu")
        return getattr(model, kind)(texts, convert_to_tensor=True).clone()


def pool(*modes: str, **options: Any) -> Any:
    return modules.Pooling(WIDTH, modes[0] if len(modes) == 1 else modes, **options)


def dense(activation: Any = None) -> Any:
    return lambda: modules.Dense(WIDTH, NARROW, activation_function=activation or nn.Tanh())


#: Names of published models, or of what a folder asks for: the transformer, the modules behind it, and its options.
KINDS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "MiniLM": ("bert", [pool("mean"), modules.Normalize()], {}),
    "BGE": ("bert", [pool("cls"), modules.Normalize()], {}),
    "mean alone": ("bert", [pool("mean")], {}),
    "max": ("bert", [pool("max"), modules.Normalize()], {}),
    "SGPT": ("bert", [pool("weightedmean")], {}),
    "concatenated": ("bert", [pool("cls", "mean", "max"), modules.Normalize()], {}),
    "E5": (
        "bert", [pool("mean"), modules.Normalize()],
        {"prompts": {"query": QUERY, "document": PASSAGE}},
    ),
    "Qwen3-Embedding": (
        "qwen", [pool("lasttoken"), modules.Normalize()], {"prompts": {"query": QUERY, "document": ""}},
    ),
    "default prompt": ("bert", [pool("mean")], {"prompts": {"all": QUERY}, "default": "all"}),
    "INSTRUCTOR": (
        "bert", [pool("mean", include_prompt=False), modules.Normalize()],
        {"prompts": {"all": PASSAGE, "query": QUERY}, "default": "all"},
    ),
    "LaBSE": ("bert", [pool("cls"), dense(), modules.Normalize()], {}),
    "EmbeddingGemma": (
        "qwen", [pool("mean"), dense(nn.Identity()), modules.Normalize()],
        {"prompts": {"query": QUERY, "document": PASSAGE}},
    ),
    "short": ("bert", [pool("cls")], {"max_seq_length": 7}),
    "short and dense": ("bert", [pool("cls"), dense()], {"max_seq_length": 7}),
    "lower case": ("bert", [pool("mean")], {"do_lower_case": True}),
}  # fmt: skip


@pytest.fixture
def make(bert: Path, qwen: Path, tmp_path: Path) -> Callable[[str], Path]:
    def build(name: str) -> Path:
        inner, parts, options = KINDS[name]
        return save({"bert": bert, "qwen": qwen}[inner], tmp_path / name, parts, **options)

    return build


def close(got: mmattn.Memory, want: Tensor) -> None:
    assert got.tokens.isfinite().all() and got.tokens.shape == (len(want), 1, want.shape[1])
    torch.testing.assert_close(got.tokens[:, 0], want, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.* texts are longer than:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_vectors_are_those_of_the_folder(name: str, make: Callable[[str], Path]) -> None:
    """Invariant 166."""
    folder = make(name)
    encoder = TextEncoder(folder)
    assert encoder.dim == theirs(folder, ["a"]).shape[1]
    close(encoder.encode(TEXTS, batch_size=2), theirs(folder, TEXTS))
    close(encoder.encode_query(TEXTS), theirs(folder, TEXTS, "encode_query"))
    close(encoder.encode_document(TEXTS), theirs(folder, TEXTS, "encode_document"))
    assert encoder.encode([]).tokens.shape == (0, 1, encoder.dim)
    assert encoder.encode(TEXTS).sources == [[{"text": number}] for number in range(5)]
    with pytest.raises(TextError, match="text 1 is empty"):
        encoder.encode(["a", ""])
    again = load_text_encoder(str(folder), encoder.pooling)
    assert again.fingerprint == encoder.fingerprint == load_text_encoder(str(folder)).fingerprint
    # Vectors are constants of what is trained on them.
    weight = torch.ones(encoder.dim, requires_grad=True)
    (encoder.encode(TEXTS).tokens @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.* texts are longer than:UserWarning")
@pytest.mark.parametrize("name", ["BGE", "LaBSE", "INSTRUCTOR"])
def test_folders_of_earlier_versions(name: str, make: Callable[[str], Path]) -> None:
    """Invariant 166: settings of pooling one by one, lower case and length in `sentence_bert_config.json`."""
    folder = make(name)
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    keys = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens"}
    old = {key: mode == pooling["pooling_mode"] for mode, key in keys.items()}
    old |= {"word_embedding_dimension": WIDTH, "include_prompt": pooling["include_prompt"]}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(old))
    before = TextEncoder(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 11, "do_lower_case": True}))
    encoder = TextEncoder(folder)
    assert encoder.max_length == 11 and encoder.fingerprint != before.fingerprint
    close(encoder.encode(TEXTS), theirs(folder, TEXTS))
    names = json.loads((folder / "modules.json").read_text())
    for module in names:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (folder / "modules.json").write_text(json.dumps(names))
    assert TextEncoder(folder).fingerprint == encoder.fingerprint
    close(TextEncoder(folder).encode(TEXTS), theirs(folder, TEXTS))


def test_a_transformer_in_a_folder_of_its_own(make: Callable[[str], Path]) -> None:
    """Invariant 166: `0_Transformer`, as the first versions saved it."""
    folder = make("BGE")
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.move(folder / file, inner / file)
    (inner / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 31, "do_lower_case": False}))
    (folder / "sentence_bert_config.json").unlink()
    names = json.loads((folder / "modules.json").read_text())
    names[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(names))
    close(TextEncoder(folder).encode(TEXTS[:1]), theirs(folder, TEXTS[:1]))


def test_every_setting_is_in_the_fingerprint(make: Callable[[str], Path]) -> None:
    """Invariant 166: encoders whose vectors differ are told apart."""
    names = ("MiniLM", "BGE", "mean alone", "E5", "default prompt", "INSTRUCTOR", "short", "lower case")
    assert len({TextEncoder(make(name)).fingerprint for name in names}) == len(names)


def test_an_index_has_the_prompts_of_documents_and_queries(make: Callable[[str], Path]) -> None:
    """Invariant 166: entries are documents, searches are queries."""
    folder = make("E5")
    encoder = TextEncoder(folder)
    index = mmattn.Index.build(TEXTS, encoder=encoder)
    wanted = theirs(folder, TEXTS[:2], "encode_query") @ theirs(folder, TEXTS, "encode_document").T
    hits = index.search(TEXTS[:2], 5)
    torch.testing.assert_close(hits.scores, wanted.sort(1, descending=True).values, atol=1e-5, rtol=1e-5)
    with pytest.raises(IndexMismatchError):
        mmattn.Index(index.store, TextEncoder(make("MiniLM")))


def test_settings_of_the_caller_come_first(make: Callable[[str], Path]) -> None:
    """Invariant 166: a pooling or a length that is given counts; a layer that is there cannot be left out."""
    folder, bge = make("LaBSE"), make("BGE")
    plain = TextEncoder(folder, pooling="mean")
    assert plain.dim == WIDTH and plain.normalize
    torch.testing.assert_close(plain.encode(TEXTS).tokens, TextEncoder(make("MiniLM")).encode(TEXTS).tokens)
    assert TextEncoder(folder, pooling="none").encode(["the woods"]).length > 1
    raw = TextEncoder(bge, normalize=False).encode(TEXTS).tokens
    torch.testing.assert_close(nn.functional.normalize(raw, dim=-1), TextEncoder(bge).encode(TEXTS).tokens)
    assert not torch.allclose(raw.norm(dim=-1), torch.ones(5, 1))
    with pytest.raises(ConfigError, match="leave normalize=False out"):
        TextEncoder(folder, normalize=False)
    for one in (folder, bge):
        short = TextEncoder(one, max_length=7)
        with pytest.warns(UserWarning, match=r"1 texts are longer than 7 tokens and were cut: \[1\]"):
            assert short.encode(["a", "x" * 19]).batch == 2
    long = TextEncoder(make("default prompt"), max_length=len(QUERY) + 3)
    with pytest.warns(UserWarning, match=r"were cut: \[1\]"):
        long.encode(["a", "aaaaa"])


def test_without_sentence_transformers(make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 166: what the folder asks for is done or refused by name."""
    plain = {name: theirs(make(name), TEXTS) for name in ("MiniLM", "BGE", "mean alone", "max")}
    others = {name: make(name) for name in KINDS if name not in (*plain, "short", "lower case")}
    folders = {name: make(name) for name in plain}
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for name, want in plain.items():
        close(TextEncoder(folders[name]).encode(TEXTS), want)
    words = {
        "Qwen3-Embedding": "lasttoken pooling",
        "LaBSE": "Dense",
        "E5": "the prompt 'query'",
        "SGPT": "weightedmean",
    }
    for name, folder in others.items():
        with pytest.raises(MissingExtraError, match=words.get(name, "which sentence-transformers does")):
            TextEncoder(folder)


def test_folders_that_make_no_sense(make: Callable[[str], Path]) -> None:
    folder = make("LaBSE")
    names = (folder / "modules.json").read_text()
    for old, new, error, words in (
        ("sentence_transformers.base.modules.dense.Dense", "os.path.Dense", ConfigError, "names code"),
        ("2_Dense", "../2_Dense", ConfigError, "names code"),
        ("[", "{", AdapterFileError, "modules.json"),
        ("2_Dense", "2_None", AdapterFileError, "get the folder again"),
    ):
        assert old in names
        (folder / "modules.json").write_text(names.replace(old, new, 1))
        with pytest.raises(error, match=words):
            TextEncoder(folder)
    (folder / "modules.json").write_text(names)
    about = json.loads((folder / "config_sentence_transformers.json").read_text())
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about | {"model_type": "SparseEncoder"}))
    with pytest.raises(ConfigError, match="is a SparseEncoder"):
        TextEncoder(folder)
