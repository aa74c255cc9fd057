"""Make golden adapters, one of each kind and host: only those that are not there yet.

    python -m tests.golden.make

`hosts/` holds tiny hosts with their weights, as `save_pretrained` wrote them. For each adapter `<version>/<name>/` is
the folder as `save_adapter` wrote it, without its card, and `<version>/<name>.safetensors` what it is given and what
the host answers then, without and with the adapter; one is there as an IP-Adapter's single file too.
What was released is never made again: `tests/test_golden.py` loads it for ever. A new kind or setting gets a new name,
a new format version a new folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import mmattn
from mmattn.adapters.decoupled import DecoupledLayout, TimedResampler
from mmattn.adapters.files import FORMAT_VERSION

HERE = Path(__file__).parent
HOSTS = HERE / "hosts"

E = 7
VOCAB, LENGTH = 29, 11
CHANNELS, HEIGHT, WIDTH, TEXT_DIM, TEXT_LENGTH = 3, 8, 12, 11, 5
ROWS, SLOTS = 3, 5
CHUNK = 3

_FEW = {"num_heads": 2, "head_dim": 3}
_ADAPTERS: dict[str, Any] = {
    "gated": mmattn.GatedAdapter(E, every=2, **_FEW),
    "gated-other-blocks": mmattn.GatedAdapter(
        E,
        layers=(0, 3),
        gate="channel",
        num_kv_heads=1,
        qk_norm=True,
        score_bias=True,
        length_norm=5.0,
        dropout=0.1,
        position="before",
        layout={"norm": "rms", "norm_eps": 1e-6, "memory_norm": False, "activation": "swiglu"},
        **_FEW,
    ),
    "chunked": mmattn.ChunkedAdapter(E, layers=(1, 2), chunk_size=CHUNK, **_FEW),
    "decoupled": mmattn.DecoupledAdapter(E),
    "decoupled-image-tokens": mmattn.DecoupledAdapter(E, tokens=2, start="host"),
    "composed": mmattn.ComposedAdapter(12, layers=(1, 3), augmenting_layers=(3, 0), num_heads=2, head_dim=4),
    "joint_decoupled": mmattn.adapters.JointDecoupledAdapter(E, resampler=TimedResampler(3, 1, 8, 2, 4, 2, 6)),
    "decoupled-after-blocks": mmattn.DecoupledAdapter(
        E, tokens=2, layout=DecoupledLayout(slot_dim=5, bias=True, added_to="block")
    ),
    "passages": mmattn.adapters.PassageAdapter(),
    "joined": mmattn.adapters.JoinedAdapter(E, layers=(0, 3)),
    "prefix": mmattn.adapters.PrefixAdapter(num_virtual_tokens=4, num_prefixes=2),
    "fused_cache": mmattn.adapters.FusedCacheAdapter(12, layers=(1, 3), augmenting_layers=(3, 0), hidden_dim=5),
    "fused_cache-ridge": mmattn.adapters.FusedCacheAdapter(12, layers=(1,), augmenting_layers=(3,), fuser="ridge"),
    "inserted": mmattn.adapters.InsertedAdapter(E),
}


def load_host(name: str) -> nn.Module:
    """One of the stored hosts: "llama", "unet" or "transformer"."""
    if name == "llama":
        return AutoModelForCausalLM.from_pretrained(HOSTS / name, dtype=torch.float32).eval()
    if name == "transformer":
        return SD3Transformer2DModel.from_pretrained(HOSTS / name, low_cpu_mem_usage=False).eval()
    return UNet2DConditionModel.from_pretrained(HOSTS / name, low_cpu_mem_usage=False).eval()


def host_of(name: str) -> str:
    """The host that an adapter of this name is for."""
    if name in ("joint_decoupled", "decoupled-after-blocks"):
        return "transformer"
    return "unet" if name.startswith("decoupled") else "llama"


def ask(host: Any, given: dict[str, Tensor], memory: bool) -> Tensor:
    """What a host answers to stored inputs, with the stored memory or without any."""
    seen = {name: given[name] for name in ("mask", "segments", "scores") if name in given}
    more: dict[str, Any] = {}
    if memory and "passages" in given:
        cache = mmattn.hosts.PassageCache(host)
        cache.add(list(given["passages"]), progress=False)
        more["memory"] = cache.select([[0, 1], [1], []])
    elif memory and "prefixes" in given:
        more["memory"] = given["prefixes"]
    elif memory:
        # What is composed has no stored memory: a second copy of its host reads along.
        reading = mmattn.AugmentingModel(load_host("llama"))
        if "tokens" in given:
            more["memory"] = mmattn.Memory(given["tokens"], **seen)
        else:
            more["memory"] = reading.prefill(given["input_ids"], given["read"]) if "read" in given else reading
    with torch.no_grad():
        if "input_ids" in given:
            out: Tensor = host(given["input_ids"], **more).logits
        elif "pooled" in given:
            time = given["timestep"].expand(len(given["sample"]))
            out = host(given["sample"], given["text"], given["pooled"], time, **more).sample
        else:
            out = host(given["sample"], int(given["timestep"]), given["text"], **more).sample
    return out


def enlarge(part: nn.Module, size: float) -> None:
    """Weights that make what they are in visible, gates open; norms nearly as they were."""
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            middle = 1.0 if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(0.7 if "gate" in name else middle, size if parameter.ndim > 1 else size / 3)


def inputs(name: str, seed: int) -> dict[str, Tensor]:
    """What an adapter of this name is given: a row whose memory is padded, and one that has none."""
    random = torch.Generator().manual_seed(seed)
    slots = 3 * SLOTS if name == "chunked" else SLOTS
    given: dict[str, Tensor] = {}
    if name == "passages":
        given["passages"] = torch.randint(2, VOCAB, (2, SLOTS), generator=random)
    elif name == "prefix":
        given["prefixes"] = torch.tensor([1, 0, -1])
    elif name.startswith("fused_cache"):
        given["read"] = (torch.arange(LENGTH) < torch.tensor([LENGTH, 4, 0])[:, None]).long()
    elif not name.startswith("composed"):
        given["tokens"] = torch.randn(ROWS, slots, E, generator=random)
        given["mask"] = torch.arange(slots) < torch.tensor([slots, slots - 2, 0])[:, None]
    if name == "chunked":
        given["segments"] = torch.arange(slots).expand(ROWS, -1) % 3
    if name == "gated-other-blocks":
        given["scores"] = torch.randn(ROWS, slots, generator=random)
    if host_of(name) == "llama":
        given["input_ids"] = torch.randint(2, VOCAB, (ROWS, LENGTH), generator=random)
    else:
        given["sample"] = torch.randn(ROWS, CHANNELS, HEIGHT, WIDTH, generator=random)
        given["text"] = torch.randn(ROWS, TEXT_LENGTH, TEXT_DIM, generator=random)
        given["timestep"] = torch.tensor(13)
    if host_of(name) == "transformer":
        given["pooled"] = torch.randn(ROWS, 6, generator=random)
    return {key: value.contiguous() for key, value in given.items()}


def make(name: str, seed: int) -> None:
    """One adapter, and what it answers."""
    place, given = HERE / str(FORMAT_VERSION), inputs(name, seed)
    torch.manual_seed(seed)
    host = load_host(host_of(name))
    own = ask(host, given, memory=False)
    model = mmattn.attach(host, _ADAPTERS[name])
    enlarge(model.adapters["default"], 0.5)
    if name == "fused_cache-ridge":
        prompts = torch.randint(2, VOCAB, (40, LENGTH), generator=torch.Generator().manual_seed(seed))
        model.adapter("default").fit(model, mmattn.AugmentingModel(load_host("llama")), prompts, min_cosine=-1.0)
    model.save_adapter(place / name, encoder="OpenCLIP ViT-B-32:laion2b_s34b_b79k")
    (place / name / "README.md").unlink()  # the card tests nothing
    if name == "decoupled-image-tokens":
        model.save_ip_adapter(place / f"{name}-ip-adapter.safetensors")
    answer = ask(model.eval(), given, memory=True)
    save_file(given | {"own": own, "answer": answer}, place / f"{name}.safetensors")


def read(path: Path) -> dict[str, Tensor]:
    """What is stored beside an adapter: inputs, the host's own answer, and the answer with the memory."""
    return load_file(path.with_name(f"{path.name}.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, name in enumerate(_ADAPTERS):
        if not (HERE / str(FORMAT_VERSION) / name).exists():
            make(name, seed)
