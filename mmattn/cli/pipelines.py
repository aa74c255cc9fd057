"""Commands that use a trained adapter: `caption`, `draw`, `ask` and `serve`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from mmattn.cli.encode import COSINE_THRESHOLD, say_nothing_fits
from mmattn.errors import ConfigError, import_extra


def caption(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Pictures of any common format, or folders.")],
    text: Annotated[str, typer.Option(help="A question about each picture, or the start of its caption.")] = "",
    adapter: Annotated[Path, typer.Option(help="The adapter's folder, or ORG/NAME.")] = Path("assets/vision/adapter"),
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the fastest there is.")] = None,
) -> None:
    """Describe pictures, or answer a question about them: drawn flowers, with the adapter that is installed."""
    from mmattn.encoders.images import picture_files

    files = picture_files(images)
    pipe = _pipeline(adapter, device, ("image-to-text",))
    for image, answer in zip(files, pipe(files, text), strict=True):
        typer.echo(f"{image}: {answer}")


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
    index: Annotated[
        str, typer.Option(help="The folder of an index, as `mmattn index build` makes it, or its address.")
    ],
    adapter: Annotated[Path | None, typer.Option(help="The folder of an adapter, or ORG/NAME.")] = None,
    host: Annotated[
        str | None, typer.Option(help="A language model that reads the texts itself; smollm2 by default.")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="For --host the encoder of the index; minilm by default.")] = None,
    passages: Annotated[
        int | None, typer.Option(min=1, help="Read this many entries.", show_default="up to 4, or the adapter's")
    ] = None,
    show_sources: Annotated[bool, typer.Option(help="Print the entries that were attended to.")] = True,
    sources: Annotated[int, typer.Option(min=1, help="Print so many of them.")] = 3,
    score_threshold: Annotated[
        float | None,
        typer.Option(help=f"The lowest score that fits; without --adapter {COSINE_THRESHOLD} by default, for cosines."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda or cpu; by default the fastest there is.")] = None,
) -> None:
    """Answer a question from what an index holds, and print what was attended to.

    Texts are read by a language model as they are, without training; an index that was built --for an adapter needs
    that adapter. Before each source stand its score in the search and its share of the attention at the first word of
    the answer.
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
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Processes that answer behind one address, by Ray Serve.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="So many under load.", show_default="--replicas")
    ] = None,
) -> None:
    """Answer many requests at once over HTTP, in the interface of OpenAI.

    It needs the extra serve, and --replicas the extra scale. Pictures and documents come with the requests; no address
    is fetched.
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

    def build() -> tuple[Any, Any]:
        pipe = _pipeline(Path(adapter), device, index=index)
        logging.basicConfig(level=os.environ.get("MMATTN_LOG_LEVEL", "INFO"), format="%(message)s")
        engine = Engine(pipe, limits)
        return engine, make_app(engine, name, api_key)

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
        _, app = build()
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
