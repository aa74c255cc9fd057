"""A translator from scratch: encoder and decoder with cross-attention, its controls, and their translations.

    mmattn train config.yaml                       # dates and numbers of the CLDR
    mmattn train config_pairs.yaml data.pairs=…    # sentence pairs

Every row of the table is trained on the same pairs in the same order for the same number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import DataCollatorForSeq2Seq, Trainer, set_seed

from mmattn import inspect, training
from mmattn.errors import import_extra

from .data import HeldOut, encode_pairs, load_pairs, train_tokenizer
from .model import TranslationConfig, TranslationModel
from .settings import Config
from .writing import Translator, align_text, draw_alignments

CODES = ("sinusoidal", "learned", "rotary", "alibi")
NO_SOURCE = "no cross-attention"
COLUMNS = {
    "exact": ("exactly right", 100, ".1f", " %"),
    "chrf": ("chrF", 1, ".1f", ""),
    "bleu": ("BLEU", 1, ".1f", ""),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds of training", 1, ".0f", ""),
}


def main(settings: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    config = Config(**settings)
    for module, extra in (("matplotlib", "viz"), ("sacrebleu", "translate")):
        import_extra(module, extra)  # fail now rather than after the last step
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path

    # Data.
    pairs, held_out = load_pairs(config.data, config.seed)
    tokenizer = train_tokenizer(pairs, config.data.vocabulary)
    pairs = encode_pairs(tokenizer, pairs, config.data.max_tokens)
    lengths = map(len, training.encode_texts(tokenizer, [one.source for one in held_out]))
    held_out = [one for one, length in zip(held_out, lengths, strict=True) if length <= config.data.max_tokens]
    print(f"{len(pairs)} pairs to train on, {len(held_out)} held-out sentences, {len(tokenizer)} tokens")

    # Model and training.
    name = config.model.positions
    translator, costs = train(config, tokenizer, pairs, name, run)
    translator.save(run.path / "model")

    # Measuring: the right source, another's source; then the other codes, and a decoder without a source.
    sources = [one.source for one in held_out]
    texts = translator(sources)
    rows = [{"name": name, **score(held_out, texts), **costs}]
    rows.append({"name": f"{name}, another's source", **score(held_out, translator(sources[1:] + sources[:1]))})
    lines = [
        {"source": one.source, "written": text, "references": one.references}
        for one, text in zip(held_out, texts, strict=True)
    ]
    run.write_json("translations.json", lines)
    right = [one.source for one, text in zip(held_out, texts, strict=True) if text in one.references]
    save_alignments(config, run, translator, right or sources)
    for control in [*(code for code in CODES if code != name), NO_SOURCE] if config.controls else []:
        other, costs = train(config, tokenizer, pairs, control, run)
        rows.append({"name": control, **score(held_out, other(sources)), **costs})
    content = {"seed": config.seed, "pairs": len(pairs), "held_out": len(held_out), "steps": config.optim.max_steps}
    content |= {"rows": rows}
    run.finish(content, table)
    return run.path


def train(
    config: Config, tokenizer: Any, rows: list[dict[str, list[int]]], name: str, run: training.RunFolder
) -> tuple[Translator, dict[str, float]]:
    """Train a model with a position code, or `NO_SOURCE`; return it with its seconds and parameters."""
    set_seed(config.seed)
    settings = config.model.model_dump()
    if name != NO_SOURCE:
        settings["positions"] = name
    model = TranslationModel(
        TranslationConfig(
            len(tokenizer),
            **settings,
            max_positions=config.data.max_tokens,
            cross_attention=name != NO_SOURCE,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.bos_token_id,
        )
    )
    arguments = config.optim.arguments(config, train_sampling_strategy="group_by_length")
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer, model), rows)
    costs = {"seconds": run.train(trainer, name, config.progress), "parameters": model.num_parameters()}
    return Translator(model.eval(), tokenizer, config.writing, config.data.max_tokens), costs


def score(held_out: Sequence[HeldOut], texts: Sequence[str]) -> dict[str, float]:
    """Return the share of translations that are a reference letter for letter, chrF and BLEU over all references."""
    exact = sum(text in one.references for one, text in zip(held_out, texts, strict=True))
    sacrebleu, texts = import_extra("sacrebleu", "translate"), list(texts)
    references = list(zip_longest(*(one.references for one in held_out)))  # the first of each sentence, the second, …
    scores = {"chrf": sacrebleu.corpus_chrf(texts, references), "bleu": sacrebleu.corpus_bleu(texts, references)}
    return {"exact": exact / len(held_out), **{name: float(value.score) for name, value in scores.items()}}


def save_alignments(config: Config, run: training.RunFolder, translator: Translator, sources: list[str]) -> None:
    """Save the attention of the translations of short sources as a picture, as text, and for `mmattn explore`."""
    short = [source for source in sources if 3 <= len(source.split()) <= 6]
    texts = dict.fromkeys((short or sources)[: config.alignment.sentences])
    traces = [translator.trace(source) for source, text in zip(texts, translator([*texts]), strict=True) if text]
    run.write_text("alignment.txt", "\n".join(map(align_text, traces)))
    if traces:
        draw_alignments(traces, run.path / "alignment.png")
        inspect.save_traces(traces, run.path)


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`."""
    runs = [[{"seconds": None, "parameters": None, **row} for row in one["rows"]] for one in contents]
    first = contents[0]
    lines = [training.spread_table("", COLUMNS, runs), ""]
    lines.append(f"{first['pairs']:,} pairs, {first['held_out']:,} held-out sentences, {first['steps']:,} steps.")
    return "\n".join(lines)
