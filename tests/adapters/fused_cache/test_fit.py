"""Caches carried over in closed form: keys and values of a prompt are those of a linear map from another model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import mmattn
from mmattn.adapters import FusedCacheAdapter
from mmattn.adapters.composed.augmenting_model import retokenize
from mmattn.errors import ConditionError, ConfigError, ShapeError
from mmattn.hosts.model import AdaptedModel
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, answer, distance

#: A family, and what its map is fitted from: another seed, so that nothing but the map can make them alike.
FAMILIES = ("llama", "gpt2", "mistral", "qwen3", "gemma3_text")
NEW = 5
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regressions of fewer features than tokens."""
    monkeypatch.setattr("mmattn.adapters.fused_cache.fusers.FEATURES", 211)


def fitted(family: str = "llama", source: Any = None, prompts: int = 97, **settings: Any) -> tuple[Any, Any]:
    """A tiny host with the map from another model's cache, and that model."""
    other = mmattn.AugmentingModel(tiny.make("llama", seed=11) if source is None else source)
    model = mmattn.attach(tiny.make(family), FusedCacheAdapter(other.cache_dim, fuser="ridge", **settings))
    model.adapter("default").fit(model, other, tiny.text(prompts, 13, seed=1), min_cosine=-1.0)
    return model, other


def turned(family: str) -> Any:
    """The same model with keys and values of each head multiplied by a matrix, and queries so that scores stay."""
    lm, generator = tiny.make(family), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in tiny.decoder_layers(lm):
            attention = layer.self_attn
            weight = attention.v_proj.weight
            heads, width = attention.config.num_key_value_heads, attention.head_dim
            repeated = attention.config.num_attention_heads // heads
            mix = torch.linalg.qr(torch.randn(heads, width, width, generator=generator))[0] * 1.7
            weight.copy_(torch.einsum("gij,gjd->gid", mix, weight.view(heads, width, -1)).flatten(0, 1))
            back = torch.linalg.inv(mix).repeat_interleave(repeated, 0)
            out = attention.o_proj.weight
            out.copy_(torch.einsum("dgi,gij->dgj", out.view(len(out), -1, width), back).flatten(1))
            # Rotations by position commute with a scale of keys.
            attention.k_proj.weight.mul_(0.3)
            attention.q_proj.weight.div_(0.3)
    return lm


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_linear_map_is_recovered(family: str) -> None:
    """From a model whose heads are mixed by matrices the host's own answers come back; from its plain twin, too."""
    ids, mask = tiny.text(3, 17), torch.ones(3, 17, dtype=torch.long)
    mask[1, 9:] = 0
    for source in (turned(family), tiny.make(family)):
        model, other = fitted(family, source)
        assert model.adapter("default").fit(model, other, tiny.text(97, 13, seed=1)) > 0.999
        own = answer(model, ids, attention_mask=mask)
        result = answer(model, ids, attention_mask=mask, memory=other.prefill(ids[:, :9]))
        assert torch.isfinite(result).all()
        assert distance(result[mask.bool()], own[mask.bool()]) < 1e-3
    wrong = replace(other.prefill(ids[:, :9]), states=other.prefill(tiny.text(3, 9, seed=7)).states)
    assert distance(answer(model, ids, memory=wrong), own) > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_reads_no_prompt(family: str) -> None:
    """Only the last token of a prompt and what follows go through the host, and forwards of the whole text agree."""
    model, other = fitted(family)
    ids, mask = tiny.left_padded([tiny.text(1, length, seed=length)[0] for length in (13, 9)])
    memory = other.prefill(ids[:, :11], mask[:, :11])
    widths: list[int] = []
    with tiny.decoder_layers(model.host)[0].register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    ):
        text = model.generate(ids, attention_mask=mask, memory=memory, **GREEDY)
    assert widths == [3, *[1] * (NEW - 1)]
    for end in range(13, 13 + NEW):
        seen = torch.cat([mask, torch.ones(2, end - 13, dtype=torch.long)], 1)
        places = {"position_ids": (seen.cumsum(1) - 1).clamp(min=0)}
        logits = answer(model, text[:, :end], attention_mask=seen, memory=memory, **places)
        assert torch.equal(logits[:, -1].argmax(-1), text[:, end])
    alone = model.generate(ids[1:, 4:], memory=other.prefill(ids[1:, 4:11]), **GREEDY)
    assert torch.equal(text[1:, 4:], alone)
    bare, mapped = (answer(model, ids, attention_mask=mask, memory=one) for one in (None, memory))
    assert distance(bare, mapped) > 1e-2


