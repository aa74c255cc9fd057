"""The page of `mmattn live`: what is behind its tabs, asked by one and by several at once, and the page itself."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

import mmattn
from mmattn.cli.live import LONGEST, Live
from mmattn.errors import AdapterFileError, ConfigError, ImageError, TextError
from mmattn.recipes import find_recipe, load_recipe

pytestmark = pytest.mark.slow

ASSETS = Path(__file__).resolve().parents[2] / "assets"
FLOWERS = [ASSETS / "flora" / f"{name}.png" for name in ("daffodil", "field-poppy")]
BOLD, SLANTED = (ASSETS / "digits" / f"{name}.png" for name in ("bold", "slanted"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An adapter that a run of seconds leaves."""
    folder = tmp_path_factory.mktemp("run")
    data = {"kind": "flora", "train_per_species": 1, "held_out_per_species": 1, "cache": str(folder / "cache")}
    train = load_recipe(find_recipe("vision").folder, "train")
    run = train.main(
        {
            "out": str(folder / "run"),
            "progress": False,
            "controls": False,
            "data": data,
            "adapter": {"every": 3, "num_heads": 2, "head_dim": 16, "feed_forward": 1},
            "optim": {"max_steps": 30, "batch_size": 16, "warmup_steps": 1},
            "max_new_tokens": 11,
        }
    )
    return Path(run) / "adapter"


@pytest.fixture(scope="module")
def live(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """The models."""
    return Live(adapter, tmp_path_factory.mktemp("live"))


def test_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match="nowhere"):
        Live(tmp_path / "nowhere", tmp_path)


def shades(image: Image.Image) -> int:
    return len(image.convert("RGB").getcolors(1 << 24))


def test_a_picture_is_captioned_and_each_word_has_its_map(live: Live, adapter: Path) -> None:
    for flower in FLOWERS:
        text, maps = live.caption(flower)
        assert text == mmattn.pipeline(adapter)(flower)
        assert maps.width > 1000 and shades(maps) > 1000
    assert live.caption(flower.read_bytes()) == (text, maps), "a file and its bytes are one picture"


def test_a_long_picture_is_shown_as_the_encoder_sees_it(live: Live) -> None:
    with Image.open(FLOWERS[0]) as flower:
        square = flower.convert("RGB")
    wide = Image.new("RGB", (3 * square.width, square.height))
    wide.paste(square, (square.width, 0))
    (said, maps), (text, want) = live.caption(wide), live.caption(square)
    apart = ImageChops.difference(maps, want)
    assert said == text and ImageStat.Stat(apart).mean < [2, 2, 2]


def test_a_question_is_answered_from_its_source_or_refused(live: Live) -> None:
    for question in live.questions[:4]:
        answer = live.ask(question)
        text, share = answer.sources[0].text, answer.sources[0].weight
        assert not answer.refused and answer.text in text
        assert share > 0.2 and [one.weight for one in answer.sources] == sorted(
            (one.weight for one in answer.sources), reverse=True
        )
        assert 0 < sum(one.weight for one in answer.sources) <= 1 + 1e-5
    absent = live.ask(live.questions[4])
    assert absent.refused and absent.text == "unknown" and absent.sources[0].weight < 0.2


def test_a_digit_follows_the_sentence_and_the_example(live: Live) -> None:
    plain = live.draw("a seven", steps=3)
    assert plain.size == (256, 256) and shades(plain) > 10
    assert live.draw("a seven", steps=3) == plain == live.draw("a seven", SLANTED, adapter_scale=0, steps=3)
    others = [live.draw("a two", steps=3), live.draw("a seven", BOLD, steps=3), live.draw("a seven", steps=3, seed=1)]
    assert plain not in others and live.draw("a seven", SLANTED, steps=3) not in others


@pytest.mark.parametrize(
    ("verb", "given", "error", "match"),
    [
        ("caption", (None,), ImageError, "there is no picture"),
        ("caption", ("nowhere.png",), ImageError, "there is no file"),
        ("caption", (b"words, not a picture",), ImageError, "picture"),
        ("ask", ("",), TextError, "the question is empty"),
        ("ask", (" \n",), TextError, "the question is empty"),
        ("ask", ("a" * (LONGEST + 1),), TextError, f"at most {LONGEST}"),
        ("draw", ("",), TextError, "the sentence is empty"),
        ("draw", ("a purple seven",), TextError, "words this model never saw"),
        ("draw", ("a seven", b"words"), ImageError, "picture"),
        ("draw", ("a seven", Image.new("RGB", (9, 9))), ImageError, "shows nothing"),
        ("draw", ("a seven", None, 2.5), ConfigError, "adapter_scale must be in"),
        ("draw", ("a seven", None, math.nan), ConfigError, "adapter_scale must be"),
        ("draw", ("a seven", None, 1.0, 0), ConfigError, "steps must be at least 1"),
        ("draw", ("a seven", None, 1.0, 101), ConfigError, "steps must be at most 100"),
        ("draw", ("a seven", None, 1.0, 3, 0.9), ConfigError, "guidance_scale must be in"),
        ("draw", ("a seven", None, 1.0, 3, 6.1), ConfigError, "guidance_scale must be in"),
        ("draw", ("a seven", None, 1.0, 3, 2.0, -1), ConfigError, "seed must be at least 0"),
        ("draw", ("a seven", None, 1.0, 3, 2.0, None), ConfigError, "seed must be an int"),
    ],
)
def test_what_cannot_be_done_is_said(
    live: Live, verb: str, given: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        getattr(live, verb)(*given)


def test_answers_of_many_at_once_do_not_mix(live: Live) -> None:
    asked: list[Callable[[], Any]] = []
    for number in range(2):
        asked.append(lambda number=number: live.caption(FLOWERS[number]))
        asked.append(lambda number=number: live.ask(live.questions[number]))
        asked.append(lambda number=number: live.draw(f"a {number}", (None, BOLD)[number], steps=3))
    alone = [one() for one in asked]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda one: one(), asked * 2))
    assert together == alone * 2
    with pytest.raises(TextError):
        live.ask("")
    assert live.ask(live.questions[0]) == alone[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_in_use(adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'mmattn[demo]'")
    # A process of its own: gradio leaves sockets and loops open when it closes.
    script = [sys.executable, "-W", "ignore", "-m", "tests.cli.live_page", str(adapter), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ASSETS.parent, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the page was used" in done.stdout
