"""What an encoder computed before serves only the encoder that would compute it now: indexes, rows, fingerprints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor

import mmattn
from mmattn.encoders import NameEncoder, StyleEncoder, StyleNetwork, TextEncoder
from mmattn.errors import MmattnError
from mmattn.training import encode_dataset, stack_memories
from tests.computed import Ask, Cache, Change, Subject, all_of, outcome, outcome_of_files
from tests.computed_changes import WAYS, config_changes
from tests.data.encoded_rows import Eye
from tests.tiny_texts import save_encoder

pytestmark = pytest.mark.filterwarnings("ignore:. texts are longer than:UserWarning")
TEXTS = ["the bluebell", "flowers in spring", "woods", "in the woods in spring the flowers"]
QUERIES = ["a bluebell in the woods", "spring"]


@functools.cache
def _files() -> dict[str, bytes]:
    """The files of a tiny text encoder."""
    with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return {file.name: file.read_bytes() for file in save_encoder(Path(folder)).iterdir()}


@contextmanager
def _folder(settings: dict[str, Any] | None = None) -> Iterator[str]:
    """A folder with these files, and with other settings in the config."""
    with TemporaryDirectory() as folder:
        for name, content in _files().items():
            Path(folder, name).write_bytes(content)
        config = Path(folder, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | (settings or {})))
        yield folder


def text(settings: dict[str, Any] | None = None, **options: Any) -> Subject:
    """An encoder of texts; `settings` are of the config of its network, for equal weights."""
    with _folder(settings) as folder:
        encoder = TextEncoder(folder, **options)
    return Subject(encoder.model, model=encoder)


def names() -> Subject:
    with _folder() as folder:
        encoder = NameEncoder(folder, width=29, common=0.3)
    encoder.fit(QUERIES, TEXTS[:2])
    return Subject(encoder.model.model, model=encoder)


def eye() -> Subject:
    encoder = Eye()
    return Subject(encoder.model, model=encoder)


def style() -> Subject:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        encoder = StyleEncoder(StyleNetwork(3), 16)
    return Subject(encoder.model, model=encoder)


# Questions -----------------------------------------------------------------------------------------------------------


def _scores(index: mmattn.Index) -> Tensor:
    hits = index.search(QUERIES, top_k=len(TEXTS))
    order = torch.tensor([sorted(range(len(ids)), key=ids.__getitem__) for ids in hits.ids])
    return torch.cat(
        [hits.scores.gather(1, order), hits.vectors.gather(1, order[..., None].expand_as(hits.vectors)).flatten(1)], 1
    )


@contextmanager
def _index(subject: Subject, folder: Path) -> Iterator[Ask]:
    index = mmattn.Index.build(TEXTS, encoder=subject.model)
    yield lambda: _scores(index)


@contextmanager
def _index_file(subject: Subject, folder: Path) -> Iterator[Ask]:
    if not (place := folder / "index").exists():
        mmattn.Index.build(TEXTS, encoder=subject.model).save(place)
    yield lambda: _scores(mmattn.Index.load(place, encoder=subject.model))


@contextmanager
def _rows(subject: Subject, folder: Path) -> Iterator[Ask]:
    rows = Dataset.from_dict({"passage": TEXTS})
    yield lambda: _stacked(encode_dataset(rows, folder / "rows", passages=subject.model))


@contextmanager
def _pictures(subject: Subject, folder: Path) -> Iterator[Ask]:
    for seed in range(3):
        _paint(folder / f"{seed}.png", seed)
    rows = Dataset.from_dict({"image": [str(folder / f"{seed}.png") for seed in range(3)]})
    yield lambda: _stacked(encode_dataset(rows, folder / "rows", pictures=subject.model))


def _stacked(rows: Any) -> Tensor:
    memory = stack_memories(rows.with_format("torch"))
    assert memory is not None
    return memory.tokens


def _paint(place: Path, seed: int) -> None:
    pixels = torch.randint(256, (6, 4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(place)


def _nothing(subject: Subject) -> None:
    """An encoder is whole as it was made."""


def _cache(name: str, make: Callable[..., Subject], opened: Callable[..., AbstractContextManager[Ask]]) -> Cache:
    return Cache(name, make, _nothing, opened, frozenset({"host"}), is_file=opened is not _index)


CACHES = [
    *[_cache(f"index, {make.__name__}", make, _index) for make in (text, names)],
    *[_cache(f"index file, {make.__name__}", make, _index_file) for make in (text, names)],
    *[_cache(f"rows, {make.__name__}", make, _rows) for make in (text, names)],
    *[_cache(f"rows, {make.__name__}", make, _pictures) for make in (eye, style)],
]
BY_NAME = {cache.name: cache for cache in CACHES}
#: Caches whose first pairs run with every test.
_QUICK = ("index, text", "rows, eye")
OF_TEXT = [
    Change("pooling", lambda subject: setattr(subject.model, "pooling", "max"), is_of_host=False),
    Change("normalize", lambda subject: setattr(subject.model, "normalize", False), is_of_host=False),
    Change("max_length", lambda subject: setattr(subject.model, "max_length", 4), is_of_host=False),
]
OF_PICTURES = [Change("pooled", lambda subject: setattr(subject.model, "pooled", True), is_of_host=False)]
WEIGHTS = [Change(name, lambda subject, way=way: way(subject.host)) for name, way in WAYS.items()]


def _pairs() -> Iterator[Any]:
    for cache in CACHES:
        more = OF_TEXT if cache.make is text else OF_PICTURES if cache.make is eye else []
        # The network of an eye is one convolution, with no parts to replace.
        for change in [one for one in [*WEIGHTS, *more] if (cache.make, one.name) != (eye, "modules replaced")]:
            is_quick = cache.name in _QUICK and change.name in ("AdamW fused", "new Parameters", "pooling", "pooled")
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(cache, change, id=f"{cache.name}-{change.name}", marks=marks)


@pytest.mark.parametrize(("cache", "change"), list(_pairs()))
def test_an_encoder_that_has_changed_is_noticed(cache: Cache, change: Change, tmp_path: Path) -> None:
    """Invariant 202."""
    outcome(cache, change, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index file, text", "rows, text"])
def test_an_encoder_of_equal_weights_and_other_settings_takes_up_no_files(name: str, tmp_path: Path) -> None:
    """Invariant 202: its own, and every field of the config of its network."""
    cache = BY_NAME[name]
    settings = [{"settings": one} for one in config_changes(text().host.config) if _loads(one)]
    settings += [{"pooling": "cls"}, {"normalize": False}, {"max_length": 4}]
    cases = {str(one): lambda folder, one=one: outcome_of_files(cache, folder, {}, one) for one in settings}
    all_of(cases, tmp_path, least=5)


def _loads(settings: dict[str, Any]) -> bool:
    try:
        text(settings)
    except MmattnError:
        return False
    return True
