"""`mmattn encode`: the memories of rows, encoded once into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmattn.errors import ConfigError


def encode(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of pictures, a .jsonl or .csv file, tars of webdataset, a dataset of Hugging Face.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of the encoded dataset; what is there is replaced.")
    ],
    encoder: Annotated[
        str,
        typer.Option(
            help='Of pictures: efficientnet-lite0, "timm:NAME", "torchvision:NAME:WEIGHTS FILE", '
            '"ViT-B-32:laion2b_s34b_b79k", or a folder.'
        ),
    ] = "efficientnet-lite0",
    text_encoder: Annotated[
        str, typer.Option(help="Of passages: minilm, any encoder of Hugging Face, or a folder of open_clip.")
    ] = "minilm",
    pooled: Annotated[bool, typer.Option("--pooled", help="One slot for each picture.")] = False,
    pooling: Annotated[
        str, typer.Option(help="Of passages: none (a slot for every token), mean, cls or max.")
    ] = "none",
    dtype: Annotated[str, typer.Option(help="Of the vectors: float16 or float32.")] = "float16",
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at what cannot be used, instead of naming it and leaving it out.")
    ] = False,
    split: Annotated[str, typer.Option(help="Of the dataset.")] = "train",
    columns: Annotated[
        list[str] | None, typer.Option("--columns", metavar="KEY=NAME", help="Which column of a dataset is which.")
    ] = None,
    template: Annotated[str | None, typer.Option(help='Of class folders, such as "A photo of a {label}."')] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures or passages encoded at once.")] = 32,
    num_proc: Annotated[int | None, typer.Option(help="Processes, as of `Dataset.map`.")] = None,
    device: Annotated[str, typer.Option(help="auto, or cpu.")] = "auto",
) -> None:
    """Encode the memories of rows into a folder, from which `mmattn train CONFIG data.path=FOLDER` reads them.

    The folder is a dataset of Hugging Face, `datasets.load_from_disk(FOLDER)`. Killed at any moment, the same command
    goes on at the shard it was making.
    """
    import shutil

    from mmattn.data.encoded import first_few
    from mmattn.encoders.images import load_image_encoder
    from mmattn.encoders.text import load_text_encoder
    from mmattn.models import resolve
    from mmattn.models.loading import without_progress_bars
    from mmattn.pipelines.build import default_device
    from mmattn.training import (
        drop_errors,
        encode_dataset,
        encoding_of,
        memory_kinds,
        read_rows,
    )

    named = dict(map(_pair, columns)) if columns else None
    rows = read_rows(str(resolve(source)), split=split, columns=named, template=template)
    if encoding_of(rows) is not None:
        raise ConfigError(f"{source} is encoded already: give the rows that are to be encoded")
    kinds = memory_kinds(rows)
    if not kinds:
        raise ConfigError(f"no row of {source} has a picture, a passage or a memory: there is nothing to encode")
    place = "cpu" if device == "cpu" else default_device()
    encoders: dict[str, Any] = {}
    with without_progress_bars():
        if "pictures" in kinds:
            encoders["pictures"] = load_image_encoder(encoder, place, pooled=pooled)
        if "passages" in kinds:
            encoders["passages"] = load_text_encoder(text_encoder, pooling, place)
    shards = out.with_name(f"{out.name}.shards")
    encoded = encode_dataset(
        rows,
        shards,
        dtype=dtype,
        names={"pictures": encoder, "passages": text_encoder},
        strict=strict,
        batch_size=batch_size,
        num_proc=num_proc,
        **encoders,
    )
    left_out: list[str] = []
    if not strict:
        encoded, left_out = drop_errors(encoded)
    encoded.save_to_disk(out)
    shutil.rmtree(shards)
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{encoded} in {out}: {size:,} bytes")
    if left_out:
        typer.echo(f"{len(left_out)} left out, because it cannot be used:\n{first_few(left_out)}")


def _pair(text: str) -> tuple[str, str]:

    key, sign, name = text.partition("=")
    if not (key and sign and name):
        raise ConfigError(f"--columns takes KEY=NAME, such as text=caption; got {text!r}")
    return key, name
