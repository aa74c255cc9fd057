"""Adapted models in vLLM against `generate` of transformers: tokens, log-probabilities, and what is refused."""

from __future__ import annotations

import base64
import gc
import os
import random
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import mmattn
from mmattn import pipelines
from mmattn.pipelines.generation import memory_arguments
from tests.serving.processes import serving
from tests.tiny_texts import tiny_tokenizer

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
WIDTH, NEW = 23, 24  # of a memory; tokens of an answer
SLOTS = (None, 7, 40, 1, None, 129, 16, 2, 33, 64, 5, 0, None, 256, 11, 29)
_SIZES = {"intermediate_size": 112, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
HOSTS = {
    "llama": {**_SIZES, "hidden_size": 128},
    "qwen3": {**_SIZES, "hidden_size": 96, "head_dim": 32},
    "gemma3_text": {**_SIZES, "hidden_size": 96, "head_dim": 32, "sliding_window": 37},
    "gpt2": {"n_embd": 96, "n_layer": 5, "n_head": 3, "n_positions": 512},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"null_slot": True, "gate": "head", "qk_norm": True, "num_kv_heads": 2},
    "resampled": {"resampler": mmattn.Resampler(num_latents=7, num_heads=2, head_dim=11), "position": "before"},
    "narrow": {"head_dim": 20, "gate": "channel", "feed_forward": 0, "null_slot": True},
}

Answer = tuple[list[int], list[float]]


def make_host(folder: Path, family: str = "llama") -> Any:
    """Save a tiny random host with its tokenizer, and return it."""
    tokenizer = tiny_tokenizer()
    config = CONFIG_MAPPING[family](vocab_size=len(tokenizer), max_position_embeddings=512, **HOSTS[family])
    lm = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    lm.generation_config.eos_token_id = None
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lm


def adapt(lm: Any, folder: Path, **options: Any) -> Any:
    """Attach an adapter whose gates are open, calibrated by some texts, and save it."""
    settings = {"memory_dim": WIDTH, "layers": [1, 3], "num_heads": 4, "head_dim": 32} | options
    model = mmattn.attach(lm, mmattn.GatedAdapter(**settings)).eval()
    model.calibrate(input_ids=torch.randint(3, 250, (4, 17)), memory=torch.randn(4, 5, WIDTH))
    with torch.no_grad():
        for name, parameter in model.adapter("default").named_parameters():
            if name.endswith("gate"):
                parameter.uniform_(0.5, 1.5)
            elif "null" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(2)
    model.save_adapter(folder)
    return model


