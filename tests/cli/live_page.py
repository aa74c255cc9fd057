"""The page of `mmattn live` served, and used by a client over localhost: what `test_live.py` runs in a fresh process.

python -m tests.cli.live_page ADAPTER FOLDER
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from mmattn.cli.live import Live, serve

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def note_names() -> set[Any]:
    """From here on, every host that is looked up."""
    names, resolve = set(), socket.getaddrinfo

    def getaddrinfo(host: Any, *more: Any, **options: Any) -> Any:
        names.add(host)
        return resolve(host, *more, **options)

    socket.getaddrinfo = getaddrinfo
    return names


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def refused(client: Any, route: str, *given: Any) -> str:
    """What the page says to this."""
    import gradio_client

    try:
        client.predict(*given, api_name=route)
    except gradio_client.exceptions.AppError as error:
        return str(error)
    raise AssertionError(f"{route} took {given}")


def use(client: Any, live: Live, folder: Path) -> None:
    """Every tab, right and wrong, one by one and at once."""
    import gradio_client
    from PIL import Image

    (folder / "words.png").write_text("words, not a picture")
    flower, words = (
        gradio_client.handle_file(str(path)) for path in (ASSETS / "flora" / "daffodil.png", folder / "words.png")
    )
    assert "words.png' cannot be read as a picture" in (said := refused(client, "/caption", words)), said
    assert "the question is empty" in (said := refused(client, "/ask", " ")), said
    assert "1000" in (said := refused(client, "/draw", "a seven", None, 1.0, 1000, 2.0, 0)), said
    assert "seed must be at least 0" in (said := refused(client, "/draw", "a seven", None, 1.0, 3, 2.0, -1)), said
    assert "&lt;b&gt;" in (said := refused(client, "/draw", "a <b>bold</b> seven", None, 1.0, 3, 2.0, 0)), said
    captions = [client.submit(flower, api_name="/caption") for _ in range(2)]
    answers = [client.submit(question, api_name="/ask") for question in live.questions]
    text, maps = live.caption(ASSETS / "flora" / "daffodil.png")
    for job in captions:
        said, looked = job.result(300)
        with Image.open(looked) as shown:
            assert said == text and shown.size == maps.size
    for question, job in zip(live.questions, answers, strict=True):
        (said, shares), answer = job.result(300), live.ask(question)
        assert said.startswith(answer.text) and ("nothing in the index" in said) == answer.refused
        assert {one["label"] for one in shares["confidences"]} >= {source.text for source in answer.sources[:2]}
    with Image.open(client.predict("a seven", None, 1.0, 3, 2.0, 0, api_name="/draw")) as drawn:
        assert drawn.size == (256, 256)


def check_look(blocks: Any) -> None:
    """The examples are pictures that one sees, and nothing of the look is asked of a network."""
    lists = [part["props"] for part in blocks.config["components"] if part["type"] == "dataset"]
    galleries = [one for one in lists if [part["name"] for part in one["components"]] == ["image"]]
    shown = [[sample[0]["path"] for sample in gallery["samples"]] for gallery in galleries]
    assert [len(paths) for paths in shown] == [8, 3] and all(path.endswith(".png") for paths in shown for path in paths)
    assert "http" not in "".join(blocks.config.get("stylesheets") or []), blocks.config["stylesheets"]


def main(adapter: Path, folder: Path) -> None:
    """Serve, use and close the page; AssertionError if anything is not as it should be."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "cache")
    (folder / "models").mkdir()
    live, port, names = Live(adapter, folder / "models"), free_port(), note_names()
    os.chdir(folder)  # the examples of the page lie elsewhere
    import gradio_client

    blocks = serve(live, port=port, wait=False)
    assert blocks.local_url == f"http://127.0.0.1:{port}/" and blocks.share_url is None
    assert not blocks.analytics_enabled
    check_look(blocks)
    use(gradio_client.Client(blocks.local_url, verbose=False, download_files=str(folder)), live, folder)
    blocks.close()
    assert names <= {"127.0.0.1", "localhost", None}, names
    print("the page was used; looked up:", names)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
