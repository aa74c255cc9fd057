"""The command that serves a trained adapter over HTTP."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from mmattn.cli.arguments import check_adapter_folder


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
    from mmattn.errors import import_extra

    uvicorn = import_extra("uvicorn", "serve")
    import_extra("fastapi", "serve")
    import_extra("prometheus_client", "serve")
    if not adapter.startswith("assets/") and (Path(adapter).exists() or adapter.count("/") != 1):
        check_adapter_folder(Path(adapter))
    from mmattn.pipelines import pipeline
    from mmattn.serving import Engine, Limits, make_app

    limits = Limits(max_requests=max_requests, max_tokens=max_tokens, timeout=timeout)
    pipe = pipeline(adapter, index=index, device=device)
    logging.basicConfig(level=os.environ.get("MMATTN_LOG_LEVEL", "INFO"), format="%(message)s")
    app = make_app(Engine(pipe, limits), name or Path(adapter).name, api_key)
    typer.echo(f"http://{host}:{port}/v1 answers as {name or Path(adapter).name}", err=True)
    # What runs is finished when it is told to stop, and nothing new is taken.
    settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": max(1, int(timeout))}
    uvicorn.run(app, host=host, port=port, **settings)
