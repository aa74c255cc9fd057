"""The arrows of the house, read from the source."""

from __future__ import annotations

from pathlib import Path

import mmattn
from tests.style import architecture

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mmattn"


def test_arrows_go_one_way() -> None:
    assert architecture.imports(PACKAGE)
    assert architecture.wrong_arrows(PACKAGE) == []


def test_no_two_modules_depend_on_each_other() -> None:
    """Every kind of import counted: at the top, in functions, for type checkers."""
    assert architecture.circle(PACKAGE) == []


def test_no_branch_on_a_kind_outside_its_room() -> None:
    assert architecture.branches_on_kinds(PACKAGE) == []


def test_the_front_door_is_narrow() -> None:
    assert len(mmattn.__all__) <= 30


def test_rooms_keep_to_their_budgets() -> None:
    assert architecture.over_budget(PACKAGE, architecture.BUDGETS, architecture.FILES) == []


def test_heavy_dependencies_live_in_one_place() -> None:
    assert architecture.heavy_imports(PACKAGE) == []


def test_one_softmax() -> None:
    lines = architecture.attention_lines(PACKAGE, {"softmax", "Softmax", "_softmax"})
    assert [line.split(":")[0] for line in lines] == ["core.attention"], lines


def test_every_fused_attention_is_called_in_the_core() -> None:
    lines = architecture.attention_lines(PACKAGE, architecture.ATTENTION_CALLS)
    assert {line.split(":")[0] for line in lines} == {"core.attention"}, lines


def test_recipes_use_the_front_door() -> None:
    assert architecture.back_doors(ROOT / "recipes") == []
