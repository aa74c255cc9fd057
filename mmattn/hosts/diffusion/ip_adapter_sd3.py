"""Published IP-Adapters of Stable Diffusion 3.5, in the layout of InstantX: read onto a transformer and written back.

`image_proj` resamples an image under the time step; `ip_adapter.0`, `1`, … are the blocks, in the order of the host's
attention layers. The names that diffusers gives to the parts of `image_proj` are read, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.decoupled.joint import JointDecoupledAdapter
from mmattn.adapters.decoupled.timed_resampler import TimedResampler
from mmattn.errors import AdapterFileError, ConditionError, ConfigError
from mmattn.hosts.diffusion.heads import attention_names
from mmattn.hosts.diffusion.ip_adapter_files import check_tensors, write_file

#: Heads of released resamplers are this wide; their number is not in the file.
HEAD_DIM = 64
_WHOLE = {
    "latents": "latents",
    "time_embedding.linear_1": "time_in",
    "time_embedding.linear_2": "time_out",
    "proj_in": "proj_in",
    "proj_out": "proj_out",
    "norm_out": "norm_out",
}
# Of a layer: as InstantX, as diffusers, and as we name it.
_LAYER = (
    ("0.norm1", "ln0", "memory_norm"),
    ("0.norm2", "ln1", "latent_norm"),
    ("0.to_q", "attn.to_q", "q_proj"),
    ("0.to_kv", "attn.to_kv", "kv_proj"),
    ("0.to_out", "attn.to_out.0", "out_proj"),
    ("1.0", "adaln_norm", "norm"),
    ("1.1", "ff.net.0.proj", "up"),
    ("1.3", "ff.net.2", "down"),
    ("2.1", "adaln_proj", "modulation"),
)
_BLOCK = {
    "norm_ip.linear": "modulation",
    "to_k_ip": "k_proj",
    "to_v_ip": "v_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
    "norm_ip_k": "memory_k_norm",
}
_PART = re.compile(r"(.*?)\.?(weight|bias)?")


def is_sd3(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a file holds an IP-Adapter whose blocks follow the time step."""
    return any(name.endswith("norm_ip.linear.weight") for name in tensors)


def read_sd3(
    model: Any, tensors: Mapping[str, Tensor], path: str | PathLike[str]
) -> tuple[JointDecoupledAdapter, dict[str, Tensor]]:
    """The settings and weights of an IP-Adapter of Stable Diffusion 3.5, for this host; nothing is changed.

    Args:
        model: the adapted transformer.
        tensors: of the file, by name.
        path: of the file.

    Raises:
        AdapterFileError: it is of another kind, or for another base model.
    """
    state = {_own_name(name): value for name, value in tensors.items()}
    strange = [name for name in tensors if _own_name(name) is None]
    if strange or "perceiver.latents" not in state:
        raise AdapterFileError(
            f"{str(path)!r} is no IP-Adapter of Stable Diffusion 3.5 as InstantX released it: it holds {strange[:3]}"
        )
    named = {str(name): value for name, value in state.items()}
    named["perceiver.latents"] = named["perceiver.latents"].flatten(0, -2)
    for layer in range(len(model.layer_names)):
        named[f"blocks.{layer}.gate"] = torch.ones(())
    try:
        settings = _settings(named)
        with torch.device("meta"):
            wanted = settings.build(settings.sites(model)).state_dict()
    except (KeyError, ConfigError, ZeroDivisionError, ValueError) as error:
        raise AdapterFileError(
            f"{str(path)!r} lacks parts of its image projection, or they do not fit: {error}"
        ) from error
    given = {name: tuple(value.shape) for name, value in named.items()}
    expected = {name: tuple(value.shape) for name, value in wanted.items()}
    twice = len(attention_names(model.host)) != len(model.layer_names)
    if given != expected or twice:
        wrong = sorted(name for name in set(given) | set(expected) if given.get(name) != expected.get(name))
        why = "its blocks have two attention layers each" if twice else f"{wrong[:3]} differ"
        raise AdapterFileError(
            f"{str(path)!r} is for another base model than this {type(model.host).__name__} with "
            f"{len(model.layer_names)} attention layers: {why}; load it onto that base"
        )
    check_tensors(path, tensors)
    return settings, named


