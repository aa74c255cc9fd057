"""`PassageCache`: passages that a host has read once, and `PassageSelection`, those before the texts of a call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mmattn.adapters.host_models import check_ids, text_config
from mmattn.adapters.joined.slots import JoinedSlots
from mmattn.adapters.passages import PassageLayers, Passages
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_int
from mmattn.hosts.host_state import HostState
from mmattn.hosts.model import AdaptedModel
from mmattn.kv_store.passage_slots import Ids, Passage, join_passages, read_again, read_text
from mmattn.kv_store.passage_store import PassageFolder, PassageStore, read_passages, write_passages
from mmattn.progress import counted
from mmattn.tokenization import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens of passages that the host reads at once.
TOKENS = 2048


class PassageCache:
    """Keys and values of passages, computed by a frozen language model for each passage alone.

    Each passage is read once. `select` puts passages in any order before the texts of a call. Their keys are rotated to
    their new positions. The text sees all passages; they do not see each other. A single passage gives the same result
    as in the prompt. With several, a model answers worse than from the prompt unless it was trained for it (arXiv
    2409.15355); `select(…, recomputed_tokens=k)` recovers some of this without training.

    Keys of a model with learned positions (GPT-2, OPT) cannot be moved. All passages then share the first positions,
    and the text follows the longest (parallel context windows, arXiv 2212.10947).

    Args:
        model: the result of `attach(host, PassageAdapter())`.
        tokenizer: tokenizes passages that are texts.
        adapter: name of the passage adapter, if the model has several.
        prefix: ids before all passages, such as the start of a chat template. Every passage is read after them, and
            `select` puts them once before each row.
        max_bytes: limit of the keys and values in memory, in addition to those of running calls; None for no limit.
            Passages beyond it are loaded from the folder, or read again by the host.
        folder: writes each passage to a file there. Other and later processes with the same host and prefix load it.
        max_file_bytes: limit of all files in the folder; None for no limit.

    Raises:
        ConditionError: the model has no passage adapter.
        ShapeError: ids beyond the host's vocabulary.
        ConfigError: `max_file_bytes` without a folder.

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

    def __init__(
        self,
        model: AdaptedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: str | None = None,
        *,
        prefix: Sequence[int] | Tensor = (),
        max_bytes: int | None = None,
        folder: str | PathLike[str] | None = None,
        max_file_bytes: int | None = None,
    ) -> None:
        for name, size in (("max_bytes", max_bytes), ("max_file_bytes", max_file_bytes)):
            if size is not None:
                check_int(name, size, at_least=0)
        if max_file_bytes is not None and folder is None:
            raise ConfigError("max_file_bytes is the size of a folder, and there is none: PassageCache(folder=…)")
        self.model, self.tokenizer = model, tokenizer
        self.name = passage_adapter(model, adapter)
        self.prefix = self._tokens(prefix) if len(prefix) else ()
        self._prefix: Passage | None = None
        self._folder, self._max_file_bytes = folder, max_file_bytes
        on_cuda = any(site.device.type == "cuda" for site in self._adapter().sites)
        self._store = PassageStore(max_bytes, pinned=on_cuda)
        self._ids: list[Ids] = []
        self._numbers: dict[Ids, int] = {}
        self._state: HostState | None = None

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each passage."""
        return list(map(len, self._ids))

    def ids(self, number: int) -> list[int]:
        """Return the ids of a passage; IndexError if there is none of this number."""
        return list(self._passage(number))

    def nbytes(self) -> int:
        """Bytes of keys and values in memory, including those that `load` left in its file."""
        return self._store.nbytes

    def add(self, passages: Iterable[str | Sequence[int] | Tensor], *, progress: bool = True) -> list[int]:
        """Let the host read passages; known passages are not read again.

        Args:
            passages: texts, or lists of ids. Special tokens in a text are plain text. Without a prefix, a BOS token is
                added if the tokenizer adds one.
            progress: show it.

        Returns:
            The number of each passage.

        Raises:
            ConfigError: texts, and no tokenizer.
            ShapeError: a passage without tokens, or with ids beyond the host's vocabulary.
            ConditionError: the host has changed since it read the others, or the passage adapter is not active.
        """
        tokens = [self._tokens(passage) for passage in passages]
        self.check_current()
        self._remember()
        new = {ids for ids in tokens if ids not in self._numbers and ids not in self._store}
        with counted(max(len(new), 1), "reading passages", progress and bool(new)) as advance:
            for read in self._read(new):
                advance(len(read))
        for ids in tokens:
            if ids not in self._numbers:
                self._numbers[ids] = len(self._ids)
                self._ids.append(ids)
        return [self._numbers[ids] for ids in tokens]

    def select(self, rows: Sequence[Sequence[int]], recomputed_tokens: int = 0) -> PassageSelection:
        """Select the passages before the texts of a call; pass the result as `memory=`.

        Args:
            rows: for each row of text the numbers of its passages, in order; a row may be empty.
            recomputed_tokens: for each passage except the first, the number of its first tokens that the host reads
                again at their new positions, where they see the passages before them (arXiv 2410.15332, section 3).

        Returns:
            The prefix and the passages of each row.

        Raises:
            IndexError: there is no passage of this number.
            ShapeError: no rows.
            ConditionError: tokens cannot be read again in this host.
        """
        check_int("recomputed_tokens", recomputed_tokens, at_least=0)
        if not rows:
            raise ShapeError("passages are selected for each row of text, and there are no rows: select([[0, 2], [1]])")
        chosen = [[self._passage(number) for number in row] for row in rows]
        self._store.prefetch(ids for row in chosen for ids in row)
        return PassageSelection(self, chosen, recomputed_tokens)

    def save(self, path: str | PathLike[str]) -> None:
        """Write all passages to one file, with a fingerprint of the host.

        Args:
            path: the file.

        Raises:
            ConditionError: the host's weights have changed since it read them.
        """
        self.check_current()
        self._remember()
        (passages,) = self.passages([self._ids])
        count = len(passages) - len(self._ids)
        assert self._state is not None
        write_passages(path, passages[count:], self._state.digest, self._adapter(), passages[:count])

    @classmethod
    def load(
        cls,
        model: AdaptedModel,
        path: str | PathLike[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        mapped: bool = False,
    ) -> PassageCache:
        """Load saved passages.

        Args:
            model: an adapted model with the same host.
            path: the file.
            tokenizer: as for the class.
            mapped: leave keys and values in the file until they are selected; the file is read once for its checksums.
                False reads them into memory, which is pinned for a host on a CUDA device.

        Raises:
            AdapterFileError: the file is truncated, modified or not of passages, or another host has read them.
        """
        cache = cls(model, tokenizer)
        cache._state, vocab_size = HostState(model.host), getattr(text_config(model.host), "vocab_size", None)
        prefix, passages = read_passages(path, cache._state.digest, cache._adapter(), vocab_size)
        if not mapped:
            pinned = cache._store.pinned
            prefix, passages = prefix and prefix.loaded(pinned), [passage.loaded(pinned) for passage in passages]
        if prefix is not None:
            cache.prefix, cache._prefix = prefix.ids, prefix
        cache._store.put(passages)
        cache._ids = [passage.ids for passage in passages]
        cache._numbers = {ids: number for number, ids in enumerate(cache._ids)}
        return cache

    def check_current(self) -> None:
        """Raise ConditionError if the host has changed since it read the passages."""
        if self._state is not None and not self._state.holds():
            raise ConditionError(
                f"the weights, config, active LoRA adapters or autocast of {type(self.model.host).__name__} have "
                f"changed since it read these {len(self)} passages: make a new PassageCache(model) and add them again"
            )

    def check(self, adapter: PassageLayers) -> None:
        """Raise ConditionError for passages that another host, or this host with other weights, has read."""
        if self.model.adapters[self.name] is not adapter:
            raise ConditionError(
                "these passages were read by another host, or before this adapter was attached: make a "
                "PassageCache(model) for it and add them"
            )
        self.check_current()

    def passages(self, rows: Sequence[Sequence[Ids]]) -> list[list[Passage]]:
        """Return the passages of each row, behind the prefix: from memory, from their files, or read again."""
        passages: dict[Ids, Passage] = {}
        different = dict.fromkeys(ids for row in rows for ids in row)
        for ids in different:
            if (passage := self._store.find(ids)) is not None:
                passages[ids] = passage
        for read in self._read([ids for ids in different if ids not in passages]):
            passages.update(read)
        prefix = self._read_prefix()
        return [[*prefix, *(passages[ids] for ids in row)] for row in rows]

    def _read(self, wanted: Iterable[Ids]) -> Iterator[dict[Ids, Passage]]:
        """Have the host read passages in batches, each passage in one process at a time."""
        rest = sorted(wanted, key=lambda ids: (len(ids), ids))
        while rest:
            count = max(1, min(len(rest), TOKENS // (len(self.prefix) + len(rest[0]))))
            while count > 1 and count * (len(self.prefix) + len(rest[count - 1])) > TOKENS:
                count -= 1
            batch, rest = rest[:count], rest[count:]
            with self._store.writing(batch):
                read = {ids: passage for ids in batch if (passage := self._store.find(ids)) is not None}
                if new := [ids for ids in batch if ids not in read]:
                    passages = read_with_host(self.model, self.name, new, self.prefix)
                    self._store.put(passages)
                    read |= {passage.ids: passage for passage in passages}
            yield read

    def _remember(self) -> None:
        """Remember with what the host computes, once, and open the folder for it."""
        if self._state is not None:
            return
        self._state = HostState(self.model.host)
        if self._folder is not None:
            host = f"{self._state.digest_here} {self.prefix}"
            folder, start = os.fspath(self._folder), len(self.prefix)
            self._store.folder = PassageFolder(folder, self._max_file_bytes, host, self._adapter(), start)

    def _read_prefix(self) -> list[Passage]:
        """Return the prefix as a passage, read once; an empty list without one."""
        if self.prefix and self._prefix is None:
            self.check_current()
            self._remember()
            (self._prefix,) = read_with_host(self.model, self.name, [self.prefix])
        return [] if self._prefix is None else [self._prefix]

    def _adapter(self) -> PassageLayers:
        return cast(PassageLayers, self.model.adapter(self.name))

    def _passage(self, number: int) -> Ids:
        if not 0 <= number < len(self._ids):
            raise IndexError(f"there is no passage {number}: this cache has {len(self)}, counted from 0")
        return self._ids[number]

    def _tokens(self, passage: str | Sequence[int] | Tensor) -> Ids:
        if isinstance(passage, str):
            if self.tokenizer is None:
                raise ConfigError("a passage was given as a text: PassageCache(model, tokenizer), or give its ids")
            (passage,), _ = tokenize(self.tokenizer, passage, add_special_tokens=not self.prefix)
        ids = tuple(torch.as_tensor(passage).flatten().tolist())
        if not ids:
            raise ShapeError("a passage has no tokens: leave it out")
        check_ids("a passage", ids, self.model.host)
        return ids


class PassageSelection(Passages):
    """Passages of a `PassageCache` before the texts of a call, given to it as `memory=`; made by its `select`.

    Keys and values are put together at the first call, and used by all later ones.

    Args:
        cache: the `PassageCache`.
        rows: for each row of text the ids of its passages, in their order.
        recomputed_tokens: as in `PassageCache.select`.
    """

    def __init__(self, cache: PassageCache, rows: Sequence[Sequence[Ids]], recomputed_tokens: int = 0) -> None:
        self.cache, self.rows, self.recomputed_tokens = cache, [list(row) for row in rows], recomputed_tokens
        self._slots: JoinedSlots | None = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | slice | list[int]) -> PassageSelection:
        """Return some rows, by number, slice or list."""
        numbers = torch.arange(len(self.rows))[rows].reshape(-1).tolist()
        chosen = [self.rows[number] for number in numbers]
        return PassageSelection(self.cache, chosen, self.recomputed_tokens)

    def nbytes(self) -> int:
        """Bytes of keys and values, once they were put together."""
        return 0 if self._slots is None else self._slots.nbytes()

    def slots(self, adapter: PassageLayers) -> JoinedSlots:
        """Return keys and values of every layer; ConditionError if another host or other weights computed them."""
        self.cache.check(adapter)
        if self._slots is None:
            with torch.inference_mode(False), torch.no_grad():
                rows, count = self.cache.passages(self.rows), self.recomputed_tokens
                joined = join_passages(adapter, rows)
                self._slots = read_again(self.cache.model, adapter, rows, joined, count) if count else joined
        return self._slots


def passage_adapter(model: AdaptedModel, name: str | None = None) -> str:
    """Return the name of the passage adapter of a model; ConditionError if there is none, or several."""
    names = [each for each in getattr(model, "adapters", {}) if isinstance(model.adapter(each), PassageLayers)]
    names = [each for each in names if name in (None, each)]
    if len(names) != 1:
        raise ConditionError(
            f"a PassageCache is made for a model with one passage adapter, got {type(model).__name__} with "
            f"{len(names)}: model = mmattn.attach(host, mmattn.adapters.PassageAdapter())"
        )
    return names[0]


def read_with_host(model: AdaptedModel, name: str, passages: Sequence[Ids], prefix: Ids = ()) -> list[Passage]:
    """Return keys and values of passages, each read alone after the prefix; the host reads them in one batch."""
    start, longest = len(prefix), len(prefix) + max(map(len, passages))
    padded = torch.tensor([[*prefix, *ids, *[ids[-1]] * (longest - start - len(ids))] for ids in passages])
    real = torch.arange(longest) < torch.tensor([[start + len(ids)] for ids in passages])
    captured = read_text(model, name, padded, real, torch.arange(longest)[None])
    has_windows = any(window is not None for window in captured.windows.values())
    groups = cast(PassageLayers, model.adapter(name)).groups()

    def of_row(row: int, slots: dict[int, Tensor]) -> list[list[Tensor]]:
        tokens = slice(start, start + len(passages[row]))
        return [[torch.stack([slots[layer][row, :, tokens] for layer in group.layers])] for group in groups]

    return [
        Passage(ids, of_row(row, captured.keys), of_row(row, captured.values), has_windows, start)
        for row, ids in enumerate(passages)
    ]
