"""CLIP models of open_clip as encoders: of images, patch tokens or the embedding; of texts, the embedding."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmattn.encoders.base import ImageEncoder, TextEncoderBase
from mmattn.encoders.images import ImageProcessor
from mmattn.encoders.registry import register_encoder
from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.memory import Memory
from mmattn.progress import batches
from mmattn.storage.hub import is_weights_path, read_weights, refuse_keys
from mmattn.storage.json_files import read_json
from mmattn.tokenization import ClipTokenizer, refuse_empty

#: The arguments of `ImageProcessor` by the keys of open_clip's preprocess_cfg.
_PREPROCESSING = {"size": "size", "mean": "mean", "std": "std", "interpolation": "interpolation"}
_PREPROCESSING |= {"resize_mode": "resize", "fill_color": "fill"}
_NAME = "ViT-B-32"
_SCHEMAS = ("hf-hub:", "local-dir:")


@register_encoder("openclip")
class OpenCLIPEncoder(ImageEncoder):
    """Patch tokens or embeddings of images by the frozen image tower of CLIP (arXiv 2103.00020), from open_clip.

    The memory (b, m, e) holds the patch tokens after the last layer, with the layer norm that the tower applies before
    its pooling, and without the class token. `pooled=True` gives the image embedding, not normalised, as one token.

    Args:
        name: a name of `open_clip.list_models()`, by default "ViT-B-32"; "name:tag" for name and pretrained in one;
            "hf-hub:org/repo"; "local-dir:path" with open_clip_config.json and a .safetensors file; or the path of a
            config .json.
        pretrained: a tag of `open_clip.list_pretrained()` (downloaded by open_clip), the path of a .safetensors file,
            or None for random weights.
        config: an open_clip model config (path or dict) instead of `name`; nothing is registered globally.
        pooled: one token per image, its embedding (m = 1).
        device: where the network runs, by default the CPU.

    Attributes:
        model: the whole CLIP, frozen; `model.encode_text(encoder.tokenizer(texts))` embeds texts.
        name: as given.

    Raises:
        ConfigError: unknown name, tag or config, a name beside a config, or an image tower without patch tokens.
        AdapterFileError: weights that are missing, damaged, not safetensors, or of another model.
        MissingExtraError: open_clip is not installed.
    """

    def __init__(
        self,
        name: str | os.PathLike[str] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        pooled: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        self._clip = _open_model(name, pretrained, config)
        self.name = self._clip.name
        model, prepared = self._clip.model, self._clip.prepared
        image_processor = ImageProcessor(
            **{ours: prepared[key] for key, ours in _PREPROCESSING.items() if key in prepared}
        )
        if not hasattr(model.visual, "forward_intermediates") and not pooled:
            raise ConfigError(
                f"the picture tower {type(model.visual).__name__} of {self.name} gives no patch tokens; use "
                "pooled=True, or a ViT, ResNet or timm tower"
            )
        settings = {"encoder": "openclip", "config": self._clip.described("vision_cfg")}
        super().__init__(model, image_processor, pooled=pooled, settings=settings, device=device)

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooled: bool = False) -> OpenCLIPEncoder:
        """Build the encoder of a folder or a name for `load_image_encoder`."""
        return cls(_local_name(name), pooled=pooled, device=device)

    def features(self, pixels: Tensor) -> Tensor:
        """Return patch tokens (b, e, height, width), or the embedding (b, e) if pooled.

        Args:
            pixels: (b, 3, height, width).

        Raises:
            ConfigError: the image tower gives no patch tokens.
        """
        visual: Any = self.model.visual
        if self.pooled:
            embedding = visual(pixels)
            pooled: Tensor = embedding[0] if isinstance(embedding, tuple) else embedding
            return pooled
        # A tower that norms only its pooled output has no norm for patches.
        normed = getattr(visual, "attn_pool", None) is None and not getattr(visual, "final_ln_after_pool", False)
        try:
            outputs = visual.forward_intermediates(
                pixels, indices=1, normalize_intermediates=normed, intermediates_only=True, output_fmt="NCHW"
            )
        except (AttributeError, AssertionError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"the picture tower of {self.name} gives no patch tokens ({error}); use pooled=True"
            ) from error
        patches: Tensor = outputs["image_intermediates"][-1]
        return patches

    @cached_property
    def tokenizer(self) -> ClipTokenizer:
        """The tokenizer of the model: `tokenizer(texts)` gives ids (b, l); special tokens in a text stay text."""
        return self._clip.tokenizer()

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.model.visual.state_dict()  # type: ignore[union-attr]
        return weights


@register_encoder("openclip-text")
class OpenCLIPTextEncoder(TextEncoderBase):
    """Embeddings of texts by the frozen text tower of CLIP (arXiv 2103.00020), from open_clip, as a memory (b, 1, e).

    They lie in the space of the image embeddings that `OpenCLIPEncoder(..., pooled=True)` of the same model gives, once
    those are normalised.

    Args:
        name: as in `OpenCLIPEncoder`.
        pretrained: as in `OpenCLIPEncoder`.
        config: as in `OpenCLIPEncoder`.
        normalize: scale every embedding to length 1.
        device: where the network runs, by default the CPU.

    Attributes:
        tokenizer: the tokenizer of the model.
        max_length: tokens of the longest text that is not truncated.
        dim: width e of the memory.

    Raises:
        ConfigError: unknown name, tag or config, or a name beside a config.
        AdapterFileError: weights that are missing, damaged, not safetensors, or of another model.
        MissingExtraError: open_clip is not installed.
    """

    def __init__(
        self,
        name: str | os.PathLike[str] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        normalize: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        clip = _open_model(name, pretrained, config)
        del clip.model.visual
        self.normalize = normalize
        settings = {"encoder": "openclip text", "config": clip.described("text_cfg"), "normalize": normalize}
        super().__init__(clip.model, settings, device)
        self.tokenizer = clip.tokenizer()
        self.max_length = self.tokenizer.context_length
        self.dim: int = clip.config["embed_dim"]

    @classmethod
    def from_name(
        cls, name: str, device: str | torch.device | None = None, pooling: str | None = None
    ) -> OpenCLIPTextEncoder:
        """Build the encoder of a folder for `load_text_encoder`."""
        return cls(_local_name(name), device=device)

    def _encode_texts(self, texts: list[str], batch_size: int, progress: bool) -> Memory:
        refuse_empty([len(text.strip()) for text in texts])
        ids = self.tokenizer(texts)
        rows = [torch.zeros(0, self.dim, dtype=self.dtype, device=self.device)]
        clip: Any = self.model
        with torch.no_grad():
            for start in batches(len(texts), batch_size, "encoding", progress):
                batch = ids[start : start + batch_size].to(self.device)
                rows.append(clip.encode_text(batch, normalize=self.normalize))
        return Memory(torch.cat(rows)[:, None], sources=[[{"text": number}] for number in range(len(texts))])

    def _weights(self) -> dict[str, Tensor]:
        # The scale of the logits and the captioner of CoCa take no part in an embedding.
        unused = ("logit_scale", "logit_bias", "text_decoder.")
        return {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith(unused)}

    def extra_repr(self) -> str:
        return f"dim={self.dim}, normalize={self.normalize}, max_length={self.max_length}"


class _OpenCLIPModel(NamedTuple):
    """A model of open_clip with its config, its preprocessing and the folder of its tokenizer."""

    name: str  # without the tag of the weights
    folder: Path | None  # of the config; None for names of open_clip
    config: dict[str, Any]  # model_cfg of open_clip
    model: Any
    prepared: dict[str, Any]  # preprocess_cfg of open_clip, with "size"

    def described(self, tower: str) -> dict[str, Any]:
        """Return the part of the config in the fingerprint of a tower, "vision_cfg" or "text_cfg"."""
        described = {"embed_dim": self.config["embed_dim"], tower: self.config[tower]}
        return described | {"quick_gelu": bool(self.config.get("quick_gelu"))}

    def tokenizer(self) -> ClipTokenizer:
        """Return the tokenizer of the model."""
        open_clip = import_extra("open_clip", "vision")
        text = self.config["text_cfg"]
        if self.folder is None:
            tokenizer = open_clip.get_tokenizer(self.name if self.name.startswith("hf-hub:") else _cleaned(self.name))
        elif text.get("hf_tokenizer_name"):
            tokenizer = open_clip.tokenizer.HFTokenizer(
                _tokenizer_source(self.folder, text["hf_tokenizer_name"]),
                context_length=text.get("context_length", 77),
                tokenizer_mode=text.get("tokenizer_mode"),
                **text.get("tokenizer_kwargs", {}),
            )
        else:
            tokenizer = open_clip.SimpleTokenizer(
                context_length=text.get("context_length", 77), **text.get("tokenizer_kwargs", {})
            )
        return ClipTokenizer(tokenizer)


def _open_model(name: str | os.PathLike[str] | None, pretrained: Any, config: Any) -> _OpenCLIPModel:
    """Build the model of open_clip for a name or a config, and load its weights."""
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
        return _OpenCLIPModel(name, None, settings["model_cfg"], model, prepared)
    settings, folder = _read_config(config)
    model, prepared = _build(open_clip, settings, pretrained, "a model of one's own config")
    return _OpenCLIPModel(name, folder, settings["model_cfg"], model, prepared)


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
    unknown = sorted(set(full.get("preprocess_cfg", {})) - {*_PREPROCESSING, "mode"})
    if unknown:
        raise ConfigError(
            f"preprocess_cfg of an open_clip config has no {', '.join(map(repr, unknown))}; its keys are "
            f"{', '.join([*_PREPROCESSING, 'mode'])}"
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


def _local_name(name: str) -> str:
    return f"local-dir:{name}" if Path(name).is_dir() else name
