"""Adapters from files onto a host: folders, the Hugging Face hub, and the layouts in which others publish theirs."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mmattn.adapters.base import adapter_kinds, build_layers
from mmattn.adapters.files import CONFIG, TENSORS, Shapes, check_tensors, load_folder, parse_config
from mmattn.adapters.prefix import PrefixAdapter, PrefixLayers
from mmattn.adapters.protocols import HeadSizes, Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.errors import AdapterFileError, AttachError, ConfigError, NonFiniteError
from mmattn.hosts.attach import adapted_model, attach
from mmattn.hosts.attachment import outside_modes
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.saving import SETTINGS, STATE, Description, host_fingerprint, host_sizes, local_folder, saved_settings
from mmattn.models.loading import read_weights
from mmattn.storage.json_files import read_json
from mmattn.storage.safetensors import check_values


def load(
    host: nn.Module,
    folder: str | PathLike[str],
    name: str = "default",
    *,
    path: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> AdaptedModel:
    """Load a saved adapter onto a host; onto a UNet also the single file of a published IP-Adapter.

    The adapter is loaded in float32, like a fresh one, whatever dtype it was saved in and the host has (like peft's
    `autocast_adapter_dtype`).

    Args:
        host: as in `attach`.
        folder: a folder written by `save_adapter` or `save_pretrained`, a checkpoint of a Trainer, or the name of a
            repository on the Hugging Face hub, "org/name".
        name: as in `attach`; if the folder has a subfolder of this name with an adapter, that adapter is loaded.
        path: as in `attach`.
        revision: branch, tag or commit of the repository.
        dtype: dtype of the adapter; "auto" for the dtype it was saved in. Gates stay in float32 or higher.

    Returns:
        As in `attach`.

    Raises:
        AdapterFileError: the folder has no adapter for this host. The host is unchanged.
        ConfigError: an adapter cannot run in `dtype`.
        NonFiniteError: a weight is NaN or infinite, or beyond the range of `dtype`. The host is unchanged.
    """
    check_dtype(dtype)
    folder = local_folder(folder, revision)
    inside = os.path.join(folder, str(name))
    if os.path.isfile(os.path.join(inside, TENSORS)):  # `save_pretrained` wrote the folder
        folder = inside
    if isinstance(host, AdaptedModel):
        host = host.host
    try:
        with outside_modes():
            model = adapted_model(host, path)
            if os.path.isfile(folder):
                settings, tensors = model.read_single_file(folder)
            else:
                settings, tensors = _read_state(model, folder, name) or _read_folder(model, folder)
    except AttachError as error:
        raise AdapterFileError(f"cannot load an adapter onto {type(host).__name__}: {error}") from error
    return _attach_with(host, settings, tensors, name, path, dtype)


def check_dtype(dtype: object) -> None:
    """Refuse what no adapter can run in."""
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if not (dtype is None or dtype == "auto" or floats):
        raise ConfigError(
            f'dtype must be torch.float32, torch.bfloat16, torch.float16, torch.float64, "auto" or None, got {dtype!r}'
        )


def _check_fits(model: AdaptedModel, config: Description, shapes: Shapes) -> AdapterConfig:
    """Return the settings of an adapter, everything checked against a host that is not changed."""
    settings = parse_config(config, adapter_kinds())
    host_class = type(model.host).__name__
    if not set(settings.positions) & set(model.positions):
        raise AdapterFileError(
            f"this adapter of kind {config['kind']!r} was made for a {config['host']['class']}; this host is a "
            f"{host_class} of kind {model.kind!r}: load that host"
        )
    sites = settings.sites(model)
    saved, here = config["host"], host_sizes(model.sites(sites[0].position))
    if any(saved[size] != here[size] for size in here):
        raise AdapterFileError(
            f"this adapter was made for a {saved['class']} with {saved['num_layers']} layers of width "
            f"{saved['hidden_size']}; this host is a {host_class} with {here['num_layers']} layers of width "
            f"{here['hidden_size']}: load that host"
        )
    layers = [site.layer for site in sites]
    if layers != config["layers"]:
        raise AdapterFileError(
            f"the config says layers {config['layers']} and its settings give {layers} on this host: one was edited"
        )
    with torch.device("meta"):
        needed = build_layers(settings, sites).state_dict()
    expected = {key: (tuple(value.shape), value.dtype) for key, value in needed.items()}
    for key, (shape, dtype) in expected.items():
        saved_shape, saved_dtype = shapes.get(key, (shape, dtype))
        if dtype.is_floating_point and saved_dtype.is_floating_point:
            dtype = saved_dtype  # weights are cast where they are loaded, from whatever precision they were saved in
        expected[key] = () if not saved_shape and shape == (1,) else shape, dtype
    check_tensors(expected, shapes)
    return settings


def _read_state(
    model: AdaptedModel, folder: str | PathLike[str], name: str
) -> tuple[AdapterConfig, dict[str, Tensor]] | None:
    """Return the settings and tensors of an adapter in the state dict that a Trainer wrote, or None."""
    path = os.path.join(folder, STATE)
    if not os.path.isfile(path) or any(os.path.exists(os.path.join(folder, name)) for name in (CONFIG, TENSORS)):
        return None
    state, source = read_weights(path), repr(path)
    settings_by_name = saved_settings(state, source)
    if not settings_by_name:
        return None
    chosen = name if name in settings_by_name else next(iter(settings_by_name))
    if chosen != name and len(settings_by_name) > 1:
        raise AdapterFileError(
            f"{source} holds the adapters {', '.join(settings_by_name)}, and none is called {name!r}: name one"
        )
    start = f"adapters.{chosen}."
    keys = [key for key in state if key.startswith(start) and key != start + SETTINGS]
    tensors = {key.removeprefix(start): state[key] for key in keys}
    settings = _check_fits(
        model, settings_by_name[chosen], {key: (tuple(x.shape), x.dtype) for key, x in tensors.items()}
    )
    return settings, tensors


def _read_folder(model: AdaptedModel, folder: str | PathLike[str]) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Return the settings and tensors of an adapter, everything checked against a host that is not changed."""
    config, tensors = load_folder(folder, lambda config, shapes: _check_fits(model, config, shapes))
    settings = parse_config(config, adapter_kinds())
    saved = config["host"]["fingerprint"]
    # A host that is stored in half precision may have been trained on in full.
    if saved is not None and all(digest not in (None, saved) for digest in _fingerprints(model)):
        warnings.warn(
            f"the weights of this {type(model.host).__name__} are not those the adapter in {str(folder)!r} was trained "
            "on: another revision, a fine-tuned copy, or another dtype",
            stacklevel=4,
        )
    return settings, tensors


