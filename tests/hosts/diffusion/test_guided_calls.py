"""Which rows and calls of unmodified pipelines of diffusers see no memory under guidance: the unconditional ones."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler as Scheduler
from diffusers.guiders import ClassifierFreeGuidance
from transformers import CLIPTokenizer

from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.diffusion.guided_calls import CONDITIONAL_FIRST
from tests import tiny, tiny_pipeline, tiny_transformers, tiny_unets
from tests.hosts.diffusion.test_pipelines import POOLED, ROWS, TEXTS, noise

pytestmark = pytest.mark.filterwarnings("ignore")
SOURCES = Path(inspect.getfile(diffusers)).parent / "pipelines"


def texts(seed: int) -> torch.Tensor:
    return noise(5, 22, seed=seed)


MASKS = dict.fromkeys(("prompt_attention_mask", "negative_prompt_attention_mask"), torch.ones(ROWS, 5))
FLUX = TEXTS | POOLED | {"guidance_scale": 3.5, "true_cfg_scale": 4.0}


def flux_kontext():
    pipe = diffusers.FluxKontextPipeline(Scheduler(), *[None] * 5, tiny_transformers.make("FluxTransformer2DModel"))
    return pipe, FLUX | {"latents": noise(16, 4), "max_area": 64 * 64, "_auto_resize": False}


def chroma():
    pipe = diffusers.ChromaPipeline(Scheduler(), *[None] * 3, tiny_transformers.make("ChromaTransformer2DModel"))
    return pipe, TEXTS | MASKS | {"latents": noise(16, 4), "guidance_scale": 4.0}


def lumina2():
    pipe = diffusers.Lumina2Pipeline(tiny_transformers.make("Lumina2Transformer2DModel"), Scheduler(), *[None] * 3)
    masks = {name: mask.bool() for name, mask in MASKS.items()}
    return pipe, TEXTS | masks | {"latents": noise(4, 8, 8), "guidance_scale": 4.0}


BY_CALL = {"Flux Kontext": flux_kontext, "Chroma": chroma, "Lumina 2": lumina2}


def answers_of(pipe, settings, context=None, steps=1):
    """The host's inputs and outputs in one run of a pipeline from the same noise."""
    pipe.set_progress_bar_config(disable=True)
    heard = []
    hook = pipe.transformer.register_forward_hook(
        lambda host, args, given, out: heard.append((given, out[0].clone())), with_kwargs=True
    )
    with hook, context or torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        pipe(num_inference_steps=steps, output_type="latent", generator=generator, **settings)
    return heard


@pytest.mark.parametrize("name", BY_CALL)
@pytest.mark.parametrize("declared", [False, True])
def test_the_call_with_the_negative_prompt_sees_no_memory(name, declared):
    """Invariant 126: of calls for one half each, named or not, that with the negative prompt sees no memory."""
    pipe, settings = BY_CALL[name]()
    model = tiny_unets.open_values(tiny_transformers.attach(pipe.transformer))
    more = {"negative_prompt_embeds": settings["negative_prompt_embeds"]} if declared else {}
    heard = answers_of(pipe, settings, model.condition(tiny.memory(ROWS), guided=True, **more), steps=2)
    assert len(heard) == 4
    for given, out in heard:
        alone = tiny_transformers.run(model.host, given)
        negative = torch.equal(given["encoder_hidden_states"], settings["negative_prompt_embeds"])
        assert torch.equal(out, alone) == negative


def test_one_step_with_other_prompts_is_no_guidance():
    """Invariant 126: several runs in one block are not taken for the halves of one."""
    pipe, settings = chroma()
    model = tiny_unets.open_values(tiny_transformers.attach(pipe.transformer))
    with model.condition(tiny.memory(ROWS), guided=True):
        for seed in (5, 6):
            mine = settings | {"prompt_embeds": texts(seed), "guidance_scale": 1.0}
            for given, out in answers_of(pipe, mine):
                with model.disable_adapter():
                    assert tiny.differs(out, tiny_transformers.run(model.host, given))