@contextmanager
def engines() -> Iterator[None]:
    """A block after which what engines left is gone."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        yield
    finally:
        cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """A vLLM engine over a host and its adapter in a folder, gone after the block."""
    options = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "disable_log_stats": False} | options
    if (folder / "adapter").is_dir():
        options["hf_overrides"] = {"mmattn_adapter": str(folder / "adapter")}
    with engines():
        llm = vllm.LLM(str(folder / "host"), **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm


def requests(count: int, longest: int = 30) -> list[tuple[list[int], torch.Tensor | None]]:
    """Prompts with memories of 0 to 256 slots or none; a third has a memory that others have."""
    memories = [None if slots is None else torch.randn(slots, WIDTH) for slots in SLOTS]
    lengths = torch.randint(1, longest, (count,)).tolist()
    rows = [torch.randint(3, 250, (length,)).tolist() for length in lengths]
    return [(row, memories[1 if place % 3 == 2 else place % len(memories)]) for place, row in enumerate(rows)]


def expected(model: Any, ids: list[int], memory: torch.Tensor | None, visible_from: Any = "first_token") -> Answer:
    """The greedy answer of transformers and its log-probabilities."""
    text = torch.tensor([ids])
    given = memory_arguments(None if memory is None else mmattn.Memory(memory[None]), text, visible_from)
    output = model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=2, output_logits=True, return_dict_in_generate=True, **given,
    )  # fmt: skip
    tokens = output.sequences[0, len(ids) :]
    scores = torch.cat(output.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), scores.tolist()


def prompt(ids: list[int], memory: torch.Tensor | None) -> dict[str, Any]:
    """A prompt of vLLM."""
    return {"prompt_token_ids": ids} | ({} if memory is None else {"multi_modal_data": {"memory": memory}})


def answers(llm: Any, asked: list[tuple[list[int], torch.Tensor | None]]) -> list[Answer]:
    """The greedy answers of vLLM and their log-probabilities."""
    return [answer(one) for one in llm.generate([prompt(*one) for one in asked], greedy(), use_tqdm=False)]


def greedy() -> Any:
    """Sampling parameters of vLLM for a greedy answer with its log-probabilities."""
    return vllm.SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, ignore_eos=True)


def answer(output: Any) -> Answer:
    """The answer in an output of vLLM."""
    one = output.outputs[0]
    return list(one.token_ids), [step[id].logprob for step, id in zip(one.logprobs, one.token_ids, strict=True)]


def check_alike(got: list[Answer], wanted: list[Answer]) -> None:
    """All tokens are the same, and log-probabilities within 1e-3."""
    for place, ((tokens, scores), (right, right_scores)) in enumerate(zip(got, wanted, strict=True)):
        assert tokens == right, place
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(right_scores), atol=1e-3, rtol=0)


def test_a_folder_with_its_models_is_served_in_the_interface_of_openai() -> None:
    from tests.models.test_pretrained import need

    for name in ("smollm2", "efficientnet-lite0", "easy-vqa"):
        need(name)
    import openai

    folder = Path("assets") / "vqa"
    asked = random.Random(0).sample(mmattn.models.load_easy_vqa("test"), 16)
    texts = [row.text.capitalize() for row in asked]
    pipe = mmattn.pipeline(folder, device="cpu")
    wanted = pipe([row.picture for row in asked], texts)
    (command,) = re.findall(r"^python -m (vllm.*)$", PAGE, re.M)
    words = [*shlex.split(command), "--served-model-name", "vqa", "--dtype", "float32", "--enforce-eager"]
    with serving(words, ROOT, 300) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=60, max_retries=0)

        def ask(text: str, picture: bytes | None, tokens: int = 3) -> str:
            url = f"data:image/png;base64,{base64.b64encode(picture or b'').decode()}"
            image = [] if picture is None else [{"type": "image_url", "image_url": {"url": url}}]
            user = {"role": "user", "content": [{"type": "text", "text": text}, *image]}
            answer = client.chat.completions.create(model="vqa", messages=[user], temperature=0, max_tokens=tokens)
            return answer.choices[0].message.content.strip()

        pictures = [row.picture.read_bytes() for row in asked]
        assert [ask(*one) for one in zip(texts, pictures, strict=True)] == wanted
        assert "Paris" in ask("What is the capital of France?", None, 12)
        with pytest.raises(openai.BadRequestError):
            ask("What is this?", b"no picture")
        assert ask(texts[0], pictures[0]) == wanted[0]
        process.terminate()
        assert process.wait(60) is not None


def test_the_page_asks_about_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.models.test_pretrained import need

    for name in ("smollm2", "efficientnet-lite0", "easy-vqa"):
        need(name)
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "LLM(" in one]
    (asked,) = random.Random(3).sample(mmattn.models.load_easy_vqa("test"), 1)
    monkeypatch.chdir(ROOT)
    code = code.replace("picture.png", str(asked.picture))
    named: dict[str, Any] = {}
    with engines():
        # Compiling is another test's.
        exec(code.replace("max_model_len=1024", "max_model_len=1024, enforce_eager=True"), named)
        text = named["llm"].generate([named["request"]], named["SamplingParams"](temperature=0, max_tokens=4))
        assert text[0].outputs[0].text.strip().lower() in ("circle", "rectangle", "triangle")
        named.clear()


def test_a_chat_with_an_adapter_that_captions_reads_its_prompt_and_no_message() -> None:
    folder, picture = ROOT / "assets" / "vision" / "adapter", ROOT / "assets" / "flora" / "snowdrop.png"
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    text = {"type": "text", "text": "Describe the picture."}
    user = {"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}
    with engines():
        llm = vllm.LLM(str(folder), dtype="float32", max_model_len=96, enforce_eager=True)
        chats = [[user], [{"role": "system", "content": "You see."}, user]]
        got = llm.chat(chats, vllm.SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        llm.llm_engine.engine_core.shutdown()
        del llm
    assert [one.outputs[0].text.strip() for one in got] == [mmattn.pipeline(folder, device="cpu")(picture)] * 2


CASES = [("llama", name) for name in ADAPTERS] + [(family, "grouped") for family in HOSTS if family != "llama"]


@pytest.mark.parametrize(("family", "adapter"), CASES, ids=["-".join(case) for case in CASES])
def test_answers_are_those_of_transformers(family: str, adapter: str, tmp_path: Path) -> None:
    model = adapt(make_host(tmp_path / "host", family), tmp_path / "adapter", **ADAPTERS[adapter])
    asked = requests(32)
    wanted = [expected(model, *one) for one in asked]
    without = [expected(model, ids, None) for ids, _ in asked]
    assert sum(a[0] != b[0] for a, b in zip(wanted, without, strict=True)) > 20  # memories change answers
    with engine(tmp_path) as llm:
        check_alike(answers(llm, asked), wanted)
        check_alike(answers(llm, [(ids, None) for ids, _ in asked]), without)


@pytest.mark.parametrize("visible_from", ["first_token", "last_token"])
def test_a_small_cache_preempts_and_mixes_no_memories(visible_from: Any, tmp_path: Path) -> None:
    model = adapt(make_host(tmp_path / "host"), tmp_path / "adapter")
    host = pipelines.ModelReference(name=str(tmp_path / "host"))
    pipelines.PipelineConfig(task="memory-to-text", host=host, visible_from=visible_from).save(tmp_path / "adapter")
    asked = requests(200, longest=90)
    wanted = [expected(model, *one, visible_from) for one in asked]
    with engine(tmp_path, block_size=32, num_gpu_blocks_override=150, max_num_seqs=32) as llm:
        got = answers(llm, asked)
        preemptions = next(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    assert preemptions > 0
    check_alike(got, wanted)


def test_a_compiled_engine_answers_as_an_eager_one(tmp_path: Path) -> None:
    model = adapt(make_host(tmp_path / "host"), tmp_path / "adapter", **ADAPTERS["grouped"])
    asked = requests(32)
    with engine(tmp_path, enforce_eager=False, max_num_seqs=7) as llm:  # memories come while others write
        check_alike(answers(llm, asked), [expected(model, *one) for one in asked])


def test_half_precision_errs_no_more_than_transformers(tmp_path: Path) -> None:
    """Log-probabilities of vLLM's own tokens by float32, by bfloat16 of transformers, and by bfloat16 of vLLM."""
    model = adapt(make_host(tmp_path / "host"), tmp_path / "adapter", **ADAPTERS["grouped"])
    asked = requests(32)
    with engine(tmp_path, dtype="bfloat16") as llm:
        got = answers(llm, asked)

    @torch.no_grad()
    def score(ids: list[int], tokens: list[int], memory: torch.Tensor | None) -> torch.Tensor:
        given = {} if memory is None else {"memory": mmattn.Memory(memory[None].to(model.dtype))}
        logits = model(torch.tensor([[*ids, *tokens[:-1]]]), **given).logits[0, len(ids) - 1 :].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    rows = [(ids, tokens, memory) for (ids, memory), (tokens, _) in zip(asked, got, strict=True)]
    exact = torch.cat([score(*row) for row in rows])
    model.to(torch.bfloat16)
    rounded = torch.cat([score(*row) for row in rows])
    told = torch.cat([torch.tensor(scores) for _, scores in got])
    assert told.isfinite().all()
    assert (told - exact).square().mean().sqrt() <= 2 * (rounded - exact).square().mean().sqrt()