@pytest.mark.parametrize("way", [way for way in tiny.WAYS if way not in ("greedy", "beams")])
def test_ways_to_generate(way: str) -> None:
    """Each way writes what is written greedily, whether the host reads the prompt in it or not."""
    model, other = fitted()
    ids = tiny.text(1, 13)
    memory = other.prefill(ids)
    expected = model.generate(ids, memory=memory, **GREEDY)
    assert torch.equal(model.generate(ids, memory=memory, **GREEDY, **tiny.WAYS[way]), expected)


def test_beams_and_prompts_that_end_apart() -> None:
    """Beams share a prompt's map; prompts may end at other columns, after which the host reads the longer ones."""
    model, other = fitted()
    ids = tiny.text(2, 13)
    mask = (torch.arange(11) < torch.tensor([[11], [7]])).long()
    memory = other.prefill(ids[:, :11], mask)
    for way in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        read = model.generate(ids, memory=memory, use_cache=False, **GREEDY, **way)
        assert torch.equal(model.generate(ids, memory=memory, **GREEDY, **way), read)
    outputs = model.generate(ids, memory=memory, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    assert outputs.hidden_states[0][0].shape[1] == 13


def test_a_share_of_the_map_and_none() -> None:
    """A new adapter, one that is switched off and scale 0 are the host bit for bit; between, the host reads all."""
    model, other = fitted()
    ids = tiny.text(2, 13)
    memory, own = other.prefill(ids[:, :11]), answer(model, ids)
    whole = answer(model, ids, memory=memory)
    assert torch.equal(answer(model, ids, memory=memory, adapter_scale=0.0), own)
    with model.disable_adapter():
        assert torch.equal(answer(model, ids, memory=memory), own)
    half = answer(model, ids, memory=memory, adapter_scale=0.5)
    assert distance(half, own) > 100 * CLOSE and distance(half, whole) > 100 * CLOSE
    text = model.generate(ids, memory=memory, adapter_scale=0.5, **GREEDY)
    assert torch.equal(text[:, 13], half[:, -1].argmax(-1))
    fresh = mmattn.attach(tiny.make("llama"), FusedCacheAdapter(other.cache_dim, fuser="ridge"))
    assert torch.equal(answer(fresh, ids, memory=memory), own)
    assert torch.equal(fresh.generate(ids, memory=memory, **GREEDY), fresh.generate(ids, **GREEDY))


def test_layers() -> None:
    """The layers that tell most are chosen; those that are named are read; of some host layers only, it reads all."""
    model, _ = fitted("llama", tiny.make("llama"))
    assert [model.adapter("default").sources(layer)[0] for layer in range(tiny.LAYERS)] == [0, 1, 2]
    model, other = fitted(layers=(0, 2), augmenting_layers=(2, 1))
    assert [model.adapter("default").sources(layer) for layer in (0, 2)] == [[2], [1]]
    ids = tiny.text(2, 13)
    text = model.generate(ids, memory=other.prefill(ids), **GREEDY)
    assert torch.equal(text[:, 13], answer(model, ids, memory=other.prefill(ids))[:, -1].argmax(-1))


def test_prompts_without_tokens_to_measure_are_refused() -> None:
    """Invariant 167: prompts of one token, held-out ones of one token, or padding alone; the adapter is as before."""
    model, other = fitted()
    adapter, ids, full = model.adapter("default"), tiny.text(23, 7), torch.ones(23, 7, dtype=torch.long)
    before = {name: one.clone() for name, one in adapter.state_dict().items()}
    short, held = full.clone(), torch.zeros_like(full)
    short[7::8, 1:], held[7::8] = 0, 1
    for prompts, mask in ((ids[:, :1], None), (ids, short), (ids, held), (ids, held * 0), (ids[:, :0], None)):
        with pytest.raises(ShapeError, match="every eighth prompt, on all tokens but the last"):
            adapter.fit(model, other, prompts, mask, min_cosine=-1)
    for prompts, mask in ((ids[0], None), (ids, full[:, :5])):
        with pytest.raises(ShapeError, match=r"must be \(n, p\)"):
            adapter.fit(model, other, prompts, mask)
    assert all(torch.equal(one, before[name]) for name, one in adapter.state_dict().items())
    short[15], full[3] = 1, 0
    assert -1 <= adapter.fit(model, other, ids, short * full, min_cosine=-1) <= 1, "one of several tokens is enough"


def test_what_is_refused() -> None:
    """A pair below the gate leaves the adapter as it was; so do a network, another model, too few prompts."""
    model, other = fitted()
    adapter, ids = model.adapter("default"), tiny.text(97, 13, seed=1)
    before = {name: one.clone() for name, one in adapter.state_dict().items()}
    with pytest.raises(ConditionError, match="cosine"):
        adapter.fit(model, other, tiny.text(97, 7, seed=2), min_cosine=0.999)
    assert all(torch.equal(one, before[name]) for name, one in adapter.state_dict().items())
    with pytest.raises(ShapeError, match="every eighth"):
        adapter.fit(model, other, ids[:7])
    with pytest.raises(ConfigError, match="attached"):
        adapter.fit(fitted()[0], other, ids)
    with pytest.raises(ShapeError, match="memory_dim"):
        adapter.fit(model, mmattn.AugmentingModel(tiny.make("gpt2")), ids)
    network = mmattn.attach(tiny.make("llama"), FusedCacheAdapter(other.cache_dim))
    with pytest.raises(ConfigError, match="ridge"):
        network.adapter("default").fit(network, other, ids)
    with pytest.raises(ConfigError, match="network"):
        FusedCacheAdapter(24, fuser="ridge", gate="head")
    model.add_adapter("second", FusedCacheAdapter(other.cache_dim, fuser="ridge"))
    model.adapter("second").fit(model, other, ids, min_cosine=-1.0)
    model.set_adapter(["default", "second"])
    with pytest.raises(ConditionError, match="replaces"):
        model(ids, memory=dict.fromkeys(("default", "second"), other.prefill(ids)))


# Two tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer(pattern: str, words: str) -> PreTrainedTokenizerFast:
    """A fast tokenizer whose tokens are what a pattern matches."""
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(words.split())}, unk_token="?"))
    inner.pre_tokenizer = Split(Regex(pattern), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", clean_up_tokenization_spaces=False)


LETTERS = tokenizer(".", "? a b c d")
PAIRS = tokenizer("..", "? " + " ".join(a + b for a in "abcd" for b in "abcd"))


def test_spans() -> None:
    """A token gets the mean of those that share its characters; padding gets none."""
    ids = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 1]])
    real = torch.tensor([[False, True, True, True, True], [True] * 5])
    new, new_real, shares = retokenize(ids, real, LETTERS, PAIRS)
    assert new[:, :2].tolist() == [[2, 12], [2, 12]] and new_real.tolist() == [[True, True, False], [True] * 3]
    assert shares[0, 1:, :2].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]] and not shares[0, 0].any()
    pairs = torch.tensor([[2, 12]])
    _, _, shares = retokenize(pairs, torch.ones_like(pairs).bool(), PAIRS, LETTERS)
    assert shares[0].tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]


