"""Fine-tune both kinds of host by the recipe's own YAML: left alone, killed three times, and in two processes.

    python -m tests.stress.kills_in_recipes [language] [unet]

The language model learns the shipped pictures of flowers, the UNet digits of scikit-learn with their names. A killed
run gets signal 9 shortly after a checkpoint, is started again with the same command, and must end with the bytes of the
one that was left alone; two processes under torchrun must end within rounding of it. Exits with 1 if one does not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from mmattn import training

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "finetune"
KILLS, STEPS = 3, 40
TOLERANCE = 1e-5
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def digits(folder: Path, count: int = 24) -> Path:
    """Pictures of digits with their names."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    data = load_digits()
    lines = []
    for number in range(count):
        file = f"{number}.png"
        Image.fromarray((data.images[number] * 15.9).astype("uint8")).resize((16, 16)).save(folder / file)
        lines.append(json.dumps({"file": file, "caption": f"a {NAMES[data.target[number]]}"}))
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def start(settings: list[str], out: Path, processes: int = 1) -> subprocess.Popen[str]:
    """The command of the README, in a session of its own."""
    ran = ["-m", "mmattn", "train", *settings, f"out={out}", "progress=false"]
    if processes > 1:
        ran = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *ran]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *ran], cwd=ROOT, env=env, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(run: subprocess.Popen[str]) -> None:
    """Wait for a run to end well."""
    _, said = run.communicate(timeout=1800)
    assert run.returncode == 0, said[-3000:]


def kill(run: subprocess.Popen[str], folder: Path, chance: random.Random) -> int:
    """Kill a run after its next checkpoint, at some moment; the step of its last one."""
    before = training.last_step(folder)
    while training.last_step(folder) <= before:
        assert run.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.3))
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL, "it ended before it was killed"
    return training.last_step(folder)


def main(kinds: list[str]) -> int:
    chance, wrong = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = {
            "language": [str(RECIPE / "config.yaml"), "eval.early_stopping_patience=0"],
            "unet": [str(RECIPE / "config_unet.yaml"), f"data.path={digits(folder / 'digits')}"],
        }
        for kind, settings in wanted.items():
            settings = [
                *settings,
                "optim.num_train_epochs=null",
                f"optim.max_steps={STEPS}",
                "optim.save_steps=2",
                f"data.cache={folder / 'cache'}",
            ]
            finish(start(settings, folder / kind))
            whole = folder / kind / "adapter" / "adapter_model.safetensors"
            killed, steps = folder / f"{kind}-killed", []
            for _ in range(KILLS):
                steps.append(kill(start(settings, killed), killed / "checkpoints", chance))
            finish(start(settings, killed))
            same = (killed / "adapter" / whole.name).read_bytes() == whole.read_bytes()
            finish(start(settings, folder / f"{kind}-two", processes=2))
            alone, two = load_file(whole), load_file(folder / f"{kind}-two" / "adapter" / whole.name)
            apart = max(float((alone[key] - two[key]).abs().max()) for key in alone)
            wrong += not same or apart > TOLERANCE
            print(
                f"{kind}: killed after steps {steps} of {STEPS}, {'equal bytes' if same else 'DIFFERENT'}; "
                f"two processes: at most {apart:.1e} apart",
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