def _fingerprints(model: AdaptedModel) -> Iterator[str | None]:
    """Yield the fingerprints of the host as it is, and in the dtypes that hosts are stored in."""
    yield host_fingerprint(model.host)
    dtypes = {value.dtype for value in model.host.parameters() if value.is_floating_point()}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtypes != {dtype}:
            yield host_fingerprint(model.host, dtype)


@outside_modes()
def _attach_with(
    host: nn.Module,
    settings: AdapterConfig,
    tensors: Mapping[str, Tensor],
    name: str,
    path: str | None,
    dtype: torch.dtype | Literal["auto"] | None = None,
) -> AdaptedModel:
    chosen = _saved_dtype(tensors) if dtype == "auto" else dtype
    target = chosen or torch.promote_types(torch.get_default_dtype(), torch.float32)
    for key, tensor in tensors.items():
        if tensor.dtype != target and tensor.is_floating_point() and not tensor.to(target).isfinite().all():
            raise NonFiniteError(
                f"the weights {key!r} reach {float(tensor.abs().max()):.3g}, beyond the range of {target}: give "
                'another dtype=, or "auto" for that of the file'
            )
    model = attach(host, settings, name, path=path)
    adapter = model.adapter(name)
    if chosen is not None:
        adapter.to(chosen)
    adapter.load_state_dict(tensors)
    return model


def _saved_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """Return the dtype of most of the saved numbers; None where it is none that an adapter can run in."""
    counts = Counter[torch.dtype]()
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else None


@outside_modes()
def load_published(
    host: nn.Module,
    family: str,
    weights: Mapping[str, Tensor] | str | PathLike[str],
    name: str = "default",
    *,
    visible_segments: str = "latest",
    media_token: int | None = None,
    num_heads: int | None = None,
    path: str | None = None,
) -> AdaptedModel:
    """Attach the gated cross-attention of a published model to a host with the rest of its text model.

    The memory has the states that the published blocks attend to: for Idefics those of its vision model (after its
    resampler, if it has one), for Mllama those after `multi_modal_projector`, for OpenFlamingo those after its
    perceiver. Its segments number the images of each row.

    Args:
        host: for Idefics the Llama with its `layers`; for Mllama a Llama of its layers without cross-attention, in
            order; for OpenFlamingo its language model.
        family: "idefics", "mllama" or "openflamingo".
        weights: a state dict, a `.safetensors` or `.bin` file, or a folder of safetensors files; only tensors of the
            blocks are read.
        name: as in `attach`.
        visible_segments: the images that a token sees: the "latest", all "previous", or "all".
        media_token: id of the token that stands for an image; or give `images` at each call.
        num_heads: needed for OpenFlamingo with a head width other than 64.
        path: as in `attach`.

    Returns:
        As in `attach`.

    Raises:
        AdapterFileError: tensors are missing, unknown or of another shape, they belong to another host, or its
            feed-forward is not a SwiGLU (Idefics, Mllama).
        AttachError: the name is taken. Nothing is changed.
    """
    if isinstance(host, AdaptedModel):
        host = host.host
    from mmattn.adapters.gated.published import read_published

    tensors, source = _read_pretrained(weights)
    shown = {"visible_segments": visible_segments, "media_token": media_token}
    settings, state = read_published(family, tensors, host, num_heads, source, **shown)
    return _attach_with(host, settings, state, name, path)


