"""The command line: thin words around the recipes and the library.

Everything heavy is imported inside the command that needs it, so that `mmattn --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="mmattn",
    help="Let any frozen model look at something it was never built to see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
index_app = typer.Typer(help="Build, search and describe an index of texts.", no_args_is_help=True)
app.add_typer(index_app, name="index")


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Let any frozen model look at something it was never built to see."""


@app.command()
def demo() -> None:
    """Train on drawn flowers, caption pictures, print the table; write digits in the hand of examples; ask for facts.

    The table holds the controls beside the good row: no memory, shuffled memory, a text-only LoRA of equal size.
    It ends with a page that shows what all of them looked at (see `mmattn explore`).
    """
    from mmattn.recipes import find_recipe, load_recipe
    from mmattn.storage.pretrained import without_bars

    with without_bars():
        run = load_recipe(find_recipe("vision").folder, "demo").main()
        drawn = load_recipe(find_recipe("diffusion").folder, "drawing").demo(run)
        typer.echo(f"digits in the hand of examples {drawn}")
        load_recipe(find_recipe("rag").folder, "demo").demo(run)
    typer.echo("\nwhat all of them looked at, word by word, as a page:")
    explore([file.parent for file in sorted(run.rglob("attention.safetensors"))], run / "explore.html")


@app.command()
def live(
    adapter: Annotated[Path, typer.Option(help="What captions pictures; the demo leaves one.")] = Path(
        "runs/demo/adapter"
    ),
    port: Annotated[int, typer.Option(help="Where it is served.")] = 7860,
    host: Annotated[str, typer.Option(help="Who may open it; 0.0.0.0 is all who reach this machine.")] = "127.0.0.1",
    share: Annotated[bool, typer.Option("--share", help="Lend it a public address of gradio's, for a week.")] = False,
) -> None:
    """Serve a page where small models caption a picture, answer a question and draw a digit.

    It needs the extra demo and no network, and sends nothing anywhere.
    """
    from mmattn.cli.live import open_page

    open_page(adapter, host, port, share)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as a recipe's config.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Settings to change.")] = None,
) -> None:
    """Run a recipe with the settings of CONFIG.

    Unknown keys are errors, and overrides are KEY=VALUE with dots between sections: optim.lr=1e-3.
    CONFIG's own folder is the recipe if it holds a train.py (a copy made by `mmattn cp`); otherwise its key `recipe`
    names one of `mmattn ls`.
    """
    from mmattn.recipes import read_settings

    run_recipe(config, read_settings(config, overrides or ()))


@app.command()
def schema(
    name: Annotated[str, typer.Argument(metavar="RECIPE|CONFIG", help="A name from `mmattn ls`, or a settings file.")],
) -> None:
    """Print the JSON schema of a recipe's settings.

    Editors that know it complete and check a config.yaml while it is written.
    """
    import json

    from mmattn.errors import ConfigError
    from mmattn.recipes import find_recipe, load_recipe, read_settings

    config = Path(name)
    if config.suffix in (".yaml", ".yml"):
        folder = recipe_of(config, read_settings(config))
    else:
        folder = find_recipe(name).folder
    if not (folder / "settings.py").is_file():
        raise ConfigError(f"{folder} has no settings.py, so the recipe {name!r} has no settings to describe")
    typer.echo(json.dumps(load_recipe(folder, "settings").Config.model_json_schema(), indent=2))


@app.command()
def caption(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Pictures of any common format.")],
    adapter: Annotated[Path, typer.Option(help="The adapter's folder, such as runs/vision/adapter.")],
) -> None:
    """Describe pictures with a trained adapter."""
    from mmattn.errors import ImageError
    from mmattn.recipes import find_recipe, load_recipe, read_settings
    from mmattn.storage.pretrained import without_bars

    for image in images:
        if not Path(image).is_file():
            raise ImageError(f"cannot caption {image}: there is no such file")
    check_adapter_folder(adapter)
    run = adapter.parent / "config.resolved.yaml"
    recipe = read_settings(run).get("recipe", "vision") if run.is_file() else "vision"
    with without_bars():
        texts = load_recipe(find_recipe(str(recipe)).folder, "caption").caption(images, adapter)
    for image, text in zip(images, texts, strict=True):
        typer.echo(f"{image}: {text}")


@app.command()
def draw(
    sentence: Annotated[str, typer.Argument(metavar="SENTENCE", help='What to write: "a thick seven".')],
    like: Annotated[Path | None, typer.Option(help="A picture of a character whose style to follow.")] = None,
    strength: Annotated[float, typer.Option(help="How closely to follow it; 0 is not at all.")] = 1.0,
    w: Annotated[float, typer.Option(help="Guidance; diffusers' guidance_scale is 1 + w.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the noise it starts from.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The PNG file to write.")] = Path("drawing.png"),
) -> None:
    """Write a digit by hand, as a sentence asks and in the style of an example."""
    from mmattn.errors import ImageError, check_float, check_int
    from mmattn.recipes import find_recipe, load_recipe
    from mmattn.storage.pretrained import without_bars

    check_int("steps", steps)
    check_float("strength", strength)
    if like is not None and not like.is_file():
        raise ImageError(f"cannot follow {like}: there is no such file")
    recipe = load_recipe(find_recipe("diffusion").folder, "drawing")
    with without_bars():
        written = recipe.draw(sentence, out, like=like, strength=strength, w=w, steps=steps, seed=seed)
    typer.echo(str(written))


