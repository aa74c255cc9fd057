"""Every field of GenerationConfig and ContinuousBatchingConfig, with a memory: right, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.hosts.causal_lm.test_continuous_batching import gathered, one_by_one, prompts, settings, tokens

BATCHING: dict[str, tuple[Any, ...]] = {
    "page_size": (8,),
    "num_blocks": (5, 16),  # 5: requests are evicted and begin again
    "max_batch_tokens": (16,),
    "max_memory_percent": (0.01,),
    "max_requests_per_batch": (2,),
    "max_blocks_per_request": (0, 8),
    "allow_block_sharing": (True,),
    "use_async_batching": (False,),  # True is for accelerators, as cpu_offload_space is
    "use_cuda_graph": (True,),
    "q_padding_interval_size": (16,),
    "kv_padding_interval_size": (16,),
    "scheduler_type": ("prefill_first",),
    "safety_margin": (0.1,),
    "return_logprobs": (True,),
    "seed": (7,),
    "auto_switch_to_flash": (False,),
    "cpu_offload_space": (0.0,),
    "cpu_offload_space_safety_threshold": (0.1,),
    "max_queue_size": (2,),
    "per_request_processors": (True,),
    "drop_unsupported_processors": (False,),
    "disable_nccl_graph_mixing": (False,),
    "cpu_group_timeout": (None,),
    "max_cached_graphs": (3,),
    "block_size": (16,),
}
#: Settings by which a forward would be compiled, without the adapters.
COMPILED: dict[str, tuple[Any, ...]] = {
    "varlen_compile_config": (CompileConfig(), {"mode": "default"}),
    "decode_compile_config": (CompileConfig(),),
    "default_compile_level": (1, 2, 3),
    "use_default_compile_configs": (True,),
}

#: For `generate`: values of each field, some with the fields beside which they act.
GENERATION: dict[str, tuple[dict[str, Any], ...]] = {
    "max_length": ({"max_length": 13, "max_new_tokens": None},),
    "max_new_tokens": ({"max_new_tokens": 5},),
    "min_length": ({"min_length": 11},),
    "min_new_tokens": ({"min_new_tokens": 5},),
    "max_time": ({"max_time": 100.0},),
    "do_sample": ({"do_sample": True},),
    "num_beams": ({"num_beams": 3},),
    "early_stopping": ({"early_stopping": True, "num_beams": 3},),
    "length_penalty": ({"length_penalty": 2.0, "num_beams": 3},),
    "use_cache": ({"use_cache": False},),
    "cache_implementation": ({"cache_implementation": "static"}, {"cache_implementation": "dynamic"}),
    "max_cache_len": ({"max_cache_len": 64, "cache_implementation": "static"},),
    "temperature": ({"temperature": 0.5, "do_sample": True},),
    "top_k": ({"top_k": 3, "do_sample": True},),
    "top_p": ({"top_p": 0.7, "do_sample": True},),
    "min_p": ({"min_p": 0.1, "do_sample": True},),
    "top_h": ({"top_h": 0.5, "do_sample": True},),
    "typical_p": ({"typical_p": 0.5, "do_sample": True},),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.01, "do_sample": True},),
    "eta_cutoff": ({"eta_cutoff": 0.01, "do_sample": True},),
    "repetition_penalty": ({"repetition_penalty": 1.5},),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 1.5},),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2},),
    "bad_words_ids": ({"bad_words_ids": [[5]]},),
    "renormalize_logits": ({"renormalize_logits": True},),
    "forced_bos_token_id": ({"forced_bos_token_id": 4},),
    "forced_eos_token_id": ({"forced_eos_token_id": 4},),
    "remove_invalid_values": ({"remove_invalid_values": True},),
    "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 7},),
    "suppress_tokens": ({"suppress_tokens": [5, 6]},),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [5, 6]},),
    "sequence_bias": ({"sequence_bias": {(5,): 0.5}},),
    "guidance_scale": ({"guidance_scale": 1.7},),
    "watermarking_config": ({"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0}},),
    "num_return_sequences": (
        {"num_return_sequences": 2, "do_sample": True},
        {"num_return_sequences": 2, "num_beams": 3},
    ),
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True},),
    "output_hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True},),
    "output_scores": ({"output_scores": True, "return_dict_in_generate": True},),
    "output_logits": ({"output_logits": True, "return_dict_in_generate": True},),
    "return_dict_in_generate": ({"return_dict_in_generate": True},),
    "eos_token_id": ({"eos_token_id": 7},),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 2},),
    "max_matching_ngram_size": ({"max_matching_ngram_size": 2, "prompt_lookup_num_tokens": 2},),
    "assistant_early_exit": ({"assistant_early_exit": 2},),
    "num_assistant_tokens": ({"num_assistant_tokens": 3, "assistant_early_exit": 2},),
    "num_assistant_tokens_schedule": ({"num_assistant_tokens_schedule": "heuristic", "assistant_early_exit": 2},),
    "assistant_confidence_threshold": ({"assistant_confidence_threshold": 0.3, "assistant_early_exit": 2},),
    "prefill_chunk_size": ({"prefill_chunk_size": 3},),
    "compile_config": ({"compile_config": CompileConfig(), "cache_implementation": "static"},),
    "disable_compile": ({"disable_compile": True},),
    "low_memory": ({"low_memory": True},),
}
#: Fields that change no answer here: names of tokens, what needs a tokenizer, an assistant, a card, another package or
#: the network, and what transformers has given up.
NOT_HERE = {
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "encoder_no_repeat_ngram_size", "transformers_version"),
    *("stop_strings", "token_healing", "cache_config", "use_mtp", "speculation_type", "continuous_batching_config"),
    *("is_assistant", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("penalty_alpha", "dola_layers", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"),
}


def test_the_tables_name_every_field() -> None:
    """Invariant 147: a field that a later version of transformers adds fails here until it is looked at."""
    assert set(vars(ContinuousBatchingConfig())) <= {*BATCHING, *COMPILED}
    generation = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert generation <= {*GENERATION, *NOT_HERE}


@functools.cache
def batch() -> tuple[Any, list[list[int]], list[Any], list[list[int]]]:
    model, inputs = tiny.attach(tiny.make("llama")), prompts((4, 19, 2, 31))
    memories = [tiny.memory(1, m=3 + row, seed=row) for row in range(4)]
    return model, inputs, memories, one_by_one(model, inputs, memories)


def known_to(config: type, names: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Fields and values of a table that this version of transformers knows."""
    return [(name, value) for name, values in names.items() if name in vars(config()) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), known_to(ContinuousBatchingConfig, BATCHING), ids=str)
