"""The page of `mmattn explore`, used as a reader does: in Chromium where there is one, and its script in Node."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import inspect
from mmattn.cli import main
from mmattn.errors import ConfigError
from mmattn.inspect import explorer
from tests.inspect.test_trace import FILE, HEADS, LAYERS, SOURCES, WORDS, made

HERE = Path(__file__).parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NODE = shutil.which("node")
EVIL = '</script><img src=x onerror="alert(1)"><!--<script>&amp;\u2028$title'


def evil() -> mmattn.Trace:
    """A text that would be HTML: words that look at words, and no picture."""
    weights = torch.full((1, 1, 2, 3), 0.25)
    return mmattn.Trace([EVIL, "two"], [EVIL, "b", "c"], weights, [EVIL], EVIL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a picture and of a text that would be HTML, with every head."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert inspect.write_page([made(), evil()], path, heads=True, title="a <b>title</b> & more") == []
    return path


def in_node(page: Path) -> dict[str, Any]:
    """What the driver notes in Node."""
    done = subprocess.run(
        [str(NODE), HERE / "page_shim.js", page, HERE / "page_driver.js"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_chromium(page: Path, folder: Path) -> dict[str, Any]:
    """What the driver notes in a headless Chromium that cannot resolve any name; errors of the page fail."""
    driver = (HERE / "page_driver.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(driver.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    driven = folder / "driven.html"
    driven.write_text(text.replace("</body>", f"<script>{driver}</script></body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/own"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", driven.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    errors = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert done.returncode == 0 and not errors, errors or done.stderr
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, "the page's script or the driver did not come to its end"
    return json.loads(html.unescape(found[1]))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("chromium", marks=pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")),
        pytest.param("node", marks=pytest.mark.skipif(NODE is None, reason="there is no Node here")),
    ],
)
def found(request: pytest.FixtureRequest, page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a reader sees, step by step."""
    return in_node(page) if request.param == "node" else in_chromium(page, tmp_path_factory.mktemp("chromium"))


class TestReading:
    def test_a_word_shows_true_weights(self, found: dict[str, Any]) -> None:
        assert found["words"] == list(WORDS) and found["fetched"] == 0
        mean, first = made().mean(), found["first"]
        assert first["pressed"] == 0 and first["tabs"] == 1
        best = mean[0].argsort(descending=True).tolist()
        for text, source in zip(first["sources"], best, strict=True):
            assert text.startswith(f"{100 * mean[0, source]:.2f} %") and text.endswith(SOURCES[source])
        entropy = float(torch.special.entr(mean[0]).sum() / math.log(2))
        assert f"entropy {entropy:.2f} of {math.log2(len(SOURCES)):.2f} bits" in first["figures"]
        assert "sum 1.0000" in first["figures"]
        assert '"one": probability 75.0 %, without the memory 12.5 %' in first["figures"]
        assert SOURCES[best[0]] in first["label"]

    def test_pointing_changes_the_picture(self, found: dict[str, Any]) -> None:
        first, hover = found["first"], found["hover"]
        assert len(first["rects"]) == len(hover["rects"]) == len(SOURCES)
        assert first["rects"] != hover["rects"] and hover["pressed"] == 1 and '"two"' in hover["figures"]
        mean = made().mean()[1]
        for shade, share in zip(hover["rects"], (0.85 * mean / mean.max()).tolist(), strict=True):
            assert float(shade) == pytest.approx(share, abs=2e-4)

    def test_the_keyboard_goes_where_a_pointer_goes(self, found: dict[str, Any]) -> None:
        assert (found["right"]["pressed"], found["focused"], found["right"]["tabs"]) == (2, 2, 1)
        assert found["end"]["pressed"] == 2 and found["right"]["figures"].startswith('"three"')

    def test_layers_heads_rollout_and_counterfactuals(self, found: dict[str, Any]) -> None:
        trace, word = made(), 0

        def top(values: torch.Tensor) -> str:
            return f"{100 * values.max():.2f} %"

        assert found["first"]["layers"] == ["all layers", *LAYERS]
        heads = [f"head {head}" for head in range(HEADS)]
        assert [*found["first"]["views"]][1:-2] == heads and len(found["first"]["views"]) == HEADS + 3
        assert found["layer"]["sources"][0].startswith(top(trace.weights[1].mean(0)[word]))
        assert found["head"]["sources"][0].startswith(top(trace.weights[1, 4, word]))
        assert found["rollout"]["sources"][0].startswith(top(trace.rollout[word]))
        assert found["rollout"]["locked"] and found["dropped"]["locked"] and not found["head"]["locked"]
        change = trace.dropped[word] - trace.probability[word]
        most = change[change.abs().argmax()].item()
        assert found["dropped"]["sources"][0].startswith(f"{'+' if most >= 0 else '−'}{100 * abs(most):.1f} points")

    def test_html_stays_letters(self, found: dict[str, Any], page: Path) -> None:
        other = found["other"]
        assert other["title"] == EVIL and other["names"] == [EVIL, "two"]
        assert other["sources"] == [f"25.00 %{name}" for name in (EVIL, "b", "c")]
        assert "25.0 % elsewhere" in other["figures"] and other["views"] == ["mean of the heads"]
        assert set(found["elements"]) <= {"button", "div", "img", "li", "ol", "rect", "span", "svg", "title"}
        assert EVIL not in page.read_text(encoding="utf-8")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_page_can_fetch_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    reader = _Tags()
    reader.feed(text)
    assert [tag for tag, _ in reader.tags].count("script") == 2 and "img" not in [tag for tag, _ in reader.tags]
    links = [value for _, given in reader.tags for name, value in given.items() if name in ("src", "href", "action")]
    assert links == ["data:,"]
    (policy,) = [given["content"] for _, given in reader.tags if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    for kind in ("style", "script"):
        own = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.S)
        assert own and base64.b64encode(hashlib.sha256(own[1].encode()).digest()).decode() in policy
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert script and not re.search(r"innerHTML|outerHTML|document\.write|fetch\(|XMLHttp|import\(", script[1])
    assert "a &lt;b>title&lt;/b> &amp; more" in text


