"""The benchmarks: what they time is the same computation, and their ratios are ratios."""

from __future__ import annotations

import pytest
import torch

from recipes.benchmarks import core, mllama, on_a_card
from recipes.benchmarks.__main__ import table
from recipes.benchmarks.timing import interleaved, ratio
from tests.tiny import assert_close, differs


def test_ratios_are_taken_within_a_round():
    times = {"slow": [2.0, 20.0, 200.0], "fast": [1.0, 10.0, 100.0]}
    assert ratio(times, "slow", "fast") == 2.0
    assert ratio(times, "fast", "slow") == 0.5


def test_every_candidate_has_its_turn_in_every_round():
    turns: list[str] = []
    times = interleaved({name: lambda name=name: turns.append(name) for name in "abc"}, seconds=0, least=3)
    assert {name: len(row) for name, row in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert turns[3:6] == ["a", "b", "c"] and turns[6:9] == ["b", "c", "a"]


@pytest.mark.parametrize("fill", [1.0, 0.3])
@pytest.mark.parametrize("backward", [False, True])
def test_all_layers_run_and_are_compared(fill, backward):
    made = core.measure(core.Size(2, 3, 17, 26, 26, 2, fill), torch.float32, backward, seconds=0.01)
    assert {"einsum", "nn.MultiheadAttention", "bare operations", "diffusers Attention", "T5 layer"} <= set(made)
    assert all(0 < value < float("inf") for value in made.values())


def test_bare_operations_and_einsum_are_the_same_computation():
    size = core.Size(2, 3, 17, 26, 22, 2, 0.5)
    torch.manual_seed(0)
    runs = dict(core.competitors(size, torch.float64))
    x, memory = torch.randn(2, 3, 26, dtype=torch.float64), torch.randn(2, 17, 22, dtype=torch.float64)
    mask = torch.arange(17) < torch.tensor([[7], [11]])
    torch.testing.assert_close(runs["bare operations"](x, memory, mask), runs["einsum"](x, memory, mask))


def test_tables_leave_missing_figures_empty_and_small_ratios_keep_two_figures():
    text = table("size", {"one": {"a": 0.0117, "b": 0.0996, "c": 1234.5}, "two": {"a": 2.0}})
    assert text.splitlines()[2:] == ["| one | 0.012 | 0.10 | 1,234.50 |", "| two | 2.00 |  |  |"]


@torch.no_grad()
def test_mllama_has_our_weights() -> None:
    """Steps of both give the same logits, and those without the memory are others."""
    model, memory, steps = mllama.make_steps(2, 17, torch.float32, 64)
    with model.condition(memory):
        seen, theirs = steps["mmattn"](), steps["mllama"]()
        with model.disable_adapter():
            blind = steps["mmattn"]()
    assert_close(seen, theirs)
    assert differs(seen, blind)


def test_a_section_of_a_page_is_replaced():
    """The page before and after it stays."""
    page = "# Page\n\n## On a GPU\n\nold\n\n| a |\n\n## Searching\n\nkept\n"
    assert on_a_card.written(page, "new") == "# Page\n\n## On a GPU\n\nnew\n\n## Searching\n\nkept\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_measured(capsys):
    with pytest.raises(SystemExit) as ended:
        on_a_card.main([])
    assert ended.value.code == 2 and "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao and diffusers, which say on loading what they lack
def test_a_card_is_measured_in_small(tmp_path, capsys):
    """`make gpu` writes a table of each part."""
    page = tmp_path / "page.md"
    page.write_text("## On a GPU\n\nold\n\n## Searching\n")
    on_a_card.main(["--tiny", "--write", str(page)])
    section = page.read_text()
    assert section.count("| work |") == 5 and "old" not in section and section.endswith("\n\n## Searching\n")
