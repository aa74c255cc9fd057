"""The command line through its front door, `main`: what it prints, what it refuses, with which exit code."""

from __future__ import annotations

import importlib
import socket
import sys
from pathlib import Path

import pytest

from mmattn import recipes
from mmattn.cli.app import main
from mmattn.errors import ConfigError
from tests.cli.running import ROOT, call

CONFIG = """\
# A comment stays harmless.
recipe: toy
seed: 3
optim:
  lr: 1e-3
  steps: 5
"""
TRAIN = """\
import importlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from .sums import double


class Optim(BaseModel):
    model_config = ConfigDict(extra="forbid")
    lr: float = 0.1
    steps: int = 7
    warm: bool = False


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    seed: int = 0
    optim: Optim = Optim()


def main(config):
    print(json.dumps({**config, "double": double(config["seed"]), "from": Path(__file__).parent.name}))
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of this test's own, as `mmattn cp` would have made it; what loading it changes is put back."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "train.py").write_text(TRAIN)
    (folder / "sums.py").write_text("def double(x):\n    return 2 * x\n")
    (folder / "README.md").write_text("# Toy\n\nA **toy** to\nlearn with. And more.\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return folder


@pytest.fixture
def shelf(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same recipe standing where an installed wheel keeps them."""
    package = toy.parent / "package"
    (package / "_recipes").mkdir(parents=True)
    (package / "_assets").mkdir()
    toy.rename(package / "_recipes" / "toy")
    monkeypatch.setattr("mmattn.models.catalogue._PACKAGE", package)
    return package


