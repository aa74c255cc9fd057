"""The page of `mmattn explore`: its script, used as a reader does in Node, its size and its safety."""

from __future__ import annotations

import base64
import hashlib
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
from PIL import Image

import mmattn
from mmattn import inspect
from mmattn.cli.app import main
from mmattn.errors import ConfigError
from mmattn.inspect import explorer
from tests.inspect.test_trace import FILE, HEADS, LAYERS, SOURCES, WORDS, made

HERE = Path(__file__).parent
NODE = shutil.which("node")
EVIL = '</script><img src=x onerror="alert(1)"><!--<script>&amp;\u2028$title'


def evil() -> mmattn.inspect.Trace:
    """A text that would be HTML: words that attend to words, and no picture."""
    weights = torch.full((1, 1, 2, 3), 0.25)
    return mmattn.inspect.Trace([EVIL, "two"], [EVIL, "b", "c"], weights, [EVIL], EVIL)


def example() -> mmattn.inspect.Trace:
    """Patches of a picture, 3 × 2 of them, to which the patches of another attend."""
    torch.manual_seed(0)
    weights, words = torch.rand(1, 2, 6, 4).softmax(2), [f"patch {i}" for i in range(6)]
    sources, picture = ["a", "b", "c", "d"], Image.new("RGB", (31, 37), (10, 90, 200))
    shown = {"grid": (2, 2), "picture": picture, "word_grid": (3, 2), "word_picture": picture}
    return mmattn.inspect.Trace(words, sources, weights, ["layer 5"], queries="sources", **shown)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a picture, of a text that would be HTML, and of patches, with every head."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    traces = {"captions": [made()], "": [evil()], "<i>digits</i>": [example()]}
    assert inspect.write_page(traces, path, heads=True, title="a <b>title</b> & more") == []
    return path


@pytest.fixture(scope="module")
def found(page: Path) -> dict[str, Any]:
    """What a reader sees, step by step: the page's script in Node, where no pixel is drawn."""
    files = [HERE / name for name in ("page_shim.js", "page_seen.js", "page_driver.js")]
    command = [str(NODE), files[0], page, *files[1:]]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="there is no Node here")