@app.command()
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help='Such as "What is the currency of Allemagne?"')],
    index: Annotated[Path, typer.Option(help="The folder of an index.")],
    adapter: Annotated[Path | None, typer.Option(help="The folder of an adapter; the shipped one by default.")] = None,
    lm: Annotated[str, typer.Option(help="The language model that the adapter was trained on.")] = "assets/rag",
    show_sources: Annotated[bool, typer.Option(help="Print the entries looked at.")] = True,
    sources: Annotated[int, typer.Option(min=1, help="Print so many of them.")] = 3,
) -> None:
    """Answer a question from what an index holds, and say what was looked at.

    The number before a source is its share of the attention at the first word of the answer. A chunked adapter goes on
    with the text instead, and the number is the share over all of it.
    """
    from mmattn.recipes import find_recipe, load_recipe
    from mmattn.storage.pretrained import without_bars

    if adapter is not None:
        check_adapter_folder(adapter)
    with without_bars():
        asked = load_recipe(find_recipe("rag").folder, "ask").Asked(index, adapter, lm)
    answer, found = asked(question)
    typer.echo(answer)
    for source in found[:sources] if show_sources else []:
        typer.echo(f"{source.weight:6.1%}  {source.text}")


@index_app.command("build")
def build_index(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON lines, or plain text: an entry per line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the index; what is there is replaced.")],
    field: Annotated[str, typer.Option(help="Of a JSON line, what holds the text.")] = "text",
    id_field: Annotated[str | None, typer.Option(help="Of a JSON line, what names it.")] = None,
    encoder: Annotated[str, typer.Option(help="Any encoder of Hugging Face.")] = "all-MiniLM-L6-v2",
    search: Annotated[str, typer.Option(help="exact, flat, hnsw or ivfpq.")] = "exact",
    engine: Annotated[str, typer.Option(help="What embeds: local, or ray.")] = "local",
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out lines without text.")] = False,
) -> None:
    """Embed the lines of files and make an index of them.

    An interrupted build goes on where it was: the finished part lies beside the index until that is saved.
    """
    import shutil

    import torch

    from mmattn.encoders.text import TextEncoder
    from mmattn.retrieval.corpus import embed_corpus
    from mmattn.retrieval.index import Index

    shards, reader = out.with_name(f"{out.name}.shards"), TextEncoder(encoder)
    made = embed_corpus(
        files, shards, reader, field=field, id_field=id_field, skip_broken=skip_broken, engine=engine, progress=True
    )
    ids, texts, metadata, vectors = [], [], [], [torch.empty(0, reader.dim)]
    for part in made:
        ids += part[0]
        texts += part[1]
        metadata += part[2]
        vectors.append(part[3])
    index = Index.build(torch.cat(vectors), encoder=reader, ids=ids, texts=texts, metadata=metadata, store=search)
    index.save(out)
    shutil.rmtree(shards)
    typer.echo(f"{index} in {out}")


@index_app.command("search")
def search_index(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an index.")],
    query: Annotated[str, typer.Argument(metavar="QUERY")],
    top_k: Annotated[int, typer.Option(help="How many entries.")] = 5,
    encoder: Annotated[str, typer.Option(help="The encoder that the index was built with.")] = "all-MiniLM-L6-v2",
    rerank: Annotated[str | None, typer.Option(help="A cross-encoder, which reads ten times as many.")] = None,
) -> None:
    """Print the entries that fit a query best, each with its score."""
    from mmattn.encoders.text import TextEncoder
    from mmattn.retrieval.index import Index

    wanted = top_k if rerank is None else 10 * top_k
    hits = Index.load(folder, encoder=TextEncoder(encoder)).search([query], wanted)
    if rerank is not None:
        from mmattn.retrieval.rerank import Reranker

        hits = hits.rerank(query, Reranker(rerank)).first(top_k)
    texts = hits.texts[0] if hits.texts is not None else [None] * top_k
    names = hits.ids[0] if hits.ids is not None else [None] * top_k
    for score, name, text, real in zip(hits.scores[0].tolist(), names, texts, hits.mask[0].tolist(), strict=True):
        if real:
            typer.echo(f"{score:.3f}  {name}  {text or ''}".rstrip())