def test_each_setting_of_continuous_batching(name: str, value: Any) -> None:
    """Invariant 147."""
    model, inputs, memories, wanted = batch()
    assert tokens(model.generate_batch(inputs, memory=memories, **settings(**{name: value}))) == wanted


@pytest.mark.parametrize(("name", "value"), known_to(ContinuousBatchingConfig, COMPILED), ids=str)
def test_a_compiled_batch_is_refused(name: str, value: Any) -> None:
    """Invariant 147."""
    model, inputs, memories, _ = batch()
    with pytest.raises(ConditionError, match=f"would leave the adapters out: take .*{name}|default_compile_level"):
        model.generate_batch(inputs, memory=memories, **settings(**{name: value}))


def test_a_compiled_batch_is_refused_wherever_it_is_asked_for() -> None:
    """Invariant 147: the settings that a ContinuousBatchingConfig falls back on."""
    model, inputs, memories, _ = batch()
    given = settings()
    given["generation_config"].compile_config = CompileConfig()
    with pytest.raises(ConditionError, match=r"take GenerationConfig\.compile_config out"):
        model.generate_batch(inputs, memory=memories, **given)
    given = settings()
    given["generation_config"].continuous_batching_config = ContinuousBatchingConfig(default_compile_level=1)
    with pytest.raises(ConditionError, match="default_compile_level"):
        model.generate_batch(inputs, memory=memories, generation_config=given["generation_config"])
    model.host.config.compile_config = CompileConfig()
    try:
        with pytest.raises(ConditionError, match=r"take LlamaConfig\.compile_config out"):
            model.generate_batch(inputs, memory=memories, **settings())
    finally:
        del model.host.config.compile_config


