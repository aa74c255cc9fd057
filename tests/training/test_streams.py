"""Rows of a stream that can be read once: none is lost to what looks at rows before training."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from mmattn import training
from tests import tiny
from tests.training import small_run

ROWS = 8


def made(count: int = ROWS) -> Iterator[dict[str, Any]]:
    for number in range(count):
        memory = torch.randn(3, tiny.MEMORY_DIM, generator=torch.Generator().manual_seed(number)).tolist()
        ids = [5 + number, 6, 7, 8]
        yield {"input_ids": ids, "labels": ids, "memory": memory}


class Once(IterableDataset):
    """As a socket or a queue: each iteration goes on where the one before ended."""

    def __init__(self, rows: Iterator[Any]) -> None:
        self.left = rows

    def __iter__(self) -> Iterator[Any]:
        yield from self.left


class Again(IterableDataset):
    """Read from the beginning each time."""

    def __iter__(self) -> Iterator[Any]:
        return made()


def columns(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


class Watched(training.AdapterTrainer):  # type: ignore[misc, valid-type]
    """Notes the number of each row that is trained on, and the first value of its memory."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault("seen", []).extend((inputs["input_ids"][:, 0] - 5).tolist())
        vars(self).setdefault("memories", []).extend(inputs["memory"].tokens[:, 0, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def trainer(folder: Path, dataset: Any, model: Any = None, **more: Any) -> Any:
    given = {"per_device_train_batch_size": 2, "max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    return Watched(
        model=small_run.attach() if model is None else model,
        args=small_run.arguments(folder, **given | more),
        train_dataset=dataset,
        data_collator=training.MemoryCollator(columns),
    )


def calibration(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.adapters.named_buffers() if "calibration" in name}


@pytest.mark.parametrize("kind", ["read once", "an iterator", "of datasets", "in workers"])
def test_the_trainer_trains_on_every_row_in_order(kind: str, tmp_path: Path) -> None:
    """Invariant 150."""
    dataset = {
        "read once": lambda: Once(made()),
        "an iterator": lambda: Once(iter(list(made()))),
        "of datasets": lambda: datasets.IterableDataset.from_generator(made),
        "in workers": Again,
    }[kind]()
    more = {"dataloader_num_workers": 1} if kind == "in workers" else {}
    model = small_run.attach()
    run = trainer(tmp_path, dataset, model, **more)
    bare = copy.deepcopy(model)
    run.train()
    assert run.seen == list(range(ROWS))
    # By the rows of the first step, and before it.
    rows = list(made())[:4]
    bare.calibrate(columns(rows)["input_ids"], memory=torch.tensor([row["memory"] for row in rows]))
    wanted, got = calibration(bare), calibration(model)
    assert wanted.keys() == got.keys() and len(got) == 2 * len(model.adapter("default").layers)
    for name, value in wanted.items():
        tiny.assert_close(got[name], value)


@pytest.mark.slow
def test_a_run_over_a_stream_is_resumed_with_its_calibration(tmp_path: Path) -> None:
    """Invariant 150: of a checkpoint, since the rows that it was measured on do not come again."""
    whole = trainer(tmp_path / "whole", Again(), save_strategy="steps", save_steps=1)
    whole.train()
    resumed = trainer(tmp_path / "resumed", Again())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    left = trainer(tmp_path / "left", Once(iter(list(made())[4:])), ignore_data_skip=True)
    left.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert resumed.seen == left.seen == [4, 5, 6, 7]
    for run in (resumed, left):
        state = run.model.adapters.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in whole.model.adapters.state_dict().items())


@pytest.mark.slow
def test_two_processes_share_the_rows_and_calibrate_by_all(tmp_path: Path) -> None:
    """Invariants 150, 157: each row once, with its memory; alike in each, and as one process does on the same rows."""
    done = small_run.start(tmp_path, processes=2, script=__file__)
    assert not done.returncode, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    seen = sorted(first["seen"] + second["seen"])
    assert seen == [[number, pytest.approx(row["memory"][0][0])] for number, row in enumerate(made())]
    assert first["weights"] == second["weights"]
    alone = trainer(tmp_path / "alone", Again())
    alone.train()
    for name, value in calibration(alone.model).items():
        assert first["calibration"][name] == second["calibration"][name]
        tiny.assert_close(torch.tensor(first["calibration"][name]), value)


def main(folder: str) -> None:
    """One of two processes."""
    run = trainer(Path(folder), Again(), gradient_accumulation_steps=1)
    run.train()
    found = {"seen": list(zip(run.seen, run.memories, strict=True))}
    found["calibration"] = {name: one.tolist() for name, one in calibration(run.model).items()}
    found["weights"] = sum(float(one.detach().double().sum()) for one in run.model.adapters.parameters())
    (Path(folder) / f"{run.args.process_index}.json").write_text(json.dumps(found))
    run.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