@index_app.command("info")
def describe_index(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an index.")]) -> None:
    """Check an index and say what it holds."""
    from mmattn.retrieval.index import Index

    index = Index.load(folder)
    typer.echo(
        f"{index}\nencoder {index.space.fingerprint or 'unknown'}\nmemory {4 * index.dim * len(index):,} bytes"
    )


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An adapter's folder.")],
    host: Annotated[str | None, typer.Option(help="The model it was trained on, to be examined with it.")] = None,
) -> None:
    """Examine an adapter folder, and with --host the adapter at work on a random batch.

    One verdict per line, and exit code 1 if one of them is bad.
    """
    check_adapter_folder(folder)
    from mmattn.inspect.folders import diagnose

    report = diagnose(folder, host)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def explore(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, such as runs/vision.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("explore.html"),
    heads: Annotated[bool, typer.Option("--heads", help="Keep every head, not only their mean.")] = False,
) -> None:
    """Write a page that shows what the texts of runs looked at, word by word; it opens offline."""
    from mmattn.inspect.explorer import write_page
    from mmattn.inspect.trace import load_traces

    for note in write_page([trace for run in runs for trace in load_traces(run)], out, heads=heads):
        typer.echo(note)
    typer.echo(f"{out}: {out.stat().st_size:,} bytes")


@app.command()
def env() -> None:
    """Show versions, threads, processor, extras.

    Plain text, to be pasted into a bug report.
    """
    from mmattn.inspect.environment import describe

    typer.echo(describe())


@app.command("ls")
def list_all(
    runs: Annotated[Path, typer.Option(help="Where trained adapters are looked for.")] = Path("runs"),
) -> None:
    """List the recipes and the adapters trained here."""
    from mmattn.recipes import list_recipes

    recipes = list_recipes()
    typer.echo(f"recipes (copy one with: mmattn cp {recipes[0].name if recipes else 'RECIPE'})")
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        typer.echo(f"  {recipe.name:<{width}}  {recipe.summary}".rstrip())
    adapters = sorted(path.parent for path in runs.rglob("adapter_config.json")) if runs.is_dir() else []
    typer.echo(f"adapters in {runs}")
    for folder in adapters:
        typer.echo(f"  {folder}")
    if not adapters:
        typer.echo("  none yet: mmattn demo, or mmattn train CONFIG")


@app.command("cp")
def copy(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from `mmattn ls`.")],
    destination: Annotated[Path | None, typer.Argument(metavar="[DEST]", help="Default: its name, here.")] = None,
) -> None:
    """Copy a recipe, to be changed; nothing is overwritten."""
    from mmattn.recipes import copy_recipe

    target = copy_recipe(recipe, destination)
    typer.echo(f"{recipe} copied to {target}")
    if (target / "config.yaml").is_file():
        typer.echo(f"next: mmattn train {target / 'config.yaml'}")


def run_recipe(config: Path, settings: dict[str, Any]) -> None:
    """Hand `settings` to the recipe they belong to, checked against its own `Config` first.

    Raises:
        ConfigError: no recipe, an unknown key, or a value of the wrong kind.
    """
    from pydantic import ValidationError

    from mmattn.recipes import check_settings, load_recipe, raise_settings_error

    module = load_recipe(recipe_of(config, settings), "train")
    model = getattr(module, "Config", None)
    if model is not None:
        if "recipe" not in model.model_fields:
            settings = {key: value for key, value in settings.items() if key != "recipe"}
        settings = check_settings(settings, model)
    try:
        module.main(settings)
    except ValidationError as error:
        raise_settings_error(error)


def recipe_of(config: Path, settings: dict[str, Any]) -> Path:
    """The folder of the recipe that a settings file belongs to: its own, or that of the recipe it names.

    Raises:
        ConfigError: neither.
    """
    from mmattn.errors import ConfigError
    from mmattn.recipes import find_recipe

    folder = config.resolve().parent
    if (folder / "train.py").is_file():
        return folder
    name = settings.get("recipe")
    if not isinstance(name, str):
        raise ConfigError(f"{config} lies beside no train.py, so it must say `recipe: NAME`; got {name!r}")
    return find_recipe(name).folder


def check_adapter_folder(folder: Path) -> None:
    """Refuse a folder that cannot hold an adapter before anything heavy is loaded.

    Raises:
        AdapterFileError: no such folder, or one without adapter_config.json.
    """
    from mmattn.errors import AdapterFileError

    if not folder.is_dir():
        raise AdapterFileError(f"there is no adapter folder {folder}; `mmattn ls` lists those under runs")
    if not (folder / "adapter_config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise AdapterFileError(f"{folder} has no adapter_config.json, so it is not an adapter's folder; found {found}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of the package's own is one clean line and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        app(["--debug", *(word for word in words if word != "--debug")] if debug else words)
    except Exception as error:
        errors = sys.modules.get("mmattn.errors")
        if debug or errors is None or not isinstance(error, (errors.MmattnError, OSError)):
            raise
        typer.echo(f"mmattn: {error}", err=True)
        sys.exit(2)