def test_asynchronous_tasks_take_turns():
    """Invariant 126: in tasks of one thread each call is a half of its own picture, in whatever order they come."""
    pipe, settings = chroma()
    model = tiny_unets.open_values(tiny_transformers.attach(pipe.transformer))
    batch, memory = tiny_transformers.given(model, ROWS), tiny.memory(ROWS)

    async def draw(seed: int) -> list[bool]:
        mine, sees = batch | {"hidden_states": noise(*batch["hidden_states"].shape[1:]) + seed}, []
        for text in (texts(seed), texts(9)):
            out = model.host(**mine | {"encoder_hidden_states": text})[0]
            await asyncio.sleep(0)
            with model.disable_adapter():
                sees.append(tiny.differs(out, model.host(**mine | {"encoder_hidden_states": text})[0]))
        return sees

    async def both() -> list[list[bool]]:
        return await asyncio.gather(draw(1), draw(2))

    with torch.no_grad(), model.condition(memory, guided=True):
        assert asyncio.run(both()) == [[True, False]] * 2
        gc.collect()
        assert not model.denoising_call().timesteps


def test_what_nothing_tells_is_refused():
    """Invariant 126: a third text at one step, and one text twice."""
    pipe, settings = chroma()
    model = tiny_transformers.attach(pipe.transformer)
    batch = tiny_transformers.given(model, ROWS)
    with torch.no_grad(), model.condition(tiny.memory(ROWS), guided=True):
        for seed in (1, 2):
            model.host(**batch | {"encoder_hidden_states": texts(seed)})
        with pytest.raises(ConditionError, match="negative_prompt_embeds"):
            model.host(**batch | {"encoder_hidden_states": texts(3)})
    same = settings | {"negative_prompt_embeds": settings["prompt_embeds"]}
    for more in ({}, {"negative_prompt_embeds": settings["prompt_embeds"]}):
        with pytest.raises(ConditionError, match="another negative prompt"):
            answers_of(pipe, same, model.condition(tiny.memory(ROWS), guided=True, **more))
    unet = tiny_unets.attach(tiny_unets.make())
    args, named = tiny_unets.given()
    with torch.no_grad(), unet.condition(tiny.memory(len(args[0])), guided=True):
        unet.host(*args, **named)
        with pytest.raises(ConditionError, match="several texts"):
            unet.host(args[0], args[1], args[2] + 1, **named)


@pytest.mark.parametrize("family", ["QwenImageTransformer2DModel", "WanTransformer3DModel", "FluxTransformer2DModel"])
def test_names_of_guiders(family):
    """Invariant 126: the names of diffusers' guiders are known; another name says nothing."""
    model = tiny_unets.open_values(tiny_transformers.attach(tiny_transformers.make(family)))
    batch, memory = tiny_transformers.given(model, ROWS), tiny.memory(ROWS)
    alone = tiny_transformers.run(model.host, batch)
    names = (*ClassifierFreeGuidance._input_predictions, "cond", "uncond", "pred_cond_skip", "uncond_stg")
    for name in names:
        with model.condition(memory, guided=True), model.host.cache_context(name):
            out = tiny_transformers.run(model.host, batch)
        assert torch.equal(out, alone) == (name in ("uncond", "pred_uncond")), name
    with model.condition(memory[0], guided=True), model.host.cache_context("cond"), pytest.raises(ShapeError):
        model.host(**batch)


