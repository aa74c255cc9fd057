"""Models of open_clip built or loaded from a name, a folder, a config or a file of weights."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.storage.hub import is_weights_path, read_weights, refuse_keys
from mmattn.storage.json_files import read_json
from mmattn.tokenization import ClipTokenizer

#: The arguments of `ImageProcessor` by the keys of open_clip's preprocess_cfg.
PREPROCESSING = {"size": "size", "mean": "mean", "std": "std", "interpolation": "interpolation"}
PREPROCESSING |= {"resize_mode": "resize", "fill_color": "fill"}
_NAME = "ViT-B-32"
_SCHEMAS = ("hf-hub:", "local-dir:")


class OpenCLIPModel(NamedTuple):
    """A model of open_clip with its config, its preprocessing and the folder of its tokenizer.

    Attributes:
        name: as it was given, without the tag of the weights.
        folder: where the config was read from; None for models that open_clip names.
        config: model_cfg of open_clip.
        model: the network.
        prepared: preprocess_cfg of open_clip, "size" among it.
    """

    name: str
    folder: Path | None
    config: dict[str, Any]
    model: Any
    prepared: dict[str, Any]

    def described(self, tower: str) -> dict[str, Any]:
        """What of the config the fingerprint of a tower covers, for `tower` "vision_cfg" or "text_cfg"."""
        described = {"embed_dim": self.config["embed_dim"], tower: self.config[tower]}
        return described | {"quick_gelu": bool(self.config.get("quick_gelu"))}

    def tokenizer(self) -> ClipTokenizer:
        """The tokenizer of the model."""
        open_clip = import_extra("open_clip", "vision")
        text = self.config["text_cfg"]
        if self.folder is None:
            made = open_clip.get_tokenizer(self.name if self.name.startswith("hf-hub:") else _cleaned(self.name))
        elif text.get("hf_tokenizer_name"):
            made = open_clip.tokenizer.HFTokenizer(
                _tokenizer_source(self.folder, text["hf_tokenizer_name"]),
                context_length=text.get("context_length", 77),
                tokenizer_mode=text.get("tokenizer_mode"),
                **text.get("tokenizer_kwargs", {}),
            )
        else:
            made = open_clip.SimpleTokenizer(
                context_length=text.get("context_length", 77), **text.get("tokenizer_kwargs", {})
            )
        return ClipTokenizer(made)


def open_model(name: str | os.PathLike[str] | None, pretrained: Any, config: Any) -> OpenCLIPModel:
    """Build the model of open_clip that a name or a config stands for, and load its weights.

    Args:
        name: as in `OpenCLIPEncoder`.
        pretrained: as in `OpenCLIPEncoder`.
        config: as in `OpenCLIPEncoder`.

    Raises:
        ConfigError: unknown name, tag or config, or a name beside a config.
        AdapterFileError: weights that are missing, damaged, not safetensors, or of another model.
        MissingExtraError: open_clip is not installed.
    """
    open_clip = import_extra("open_clip", "vision")
    if name is not None and config is not None:
        raise ConfigError(f"give name or config, not both; got name={os.fspath(name)!r} and a config")
    name, pretrained = _split(_NAME if name is None else os.fspath(name), pretrained)
    if config is None and name.lower().endswith(".json"):
        config = name
    if name.startswith("local-dir:"):
        config, pretrained = _local(Path(name.removeprefix("local-dir:")))
    if config is None:
        settings, model, prepared = _named(open_clip, name, pretrained)
        return OpenCLIPModel(name, None, settings["model_cfg"], model, prepared)
    settings, folder = _read_config(config)
    model, prepared = _build(open_clip, settings, pretrained, "a model of one's own config")
    return OpenCLIPModel(name, folder, settings["model_cfg"], model, prepared)


def _split(name: str, pretrained: Any) -> tuple[str, Any]:
    if name.startswith(_SCHEMAS):
        if pretrained is not None:
            raise ConfigError(f"{name!r} brings its own weights; leave out pretrained={os.fspath(pretrained)!r}")
        return name, None
    # A drive letter is not a name.
    head, colon, tag = name.partition(":") if name[1:2] != ":" else (name, "", "")
    if not colon:
        return name, pretrained
    if pretrained is not None or not tag:
        raise ConfigError(f"give the weights once, as 'name:tag' or as pretrained=; got {name!r} and {pretrained!r}")
    return head, tag


def _cleaned(name: str) -> str:
    return name.replace("/", "-")


def _local(folder: Path) -> tuple[Path, Path]:
    if not (folder / "open_clip_config.json").is_file():
        raise ConfigError(f"'local-dir:{folder}' needs a folder with open_clip_config.json and a .safetensors file")
    files = sorted(folder.glob("*.safetensors"), key=lambda file: (not file.stem.startswith("open_clip"), file.name))
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        found = f"; convert {pickles[0]} first, a pickle can run code while being read" if pickles else ""
        raise AdapterFileError(f"'local-dir:{folder}' has no .safetensors file with the weights{found}")
    return folder / "open_clip_config.json", files[0]


def _read_config(config: Any) -> tuple[dict[str, Any], Path]:
    folder = Path()
    if not isinstance(config, Mapping):
        folder = Path(config).parent
        try:
            config = read_json(config)
        except AdapterFileError as error:
            raise ConfigError(f"{os.fspath(config)!r} is not a readable open_clip config: {error}") from error
        if not isinstance(config, Mapping):
            raise ConfigError(f"an open_clip config is a JSON object, got {type(config).__name__}")
    full = dict(config) if "model_cfg" in config else {"model_cfg": config}
    unknown = sorted(set(full.get("preprocess_cfg", {})) - {*PREPROCESSING, "mode"})
    if unknown:
        raise ConfigError(
            f"preprocess_cfg of an open_clip config has no {', '.join(map(repr, unknown))}; its keys are "
            f"{', '.join([*PREPROCESSING, 'mode'])}"
        )
    lacking = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in full["model_cfg"]]
    if lacking:
        raise ConfigError(f"an open_clip config needs embed_dim, vision_cfg and text_cfg; missing {', '.join(lacking)}")
    return full, folder


def _tokenizer_source(folder: Path, name: str) -> str:
    if (folder / name).is_dir():
        return str(folder / name)
    own = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return str(folder) if own else name


def _build(open_clip: Any, settings: Mapping[str, Any], pretrained: Any, name: str) -> tuple[Any, dict[str, Any]]:
    if pretrained is not None and not is_weights_path(pretrained):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(_cleaned(name))) or "none"
        raise ConfigError(f"{name} has no weights {pretrained!r}; its tags: {tags}; or give a .safetensors path")
    if pretrained is not None:
        read_weights(pretrained)
    cfg = json.loads(json.dumps(settings["model_cfg"]))
    vision, text = cfg["vision_cfg"], cfg["text_cfg"]
    custom = cfg.pop("custom_text", False) or "hf_model_name" in text
    # The towers' own released weights are no part of this model.
    if "hf_model_name" in text:
        text["hf_model_pretrained"] = False
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    kind = open_clip.CLIP if not custom else open_clip.CoCa if "multimodal_cfg" in cfg else open_clip.CustomTextCLIP
    try:
        model = kind(**cfg)
    except (TypeError, ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(f"open_clip cannot build {name}: {error}") from error
    if pretrained is not None:
        _load(open_clip, model, pretrained, name)
    prepared = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
    return model, prepared | settings.get("preprocess_cfg", {}) | {"size": model.visual.image_size}


def _load(open_clip: Any, model: Any, path: Any, name: str) -> None:
    try:
        keys = open_clip.load_checkpoint(model, os.fspath(path), strict=False)
    except (RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise AdapterFileError(f"{os.fspath(path)!r} does not fit {name}: {error}") from error
    refuse_keys(path, name, keys.missing_keys, keys.unexpected_keys)


def _named(open_clip: Any, name: str, pretrained: Any) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    options: dict[str, Any] = {"require_pretrained": True}
    if not name.startswith("hf-hub:"):
        known = open_clip.list_models()
        if _cleaned(name) not in known:
            near = difflib.get_close_matches(_cleaned(name), known, 3) or known[:5]
            raise ConfigError(f"open_clip has no model {name!r}; did you mean {', '.join(near)}?")
        tag = open_clip.get_pretrained_cfg(_cleaned(name), os.fspath(pretrained)) if pretrained is not None else None
        if not tag:
            settings = {"model_cfg": open_clip.get_model_config(_cleaned(name))}
            return settings, *_build(open_clip, settings, pretrained, name)
        # Weights trained with QuickGELU are released under names without it, too.
        options |= {"pretrained": os.fspath(pretrained), "force_quick_gelu": bool(tag.get("quick_gelu"))}
    try:
        model = open_clip.create_model(name, **options)
        settings = {"model_cfg": open_clip.get_model_config(name if name.startswith("hf-hub:") else _cleaned(name))}
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterFileError(
            f"open_clip could not fetch {name}{f':{pretrained}' if pretrained else ''} ({error}); without a network, "
            "use local-dir: or the path of a .safetensors file"
        ) from error
    settings["model_cfg"]["quick_gelu"] = settings["model_cfg"].get("quick_gelu") or options.get("force_quick_gelu")
    return settings, model, open_clip.get_model_preprocess_cfg(model)
