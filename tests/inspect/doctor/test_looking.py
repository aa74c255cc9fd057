"""`doctor` on models that are not ours: planted faults are found and named, sound models pass."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

import mmattn
from mmattn.errors import ConfigError
from mmattn.inspect.doctor.questions import plain_pictures
from mmattn.inspect.doctor.report import binomial_tail, interval
from mmattn.models.catalogue import find_asset
from tests.cli.running import call
from tests.inspect.doctor import servers, tiny_readers
from tests.inspect.doctor.tiny_readers import passage_rows, picture_rows


def faults(report: Any) -> str:
    """What a report says of the checks that failed."""
    return "\n".join(f"{check}: {answer}" for ok, check, answer in report.lines if ok is False)


@pytest.mark.parametrize("pictures", [(1, 1), (1, 3), (2, 3)])
def test_a_sound_reader(pictures: tuple[int, int]) -> None:
    report = mmattn.doctor(tiny_readers.sound().answer, picture_rows(300, 5, pictures), batched=True)
    assert report.ok and ("ok", "looks") in [(word, check) for word, check, _ in verdicts(report)], report
    assert mmattn.doctor(tiny_readers.chain, passage_rows()).ok


def verdicts(report: Any) -> list[tuple[str, str, str]]:
    return [tuple(one.values()) for one in report.as_dict()["checks"]]


@pytest.mark.slow
def test_how_rare_a_mix_up_is_found_in_200_requests() -> None:
    rows = plain_pictures()
    names = {row["image"].getpixel((0, 0)): row["text"] for row in rows}

    def mixing(share: float, seed: int) -> Any:
        random = Random(seed)

        def answer(questions: list[str], evidence: list[list[Any]]) -> list[str]:
            right = [names.get(one[0].getpixel((0, 0)), "grey") if one else "none" for one in evidence]
            return [right[place - (random.random() < share)] for place in range(len(right))]

        return answer

    for share, least in ((0.1, 0), (0.2, 15)):
        reports = [mmattn.doctor(mixing(share, seed), rows, batched=True, max_questions=40) for seed in range(20)]
        found = sum("batches" in report.failed for report in reports)
        print(f"{share:.0%} of the requests get another's picture: found by {found} of 20 reports")
        assert found >= least


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `mmattn doctor WORDS`."""
    return call(capsys, "doctor", *words)


@pytest.mark.slow
def test_a_server_that_mixes_up_its_clients(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with servers.serving(mixed=True) as url:
        code, out, err = run(capsys, "--url", url, "-o", tmp_path / "report.json", "-o", tmp_path / "report.html")
    assert code == 1 and "FAIL  batches" in out and "(after 240 answers)" in out, out + err
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"] and len(report["items"]) == 40 and report["figures"]["in batches"]["of"] == 40
    page = (tmp_path / "report.html").read_text()
    assert "FAIL  batches" in page and page.count("<tr>") == 41
    with servers.serving(mixed=False) as url:
        code, out, err = run(capsys, "--url", url)
    assert code == 0 and "\nok    batches" in out and "\nok    looks" in out, out + err


def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = passage_rows(7)
    with pytest.raises(ConfigError, match="processor="):
        mmattn.doctor(tiny_readers.sound(), rows)
    with pytest.raises(ConfigError, match="1 of 8 rows lack a question"):
        mmattn.doctor(tiny_readers.chain, [*rows, {"text": "blue", "passages": ["The sky is blue."]}])
    with pytest.raises(ConfigError, match="another answer and different evidence"):
        mmattn.doctor(tiny_readers.chain, rows[:1])
    with pytest.raises(ConfigError, match="address"):
        mmattn.doctor("localhost:8000", rows)
    code, _, err = run(capsys, "--url", "http://127.0.0.1:1/v1", "--model", "assets/vqa")
    assert code == 2 and "--model or --url" in err
    code, _, err = run(capsys, "--url", "http://127.0.0.1:1/v1")
    assert code == 2 and err.count("\n") == 1 and "nothing answers at http://127.0.0.1:1/v1" in err
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, _, err = run(capsys, "--url", f"http://127.0.0.1:{server.server_port}/v1")
        server.shutdown()
    assert code == 2 and "/v1/models answers 501" in err
    code, _, err = run(capsys, "assets/vqa", "--data", "rows.jsonl")
    assert code == 2 and "give --model assets/vqa" in err
    folder = shutil.copytree(find_asset("assets/vqa"), tmp_path / "vqa")
    (folder / "pipeline_config.json").unlink()
    code, _, err = run(capsys, "--model", folder)
    assert code == 2 and "no pipeline_config.json" in err
    code, _, err = run(capsys, "--model", "assets/vqa", "--host", "smollm2")
    assert code == 2 and "--host" in err


@pytest.mark.parametrize("name", ["max_questions", "batch_size"])
@pytest.mark.parametrize("value", [0, -3, True, 7.0, None])
def test_numbers_of_questions_that_cannot_be(name: str, value: Any) -> None:
    """Invariant 174."""
    with pytest.raises(ConfigError, match=name):
        mmattn.doctor(tiny_readers.chain, passage_rows(7), **{name: value})


@pytest.mark.parametrize("rows", [[], [{"prompt": "Who?", "passages": ["Ann."], "text": " "}]])
def test_rows_that_cannot_be_asked(rows: Any) -> None:
    """Invariant 174."""
    with pytest.raises(ConfigError, match=r"none|empty"):
        mmattn.doctor(tiny_readers.chain, rows)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "given", [None, [], ["no", "no"], {"generated_text": "no"}, [{"generated_text": "no"}], [None]]
)
def test_answers_that_are_no_texts(given: Any, batched: bool) -> None:
    """Invariant 174."""
    with pytest.raises(ConfigError, match="1 questions need as many texts"):
        mmattn.doctor(lambda question, evidence: given, passage_rows(7), batched=batched)


def test_more_questions_than_there_are() -> None:
    """Invariant 174."""
    report = mmattn.doctor(tiny_readers.chain, passage_rows(23), max_questions=5000)
    assert report.ok and len(report.items) == 23


def test_tests_of_many_questions() -> None:
    assert binomial_tail(2500, 5000, 0.5) == pytest.approx(0.5, abs=0.01) and interval(5000, 5000)[1] == 1.0


def test_few_questions_are_not_enough_to_fail() -> None:
    report = mmattn.doctor(lambda question, evidence: "no", passage_rows(7))
    assert report.ok and ("note", "looks") in [one[:2] for one in verdicts(report)], report


def test_one_question() -> None:
    report = mmattn.doctor(tiny_readers.chain, passage_rows(7), max_questions=1)
    assert report.ok and ("ok", "earlier calls", "one question alone") in verdicts(report), report


def test_the_evidence_of_a_function_and_the_counterfactual() -> None:
    rows = [
        {"prompt": "Who came?", "passages": [f"{name} came.", "It rained."], "text": name} for name in ("Ann", "Bob")
    ]
    seen = []

    def answer(question: str, evidence: list[Any]) -> str:
        seen.append(evidence)
        return evidence[0].split()[0] if evidence else "Nobody"

    report = mmattn.doctor(answer, rows)
    assert ["Ann came.", "It rained."] in seen and [] in seen
    items = report.as_dict()["items"]
    assert {(one["answer"], one["different_answer"]) for one in items} == {("Ann", "Bob"), ("Bob", "Ann")}
    assert all(one["follows"] for one in items)
