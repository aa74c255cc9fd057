"""docs/on-a-gpu.md: its sizes on the meta device, its configurations and blocks on tiny models of the same classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection, Qwen3Config, Qwen3ForCausalLM

import mmattn
from mmattn.adapters.base import build_layers
from mmattn.adapters.protocols import Site
from mmattn.pipelines import load_diffusion_host
from mmattn.recipes import load_recipe, read_settings
from tests import tiny_unets
from tests.pages import BLOCK
from tests.tiny_pipeline import make_tokenizer, make_vae, make_xl_pipeline, text_config
from tests.tiny_texts import VOCAB, save_encoder, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "on-a-gpu.md").read_text(encoding="utf-8")
FINETUNE = ROOT / "recipes" / "finetune"
META = torch.device("meta")
SLOTS, WIDTH = 256, 768
QWEN = {"Qwen3-1.7B": (2048, 28, 6144, 16, True), "Qwen3-8B": (4096, 36, 12288, 32, False)}
LAYERS = {"Qwen3-1.7B": (16, 20, 24), "Qwen3-8B": (22, 26, 30)}


def column(name: str) -> list[float]:
    """The figures of a column of the page's table."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    place = cells[0].index(name)
    return [float(row[place].replace(",", "")) for row in cells[2:] if row[place]]


def count(parameters: Any) -> int:
    return sum(one.numel() for one in parameters)


@pytest.mark.parametrize("name", QWEN)
def test_sizes_of_language_models(name: str) -> None:
    width, depth, inner, heads, tied = QWEN[name]
    config = Qwen3Config(
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )
    with META:
        host = Qwen3ForCausalLM(config)
    settings = mmattn.GatedAdapter(WIDTH, layers=LAYERS[name])
    sites = [Site(layer, "after", f"model.layers.{layer}", width, META) for layer in LAYERS[name]]
    adapter = build_layers(settings, sites)
    weights, trained, layers = count(host.parameters()), count(adapter.parameters()), host.model.layers
    products = count(layers.parameters()) + count(host.lm_head.parameters())
    upper = count(layers[LAYERS[name][0] + 1 :].parameters()) + count(host.lm_head.parameters())
    operations = 2 * (products + upper) + 6 * trained
    attention = adapter.block(LAYERS[name][0]).attention
    kept = 2 * attention.num_kv_heads * attention.head_dim * len(LAYERS[name]) * SLOTS * 2
    counted = [weights * 2e-9, trained / 1e6, trained * 16e-9, kept / 1e6, operations / 1e9, 0.4 * 989e9 / operations]
    assert column(name) == pytest.approx(counted, rel=0.02, abs=0.05)


def test_sizes_of_sdxl() -> None:
    with META:
        unet = UNet2DConditionModel(
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        )
    widths = [part.to_k.out_features for name, part in unet.named_modules() if name.endswith("attn2")]
    trained, kept = 2 * sum(widths) * WIDTH, 2 * sum(widths) * SLOTS * 2
    counted = [count(unet.parameters()) * 2e-9, trained / 1e6, trained * 16e-9, kept / 1e6]
    assert column("SDXL") == pytest.approx(counted, rel=0.02, abs=0.05)
    small = tiny_unets.make("sdxl")
    widths = [part.to_k.out_features for name, part in small.named_modules() if name.endswith("attn2")]
    model = mmattn.attach(small, mmattn.DecoupledAdapter(memory_dim=13))
    assert count(model.adapters.parameters()) == 2 * sum(widths) * 13 + 2 * 13  # and its norm


@pytest.fixture
def siglip(tmp_path: Path) -> str:
    """The image tower of a tiny SigLIP 2, as timm saves it."""
    name, sizes = "vit_base_patch16_siglip_256", {"embed_dim": 30, "depth": 2, "num_heads": 3, "img_size": 48}
    tower = timm.create_model(name, **sizes)
    folder = tmp_path / "siglip2"
    folder.mkdir()
    save_file(tower.state_dict(), folder / "model.safetensors")
    described = {
        "architecture": name,
        "model_args": sizes,
        "pretrained_cfg": {**tower.pretrained_cfg, "input_size": [3, 48, 48]},
    }
    (folder / "config.json").write_text(json.dumps(described))
    return f"timm:{folder}"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, colour in enumerate(("red", "green", "blue", "white", "black", "yellow", "orange")):
        Image.new("RGB", (64, 64), colour).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {colour} square")
    return folder


