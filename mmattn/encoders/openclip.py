"""CLIP models of open_clip as encoders: of images, patch tokens or the embedding; of texts, the embedding."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.encoders.base import TextEncoderBase, register_encoder
from mmattn.encoders.images import ImageEncoder, ImageProcessor, unknown_network
from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.progress import tracked
from mmattn.storage.safetensors import check_values
from mmattn.tokenization import ClipTokenizer, refuse_empty

if TYPE_CHECKING:
    from open_clip import CLIP

#: The arguments of `ImageProcessor` by the keys of open_clip's preprocess_cfg.
_PREPROCESSING = {"size": "size", "mean": "mean", "std": "std", "interpolation": "interpolation"}
_PREPROCESSING |= {"resize_mode": "resize", "fill_color": "fill"}
_SCHEMAS = ("hf-hub:", "local-dir:")


@register_encoder("openclip")
class OpenCLIPEncoder(ImageEncoder):
    """Patch tokens or embeddings of images from the frozen image tower of a CLIP (arXiv 2103.00020) of open_clip.

    The memory (b, m, e) has the patch tokens after the last layer and the tower's final layer norm, without the class
    token. `pooled=True` gives the unnormalised image embedding as one token.

    Args:
        name: a name of `open_clip.list_models()`; "name:tag" for name and `pretrained` together; "hf-hub:org/repo"; or
            "local-dir:path", a folder with open_clip_config.json and the weights.
        pretrained: a tag of `open_clip.list_pretrained()` (downloaded by open_clip), the path of a file of weights, or
            None for random weights.
        pooled: one token per image, its embedding (m = 1).
        device: device of the network, by default the CPU.

    Attributes:
        model: the whole CLIP, frozen; `model.encode_text(encoder.tokenizer(texts))` embeds texts.
        name: as given.

    Raises:
        ConfigError: an unknown name, weights twice, or an image tower without patch tokens.
        AdapterFileError: a folder or weights that are missing, damaged, or of another model.
        MissingExtraError: open_clip is not installed.
    """

    model: CLIP

    def __init__(
        self,
        name: str = "ViT-B-32",
        pretrained: str | os.PathLike[str] | None = None,
        *,
        pooled: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        self.name, model, config = _load(name, pretrained)
        prepared = import_extra("open_clip", "vision").get_model_preprocess_cfg(model)
        image_processor = ImageProcessor(
            **{ours: prepared[key] for key, ours in _PREPROCESSING.items() if key in prepared}
        )
        settings = {"encoder": "openclip", "config": _described(config, "vision_cfg")}
        super().__init__(model, image_processor, pooled=pooled, settings=settings, device=device)

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooled: bool = False) -> OpenCLIPEncoder:
        """Build the encoder of a folder or a name for `load_image_encoder`."""
        return cls(_local_name(name), pooled=pooled, device=device)

    def features(self, pixels: Tensor) -> Tensor:
        """Return patch tokens (b, e, height, width), or the embedding (b, e) if pooled, of pixels (b, 3, h, w)."""
        visual = self.model.visual
        if self.pooled:
            embedding = visual(pixels)
            return embedding[0] if isinstance(embedding, tuple) else embedding
        # A tower that norms only its pooled output has no norm for patches.
        normed = getattr(visual, "attn_pool", None) is None and not getattr(visual, "final_ln_after_pool", False)
        try:
            outputs = visual.forward_intermediates(
                pixels, indices=1, normalize_intermediates=normed, intermediates_only=True, output_fmt="NCHW"
            )
        except (AttributeError, AssertionError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"the picture tower {type(visual).__name__} of {self.name} gives no patch tokens ({error}); use "
                "pooled=True, or a ViT, ResNet or timm tower"
            ) from error
        return outputs["image_intermediates"][-1]

    @cached_property
    def tokenizer(self) -> ClipTokenizer:
        """The tokenizer of the model: `tokenizer(texts)` gives ids (b, l); special tokens in a text stay text."""
        return _tokenizer(self.name)

    def _weights(self) -> dict[str, Tensor]:
        return self.model.visual.state_dict()


@register_encoder("openclip-text")
class OpenCLIPTextEncoder(TextEncoderBase):
    """Embeddings of texts by the frozen text tower of CLIP (arXiv 2103.00020), from open_clip, as a memory (b, 1, e).

    They have length 1, and lie in the space of the image embeddings that `OpenCLIPEncoder(..., pooled=True)` of the
    same model gives, once these are normalised.

    Args:
        name: as in `OpenCLIPEncoder`.
        pretrained: as in `OpenCLIPEncoder`.
        device: device of the network, by default the CPU.

    Attributes:
        tokenizer: the tokenizer of the model.
        max_length: tokens of the longest text that is not truncated.
        dim: width e of the memory.

    Raises:
        ConfigError: an unknown name, or weights twice.
        AdapterFileError: a folder or weights that are missing, damaged, or of another model.
        MissingExtraError: open_clip is not installed.
    """

    model: CLIP
    _shown = ("dim", "max_length")

    def __init__(
        self,
        name: str = "ViT-B-32",
        pretrained: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        name, model, config = _load(name, pretrained)
        del model.visual
        settings = {"encoder": "openclip text", "config": _described(config, "text_cfg"), "normalize": True}
        super().__init__(model, settings, device)
        self.tokenizer = _tokenizer(name)
        self.max_length = self.tokenizer.context_length
        self.dim = config["embed_dim"]

    @classmethod
    def from_name(
        cls, name: str, device: str | torch.device | None = None, pooling: str | None = None
    ) -> OpenCLIPTextEncoder:
        """Build the encoder of a folder for `load_text_encoder`."""
        cls._refuse_pooling(name, pooling)
        return cls(_local_name(name), device=device)

    def _encode_texts(self, texts: list[str], kind: str, batch_size: int, progress: bool) -> Tensor:
        refuse_empty([len(text.strip()) for text in texts])
        ids, starts = self.tokenizer(texts).to(self.device), tracked(len(texts), "encoding", progress, size=batch_size)
        rows = [self.model.encode_text(ids[n : n + batch_size], normalize=True) for n in starts]
        return torch.cat(rows)

    def _weights(self) -> dict[str, Tensor]:
        # The scale of the logits and the captioner of CoCa take no part in an embedding.
        unused = ("logit_scale", "logit_bias", "text_decoder.")
        return {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith(unused)}


def _load(name: str, pretrained: str | os.PathLike[str] | None) -> tuple[str, CLIP, dict[str, Any]]:
    """Return the name without a tag, the model of open_clip with its weights, and its config."""
    open_clip = import_extra("open_clip", "vision")
    name, weights = _split(name, None if pretrained is None else os.fspath(pretrained))
    options: dict[str, object] = {"require_pretrained": True}
    if not name.startswith(_SCHEMAS):
        if name not in open_clip.list_models():
            raise unknown_network("open_clip has no model", name, open_clip.list_models())
        released = open_clip.get_pretrained_cfg(name, weights) if weights else None
        # Weights trained with QuickGELU are released under names without it, too.
        options = {"pretrained": weights, "force_quick_gelu": bool((released or {}).get("quick_gelu"))}
    try:
        with _quiet_logging():
            # The towers' own released weights are no part of this model.
            model: CLIP = open_clip.create_model(name, pretrained_text=False, **options)
            config: dict[str, Any] = open_clip.get_model_config(name)
        for key, tensor in model.state_dict().items() if weights or name.startswith(_SCHEMAS) else ():
            check_values(key, tensor)
    except Exception as error:  # whatever open_clip, torch and safetensors find wrong with files and configs
        raise AdapterFileError(
            f"open_clip cannot load {name}{f':{weights}' if weights else ''} ({error}); without a network, give "
            "local-dir: or the path of a file"
        ) from error
    config["quick_gelu"] = bool(config.get("quick_gelu") or options.get("force_quick_gelu"))
    return name, model, config


def _split(name: str, weights: str | None) -> tuple[str, str | None]:
    """Return the name of a model of open_clip, and the tag or path of its weights."""
    if name.startswith(_SCHEMAS):
        if weights is not None:
            raise ConfigError(f"{name!r} brings its own weights; leave out pretrained={weights!r}")
        return name, None
    name, colon, tag = name.partition(":")
    if colon and (weights is not None or not tag):
        raise ConfigError(f"give the weights once, as 'name:tag' or as pretrained=; got '{name}:{tag}' and {weights!r}")
    return name.replace("/", "-"), tag or weights


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Keep open_clip, which logs by the root logger, from configuring it."""
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _described(config: dict[str, Any], name: str) -> dict[str, object]:
    """Return the part of a config in the fingerprint of a tower, "vision_cfg" or "text_cfg"."""
    return {"embed_dim": config["embed_dim"], name: config[name], "quick_gelu": config["quick_gelu"]}


def _tokenizer(name: str) -> ClipTokenizer:
    with _quiet_logging():
        return ClipTokenizer(import_extra("open_clip", "vision").get_tokenizer(name))


def _local_name(name: str) -> str:
    return f"local-dir:{name}" if Path(name).is_dir() else name
