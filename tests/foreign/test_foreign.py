"""Kinds of strangers, each in one file outside the package, keep the same contract as ours."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch
from typer.testing import CliRunner

import mmattn
from mmattn.cli.app import app
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.extend import register_adapter, register_host
from mmattn.inspect import save_traces
from mmattn.testing import Case, HostCase, adapter_checks, check_adapter, check_host, host_checks, stir
from mmattn.testing.case import Check
from tests import contracts, tiny
from tests.foreign.adapter import FilmAdapter, FilmLayers
from tests.foreign.encoder import StripesEncoder
from tests.foreign.host import AdaptedMeanDecoder, MeanDecoder
from tests.foreign.pooled import PooledAdapter

ROOT = Path(__file__).resolve().parent.parent.parent
FILM = FilmAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2))
JOINED = mmattn.adapters.JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2))
GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, head_dim=6)


def decoder(seed: int = 0) -> MeanDecoder:
    """The same small decoder each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MeanDecoder().eval()


CASES: dict[str, Callable[[], Case]] = {
    "film on llama": lambda: Case(FILM, functools.partial(tiny.make, "llama")),
    "film on the decoder": lambda: Case(FILM, decoder),
    "pooled on llama": lambda: Case(PooledAdapter(tiny.MEMORY_DIM), functools.partial(tiny.make, "llama")),
    "gated on the decoder": lambda: Case(GATED, decoder),
    "chunked on the decoder": lambda: Case(
        mmattn.ChunkedAdapter(memory_dim=tiny.MEMORY_DIM, every=1, num_heads=2, head_dim=6, chunk_size=3), decoder
    ),
}
HOSTS: dict[str, Callable[[], HostCase]] = {
    "the decoder": lambda: HostCase(decoder, [GATED, FILM]),
    "llama": lambda: HostCase(functools.partial(tiny.make, "llama"), [GATED, FILM, JOINED]),
}


@functools.cache
def case_of(name: str) -> Any:
    """One case for all checks."""
    return {**CASES, **HOSTS}[name]()


# The decoder does not generate, and what is pooled is neither attended to nor kept by request.
ON_DECODER = ("film on the decoder", "gated on the decoder", "chunked on the decoder")
DOES_NOT_APPLY = {
    "check_generation": ON_DECODER,
    "check_padded_prompts": ON_DECODER,
    "check_requests": (*ON_DECODER, "pooled on llama"),
    "check_record": ("pooled on llama",),
}


@pytest.mark.parametrize(("check", "name"), contracts.applying(adapter_checks(), CASES, DOES_NOT_APPLY))
def test_adapters(check: Check, name: str) -> None:
    contracts.holds(check, case_of(name))


@pytest.mark.parametrize(("check", "name"), contracts.applying(host_checks(), HOSTS, {}))
def test_hosts(check: Check, name: str) -> None:
    contracts.holds(check, case_of(name))


@pytest.mark.parametrize(("check", "name"), contracts.not_applying(adapter_checks(), DOES_NOT_APPLY))
def test_what_does_not_apply_says_so(check: Check, name: str) -> None:
    with pytest.raises(SkipTest):
        check(case_of(name))


@pytest.mark.slow
def test_the_suites_in_one_call() -> None:
    assert set(check_adapter(FILM, decoder)) == {"check_generation", "check_padded_prompts", "check_requests"}
    assert check_host(decoder, GATED, FILM) == {}


def test_what_fails_is_named_with_its_promise() -> None:
    with pytest.raises(
        AssertionError, match="(?s)check_every_site_reaches_the_answer: A block at any one site.*'before'"
    ):
        check_host(decoder, GATED)