def save_qwen(folder: Path) -> str:
    sizes = {"hidden_size": 24, "intermediate_size": 19, "num_hidden_layers": 28, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=10, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def train(folder: Path, config: str, *changes: str) -> Path:
    """Run a configuration of the page on other models, in a few steps."""
    short = ["optim.max_steps=2", "optim.dataloader_num_workers=0", "optim.per_device_train_batch_size=3"]
    more = [f"out={folder / 'run'}", f"data.cache={folder / 'cache'}", "device=cpu", "eval.eval_steps=2"]
    settings = read_settings(FINETUNE / config, [*short, *more, *changes])
    del settings["recipe"]
    load_recipe(FINETUNE, "train").main(settings)
    return folder / "run"


@pytest.mark.slow
def test_pictures_for_qwen(siglip: str, pictures: Path, tmp_path: Path) -> None:
    lm = save_qwen(tmp_path / "lm")
    given = (f"lm={lm}", f"encoder={siglip}", f"data.path={pictures}")
    run = train(tmp_path, "config_hub_vision.yaml", *given)
    assert mmattn.pipeline(str(run / "adapter"), device="cpu").model.adapter("default").layers == (16, 20, 24)


@pytest.mark.slow
def test_passages_for_qwen(tmp_path: Path) -> None:
    lm, reader = save_qwen(tmp_path / "lm"), save_encoder(tmp_path / "reader")
    rows = [{"prompt": f"{n}?", "text": f"it is {n}", "passages": [f"bluebell {n}", "in spring"]} for n in range(11)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = (f"lm={lm}", f"text_encoder={reader}", f"data.path={tmp_path / 'rows.jsonl'}")
    run = train(tmp_path, "config_hub_passages.yaml", *given)
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


@pytest.fixture
def sdxl(tmp_path: Path) -> Path:
    make_xl_pipeline(make_tokenizer(tmp_path)).save_pretrained(tmp_path / "sdxl")
    return tmp_path / "sdxl"


@pytest.mark.slow
def test_an_ip_adapter_for_sdxl(siglip: str, sdxl: Path, pictures: Path, tmp_path: Path) -> None:
    given = (f"unet={sdxl}", f"encoder={siglip}", f"data.path={pictures}")
    run = train(tmp_path, "config_hub_sdxl.yaml", *given)
    assert (run / "samples.png").is_file()
    pipe = mmattn.pipeline(str(run / "adapter"), device="cpu")
    options = {"num_inference_steps": 2, "guidance_scale": 2.0}
    drawn = [
        pipe("a bell", example, generator=torch.Generator().manual_seed(3), **options).tobytes()
        for example in (pictures / "0.png", pictures / "2.png", None)
    ]
    assert len(set(drawn)) == 3


def test_sdxl_is_called_as_its_pipeline_calls_it(sdxl: Path) -> None:
    """Prompts, sizes and time are those of diffusers: a step of our host is a step of StableDiffusionXLPipeline."""
    host, pipe = load_diffusion_host(sdxl), StableDiffusionXLPipeline.from_pretrained(sdxl, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    heard: list[dict[str, Any]] = []
    pipe.unet.register_forward_hook(lambda module, args, kwargs, out: heard.append(kwargs), with_kwargs=True)
    pipe("a bell", num_inference_steps=1, guidance_scale=2.0, output_type="latent")
    texts = [None, "a bell"]
    states, mask = host.prompts(texts)
    ours: Any = host.inputs(texts)["added_cond_kwargs"]
    assert mask.all() and not torch.allclose(states[0], states[1])
    torch.testing.assert_close(states, heard[0]["encoder_hidden_states"])
    torch.testing.assert_close(host.prompts.null(), heard[0]["encoder_hidden_states"][:1])
    assert ours.keys() == heard[0]["added_cond_kwargs"].keys()
    for name, theirs in heard[0]["added_cond_kwargs"].items():
        torch.testing.assert_close(ours[name], theirs, check_dtype=False)


def save_sd3(folder: Path) -> Path:
    tokenizer = make_tokenizer(folder)
    one, two = (CLIPTextModelWithProjection(text_config(tokenizer, 14, projection_dim=11)).eval() for _ in range(2))
    transformer = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=6,
        num_attention_heads=2, joint_attention_dim=31, caption_projection_dim=12, pooled_projection_dim=22,
        pos_embed_max_size=16,
    ).eval()  # fmt: skip
    vae = make_vae()
    vae.register_to_config(shift_factor=0.1)
    StableDiffusion3Pipeline(
        transformer, FlowMatchEulerDiscreteScheduler(), vae, one, tokenizer, two, tokenizer, None, None
    ).save_pretrained(folder / "sd3")
    return folder / "sd3"


@pytest.mark.slow
def test_blocks(siglip: str, sdxl: Path, tmp_path: Path) -> None:
    """With the names of models, the device and the dtype of a machine without a card or network."""
    unet = UNet2DConditionModel.from_pretrained(sdxl, subfolder="unet")
    mmattn.attach(unet, mmattn.DecoupledAdapter(memory_dim=30)).save_adapter(tmp_path / "adapter")
    here = {
        "Qwen/Qwen3-1.7B": save_qwen(tmp_path / "lm"),
        "timm:vit_base_patch16_siglip_256.v2_webli": siglip,
        "stabilityai/stable-diffusion-xl-base-1.0": str(sdxl),
        "stabilityai/stable-diffusion-3.5-medium": str(save_sd3(tmp_path)),
        "runs/sdxl-siglip2/adapter": str(tmp_path / "adapter"),
        '"cuda"': '"cpu"',
        "torch.bfloat16": "torch.float32",
        "num_inference_steps=30": "num_inference_steps=2",
        "num_inference_steps=28": "num_inference_steps=2",
    }
    codes = [match["code"] for match in BLOCK.finditer(PAGE)]
    assert len(codes) == 3
    names: dict[str, Any] = {"example": Image.new("RGB", (64, 64), "red")}
    for number, code in enumerate(codes):
        for hub, local in here.items():
            code = code.replace(hub, local)
        exec(code, names)
        if number == 0:
            ids = torch.tensor([[5, 6, 7]])
            assert names["model"](ids, memory=names["encoder"]([names["example"]])).logits.isfinite().all()
        else:
            assert isinstance(names.pop("image"), Image.Image)


def test_configurations_are_those_of_the_page() -> None:
    named = set(re.findall(r"recipes/finetune/(config_hub_\w+\.yaml)", PAGE))
    assert named == {path.name for path in FINETUNE.glob("config_hub_*.yaml")}
