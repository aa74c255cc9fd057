"""Folders of sentence-transformers: what they say of pooling, prompts and further layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmattn.errors import AdapterFileError, ConfigError, MissingExtraError, import_extra
from mmattn.models.cache import resolve
from mmattn.models.loading import load_model, without_progress_bars
from mmattn.storage.json_files import MAX_JSON, parse_json, validated
from mmattn.storage.safetensors import check_values

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Config = dict[str, Any]
#: Files with the settings of the transformer, of sentence-transformers of all ages.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
#: Settings of the transformer with which it is that of transformers, beside its length.
_PLAIN = {"do_lower_case": False, "transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}


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
        modes = [_modes(config) for kind, config in self.modules if kind == "Pooling"]
        return "+".join(modes[0]) if modes else "none"

    @property
    def normalizes(self) -> bool:
        """The last module scales vectors to length 1."""
        return [kind for kind, _ in self.modules][-1:] == ["Normalize"]

    def prompt(self, kind: str) -> str:
        """Return what stands before each "query" or "document", or before texts of no such kind ("")."""
        return self.prompts.get(kind or self.default_prompt or "", "")

    def beyond(self, poolings: tuple[str, ...]) -> list[str]:
        """Return what the folder asks for beside a transformer, one of some poolings, and a normalisation."""
        kinds = [kind for kind, _ in self.modules]
        needs = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            needs = needs or [" and ".join(kinds)]
        elif self.pooling not in poolings:
            needs.append(f"{self.pooling} pooling")
        prompts = [name for name, text in self.prompts.items() if text]
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            prompts.append(self.default_prompt)
        return needs + [f"the prompt {name!r}" for name in prompts] + self._beyond_plain()

    def _beyond_plain(self) -> list[str]:
        settings = dict(self.modules[0][1]) if self.modules else {}
        path, more = settings.pop("path", ""), settings.pop("kwargs", [])
        settings.pop("max_seq_length", None)
        modalities = settings.pop("modality_config", {"text": _TEXT})
        others = [name for name, value in settings.items() if value and _PLAIN.get(name) != value]
        others += ["modality_config"] * (modalities.get("text") != _TEXT)
        return [f"{name} of its transformer" for name in others] + ["a folder of its transformer"] * bool(path or more)

    def described(self) -> Config:
        """Return all that vectors depend on beside the weights, as JSON."""
        return {"modules": [list(one) for one in self.modules], "prompts": self.prompts, "prompt": self.default_prompt}


def read_sentence_folder(name: str | os.PathLike[str]) -> SentenceFolder | None:
    """Read what a folder, or a name on the hub, says for sentence-transformers; None where it says nothing.

    Raises:
        AdapterFileError: files that make no sense.
        ConfigError: a model of sentence-transformers of another kind.
    """
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


def _modes(config: Mapping[str, Any]) -> list[str]:
    mode = config.get("pooling_mode")
    if mode is None:
        return [name for key, name in _LEGACY_POOLING.items() if config.get(key)] or ["mean"]
    return [mode] if isinstance(mode, str) else list(mode)


def import_sentence_transformers() -> ModuleType:
    """Return sentence-transformers; MissingExtraError where it is not installed."""
    return import_extra("sentence_transformers", "multivector")


def load_sentence_transformer(
    name: str | os.PathLike[str], folder: SentenceFolder, beyond: list[str], max_length: int | None
) -> SentenceTransformer:
    """Load a folder with sentence-transformers, with complete and finite weights.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        AdapterFileError: nothing to load, or weights that are damaged or incomplete.
    """
    try:
        library = import_sentence_transformers()
    except MissingExtraError as error:
        raise MissingExtraError(
            f"{os.fspath(name)!r} asks for {', '.join(beyond)}, which sentence-transformers does: "
            "pip install 'mmattn[multivector]'"
        ) from error
    place = resolve(name)
    kind, config = folder.modules[0] if folder.modules else ("", {})
    if kind == "Transformer":  # sentence-transformers itself starts missing weights at random
        load_model("AutoModel", place, "text encoder", unused=("pooler",), subfolder=config.get("path", ""))
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
        if isinstance(tensor, torch.Tensor):
            check_values(key, tensor)
    if max_length is not None:
        model.max_seq_length = max_length
    return model
