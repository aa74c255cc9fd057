"""Commands that encode once: `mmattn encode` the memories of rows, `mmattn index` texts to be searched."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any

import typer

from mmattn.errors import AdapterFileError, ConfigError, MissingExtraError, TextError, import_extra


def encode(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of pictures, a .jsonl or .csv file, webdataset tars, or a Hugging Face dataset.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the encoded dataset; an existing one is replaced.")
    ],
    encoder: Annotated[
        str,
        typer.Option(
            help='Image encoder: efficientnet-lite0, "timm:NAME", "torchvision:NAME:WEIGHTS FILE", '
            '"ViT-B-32:laion2b_s34b_b79k", or a folder.'
        ),
    ] = "efficientnet-lite0",
    text_encoder: Annotated[
        str, typer.Option(help="Text encoder for passages: minilm, a Hugging Face encoder, or an open_clip folder.")
    ] = "minilm",
    pooled: Annotated[bool, typer.Option("--pooled", help="Encode each picture as one slot.")] = False,
    pooling: Annotated[
        str, typer.Option(help="Pooling of passages: none (one slot per token), mean, cls or max.")
    ] = "none",
    dtype: Annotated[str, typer.Option(help="Data type of the vectors: float16 or float32.")] = "float16",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Stop at the first unusable row. By default, unusable rows are listed and skipped."
        ),
    ] = False,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train",
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", metavar="KEY=NAME", help="Names of your columns, such as text=caption."),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help='Text for class folders, such as "A photo of a {label}."')
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures or passages per batch.")] = 32,
    num_proc: Annotated[int | None, typer.Option(help="Number of processes, as in `Dataset.map`.")] = None,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
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
    from mmattn.training import drop_errors, encode_dataset, encoding_of, memory_kinds, read_rows

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


#: The score that an entry must have at least where scores are cosines and no other threshold is given: the default
#: encoder gives texts that have nothing in common up to 0.2.
COSINE_THRESHOLD = 0.2
#: Words of a chunk of a text; the default encoder reads 256 tokens.
_CHUNK = 96
#: Files of a folder that are read.
_TEXTS = (".txt", ".md", ".rst", ".html", ".htm", ".pdf")
#: Tags of HTML whose content is not shown, and those that break no line.
_HIDDEN = ("script", "style", "template")
_INLINE = ("a", "abbr", "b", "code", "em", "i", "kbd", "mark", "q", "s", "small", "span", "strong", "sub", "sup", "u")
_ENCODER = typer.Option(help="minilm, a Hugging Face encoder, or the encoder.safetensors of an adapter.")


def build_index(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…|FOLDER", help="JSON lines or plain text, one entry per line; or a folder of texts to chunk."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the index; an existing one is replaced.")],
    field: Annotated[str, typer.Option(help="Field of a JSON line with the text.")] = "text",
    id_field: Annotated[str | None, typer.Option(help="Field of a JSON line with the id.")] = None,
    encoder: Annotated[str, _ENCODER] = "minilm",
    store: Annotated[str, typer.Option(help="Store: exact, hnsw, ivf or ivfpq.")] = "exact",
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Skip lines and files without a readable text.")
    ] = False,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Build the index that this adapter reads. The installed assets/rag/adapter answers what the currency, "
            "the language or the English name of a place is, and refuses other questions.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Language model (smollm2, a folder, ORG/NAME) that reads the texts now, to answer sooner."),
    ] = None,
) -> None:
    """Embed the lines of files, or the texts in a folder, and make an index of them.

    In a folder, every .txt, .md, .rst, .html and .pdf file is cut into chunks, and other files are listed. The source
    of a chunk is the name of its file. PDF needs the extra pdf. `mmattn ask QUESTION --index DIR` answers from them.

    An interrupted build goes on where it was: the finished part lies beside the index until that is saved. With --for
    the lines are JSON objects with the fields that the adapter reads, such as {"title": …, "value": …}, and the encoder
    is the adapter's. With --host that model reads each text beforehand, and DIR.passages has its keys and values, with
    which `mmattn ask QUESTION --index DIR --adapter DIR.passages` and `mmattn serve DIR.passages --index DIR` answer.
    """
    import json
    import shutil

    import torch

    from mmattn.data.encoded import first_few
    from mmattn.encoders.text import load_text_encoder
    from mmattn.models.loading import without_progress_bars
    from mmattn.retrieval.corpus import embed_corpus
    from mmattn.retrieval.index import Index

    folders = [file for file in files if file.is_dir()]
    _check_paths(files, out)
    changed = {"--field": field != "text", "--id-field": id_field is not None}
    if folders and (len(files) > 1 or any(changed.values()) or for_ is not None):
        raise ConfigError(f"{folders[0]} is a folder of texts, which goes alone, without --field, --id-field and --for")
    if for_ is not None:
        changed |= {"--encoder": encoder != "minilm"}
        changed |= {"--skip-broken": skip_broken, "--host": host is not None}
        if decided := [name for name, is_changed in changed.items() if is_changed]:
            raise ConfigError(f"{' and '.join(decided)} cannot go with --for {for_}, which decides this: leave it out")
        return _build_for(files, out, store, for_)
    shards = out.with_name(f"{out.name}.shards")
    with without_progress_bars():
        text_encoder = load_text_encoder(encoder)
    # Before anything is embedded: a misspelt store, or one that is not installed, is refused at once.
    index = Index.build([], encoder=text_encoder, store=store)
    chunks = out.with_name(f"{out.name}.chunks.jsonl")
    if folders:
        unread = _write_chunks(folders[0], chunks, skip_broken)
        files, id_field = [chunks], "id"
        if unread:
            typer.echo(f"files left out ({len(unread)}):\n{first_few(unread)}", err=True)
    rows, left_out = embed_corpus(files, shards, text_encoder, field=field, id_field=id_field, skip_broken=skip_broken)
    vectors = torch.cat(list(rows.with_format("torch")["memory"]))
    texts, metadata = list(rows["text"]), [json.loads(about) for about in rows["metadata"]]
    index.add(vectors, ids=list(rows["id"]), texts=texts, metadata=metadata)
    index.save(out)
    shutil.rmtree(shards)
    chunks.unlink(missing_ok=True)
    typer.echo(f"{index} in {out}")
    if left_out:
        typer.echo(f"lines left out, because they cannot be used ({len(left_out)}):\n{first_few(left_out)}")
    if host is not None:
        _read_by(host, encoder, texts, out.with_name(f"{out.name}.passages"))


def _check_paths(files: list[Path], out: Path) -> None:
    """Refuse files that are not there, and a file in place of the folder of an index."""
    for file in files:
        if not (file.is_file() or file.is_dir()):
            raise AdapterFileError(f"cannot embed {file}: there is no such file or folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"an index is a folder, and --out {out} is a file: name another place")


def _write_chunks(folder: Path, out: Path, skip_broken: bool) -> list[str]:
    """Cut the texts in a folder into chunks, write them as JSON lines, and return the files left out with reasons."""
    import json

    from mmattn.retrieval.corpus import chunk
    from mmattn.storage.files import files_below, write_text

    texts: dict[str, str] = {}
    left_out: list[str] = []
    for path in map(Path, files_below(folder)):
        name = path.relative_to(folder).as_posix()
        if path.suffix.lower() not in _TEXTS:
            left_out.append(f"{name}: not one of {', '.join(_TEXTS)}")
            continue
        try:
            texts[name] = _read(path)
        except MissingExtraError as error:
            left_out.append(f"{name}: {error}")
            continue
        except (UnicodeDecodeError, TextError) as error:
            wrong = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            if not skip_broken:
                raise TextError(f"{path} is {wrong}: convert the file, or leave it out with --skip-broken") from error
            left_out.append(f"{name}: {wrong}")
            continue
        if not texts[name].strip():
            left_out.append(f"{name}: empty")
    cut = chunk(list(texts.values()), size=_CHUNK, overlap=_CHUNK // 8, sources=list(texts))
    if not cut:
        raise TextError(f"the folder {folder} has no {', '.join(_TEXTS)} file with a text: name one that has, or files")
    lines = ({"id": f"{part.source}:{part.start}", "text": part.text, "source": part.source} for part in cut)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return left_out


def _read(path: Path) -> str:
    """Return the text of a file, without the tags of HTML; TextError for a PDF that is broken or encrypted."""
    if path.suffix.lower() == ".pdf":
        pypdf = import_extra("pypdf", "pdf")
        try:
            return "\n".join(page.extract_text() for page in pypdf.PdfReader(path).pages)
        except pypdf.errors.PyPdfError as error:
            raise TextError(f"not a readable PDF ({error})") from error
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() not in (".html", ".htm"):
        return text
    page = _Page()
    page.feed(text)
    page.close()
    return "\n".join(line for line in map(str.strip, "".join(page.parts).splitlines()) if line)


class _Page(HTMLParser):
    """Collect the visible text of a page of HTML in `parts`, with line breaks at tags that start or end a block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in _HIDDEN
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in _HIDDEN
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self.hidden <= 0:
            self.parts.append(data)

    def _break(self, tag: str) -> None:
        if tag not in _INLINE:
            self.parts.append("\n")


