"""What an import costs, seen in a fresh process; and that optional dependencies are optional."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mmattn

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    *(
        "transformers",
        "accelerate",
        "datasets",
        "peft",
        "diffusers",
        "open_clip",
        "torchvision",
        "timm",
        "faiss",
        "qdrant_client",
        "psycopg",
        "lancedb",
        "lance",
        "PIL",
    ),
    *("soundfile", "soxr", "av"),
    *("matplotlib", "pandas", "sklearn", "tensorboard", "sentence_transformers", "pyarrow", "plotly"),
)


def loaded(*statements: str) -> set[str]:
    """The top-level packages in a fresh interpreter after `statements`."""
    code = "\n".join(["import sys", *statements, "print(*sorted({n.split('.')[0] for n in sys.modules}))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_its_names_load_torch_and_nothing_heavier() -> None:
    names = ("Memory", "CrossAttention", "SelfAttention", "attend", "GatedAdapter", "Resampler", "masks", "errors")
    modules = loaded("import mmattn", *(f"mmattn.{name}" for name in names))
    assert "torch" in modules
    assert not modules & set(HEAVY)


def test_the_package_and_its_command_line_start_without_torch() -> None:
    modules = loaded("import mmattn", "import mmattn.cli.app", "import mmattn.recipes; mmattn.recipes.list_recipes()")
    assert not modules & {*HEAVY, "torch", "numpy", "pydantic", "yaml"}


@pytest.mark.slow
def test_a_command_loads_only_the_files_that_it_uses() -> None:
    """A caption of a picture, with the shipped adapter."""
    pytest.importorskip("open_clip")
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sum(n.split('.')[0] == 'mmattn' for n in sys.modules)))\n"
        "from mmattn.cli.app import main\n"
        "main(['caption', 'assets/flora/snowdrop.png', '--device', 'cpu'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    caption, count = done.stdout.splitlines()
    assert "snowdrop" in caption and int(count) <= 130


def test_names_of_rooms_are_no_modules() -> None:
    """A name on first use must not be hidden by the module of the same name."""
    for room in ("adapters", "encoders", "hosts", "inspect", "pipelines", "retrieval", "training"):
        module = importlib.import_module(f"mmattn.{room}")
        for path in Path(module.__file__ or "").parent.glob("*.py"):
            if path.stem in module.__all__:
                importlib.import_module(f"mmattn.{room}.{path.stem}")
        for name in module.__all__:
            assert not isinstance(getattr(module, name), ModuleType), f"mmattn.{room}.{name}"


def test_every_name_of_the_front_door_opens() -> None:
    assert len(mmattn.__all__) == len(set(mmattn.__all__))
    for name in mmattn.__all__:
        assert getattr(mmattn, name) is not None
        assert name in dir(mmattn)
    with pytest.raises(AttributeError, match="no attribute 'Memroy'"):
        _ = mmattn.Memroy


def test_the_package_works_without_its_optional_dependencies() -> None:
    """Invariant 89."""
    missing = ("open_clip", "torchvision", "matplotlib", "diffusers", "faiss", "peft", "datasets", "sklearn", "PIL")
    missing += ("soundfile", "soxr", "av")
    statements = (
        f"sys.modules.update(dict.fromkeys({missing!r}))",
        "import torch, mmattn",
        "memory = mmattn.Memory(torch.ones(2, 3, 5))",
        "assert mmattn.encoders.LogMelEncoder()(torch.zeros(800)).tokens.shape == (1, 2, 320)",
        "assert mmattn.CrossAttention(7, 5, 1, head_dim=11)(torch.ones(2, 13, 7), memory.tokens).shape == (2, 13, 7)",
    )
    assert "torch" in loaded(*statements)


def test_a_missing_dependency_is_named_with_its_extra() -> None:
    """Invariant 89."""
    code = (
        "import sys; sys.modules['open_clip'] = None\nimport mmattn\n"
        "try:\n    mmattn.OpenCLIPEncoder('ViT-B-32')\n"
        "except mmattn.errors.MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "mmattn[vision]" in done.stdout


def test_a_name_of_a_room_says_where_it_is() -> None:
    """Invariant 136."""
    import mmattn

    for room, name in (("hosts", "PassageCache"), ("adapters", "InsertedAdapter"), ("retrieval", "chunk")):
        with pytest.raises(AttributeError, match=rf"it is mmattn\.{room}\.{name}"):
            getattr(mmattn, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        mmattn.nothing  # noqa: B018
