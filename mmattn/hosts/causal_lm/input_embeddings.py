"""Keys and values that a language model computes of embeddings before its text, in a forward of its own."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.joined_slots import Capture
from mmattn.adapters.language_models import device_of, embeddings_of, text_config
from mmattn.adapters.protocols import Site
from mmattn.errors import ConditionError
from mmattn.hosts.causal_lm.continuous_batching import paused
from mmattn.hosts.causal_lm.generation import fewest_logits
from mmattn.hosts.causal_lm.joined_slots import check_reads_embeddings, probe_before_text
from mmattn.hosts.context import Call
from mmattn.hosts.interop.peft import active_lora
from mmattn.hosts.recomputation import refuse_reentrant

#: Tokens of the vocabulary whose embeddings are measured.
MEASURED = 4096


class HostEmbeddingReader:
    """Run a host on embeddings, in a forward without adapters; `turns_keys` if keys follow positions."""

    def __init__(self, model: Any, turns_keys: bool) -> None:
        self.model, self.turns_keys = model, turns_keys
        self._options = fewest_logits(model.host)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostEmbeddingReader:
        # In a copy of the model it reads with the copy's host; a copy of an adapter alone stays with its host.
        twin = copy.copy(self)
        twin.model = memo.get(id(self.model), self.model)
        return twin

    @property
    def is_training(self) -> bool:
        """Return whether a part of the host is in training mode."""
        return any(module.training for module in self.model.host.modules())

    @torch.no_grad()
    def embedding_size(self) -> float:
        """Return the root mean square of the embeddings of the host's tokens."""
        size = getattr(text_config(self.model.host), "vocab_size", None) or 1
        ids = torch.arange(0, size, max(size // MEASURED, 1))[None]
        return float(self._embed(ids).float().square().mean().sqrt())

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights of the host."""
        return self.model.host.parameters()

    def state(self) -> Hashable:
        """Return the active LoRA adapters."""
        return active_lora(self.model.host)

    def read(
        self, name: str, embeddings: Tensor, real: Tensor, positions: Tensor
    ) -> tuple[Mapping[int, Tensor], Mapping[int, Tensor]]:
        """Return keys (b, g, m, k) and values (b, g, m, v) of each layer."""
        host, captured = self.model.host, Capture()
        function = str(getattr(text_config(host), "_attn_implementation", ""))
        if function.startswith("paged|"):
            raise ConditionError(
                f"the host reads the memory of adapter {name!r}, but is in continuous batching: give memories to "
                "model.generate_batch(inputs, memory=[…])"
            )
        if torch.is_grad_enabled() and host.training:
            refuse_reentrant(host)
        device, like = device_of(embeddings_of(host)), self._embed(torch.zeros(1, 1, dtype=torch.long))
        # A row without slots gets one that no token attends to, so that its numbers are finite.
        mask = (real | (torch.arange(real.shape[1], device=real.device) == 0)).long()
        with paused(self.model), self.model.open_blocks.conditioned(Call({name: captured}, reads_memory=True)):
            host(
                inputs_embeds=embeddings.to(device, like.dtype),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                use_cache=False,
                **self._options,
            )
        return dict(captured.keys), dict(captured.values)

    @torch.no_grad()
    def _embed(self, ids: Tensor) -> Tensor:
        embeddings = embeddings_of(self.model.host)
        embedded: Tensor = embeddings(ids.to(device_of(embeddings)))
        return embedded


def embedding_reader(model: Any, sites: Sequence[Site]) -> HostEmbeddingReader:
    """Return a reader of embeddings before the text of a host, after a check that it reads them as tokens."""
    reader = HostEmbeddingReader(model, probe_before_text(model, sites) is not None)
    check_reads_embeddings(model, sites[0].width)
    return reader