@pytest.mark.slow
def test_the_suites_do_without_pytest() -> None:
    code = "import sys, mmattn.testing; mmattn.testing.adapter_checks(); print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_a_saved_adapter_loads_once_its_module_is_imported(tmp_path: Path) -> None:
    model = mmattn.attach(tiny.make("llama"), FILM)
    stir(model.adapter("default"))
    model.save_adapter(tmp_path)
    assert "import tests" in (tmp_path / "README.md").read_text()
    code = f"""
import mmattn
from tests import tiny
try:
    mmattn.load(tiny.make("llama"), {str(tmp_path)!r})
except mmattn.errors.AdapterFileError as error:
    print("refused", error)
import tests.foreign.adapter
print("loaded", mmattn.load(tiny.make("llama"), {str(tmp_path)!r}).adapter("default").config)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    refused, loaded = done.stdout.splitlines()
    assert refused.startswith("refused") and "'film'" in refused, done.stderr
    assert "the package 'tests' registers it: import that package first" in refused
    assert loaded == f"loaded {FILM}", done.stderr


def test_an_adapter_is_for_the_host_it_was_made_for(tmp_path: Path) -> None:
    model = mmattn.attach(decoder(), FILM)
    stir(model.adapter("default"))
    model.save_adapter(tmp_path)
    with pytest.raises(AdapterFileError, match="made for a MeanDecoder with 3 layers of width 24"):
        mmattn.load(tiny.make("llama"), tmp_path)
    with pytest.warns(UserWarning, match="the weights of this MeanDecoder are not those"):
        mmattn.load(decoder(seed=1), tmp_path)


def test_the_page_of_explore(tmp_path: Path) -> None:
    model = mmattn.attach(decoder(), FILM)
    stir(model.adapter("default"))
    trace = mmattn.inspect.attribute(model, [5, 6, 7, 8], torch.randn(1, 5, tiny.MEMORY_DIM), ["a", "b", "c", "d"])
    save_traces([trace], tmp_path)
    done = CliRunner().invoke(app, ["explore", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "slot 4" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_doctor_at_the_command_line(tmp_path: Path) -> None:
    model = mmattn.attach(tiny.make("llama"), FILM)
    stir(model.adapter("default"))
    model.save_adapter(tmp_path / "adapter")
    model.host.save_pretrained(tmp_path / "host")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "adapter"), "--host", str(tmp_path / "host")])
    assert done.exit_code == 0, done.output


def test_a_kind_is_not_taken_twice() -> None:
    twin = type("Other", (FilmAdapter,), {"__module__": "elsewhere"})
    with pytest.raises(ConfigError, match="the adapter kind 'film' is tests.foreign.adapter.FilmAdapter already"):
        register_adapter(twin, FilmLayers)
    with pytest.raises(ConfigError, match="the host kind 'mean_decoder' is"):
        register_host(type("Other", (AdaptedMeanDecoder,), {"__module__": "elsewhere"}))


def test_layers_are_adapter_layers() -> None:
    with pytest.raises(ConfigError, match="layers of FilmAdapter must be a subclass .* got <class 'torch.nn.*Linear'>"):
        register_adapter(FilmAdapter, torch.nn.Linear)


def test_an_encoder_of_another_package_is_loaded_by_its_name() -> None:
    encoder = mmattn.encoders.load_image_encoder("stripes:4")
    picture = torch.zeros(3, 16, 16)
    picture[0, :4] = 1
    memory = encoder(picture)
    assert torch.allclose(memory.tokens[0], torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]))
    assert encoder.fingerprint != mmattn.encoders.load_image_encoder("stripes:4", pooled=True).fingerprint
    assert mmattn.pipelines.EncoderReference.of("stripes:4").name == "stripes:4"
    with pytest.raises(ConfigError, match="StripesEncoder, which is not a subclass of TextEncoderBase"):
        mmattn.encoders.load_text_encoder("stripes:4")
    with pytest.raises(ConfigError, match="lacks the class method from_name"):
        mmattn.register_encoder("other")(object)
    with pytest.raises(ConfigError, match="'stripes' is .*StripesEncoder already"):
        mmattn.register_encoder("stripes")(type("Twin", (StripesEncoder,), {"__module__": "elsewhere"}))
