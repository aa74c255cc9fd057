"""Keywords and attributes: near misses of ours are refused, all others are the host's, set where they are read."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DynamicCache,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.utils import TransformersKwargs, generic

import mmattn
from mmattn.adapters import InsertedAdapter, JoinedAdapter, PrefixAdapter
from mmattn.errors import AttachError, ConditionError, ConfigError, MmattnError, ShapeError
from mmattn.training import AdapterTrainer
from tests import tiny, tiny_unets
from tests.families.building import tiny_model
from tests.tiny import DISTINCT, FAMILIES

# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROWS = 3


BERT = BertConfig(
    vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=53, num_hidden_layers=2, num_attention_heads=4
)
#: What ordinary code sends, and hosts that take any keyword drop or read in their loss.
SENT = {
    "shift_labels": tiny.text(ROWS, seed=1),
    "ignore_index": 7,
    "num_items_in_batch": torch.tensor(3),
    "return_loss": True,
    "token_type_ids": torch.zeros(ROWS, 7, dtype=torch.long),
    "cache_position": torch.arange(7),
    "vision_feature_layers": -1,
    "image_sizes": None,
    "image_grid_thw": None,
    "mems": None,
    "past_key_values": None,
    "cache_params": None,
    "head_mask": None,
    "foo": 1,
}
NEAR = {"memroy": "memory", "memmory": "memory", "memories": "memory", "adaptor_scale": "adapter_scale"}
NEAR |= {"adapter_scales": "adapter_scale", "image": "images", "arived": "arrived", "windows": "window"}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_keyword_of_a_family_passes_and_a_near_miss_of_ours_does_not(family):
    """Invariants 42, 122: on every path."""
    lm, ids, memory = tiny.make(family), tiny.text(ROWS), tiny.memory(ROWS)
    model = tiny.attach(lm)
    want = model(ids, memory=memory).logits
    parameters = inspect.signature(type(lm).forward).parameters
    known = {name: one.default for name, one in parameters.items() if name not in ("self", "kwargs", "input_ids")}
    if "kwargs" in parameters:
        known |= dict.fromkeys(TransformersKwargs.__annotations__)
    for name, value in known.items():
        assert torch.equal(model(ids, memory=memory, **{name: value}).logits, want), name
    for name, meant in NEAR.items():
        said = f"{name}=.*did you mean {meant}="
        for call in (model, model.base_model, model.generate):
            for given in ({"memory": memory}, {}):
                with pytest.raises(ConfigError, match=said):
                    call(ids, **given, **{name: None})
        for given in (model.condition, model.prepare):
            with pytest.raises(TypeError, match=name), contextlib.ExitStack() as stack:
                stack.enter_context(given(memory, **{name: None}))


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("family", DISTINCT)
@torch.no_grad()
def test_what_the_bare_host_takes_is_taken_with_a_memory(family):
    """Invariant 122: fresh, with the answer of the bare host; the loss reads what it read."""
    lm, ids, memory = tiny.make(family), tiny.text(ROWS), tiny.memory(ROWS)
    bare = {}
    for name, value in SENT.items():
        with contextlib.suppress(TypeError):
            bare[name] = lm(ids, labels=ids, **{name: value})
    model = tiny.attach(lm, opened=False)
    for name, want in bare.items():
        for got in (
            model(ids, labels=ids, **{name: SENT[name]}),
            model(ids, labels=ids, memory=memory, **{name: SENT[name]}),
        ):
            assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss), name
        with model.condition(memory):
            assert torch.equal(lm(ids, labels=ids, **{name: SENT[name]}).loss, want.loss), name
    assert set(bare) == set(SENT) or family == "mamba" or "kwargs" not in inspect.signature(lm.forward).parameters


GATED = mmattn.GatedAdapter(tiny.MEMORY_DIM, layers=(0, 2))
ADAPTERS = (
    GATED,
    mmattn.ChunkedAdapter(tiny.MEMORY_DIM, layers=(0, 2), chunk_size=3),
    InsertedAdapter(tiny.MEMORY_DIM),
    JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2)),
    PrefixAdapter(num_virtual_tokens=5),
)


#: Of a family, the names under which its host takes a cache.
CACHES = {"llama": ["past_key_values", "by its place"], "mamba": ["cache_params"]}
if tiny.IS_5_24:
    CACHES = {family: ["cache", *names] for family, names in CACHES.items()}
LOOPS = [("mamba", GATED, name) for name in CACHES["mamba"]]
LOOPS += [("llama", adapter, name) for adapter in ADAPTERS for name in CACHES["llama"]]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(("family", "adapter", "name"), LOOPS, ids=lambda one: getattr(one, "kind", one))
@torch.no_grad()
def test_token_by_token_with_a_cache_of_any_name(family, adapter, name):
    """Invariant 123: in the call, in a block, and without the head."""
    host, ids = tiny.make(family), tiny.text(ROWS)

    def token_by_token(model, **given):
        logits, cache = [], DynamicCache(config=host.config)
        for token in ids.split(1, 1):
            if name == "by its place":
                out = model(token, None, None, cache, **given)
            else:
                out = model(token, **{name: cache}, use_cache=True, **given)
            logits.append(out.logits if hasattr(out, "logits") else host.get_output_embeddings()(out[0]))
        return torch.cat(logits, 1)

    tiny.assert_close(token_by_token(host), host(ids).logits)
    model = tiny.open_gates(mmattn.attach(host, adapter))
    memory = adapter.example_memory(torch.Generator().manual_seed(0), ROWS)
    want = model(ids, memory=memory).logits
    assert tiny.differs(want, host(ids).logits)
    for called in (model, model.base_model):
        tiny.assert_close(token_by_token(called, memory=memory), want)
    with model.condition(memory):
        tiny.assert_close(token_by_token(host), want)


@pytest.mark.parametrize("adapter", [one for one in ADAPTERS if one.kind != "chunked"], ids=lambda one: one.kind)
@torch.no_grad()
def test_a_tree_of_texts_in_one_row(adapter):
    """Invariant 123: under a mask of four dimensions positions repeat, and the row has one memory."""
    host = tiny.make("llama")
    model = tiny.open_gates(mmattn.attach(host, adapter))
    memory = adapter.example_memory(torch.Generator().manual_seed(0), 1)
    trunk, ends = tiny.text(1, 3), tiny.text(1, 2, seed=1)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    seen[4, 3] = False
    mask = torch.zeros(1, 1, 5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
    positions = torch.tensor([[0, 1, 2, 3, 3]])
    tree = {"input_ids": torch.cat([trunk, ends], 1), "attention_mask": mask, "position_ids": positions}
    got = model(**tree, memory=memory).logits
    for number, end in enumerate(ends.split(1, 1)):
        want = model(torch.cat([trunk, end], 1), memory=memory).logits
        tiny.assert_close(got[:, 3 + number], want[:, 3])
    if adapter.kind == "gated":
        with pytest.raises(ShapeError, match="1 rows and the memory of adapter 'default' has 2"):
            model(**tree, memory=memory.expand(2))


def test_forward_shows_the_signature_of_the_host():
    """Invariant 124: with ours; of a host with a LoRA also what peft hands on."""
    hosts = [tiny.make("gpt2"), tiny.make("llama")]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for host in (*hosts, peft.get_peft_model(tiny.make("llama"), config)):
        inner = host.get_base_model() if isinstance(host, peft.PeftModel) else host
        model = tiny.attach(host)
        shown = inspect.signature(model.forward).parameters
        theirs = inspect.signature(host.forward).parameters
        assert set(theirs) | set(inspect.signature(inner.forward).parameters) <= set(shown)
        assert set(shown) >= {"memory", "adapter_scale", "images", "arrived", "window"}
        assert list(shown)[: len(theirs) - 1] == list(theirs)[:-1]
        assert all(shown[name].default == one.default for name, one in theirs.items())
        assert generic.find_labels(type(model)) == generic.find_labels(type(inner))
        ids, memory = tiny.text(ROWS), tiny.memory(ROWS)
        want = model(input_ids=ids, attention_mask=torch.ones_like(ids), memory=memory).logits
        assert torch.equal(model(ids, *([None] if "gpt2" in type(host).__module__ else []), memory=memory).logits, want)
        if host is hosts[1]:  # arguments by place are those of the host, in its order
            given = ids, torch.ones_like(ids), torch.arange(7).expand(ROWS, -1) + 3
            named = dict(zip(("input_ids", "attention_mask", "position_ids"), given, strict=True))
            assert torch.equal(model(*given, memory=memory).logits, model(**named, memory=memory).logits)
        assert isinstance(model, mmattn.hosts.AdaptedCausalLM) and isinstance(copy.deepcopy(model), type(model))
        model.unload()
    unet = tiny_unets.attach(tiny_unets.make())
    assert set(inspect.signature(unet.host.forward).parameters) <= set(inspect.signature(unet.forward).parameters)


def test_a_copy_under_autocast_calls_itself(monkeypatch):
    """Accelerate wraps the forward of a model that is trained under bf16: a copy must not run the original."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # of a test before, in another precision
    model = tiny.attach(tiny.make("llama"))
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    twin, calls = copy.deepcopy(model), []
    twin.host.register_forward_pre_hook(lambda *_: calls.append(twin))
    twin(tiny.text(2))
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore")  # of transformers' Trainer
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reads", ["llama", "bert"])
def test_a_trainer_gives_what_the_host_reads(reads, smoothing, tmp_path):
    """Invariant 124: it keeps the columns of the host and its labels, and shifts those of a language model."""
    ids, losses = tiny.text(ROWS), []
    labels = ids if reads == "llama" else torch.arange(ROWS) % 2
    rows = [{"input_ids": ids[row], "labels": labels[row], "position_ids": torch.arange(7) + 2} for row in range(ROWS)]
    settings = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, label_smoothing_factor=smoothing
    )
    for adapted in (False, True):
        torch.manual_seed(0)
        model = tiny.make("llama") if reads == "llama" else BertForSequenceClassification(BERT)
        if adapted:
            model = mmattn.attach(model, mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1))
            rows = [row | {"memory": tokens} for row, tokens in zip(rows, tiny.memory(ROWS).tokens, strict=True)]
        losses.append(Trainer(model=model, args=settings, eval_dataset=rows).evaluate()["eval_loss"])
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore")  # of transformers' Trainer
def test_labels_of_a_host_that_answers_questions(tmp_path):
    """Invariant 124: its columns begin and end, and no class of ours names them."""
    host = BertForQuestionAnswering(BERT)
    model = mmattn.attach(host, mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1))
    settings = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    ids, tokens = tiny.text(ROWS), tiny.memory(ROWS).tokens
    spans = {"start_positions": torch.arange(ROWS), "end_positions": torch.arange(ROWS) + 2}
    rows = [
        {"input_ids": ids[row], "memory": tokens[row], **{n: s[row] for n, s in spans.items()}} for row in range(ROWS)
    ]
    loss = AdapterTrainer(model=model, args=settings, eval_dataset=rows).evaluate()["eval_loss"]
    assert loss == pytest.approx(float(host.eval()(ids, **spans).loss))