@pytest.mark.parametrize("labels", [[3], [3, 4]])
def test_the_null_class_is_unconditional(labels):
    """Invariant 126: DiT's pipeline puts the conditional half first, and its null class tells."""
    dit = tiny_transformers.make("DiTTransformer2DModel", num_embeds_ada_norm=1000)
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4)
    pipe = diffusers.DiTPipeline(dit, vae, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    model, heard = tiny_unets.open_values(tiny_transformers.attach(dit)), []
    dit.register_forward_hook(lambda host, args, given, out: heard.append((args, given, out[0])), with_kwargs=True)
    with model.condition(tiny.memory(len(labels)), guided=True):
        pipe(labels, guidance_scale=4.0, num_inference_steps=1, output_type="np")
    (args, given, out), *_ = heard
    with torch.no_grad():
        alone = dit(*args, **given)[0]
    same = [torch.equal(mine, own) for mine, own in zip(out, alone, strict=True)]
    assert same == [label == 1000 for label in given["class_labels"].tolist()]
    with (
        torch.no_grad(),
        model.condition(tiny.memory(1), guided=True),
        pytest.raises(ConditionError, match="null class"),
    ):
        dit(out[:2, :4], timestep=torch.tensor([3, 3]), class_labels=torch.tensor([3, 4]))


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("rows", "memory_rows"), [(2, 1), (4, 2), (6, 1)])
def test_advice_never_shows_the_memory_to_the_unconditional_half(rows, memory_rows, guided):
    """Invariant 127: a batch that guidance may have doubled is told of guided=True and of one row for each picture."""
    model = tiny_unets.attach(tiny_unets.make())
    args, named = tiny_unets.given()
    some = [torch.cat([arg, arg])[:1].expand(rows, *arg.shape[1:]) if torch.is_tensor(arg) else arg for arg in args]
    with torch.no_grad(), model.condition(tiny.memory(memory_rows), guided=guided):
        if guided and rows == 2 * memory_rows:
            assert model.host(*some, **named)[0].isfinite().all()
            return
        advice = "as many rows of memory as pictures" if guided else "a row of memory for each picture; .*guided=True"
        with pytest.raises(ShapeError, match=advice) as error:
            model.host(*some, **named)
    assert "expand" not in str(error.value)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> CLIPTokenizer:
    return tiny_pipeline.make_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_perturbed_attention_guidance(words, guidance):
    """Invariant 126: the perturbed part has the positive prompt; without a negative one both parts see the memory."""
    pipe = diffusers.StableDiffusionPAGPipeline.from_pipe(tiny_pipeline.make_pipeline(words))
    pipe.set_progress_bar_config(disable=True)
    model, heard = tiny_unets.attach(pipe.unet), []
    with model.condition(tiny.memory(1), guided=True):
        hook = pipe.unet.register_forward_hook(lambda host, args, out: heard.append(out[0].clone()))
        settings = {"num_inference_steps": 1, "guidance_scale": guidance, "pag_scale": 3.0, "output_type": "latent"}

        def draw():
            heard.clear()
            pipe("a flower", generator=torch.Generator().manual_seed(0), **settings)
            return heard[0]

        out = draw()
        with model.disable_adapter():
            alone = draw()
    hook.remove()
    same = [torch.equal(mine, own) for mine, own in zip(out, alone, strict=True)]
    assert same == ([True, False, False] if guidance > 1 else [False, False])


def test_another_order_needs_the_negative_embeddings():
    """Invariant 126: InstructPix2Pix has the conditional part first of three; declared embeddings tell."""
    model = tiny_unets.attach(tiny_unets.make())
    (picture, time, text), named = tiny_unets.given()
    rows, negative = len(picture), torch.zeros_like(text[:1])
    three = (torch.cat([picture] * 3), time, torch.cat([text, *[negative.expand_as(text)] * 2]))
    with torch.no_grad():
        alone = model.host(*three, **named)[0]
        with (
            model.condition(tiny.memory(rows), guided=True),
            pytest.raises(ConditionError, match="negative_prompt_embeds"),
        ):
            model.host(*three, **named)
        with model.condition(tiny.memory(rows), negative_prompt_embeds=negative):
            out = model.host(*three, **named)[0]
        with (
            model.condition(tiny.memory(rows), negative_prompt_embeds=negative + 1),
            pytest.raises(ConditionError, match="that the host is called with"),
        ):
            model.host(*three, **named)
    assert torch.equal(out[rows:], alone[rows:])
    assert all(tiny.differs(out[row], alone[row]) for row in range(rows))


