"""`--dry-run`: a few measured steps say what a run would take, and no run is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import TrainerCallback

from mmattn import training
from mmattn.cli.app import main
from tests.training import small_run

ROOT = Path(__file__).parents[2]


class Unevaluated(TrainerCallback):
    """Fails where a training is evaluated."""

    def on_evaluate(self, *args: object, **kwargs: object) -> None:
        pytest.fail("a dry run evaluates")


@pytest.mark.parametrize("steps", [3, 29], ids=["fewer than are measured", "many"])
def test_a_training_is_measured_and_ended(tmp_path: Path, steps: int) -> None:
    """Counts of parameters, rows and steps are those of the run; no step is saved, evaluated or told to a tracker."""
    pytest.importorskip("tensorboard")
    model = small_run.attach()
    with training.dry_run(), pytest.raises(training.DryRunEnded) as ended:
        small_run.run(tmp_path, model=model, max_steps=steps, report_to="tensorboard", callbacks=[Unevaluated()])
    text, (trained, total) = str(ended.value), model.trainable_parameters()
    assert f"training: {trained:,} of {total:,} parameters are trained" in text
    assert f"{steps:,} of 6 rows in 1 process," in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command_line_says_it_and_leaves_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mmattn train CONFIG --dry-run`; several seeds at once are refused."""
    words = [
        "train", str(ROOT / "recipes" / "finetune" / "config_tiny.yaml"), f"out={tmp_path / 'run'}", "progress=false",
        f"data.cache={tmp_path / 'cache'}", "device=cpu", "optim.max_steps=720", "--dry-run",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(words)
    out = capsys.readouterr().out
    assert not end.value.code and not (tmp_path / "run").exists()
    assert re.search(r"adapter: [\d,]+ of [\d,]+ parameters are trained", out)
    assert re.search(r"steps: 720 of 8 rows in 1 process, \d+\.\d\d s each", out)
    assert re.search(r"time: \d+\.\d\d hours, without evaluations", out)
    with pytest.raises(SystemExit) as end:
        main([*words, "--seeds", "0,1"])
    assert end.value.code == 2 and "--dry-run measures one run" in capsys.readouterr().err
