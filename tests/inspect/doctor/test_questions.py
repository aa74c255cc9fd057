"""When an answer is right: words and numbers of their own, in many scripts."""

from __future__ import annotations

import pytest

import mmattn
from mmattn.inspect.doctor.questions import is_right
from tests.inspect.doctor.planted import chinese_chain, chinese_rows, korean_chain, korean_rows

RIGHT = [
    ("red", "It is Red."), ("red", "**red**"), ("red.", "Red"), ("no", "No."), ("Ann", "Ann's"), ("C++", "Use C++."),
    ("New York", "in new\n york!"), ("STRASSE", "Straße"), ("café", "cafe\u0301"), ("ＹＥＳ", "yes"), ("?", "?"),
    ("3", "3."), ("3", "It is 3, I think"), ("3", "3-year-old"), ("3", "$3"), ("3", "(3)"), ("3", "A: 3"), ("３", "3"),
    ("3", "有3个"), ("3.5", "about 3.5."), ("-3", "It is −3."), ("3,000", "It is 3,000."), ("12:30", "at 12:30"),
    ("红色", "他的车是红色的。"), ("红色。", "是红色的"), ("是", "是的"), ("三", "有三个"), ("不", "不是"),
    ("赤", "車は赤です"), ("แดง", "รถสีแดง"), ("ใช่", "ใช่ครับ"), ("काल", "काल है"), ("빨간색", "3번은 빨간색입니다."),
]  # fmt: skip
WRONG = [
    ("red", "It is covered."), ("red", ""), ("no", "not"), ("cat", "catalogue"), ("e", "cafe\u0301"),
    ("3", "It is 3.5."), ("3", "13"), ("3", "31"), ("3", "-3"), ("3", "It is −3"), ("3", "3,000"), ("3", "3rd"),
    ("3", "3:30"), ("3", "0.3"), ("3", ".3"), ("3", "1/3"), ("3", "3/4"), ("3", "3½"), ("3", "3-4"), ("3", "3e5"),
    ("3", "３．５"), ("3", "３０"), ("3", "答案是-3"), ("是", "不是"), ("有", "没有"), ("三", "十三"), ("三", "三十"),
    ("ใช่", "ไม่ใช่"), ("काल", "काला"), ("ला", "काला"), ("색", "빨간색"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "answer"), RIGHT)
def test_right(expected: str, answer: str) -> None:
    """Invariant 173."""
    assert is_right(expected, answer)


@pytest.mark.parametrize(("expected", "answer"), WRONG)
def test_wrong(expected: str, answer: str) -> None:
    """Invariant 173."""
    assert not is_right(expected, answer)


def test_sound_chains_without_blanks_between_words() -> None:
    """Invariant 173."""
    for chain, rows in ((chinese_chain, chinese_rows()), (korean_chain, korean_rows())):
        report = mmattn.doctor(chain, rows)
        assert report.ok and all(report.figures["… by looking"]), report
