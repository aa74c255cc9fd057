"""Commands that use a trained adapter: `caption`, `draw`, `ask` and `serve`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from mmattn.cli.encode import COSINE_THRESHOLD, say_nothing_fits
from mmattn.errors import ConfigError, import_extra

Device = Annotated[str | None, typer.Option(help="Device, such as cuda or cpu; by default the fastest available.")]


def caption(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Image files or folders.")],
    text: Annotated[str, typer.Option(help="A question about each picture, or the start of the caption.")] = "",
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter, or ORG/NAME.")] = Path("assets/vision/adapter"),
    device: Device = None,
) -> None:
    """Describe pictures, or answer a question about them: drawn flowers, with the adapter that is installed."""
    from mmattn.encoders.images import picture_files

    files = picture_files(images)
    pipe = _pipeline(adapter, device, ("image-to-text",))
    for image, answer in zip(files, pipe(files, text), strict=True):
        typer.echo(f"{image}: {answer}")


def draw(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='What to draw: "a thick seven".')],
    like: Annotated[Path | None, typer.Option(help="Picture whose style to follow.")] = None,
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter, or ORG/NAME.")] = Path(
        "assets/diffusion/adapter"
    ),
    adapter_scale: Annotated[float, typer.Option(help="How closely to follow the picture; 0 ignores it.")] = 1.0,
    guidance_scale: Annotated[
        float | None, typer.Option(help="How closely to follow the prompt; 1 is no guidance.", show_default="adapter's")
    ] = None,
    num_inference_steps: Annotated[int | None, typer.Option(help="Denoising steps.", show_default="adapter's")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG file to write.")] = Path("drawing.png"),
    device: Device = None,
) -> None:
    """Draw what a prompt says, in the style of an example: digits, with the adapter that is installed."""
    import torch

    from mmattn.storage.files import replacing

    with replacing(out) as file:
        pipe = _pipeline(adapter, device, ("text-to-image",))
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
    index: Annotated[str, typer.Option(help="Folder or address of an index that `mmattn index build` made.")],
    adapter: Annotated[Path | None, typer.Option(help="Folder of the adapter, or ORG/NAME.")] = None,
    host: Annotated[str | None, typer.Option(help="Language model that reads the texts; smollm2 by default.")] = None,
    encoder: Annotated[str | None, typer.Option(help="Encoder of the index, with --host; minilm by default.")] = None,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Number of entries to read.", show_default="up to 4, or the adapter's")
    ] = None,
    show_sources: Annotated[bool, typer.Option(help="Print the entries that the answer attended to.")] = True,
    sources: Annotated[int, typer.Option(min=1, help="Number of sources to print.")] = 3,
    score_threshold: Annotated[
        float | None,
        typer.Option(help=f"Minimum score; by default {COSINE_THRESHOLD} for cosines, without --adapter."),
    ] = None,
    device: Device = None,
) -> None:
    """Answer a question from an index, and print the sources.

    A language model reads the texts without training; an index that was built --for an adapter needs that adapter. Each
    source is printed with its search score and its share of the attention at the first word of the answer.
    """
    from mmattn.pipelines import pipeline

    by_host = host is not None or encoder is not None
    if adapter is not None and by_host:
        raise ConfigError(f"--adapter {adapter} names its own models: leave --host and --encoder out")
    if adapter is not None:
        pipe = _pipeline(adapter, device, ("question-answering", "passage-answering"), index=index)
    else:
        pipe = pipeline(host=host or "smollm2", encoder=encoder, index=index, device=device)
    if score_threshold is None and adapter is None and pipe.index.metric == "cosine":
        score_threshold = COSINE_THRESHOLD
    if score_threshold is not None:
        hits = pipe.index.search([question], 1)
        if not hits.above(score_threshold).mask.any():
            return say_nothing_fits(hits.scores[hits.mask].tolist(), score_threshold)
    answer = pipe(question, passages=passages)
    typer.echo(answer.text)
    if answer.refused:
        typer.echo(f"The adapter refuses this question. It was trained on {pipe.config.trained_on}", err=True)
    for source in answer.sources[:sources] if show_sources else []:
        name = f"{source.id}  " if isinstance(source.id, str) else ""
        text = textwrap.shorten(source.text or "", 160, placeholder=" …")
        typer.echo(f"{source.score:.3f}  {source.weight:6.1%}  {name}{text}")


def serve(
    adapter: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of the adapter, or ORG/NAME.")],
    index: Annotated[
        str | None,
        typer.Option(help="Folder or address of the index to answer from; requests can also contain documents."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MMATTN_API_KEY", help="Bearer token that requests must contain.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name in the API; by default the name of the folder.")] = None,
    max_requests: Annotated[int, typer.Option(help="Most requests running or queued; further ones get 429.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Maximum new tokens per answer.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds before an unfinished request is cancelled.")] = 120.0,
    device: Device = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Number of processes behind one address, with Ray Serve.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of processes under load.", show_default="--replicas")
    ] = None,
) -> None:
    """Start an OpenAI-compatible HTTP server.

    It needs the extra serve, and --replicas needs the extra scale. Requests contain pictures as data; the server never
    fetches an address.
    """
    import contextlib
    import logging
    import os
    import socket

    uvicorn = import_extra("uvicorn", "serve")
    import_extra("fastapi", "serve")
    import_extra("prometheus_client", "serve")
    from mmattn.serving import Engine, Limits, make_app

    limits = Limits(max_requests=max_requests, max_tokens=max_tokens, timeout=timeout)
    name = name or Path(adapter).name

    def build() -> Any:
        pipe = _pipeline(Path(adapter), device, index=index)
        logging.basicConfig(format="%(message)s")  # warnings of others
        logging.getLogger("mmattn").setLevel(os.environ.get("MMATTN_LOG_LEVEL", "INFO"))
        return make_app(Engine(pipe, limits), name, api_key)

    if replicas is not None or max_replicas is not None:
        from mmattn.serving.replicas import serve_replicas

        typer.echo(f"http://{host}:{port}/v1 will answer as {name}", err=True)
        least, gpu = replicas or 1, (device or "cuda").startswith("cuda")
        return serve_replicas(build, limits, {"host": host, "port": port}, least, max_replicas or least, gpu)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be served ({error.strerror}): give another --port") from error
        app = build()
        listener.listen()
        typer.echo(f"http://{host}:{listener.getsockname()[1]}/v1 answers as {name}", err=True)
        # At a stop running requests are finished, and no others are taken.
        settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": max(1, int(timeout))}
        with contextlib.suppress(KeyboardInterrupt):  # as `uvicorn.run` does
            uvicorn.Server(uvicorn.Config(app, **settings)).run(sockets=[listener])


def _pipeline(adapter: Path, device: str | None, tasks: tuple[str, ...] = (), index: str | None = None) -> Any:
    """Load the pipeline of an adapter's folder, for one of the tasks."""
    from mmattn.pipelines import pipeline

    pipe = pipeline(str(adapter), device=device, index=index)
    if tasks and pipe.config.task not in tasks:
        raise ConfigError(f"the adapter in {adapter} is for {pipe.config.task}, and this command for {tasks[0]}")
    return pipe