def test_settings_inside_a_generation_config_are_read() -> None:
    """Invariant 147."""
    model, inputs, memories, wanted = batch()
    both = settings(return_logprobs=True)
    given = both["generation_config"]
    given.continuous_batching_config = both["continuous_batching_config"]
    answers = model.generate_batch(inputs[:1], memory=memories[:1], generation_config=given)
    assert tokens(answers) == wanted[:1]
    assert all(len(one.logprobs) == len(one.generated_tokens) for one in answers.values())


@pytest.mark.usefixtures("quiet")
def test_a_manager_that_is_kept_gives_each_prompt_its_memory() -> None:
    """Invariant 147: transformers sorts the prompts where they may share a cache; some of them are one object."""
    model, inputs, memories, wanted = batch()
    manager = model.host.init_continuous_batching(**settings())
    manager.memories.share_prompts()
    manager.start()
    try:
        name = manager.add_request(inputs[0], memory=memories[0])
        assert gathered(manager, 1) == {name: wanted[0]}
        manager.stop(block=True, keep_for_next_session=True)
        asked = [inputs[1], inputs[0], inputs[3], inputs[0]]
        given = [memories[1], memories[0], memories[3], memories[2]]
        expected = [wanted[1], wanted[0], wanted[3], *one_by_one(model, inputs[:1], memories[2:3])]
        found = model.generate_batch(asked, memory=given, persistent_manager=True, **settings())
        assert tokens(found) == expected
    finally:
        model.host.destroy_cached_continuous_batching_manager()


@pytest.mark.usefixtures("quiet")
def test_a_manager_of_the_bare_host_is_refused() -> None:
    """Invariant 147: it holds keys and values that were read without a memory."""
    host, inputs, memory = tiny.make("llama"), prompts((37,)), [tiny.memory(1)]
    host.generate_batch(inputs, persistent_manager=True, **settings())
    model = tiny.attach(host)
    with pytest.raises(ConditionError, match="was made without these adapters"):
        model.generate_batch(inputs, memory=memory, **settings())
    host.destroy_cached_continuous_batching_manager()
    assert tokens(model.generate_batch(inputs, memory=memory, **settings())) == one_by_one(model, inputs, memory)


@functools.cache
def constant_change() -> tuple[Any, mmattn.Memory, nn.Module]:
    """A model whose adapter adds a constant, its memory of one slot, and a host whose layers add the same."""
    adapter = mmattn.GatedAdapter(memory_dim=13, layers=(0, 2), num_heads=2, head_dim=8, feed_forward=0)
    model, twin = tiny.open_gates(mmattn.attach(tiny.make("llama"), adapter)), tiny.make("llama")
    memory, layers = tiny.memory(1, m=1), tiny.decoder_layers(twin)
    for index in (0, 2):
        added: list[Tensor] = []
        block = model.adapter("default").block(index)
        handle = block.register_forward_hook(lambda block, args, out, added=added: added.append(out - args[0]))
        with torch.no_grad():
            model(tiny.text(1, 1), memory=memory)
        handle.remove()
        layers[index].register_forward_hook(lambda layer, args, out, added=added: out + added[0][0, 0])
    return model, memory, twin


@pytest.mark.parametrize(("name", "fields"), known_to(GenerationConfig, GENERATION), ids=str)
def test_each_setting_of_generate(name: str, fields: dict[str, Any]) -> None:
    """Invariant 147: against a host without us that adds to its layers what the adapter adds."""
    model, memory, twin = constant_change()
    config = GenerationConfig(**{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | fields)
    ids = tiny.text(1)
    answers = []
    for asked, given in ((twin, {}), (model, {"memory": memory}), (model, {})):
        torch.manual_seed(0)
        out = asked.generate(ids, generation_config=config, **given)
        answers.append(out if isinstance(out, Tensor) else out.sequences)
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])
