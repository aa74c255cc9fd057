"""Ask a host which memory a call has, by comparing its output bit for bit with those of known memories."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from tests import tiny


class MemoryOfCall:
    """A host with two memories, "A" and "B", and its outputs with each and with "none"."""

    def __init__(self, model, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.A = tiny.memory(ids.shape[0])
        self.B = tiny.memory(ids.shape[0], m=11, seed=1)
        with torch.no_grad():
            self.answers = {name: model(ids, memory=getattr(self, name)).logits for name in "AB"}
            self.answers["none"] = model(ids).logits

    def __call__(self) -> str:
        """Return the name of the memory of a call of the host made here."""
        with torch.no_grad():
            logits = self.model.host(self.ids).logits
        return next((name for name, answer in self.answers.items() if torch.equal(answer, logits)), "another")

    def quietly(self) -> str:
        """Return the same without the warning of a block that is open elsewhere."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self()
