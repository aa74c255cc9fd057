"""Use one host in every way, in any order, for minutes, and see whether it is still itself.

    python -m tests.stress.soak [MINUTES]

In each round, in an order of its own: steps of training, a generate in each of three ways, a save, a load beside what
is there, an adapter deleted, and everything detached. After each of these the fingerprint of the host's weights must be
what it was; after every detach it must answer bit for bit as at first, without a hook. Prints one line and exits with 1
at the first difference.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn.storage.fingerprints import fingerprint
from tests import tiny
from tests.stress.growth import hooks

ROWS = 2


class Life:
    """One host, the adapters it has at the moment, and what it was at first."""

    def __init__(self, place: Path, seed: int) -> None:
        self.folder, self.chance = place / "adapter", random.Random(seed)
        self.host = tiny.make("llama")
        self.ids, self.print, self.hooks = tiny.text(ROWS), fingerprint(self.host.state_dict()), hooks(self.host)
        self.own = tiny.own(self.ids)
        self.model: Any = None

    def attached(self) -> Any:
        """The host with at least one adapter."""
        if self.model is None:
            self.model = tiny.attach(self.host)
        return self.model

    def memory(self) -> mmattn.Memory:
        """One never seen before, padded or not."""
        m = self.chance.randint(1, 17)
        lengths = self.chance.choice([None, [m, self.chance.randint(0, m)]])
        return tiny.memory(ROWS, m=m, lengths=lengths, seed=self.chance.getrandbits(30))

    def train(self) -> None:
        """A few steps of an optimizer on all adapters."""
        model = self.attached().train()
        optimizer = torch.optim.AdamW(model.adapters.parameters(), lr=1e-3)
        for _ in range(3):
            loss = model(self.ids, labels=self.ids, memory=self.memory()).loss
            loss.backward()
            assert torch.isfinite(loss), "the loss is no number"
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    def generate(self) -> None:
        """Beams and samples, the memory given, in a block and prepared."""
        model, memory = self.attached(), self.memory()
        model.generate(self.ids, memory=memory, max_new_tokens=5, num_beams=3, do_sample=False)
        model.generate(self.ids, memory=model.prepare(memory), max_new_tokens=5, do_sample=True)
        with model.condition(memory):
            model.host.generate(self.ids, max_new_tokens=5, do_sample=False)

    def save(self) -> None:
        """Over what was saved before."""
        model = self.attached()
        model.save_adapter(self.folder, self.chance.choice(list(model.adapters)))

    def load(self) -> None:
        """What was saved, beside what is there."""
        if not self.folder.exists():
            self.save()
        names = [] if self.model is None else list(self.model.adapters)
        if len(names) < 3:
            self.model = mmattn.load(self.host, self.folder, f"loaded{len(names)}-{self.chance.getrandbits(30)}")

    def delete(self) -> None:
        """One of several adapters."""
        names = list(self.attached().adapters)
        if len(names) > 1:
            self.model.delete_adapter(self.chance.choice(names))

    def detach(self) -> None:
        """Everything, and the host answers as at first."""
        assert self.attached().unload() is self.host, "another host came back"
        self.model = None
        with torch.no_grad():
            assert torch.equal(self.host(self.ids).logits, self.own), "the host answers otherwise"
        assert hooks(self.host) == self.hooks, "hooks were left on the host"

    def round(self) -> int:
        """Everything once, in an order of its own: how many things were done."""
        steps = [self.train, self.generate, self.save, self.load, self.delete, self.detach]
        self.chance.shuffle(steps)
        for step in steps:
            step()
            assert fingerprint(self.host.state_dict()) == self.print, f"{step.__name__} changed the host"
        return len(steps)


def main(minutes: int = 10, seed: int = 0) -> int:
    end, done = time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory() as place:
        life = Life(Path(place), seed)
        try:
            while done == 0 or time.monotonic() < end:
                done += life.round()
        except AssertionError as error:
            print(f"after {done} things done: {error}")
            return 1
        life.detach()
    print(f"{minutes} minutes, {done} things done: the host is what it was")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
