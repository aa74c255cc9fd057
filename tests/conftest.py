"""What every test gets: no network, one thread, a seed of its own, and the shared data where it lies."""

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

# Before anything imports transformers: these are read once, at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="mmattn-datasets-")

import numpy as np
import pytest
import torch
import transformers
from hypothesis import settings

from mmattn.hosts import AdaptedCausalLM
from tests import tiny
from tests.retrieval import databases
from tests.tiny_texts import save_encoder

ROOT = Path(__file__).resolve().parent.parent
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

torch.set_num_threads(1)
# A shell that starts a command in the background has it ignore Ctrl-C; what is tested here must notice it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Shared machines stall now and then: a slow example is not a wrong one.
settings.register_profile("mmattn", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("mmattn")


# Checks of stores that start processes or write many files, and the stores on which they take seconds.
LONG_CHECKS, LONG_STORES = {"saved", "threads"}, {"qdrant", "pgvector", "lancedb"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of families built alike, one is quick to be tested and the others are slow; so are the longest store checks."""
    others = set(tiny.FAMILIES) - set(tiny.DISTINCT)
    for item in items:
        spec = getattr(item, "callspec", None)
        words = set() if spec is None else set(re.split(r"[-, ]", spec.id))
        if others & words or (LONG_CHECKS & words and LONG_STORES & words):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> int:
    """Seed every generator with a number made of the test's own name, the same in every run and order."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def nothing_deprecated() -> Iterator[None]:
    """Fail if transformers logs that a name is deprecated; what only warns of it is an error in every test."""
    lines, notes = list[str](), logging.Handler()
    notes.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(notes)
    getattr(logging.Logger.warning_once, "cache_clear", lambda: None)()  # what another test was told once
    yield
    logger.removeHandler(notes)
    assert [line for line in lines if "deprecated" in line] == []


@pytest.fixture
def model() -> AdaptedCausalLM:
    """A tiny LLaMA with a gated adapter whose gates are open."""
    return tiny.attach(tiny.make("llama"))


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids (3, 7)."""
    return tiny.text(3, 7)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder of texts."""
    torch.manual_seed(11)
    return save_encoder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared data beside the checkout; tests that need it skip where it is not."""
    folder = Path(os.environ.get("MMATTN_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (set MMATTN_DATA to its place)")
    return folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL database with pgvector, which runs as long as the tests."""
    with databases.postgres() as address:
        yield address