def _read_pretrained(weights: Mapping[str, Tensor] | str | PathLike[str]) -> tuple[Mapping[str, Tensor], str]:
    """Return tensors by name, and their source for messages."""
    if isinstance(weights, Mapping):
        if not all(isinstance(value, Tensor) for value in weights.values()):
            raise AdapterFileError("the state dict must hold tensors by name")
        return weights, "the state dict"
    path = os.fspath(weights)
    files = [path]
    if os.path.isdir(path):
        files = sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".safetensors"))
        if not files:
            raise AdapterFileError(f"{path!r} holds no safetensors file; name the file with the weights")
    tensors = {name: tensor for file in files for name, tensor in read_weights(file, pickles=True).items()}
    return tensors, repr(path)


# peft's prefix tuning and cartridges ----------------------------------------------------------------------------------

# One tensor `prompt_embeddings`: its rows are the virtual tokens, and each holds layer by layer the key and the value
# of every head, (p, n · 2 · g · k) in all with n layers: what peft puts into the host's cache before the text.

KEY = "prompt_embeddings"
#: The kinds of peft that have this layout.
KINDS = ("PREFIX_TUNING", "CARTRIDGE")

Folder = str | PathLike[str]


def load_prefix_tuning(host: nn.Module, folders: Folder | Sequence[Folder], name: str = "default") -> AdaptedModel:
    """Load prefix-tuning checkpoints of peft onto a host, as a `PrefixAdapter` with a prefix for each.

    Args:
        host: as in `attach`.
        folders: a folder written by `PeftModel.save_pretrained`, or several with the same number of virtual tokens.
        name: as in `attach`.

    Returns:
        As `attach`; `memory=` numbers the checkpoint for each row of a call.

    Raises:
        AdapterFileError: a folder holds no prefix tuning for a host of these sizes; nothing is changed.
        AttachError: the attention of the host cannot be reached, or the name is taken.
    """
    folders = [folders] if isinstance(folders, (str, PathLike)) else list(folders)
    tensors = [_read(folder) for folder in folders]
    lengths = sorted({len(tensor) for tensor in tensors})
    if len(lengths) != 1:
        raise AdapterFileError(
            f"prefixes of one adapter have one number of virtual tokens, these have {lengths}: load each under a name"
        )
    settings = PrefixAdapter(lengths[0], len(tensors))
    sites = settings.sites(adapted_model(host, None))
    layout = _layout(sites)
    width = len(sites) * 2 * layout.num_kv_heads * layout.head_dim
    for tensor, folder in zip(tensors, folders, strict=True):
        if tensor.shape[1] != width:
            raise AdapterFileError(
                f"the virtual tokens in {str(folder)!r} are {tensor.shape[1]} wide, and this host needs {width} "
                f"({len(sites)} layers, {layout.num_kv_heads} key/value heads): load the host they were trained on"
            )
    model = attach(host, settings, name)
    adapter = model.adapter(name)
    assert isinstance(adapter, PrefixLayers)
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            split = tensor.view(len(tensor), len(adapter.layers), 2, layout.num_kv_heads, layout.head_dim)
            for place, layer in enumerate(adapter.layers):
                block = adapter.prefix(layer)
                block.keys[number] = split[:, place, 0].transpose(0, 1).to(block.keys)
                block.values[number] = split[:, place, 1].transpose(0, 1).to(block.values)
    return model


def _read(folder: Folder) -> Tensor:
    """Return the virtual tokens (p, n · 2 · g · k) of a checkpoint."""
    source = repr(os.fspath(folder))
    try:
        config = read_json(os.path.join(folder, CONFIG))
        tensors = load_file(os.path.join(folder, TENSORS))
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterFileError(f"{source} holds no checkpoint of peft ({CONFIG} and {TENSORS}): {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in KINDS:
        raise AdapterFileError(f"{source} is a checkpoint of peft's {kind}, and not of {' or '.join(KINDS)}")
    tensor = tensors.get(KEY)
    if tensor is None or tensor.dim() != 2 or not tensor.is_floating_point():
        raise AdapterFileError(f"{source} holds {sorted(tensors)[:5]}, and not {KEY} (virtual tokens, width)")
    check_values(KEY, tensor)
    return tensor


def _layout(sites: Sequence[Site]) -> HeadSizes:
    """Return the sizes of every layer, which must be equal."""
    first, *others = {
        HeadSizes(1, site.heads.num_kv_heads, site.heads.head_dim, site.heads.value_dim or site.heads.head_dim)
        for site in sites
        if site.heads is not None
    }
    if others or first.value_dim != first.head_dim:
        raise AdapterFileError(
            "peft's prefix tuning has keys and values of one size in all layers, and those of this host differ"
        )
    return first
