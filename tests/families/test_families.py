"""Some rows of docs/families.md made anew; all of them by `make families`, in the nightly workflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from mmattn.adapters.projection import ProjectedView
from tests import tiny, tiny_unets
from tests.families.checks import WORKS
from tests.families.matrix import GROUPS, PAGE, Group, failures, is_wrong

# What hosts warn of while they are trained or generate is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

CHOSEN = {
    "Causal language models": (*tiny.FAMILIES, "deepseek_v4", "longcat_flash", "xlm", "hrm_text"),
    "Models that already see or hear": ("gemma3", "qwen2_5_vl", "mllama", "qwen2_audio"),
    "Encoder–decoders, adapter in the decoder": ("bart", "marian"),
    "Encoder–decoders, adapter in the encoder": ("t5", "pegasus"),
    "Speech to text, adapter in the decoder": ("moonshine",),
    "Encoders of texts": ("roberta",),
    "Encoders of pictures": ("vit", "convnext"),
    "Encoders of sounds": ("wav2vec2",),
    "Diffusion transformers": (
        "SD3Transformer2DModel",
        "FluxTransformer2DModel",
        "PixArtTransformer2DModel",
        "WanTransformer3DModel",
        "DiTTransformer2DModel",
        "LatteTransformer3DModel",
    ),
    "UNets": tuple(tiny_unets.KINDS),
}
#: Of those whose kind no suite in tests/test_contract.py has, or has in other words.
QUICK = (
    *("llama", "mistral", "mamba", "xlm", "hrm_text", "qwen2_5_vl", "marian", "roberta", "vit", "convnext", "wav2vec2"),
    *("SD3Transformer2DModel", "WanTransformer3DModel", "DiTTransformer2DModel", "LatteTransformer3DModel", "stable"),
)
ROWS = [
    pytest.param(group, name, id=f"{name} of {group.auto}", marks=[pytest.mark.slow] * (name not in QUICK))
    for group in GROUPS
    for name in CHOSEN.get(group.title, ())
]


def part_of(page: str, group: Group) -> str:
    return page.partition(f"## {group.title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("group", "name"), ROWS)
def test_some_families(group: Group, name: str) -> None:
    """Invariants 27, 28, 31, 54, 55, 95, 122: nothing is wrong, and the page says what is."""
    found = group.run(name)
    assert not is_wrong(found), found
    page = PAGE.read_text(encoding="utf-8")
    told = part_of(page, group)
    if found["family"] != WORKS:
        heading = "Refused by" if found["family"].startswith("refused") else "Not tried:"
        assert f"`{name}`" in told.partition(heading)[2].partition("Not tried:")[0]
    elif f"transformers {transformers.__version__}," in page:
        # What a host does by itself differs between versions; what is wrong was asked before.
        cells = failures(found, group.checks)
        passing = told.partition("Every check passes for:")[2].partition("\n\n")[0]
        rows = [line for line in told.splitlines() if line.endswith(f" | {cells} |")]
        assert f"`{name}`" in (passing if cells == " | " else "\n".join(rows))


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter that leaves out the second row of a memory."""
    apply = ProjectedView.apply

    def forgetful(self, x, block, layer, adapter_scale):  # type: ignore[no-untyped-def]
        out = apply(self, x, block, layer, adapter_scale).clone()
        out[1:] = x[1:]
        return out

    monkeypatch.setattr(ProjectedView, "apply", forgetful)
    found = GROUPS[0].run("llama")
    assert found["memory by row"].startswith("wrong") and found["row by row"].startswith("wrong")


def test_the_page_tells_of_every_family() -> None:
    """Invariant 95: of the version of transformers that it names."""
    page = Path(PAGE).read_text(encoding="utf-8")
    assert "\nWrong:\n" not in page
    if f"with transformers {transformers.__version__}, " not in page:
        pytest.skip("the page is of another version of transformers")
    for group in GROUPS:
        told = part_of(page, group)
        missing = [name for name in group.names if f"`{name}`" not in told]
        assert not missing, f"{group.title}: {missing}: make families"
