"""lightning: an adapted model in a `LightningModule` trains, its checkpoints have no host, and it resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from mmattn import training
from tests import tiny
from tests.interop import tokenised

lightning = pytest.importorskip("lightning", reason="lightning is installed with the dependency group dev")

pytestmark = [
    # lightning 2.6 asks torch 2.15 by the old name.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Reader(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Trains the adapter on its host."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.attach(tiny.make("llama")).train()

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of what is trained."""
        return torch.optim.AdamW(training.parameter_groups(self.model, 1e-2))


def fit(folder: Path, epochs: int, ckpt_path: Path | None = None) -> Reader:
    """A module trained for so many epochs of three steps, and its checkpoint `folder/last.ckpt`."""
    collator = training.MemoryCollator(DataCollatorForSeq2Seq(tokenised.make_tokenizer()))
    module = Reader()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(tokenised.dataset(12), batch_size=4, collate_fn=collator)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module


def test_checkpoints_hold_no_host_and_are_resumed_from(tmp_path: Path) -> None:
    for name in ("half", "rest", "whole"):
        (tmp_path / name).mkdir()
    half = fit(tmp_path / "half", 1)
    assert tokenised.unmoved(half.model, tokenised.weights(Reader().model)) == []
    state = torch.load(tmp_path / "half" / "last.ckpt", weights_only=False)["state_dict"]
    assert {key.rpartition(".adapters.")[0] for key in state} == {"model"}
    own = tiny.make("llama").state_dict()
    assert all(torch.equal(value, own[name]) for name, value in half.model.host.state_dict().items())
    rest = fit(tmp_path / "rest", 2, tmp_path / "half" / "last.ckpt")
    whole = fit(tmp_path / "whole", 2)
    ends = zip(rest.model.adapters.parameters(), whole.model.adapters.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in ends)
    again = Reader.load_from_checkpoint(tmp_path / "whole" / "last.ckpt")
    ends = zip(again.model.adapters.parameters(), whole.model.adapters.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in ends)
