"""A user's first hour from a wheel: a clean environment, an empty folder, every page and every command.

    python -m tests.from_a_wheel [--wheel FILE] [--without-demo]

Builds the wheel of this checkout, installs it with its extras into an environment of its own, and there, in a folder
that does not see the checkout, runs the Python blocks of the README, of docs and of the recipes' pages, and each
`mmattn` command once. Nothing is sent anywhere but to 127.0.0.1, and to the package registry for what is installed.
Prints one line for each step with its seconds and exits with 1 at the first that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*/README.md"))
FACTS = [
    {"title": "currency of Allemagne", "value": "Euro"},
    {"title": "English name of Allemagne", "value": "Germany"},
    {"title": "language of Bresil", "value": "Portuguese"},
]


class Failed(Exception):
    """A step that did not do what it should."""


class User:
    """Someone in an empty folder, with an environment that has mmattn and nothing of this checkout.

    Args:
        place: an empty folder for the environment and the user's own.
    """

    def __init__(self, place: Path) -> None:
        self.environment, self.folder = place / "environment", place / "work"
        self.folder.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.variables = {
            **kept,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPYCACHEPREFIX": str(place / "bytecode"),
            "COLUMNS": "120",
        }

    def run(self, *words: str, says: Sequence[str] = (), code: int = 0, timeout: int = 1800) -> str:
        """Run a program of the environment: it must end with this code and say these words; all that it said."""
        began = time.perf_counter()
        done = subprocess.run(
            [str(self.environment / "bin" / words[0]), *words[1:]],
            cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        said = done.stderr + done.stdout
        missing = [one for one in says if one not in said]
        print(f"{time.perf_counter() - began:6.1f} s  {' '.join(words)[:150]}", flush=True)
        if done.returncode != code or missing or "Traceback" in said:
            raise Failed(f"{' '.join(words)} ended with {done.returncode}, without {missing}:\n{said[-4000:]}")
        return said

    def serve(self, *words: str, path: str = "") -> None:
        """Start a command that serves a page, fetch it, and end it with Ctrl-C."""
        began = time.perf_counter()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        process = subprocess.Popen(
            [str(self.environment / "bin" / words[0]), *words[1:], "--port", str(port)],
            cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            while True:
                try:
                    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10).read().decode()
                    break
                except OSError as error:
                    if process.poll() is not None or time.perf_counter() - began > 300:
                        raise Failed(f"{' '.join(words)} does not serve: {error}") from error
                    time.sleep(1)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        print(f"{time.perf_counter() - began:6.1f} s  {' '.join(words)}", flush=True)
        if "mmattn" not in page or process.returncode not in (0, 130) or "Traceback" in said:
            raise Failed(f"{' '.join(words)} ended with {process.returncode}:\n{said[-4000:]}")


def install(user: User, wheel: Path | None) -> None:
    """The environment with the wheel, built of this checkout where none is given."""
    if wheel is None:
        dist = user.environment.parent / "dist"
        subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(dist), str(ROOT)],
                       check=True, capture_output=True)  # fmt: skip
        (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(user.environment)], check=True)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    python = str(user.environment / "bin" / "python")
    wanted = f"mmattn[all,serve,lance] @ {wheel.resolve().as_uri()}"  # docs/retrieval.md has an index in LanceDB
    pip = [uv, "pip", "install", "--quiet", "--python", python] if uv else [python, "-m", "pip", "install", "-qq"]
    subprocess.run([*pip, wanted], check=True, env=user.variables)


def first_hour(user: User, demo: bool) -> None:
    """All pages and all commands."""
    mmattn, work = user.run, user.folder
    mmattn("mmattn", "--version", says=["mmattn"])
    mmattn("mmattn", "env", says=["torch", "transformers"])
    mmattn("mmattn", "models", says=["smollm2", "whisper-base"])
    mmattn("mmattn", "cp", "assets")
    mmattn("mmattn", "ls", says=["vision", "finetune"])
    mmattn("mmattn", "draw", "a thick seven", "--like", "assets/digits/slanted.png", "-o", "seven.png")
    if not (work / "seven.png").read_bytes().startswith(b"\x89PNG"):
        raise Failed("mmattn draw left no PNG file")
    mmattn("mmattn", "caption", "assets/flora/snowdrop.png", says=["the snowdrop"])
    mmattn("mmattn", "attach-check", "assets/rag", says=["model.layers, 6 of width 160"])
    mmattn("mmattn", "doctor", "assets/rag/adapter", "--host", "assets/rag")
    (work / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    mmattn("mmattn", "index", "build", "facts.jsonl", "-o", "facts", "--for", "assets/rag/adapter")
    mmattn("mmattn", "index", "info", "facts", says=["3"])
    encoder = "assets/rag/adapter/encoder.safetensors"
    mmattn("mmattn", "index", "search", "facts", "currency of Allemagne", "--encoder", encoder, says=["Euro"])
    mmattn(
        "mmattn",
        "ask",
        "What is the currency of Allemagne?",
        "--index",
        "facts",
        "--adapter",
        "assets/rag/adapter",
        says=["Euro"],
    )

    # Answers from a folder of texts, as in the README.
    (work / "notes").mkdir()
    (work / "notes" / "backup.txt").write_text("The backup runs every night. It keeps the files on the server Atlas.")
    (work / "notes" / "bees.md").write_text("Sand bees nest in sunny banks of sand. They fly from March to May.")
    mmattn("mmattn", "index", "build", "notes", "-o", "index")
    asked = ("On which server are the files?", "--index", "index", "--passages", "2")
    mmattn("mmattn", "ask", *asked, says=["backup.txt", "bees.md"])

    # An adapter of the user's own pictures, in folders of classes.
    for name in ("snowdrop", "cornflower"):
        (work / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            shutil.copy(work / "assets" / "flora" / f"{name}.png", work / "pictures" / name / f"{number}.png")
    mmattn("mmattn", "encode", "pictures", "-o", "pictures.store", says=["num_rows: 8", "bytes"])
    mmattn("mmattn", "cp", "finetune", "mine")
    settings = ("data.path=pictures", "optim.max_steps=4", "out=runs/mine")
    mmattn("mmattn", "train", "mine/config.yaml", *settings, says=["held-out loss", "the adapter is in"])
    mmattn("mmattn", "train", "mine/config.yaml", *settings, says=["finished"])
    stored = ("data.path=pictures.store", "optim.max_steps=4", "out=runs/stored")
    mmattn("mmattn", "train", "mine/config.yaml", *stored, says=["num_rows: 8", "the adapter is in"])
    mmattn("mmattn", "caption", "pictures/snowdrop", "--adapter", "runs/mine/adapter", says=["0.png", "3.png"])
    mmattn("mmattn", "explore", "runs/mine", says=[".html"])
    mmattn("mmattn", "draw", "a seven", "--adapter", "runs/mine/adapter", code=2, says=["for image-to-text"])
    user.serve("mmattn", "serve", "runs/mine/adapter", path="v1/models")

    for page in PAGES:
        (user.environment.parent / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, user.environment.parent / page)
    shutil.copy(ROOT / "tests" / "pages.py", user.environment.parent / "pages.py")
    pages = [str(user.environment.parent / page) for page in PAGES]
    print(mmattn("python", str(user.environment.parent / "pages.py"), *pages, says=["README.md: runs"]))

    if demo:
        mmattn("mmattn", "demo", says=["as before, bit for bit", "adapter, right picture"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel that is built already")
    parser.add_argument("--without-demo", action="store_true", help="leave out `mmattn demo`, which trains for minutes")
    given = parser.parse_args()
    # A shell that starts this in the background has it, and all that it starts, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as place:
        user, began = User(Path(place).resolve()), time.perf_counter()
        try:
            install(user, given.wheel)
            print(f"{time.perf_counter() - began:6.1f} s  built and installed", flush=True)
            first_hour(user, not given.without_demo)
        except (Failed, subprocess.SubprocessError, OSError) as error:
            print(error)
            return 1
    print("every page and every command, from a wheel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