@torch.no_grad()
def test_adapters_on_a_part_of_a_host_and_on_the_host():
    """Invariant 125: each sees its own memory, whichever is called."""
    for adapter in (GATED, JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2))):
        lm, ids, one, other = tiny.make("llama"), tiny.text(ROWS), tiny.memory(ROWS), tiny.memory(ROWS, seed=1)
        inner = tiny.attach(lm.model)
        states = inner(ids, memory=one)[0]
        outer = tiny.open_gates(mmattn.attach(lm, adapter))
        answer = outer(ids, memory=other).logits
        assert torch.equal(inner(ids, memory=one)[0], states)
        with inner.condition(one):
            tiny.assert_close(lm(ids).logits, lm.lm_head(states))
            both = outer(ids, memory=other).logits
        assert tiny.differs(both, answer) and tiny.differs(both, lm.lm_head(states))
        with inner.condition(one), outer.condition(other):
            assert torch.equal(lm(ids).logits, both)
        assert torch.equal(outer(ids, memory=other).logits, answer)
        outer.unload()
        assert torch.equal(inner(ids, memory=one)[0], states)
        inner.unload()
        assert torch.equal(lm(ids).logits, tiny.own(ids))


def test_verbs_of_others_answer_in_our_words(tmp_path):
    """Invariant 125: they are of LoRAs in the host, which says them under its own name."""
    lm = tiny.make("llama")
    model = tiny.attach(lm)
    model.save_adapter(tmp_path)
    for name, args, ours in (
        ("load_adapter", (tmp_path,), "mmattn.load"),
        ("active_adapters", (), "model.active"),
        ("enable_adapters", (), "model.set_adapter"),
        ("disable_adapters", (), "disable_adapter"),
        ("get_adapter_state_dict", (), "state_dict"),
        ("enable_peft_hotswap", (), "load_state_dict"),
    ):
        with pytest.raises(AttachError, match=f"^{name} of LlamaForCausalLM.*{ours}.*model.host.{name}"):
            getattr(model, name)(*args)
    with pytest.raises(AttachError, match="add_adapter.name, settings. got LoraConfig"):
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConditionError, match="mmattn.load"):
        model.from_pretrained(tmp_path)
    with pytest.raises(AttachError, match="nobody"):
        model.set_adapter("nobody")


