"""The model class of lm-evaluation-harness for adapted language models: a memory per document of a task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmattn.data.rows import row_memory
from mmattn.errors import ConfigError, ShapeError, check_choice, import_extra
from mmattn.memory import Memory
from mmattn.pipelines.base import pipeline
from mmattn.progress import counted

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

    from mmattn.hosts.model import AdaptedModel
    from mmattn.retrieval import Index

CONTROLS = ("own", "shuffled", "none")
Document = Mapping[str, object]


HFLM: Any = import_extra("lm_eval.models.huggingface", "eval").HFLM


@import_extra("lm_eval.api.registry", "eval").register_model("mmattn")
class AdaptedLM(HFLM):
    """The `HFLM` of lm-evaluation-harness for an adapted language model, with a memory for each document.

    Requests of the same document share batches, requests of different documents never do.

    Args:
        adapter: the folder of an adapter that names its host, tokenizer and encoder, as for `mmattn.pipeline`; or an
            adapted language model.
        tokenizer: tokenizer of an adapted language model.
        memory: the field of a document with its memory, or a function of the document. With a folder its value is the
            input of the pipeline, an image or a question. With a model it is a `Memory` of one row (also with a
            folder), the path of a saved memory, or vectors (m, e). None for no memory.
        control: "own"; or as a control "shuffled" (the memory of the next document with a memory) or "none".
        index: index of an adapter that answers from one, as in `mmattn.pipeline`.
        device: device of a folder's models, as in `mmattn.pipeline`.
        **options: arguments of `HFLM`, such as `batch_size`, `max_length` and `add_bos_token`.

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
        device: str | None = None,
        **options: Any,
    ) -> None:
        self.source, self.control = memory, check_choice("control", control, CONTROLS)
        self.read: Callable[[object], object] = row_memory
        self.memory: Memory | None = None
        if isinstance(adapter, (str, os.PathLike)):
            if tokenizer is not None:
                raise ConfigError(f"the adapter's folder {str(adapter)!r} names its tokenizer: leave tokenizer= out")
            pipe = pipeline(adapter, index=index, device=device)
            model, tokenizer, self.read = pipe.model, pipe.tokenizer, lambda value: pipe.make_memory([value])
        elif index is not None or device is not None:
            raise ConfigError("index= and device= are for the folder of an adapter; an adapted model has its own")
        else:
            model = adapter
        if not getattr(model, "predicts_tokens", False) or tokenizer is None:
            raise ConfigError(
                f"a language model with adapters is needed, and its tokenizer; got {type(model).__name__} and "
                f"{type(tokenizer).__name__}"
            )
        self.dim = max((model.adapter(name).config.memory_dim for name in model.active), default=0)
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log p of each continuation after its context in nats, and if greedy decoding would write it."""
        return self._by_document("loglikelihood", requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each text in nats; longer texts than the host reads are split into windows."""
        return self._by_document("loglikelihood_rolling", requests, disable_tqdm)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text after each context, up to its first stop word."""
        return self._by_document("generate_until", requests, disable_tqdm)

    def tok_batch_encode(self, strings: Sequence[str], **options: Any) -> Any:
        """Encode contexts; an empty context is the start token, since a host reads at least one token."""
        begin = self.tok_decode([self.prefix_token_id], skip_special_tokens=False)
        return super().tok_batch_encode([text or begin for text in strings], **options)

    def set_cache_hook(self, cache_hook: object) -> None:
        """Refuse the cache of the harness, whose keys are texts without memories."""
        if self.control != "none":
            raise ConfigError(
                "use_cache= caches answers by their texts, whatever the memory of the document: leave it out"
            )
        super().set_cache_hook(cache_hook)

    def _by_document(self, method: str, requests: Sequence[Instance], disable_tqdm: bool) -> list[Any]:
        """Answer the requests of each document with its memory."""
        places: dict[Hashable, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault((request.task_name, request.doc_id), []).append(place)
        documents = [requests[first].doc for first, *_ in places.values()]
        results: dict[int, Any] = {}
        answer = getattr(super(), method)
        with counted(len(requests), method) as advance:
            for number, group in enumerate(places.values()):
                self.memory = self._memory_of(documents, number)
                answers = answer([requests[place] for place in group], disable_tqdm=True)
                results |= dict(zip(group, answers, strict=True))
                advance(len(group))
        return [results[place] for place in range(len(requests))]

    def _model_call(self, inps: Tensor, **options: Any) -> Tensor:
        with self._conditioned(len(inps)):
            return super()._model_call(inps, **options)

    def _model_generate(self, context: Tensor, **options: Any) -> Tensor:
        with self._conditioned(len(context)):
            return super()._model_generate(context, **options)

    def _conditioned(self, rows: int) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which each row of a batch has the memory of the document."""
        if self.memory is None:
            return contextlib.nullcontext()
        model: Any = self.model
        return model.condition(self.memory.to(model.device).expand(rows))

    def _memory_of(self, documents: Sequence[Document], number: int) -> Memory | None:
        """Return the memory that the requests of a document get."""
        if self.control == "none" or (value := self._value(documents[number])) is None:
            return None
        if self.control == "shuffled":
            following = (self._value(document) for document in (*documents[number + 1 :], *documents[:number]))
            value = next((value for value in following if value is not None), None)
            if value is None:
                raise ConfigError("only one document has a memory, and shuffled memories need two")
        memory = row_memory(value) if isinstance(value, Memory) else self.read(value)
        if memory is not None and not isinstance(memory, Memory):
            raise ConfigError(
                f"the memory of a document must be vectors, and this adapter reads {type(memory).__name__}"
            )
        if memory is not None and memory.dim != self.dim:
            raise ShapeError(f"the memory of a document is {memory.dim} wide, and the adapter reads {self.dim}")
        return memory

    def _value(self, document: Document) -> object:
        if callable(self.source):
            return self.source(document)
        if self.source not in document:
            raise ConfigError(
                f"a document has no field {self.source!r} for its memory, only {', '.join(map(str, document))}: name "
                "it with memory=, or give control=none"
            )
        return document[self.source]
