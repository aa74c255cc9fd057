"""`mmattn serve --replicas 2` as docs/serving.md starts it, one replica of which is killed under load.

Invariant 86.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serving.outcomes import Outcomes, captions
from tests.serving.processes import serving

pytest.importorskip("ray.serve", reason="Ray Serve is not installed; it comes with mmattn[scale]", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 32


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    return captions()


def figures(url: str, session: str) -> tuple[str, int]:
    """Return which replica a session has, by the time of its start, and how many completions it has answered."""
    text = httpx.get(f"{url}/metrics", headers={"x-session-id": session}, timeout=60).text
    started = re.findall(r"^mmattn_tokens_created (\S+)$", text, re.M)
    answered = re.findall(r'^mmattn_requests_total{path="/v1/completions",status="200"} (\S+)$', text, re.M)
    return (started or [""])[0], int(float((answered or ["0"])[0]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[Any], str]]:
    """The command of the page when both replicas answer, and its address."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^mmattn serve .* --replicas .*$", page, re.M)
    with pytest.MonkeyPatch.context() as patch:
        # A replica that starts anew does not compile torch and transformers.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        if "PYTHONPYCACHEPREFIX" not in os.environ:
            patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        with serving(shlex.split(command, comments=True), ROOT, 120) as (process, url):
            end = time.monotonic() + 60
            while len({figures(url, f"any {number}")[0] for number in range(16)}) < 2:
                assert time.monotonic() < end, "one replica does not start"
            yield process, url


def replicas_of(process: subprocess.Popen[Any]) -> list[int]:
    """Return the ids of the processes that answer."""
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(one.pid for one in children if "".join(one.cmdline()[:1]).startswith("ray::ServeReplica"))


def answering(url: str) -> set[str]:
    """Return the replicas that have answered completions."""
    replicas = set[str]()
    for number in range(16):
        replica, answered = figures(url, f"any {number}")
        replicas |= {replica} if replica and answered else set()
        if len(replicas) == 2:
            break
    return replicas


def test_a_session_stays_with_its_replica(served: tuple[Any, str], answers: dict[str, str]) -> None:
    _, url = served
    picture, answer = next(iter(answers.items()))
    body, counts = {"model": "adapter", "prompt": "", "image": picture}, Counter[str]()
    for number in range(11):
        session = f"conversation {number}"
        replica, before = figures(url, session)
        for _ in range(3):
            response = httpx.post(f"{url}/v1/completions", json=body, headers={"x-session-id": session}, timeout=60)
            assert response.json()["choices"][0]["text"] == answer
        assert figures(url, session) == (replica, before + 3)
        counts[replica] += 1
    assert len(counts) == 2


def test_ray_listens_on_this_machine_only(served: tuple[Any, str]) -> None:
    process, _ = served
    reached = Counter[str]()
    for one in psutil.Process(process.pid).children(recursive=True):
        for socket in one.net_connections("tcp"):
            if socket.status == psutil.CONN_LISTEN and socket.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
                reached["".join(one.cmdline()[:1])] += 1
    # Ray Serve binds one port of each replica to all addresses; who asks there needs the token of this Ray instance.
    assert all(name.startswith("ray::ServeReplica") for name in reached) and reached.total() <= 2, reached


def test_a_replica_is_killed_under_load(served: tuple[Any, str], answers: dict[str, str]) -> None:
    """Invariant 86."""
    process, url = served
    first, killed = answering(url), replicas_of(process)[0]
    with Outcomes(url, answers, CLIENTS) as load:
        load.wait_for(CLIENTS)
        os.kill(killed, signal.SIGKILL)
        begin = time.monotonic()
        while len(now := answering(url)) != 2 or now == first:
            assert time.monotonic() < begin + 60, "not whole again"
        seconds = time.monotonic() - begin
        load.wait_for(CLIENTS)
    assert killed not in replicas_of(process) and len(replicas_of(process)) == 2
    print(f"{CLIENTS} clients: whole after {seconds:.1f} s; {dict(load.counts)}")
    assert load.counts.keys() <= {"right", "told to retry", "answer cut"}
    assert load.counts["right"] > load.counts["told to retry"] + load.counts["answer cut"]


def test_a_stop_finishes_what_runs_and_leaves_nothing(served: tuple[Any, str], answers: dict[str, str]) -> None:
    process, url = served
    children = psutil.Process(process.pid).children(recursive=True)
    (folder,) = {path for one in children for path in re.findall(r"=(/\S*/mmattn-\w+)", " ".join(one.cmdline()))}
    with Outcomes(url, answers, CLIENTS) as load:
        load.wait_for(1)
        load.stop.set()  # each has one request under way
        process.send_signal(signal.SIGTERM)
    assert load.counts.keys() <= {"right", "told to retry"} and load.counts["right"] >= CLIENTS // 2
    assert process.wait(60) == 0
    psutil.wait_procs(children, 10)
    assert not [one for one in children if one.is_running()] and not Path(folder).exists()
