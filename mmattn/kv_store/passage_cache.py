"""`PassageCache`: passages that a host has read once, to stand before any text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.language_models import text_config
from mmattn.adapters.passages.adapter import PassageLayers
from mmattn.core.tensor_cache import TensorVersion
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_int
from mmattn.hosts.interop.peft import active_lora
from mmattn.kv_store.passage_files import Entry, read_entries, write_entries
from mmattn.kv_store.passage_kv import read
from mmattn.kv_store.passage_selection import PassageSelection
from mmattn.progress import counted
from mmattn.storage.fingerprints import fingerprint

#: Tokens of passages that the host reads at once.
TOKENS = 2048


class PassageCache:
    """Keys and values of passages, as a frozen language model computed them of each passage alone.

    Each passage is read once. `select` puts some of them, in any order, before the texts of a call: their keys are
    turned to the positions where they then stand, they do not see each other, and the text sees all of them. One
    leading passage is what it would be in the prompt. Several are read independently, from which a model that was not
    trained for it answers worse than from a prompt, and one that was as well (arXiv 2409.15355);
    `select(…, recomputed_tokens=k)` repairs some of it without training.

    Where a model has learned positions (GPT-2, OPT), keys cannot be moved: all passages stand side by side at the first
    positions, and the text after the longest of them (parallel context windows, arXiv 2212.10947).

    Args:
        model: what `attach(host, PassageAdapter())` returned.
        tokenizer: makes ids of passages that are given as texts.
        adapter: name of the passage adapter, where the model has several.

    Raises:
        ConditionError: the model has no passage adapter.

    >>> import mmattn
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                   num_attention_heads=4)).eval()
    >>> model = mmattn.attach(lm, mmattn.adapters.PassageAdapter())
    >>> passages = mmattn.hosts.PassageCache(model)
    >>> passages.add([[5, 6, 7], [8, 9], [5, 6, 7]], progress=False)
    [0, 1, 0]
    >>> text = torch.tensor([[10, 11], [10, 11]])
    >>> model.generate(text, memory=passages.select([[1, 0], []]), max_new_tokens=3, do_sample=False).shape
    torch.Size([2, 5])
    """

    def __init__(self, model: Any, tokenizer: Any = None, adapter: str | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name = passage_adapter(model, adapter)
        self._entries: list[Entry] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._version: TensorVersion | None = None
        self._active: Any = None

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._entries)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each passage."""
        return [len(entry.ids) for entry in self._entries]

    def ids(self, number: int) -> list[int]:
        """The ids of a passage.

        Raises:
            IndexError: there is none of this number.
        """
        return list(self._entry(number).ids)

    def nbytes(self) -> int:
        """Bytes of keys and values, those included that were left in a file."""
        return sum(entry.nbytes() for entry in self._entries)

    def add(self, passages: Iterable[str | Sequence[int] | Tensor], *, progress: bool = True) -> list[int]:
        """Have the host read passages; one that it has read is not read again.

        Args:
            passages: texts, or ids of each. What begins a text (a BOS token) is the tokenizer's to put in front.
            progress: show it.

        Returns:
            the number of each passage.

        Raises:
            ConfigError: texts, and no tokenizer.
            ShapeError: a passage without tokens, or with ids that the host does not know.
            ConditionError: the host's weights have changed since it read the others.
        """
        given = [self._tokens(one) for one in passages]
        self.check_current()
        new = sorted({ids for ids in given if ids not in self._numbers}, key=lambda ids: (len(ids), ids))
        if self._version is None:
            self._remember()
        read_now: dict[tuple[int, ...], Entry] = {}
        with counted(max(len(new), 1), "reading passages", progress and bool(new)) as advance:
            while len(read_now) < len(new):
                rest = new[len(read_now) :]
                count = max(1, min(len(rest), TOKENS // len(rest[0])))
                while count > 1 and count * len(rest[count - 1]) > TOKENS:
                    count -= 1
                for entry in read(self.model, self.name, rest[:count]):
                    read_now[entry.ids] = entry
                advance(count)
        for ids in given:
            if ids not in self._numbers:
                self._numbers[ids] = len(self._entries)
                self._entries.append(read_now[ids])
        return [self._numbers[ids] for ids in given]

    def select(self, rows: Sequence[Sequence[int]], recomputed_tokens: int = 0) -> PassageSelection:
        """Passages before the texts of a call, to be given to it as `memory=`.

        Args:
            rows: for each row of text the numbers of its passages, in the order in which they stand; none is none.
            recomputed_tokens: of each passage but the first, how many of its first tokens the host reads again where
                they now stand, seeing the passages before them (arXiv 2410.15332, section 3).

        Raises:
            IndexError: a passage that is not there.
            ShapeError: no rows.
            ConditionError: tokens cannot be read again in this host.
        """
        check_int("recomputed_tokens", recomputed_tokens, at_least=0)
        chosen = [[self._entry(number) for number in row] for row in rows]
        if not chosen:
            raise ShapeError("passages are selected for each row of text, and there are no rows: select([[0, 2], [1]])")
        return PassageSelection(self, chosen, recomputed_tokens)

    # Files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write all passages to one file, with a fingerprint of the host.

        Raises:
            ConditionError: the host's weights have changed since it read them.
        """
        self.check_current()
        write_entries(path, self._entries, self._fingerprint())

    @classmethod
    def load(
        cls, model: Any, path: str | PathLike[str], tokenizer: Any = None, *, mapped: bool = False
    ) -> PassageCache:
        """Read what `save` wrote.

        Args:
            model: an adapted model with the same host.
            path: the file.
            tokenizer: as for the class.
            mapped: leave keys and values in the file until they are selected; it is read through once for its
                checksums.

        Raises:
            AdapterFileError: the file is torn, changed or something else, or another host has read them.
        """
        cache = cls(model, tokenizer)
        cache._entries = read_entries(
            path, cache._fingerprint(), model.adapter(cache.name), mapped, cache._vocabulary()
        )
        cache._numbers = {entry.ids: number for number, entry in enumerate(cache._entries)}
        cache._remember()
        return cache

    # What holds ------------------------------------------------------------------------------------------------------

    def check_current(self) -> None:
        """Refuse passages that the host would read otherwise now.

        Raises:
            ConditionError: a weight was changed, or another LoRA made active, since they were read.
        """
        if self._version is None:
            return
        if not self._version.holds(self.model.host.parameters()) or self._active != active_lora(self.model.host):
            raise ConditionError(
                f"the weights of {type(self.model.host).__name__} were changed since it read these {len(self)} "
                "passages, or other LoRA adapters are active: make a new PassageCache(model) and add them again"
            )

    def check_adapter(self, adapter: PassageLayers) -> None:
        """Refuse passages for another host.

        Raises:
            ConditionError: another host has read them.
        """
        if self.model.adapters[self.name] is not adapter:
            raise ConditionError(
                "these passages were read by another host, or before this adapter was attached: make a "
                "PassageCache(model) for it and add them"
            )

    def _remember(self) -> None:
        self._version = TensorVersion(self.model.host.parameters())
        self._active = active_lora(self.model.host)

    def _fingerprint(self) -> str:
        return fingerprint(self.model.host.state_dict())

    def _vocabulary(self) -> int | None:
        return getattr(text_config(self.model.host), "vocab_size", None)

    def _entry(self, number: int) -> Entry:
        if not 0 <= number < len(self._entries):
            raise IndexError(f"there is no passage {number}: this cache has {len(self)}, counted from 0")
        return self._entries[number]

    def _tokens(self, passage: str | Sequence[int] | Tensor) -> tuple[int, ...]:
        if isinstance(passage, str):
            if self.tokenizer is None:
                raise ConfigError("a passage was given as a text: PassageCache(model, tokenizer), or give its ids")
            passage = self.tokenizer(passage)["input_ids"]
        ids = tuple(torch.as_tensor(passage).flatten().tolist())
        if not ids:
            raise ShapeError("a passage has no tokens: leave it out")
        size = self._vocabulary()
        if size is not None and not 0 <= min(ids) <= max(ids) < size:
            raise ShapeError(
                f"a passage has ids from {min(ids)} to {max(ids)}, and the vocabulary of "
                f"{type(self.model.host).__name__} has {size}: make them with the host's own tokenizer"
            )
        return ids


def passage_adapter(model: Any, name: str | None = None) -> str:
    """The name of the passage adapter of a model.

    Args:
        model: an adapted model.
        name: that it must have; any where there is one.

    Raises:
        ConditionError: it has none, or several.
    """
    names = [one for one in getattr(model, "adapters", {}) if isinstance(model.adapter(one), PassageLayers)]
    names = [one for one in names if name in (None, one)]
    if len(names) != 1:
        raise ConditionError(
            f"a PassageCache is made for a model with one passage adapter, got {type(model).__name__} with "
            f"{len(names)}: model = mmattn.attach(host, mmattn.adapters.PassageAdapter())"
        )
    return names[0]