def _read_by(host: str, encoder: str, texts: list[str], out: Path) -> None:
    """Write the folder of a passage adapter whose host has read the texts of an index."""
    from mmattn.pipelines import pipeline

    pipe = pipeline(host=host, encoder=encoder)
    pipe.read(texts, progress=True)
    pipe.save(out)
    typer.echo(f"{len(pipe.passages)} passages of {sum(pipe.passages.lengths)} tokens in {out}")


def _build_for(files: list[Path], out: Path, store: str, adapter: str) -> None:
    """Build an index with the fields that an adapter reads."""
    from mmattn.models import resolve
    from mmattn.models.loading import without_progress_bars
    from mmattn.pipelines import PipelineConfig, build_index as build, load_text_encoder, read_entries

    folder = Path(resolve(adapter))
    config = PipelineConfig.load(folder)
    rows = [row for file in files for row in read_entries(file)]
    with without_progress_bars():
        text_encoder = load_text_encoder(config, folder)
    index = build(rows, config, text_encoder, store=store, progress=True)
    index.save(out)
    typer.echo(f"{index} in {out}")
    typer.echo(f"{adapter} was trained on {config.trained_on}", err=True)


def copy_index(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder or address of an index.")],
    store: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address, such as postgresql://user@host/database#table.")
    ],
) -> None:
    """Write the entries of an index into a database, where ask, serve and search find them by the same address."""
    from mmattn.retrieval.index import Index

    if ":" not in store:
        raise ConfigError(f"an index is copied to an address, such as lance:{store}, and got {store!r}")
    copied = Index.open(folder).copy(store)
    typer.echo(copied)
    copied.close()  # where one process at a time may have it open