def write_sd3(model: Any, path: str | PathLike[str], name: str) -> None:
    """Write the adapter `name` in the layout of InstantX, atomically.

    Args:
        model: the adapted transformer.
        path: the file.
        name: of the adapter.

    Raises:
        ConditionError: its gates are not 1, which that layout has not, or it has blocks at some layers only.
        OSError: the folder is missing or not writable; a file that was there is unchanged.
    """
    adapter = model.adapter(name)
    state = {key: value.detach().contiguous().cpu() for key, value in adapter.state_dict().items()}
    gates = {key: float(value) for key, value in state.items() if key.endswith(".gate")}
    if len(adapter.layers) != len(model.layer_names) or any(gate != 1 for gate in gates.values()):
        raise ConditionError(
            f"adapter {name!r} cannot be written as an IP-Adapter of Stable Diffusion 3.5, which has blocks at all "
            f"layers and no gates (all are 1), and it has {sorted(set(gates.values()))[:3]}: use save_adapter"
        )
    if adapter.config.resampler.head_dim != HEAD_DIM:
        raise ConditionError(f"adapter {name!r} cannot be written: that layout has a resampler of head_dim={HEAD_DIM}")
    tensors = {_their_name(key): value for key, value in state.items() if key not in gates}
    tensors["image_proj.latents"] = tensors["image_proj.latents"][None]
    write_file(path, tensors)


def _settings(state: Mapping[str, Tensor]) -> JointDecoupledAdapter:
    num_latents, width = state["perceiver.latents"].shape
    depth = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("perceiver.layers."))
    resampler = TimedResampler(
        num_latents=num_latents,
        depth=depth,
        width=width,
        num_heads=state["perceiver.layers.0.q_proj.weight"].shape[0] // HEAD_DIM,
        head_dim=HEAD_DIM,
        feed_forward=state["perceiver.layers.0.up.weight"].shape[0] // width,
        frequencies=state["perceiver.time_in.weight"].shape[1],
    )
    return JointDecoupledAdapter(state["perceiver.proj_in.weight"].shape[1], resampler)


def _own_name(theirs: str) -> str | None:
    """Our name of a tensor of the file, None where there is none."""
    part, _, rest = theirs.partition(".")
    match = _PART.fullmatch(rest)
    assert match is not None
    stem, ending = match[1], f".{match[2]}" if match[2] else ""
    if part == "image_proj" and stem in _WHOLE:
        return f"perceiver.{_WHOLE[stem]}{ending}"
    number, _, inner = stem.removeprefix("layers.").partition(".")
    if part == "image_proj" and stem.startswith("layers.") and number.isdecimal():
        own = next((ours for instantx, diffusers, ours in _LAYER if inner in (instantx, diffusers)), None)
        return None if own is None else f"perceiver.layers.{number}.{own}{ending}"
    number, _, inner = stem.partition(".")
    if part == "ip_adapter" and number.isdecimal() and inner in _BLOCK:
        return f"blocks.{number}.{_BLOCK[inner]}{ending}"
    return None


def _their_name(own: str) -> str:
    """The name in the layout of InstantX of one of our tensors."""
    match = _PART.fullmatch(own)
    assert match is not None
    stem, ending = match[1], f".{match[2]}" if match[2] else ""
    part, *inner = stem.split(".")
    if part == "blocks":
        number, name = inner
        return f"ip_adapter.{number}.{next(theirs for theirs, ours in _BLOCK.items() if ours == name)}{ending}"
    if inner[0] != "layers":
        return f"image_proj.{next(theirs for theirs, ours in _WHOLE.items() if ours == inner[0])}{ending}"
    _, number, name = inner
    return f"image_proj.layers.{number}.{next(theirs for theirs, _, ours in _LAYER if ours == name)}{ending}"
