"""CLIP models of open_clip as encoders: of images, patch tokens or the embedding; of texts, the embedding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.base import FrozenEncoder, ImageEncoder
from mmattn.encoders.openclip_models import PREPROCESSING, open_model
from mmattn.encoders.preprocessing import ImageProcessor
from mmattn.errors import ConfigError, check_int
from mmattn.memory import Memory
from mmattn.progress import batches
from mmattn.tokenization import ClipTokenizer, check_text, refuse_empty


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
        self._clip = open_model(name, pretrained, config)
        self.name = self._clip.name
        model, prepared = self._clip.model, self._clip.prepared
        image_processor = ImageProcessor(
            **{ours: prepared[key] for key, ours in PREPROCESSING.items() if key in prepared}
        )
        if not hasattr(model.visual, "forward_intermediates") and not pooled:
            raise ConfigError(
                f"the picture tower {type(model.visual).__name__} of {self.name} gives no patch tokens; use "
                "pooled=True, or a ViT, ResNet or timm tower"
            )
        settings = {"encoder": "openclip", "config": self._clip.described("vision_cfg")}
        super().__init__(model, image_processor, pooled=pooled, settings=settings, device=device)

    def features(self, pixels: Tensor) -> Tensor:
        """Patch tokens (b, e, height, width), or the embedding (b, e) if pooled.

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
        # A tower that norms only what its pooling leaves has no norm of the patches' width, or none meant for them.
        normed = getattr(visual, "attn_pool", None) is None and not getattr(visual, "final_ln_after_pool", False)
        try:
            found = visual.forward_intermediates(
                pixels, indices=1, normalize_intermediates=normed, intermediates_only=True, output_fmt="NCHW"
            )
        except (AttributeError, AssertionError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"the picture tower of {self.name} gives no patch tokens ({error}); use pooled=True"
            ) from error
        patches: Tensor = found["image_intermediates"][-1]
        return patches

    @cached_property
    def tokenizer(self) -> ClipTokenizer:
        """The tokenizer of the model: `tokenizer(texts)` gives ids (b, l); special tokens in a text stay text."""
        return self._clip.tokenizer()

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.model.visual.state_dict()  # type: ignore[union-attr]
        return weights


class OpenCLIPTextEncoder(FrozenEncoder):
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
        clip = open_model(name, pretrained, config)
        del clip.model.visual
        self.normalize = normalize
        settings = {"encoder": "openclip text", "config": clip.described("text_cfg"), "normalize": normalize}
        super().__init__(clip.model, settings, device)
        self.tokenizer = clip.tokenizer()
        self.max_length = self.tokenizer.context_length
        self.dim: int = clip.config["embed_dim"]

    def forward(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """The memory (b, 1, e) of b texts, computed without gradients; `encode` is the same.

        A UserWarning names the texts that are longer than `max_length` and were truncated.

        Args:
            texts: one text or several.
            batch_size: texts that pass the network at once.
            progress: show the progress on stderr.

        Raises:
            TextError: an entry is no text or is empty; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        checked = check_text(texts)
        refuse_empty([len(text.strip()) for text in checked])
        ids = self.tokenizer(checked)
        rows = [torch.zeros(0, self.dim, dtype=self.dtype, device=self.device)]
        clip: Any = self.model
        with torch.no_grad():
            for start in batches(len(checked), batch_size, "encoding", progress):
                batch = ids[start : start + batch_size].to(self.device)
                rows.append(clip.encode_text(batch, normalize=self.normalize))
        return Memory(torch.cat(rows)[:, None], sources=[[{"text": number}] for number in range(len(checked))])

    encode = forward

    def _weights(self) -> dict[str, Tensor]:
        # The scale of the logits, and CoCa's captioner, play no part in an embedding.
        apart = ("logit_scale", "logit_bias", "text_decoder.")
        return {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith(apart)}

    def extra_repr(self) -> str:
        return f"dim={self.dim}, normalize={self.normalize}, max_length={self.max_length}"