class TestWords:
    def test_help_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = call(capsys, "--help")
        assert code == 0
        for name in ("demo", "train", "caption", "draw", "doctor", "explore", "env", "ls", "cp"):
            assert f"\n  {name} " in out

    def test_demo_names_all_that_it_needs_before_it_trains(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("PIL", "matplotlib", "gguf"):
            monkeypatch.setitem(sys.modules, name, None)
        code, out, err = call(capsys, "demo")
        assert (code, out) == (2, "") and not any(tmp_path.iterdir())
        assert err == (
            "mmattn: mmattn demo needs PIL, matplotlib, gguf, which are not installed; install with: pip install "
            "'mmattn[vision,viz,models]'\n"
        )

    def test_every_extra_of_the_project_is_listed(self) -> None:
        """Invariant 136."""
        import tomllib

        from mmattn.cli.environment import BEYOND_ALL, EXTRAS

        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(EXTRAS) == set(extras) - {"all"}
        (whole,) = extras["all"]
        assert set(EXTRAS) - set(BEYOND_ALL) == set(whole.removeprefix("mmattn[").removesuffix("]").split(","))

    def test_an_index_of_pages(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """What a page of HTML shows is read, without tags, scripts and styles; a PDF without the extra is named."""
        from mmattn import Index

        (tmp_path / "site").mkdir()
        page = "<html><head><title>Opening</title><style>p {color: red}</style><script>var a = '<p>';</script></head>"
        page += "<body><h1>Caf&eacute; Luna</h1><p>It <b>closes</b> at nine.<br>It opens at&nbsp;six.</p></body></html>"
        (tmp_path / "site" / "a.html").write_text(page)
        (tmp_path / "site" / "b.pdf").write_bytes(b"%PDF-1.4 broken")
        words = ["index", "build", tmp_path / "site", "-o", tmp_path / "index", "--skip-broken"]
        code, _, err = call(capsys, *words)
        assert code == 0 and "files left out (1):\n  b.pdf: " in err and ("mmattn[pdf]" in err or "readable PDF" in err)
        (name,) = Index.load(tmp_path / "index").ids
        lines = Index.load(tmp_path / "index")[name].text.split("\n")
        assert lines == ["Opening", "Café Luna", "It closes at nine.", "It opens at\xa0six."]

    def test_a_pdf(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        pytest.importorskip("pypdf", reason="pypdf is not installed; it comes with mmattn[pdf]")
        from mmattn import Index

        shown = b"BT /F1 12 Tf 30 100 Td (Snowdrops flower in January.) Tj ET"
        objects = [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents 4 0 R "
            b"/Resources << /Font << /F1 5 0 R >> >> >>",
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(shown), shown),
            b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        ]
        file, places = b"%PDF-1.4\n", []
        for number, content in enumerate(objects, 1):
            places.append(b"%010d 00000 n \n" % len(file))
            file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
        start = len(file)
        file += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(places)
        file += b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.pdf").write_bytes(file)
        assert call(capsys, "index", "build", tmp_path / "notes", "-o", tmp_path / "index")[0] == 0
        index = Index.load(tmp_path / "index")
        assert index[index.ids[0]].text.split() == ["Snowdrops", "flower", "in", "January."]

    def test_an_index_of_a_folder_of_texts(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """Invariant 136. Each text is cut, each chunk names its file, and nothing but the index stays."""
        from mmattn import Index

        (tmp_path / "texts" / "more").mkdir(parents=True)
        (tmp_path / "texts" / "a.txt").write_text("Snowdrops flower in January. " * 60)
        (tmp_path / "texts" / "more" / "b.md").write_text("# Tulips\n\nTulips come from Asia.")
        (tmp_path / "texts" / "c.png").write_bytes(b"\x89PNG")
        (tmp_path / "texts" / "d.txt").write_text(" ")
        (tmp_path / "texts" / "e.txt").write_bytes(b"Caf\xe9 Luna closes at nine.")
        (tmp_path / "texts" / ".git").mkdir()
        (tmp_path / "texts" / ".git" / "description.txt").write_text("Of nobody.")
        code, _, err = call(capsys, "index", "build", tmp_path / "texts", "-o", tmp_path / "index")
        assert code == 2 and "e.txt is not UTF-8" in err
        code, _, err = call(capsys, "index", "build", tmp_path / "texts", "-o", tmp_path / "index", "--skip-broken")
        assert code == 0, err
        named = "c.png: not one of .txt, .md, .rst, .html, .htm, .pdf\n  d.txt: empty\n  e.txt: not UTF-8\n"
        assert f"files left out (3):\n  {named}" in err
        index = Index.load(tmp_path / "index")
        assert {index[name].metadata["source"] for name in index.ids} == {"a.txt", "more/b.md"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "texts"]
        (tmp_path / "none").mkdir()
        for words in (["none"], ["texts", "texts/a.txt"], ["texts", "--field", "title"], ["nowhere"]):
            given = [tmp_path / words[0], *words[1:]]
            assert call(capsys, "index", "build", *given, "-o", tmp_path / "other")[0] == 2
        assert not (tmp_path / "other").exists()

    def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            code, _, said = call(capsys, "serve", "nowhere/at/all", "--port", taken.getsockname()[1])
        assert code == 2 and said.count("\n") == 1 and "--port" in said

    def test_completion(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("_MMATTN_COMPLETE", "source_bash")
        code, out, _ = call(capsys)
        assert code == 0 and out.rstrip().endswith("_mmattn_completion mmattn")

    def test_env(self, capsys: pytest.CaptureFixture[str]) -> None:
        import torch

        code, out, _ = call(capsys, "env")
        assert code == 0 and f"torch            {torch.__version__.split('+')[0]}" in out
        assert all(f"\n  {extra} " in out for extra in ("vision", "diffusion", "rag", "train", "viz", "data", "scale"))


class TestTrain:
    def test_settings_reach_the_recipe(self, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = call(capsys, "train", toy / "config.yaml", "optim.lr=2e-4", "seed=11")
        assert code == 0, err
        optim = '{"lr": 0.0002, "steps": 5, "warm": false}'
        assert out == f'{{"seed": 11, "optim": {optim}, "double": 22, "from": "toy"}}\n'

    def test_a_recipe_by_name(self, shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("recipe: toy\nseed: 5\n")
        code, out, err = call(capsys, "train", "mine.yaml")
        assert code == 0, err
        assert '"seed": 5' in out and '"steps": 7' in out

    def test_modules_of_the_users_own_are_left_alone(
        self, toy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sums.py").write_text("MINE = True\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "sums", raising=False)
        mine, before = importlib.import_module("sums"), list(sys.path)
        code, out, err = call(capsys, "train", toy / "config.yaml")
        assert code == 0 and '"double": 6' in out, err
        assert sys.modules["sums"] is mine and mine.MINE and sys.path == before

    def test_a_copy_runs_its_own_files(self, shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert call(capsys, "train", shelf / "_recipes/toy/config.yaml")[1].count('"double": 6') == 1
        code, out, _ = call(capsys, "cp", "toy", "mine")
        assert code == 0 and "mmattn train" in out
        (tmp_path / "mine/sums.py").write_text("def double(x):\n    return 1000 * x\n")
        code, out, err = call(capsys, "train", "mine/config.yaml")
        assert code == 0, err
        assert '"double": 3000' in out and '"from": "mine"' in out

    @pytest.mark.parametrize(
        ("override", "named"),
        [
            ("optim.lrr=1", "'optim.lrr' (did you mean 'lr'?); there are: lr, steps, warm"),
            ("sede=1", "'sede' (did you mean 'seed'?)"),
            ("optim.steps=many", "'optim.steps'.*'many'"),
            ("optim.lr=true=1", "'optim.lr'.*'true=1'"),
            ("seed.deep=1", "'seed.deep': 'seed' is 3"),
            ("optim.lr", "section.key=value, got 'optim.lr'"),
            (".lr=1", "section.key=value"),
            ("seed=[1", "is not YAML"),
        ],
    )
    def test_a_wrong_override(self, toy: Path, capsys: pytest.CaptureFixture[str], override: str, named: str) -> None:
        code, out, err = call(capsys, "train", toy / "config.yaml", override)
        assert (code, out) == (2, "") and "Traceback" not in err
        assert all(part in err for part in named.split(".*")), err

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            (b"recipe: nothere\n", "there is no recipe 'nothere'"),
            (b"recipe: ../toy\n", "there is no recipe '../toy'"),
            (b"seed: 1\n", "must say `recipe: NAME`"),
            (b"- 1\n", "got list"),
            (b"", "got NoneType"),
            (b"recipe: toy\nseed: 1\nseed: 2\n", "'seed' is given twice (line 3)"),
            (b"recipe: toy\noptim:\n  lr: 1\n  lr: 2\n", "'lr' is given twice (line 4)"),
            (b"recipe: !!python/object/apply:os.getcwd []\n", "is not YAML"),
            (b"a: [\n", "is not YAML"),
            (b"[" * 5000, "is not YAML"),
            (b"seed: 1\nname: Schl\xfcssel\n", "is not YAML"),
            (b"seed: 1\r\n\r\nname: a\0b\n", "is not YAML"),
            ("seed: 1".encode("utf-16")[:-1], "is not YAML"),
            (b"recipe: toy\non: 2\n", "got True"),
            (b"recipe: toy\n? [a, b]\n: 2\n", "is not YAML"),
        ],
        ids=repr,
    )
    def test_a_wrong_file(
        self, shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes, named: str
    ) -> None:
        (tmp_path / "mine.yaml").write_bytes(text)
        code, out, err = call(capsys, "train", "mine.yaml")
        assert (code, out) == (2, "") and "Traceback" not in err
        assert named in err, err

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
    def test_settings_as_editors_save_them(self, tmp_path: Path, encoding: str) -> None:
        path = tmp_path / "settings.yaml"
        path.write_bytes("name: Schlüsselblume\r\na: 1e-3\r\nb: .5e-7\r\nc: 1e\r\nd: '1e-3'\r\n".encode(encoding))
        wanted = {"name": "Schlüsselblume", "a": 1e-3, "b": 0.5e-7, "c": "1e", "d": "1e-3"}
        assert recipes.read_settings(path) == wanted


class TestErrors:
    @pytest.mark.parametrize("where", ["at the top", "in main"])
    def test_a_recipe_without_what_it_imports_names_the_extra(
        self, toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        monkeypatch.setitem(sys.modules, "PIL", None)
        top, inside = ("from PIL import Image", "pass") if where == "at the top" else ("", "import PIL.Image")
        (toy / "train.py").write_text(f"{top}\n\n\ndef main(config):\n    {inside}\n")
        code, out, err = call(capsys, "train", toy / "config.yaml")
        assert (code, out) == (2, "")
        assert err == "mmattn: PIL is needed here and is not installed; install it with: pip install 'mmattn[vision]'\n"

    def test_debug_shows_where_it_happened(self, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for words in (["--debug", "train", "absent.yaml"], ["train", "absent.yaml", "--debug"]):
            with pytest.raises(ConfigError, match="there is no settings file"):
                main(words)

    def test_an_error_that_is_ours_to_mend_is_not_hidden(self, toy: Path) -> None:
        (toy / "train.py").write_text("def main(config):\n    return config['nothing']\n")
        with pytest.raises(KeyError, match="nothing"):
            main(["train", str(toy / "config.yaml")])


class TestAdapters:
    def test_a_folder_that_holds_none(self, toy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "flower.png").write_bytes(b"")
        code, _, err = call(capsys, "caption", "flower.png", "--adapter", "absent")
        assert code == 2 and "there is no adapter folder 'absent'" in err
        code, _, err = call(capsys, "caption", "flower.png", "--adapter", toy)
        assert code == 2 and "has no adapter_config.json" in err and "config.yaml" in err
        assert call(capsys, "doctor", "absent")[0] == 1

    def test_doctor_finds_installed_assets_from_any_folder(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        code, out, _ = call(capsys, "doctor", "assets/rag/adapter", "--host", "assets/rag")
        assert code == 0 and "those it was trained on" in out


class TestShelf:
    def test_ls(self, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = call(capsys, "ls")
        assert code == 0 and "toy  A toy to learn with.\n" in out

    def test_cp_leaves_the_waste_behind(self, shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for waste in ("__pycache__/train.pyc", "runs/old/metrics.jsonl"):
            (shelf / "_recipes/toy" / waste).parent.mkdir(parents=True)
            (shelf / "_recipes/toy" / waste).write_text("")
        code, out, _ = call(capsys, "cp", "toy")
        assert code == 0 and "toy copied to toy" in out
        assert {p.name for p in (tmp_path / "toy").rglob("*")} == {"config.yaml", "train.py", "sums.py", "README.md"}

    def test_cp_assets(self, shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (shelf / "_assets/lm").mkdir(parents=True)
        (shelf / "_assets/lm/config.json").write_text("{}")
        code, out, err = call(capsys, "cp", "assets")
        assert (code, out) == (0, "assets copied to assets\n"), err
        assert (tmp_path / "assets/lm/config.json").read_text() == "{}"
        assert call(capsys, "cp", "assets")[0] == 2

    def test_cp_overwrites_nothing(self, shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "toy").mkdir()
        (tmp_path / "toy/train.py").write_text("mine\n")
        code, _, err = call(capsys, "cp", "toy")
        assert code == 2 and "toy exists and would be overwritten" in err
        (tmp_path / "file").write_text("mine\n")
        assert call(capsys, "cp", "toy", "file")[0] == 2
        assert (tmp_path / "toy/train.py").read_text() == (tmp_path / "file").read_text() == "mine\n"
        assert [p.name for p in (tmp_path / "toy").iterdir()] == ["train.py"]

    def test_an_unknown_recipe(self, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = call(capsys, "cp", "tpy")
        assert code == 2 and "there is no recipe 'tpy' (did you mean 'toy'?); there are: toy" in err

    def test_a_package_without_its_recipes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mmattn.models.catalogue._PACKAGE", tmp_path / "nowhere")
        code, _, err = call(capsys, "ls")
        assert code == 2 and "carries no recipes" in err
