"""The arrows of the house, read from the source; and proof that each of these checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import architecture

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mmattn"
GOOD = {
    "__init__.py": "from mmattn.memory import Memory\n",
    "errors.py": "import math\n",
    "memory.py": "from mmattn.errors import ShapeError\n",
    "attention.py": '"""softmax in words does not count."""\ndef attend(x):\n    return x.softmax(-1)\n',
    "adapters/__init__.py": "",
    "adapters/gated.py": "from .. import memory\nfrom . import resampler\nfrom ..attention import attend\n",
    "adapters/resampler.py": "from mmattn.core.attention import attend\n",
    "hosts/__init__.py": "",
    "hosts/language.py": "from mmattn import __version__\ndef find():\n    import transformers\n",
    "hosts/handle.py": "def doctor():\n    from mmattn.inspect.doctor import examine\n",
    "encoders/openclip.py": "def load():\n    from mmattn import errors\n    errors.import_extra('open_clip', 'x')\n",
    "encoders/images.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PIL.Image import Image\n",
    "inspect/doctor.py": "from mmattn.hosts import language\n",
    "cli.py": "import mmattn\ndef doctor():\n    from mmattn.inspect.doctor import diagnose\n",
}


def house(folder: Path, **planted: str) -> Path:
    """A small package that keeps every rule, with the planted lines added (`hosts__language="import faiss"`)."""
    package = folder / "mmattn"
    for name, text in GOOD.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in planted.items():
        path = package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text + "\n")
    return package


class TestTheHouse:
    def test_arrows_go_one_way(self) -> None:
        assert architecture.imports(PACKAGE)
        assert architecture.wrong_arrows(PACKAGE) == []

    def test_heavy_dependencies_live_in_one_place(self) -> None:
        assert architecture.heavy_imports(PACKAGE) == []

    def test_no_drawers(self) -> None:
        assert architecture.drawers(PACKAGE) == []

    def test_one_softmax(self) -> None:
        lines = architecture.attention_lines(PACKAGE, {"softmax", "Softmax", "_softmax"})
        assert [line.split(":")[0] for line in lines] == ["attention"], lines

    def test_every_fused_attention_is_called_in_the_core(self) -> None:
        lines = architecture.attention_lines(PACKAGE, architecture.ATTENTION_CALLS)
        assert {line.split(":")[0] for line in lines} == {"attention"}, lines

    def test_recipes_use_the_front_door(self) -> None:
        assert architecture.back_doors(ROOT / "recipes") == []


class TestTheseChecksCanFail:
    def test_a_good_house_passes(self, tmp_path: Path) -> None:
        package = house(tmp_path)
        assert architecture.wrong_arrows(package) == []
        assert architecture.heavy_imports(package) == []
        assert architecture.drawers(package) == []
        assert architecture.attention_lines(package, architecture.ATTENTION_CALLS) == ["attention:3"]

    @pytest.mark.parametrize(
        ("place", "line", "match"),
        [
            ("errors", "from mmattn.memory import Memory", "errors stands below"),
            ("memory", "from . import attention", "memory stands below"),
            ("memory", "import mmattn.hosts.causal_lm.model", "memory stands below"),
            ("attention", "def late():\n    from mmattn import adapters", "attention stands below"),
            ("attention", "import importlib\nimportlib.import_module('mmattn.hosts')", "attention stands below"),
            ("adapters__gated", "from ..hosts.language import find", "adapters stands below"),
            ("encoders__openclip", "from mmattn.core.attention import attend", "encoders must not know attention"),
            ("retrieval__index", "from mmattn.hosts import language", "retrieval must not know hosts"),
            ("hosts__language", "from mmattn.inspect.doctor import diagnose", "hosts must not know inspect"),
            ("hosts__handle", "from mmattn.inspect.doctor import examine", "hosts must not know inspect"),
            ("hosts__handle", "def late():\n    from mmattn.inspect import record", "hosts must not know inspect"),
            ("training__loop", "from mmattn.inspect import doctor", "training must not know inspect"),
            ("hosts__language", "from mmattn.encoders import openclip", "hosts must not know encoders"),
            ("inspect__doctor", "from mmattn import cli", "inspect must not know cli"),
            ("hosts__language", "from mmattn import Memory", "front door is for users"),
            ("hosts__language", "import mmattn", "front door is for users"),
            ("novel", "from mmattn.errors import ShapeError", "novel has no place"),
        ],
    )
    def test_a_wrong_arrow_is_seen(self, tmp_path: Path, place: str, line: str, match: str) -> None:
        (complaint,) = architecture.wrong_arrows(house(tmp_path, **{place: line}))
        assert match in complaint and complaint.startswith(f"{place.replace('__', '.')}:")

    @pytest.mark.parametrize(
        ("place", "line", "match"),
        [
            ("hosts__language", "import transformers.models", "at its top"),
            (
                "hosts__language",
                "try:\n    from transformers import AutoModel\nexcept ImportError:\n    pass",
                "at its top",
            ),
            ("hosts__language", "class Late:\n    import transformers", "at its top"),
            ("encoders__openclip", "import_extra('open_clip', 'vision')", "at its top"),
            ("memory", "def load():\n    import transformers", "whose home is"),
            ("hosts__language", "def load():\n    import_extra('open_clip', 'vision')", "whose home is"),
            ("hosts__language", "def load():\n    from PIL import Image", "whose home is"),
        ],
    )
    def test_a_heavy_import_is_seen(self, tmp_path: Path, place: str, line: str, match: str) -> None:
        (complaint,) = architecture.heavy_imports(house(tmp_path, **{place: line}))
        assert match in complaint and complaint.startswith(f"{place.replace('__', '.')}:")

    @pytest.mark.parametrize("name", ["utils", "hosts__common", "base__thing", "training__config"])
    def test_a_drawer_is_seen(self, tmp_path: Path, name: str) -> None:
        assert architecture.drawers(house(tmp_path, **{name: ""})) == [name.replace("__", ".")]

    @pytest.mark.parametrize(
        "line",
        [
            "def again(x):\n    return x.softmax(-1)",
            "from torch.nn.functional import softmax",
            "import torch\nlayer = torch.nn.Softmax(-1)",
            "def again(f, x):\n    return f.scaled_dot_product_attention(x, x, x)",
        ],
    )
    def test_a_second_softmax_is_seen(self, tmp_path: Path, line: str) -> None:
        lines = architecture.attention_lines(house(tmp_path, hosts__language=line), architecture.ATTENTION_CALLS)
        assert [found.split(":")[0] for found in lines] == ["attention", "hosts.language"]

    def test_a_back_door_is_seen(self, tmp_path: Path) -> None:
        recipe = tmp_path / "vision"
        recipe.mkdir()
        (recipe / "train.py").write_text(
            "import mmattn\nfrom mmattn.errors import ShapeError\nfrom mmattn import Memory\n"
        )
        assert architecture.back_doors(tmp_path) == []
        (recipe / "data.py").write_text("def late():\n    from mmattn.hosts.causal_lm.model import find\n")
        (complaint,) = architecture.back_doors(tmp_path)
        assert complaint.endswith("imports mmattn.hosts.causal_lm.model")