def test_two_ranks_of_tensor_parallel_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0)) * 2
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    model = adapt(make_host(tmp_path / "host"), tmp_path / "adapter", **ADAPTERS["grouped"])
    asked = requests(16)
    with engine(tmp_path, tensor_parallel_size=2) as llm:
        check_alike(answers(llm, asked), [expected(model, *one) for one in asked])


def test_inserted_memories_are_prompt_embeddings(tmp_path: Path) -> None:
    lm = make_host(tmp_path / "host")
    model = mmattn.attach(lm, mmattn.adapters.InsertedAdapter(memory_dim=WIDTH, gate=False)).eval()
    asked = [(ids, memory) for ids, memory in requests(20) if memory is not None and len(memory)]
    wanted = [expected(model, *one) for one in asked]
    with torch.no_grad():
        slots = [model.adapter("default").read(mmattn.Memory(memory[None])).tokens[0] for _, memory in asked]
        texts = [lm.get_input_embeddings()(torch.tensor(ids)) for ids, _ in asked]
    embedded = [torch.cat(pair) for pair in zip(slots, texts, strict=True)]
    with engine(tmp_path, max_model_len=512, enable_prompt_embeds=True) as llm:
        outputs = llm.generate([{"prompt_embeds": one} for one in embedded], greedy(), use_tqdm=False)
        (code,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "prompt_embeds" in one]
        tokenizer = tiny_tokenizer()
        named: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "memory": mmattn.Memory(asked[0][1][None])}
        named |= {"llm": llm, "torch": torch, "SamplingParams": vllm.SamplingParams}
        with torch.no_grad():
            exec(code, named)
    check_alike([answer(one) for one in outputs], wanted)
    right, _ = expected(model, tokenizer("The flower is")["input_ids"], asked[0][1])
    assert list(named["outputs"][0].outputs[0].token_ids) == right[:8]


