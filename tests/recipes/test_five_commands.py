"""The five commands of docs/train-on-your-data.md, as they are: from a folder and a dataset to a served model."""

from __future__ import annotations

import base64
import re
import shlex
import shutil
from pathlib import Path

import pytest

from mmattn import training
from tests.cli.running import call
from tests.models.test_pretrained import need
from tests.recipes.test_finetune import FLORA, ROOT
from tests.serving.processes import serving

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi", reason="fastapi is not installed; it comes with mmattn[serve]")

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "train-on-your-data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[:2]


def ask(folder: Path, *words: str) -> str:
    """What the served model says of the photo."""
    picture = base64.b64encode((folder / "photo.jpg").read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}}]
    body = {"model": "adapter", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    with serving(list(words), folder, 240) as (_, url):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("given", ["a folder", "a dataset"])
def test_the_page(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("smollm2", "efficientnet-lite0"):
        need(model)

    def said(*words: str) -> str:
        code, out, err = call(capsys, *words[1:])
        assert code == 0, out + err
        return out + err

    lines, [of_a_dataset] = ([shlex.split(line) for line in block.strip().splitlines()] for block in BLOCKS)
    if given == "a dataset":
        lines[0] = of_a_dataset
    assert [line[1] for line in lines] == ["encode", "cp", "train", "caption", "serve"]
    name = lines[0][2]
    if given == "a folder":
        shutil.copytree(FLORA, tmp_path / name)
    else:
        datasets = pytest.importorskip("datasets", reason="datasets is not installed; it comes with mmattn[train]")
        rows = training.read_rows(FLORA, split="train")
        columns = {"caption": rows["text"][:], "photo": [image["path"] for image in rows["image"]]}
        data = datasets.Dataset.from_dict(columns).cast_column("photo", datasets.Image())
        data.save_to_disk(tmp_path / name)
    shutil.copy(FLORA / "daffodil.png", tmp_path / "photo.jpg")
    encode, copy, train, caption, serve = lines
    monkeypatch.chdir(tmp_path)
    assert "num_rows: 8" in said(*encode)
    said(*copy)
    trained = said(*train, "optim.max_steps=3", "device=cpu")
    assert "memories of width 112" in trained and "the adapter is in" in trained
    assert said(*caption).startswith("photo.jpg: ")
    assert ask(tmp_path, *serve)