def test_numbers_in_a_page_are_the_weights() -> None:
    weights = torch.rand(3, 5, 7, 11)
    raw = base64.b64decode(explorer._packed(weights))
    back = torch.frombuffer(bytearray(raw), dtype=torch.uint16).to(torch.float64).view(weights.shape) / 65535
    assert (back - weights).abs().max() <= 0.5 / 65535 + 1e-7


class TestSizes:
    @staticmethod
    def large(l: int = 101, s: int = 97, n: int = 3, h: int = 5) -> mmattn.Trace:
        weights = torch.full((n, h, l, s), 1 / s)
        words, sources, layers = (
            [f"{kind}{i}" for i in range(count)] for kind, count in (("w", l), ("s", s), ("n", n))
        )
        return mmattn.Trace(words, sources, weights, layers, rollout=weights[0, 0])

    @pytest.mark.parametrize(
        ("count", "sizes", "words"),
        [
            (1, {"h": 60}, ["Single heads are left out"]),
            (40, {}, ["Single heads are left out", "of 40 samples are shown"]),
            (1, {"n": 97, "l": 151}, ["Single heads are left out", "Single layers are left out"]),
            (2, {"l": 3001, "s": 211}, ["heads", "1 of 2 samples", "layers", "of 3001 words are shown"]),
        ],
    )
    def test_a_huge_run_is_reduced_and_says_so(
        self, count: int, sizes: dict[str, int], words: list[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "page.html"
        notes = inspect.write_page([self.large(**sizes)] * count, path, heads=True)
        assert path.stat().st_size < explorer.LIMIT
        assert len(notes) == len(words) and all(part in note for part, note in zip(words, notes, strict=True))
        assert all(json.dumps(note) in path.read_text(encoding="utf-8") for note in notes)

    def test_what_cannot_be_reduced_is_refused(self, tmp_path: Path) -> None:
        trace = mmattn.Trace(["a"], ["b" * 3_000_000], torch.ones(1, 1, 1, 1), ["c"])
        with pytest.raises(ConfigError, match="fewer or shorter sources"):
            inspect.write_page([trace], tmp_path / "page.html")
        with pytest.raises(ConfigError, match="no traces"):
            inspect.write_page([], tmp_path / "page.html")
        assert not any(tmp_path.iterdir())


def test_the_command_writes_a_page_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, trace in (("one", made()), ("two", evil())):
        (tmp_path / name).mkdir()
        inspect.save_traces([trace], tmp_path / name)
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as end:
        main(["explore", str(tmp_path / "one"), str(tmp_path / "two"), "-o", str(out)])
    assert not end.value.code and f"{out.stat().st_size:,} bytes" in capsys.readouterr().out
    (data,) = re.findall(r'id="data">(.*?)</script>', out.read_text(encoding="utf-8"), re.S)
    assert [one["heads"] for one in json.loads(data)["traces"]] == [1, 1], "the mean of the heads, unless told"
    before = out.read_bytes()
    (tmp_path / "one" / FILE).unlink()
    with pytest.raises(SystemExit) as end:
        main(["explore", str(tmp_path / "one"), "-o", str(out)])
    assert end.value.code == 2 and "there is no attention.safetensors" in capsys.readouterr().err
    assert out.read_bytes() == before