@pytest.mark.parametrize("around", [False, True])
@torch.no_grad()
def test_keywords_of_a_host_with_a_lora(around):
    """peft takes some keywords for itself: a LoRA for each row of a batch."""
    lm, ids, memory = tiny.make("llama"), tiny.text(ROWS), tiny.memory(ROWS)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    guest = peft.get_peft_model(lm, config)
    model = tiny.attach(guest if around else lm).eval()
    want = model(ids, memory=memory).logits
    for name in ("attention_mask", "position_ids", "logits_to_keep", "output_attentions"):
        value = 0 if name == "logits_to_keep" else None
        assert torch.equal(model(ids, memory=memory, **{name: value}).logits, want), name
    with pytest.raises(ConfigError, match="memroy"):
        model(ids, memroy=memory)
    if around:
        mixed = model(ids, memory=memory, adapter_names=["default", "__base__", "default"]).logits
        with guest.disable_adapter():
            plain = model(ids, memory=memory).logits
        tiny.assert_close(mixed, torch.stack([want[0], plain[1], want[2]]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_a_memory_given_to_the_host_is_not_dropped(family):
    """Most hosts take any keyword and read none of ours; trainers and pipelines call the host they know."""
    lm, ids, memory = tiny.make(family), tiny.text(ROWS), tiny.memory(ROWS)
    model = tiny.attach(lm)
    for given in ({"memory": memory}, {"memory": None}, {"adapter_scale": 0.5}):
        with pytest.raises((ConditionError, TypeError), match=next(iter(given))):
            lm(ids, **given)
        with pytest.raises((ConditionError, TypeError), match=next(iter(given))), model.condition(memory):
            lm(ids, **given)
    model.unload()


def test_keywords_of_a_unet():
    model, memory = tiny_unets.attach(tiny_unets.make()), tiny.memory(ROWS)
    args, kwargs = tiny_unets.given()
    with pytest.raises((MmattnError, TypeError), match="memory"):
        model.host(*args, memory=memory, **kwargs)
    with torch.no_grad():
        want = model(*args, memory=memory, **kwargs).sample
        for name in set(inspect.signature(type(model.host).forward).parameters) - {"self", "sample", "timestep"}:
            if name not in ("encoder_hidden_states", "return_dict"):
                assert torch.equal(model(*args, memory=memory, **{name: None}).sample, want), name


def test_what_needs_a_memory_is_not_dropped_without_one():
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(ROWS)
    for given in ({"adapter_scale": 0.5}, {"images": torch.zeros(ROWS, 7, dtype=torch.long)}):
        for call in (model, model.generate):
            with pytest.raises(ConditionError, match=f"{next(iter(given))}=.*memory="):
                call(ids, **given)
    for option in ("guided", "misspelt"):
        with pytest.raises(TypeError, match=option), model.condition(None, **{option: True}):
            pass
    for option in ("path", "require_memroy", "adapter_scale"):
        with pytest.raises((MmattnError, TypeError), match=option):
            mmattn.attach(tiny_unets.make(), tiny_unets.adapter(), **{option: "model.layers"})


def t5() -> nn.Module:
    return tiny_model("t5", AutoModelForSeq2SeqLM)


def lora() -> nn.Module:
    host: nn.Module = peft.get_peft_model(
        tiny.make("llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    return host


def attached(host: nn.Module) -> Any:
    return tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1, num_heads=2)))


@pytest.mark.parametrize("make", [lambda: tiny.make("llama"), lambda: tiny.make("gpt2"), lora, t5])
def test_a_generation_config_that_is_set_is_followed(make: Callable[[], nn.Module]) -> None:
    """Invariant 149."""
    model = attached(make())
    asked = GenerationConfig(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=2)
    asked.decoder_start_token_id = 0
    model.generation_config = asked
    assert model.host.generation_config is model.generation_config is asked
    ids = tiny.text(2)
    start = 1 if model.kind == "encoder_decoder" else ids.shape[1]
    assert model.generate(ids, memory=tiny.memory(2)).shape[1] == start + 3


def test_a_trainer_that_sets_a_generation_config(tmp_path: Any) -> None:
    """Invariant 149."""
    model, asked = (
        attached(t5()),
        GenerationConfig(max_new_tokens=4, decoder_start_token_id=0, pad_token_id=0),
    )
    Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments(tmp_path, generation_config=asked, use_cpu=True))
    assert model.host.generation_config.max_new_tokens == 4


