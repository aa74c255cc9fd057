"""`mmattn serve` in a process of its own, asked as docs/serving.md says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving.processes import serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its address."""
    words = ["mmattn", "serve", "assets/vision/adapter"]
    with serving(words, ROOT, 120, stderr=subprocess.PIPE, text=True) as started:
        yield started


@pytest.mark.slow
def test_the_page_asks_and_a_stop_finishes_what_runs(served: tuple[subprocess.Popen[str], str]) -> None:
    process, url = served
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "image_url" in one]
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    done = subprocess.run(["bash", "-c", block.replace("http://127.0.0.1:8000", url)], cwd=ROOT, capture_output=True)
    assert "snowdrop" in json.loads(done.stdout)["choices"][0]["message"]["content"]

    body = re.search(r"END\n(.*?)END", block, re.DOTALL)
    assert body is not None
    picture = subprocess.run(["bash", "-c", f"cat <<END\n{body[1]}END"], cwd=ROOT, capture_output=True, check=True)
    asked, lines = json.loads(picture.stdout) | {"stream": True}, list[str]()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=60) as answer:
            lines.extend(answer.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    while not httpx.get(f"{url}/health").json()["running"]:
        assert reader.is_alive()
    process.send_signal(signal.SIGTERM)
    reader.join(60)
    said = process.communicate(timeout=60)[1]
    assert "data: [DONE]" in lines and process.returncode in (0, -signal.SIGTERM), said
    assert "snowdrop" not in said and '"path": "/v1/chat/completions", "status": 200' in said


@pytest.mark.slow
def test_the_page_answers_from_an_index_and_from_documents(tmp_path: Path) -> None:
    """The command, the request and the client of the page, one after the other."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "--index index" in one]
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "openai.OpenAI" in one]
    command, request = block.split("\n", 1)
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    facts = [("currency of Allemagne", "Euro"), ("capital of Allemagne", "Berlin"), ("capital of Espagne", "Madrid")]
    lines = [json.dumps({"title": title, "value": value}) for title, value in facts]
    (tmp_path / "facts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    mmattn = [sys.executable, "-m", "mmattn"]
    build = [*mmattn, "index", "build", "facts.jsonl", "-o", "index", "--for", "assets/rag/adapter"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(build, cwd=tmp_path, env=env, check=True, capture_output=True)
    with serving(shlex.split(command), tmp_path, 120) as (_, url):
        done = subprocess.run(["bash", "-c", request.replace("http://127.0.0.1:8000", url)], capture_output=True)
        assert "Euro" in json.loads(done.stdout)["choices"][0]["text"]
        client = [sys.executable, "-c", code.replace("http://127.0.0.1:8000", url)]
        assert "Euro" in subprocess.run(client, capture_output=True, text=True, check=True).stdout