def calls_of(tree: ast.AST) -> list[str]:
    """The texts with which a pipeline calls its transformer, in the order of the source."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("self.transformer", "current_model"):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if "encoder_hidden_states" in given:
                found.append((node.lineno, given["encoder_hidden_states"]))
    return [text for _, text in sorted(found)]


@pytest.mark.slow
def test_the_order_of_every_pipeline_of_diffusers():
    """Invariant 126: all that call once for each half begin with the conditional one; the batches that do are known."""
    halves, reversed_batches = 0, set()
    for file in sorted(SOURCES.rglob("pipeline_*.py")):
        if "deprecated" in file.parts:
            continue
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        texts_given = calls_of(tree)
        if any("neg" in text for text in texts_given) and len(texts_given) > 1:
            halves += 1
            assert "neg" not in texts_given[0], file.name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cat" and isinstance(node.args[:1], list):
                parts = [ast.unparse(part) for part in getattr(node.args[0] if node.args else None, "elts", [])]
                unconditional = [any(word in part for word in ("negative", "uncond", "null")) for part in parts]
                of_text = (
                    any(word in parts[0] for word in ("prompt_embeds", "hidden_states", "labels")) if parts else False
                )
                if of_text and unconditional[:2] == [False, True]:
                    reversed_batches.add(file.stem.removeprefix("pipeline_"))
    assert halves > 40
    # Of these Lumina and Stable Cascade are no hosts, and InstructPix2Pix, of three parts, is refused.
    hosts = {"ace_step": "AceStepTransformer1DModel", "dit": "DiTTransformer2DModel"}
    assert set(hosts.values()) == set(CONDITIONAL_FIRST)
    assert reversed_batches == {
        *hosts,
        "lumina",
        "stable_cascade",
        "stable_cascade_prior",
        "stable_diffusion_instruct_pix2pix",
        "stable_diffusion_xl_instruct_pix2pix",
    }


def test_layers_left_out_on_purpose():
    """Invariant 128: skip-layer guidance of SD3 runs, and its third call sees the memory as its prompt does."""
    host = tiny_transformers.make("SD3Transformer2DModel")
    pipe = diffusers.StableDiffusion3Pipeline(host, Scheduler(), *[None] * 7)
    skips = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    settings = TEXTS | POOLED | skips | {"latents": noise(4, 8, 8), "guidance_scale": 4.0}
    model = tiny_unets.open_values(tiny_transformers.attach(host))
    heard = answers_of(pipe, settings, model.condition(tiny.memory(ROWS), guided=True), steps=2)
    assert [len(out) for _, out in heard] == [2 * ROWS, 2 * ROWS, ROWS]
    for given, out in heard:
        same = [torch.equal(*pair) for pair in zip(out, tiny_transformers.run(host, given), strict=True)]
        assert same == [
            torch.equal(text, TEXTS["negative_prompt_embeds"][row % ROWS])
            for row, text in enumerate(given["encoder_hidden_states"])
        ]
    assert any(given.get("skip_layers") for given, _ in heard)


CACHES = {
    "first block": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=1e9),
    "pyramid": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1001),
        current_timestep_callback=lambda: pipe._current_timestep,
    ),
    "Taylor": lambda pipe: diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1),
    "faster": lambda pipe: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe._current_timestep,
        tensor_format="BCFHW",
    ),
    "MagCache": lambda pipe: diffusers.MagCacheConfig(
        threshold=9.0, max_skip_steps=2, retention_ratio=0.2, num_inference_steps=4, mag_ratios=torch.ones(4)
    ),
}


@pytest.mark.parametrize(
    ("name", "cache"),
    # FasterCache is for films.
    [(name, cache) for name in ("Flux", "CogVideoX") for cache in CACHES if (name, cache) != ("Flux", "faster")],
)
def test_caches_of_diffusers(cache, name):
    """Invariant 128: what a cache leaves out is no lost memory, and nothing of another block's memory is seen."""
    if name == "Flux":
        host = tiny_transformers.make("FluxTransformer2DModel")
        pipe = diffusers.FluxPipeline(Scheduler(), *[None] * 5, host)
        settings = FLUX | {"latents": noise(16, 4)}
    else:
        host = tiny_transformers.make("CogVideoXTransformer3DModel")
        pipe = diffusers.CogVideoXPipeline(None, None, None, host, diffusers.CogVideoXDDIMScheduler())
        settings = TEXTS | {"latents": noise(3, 4, 4, 8), "height": 32, "num_frames": 9, "guidance_scale": 4.0}
    pipe.set_progress_bar_config(disable=True)
    model = tiny_unets.open_values(tiny_transformers.attach(host))
    host.enable_cache(CACHES[cache](pipe))

    def draw(memory):
        with model.condition(memory, guided=True):
            return pipe(num_inference_steps=4, output_type="latent", **settings)[0]

    one, other = tiny.memory(ROWS, seed=1), tiny.memory(ROWS, seed=2)
    first = draw(one)
    second = draw(other)
    assert first.isfinite().all() and tiny.differs(first, second)
    assert torch.equal(draw(one), first)
    with model.disable_adapter():
        assert tiny.differs(draw(one), first)