def test_whatever_the_host_has_is_set_and_deleted_on_it() -> None:
    """Invariant 149."""
    host = tiny.make("llama")
    host.note = "a plain attribute"
    host.register_buffer("table", torch.zeros(3))
    model, ids = attached(host), tiny.text(1)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(7.0)

    head, config = nn.Linear(32, 5, bias=False), tiny.config("llama")
    for name, value in {
        "note": "another",
        "table": torch.ones(3),
        "config": config,
        "loss_function": loss,  # a property with a setter
        "lm_head": head,
        "main_input_name": "inputs_embeds",  # of the class
    }.items():
        setattr(model, name, value)
        assert getattr(host, name) is getattr(model, name) is value
        assert name not in vars(model) and name not in {*model._modules, *model._buffers}
    assert model(ids, memory=tiny.memory(1)).logits.shape[-1] == 5
    assert float(model(ids, labels=ids).loss) == 7
    with pytest.raises(AttributeError):
        model.device = "cpu"  # as on the host
    for name in ("note", "table", "main_input_name"):
        delattr(model, name)
    assert not hasattr(host, "note") and not hasattr(host, "table") and not hasattr(model, "note")
    assert host.main_input_name == model.main_input_name == "input_ids"
    with pytest.raises(AttributeError):
        del model.note


