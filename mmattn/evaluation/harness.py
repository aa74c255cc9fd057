"""The model class of lm-evaluation-harness for adapted language models: a memory per document of a task."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from mmattn.adapters.language_models import call_by_name
from mmattn.data.rows import row_memory
from mmattn.data.text_batches import bos_and_eos, collate
from mmattn.errors import ConfigError, ShapeError, check_bool, check_choice, check_int, import_extra
from mmattn.memory import Memory
from mmattn.pipelines.base import pipeline
from mmattn.pipelines.generation import generate_rows
from mmattn.progress import counted
from mmattn.tokenization import call_tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

    from mmattn.hosts.model import AdaptedModel
    from mmattn.retrieval import Index

NAME = "mmattn"
_WINDOW = 16
"""Batches of requests whose memories are held at once, and which are sorted by length together."""
_LENGTH, _NEW_TOKENS = 2048, 256
"""The harness's own defaults of the longest input and of the tokens to write."""
CONTROLS = ("own", "shuffled", "none")
Document = Mapping[str, object]
T = TypeVar("T")


@functools.cache
def adapted_lm() -> type:
    """Return the class `AdaptedLM`, registered as "mmattn"; lm_eval is imported here and not before."""
    model = type("AdaptedLM", (HarnessModel, import_extra("lm_eval.api.model", "eval").LM), {})
    model.__doc__ = HarnessModel.__doc__
    import_extra("lm_eval.api.registry", "eval").register_model(NAME)(model)
    return model


