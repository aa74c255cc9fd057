"""Peak memory and time of a training step: patches for the adapter, and patches inserted as tokens before the text.

Each way runs in a separate process, because the peak of a process never falls again.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import mmattn
from mmattn.encoders import SeriesEncoder

from .learning import make_adapter
from .series import Description, batch
from .settings import Config

WAYS = {"adapter": "patches read by the adapter", "inserted": "patches inserted as tokens"}


class Inserted(nn.Module):
    """A frozen language model, and a trained projection from the slots of a memory to tokens before the text."""

    def __init__(self, lm: Any, memory_dim: int) -> None:
        super().__init__()
        self.lm = lm.requires_grad_(False)
        self.projection = nn.Linear(memory_dim, lm.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, memory: mmattn.Memory) -> Any:
        """Return the output of the language model."""
        tokens = self.projection(memory.tokens)
        embedded = torch.cat([tokens, self.lm.get_input_embeddings()(input_ids)], 1)
        visible = attention_mask.new_ones(memory.tokens.shape[:2]) if memory.mask is None else memory.mask.long()
        unlearned = labels.new_full(visible.shape, -100)
        return self.lm(
            inputs_embeds=embedded,
            attention_mask=torch.cat([visible, attention_mask], 1),
            labels=torch.cat([unlearned, labels], 1),
        )


def step_memory(config: Config) -> dict[str, dict[str, float]]:
    """Return peak MB above the loaded model, and seconds, of a step of each way."""
    steps = {}
    # The folder may be a copy, which has no module name.
    code = (
        "import sys; from pathlib import Path; from mmattn.recipes import load_recipe; "
        "load_recipe(Path(sys.argv[1]), 'memory_use').report(sys.argv[2], sys.argv[3])"
    )
    for way in WAYS:
        arguments = [str(Path(__file__).resolve().parent), way, config.model_dump_json()]
        result = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
        steps[way] = json.loads(result.stdout.splitlines()[-1])
    return steps


def report(way: str, settings: str) -> None:
    """Print the result of `one_way` as JSON."""
    torch.set_num_threads(1)
    print(json.dumps(one_way(way, Config.model_validate_json(settings))))


def one_way(way: str, config: Config) -> dict[str, float]:
    """Return peak resident memory (MB) above the loaded model and its data, and seconds of a step, of three steps."""
    from .train_series import LONGEST, build

    torch.manual_seed(config.seed)
    series, rows = config.series, config.describing.memory_batch
    length = -(-series.samples // series.patch)
    dim = SeriesEncoder(series.patch, position_features=series.position_features).dim
    lm = build(config.lm, length + LONGEST + 2)
    model = Inserted(lm, dim)
    if way == "adapter":
        model = mmattn.attach(lm, make_adapter(config.describing.adapter, dim))
    random = Random(config.seed)
    inputs = batch([Description.draw(random) for _ in range(rows)], torch.device("cpu"))
    memory = mmattn.Memory(torch.randn(rows, length, dim))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    model.train()
    loaded = peak_megabytes()
    begin = 0.0
    for step in range(3):
        if step == 1:
            begin = time.perf_counter()
        model(**inputs, memory=memory).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"megabytes": peak_megabytes() - loaded, "seconds": (time.perf_counter() - begin) / 2}


def peak_megabytes() -> float:
    """Return the peak of this process."""
    status = Path("/proc/self/status")
    if status.is_file():
        # On Linux getrusage starts with the peak of the parent process.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
