"""`EncoderDecoder`: who sees what, with and without caches, in every position code; its files; what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import mmattn
from mmattn.errors import AdapterFileError, MaskError, ShapeError
from mmattn.seq2seq import EncoderDecoder
from mmattn.seq2seq.encoder_decoder import POSITIONS
from mmattn.storage.safetensors import read_tensors, write_tensors

V, D, H, LAYERS = 53, 42, 3, 2
START, END = 1, 2
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 0, 0, 0]])
TARGET = torch.tensor([[1, 21, 22, 23, 24], [1, 25, 26, 0, 0]])


def tiny(positions: str = "sinusoidal", **settings) -> EncoderDecoder:
    """A random model in float64 whose texts differ from source to source."""
    model = EncoderDecoder(V, D, H, LAYERS, positions=positions, max_length=19, **settings).double().eval()
    # Tied weights as they begin repeat the last token: let the blocks outweigh the embeddings.
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data *= 0.4 if "embedding" in name else 3
    return model


def logits(model: EncoderDecoder, source: Tensor, target: Tensor) -> Tensor:
    made = model(source, target, source_mask=source != 0, target_mask=target != 0)
    assert made.isfinite().all()
    return made


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_in_front_behind_or_none(positions: str) -> None:
    model = tiny(positions)
    after = logits(model, SOURCE, TARGET)
    front = logits(model, SOURCE.roll((3), 1).where(torch.tensor([[False], [True]]), SOURCE), TARGET)
    alone = model(SOURCE[1:, :4], TARGET[1:, :3])
    torch.testing.assert_close(front, after)
    torch.testing.assert_close(alone[0], after[1, :3])
    shifted = torch.tensor([[0, 0, 1, 25, 26]])
    torch.testing.assert_close(logits(model, SOURCE[1:, :4], shifted)[0, 2:], alone[0])


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_token_sees_the_source_and_what_is_before_it(positions: str) -> None:
    model = tiny(positions)
    made = logits(model, SOURCE, TARGET)
    later = TARGET.clone()
    later[0, 3] = 37
    changed = logits(model, SOURCE, later)
    assert torch.equal(changed[0, :3], made[0, :3]) and torch.equal(changed[1], made[1])
    assert (changed[0, 3] - made[0, 3]).abs().max() > 1e-3
    other = SOURCE.clone()
    other[0, 6], other[1, 5] = 38, 0
    assert (logits(model, other, TARGET)[0] - made[0]).abs().amax(1).min() > 1e-4
    swapped = SOURCE[:, [1, 0, 2, 3, 4, 5, 6]]
    assert (logits(model, swapped, TARGET) - made).abs().max() > 1e-4, "the order of the source counts"


@pytest.mark.parametrize("positions", POSITIONS)
def test_token_by_token_with_a_cache_as_at_once(positions: str) -> None:
    model = tiny(positions)
    memory = model.encode(SOURCE, SOURCE != 0)
    whole = model.decode(TARGET, memory)
    cache = DynamicCache()
    with torch.no_grad():
        prepared = model.prepare(memory)
        parts = [model.decode(TARGET[:, :2], prepared, cache=cache)]
        parts += [model.decode(TARGET[:, i : i + 1], prepared, cache=cache) for i in range(2, 5)]
    assert cache.get_seq_length() == 5 and whole.isfinite().all()
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("positions", POSITIONS)
def test_texts_are_the_same_with_and_without_a_cache_and_row_by_row(positions: str, beams: int) -> None:
    given = {"start": START, "end": END, "beams": beams, "max_length": 17}
    for _ in range(20):  # Of random models about one in ten repeats itself, or ends at once.
        model = tiny(positions)
        plain = model.generate(SOURCE, mask=SOURCE != 0, **given)
        if plain[0] != plain[1] and all(0 < len(text) <= 17 and END not in text for text in plain):
            break
    else:
        pytest.fail("no random model wrote two texts that differ")
    assert model.generate(SOURCE, mask=SOURCE != 0, cache=False, **given) == plain
    assert [model.generate(SOURCE[:1], **given)[0], model.generate(SOURCE[1:, :4], **given)[0]] == plain


def test_without_cross_attention_the_source_is_nothing() -> None:
    model = tiny(cross_attention=False)
    made = logits(model, SOURCE, TARGET)
    assert torch.equal(logits(model, SOURCE.flip(0), TARGET), made)
    assert not any(name.startswith("encoder") for name, _ in model.named_parameters()) and model.attentions() == {}
    texts = model.generate(SOURCE, start=START, end=END, beams=2, max_length=7)
    assert texts[0] == texts[1]


def test_one_matrix_or_two() -> None:
    shared, own = tiny(), tiny(target_vocab_size=31)
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (shared, own)]
    assert count[1] - count[0] == 31 * D
    assert own(SOURCE, TARGET).shape == (2, 5, 31)
    with pytest.raises(ShapeError, match=r"ids of the target must lie in 0…30.*got 0…40.*another tokenizer"):
        own(SOURCE, TARGET.clamp(max=23) + 17 * (TARGET == 23))


def test_every_weight_is_trained_also_after_an_evaluation() -> None:
    for positions in POSITIONS:
        model = tiny(positions, norm="post" if positions == "learned" else "pre")
        model.generate(SOURCE, start=START, end=END, max_length=3)
        logits(model.train(), SOURCE, TARGET).square().sum().backward()
        dead = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.abs().sum() > 0]
        assert dead == []


def test_where_it_looked_can_be_recorded() -> None:
    model = tiny()
    with mmattn.inspect.record(model) as weights:
        logits(model, SOURCE, TARGET)
    assert list(weights) == [("source", 0), ("source", 1)]
    (mean,) = weights.mean()
    assert mean.shape == (2, 5, 7) and mean[1, :, 4:].eq(0).all()
    torch.testing.assert_close(mean.sum(-1), torch.ones(2, 5, dtype=torch.float64))


def test_a_file_brings_back_the_same_model(tmp_path) -> None:
    model, path = tiny("learned", target_vocab_size=59), tmp_path / "model.safetensors"
    model.save(path)
    again = EncoderDecoder.load(path).eval()
    assert torch.equal(logits(again, SOURCE, TARGET), logits(model, SOURCE, TARGET))
    assert all(parameter.requires_grad for parameter in again.parameters())
    weights, metadata = read_tensors(path, "mmattn-seq2seq")
    for change in ({"dim": 44}, {"layers": 10**9}, {"dim": 10**9}, {"positions": "none"}, {"surprise": 1}):
        wrong = {"format": "mmattn-seq2seq", "settings": {**metadata["settings"], **change}}
        write_tensors(path, weights, wrong)
        with pytest.raises(AdapterFileError, match="weights are those of its settings"):
            EncoderDecoder.load(path)


@pytest.mark.parametrize(
    ("source", "given", "match"),
    [
        (SOURCE[:, :0], {}, r"the source is empty, \(2, 0\)"),
        (SOURCE[0], {}, r"source must be \(b, l\) ids"),
        (SOURCE.float(), {}, "int64 or int32; got .* torch.float32"),
        (SOURCE + 47, {}, r"ids of the source must lie in 0…52.*another tokenizer"),
        (SOURCE - 1, {}, r"got -1…14"),
        (SOURCE, {"mask": torch.zeros(2, 7, dtype=torch.bool)}, "row 0 of the source has no token"),
        (SOURCE, {"mask": torch.ones(2, 6, dtype=torch.bool)}, r"source_mask must be \(2, 7\), got \(2, 6\)"),
        (SOURCE.repeat(1, 3), {}, "has 21 tokens and there are 19 learned positions"),
        (SOURCE, {"max_length": 20}, "max_length may be 19"),
        (SOURCE, {"prefix": TARGET[:1]}, r"prefix must be \(b, n\) with b = 2"),
        (SOURCE, {"prefix": TARGET, "max_length": 4}, "at most max_length = 4"),
        (SOURCE, {"beams": 53}, "beams must be at most 52"),
        (SOURCE, {"start": 53}, "ids of the target must lie in"),
    ],
)
def test_what_generation_refuses(source: Tensor, given: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tiny("learned").generate(source, **{"start": START, "end": END, "max_length": 11, **given})


def test_what_a_call_refuses() -> None:
    model = tiny()
    with pytest.raises(ShapeError, match="as many rows, got 2 and 1"):
        model(SOURCE, TARGET[:1])
    with pytest.raises(ShapeError, match="the target is empty"):
        model(SOURCE, TARGET[:, :0])
    with pytest.raises(MaskError, match="from_huggingface"):
        model(SOURCE, TARGET, source_mask=(SOURCE != 0).long())
    cache, memory = DynamicCache(), model.encode(SOURCE)
    for wrong, match in (
        (model.prepare(memory)[:1], "K/V of 1 layers and 2 rows"),
        (mmattn.Memory(torch.randn(2, 7, D + 1)), "a memory of width 43"),
        (memory[[0, 1, 1]], "a target of 2 rows .* 3 rows"),
    ):
        with pytest.raises(ShapeError, match=match):
            model.decode(TARGET, wrong, cache=cache)
    assert cache.get_seq_length() == 0, "a rejected call changes nothing"
    assert model(SOURCE.repeat(1, 29), TARGET).isfinite().all(), "only learned positions end"
    assert model.generate(SOURCE[:0], start=START, end=END) == []
