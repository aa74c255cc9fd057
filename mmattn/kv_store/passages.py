"""`PassageCache`: passages that a host has read once, to stand before any text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmattn import __version__
from mmattn.adapters.adapter_config import check_tensors
from mmattn.adapters.language_models import text_config
from mmattn.adapters.passages import PassageLayers
from mmattn.core.tensor_cache import TensorVersion
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, ShapeError, check_int
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.interop.peft import active_lora
from mmattn.kv_store.passage_selection import Passage, PassageSelection, capture
from mmattn.progress import counted
from mmattn.storage.fingerprints import fingerprint
from mmattn.storage.json_files import making_sense, validated
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.tokenization import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASSAGES = "mmattn-passages"
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
        prefix: ids before all passages, such as the begin of a chat template: every passage is read after them, and
            `select` puts them before each row, once.

    Raises:
        ConditionError: the model has no passage adapter.
        ShapeError: ids beyond the host's vocabulary.

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
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.name = passage_adapter(model, adapter)
        self.prefix = self._tokens(prefix) if len(prefix) else ()
        self._prefix: Passage | None = None
        self._passages: list[Passage] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._version: TensorVersion | None = None
        self._active: object = None

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._passages)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each passage."""
        return [len(passage.ids) for passage in self._passages]

    def ids(self, number: int) -> list[int]:
        """Return the ids of a passage; IndexError if there is none of this number."""
        return list(self._passage(number).ids)

    def nbytes(self) -> int:
        """Bytes of keys and values, those included that were left in a file."""
        return sum(passage.nbytes() for passage in self._passages)

    def add(self, passages: Iterable[str | Sequence[int] | Tensor], *, progress: bool = True) -> list[int]:
        """Have the host read passages; one that it has read is not read again.

        Args:
            passages: texts, or ids of each. Special tokens in a text are plain text; without a prefix the tokenizer
                puts a BOS token in front, if it should stand there.
            progress: show it.

        Returns:
            the number of each passage.

        Raises:
            ConfigError: texts, and no tokenizer.
            ShapeError: a passage without tokens, or with ids beyond the host's vocabulary.
            ConditionError: the host's weights have changed since it read the others.
        """
        tokens = [self._tokens(one) for one in passages]
        self.check_current()
        new = sorted({ids for ids in tokens if ids not in self._numbers}, key=lambda ids: (len(ids), ids))
        if self._version is None:
            self._remember()
        read: dict[tuple[int, ...], Passage] = {}
        with counted(max(len(new), 1), "reading passages", progress and bool(new)) as advance:
            while len(read) < len(new):
                rest = new[len(read) :]
                count = max(1, min(len(rest), TOKENS // (len(self.prefix) + len(rest[0]))))
                while count > 1 and count * (len(self.prefix) + len(rest[count - 1])) > TOKENS:
                    count -= 1
                for passage in read_with_host(self.model, self.name, rest[:count], self.prefix):
                    read[passage.ids] = passage
                advance(count)
        for ids in tokens:
            if ids not in self._numbers:
                self._numbers[ids] = len(self._passages)
                self._passages.append(read[ids])
        return [self._numbers[ids] for ids in tokens]

    def select(self, rows: Sequence[Sequence[int]], recomputed_tokens: int = 0) -> PassageSelection:
        """Return passages before the texts of a call, to be given to it as `memory=`.

        Args:
            rows: for each row of text the numbers of its passages, in their order; a row may be empty.
            recomputed_tokens: number of first tokens of each passage but the first that the host reads again at their
                new positions, with the passages before them visible (arXiv 2410.15332, section 3).

        Returns:
            The passages of each row, the prefix before them.

        Raises:
            IndexError: a passage that is not there.
            ShapeError: no rows.
            ConditionError: tokens cannot be read again in this host.
        """
        check_int("recomputed_tokens", recomputed_tokens, at_least=0)
        if not rows:
            raise ShapeError("passages are selected for each row of text, and there are no rows: select([[0, 2], [1]])")
        prefix = self._read_prefix()
        chosen = [[*prefix, *(self._passage(number) for number in row)] for row in rows]
        return PassageSelection(self._check, partial(capture, self.model, self.name), chosen, recomputed_tokens)

    def save(self, path: str | PathLike[str]) -> None:
        """Write all passages to one file, with a fingerprint of the host.

        Args:
            path: the file.

        Raises:
            ConditionError: the host's weights have changed since it read them.
        """
        self.check_current()
        write_passages(path, self._passages, self._fingerprint(), self._read_prefix())

    @classmethod
    def load(
        cls,
        model: AdaptedModel,
        path: str | PathLike[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        mapped: bool = False,
    ) -> PassageCache:
        """Read the passages that `save` wrote.

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
        adapter = model.adapter(cache.name)
        assert isinstance(adapter, PassageLayers)
        prefix, cache._passages = read_passages(path, cache._fingerprint(), adapter, mapped, cache._vocab_size())
        if prefix is not None:
            cache.prefix, cache._prefix = prefix.ids, prefix
        cache._numbers = {passage.ids: number for number, passage in enumerate(cache._passages)}
        cache._remember()
        return cache

    def check_current(self) -> None:
        """Raise ConditionError if a weight changed, or another LoRA became active, since the passages were read."""
        if self._version is None:
            return
        if not self._version.holds(self.model.host.parameters()) or self._active != active_lora(self.model.host):
            raise ConditionError(
                f"the weights of {type(self.model.host).__name__} were changed since it read these {len(self)} "
                "passages, or other LoRA adapters are active: make a new PassageCache(model) and add them again"
            )

    def _check(self, adapter: PassageLayers) -> None:
        """Raise ConditionError for passages that another host, or this host with other weights, has read."""
        if self.model.adapters[self.name] is not adapter:
            raise ConditionError(
                "these passages were read by another host, or before this adapter was attached: make a "
                "PassageCache(model) for it and add them"
            )
        self.check_current()

    def _remember(self) -> None:
        self._version = TensorVersion(self.model.host.parameters())
        self._active = active_lora(self.model.host)

    def _read_prefix(self) -> list[Passage]:
        """Return the prefix as a passage, read once; an empty list without one."""
        if self.prefix and self._prefix is None:
            self.check_current()
            if self._version is None:
                self._remember()
            (self._prefix,) = read_with_host(self.model, self.name, [self.prefix])
        return [] if self._prefix is None else [self._prefix]

    def _fingerprint(self) -> str:
        return fingerprint(self.model.host.state_dict())

    def _vocab_size(self) -> int | None:
        return getattr(text_config(self.model.host), "vocab_size", None)

    def _passage(self, number: int) -> Passage:
        if not 0 <= number < len(self._passages):
            raise IndexError(f"there is no passage {number}: this cache has {len(self)}, counted from 0")
        return self._passages[number]

    def _tokens(self, passage: str | Sequence[int] | Tensor) -> tuple[int, ...]:
        if isinstance(passage, str):
            if self.tokenizer is None:
                raise ConfigError("a passage was given as a text: PassageCache(model, tokenizer), or give its ids")
            (passage,), _ = tokenize(self.tokenizer, passage, add_special_tokens=not self.prefix)
        ids = tuple(torch.as_tensor(passage).flatten().tolist())
        if not ids:
            raise ShapeError("a passage has no tokens: leave it out")
        size = self._vocab_size()
        if size is not None and not 0 <= min(ids) <= max(ids) < size:
            raise ShapeError(
                f"a passage has ids from {min(ids)} to {max(ids)}, and the vocabulary of "
                f"{type(self.model.host).__name__} has {size}: make them with the host's own tokenizer"
            )
        return ids


def passage_adapter(model: AdaptedModel, name: str | None = None) -> str:
    """Return the name of the passage adapter of a model; ConditionError if there is none, or several."""
    names = [one for one in getattr(model, "adapters", {}) if isinstance(model.adapter(one), PassageLayers)]
    names = [one for one in names if name in (None, one)]
    if len(names) != 1:
        raise ConditionError(
            f"a PassageCache is made for a model with one passage adapter, got {type(model).__name__} with "
            f"{len(names)}: model = mmattn.attach(host, mmattn.adapters.PassageAdapter())"
        )
    return names[0]


def read_with_host(
    model: AdaptedModel, name: str, passages: Sequence[tuple[int, ...]], prefix: tuple[int, ...] = ()
) -> list[Passage]:
    """Return keys and values of passages, each read alone after the prefix; the host reads them in one batch."""
    start, longest = len(prefix), len(prefix) + max(map(len, passages))
    padded = torch.tensor([[*prefix, *one, *[one[-1]] * (longest - start - len(one))] for one in passages])
    real = torch.arange(longest) < torch.tensor([[start + len(one)] for one in passages])
    captured = capture(model, name, padded, real, torch.arange(longest)[None])
    has_windows = any(window is not None for window in captured.windows.values())

    def of_row(row: int, slots: dict[int, Tensor]) -> dict[int, Tensor]:
        end = start + len(passages[row])
        return {layer: one[row, :, start:end].transpose(0, 1).contiguous() for layer, one in slots.items()}

    return [
        Passage(ids, of_row(row, captured.keys), of_row(row, captured.values), has_windows, start)
        for row, ids in enumerate(passages)
    ]


def write_passages(
    path: str | PathLike[str], passages: Sequence[Passage], host: str, prefix: Sequence[Passage] = ()
) -> None:
    """Write the prefix and the passages to one file, with the fingerprint of their host."""
    if not passages:
        raise AdapterFileError(f"there are no passages to write to {str(path)!r}: add some first")
    passages = [*prefix, *passages]
    tables = {
        "ids": torch.tensor([token for passage in passages for token in passage.ids]),
        "lengths": torch.tensor([len(passage.ids) for passage in passages]),
    }
    for layer in passages[0].keys:
        tables[f"keys.{layer}"] = torch.cat([passage.keys[layer].cpu() for passage in passages])
        tables[f"values.{layer}"] = torch.cat([passage.values[layer].cpu() for passage in passages])
    about: dict[str, object] = {"host": host, "has_windows": any(passage.has_windows for passage in passages)}
    if prefix:
        about["has_prefix"] = True
    write_tensors(path, tables, {"format": PASSAGES, "mmattn_version": __version__, **about})


def read_passages(
    path: str | PathLike[str], host: str, adapter: PassageLayers, mapped: bool, vocab_size: int | None = None
) -> tuple[Passage | None, list[Passage]]:
    """Read the prefix and the passages that `write_passages` wrote for the host with this fingerprint.

    Raises AdapterFileError if the file is torn, changed or something else, another host has read the passages, or the
    file holds what no host can have read.
    """
    with making_sense(path, "passages"):
        tables, metadata = read_tensors(path, PASSAGES, mapped=mapped)
        if metadata.get("host") != host:
            raise AdapterFileError(
                f"the passages in {str(path)!r} were read by a host with other weights: take the host that read them, "
                "or read them again, PassageCache(model).add(…)"
            )
        has_windows = validated(f"has_windows in {str(path)!r}", bool, metadata.get("has_windows"))
        has_prefix = validated(f"has_prefix in {str(path)!r}", bool, metadata.get("has_prefix", False))
        _check_passages(path, tables, adapter, vocab_size)
        lengths = tables["lengths"].tolist()
        parts = {name: table.split(lengths) for name, table in tables.items() if name != "lengths"}
        passages = [
            Passage(
                tuple(parts["ids"][number].tolist()),
                {layer: parts[f"keys.{layer}"][number] for layer in adapter.layers},
                {layer: parts[f"values.{layer}"][number] for layer in adapter.layers},
                has_windows,
                lengths[0] if has_prefix and number else 0,
            )
            for number in range(len(lengths))
        ]
        prefix = passages.pop(0) if has_prefix else None
        if len({passage.ids for passage in passages}) != len(passages):
            raise AdapterFileError(f"{str(path)!r} holds a passage twice, and each is read once")
    return prefix, passages


def _check_passages(
    path: str | PathLike[str], tables: Mapping[str, Tensor], adapter: PassageLayers, vocab_size: int | None
) -> None:
    """Refuse tables of passages that this host cannot have read."""
    total = len(tables["ids"])
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "ids": ((total,), torch.int64),
        "lengths": ((tables["lengths"].numel(),), torch.int64),
    }
    for site in adapter.sites:
        kind = tables[f"keys.{site.layer}"].dtype
        assert site.heads is not None
        widths = {"keys": site.heads.head_dim, "values": site.heads.value_dim or site.heads.head_dim}
        for part, width in widths.items():
            expected[f"{part}.{site.layer}"] = ((total, site.heads.num_kv_heads, width), kind)
        if not kind.is_floating_point or kind.itemsize == 1:
            raise AdapterFileError(f"the keys in {str(path)!r} are {kind}, in which no host computes them")
    check_tensors(expected, tables)
    lengths, ids = tables["lengths"], tables["ids"]
    if not len(lengths) or int(lengths.min()) < 1 or int(lengths.max()) > total or int(lengths.sum()) != total:
        raise AdapterFileError(f"the passages in {str(path)!r} are not as long as it says, of {total} tokens in all")
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        raise AdapterFileError(
            f"{str(path)!r} has ids from {int(ids.min())} to {int(ids.max())}, and the vocabulary of this host has "
            f"{vocab_size}"
        )
