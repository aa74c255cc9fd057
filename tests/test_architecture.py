"""The arrows of the house, read from the source; and proof that each of these checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmattn
from tests import architecture

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mmattn"
GOOD = {
    "__init__.py": "from mmattn.memory import Memory\n",
    "errors.py": "import math\n",
    "storage/__init__.py": "",
    "storage/atomic.py": "from mmattn.errors import ConfigError\n",
    "memory.py": "from mmattn.storage.atomic import replacing\n",
    "core/__init__.py": "",
    "core/attention.py": '"""softmax in words does not count."""\ndef attend(x):\n    return x.softmax(-1)\n',
    "core/layers.py": "from ..errors import ShapeError\nfrom .attention import attend\n",
    "adapters/__init__.py": "",
    "adapters/gated.py": "from .. import memory\nfrom . import resampler\nfrom ..core.attention import attend\n",
    "adapters/resampler.py": "from mmattn.core.attention import attend\n",
    "hosts/__init__.py": "",
    "hosts/model.py": "from mmattn import __version__\ndef find():\n    import transformers\n",
    "encoders/openclip.py": "def load():\n    from mmattn import errors\n    errors.import_extra('open_clip', 'x')\n",
    "encoders/images.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PIL.Image import Image\n",
    "inspect/doctor.py": "from mmattn.hosts import model\n",
    "cli.py": "import mmattn\ndef doctor():\n    from mmattn.inspect.doctor import diagnose\n",
}


def house(folder: Path, **planted: str) -> Path:
    """A small package that keeps every rule, with the planted lines added (`hosts__model="import faiss"`)."""
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

    def test_no_two_modules_depend_on_each_other(self) -> None:
        """Every kind of import counted: at the top, in functions, for type checkers."""
        assert architecture.circles(PACKAGE) == []

    def test_no_branch_on_a_kind_outside_its_room(self) -> None:
        assert architecture.branches_on_kinds(PACKAGE) == []

    def test_the_front_door_is_narrow(self) -> None:
        assert len(mmattn.__all__) <= 32

    def test_heavy_dependencies_live_in_one_place(self) -> None:
        assert architecture.heavy_imports(PACKAGE) == []

    def test_one_softmax(self) -> None:
        lines = architecture.attention_lines(PACKAGE, {"softmax", "Softmax", "_softmax"})
        assert [line.split(":")[0] for line in lines] == ["core.attention"], lines

    def test_every_fused_attention_is_called_in_the_core(self) -> None:
        lines = architecture.attention_lines(PACKAGE, architecture.ATTENTION_CALLS)
        assert {line.split(":")[0] for line in lines} == {"core.attention"}, lines

    def test_recipes_use_the_front_door(self) -> None:
        assert architecture.back_doors(ROOT / "recipes") == []


class TestTheseChecksCanFail:
    def test_a_good_house_passes(self, tmp_path: Path) -> None:
        package = house(tmp_path)
        assert architecture.wrong_arrows(package) == []
        assert architecture.circles(package) == []
        assert architecture.branches_on_kinds(package) == []
        assert architecture.heavy_imports(package) == []
        assert architecture.attention_lines(package, architecture.ATTENTION_CALLS) == ["core.attention:3"]

    @pytest.mark.parametrize(
        ("place", "line", "match"),
        [
            ("errors", "from mmattn.memory import Memory", "errors stands below"),
            ("memory", "import mmattn.hosts.model", "memory stands below"),
            ("core__attention", "import importlib\nimportlib.import_module('mmattn.hosts')", "core stands below"),
            ("adapters__gated", "from ..hosts.model import find", "adapters stands below"),
            ("encoders__openclip", "from mmattn.core.attention import attend", "encoders must not know core"),
            ("hosts__model", "def late():\n    from mmattn.inspect import record", "hosts stands below"),
            ("inspect__doctor", "from mmattn.training import lora", "inspect stands below"),
            ("hosts__model", "from mmattn import Memory", "front door is for users"),
            ("novel", "from mmattn.errors import ShapeError", "novel has no room"),
        ],
    )
    def test_a_wrong_arrow_is_seen(self, tmp_path: Path, place: str, line: str, match: str) -> None:
        (complaint,) = architecture.wrong_arrows(house(tmp_path, **{place: line}))
        assert match in complaint and complaint.startswith(f"{place.replace('__', '.')}:")

    @pytest.mark.parametrize(
        ("place", "line", "circle"),
        [
            ("core__attention", "def late():\n    from .layers import project", ["core.attention", "core.layers"]),
            ("errors", "def late():\n    import mmattn.memory", ["errors", "memory", "storage.atomic"]),
        ],
    )
    def test_a_circle_is_seen(self, tmp_path: Path, place: str, line: str, circle: list[str]) -> None:
        assert architecture.circles(house(tmp_path, **{place: line})) == [circle]

    @pytest.mark.parametrize(
        ("place", "line"),
        [
            ("hosts__model", "def f(one):\n    return isinstance(one, (int, GatedAdapter))"),
            ("inspect__doctor", "def f(one):\n    return one.config.kind == 'chunked'"),
        ],
    )
    def test_a_branch_on_a_kind_is_seen(self, tmp_path: Path, place: str, line: str) -> None:
        (found,) = architecture.branches_on_kinds(house(tmp_path, **{place: line}))
        assert found.startswith(f"{place.replace('__', '.')}:")

    @pytest.mark.parametrize(
        ("place", "line", "match"),
        [
            ("hosts__model", "import transformers.models", "at its top"),
            (
                "hosts__model",
                "try:\n    from transformers import AutoModel\nexcept ImportError:\n    pass",
                "at its top",
            ),
            ("encoders__openclip", "import_extra('open_clip', 'vision')", "at its top"),
            ("memory", "def load():\n    import transformers", "whose home is"),
            ("hosts__model", "def load():\n    import_extra('open_clip', 'vision')", "whose home is"),
        ],
    )
    def test_a_heavy_import_is_seen(self, tmp_path: Path, place: str, line: str, match: str) -> None:
        (complaint,) = architecture.heavy_imports(house(tmp_path, **{place: line}))
        assert match in complaint and complaint.startswith(f"{place.replace('__', '.')}:")

    @pytest.mark.parametrize(
        "line",
        [
            "def again(x):\n    return x.softmax(-1)",
            "import torch\nlayer = torch.nn.Softmax(-1)",
            "def again(f, x):\n    return f.scaled_dot_product_attention(x, x, x)",
        ],
    )
    def test_a_second_softmax_is_seen(self, tmp_path: Path, line: str) -> None:
        lines = architecture.attention_lines(house(tmp_path, hosts__model=line), architecture.ATTENTION_CALLS)
        assert [found.split(":")[0] for found in lines] == ["core.attention", "hosts.model"]

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