def test_a_wrong_memory_fails_its_own_request(tmp_path: Path) -> None:
    model = adapt(make_host(tmp_path / "host"), tmp_path / "adapter")
    ids = [5, 9, 7]
    with engine(tmp_path) as llm:
        for memory, message in (
            (torch.randn(3, WIDTH + 1), f"must be \\(m, {WIDTH}\\)"),
            (torch.full((3, WIDTH), torch.nan), "NaN|finite"),
            (torch.randn(2000, WIDTH), "at most 1024 slots"),
        ):
            with pytest.raises(Exception, match=message):
                answers(llm, [(ids, memory)])
        # One prompt, long enough for a whole page, with memories of its own and without.
        ids = torch.randint(3, 250, (150,)).tolist()
        asked = [(ids, torch.randn(13, WIDTH)), (ids, torch.randn(13, WIDTH)), (ids, None)] * 2
        check_alike(answers(llm, asked), [expected(model, *one) for one in asked])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_bias": True}, "does not support score_bias"),
        ({"visible_segments": "latest", "media_token": 4}, "does not support visible_segments"),
        ({"length_norm": 8.0, "null_slot": True}, "does not support length_norm"),
        ({"layers": [0, 2], "position": "before"}, "a block before layer 0"),
    ],
    ids=["score_bias", "visible_segments", "length_norm", "before"],
)
def test_what_vllm_cannot_do_is_refused_by_name(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    lm = make_host(tmp_path / "host")
    mmattn.attach(lm, mmattn.GatedAdapter(**{"memory_dim": WIDTH, "layers": [1]} | options)).save_adapter(
        tmp_path / "adapter"
    )
    with pytest.raises(mmattn.errors.AttachError, match=message), engine(tmp_path):
        pass
