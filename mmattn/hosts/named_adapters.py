"""The adapters of a host by name: added, chosen, merged and deleted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmattn.adapters.adapter_config import check_name
from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.settings import is_adapter, kinds_at
from mmattn.errors import AttachError, ConfigError, check_float
from mmattn.hosts.interop.quantised import size_of
from mmattn.hosts.ownership import check_host
from mmattn.hosts.save_pretrained import SavedModel


class NamedAdapters(SavedModel):
    """A host and its adapters by name; some are active."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__(check_host(host))
        self.active: list[str] = []

    @abstractmethod
    def check_attached(self) -> None:
        """Refuse to act on a host from which these adapters were unloaded."""

    def check_adapter(self, adapter: AdapterLayers) -> None:
        """Check that changes at the sites of an adapter reach the output of the host."""

    @abstractmethod
    def refresh_hooks(self) -> None:
        """Hook exactly the sites of the present adapters."""

    def set_adapter(self, names: str | Sequence[str]) -> None:
        """Make these adapters, in this order, the active ones; an empty list is none.

        Raises:
            AttachError: a name that is not attached.
        """
        selected = [names] if isinstance(names, str) else list(names)
        for name in selected:
            self.adapter(name)
        self.active = selected

    def add_adapter(self, name: str, adapter: Any = None) -> None:
        """Put another adapter on the host, active beside those that are.

        Args:
            name: to switch, combine and save it by.
            adapter: its settings.

        Raises:
            AttachError: the name is taken or no plain name, or the adapter is not for this kind of host.
            ConditionError: memory cannot reach its layers, or the adapters were unloaded.
        """
        if not isinstance(name, str):
            raise AttachError(
                f"add_adapter(name, settings) got {type(name).__name__} as the name; a LoRA is put on by "
                "model.host.add_adapter or peft"
            )
        if self.adapters:
            self.check_attached()
        check_name(name)
        if name in self.adapters:
            raise AttachError(
                f"an adapter {name!r} is already attached: choose another name or delete_adapter({name!r})"
            )
        if not (is_adapter(adapter) and set(adapter.positions) & set(self.positions)):
            raise AttachError(
                f"{type(self.host).__name__} is a host of kind {self.kind!r} and takes {kinds_at(self.positions)}; got "
                f"{type(adapter).__name__}"
            )
        built = adapter.build(adapter.sites(self))
        built.name = name
        built.attach_to(self)
        built.initialise(self)
        # A block lives where the states that it changes are: with a device map, on several devices.
        built.to_sites()
        built.train(self.host.training)
        self.adapters[name] = built
        self.active.append(name)
        self.refresh_hooks()

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter and its weights; the last one goes with `unload`.

        Raises:
            AttachError: it is not attached, or the only one.
        """
        self.adapter(name)
        if len(self.adapters) == 1:
            raise AttachError(f"{name!r} is the only adapter: use unload()")
        del self.adapters[name]
        self.active = [other for other in self.active if other != name]
        self.refresh_hooks()

    def add_weighted_adapter(self, names: Sequence[str], weights: Sequence[float], name: str) -> None:
        """Merge adapters of equal settings into a new one (model soups, arXiv 2203.05482, section 2).

        It is not active: `set_adapter(name)` uses it instead of the others.

        Args:
            names: of the adapters to merge.
            weights: one for each; those of the new adapter are the weighted sum.
            name: of the new adapter.

        Raises:
            AttachError: an adapter that is not attached, a name that is taken, or settings that differ.
            ConfigError: another number of weights than adapters.
        """
        if isinstance(names, str) or not names or len(weights) != len(names):
            raise ConfigError(f"give a list of adapters and one weight for each, got {names!r} and {weights!r}")
        parts = [self.adapter(one) for one in names]
        first, active = parts[0], list(self.active)
        for part in parts[1:]:
            if part.config != first.config:
                raise AttachError(
                    f"adapters {names[0]!r} and {part.name!r} have other settings ({first.config} and {part.config}): "
                    "use both at once with set_adapter"
                )
        shares = [check_float(f"weights[{index}]", weight) for index, weight in enumerate(weights)]
        states = [part.state_dict() for part in parts]
        merged = {
            key: sum(
                share * state[key].to(value.device, torch.float64) for share, state in zip(shares, states, strict=True)
            ).to(value.dtype)
            for key, value in states[0].items()
        }
        self.add_adapter(name, first.config)
        self.active = active
        self.adapter(name).load_state_dict(merged)

    def trainable_parameters(self) -> tuple[int, int]:
        """Numbers of trained parameters and of all, host included."""
        counts = [(size_of(p), p.requires_grad) for p in self.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def print_trainable_parameters(self) -> None:
        """Print the numbers in the words of peft."""
        trained, total = self.trainable_parameters()
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")
