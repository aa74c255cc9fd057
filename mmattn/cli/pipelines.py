"""Commands that use a trained adapter: `caption`, `draw`, `ask` and `serve`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import typer


def caption(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Pictures of any common format, or folders.")],
    adapter: Annotated[Path, typer.Option(help="The adapter's folder, or ORG/NAME.")] = Path("assets/vision/adapter"),
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the fastest there is.")] = None,
) -> None:
    """Describe pictures with a trained adapter: drawn flowers, with the one that is installed."""
    from mmattn.encoders.images import picture_files
    from mmattn.errors import ConfigError

    files = picture_files(images)
    pipe = _pipeline(adapter, device)
    if pipe.config.task != "image-to-text":
        raise ConfigError(
            f"the adapter in {adapter} is for {pipe.config.task}, and captions need one that sees pictures"
        )
    for image, text in zip(files, pipe(files), strict=True):
        typer.echo(f"{image}: {text}")


def draw(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='What to draw: "a thick seven".')],
    like: Annotated[Path | None, typer.Option(help="A picture whose style to follow.")] = None,
    adapter: Annotated[Path, typer.Option(help="The folder of an adapter, or ORG/NAME.")] = Path(
        "assets/diffusion/adapter"
    ),
    adapter_scale: Annotated[float, typer.Option(help="How closely to follow the picture; 0 is not at all.")] = 1.0,
    guidance_scale: Annotated[
        float | None, typer.Option(help="How closely to follow the prompt; 1 is no guidance.", show_default="adapter's")
    ] = None,
    num_inference_steps: Annotated[int | None, typer.Option(help="Denoising steps.", show_default="adapter's")] = None,
    seed: Annotated[int, typer.Option(help="Of the noise it starts from.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The PNG file to write.")] = Path("drawing.png"),
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the fastest there is.")] = None,
) -> None:
    """Draw what a prompt says, in the style of an example: digits, with the adapter that is installed."""
    from mmattn.errors import ConfigError, ImageError, check_float, check_int
    from mmattn.storage.files import replacing

    if num_inference_steps is not None:
        check_int("num_inference_steps", num_inference_steps, at_most=1000)
    if guidance_scale is not None:
        check_float("guidance_scale", guidance_scale)
    check_float("adapter_scale", adapter_scale)
    if like is not None and not like.is_file():
        raise ImageError(f"cannot follow {like}: there is no such file")
    with replacing(out) as file:
        pipe = _pipeline(adapter, device)
        if pipe.config.task != "text-to-image":
            raise ConfigError(f"the adapter in {adapter} is for {pipe.config.task}, and drawing needs one of a UNet")
        import torch

        picture = pipe(
            prompt,
            like,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            adapter_scale=adapter_scale,
            generator=torch.Generator().manual_seed(seed),
            progress=True,
        )
        # A digit of sixteen pixels is too small to be looked at.
        times = max(1, 256 // picture.width)
        picture.resize((times * picture.width, times * picture.height)).save(file, "PNG")
    typer.echo(str(out))


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help='Such as "What is the currency of Allemagne?"')],
    index: Annotated[
        str, typer.Option(help="The folder of an index, as `mmattn index build --for` makes it, or its address.")
    ],
    adapter: Annotated[Path, typer.Option(help="The folder of an adapter, or ORG/NAME.")] = Path("assets/rag/adapter"),
    show_sources: Annotated[bool, typer.Option(help="Print the entries that were attended to.")] = True,
    sources: Annotated[int, typer.Option(min=1, help="Print so many of them.")] = 3,
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the fastest there is.")] = None,
) -> None:
    """Answer a question from what an index holds, and print what was attended to.

    The number before a source is its share of the attention at the first word of the answer. A chunked adapter goes on
    with the text instead, and the number is the share over all of it.
    """
    from mmattn.errors import ConfigError

    pipe = _pipeline(adapter, device, index=index)
    if pipe.config.task == "image-to-text":
        raise ConfigError(f"the adapter in {adapter} sees pictures, and reads no index: use mmattn caption")
    answer = pipe(question)
    typer.echo(answer.text)
    for source in answer.sources[:sources] if show_sources else []:
        typer.echo(f"{source.weight:6.1%}  {source.text}")


def serve(
    adapter: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder of an adapter, or ORG/NAME.")],
    index: Annotated[
        str | None, typer.Option(help="Answer from this index, a folder or an address; requests may bring documents.")
    ] = None,
    host: Annotated[str, typer.Option(help="Who may reach it; 0.0.0.0 is all who reach this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where it is served.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MMATTN_API_KEY", help="The bearer token that requests must bring.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the model; the folder's by default.")] = None,
    max_requests: Annotated[int, typer.Option(help="That run or wait; another is told to try again.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="New tokens of an answer, at most.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds until an unfinished request is given up.")] = 120.0,
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the fastest there is.")] = None,
) -> None:
    """Answer many requests at once over HTTP, in the interface of OpenAI.

    It needs the extra serve. Pictures and documents come with the requests; no address is fetched.
    """
    import logging
    import os

    from mmattn.errors import import_extra

    uvicorn = import_extra("uvicorn", "serve")
    import_extra("fastapi", "serve")
    import_extra("prometheus_client", "serve")
    from mmattn.serving import Engine, Limits, make_app

    limits = Limits(max_requests=max_requests, max_tokens=max_tokens, timeout=timeout)
    pipe = _pipeline(Path(adapter), device, index=index)
    logging.basicConfig(level=os.environ.get("MMATTN_LOG_LEVEL", "INFO"), format="%(message)s")
    app = make_app(Engine(pipe, limits), name or Path(adapter).name, api_key)
    typer.echo(f"http://{host}:{port}/v1 answers as {name or Path(adapter).name}", err=True)
    # At a stop running requests are finished, and no others are taken.
    settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": max(1, int(timeout))}
    uvicorn.run(app, host=host, port=port, **settings)


def check_adapter_folder(folder: Path) -> None:
    """Raise AdapterFileError for a folder without an adapter, before anything heavy is imported."""
    from mmattn.errors import AdapterFileError

    if not folder.is_dir():
        raise AdapterFileError(f"there is no adapter folder {folder}; `mmattn ls` lists those under runs")
    if not (folder / "adapter_config.json").is_file():
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise AdapterFileError(f"{folder} has no adapter_config.json, so it is not an adapter's folder; it has {names}")


def _pipeline(adapter: Path, device: str | None, **options: Any) -> Any:
    """Load the pipeline of an adapter's folder."""
    name = str(adapter)
    if not name.startswith("assets/") and (adapter.exists() or name.count("/") != 1):
        check_adapter_folder(adapter)
    # Garbage collection over the million objects of the imports is a quarter of the start.
    collects = gc.isenabled()
    gc.disable()
    try:
        from mmattn.pipelines import pipeline

        return pipeline(name, device=device, **options)
    finally:
        if collects:
            gc.enable()
