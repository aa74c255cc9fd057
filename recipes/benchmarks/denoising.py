"""A denoising step with cached keys and values, against unchanged diffusers.

    python -m recipes.benchmarks denoising [--dtype float32 bfloat16]

A UNet built as that of Stable Diffusion with fewer channels, over 32 × 32 latents. The memory is what the
host's own cross-attention reads; "30 % full" gives diffusers the padding as an `encoder_attention_mask`. Under guidance
the rows come twice. The second table puts one IP-Adapter beside the host's 77 slots of text, in both libraries.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import mmattn
from recipes.benchmarks.timing import Rows, Tables, interleaved, name_of, plural, ratio, ratios

WIDTH = 768
# Slots, rows, share of real slots, and whether the rows come twice under guidance.
SIZES = tuple((slots, 1, fill, guided) for slots in (77, 1024, 4096) for fill in (1.0, 0.3) for guided in (False, True))
SIZES += tuple((slots, 8, fill, False) for slots in (77, 1024, 4096) for fill in (1.0, 0.3))
IMAGES = tuple((images, rows) for images in (1, 64, 256) for rows in (1, 2, 8))  # two rows under guidance
TOKENS = 4  # of an IP-Adapter, for each image
STEPS = 20
QUICK = ((77, 1, 1.0, False), (1024, 1, 0.3, True))


def make_unet(
    dtype: torch.dtype, side: int = 32, channels: tuple[int, ...] = (128, 256, 256), layers: int = 1
) -> torch.nn.Module:
    """Return a random UNet with cross-attention in all levels but the last one."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    crossing = len(channels) - 1
    unet = UNet2DConditionModel(
        sample_size=side,
        block_out_channels=channels,
        layers_per_block=layers,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        down_block_types=(*["CrossAttnDownBlock2D"] * crossing, "DownBlock2D"),
        up_block_types=("UpBlock2D", *["CrossAttnUpBlock2D"] * crossing),
    )
    return unet.to(dtype=dtype).eval()


@torch.no_grad()
def measure(
    slots: int, rows: int, fill: float, dtype: torch.dtype, guided: bool = False, seconds: float = 4.0
) -> dict[str, float]:
    """Return the time of a step, cached or projecting keys and values anew, and of a picture, beside diffusers'."""
    theirs = make_unet(dtype)
    model = mmattn.attach(copy.deepcopy(theirs)).use_core()
    x, text, mask = make_inputs(slots, 2 * rows if guided else rows, fill, dtype)

    def projected_anew() -> None:
        with model.condition(None, text_mask=mask):
            model.host(x, 10, text)

    with mmattn.Guidance(1.0).run(model, text, text_mask=mask) as predict:
        times = interleaved(
            {
                "diffusers": lambda: theirs(x, 10, text, encoder_attention_mask=mask),
                "cached": lambda: predict(x, 10),
                "projected at every step": projected_anew,
            },
            seconds=seconds,
        )
    cached, anew = (ratio(times, name, "diffusers") for name in ("cached", "projected at every step"))
    return {
        "cached": cached,
        f"picture of {STEPS} steps": cached + (anew - cached) / STEPS,
        "projected at every step": anew,
    }


def make_inputs(
    slots: int, rows: int, fill: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return latents, a text, and the mask of the text."""
    x, text = torch.randn(rows, 4, 32, 32, dtype=dtype), torch.randn(rows, slots, WIDTH, dtype=dtype)
    if fill == 1:
        return x, text, None
    lengths = (torch.rand(rows) * 0.5 + 0.75) * fill * slots
    return x, text, torch.arange(slots) < lengths.round().clamp(1, slots)[:, None]


@torch.no_grad()
def measure_adapter(
    unet: torch.nn.Module, images: int, rows: int, core: bool = False, compiled: bool = False, **rounds: float
) -> dict[str, float]:
    """Return the time of a step with an IP-Adapter, here and in diffusers, for each unit of the UNet alone.

    With `core` the text goes through the core, too, and its keys and values are cached as those of the memory.
    """
    theirs, model = with_ip_adapter(unet)
    dtype, side = next(unet.parameters()).dtype, unet.config.sample_size
    x, text = torch.randn(rows, 4, side, side, dtype=dtype), torch.randn(rows, 77, WIDTH, dtype=dtype)
    image, time = torch.randn(rows, images, WIDTH, dtype=dtype), torch.tensor(10)
    alone, other, ours = (torch.compile(one) if compiled else one for one in (unet, theirs, model.host))
    added, memory = {"image_embeds": [image]}, mmattn.Memory(image)
    cached = mmattn.Guidance(1.0).run(model.use_core(), text, memory=memory) if core else model.condition(memory)
    with cached as predict:
        candidates = {
            "UNet alone": lambda: alone(x, time, text),
            "mmattn": lambda: predict(x, time) if core else ours(x, time, text),
            "diffusers": lambda: other(x, time, text, added_cond_kwargs=added),
        }
        times = interleaved(candidates, **rounds)
    return ratios(times, "UNet alone") | {"mmattn / diffusers": ratio(times, "mmattn", "diffusers")}


def with_ip_adapter(unet: torch.nn.Module) -> tuple[torch.nn.Module, mmattn.hosts.AdaptedModel]:
    """Return two copies of a UNet with the same random IP-Adapter: in diffusers, and here."""
    host, dtype = copy.deepcopy(unet), next(unet.parameters()).dtype
    tensors = {name: value.to(dtype) for name, value in ip_adapter(unet).items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "ip_adapter.safetensors")
        model = mmattn.load(copy.deepcopy(unet), Path(folder) / "ip_adapter.safetensors")
    nested: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, value in tensors.items():
        part, rest = name.split(".", 1)
        nested[part][rest] = value
    host._load_ip_adapter_weights([nested], low_cpu_mem_usage=False)
    return host.to(dtype), model


def ip_adapter(unet: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a random IP-Adapter for this UNet, by the names of its file."""
    tensors = {
        "image_proj.proj.weight": torch.randn(TOKENS * WIDTH, WIDTH) / WIDTH**0.5,
        "image_proj.proj.bias": torch.zeros(TOKENS * WIDTH),
        "image_proj.norm.weight": torch.ones(WIDTH),
        "image_proj.norm.bias": torch.zeros(WIDTH),
    }
    crossing = [part for name, part in unet.named_modules() if name.endswith("attn2")]
    for index, attn in enumerate(crossing):
        for letter in "kv":
            tensors[f"ip_adapter.{2 * index + 1}.to_{letter}_ip.weight"] = torch.randn_like(attn.to_k.weight) * 0.02
    return tensors


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield a denoising step with cached keys and values, for each unit of diffusers as it ships."""
    seconds = 1.0 if quick else 4.0
    for dtype in dtypes:
        rows: Rows = {}
        for slots, count, fill, guided in QUICK if quick else SIZES:
            name = f"{slots} slots, {plural(count, 'row')}, {'guided, ' if guided else ''}{fill:.0%} full"
            rows[name] = measure(slots, count, fill, dtype, guided, seconds)
        title = "time of a step for each unit of diffusers as it ships"
        yield f"Denoising, {name_of(dtype)}: {title}", "text memory", rows
        unet, sizes = make_unet(dtype), IMAGES[:1] if quick else IMAGES
        adapters = {
            f"{TOKENS * images} slots, {plural(count, 'row')}": measure_adapter(
                unet, images, count, core=True, seconds=seconds
            )
            for images, count in sizes
        }
        yield f"Denoising, {name_of(dtype)}: an IP-Adapter beside the text", "its memory", adapters
