"""Commands that examine: `attach-check`, `doctor`, `explore`, `compare`, `models` and `env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mmattn.errors import ConfigError


def attach_check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, short name, or name on the hub.")],
    every: Annotated[int | None, typer.Option(min=1, help="Attach a block at every n-th layer.")] = None,
    memory_dim: Annotated[int, typer.Option(min=1, help="Width of the memory.")] = 768,
    where: Annotated[str | None, typer.Option(help="decoder or encoder, for a model with both.")] = None,
    path: Annotated[str | None, typer.Option(help="Dotted name of the list of layers, if it is not found.")] = None,
) -> None:
    """Tell from a model's config alone whether it can be a host, and at which layers adapters would act.

    No weights are read: seconds for a model of any size. Exit code 1 if it cannot.
    """
    import logging

    from mmattn.hosts.attach import attach_check as check, read_config

    config = read_config(model)
    # Calls that fail for want of values are part of the search.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    report = check(config, memory_dim=memory_dim, every=every, where=where, path=path)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def doctor(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="An adapter's folder.")] = None,
    host: Annotated[str | None, typer.Option(help="Model that the adapter was trained on; examine both.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask: a folder, ORG/NAME, or an adapter's folder.")] = None,
    url: Annotated[str | None, typer.Option(help="Endpoint to ask, such as http://127.0.0.1:8000/v1.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Rows with prompt, text, and image or passages.", show_default="plain colours")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Number of questions to ask.", show_default="64; 40 of an endpoint")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Questions per batch.", show_default="8")] = None,
    out: Annotated[
        list[Path] | None, typer.Option("--out", "-o", help="Also write the report to a .json or .html file.")
    ] = None,
) -> None:
    """Examine an adapter folder, and with --host the adapter at work on a random batch.

    With --model or --url, ask questions with right, different, blank and no evidence, and tell whether the answers come
    from looking. One verdict per line, and exit code 1 if one of them is bad.
    """
    import json

    from mmattn.inspect.doctor.questions import plain_pictures
    from mmattn.inspect.doctor.report import Report
    from mmattn.inspect.doctor.run import diagnose, doctor as examine
    from mmattn.models import resolve
    from mmattn.storage.files import write_text

    if (folder, model, url).count(None) != 2:
        raise ConfigError("doctor examines an adapter's folder, --model or --url: give exactly one")
    if folder is not None and any((data, questions, batch_size)):
        raise ConfigError(
            f"--data, --questions and --batch-size are for a model that is asked: give --model {folder} instead of "
            f"{folder}"
        )
    if folder is None and host is not None:
        raise ConfigError("--host is for the folder of an adapter; --model and --url name what is asked")
    if folder is not None:
        report: Report = diagnose(resolve(str(folder)), None if host is None else resolve(host))
    else:
        subject, processor = (url, None) if model is None else _subject(model)
        count, rows = questions or (64 if url is None else 40), plain_pictures() if data is None else data
        options: Any = {"processor": processor, "batch_size": batch_size or 8, "max_questions": count}
        report = examine(subject, rows, **options, progress=True)
    typer.echo(str(report))
    for path in out or ():
        write_text(path, json.dumps(report.as_dict(), indent=1) if path.suffix == ".json" else report.to_html())
    if not report.ok:
        raise typer.Exit(1)


def _subject(name: str) -> tuple[object, object]:
    """Load the pipeline of an adapter's folder, or a model with its processor."""
    from mmattn.models.loading import load_model, load_part
    from mmattn.pipelines import pipeline
    from mmattn.pipelines.build import default_device

    if name.startswith("assets/") or (Path(name) / "pipeline_config.json").is_file():
        return pipeline(name), None
    if (Path(name) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{name} has no pipeline_config.json: write it with PipelineConfig, or examine the folder alone"
        )
    what = "model of pictures and texts"
    processor = load_part("AutoProcessor", name, what)
    model = load_model("AutoModelForImageTextToText", name, what, dtype="float32")
    return model.to(default_device()), processor


def explore(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, such as runs/vision.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Page to write.")] = Path("explore.html"),
    heads: Annotated[bool, typer.Option("--heads", help="Show every head, not only the mean.")] = False,
) -> None:
    """Write a page that shows what the texts of runs attended to, word by word; it opens offline."""
    write_runs(_named(runs), out, heads)


def write_runs(runs: Mapping[Path, str], out: Path, heads: bool = False) -> None:
    """Write the page of `explore` and print its size; `runs` maps folders to the names of their texts."""
    from mmattn.inspect.explorer import write_page
    from mmattn.inspect.trace import load_traces

    # A single run needs no name above its texts.
    traces = {name if len(runs) > 1 else "": load_traces(run) for run, name in runs.items()}
    for note in write_page(traces, out, heads=heads):
        typer.echo(note)
    typer.echo(f"{out}: {out.stat().st_size:,} bytes")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, such as runs/vision.")],
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Metric to show; repeat for more. [loss, eval_loss, eval_right_loss]"),
    ] = None,
) -> None:
    """Compare runs, of one recipe or of several: settings that differ, their tables, the last of their metrics.

    A folder that `mmattn train --seeds` wrote is one run: means of its seeds, ± half the range. The curves are in
    loss.png of each run, and in the trackers that `optim.report_to` names.
    """
    from mmattn.training.compare import METRICS, compare_runs

    typer.echo(compare_runs({name: run for run, name in _named(runs).items()}, tuple(metrics or METRICS)))


def _named(runs: Sequence[Path]) -> dict[Path, str]:
    """Return folders with their names, or their whole paths where names are the same."""
    names = [run.resolve().name for run in runs]
    return {run: name if names.count(name) == 1 else str(run) for run, name in zip(runs, names, strict=True)}


def env() -> None:
    """Show versions, threads, processor, extras.

    Plain text, to be pasted into a bug report.
    """
    from mmattn.cli.environment import describe

    typer.echo(describe())


def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Models to download.")] = None,
) -> None:
    """List the models with a short name, or fetch some of them and print their folders."""
    from mmattn.models import CATALOGUE, fetch

    for name in names or ():
        typer.echo(fetch(name))
    for name, entry in CATALOGUE.items() if not names else ():
        typer.echo(f"{name:<20} {entry.kind:<18} {entry.megabytes:>4} MB  {entry.license:<11} {entry.title}")
