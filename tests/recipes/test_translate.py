"""The translation recipe: pairs that do not leak, dates of the CLDR, words and looks, and a run from end to end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmattn import inspect
from mmattn.errors import ConfigError, TextError

pytest.importorskip("sacrebleu", reason="needs the extra `translate`")
RECIPE = "translate"


def test_what_is_held_out_stands_in_no_training(recipe: SimpleNamespace) -> None:
    pairs = [recipe.data.Pair(f"word {i}.", f"mot {j} !") for i in range(40) for j in (i, i + 1)]
    pairs += [recipe.data.Pair(f"Word {i}", f"parole {i}") for i in range(40)]
    train, held = recipe.data.split(pairs, 7, seed=3)
    plain = recipe.data.plain
    assert len({plain(question.source) for question in held}) == 7 and len(held) == 14
    held_texts = {plain(text) for one in held for text in (one.source, *one.references)}
    assert not any({plain(pair.source), plain(pair.target)} & held_texts for pair in train)
    assert {len(question.references) for question in held} == {1, 2}
    assert len(train) >= 3 * 40 - 7 * 5
    assert recipe.data.split(pairs, 7, seed=3) == (train, held) != recipe.data.split(pairs, 7, seed=4)
    with pytest.raises(ConfigError, match="data.held_out=40 of 40 different sources leave nothing"):
        recipe.data.split(pairs, 40, seed=3)


def test_a_file_of_pairs(recipe: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("Go.\tVa !\tby someone\n\nGo.\tVa\u202f!\nRun!\tCours\u00a0!\n", encoding="utf-8")
    found = [(pair.source, pair.target) for pair in recipe.data.read_pairs(file)]
    assert found == [("Go.", "Va !"), ("Run!", "Cours !")]
    for text, match in (("Go.\tVa !\nRun!\n", "line 2: a source, a tab"), ("Go.\t \n", "line 1"), ("\tVa !", "line 1")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=match):
            recipe.data.read_pairs(file)
    file.write_text("Go.\tVa !\n", encoding="utf-8-sig")
    assert [pair.source for pair in recipe.data.read_pairs(file)] == ["Go."], "without the byte-order mark"
    file.write_bytes("Go.\tÇa".encode("latin-1"))
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        recipe.data.read_pairs(file)
    with pytest.raises(ConfigError, match="there is no file"):
        recipe.data.read_pairs(tmp_path / "nothing.tsv")


def test_dates_are_those_of_the_cldr(recipe: SimpleNamespace) -> None:
    made = recipe.dates.write_pairs(300, ("fr", "de"), seed=5)
    assert len(dict(made)) == 300 == len(made) and made == recipe.dates.write_pairs(300, ("fr", "de"), seed=5)
    assert {source[:4] for source, _ in made} == {"fr: ", "de: "}
    assert not any({"\u00a0", "\u202f"} & {*source, *target} for source, target in made)
    months = ("janvier", "mars", "juillet")
    assert any(month in target for source, target in made if source.startswith("fr") for month in months)
    for wrong in ("xx", "en", "not a language"):
        with pytest.raises(ConfigError, match="to translate into"):
            recipe.dates.write_pairs(3, (wrong,), seed=5)


def test_words_and_their_alignment(recipe: SimpleNamespace) -> None:
    tokenizer = recipe.data.train_tokenizer([recipe.data.Pair("I see the man.", "Je vois l'homme.")], 300)
    ids, source, target = recipe.data.encode_sources(tokenizer, ["Je vois l'homme, ça va ?", "I see", "Je vois"])
    words = recipe.writing.split_words(tokenizer, ids)
    assert [word for word, _ in words] == ["Je", "vois", "l'", "homme", ",", "ça", "va", "?"]
    assert [place for _, places in words for place in places] == list(range(len(ids)))
    both = [recipe.writing.split_words(tokenizer, ids) for ids in (source, target)]
    spans, first = [len(places) for _, places in both[0]], len(both[1][0][1])
    # Tokens of "Je" are predicted from "I", later ones from "see".
    weights = torch.zeros(1 + len(target), len(source))
    weights[:first, : spans[0]] = 1 / spans[0]
    weights[first:, spans[0] :] = 1 / spans[1]
    aligned = recipe.writing.align(*both, torch.stack([weights, 0 * weights]))
    torch.testing.assert_close(aligned, torch.stack([torch.eye(2), torch.zeros(2, 2)]))
    trace = inspect.Trace(["Je", "vois"], ["I", "see"], aligned[None, :1], ["layer 0"])
    assert recipe.writing.align_text(trace) == "Je→I vois→see"


def test_several_references_count(recipe: SimpleNamespace) -> None:
    question = recipe.data.HeldOut
    questions = [question("Go.", ("Va !", "Allez-y donc maintenant, les amis.")), question("Run!", ("Cours !",))]
    best = recipe.train.score(questions, ["Allez-y donc maintenant, les amis.", "Cours !"])
    assert best["exact"] == 1 and best["chrf"] == pytest.approx(100) and best["bleu"] == pytest.approx(100)
    half = recipe.train.score(questions, ["Va !", "Reste ici."])
    assert half["exact"] == 0.5 and 0 < half["chrf"] < 80


@pytest.mark.slow
def test_a_finished_run_translates_and_draws(recipe: SimpleNamespace, run: Path, tmp_path: Path) -> None:
    translator = recipe.writing.Translator.load(run)
    texts = ["fr: 12 thousand", "de: 3 kilometers", "fr: </s> <pad>"]
    assert [translator([text])[0] for text in texts] == translator(texts)
    assert (run / "alignment.png").read_bytes().startswith(b"\x89PNG")
    for text, match in (("  ", "is empty"), (None, "must be a string"), ("word " * 90, "at most 60 fit")):
        with pytest.raises(TextError, match=match):
            translator([text])
    with pytest.raises(ConfigError, match="not the folder of a finished run"):
        recipe.writing.Translator.load(tmp_path)


@pytest.mark.slow
@torch.no_grad()
def test_traces_have_weights_and_the_effect_of_each_word(recipe: SimpleNamespace, run: Path) -> None:
    translator = recipe.writing.Translator.load(run, recipe.settings.WritingSettings(beams=3, batch=5))
    traces = inspect.load_traces(run)
    assert 0 < len(traces) <= 2
    for trace in traces:
        source, written = trace.title.split(" → ", 1)
        assert [written] == translator([source]) and trace.weights.shape[:2] == (1, 2)
        assert torch.allclose(trace.weights.sum(-1), torch.ones(()), atol=1e-4), "the weights of a word sum to 1"
    # The probability of each token, one after the other; of few, or that of a word would be 0 in float32.
    short = recipe.writing.Translator(translator.model, translator.tokenizer, translator.settings, 9)
    (ids,) = recipe.data.encode_sources(short.tokenizer, ["fr: 7"])
    (target,) = short.write([ids])
    prefix, chances = [short.tokenizer.bos_token_id], []
    for token in target:
        given = {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([prefix])}
        chances.append(short.model(**given).logits[0, -1].softmax(-1)[token])
        prefix.append(token)
    spans = [places for _, places in recipe.writing.split_words(short.tokenizer, target)]
    want = torch.stack([torch.stack(chances)[places].prod() for places in spans])
    assert want.isfinite().all() and (want > 0).all()
    trace = short.trace("fr: 7")
    torch.testing.assert_close(trace.probability, want, rtol=1e-3, atol=0)
    for other in (trace.without, *trace.dropped.T):
        assert ((other / want - 1).abs() > 1e-3).any()
    alone = short.trace("7")
    assert alone.sources == ("7",) and len(alone.words)
    torch.testing.assert_close(alone.dropped[:, 0], alone.without, rtol=1e-5, atol=0)


def tiny(recipe: SimpleNamespace, positions: str = "rotary", **settings) -> torch.nn.Module:
    """A random model in float64 whose texts differ from source to source."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"dim": 42, "num_heads": 3, "layers": 2, "max_positions": 19}
    config = recipe.model.TranslationConfig(53, **sizes, positions=positions, **tokens, **settings)
    model = recipe.model.TranslationModel(config).double().eval()
    # Tied weights as they begin repeat the last token: let the blocks outweigh the embeddings.
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data *= 0.4 if "embedding" in name else 3
    return model


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi"])
def test_tokens_see_the_source_and_earlier_tokens(recipe: SimpleNamespace, positions: str, beams: int) -> None:
    model = tiny(recipe, positions)
    source, target = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 0, 0, 0]]), torch.randint(3, 53, (2, 5))
    mask = (source != 0).long()
    logits = model(source, mask, target).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(model(source[1:, :4], None, target[1:]).logits, logits[1:])
    later = target.clone()
    later[:, 3] = (target[:, 3] + 1) % 53
    changed = model(source, mask, later).logits
    assert torch.equal(changed[:, :3], logits[:, :3]) and (changed[:, 3] - logits[:, 3]).abs().max() > 1e-3
    swapped = model(source[:, [1, 0, 2, 3, 4, 5, 6]], mask, target).logits
    assert (swapped - logits).abs().amax((1, 2)).min() > 1e-4, "the order of the source counts"
    given = {"num_beams": beams, "max_new_tokens": 11, "do_sample": False}
    texts = model.generate(source, attention_mask=mask, **given)
    assert torch.equal(model.generate(source, attention_mask=mask, use_cache=False, **given), texts)


def test_without_cross_attention_the_source_changes_nothing(recipe: SimpleNamespace, tmp_path: Path) -> None:
    model = tiny(recipe, cross_attention=False)
    source, target = torch.randint(3, 53, (2, 7)), torch.randint(3, 53, (2, 5))
    assert torch.equal(model(source, None, target).logits, model(source.flip(0), None, target).logits)
    assert not any(name.startswith("encoder") for name, _ in model.named_parameters()) and model.attentions() == {}
    model.save_pretrained(tmp_path)
    again = recipe.model.TranslationModel.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(source, None, target).logits, model(source, None, target).logits)


def test_the_real_pairs_do_not_leak(recipe: SimpleNamespace, shared_data: Path) -> None:
    train, held = recipe.data.split(recipe.data.read_pairs(shared_data / "eng-fra.tsv"), 500, seed=0)
    plain = recipe.data.plain
    seen = {plain(pair.source) for pair in train} | {plain(pair.target) for pair in train}
    assert len(held) >= 500 and len(train) > 14_000
    assert not any(plain(text) in seen for one in held for text in (one.source, *one.references))