class HarnessModel:
    """An adapted language model in lm-evaluation-harness, with a memory for each document.

    Args:
        adapter: the folder of an adapter that names its host, tokenizer and encoder, as for `mmattn.pipeline`; or an
            adapted language model.
        tokenizer: of an adapted language model.
        memory: the field of a document with its memory, or a function of the document. With a folder its value is the
            input of the pipeline, an image or a question; with a model, and always where it is a `Memory`, it is the
            memory: a `Memory` of one row, the path of a saved one, vectors (m, e). None is no memory.
        control: "own"; or as a control "shuffled", the memory of the next document that has one, or "none".
        index: of an adapter that answers from one, as for `mmattn.pipeline`.
        batch_size: requests at once.
        max_length: longest input of the host in tokens, by default of its config. Longer texts lose their beginning.
        device: of a folder's models, as for `mmattn.pipeline`.
        add_bos_token: True puts the begin token before every text, as training and pipelines do; False nothing; None
            is up to the tokenizer, as in the harness's own class.

    Raises:
        ConfigError: arguments that contradict each other, or a model that writes no text.
        AdapterFileError: no adapter is in the folder.
    """

    def __init__(
        self,
        adapter: str | os.PathLike[str] | AdaptedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        memory: str | Callable[[Document], object] = "memory",
        *,
        control: str = "own",
        index: Index | str | os.PathLike[str] | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
    ) -> None:
        super().__init__()
        read: Callable[[object], object] | None = None
        if isinstance(adapter, (str, os.PathLike)):
            if tokenizer is not None:
                raise ConfigError(f"the adapter's folder {str(adapter)!r} names its tokenizer: leave tokenizer= out")
            pipe = pipeline(adapter, index=index, device=device)
            model, tokenizer, read = pipe.model, pipe.tokenizer, lambda value: pipe.make_memory([value])
        elif index is not None or device is not None:
            raise ConfigError("index= and device= are for the folder of an adapter; an adapted model has its own")
        else:
            model = adapter
        if not getattr(model, "predicts_tokens", False) or tokenizer is None:
            raise ConfigError(
                f"a language model with adapters is needed, and its tokenizer; got {type(model).__name__} and "
                f"{type(tokenizer).__name__}"
            )
        if not str(batch_size).isdigit():
            raise ConfigError(f"batch_size must be a number, since memories differ in length; got {batch_size!r}")
        self.batch_size = check_int("batch_size", int(batch_size))
        self.model, self.tokenizer = model.eval(), tokenizer
        width = max((model.adapter(name).config.memory_dim for name in model.active), default=0)
        self.documents = DocumentMemories(memory, read, width, control)
        limit = getattr(model.config, "max_position_embeddings", None) or _LENGTH
        self.max_length = check_int("max_length", limit if max_length is None else max_length, at_least=2)
        self.begin, _ = bos_and_eos(tokenizer)
        if add_bos_token is not None:
            check_bool("add_bos_token", add_bos_token)
        self.add_bos_token = add_bos_token

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return log p of each continuation after its context in nats, and if greedy decoding would write it."""
        return self._scored(requests, [self._pair(*request.args) for request in requests], "log-likelihoods")

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return log p of each text in nats; longer texts than the host reads are split into windows."""
        windows = import_extra("lm_eval.utils", "eval")
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self._ids(request.args[0])
            ids = ids[1:] if self.add_bos_token else ids  # the first window begins with it
            for rolling in windows.get_rolling_token_windows(ids, self.begin, self.max_length, 1):
                before, after = windows.make_disjoint_window(rolling)
                pairs.append((list(before), list(after)))
                owners.append(number)
        scores = self._scored([requests[owner] for owner in owners], pairs, "log-likelihoods of texts")
        sums = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, scores, strict=True):
            sums[owner] += score
        return sums

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the generated text after each context, up to its first stop word."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        results: dict[int, str] = {}
        for numbers in groups.values():
            texts = self._written([requests[number] for number in numbers])
            results |= dict(zip(numbers, texts, strict=True))
        return [results[number] for number in range(len(requests))]

    @property
    def tokenizer_name(self) -> str:
        """The key of cached requests with the chat template."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the chat template of the tokenizer, or the one of this name."""
        return str(self.tokenizer.get_chat_template(chat_template if isinstance(chat_template, str) else None))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as one text, by the template of the tokenizer."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

    def set_cache_hook(self, cache_hook: object) -> None:
        """Refuse the cache of the harness, whose keys are texts without memories."""
        if self.documents.control != "none":
            raise ConfigError(
                "use_cache= caches answers by their texts, whatever the memory of the document: leave it out"
            )
        super().set_cache_hook(cache_hook)  # type: ignore[misc]

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a text with its begin token, which a chat template may have written already."""
        plain = self.add_bos_token is not None or text.startswith(str(self.tokenizer.decode([self.begin])))
        ids = list(call_tokenizer(self.tokenizer, text, add_special_tokens=not plain, verbose=False)["input_ids"])
        return [self.begin, *ids] if self.add_bos_token and ids[:1] != [self.begin] else ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context, and of its trailing blanks with the continuation."""
        before, whole = self._ids(context.rstrip()), self._ids(context + continuation)
        if not context.rstrip():  # what the tokenizer puts before every text is no text
            before = [self.begin]
            whole = whole if whole[:1] == before else before + whole
        after = whole[len(before) :][-self.max_length :]
        if not after:
            raise ConfigError(f"nothing is to be scored after {context!r:.60}: {continuation!r:.60} has no tokens")
        return before[-(self.max_length + 1 - len(after)) :], after

    def _scored(
        self, requests: Sequence[Instance], pairs: Sequence[tuple[list[int], list[int]]], label: str
    ) -> list[tuple[float, bool]]:
        """Score pairs of contexts and continuations, with the memories of the documents."""

        def score(chosen: Sequence[int], memory: Memory | None) -> list[tuple[float, bool]]:
            contexts, continuations = zip(*(pairs[i] for i in chosen), strict=True)
            return log_likelihoods(self.model, contexts, continuations, memory)

        return self._in_batches(requests, [len(before) + len(after) for before, after in pairs], score, label)

    def _written(self, requests: Sequence[Instance]) -> list[str]:
        """Generate after the contexts of requests with the same `generation_kwargs`."""
        until, options = generation_options(requests[0].args[1], self.tokenizer)
        room = self.max_length - options["max_new_tokens"]
        if room < 1:
            raise ConfigError(
                f"{options['max_new_tokens']} tokens are to be written, and the host reads {self.max_length} in all: "
                "lower max_gen_toks in the task's generation_kwargs, or with --gen_kwargs"
            )
        contexts = [self._ids(request.args[0])[-room:] or [self.begin] for request in requests]

        def write(chosen: Sequence[int], memory: Memory | None) -> list[str]:
            rows = [contexts[i] for i in chosen]
            return generate_rows(self.model, self.tokenizer, rows, memory, options=options)

        return [cut_off(text, until) for text in self._in_batches(requests, list(map(len, contexts)), write, "texts")]

    def _in_batches(
        self,
        requests: Sequence[Instance],
        lengths: Sequence[int],
        run: Callable[[Sequence[int], Memory | None], Iterable[T]],
        label: str,
    ) -> list[T]:
        """Run batches of requests of similar length, each with the memory of its document."""
        readers = self.documents.readers([((one.task_name, one.doc_id), one.doc) for one in requests])
        results: dict[int, T] = {}
        size = self.batch_size
        with counted(len(requests), label) as advance:
            for start in range(0, len(requests), _WINDOW * size):
                window = range(start, min(start + _WINDOW * size, len(requests)))
                memories = {reader: reader() for reader in dict.fromkeys(readers[i] for i in window)}
                order = sorted(window, key=lambda i: -lengths[i])
                for at in range(0, len(order), size):
                    chosen = order[at : at + size]
                    memory = self.documents.stacked([memories[readers[i]] for i in chosen])
                    results |= dict(zip(chosen, run(chosen, memory), strict=True))
                    advance(len(chosen))
        return [results[number] for number in range(len(requests))]