def test_what_the_adapted_model_has_stays_its_own() -> None:
    """Invariant 149: also where the host has an attribute of the same name."""
    host = tiny.make("llama")
    host.path, host.active, host.require_memory = "host", "host", "host"
    model = attached(host)
    model.require_memory, model.active = True, []
    model.remark = "of neither"
    model._mark = "of a library"
    model.extra = nn.Linear(2, 3)
    assert (host.path, host.active, host.require_memory) == ("host", "host", "host")
    assert model.path == "model.layers"
    assert not any(hasattr(host, name) for name in ("remark", "_mark", "extra"))
    assert "extra" in model._modules and any(name.startswith("extra") for name in model.state_dict())
    del model.remark, model._mark, model.extra
    assert not hasattr(model, "remark")


def test_a_host_of_peft_has_them_where_they_are_read() -> None:
    """Invariant 149: on the model that peft has wrapped, which peft reads and does not set."""
    model = attached(lora())
    inner = model.host.get_base_model()
    inner.note = 1
    model.note = 2
    assert inner.note == model.note == 2 and "note" not in vars(model.host)
    del model.note
    assert not hasattr(inner, "note")


def test_a_host_of_diffusers() -> None:
    """Invariant 149."""
    unet = tiny_unets.make()
    unet.note = 1
    model = mmattn.attach(unet, mmattn.DecoupledAdapter(memory_dim=7))
    model.note = 2
    assert unet.note == 2 and model.unload() is unet and unet.note == 2