class TestReading:
    def test_a_word_shows_true_weights(self, found: dict[str, Any]) -> None:
        mean, first, trace = made().mean(), found["first"], made()
        assert (first["words"], first["pressed"], first["tabs"]) == (list(WORDS), 0, 1)
        best = mean[0].argsort(descending=True).tolist()
        for text, source in zip(first["sources"], best, strict=True):
            change = 100 * (trace.dropped[0, source] - trace.probability[0])
            assert text.startswith(f"{100 * mean[0, source]:.2f} %{SOURCES[source]}")
            assert text.endswith(f"{'+' if change > 0 else '−'}{abs(change):.1f} points if dropped")
        entropy = float(torch.special.entr(mean[0]).sum() / math.log(2))
        assert f"entropy {entropy:.2f} of {math.log2(len(SOURCES)):.2f} bits" in first["figures"]
        assert "sum 1.0000" in first["figures"]
        assert '"one": probability 75.0 %, without the memory 12.5 %' in first["figures"]
        assert SOURCES[best[0]] in first["label"]

    def test_numbers_are_explained_where_they_stand(self, found: dict[str, Any]) -> None:
        first, tiles = found["first"]["explained"], found["tiles"]["explained"]
        assert first.startswith("Sum: the share of its attention") and "elsewhere" in first
        assert f"from 0 bits (all on one source) to {math.log2(len(SOURCES)):.2f} bits" in first
        assert "that source masked" in first and "Sum" not in found["dropped"]["explained"]
        assert "what this patch got from all of them" in tiles and "elsewhere" not in tiles and "masked" not in tiles

    def test_pictures_are_named_for_who_does_not_see_them(self, found: dict[str, Any]) -> None:
        assert found["first"]["alts"] == ["the picture of “a title”, under the weights"]
        assert found["other"]["alts"] == []

    def test_samples_of_one_run_stand_together(self, found: dict[str, Any]) -> None:
        assert found["first"]["groups"] == [["captions", 1], [None, 0], ["<i>digits</i>", 1]]

    def test_pointing_changes_the_picture(self, found: dict[str, Any]) -> None:
        first, hover = found["first"], found["hover"]
        assert len(first["rects"]) == len(hover["rects"]) == len(SOURCES)
        assert first["rects"] != hover["rects"] and hover["pressed"] == 1 and '"two"' in hover["figures"]
        mean = made().mean()[1]
        for shade, share in zip(hover["rects"], (0.75 * mean / mean.max()).tolist(), strict=True):
            assert float(shade) == pytest.approx(share, abs=2e-4)

    def test_the_keyboard_goes_where_a_pointer_goes(self, found: dict[str, Any]) -> None:
        right = found["right"]
        assert (right["pressed"], right["focused"], right["tabs"]) == (2, 2, 1)
        assert found["end"]["pressed"] == 2 and right["figures"].startswith('"three"')

    def test_layers_heads_and_counterfactuals(self, found: dict[str, Any]) -> None:
        trace, word = made(), 0

        def top(values: torch.Tensor) -> str:
            return f"{100 * values.max():.2f} %"

        assert found["first"]["layers"] == ["all layers", *LAYERS]
        heads = [f"head {head}" for head in range(HEADS)]
        assert [*found["first"]["views"]][1:-1] == heads and len(found["first"]["views"]) == HEADS + 2
        assert found["layer"]["sources"][0].startswith(top(trace.weights[1].mean(0)[word]))
        assert found["head"]["sources"][0].startswith(top(trace.weights[1, 4, word]))
        assert found["dropped"]["locked"] and not found["head"]["locked"]
        change = trace.dropped[word] - trace.probability[word]
        most = change[change.abs().argmax()].item()
        assert found["dropped"]["sources"][0].startswith(f"{'+' if most >= 0 else '−'}{100 * abs(most):.1f} points")
        assert not found["dropped"]["sources"][0].endswith("if dropped"), "it is shown anyway"

    def test_html_stays_letters(self, found: dict[str, Any], page: Path) -> None:
        other = found["other"]
        assert other["title"] == EVIL and other["words"] == [EVIL, "two"]
        assert other["sources"] == [f"25.00 %{name}" for name in (EVIL, "b", "c")]
        assert "25.0 % elsewhere" in other["figures"] and other["views"] == ["mean of the heads"]
        assert set(found["first"]["elements"] + other["elements"]) <= {
            "button", "div", "img", "li", "ol", "rect", "span", "svg", "title",
        }  # fmt: skip
        assert EVIL not in page.read_text(encoding="utf-8")

    def test_patches_of_an_example_are_words(self, found: dict[str, Any]) -> None:
        tiles, mean = found["tiles"], example().mean()[0]
        assert tiles["named"] == list(example().words) and tiles["words"] == [""] * 6
        shades = (0.75 * (mean - mean.min()) / (mean.max() - mean.min())).tolist()
        assert [float(one) for one in tiles["rects"]] == pytest.approx(shades, abs=2e-4), "from the least to the most"
        assert "over 4 sources" in tiles["figures"]
        assert (found["below"]["pressed"], found["below"]["focused"]) == (2, 2), "a row of two below the first"


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


def test_a_huge_run_is_reduced_and_says_so(tmp_path: Path) -> None:
    words, sources, layers = ([f"{kind}{i}" for i in range(n)] for kind, n in (("w", 101), ("s", 97), ("n", 3)))
    path = tmp_path / "page.html"
    trace = mmattn.inspect.Trace(words, sources, torch.full((3, 5, 101, 97), 1 / 97), layers, word_grid=(101, 1))
    (note,) = inspect.write_page([trace] * 40, path, heads=True)
    assert path.stat().st_size < explorer.LIMIT
    assert "of 40 samples are shown" in note and json.dumps(note) in path.read_text(encoding="utf-8")


def test_what_cannot_be_reduced_is_refused(tmp_path: Path) -> None:
    trace = mmattn.inspect.Trace(["a"], ["b" * 3_000_000], torch.ones(1, 1, 1, 1), ["c"])
    with pytest.raises(ConfigError, match="give a shorter text, or fewer layers, heads or sources"):
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
    assert json.loads(data)["groups"] == ["one", "two"]
    before = out.read_bytes()
    (tmp_path / "one" / FILE).unlink()
    with pytest.raises(SystemExit) as end:
        main(["explore", str(tmp_path / "one"), "-o", str(out)])
    assert end.value.code == 2 and "there is no attention.safetensors" in capsys.readouterr().err
    assert out.read_bytes() == before