def generation_options(
    kwargs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the stop words and the arguments of `generate` in a task's `generation_kwargs`.

    >>> generation_options({"until": ["."], "max_gen_toks": 7, "temperature": 0.0}, None)[1]["do_sample"]
    False
    """
    options = dict(kwargs)
    until = options.pop("until", None) or []
    until = [until] if isinstance(until, str) else [word for word in until if word]
    counts = [options.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    options["max_new_tokens"] = int(next((count for count in counts if count is not None), _NEW_TOKENS))
    if not options.get("temperature"):  # tasks say 0 for greedy decoding, which `generate` refuses
        options.pop("temperature", None)
    options.setdefault("do_sample", "temperature" in options)
    if until:
        options |= {"stop_strings": until, "tokenizer": tokenizer}
    return until, options


def cut_off(text: str, until: Sequence[str]) -> str:
    """Return a text up to the first stop word.

    >>> cut_off("a rose. It is red.", ["It", "."])
    'a rose'
    """
    for word in until:
        text = text.partition(word)[0]
    return text


@torch.no_grad()
def log_likelihoods(
    model: nn.Module, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], memory: Memory | None
) -> list[tuple[float, bool]]:
    """Return log p of each continuation after its context in nats, and if greedy decoding would write it."""
    rows = [[*before, *after[:-1]] for before, after in zip(contexts, continuations, strict=True)]
    device = next(model.parameters()).device
    logits = call_by_name(model, **collate(rows, memory).to(device).kwargs()).logits
    scores = []
    for number, (row, after) in enumerate(zip(rows, continuations, strict=True)):
        row_logits = logits[number, len(row) - len(after) : len(row)].float()
        target = torch.tensor(list(after), device=row_logits.device)
        nats = F.cross_entropy(row_logits, target, reduction="sum")
        scores.append((-float(nats), bool((row_logits.argmax(-1) == target).all())))
    return scores


class DocumentMemories:
    """Memories of documents, read on demand by `read` (None: `row_memory`) from the value of `source`."""

    def __init__(
        self,
        source: str | Callable[[Document], object],
        read: Callable[[object], object] | None,
        dim: int,
        control: str = "own",
    ) -> None:
        self.source, self.read, self.dim = source, read, dim
        self.control = check_choice("control", control, CONTROLS)

    def readers(self, documents: Sequence[tuple[Hashable, Document]]) -> list[Callable[[], Memory | None]]:
        """Return a reader of the memory of each (key, document); equal keys have one reader."""
        by_key = dict(documents)
        keys = list(by_key)

        def reader(place: int) -> Callable[[], Memory | None]:
            if self.control == "shuffled":
                return lambda: self._next([by_key[key] for key in (*keys[place:], *keys[:place])])
            return lambda: None if self.control == "none" else self._memory(self._value(by_key[keys[place]]))

        readers = {key: reader(place) for place, key in enumerate(keys)}
        return [readers[key] for key, _ in documents]

    def stacked(self, memories: Sequence[Memory | None]) -> Memory | None:
        """Stack memories of one row, empty where there is none; None if no row has one."""
        if all(memory is None for memory in memories):
            return None
        blank = Memory(torch.zeros(1, 0, self.dim))
        return Memory.stack([blank if memory is None else memory.to("cpu") for memory in memories])

    def _next(self, documents: Sequence[Document]) -> Memory | None:
        """Return the memory of the next document that has one, if the first document has one."""
        if self._value(documents[0]) is None:
            return None
        for document in documents[1:]:
            if (value := self._value(document)) is not None:
                return self._memory(value)
        raise ConfigError("only one document has a memory, and shuffled memories need two")

    def _value(self, document: Document) -> object:
        if callable(self.source):
            return self.source(document)
        if self.source not in document:
            raise ConfigError(
                f"a document has no field {self.source!r} for its memory, only {', '.join(map(str, document))}: name "
                "it with memory=, or give control=none"
            )
        return document[self.source]

    def _memory(self, value: object) -> Memory | None:
        if value is None:
            return None
        memory = row_memory(value) if self.read is None or isinstance(value, Memory) else self.read(value)
        if memory is not None and not isinstance(memory, Memory):
            raise ConfigError(
                f"the memory of a document must be vectors, and this adapter reads {type(memory).__name__}, which the "
                "rows of a batch cannot share"
            )
        if memory is not None and memory.dim != self.dim:
            raise ShapeError(f"the memory of a document is {memory.dim} wide, and the adapter reads {self.dim}")
        return memory
