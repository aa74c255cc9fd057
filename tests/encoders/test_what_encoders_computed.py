"""What an encoder computed before serves only the encoder that would compute it now: indexes, rows, fingerprints."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.data.row import Row
from mmattn.data.row_memories import RowMemories
from mmattn.encoders import HybridEncoder, NameEncoder, StyleEncoder, StyleNetwork, TextEncoder
from tests.computed import Ask, Cache, Change, Subject
from tests.computed_changes import WAYS, setting_changes
from tests.data.encoded_rows import Eye
from tests.tiny_texts import save_encoder

TEXTS = ["the bluebell", "flowers in spring", "woods", "in the woods in spring the flowers"]
QUERIES = ["a bluebell in the woods", "spring"]


@functools.cache
def _folder() -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return str(save_encoder(Path(mkdtemp())))


def text(settings: dict[str, Any] | None = None, **options: Any) -> Subject:
    """An encoder of texts; `settings` are of the config of its network, for equal weights."""
    folder = _folder()
    if settings is not None:
        folder = mkdtemp()
        for file in Path(_folder()).iterdir():
            Path(folder, file.name).write_bytes(file.read_bytes())
        config = Path(folder, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    encoder = TextEncoder(folder, **options)
    return Subject(encoder.model, model=encoder)


def hybrid() -> Subject:
    encoder = HybridEncoder(_folder(), ngrams=31)
    return Subject(encoder.model.model, model=encoder)


def names() -> Subject:
    encoder = NameEncoder(_folder(), width=29, common=0.3)
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


def _scores(index: mmattn.Index, encoder: Any) -> Tensor:
    hits = index.search(QUERIES, top_k=len(TEXTS), encoder=encoder)
    order = torch.tensor([sorted(range(len(ids)), key=ids.__getitem__) for ids in hits.ids])
    return torch.cat(
        [hits.scores.gather(1, order), hits.vectors.gather(1, order[..., None].expand_as(hits.vectors)).flatten(1)], 1
    )


@contextmanager
def _index(subject: Subject, folder: Path) -> Iterator[Ask]:
    index = mmattn.Index.build(TEXTS, encoder=subject.model)
    yield lambda: _scores(index, None)


@contextmanager
def _index_file(subject: Subject, folder: Path) -> Iterator[Ask]:
    if not (place := folder / "index").exists():
        mmattn.Index.build(TEXTS, encoder=subject.model).save(place)
    yield lambda: _scores(mmattn.Index.load(place, encoder=subject.model), None)


@contextmanager
def _rows(subject: Subject, folder: Path) -> Iterator[Ask]:
    def ask() -> Tensor:
        rows = [Row(one, passages=(one,)) for one in TEXTS]
        return RowMemories(folder / "rows", passages=subject.model).of(rows).tokens

    yield ask


@contextmanager
def _pictures(subject: Subject, folder: Path) -> Iterator[Ask]:
    pictures = []
    for seed in range(3):
        place = folder / f"{seed}.png"
        _paint(place, seed)
        pictures.append(Row("a picture", images=(str(place),)))
    yield lambda: RowMemories(folder / "rows", pictures=subject.model).of(pictures).tokens


def _paint(place: Path, seed: int) -> None:
    from PIL import Image

    pixels = torch.randint(256, (6, 4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(place)


def _nothing(subject: Subject) -> None:
    """An encoder is whole as it was made."""


def _cache(name: str, make: Callable[..., Subject], opened: Callable[..., AbstractContextManager[Ask]]) -> Cache:
    return Cache(name, make, _nothing, opened, frozenset({"host"}), is_file=opened is not _index)


CACHES = [
    *[_cache(f"index, {make.__name__}", make, _index) for make in (text, hybrid, names)],
    *[_cache(f"index file, {make.__name__}", make, _index_file) for make in (text, hybrid, names)],
    *[_cache(f"rows, {make.__name__}", make, _rows) for make in (text, hybrid)],
    *[_cache(f"rows, {make.__name__}", make, _pictures) for make in (eye, style)],
]
OF_TEXT = [
    Change("pooling", lambda subject: setattr(subject.model, "pooling", "max"), is_of_host=False),
    Change("normalize", lambda subject: setattr(subject.model, "normalize", False), is_of_host=False),
    Change("max_length", lambda subject: setattr(subject.model, "max_length", 4), is_of_host=False),
]
OF_PICTURES = [Change("pooled", lambda subject: setattr(subject.model, "pooled", True), is_of_host=False)]
CALL = [Change("autocast", lambda _: torch.autocast("cpu", torch.bfloat16), is_of_host=False)]
WEIGHTS = [Change(name, lambda subject, way=way: way(subject.host)) for name, way in WAYS.items()]


def changes_of(cache: Cache) -> list[Change]:
    """Return the changes that can meet a cache."""
    settings = setting_changes(cache.make().host)
    more = OF_TEXT if cache.make is text else OF_PICTURES if cache.make is eye else []
    return [*WEIGHTS, *settings, *CALL, *more]
