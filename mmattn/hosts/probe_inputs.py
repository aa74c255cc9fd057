"""Example inputs of models of transformers for probes: texts, pictures, sounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of, embeddings_of, text_config
from mmattn.hosts.probe import LENGTH


def text_inputs(host: nn.Module, rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows of the same few tokens."""
    ids = token_ids(host, rows)
    yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def token_ids(host: nn.Module, rows: int) -> Tensor:
    """Return ids (b, l) of a token that is not padding, and of the host's end token."""
    config = getattr(host, "config", None)
    end = getattr(config, "eos_token_id", None)
    ids = torch.full((rows, LENGTH), 2 if getattr(config, "pad_token_id", None) == 1 else 1)
    # A small model made from a config's defaults has the end of its large siblings, which is no token of its own.
    if isinstance(end, int) and 0 <= end < (getattr(text_config(host), "vocab_size", None) or math.inf):
        ids[:, -1] = end
    return ids.to(device_of(embeddings_of(host)))


def host_inputs(host: nn.Module, rows: int) -> Iterator[dict[str, Any]]:
    """Yield inputs by the name of the host's main input: a text, pictures, or sounds in every layout."""
    name = getattr(host, "main_input_name", "input_ids")
    if name in ("input_ids", "inputs"):
        yield from text_inputs(host, rows)
        text = next(text_inputs(host, rows))
        for shape in _picture_shapes(host):  # models that compare texts with pictures need both
            yield text | {"pixel_values": _drawn(host, rows, shape)}
    names = ("input_values", "input_features") if name == "inputs" else (name,) if name != "input_ids" else ()
    for name in names:
        for shape in _picture_shapes(host) if name == "pixel_values" else _sound_shapes(host):
            yield {name: _drawn(host, rows, shape)}


def _drawn(host: nn.Module, rows: int, shape: tuple[int, ...]) -> Tensor:
    """Return the same random input in every row."""
    one = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    return one.repeat(rows, *[1] * len(shape)).to(device_of(host), next(host.parameters()).dtype)


def _picture_shapes(host: nn.Module) -> Iterator[tuple[int, ...]]:
    config: Any = getattr(host, "config", None)
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    yield getattr(config, "num_channels", 3), height, width


def _sound_shapes(host: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield samples, features by time and times by feature; as long as the host has positions, or short."""
    config: Any = getattr(host, "config", None)
    config = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "n_mels")
    features = {size for size in (getattr(config, name, None) for name in names) if isinstance(size, int)}
    times = [2 * positions for positions in [getattr(config, "max_source_positions", 0)] if isinstance(positions, int)]
    times += [size for size in [getattr(config, "max_length", None)] if isinstance(size, int)]
    for feature in sorted(features):
        for length in [*(one for one in times if 0 < one < 10_000), 256]:
            yield feature, length
            yield length, feature
    yield (4000,)
    yield 1, 4000