def test_another_tokenizer() -> None:
    """A model of another vocabulary and tokenizer reads the text of a prompt; its cache becomes that of the host."""
    host, lm = tiny.make("llama"), tiny.make("llama", seed=7, vocab_size=17)
    other = mmattn.AugmentingModel(lm, (LETTERS, PAIRS))
    model = mmattn.attach(host, FusedCacheAdapter(other.cache_dim, fuser="ridge"))
    ids: Tensor = torch.tensor([1, 2, 3, 4])[tiny.text(97, 12, seed=3) % 4]
    mask = torch.ones_like(ids)
    mask[::2, :3] = 0
    adapter = model.adapter("default")
    adapter.fit(model, other, ids, mask, min_cosine=-1.0)
    memory = other.prefill(ids[:2], mask[:2])
    states = mmattn.AugmentingModel(lm).prefill(retokenize(ids[1:2], mask[1:2].bool(), LETTERS, PAIRS)[0]).states[1]
    assert distance(memory.states[1][1], states[0].repeat_interleave(2, 0)) <= CLOSE
    text = model.generate(ids[:2], attention_mask=mask[:2], memory=memory, **GREEDY)
    alone = model.generate(ids[:1, 3:], memory=other.prefill(ids[:1, 3:]), **GREEDY)
    assert torch.equal(text[:1, 3:], alone)
    with pytest.raises(ConditionError, match="tokenize the text anew"):
        other.prefill(torch.tensor([[1, 99]]))
    with pytest.raises(ConfigError, match="fast"):
        mmattn.AugmentingModel(lm, (LETTERS, object()))
    composed = mmattn.attach(tiny.make("llama"), mmattn.ComposedAdapter(32, layers=[1]))
    with pytest.raises(ShapeError, match="one tokenizer"):
        composed(ids, memory=mmattn.AugmentingModel(tiny.make("llama", seed=3), (LETTERS, PAIRS)))
    assert isinstance(model, AdaptedModel)
