"""`mmattn encode`: the memories of rows, encoded once into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmattn.errors import ConfigError

if TYPE_CHECKING:
    from mmattn.training import EncodedDataset


def encode(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of pictures, a .jsonl file, a dataset of Hugging Face, tars of webdataset, a Lance dataset.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the encoded dataset.")],
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
    dtype: Annotated[str, typer.Option(help="Of the vectors: float16, bfloat16, float32, or int8.")] = "float16",
    append: Annotated[bool, typer.Option("--append", help="Add the rows to a dataset of others.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at what cannot be used, instead of naming it and leaving it out.")
    ] = False,
    split: Annotated[str | None, typer.Option(help="Of a dataset, or of folders train, val, test.")] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read a dataset on the hub as it arrives.")] = False,
    columns: Annotated[
        list[str] | None, typer.Option("--columns", metavar="KEY=NAME", help="Which column of a dataset is which.")
    ] = None,
    template: Annotated[str | None, typer.Option(help='Of class folders, such as "A photo of a {label}."')] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures or passages encoded at once.")] = 32,
    executor: Annotated[str, typer.Option(help="What encodes: local, or ray.")] = "local",
    device: Annotated[str, typer.Option(help="auto, or cpu.")] = "auto",
) -> None:
    """Encode the memories of rows into a folder, from which `mmattn train CONFIG data.path=FOLDER` reads them.

    Each picture and passage is encoded once, whatever the number of rows that show it. Killed at any moment, the same
    command goes on. Several processes share the work: torchrun --nproc-per-node 2 -m mmattn encode SOURCE -o FOLDER.
    """
    from mmattn.encoders.base import load_image_encoder, load_text_encoder
    from mmattn.models import resolve
    from mmattn.models.loading import without_progress_bars
    from mmattn.training import EncodedDataset, encode_rows, end_training, make_accelerator, memory_kinds, read_rows

    rows = read_rows(
        str(resolve(source)),
        split=split,
        streaming=streaming,
        columns=dict(map(_pair, columns)) if columns else None,
        template=template,
        skip_broken=not strict,
    )
    if isinstance(rows, EncodedDataset):
        raise ConfigError(f"{source} is encoded already: give the rows that are to be encoded")
    accelerator = make_accelerator(device=device)
    accelerator.print(f"{source}: {rows.summary}")
    kinds, pictures, passages = memory_kinds(rows), None, None
    if not kinds:
        raise ConfigError(f"no row of {source} has a picture, a passage or a memory: there is nothing to encode")
    with without_progress_bars():
        if "pictures" in kinds:
            pictures = load_image_encoder(encoder, accelerator.device, pooled=pooled)
        if "passages" in kinds:
            passages = load_text_encoder(text_encoder, pooling, accelerator.device)
    dataset = encode_rows(
        rows,
        out,
        pictures=pictures,
        passages=passages,
        dtype=dtype,
        source=source,
        encoder_names={"pictures": encoder, "passages": text_encoder},
        append=append,
        strict=strict,
        batch_size=batch_size,
        executor=executor,
        progress=accelerator.is_main_process,
    )
    accelerator.print(_summary(dataset, out))
    end_training(accelerator)


def _pair(text: str) -> tuple[str, str]:

    key, sign, name = text.partition("=")
    if not (key and sign and name):
        raise ConfigError(f"--columns takes KEY=NAME, such as text=caption; got {text!r}")
    return key, name


def _summary(dataset: EncodedDataset, out: Path) -> str:
    """Return what was encoded, what storing it lost, and what was left out."""
    from mmattn.data.folders import first_few

    size = round(dataset.row_bytes * len(dataset))
    lines = [f"{dataset} in {out}: {size:,} bytes, relative error {dataset.manifest.relative_error:.1e}"]
    if dataset.left_out:
        lines += [f"{len(dataset.left_out)} left out, because it cannot be used:", first_few(dataset.left_out)]
    return "\n".join(lines)