def search_index(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder or address of an index.")],
    query: Annotated[str, typer.Argument(metavar="QUERY")],
    top_k: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 5,
    score_threshold: Annotated[
        float | None,
        typer.Option(help=f"Minimum score; by default {COSINE_THRESHOLD} for cosines."),
    ] = None,
    encoder: Annotated[str, _ENCODER] = "minilm",
    rerank: Annotated[str | None, typer.Option(help="Cross-encoder that rescores ten times as many entries.")] = None,
) -> None:
    """Print the entries that fit a query best, each with its score."""
    from mmattn.encoders.text import load_text_encoder
    from mmattn.models.loading import without_progress_bars
    from mmattn.retrieval.index import Index

    with without_progress_bars():
        index = Index.open(folder, encoder=load_text_encoder(encoder))
        hits: Any = index.search([query], top_k if rerank is None else 10 * top_k)
        scores = hits.scores[0][hits.mask[0]].tolist()
        if score_threshold is None and index.metric == "cosine":
            score_threshold = COSINE_THRESHOLD
        if score_threshold is not None:
            hits = hits.above(score_threshold)
        if not hits.mask.any():
            return say_nothing_fits(scores, score_threshold)
        if rerank is not None:
            from mmattn.retrieval.hits import load_cross_encoder

            hits = hits.rerank(query, load_cross_encoder(rerank)).first(top_k)
    for score, name, text in zip(hits.scores[0].tolist(), hits.ids[0], hits.texts[0], strict=True):
        if name is not None:
            typer.echo(f"{score:.3f}  {name}  {text or ''}".rstrip())


def say_nothing_fits(scores: Sequence[float], score_threshold: float | None) -> None:
    """Print why a search has no hits."""
    why = "the index is empty"
    if scores:
        why = f"the best score is {max(scores):.3f}, below --score-threshold {score_threshold}"
    typer.echo(f"nothing fits: {why}", err=True)


def describe_index(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder or address of an index.")],
) -> None:
    """Check an index and print its size, encoder and memory."""
    from mmattn.retrieval.index import Index

    index = Index.open(folder)
    typer.echo(f"{index}\nencoder {index.space.fingerprint or 'unknown'}\nmemory {4 * index.dim * len(index):,} bytes")
