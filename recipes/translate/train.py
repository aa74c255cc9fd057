"""A translator from nothing: encoder and decoder with cross-attention, its controls, and their translations.

    mmattn train config.yaml                       # dates and numbers of the CLDR
    mmattn train config_pairs.yaml data.pairs=…    # sentence pairs

Every row of the table is trained on the same pairs in the same order for the same number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mmattn
from mmattn import inspect, training
from mmattn.errors import import_extra
from mmattn.evaluation import text_scores

from .data import Batches, HeldOut, load_pairs, pad_rows, train_tokenizer
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
    device = training.make_accelerator(device=config.device).device

    # Data.
    pairs, held_out = load_pairs(config.data, config.seed)
    tokenizer = train_tokenizer(pairs, config.data.vocabulary)
    batches = Batches.of(tokenizer, pairs, config.data.max_tokens, config.optim.batch_size, config.seed)
    lengths = map(len, training.encode_texts(tokenizer, [one.source for one in held_out]))
    held_out = [one for one, length in zip(held_out, lengths, strict=True) if length <= config.data.max_tokens]
    print(f"{len(batches)} pairs to train on, {len(held_out)} held-out sentences, {len(tokenizer)} tokens")

    # Model and training.
    name = config.model.positions
    translator, costs = train(config, tokenizer, batches, name, run, device)
    translator.model.save(run.path / "model.safetensors")
    tokenizer.save_pretrained(run.path / "tokenizer")

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
        other, costs = train(config, tokenizer, batches, control, run, device)
        rows.append({"name": control, **score(held_out, other(sources)), **costs})
    content = {"seed": config.seed, "pairs": len(batches), "held_out": len(held_out), "steps": config.optim.max_steps}
    content |= {"rows": rows}
    run.finish(content, table)
    return run.path


def train(
    config: Config, tokenizer: Any, batches: Batches, name: str, run: training.RunFolder, device: torch.device
) -> tuple[Translator, dict[str, float]]:
    """Train a model with a position code, or `NO_SOURCE`; return it with its seconds and parameters."""
    torch.manual_seed(config.seed)
    settings = config.model.model_dump()
    if name != NO_SOURCE:
        settings["positions"] = name
    model = mmattn.seq2seq.EncoderDecoder(
        len(tokenizer), **settings, max_length=config.data.max_tokens, cross_attention=name != NO_SOURCE
    )
    model = model.to(device).train()
    pad, optim = tokenizer.pad_token_id, config.optim
    groups = training.parameter_groups(model, optim.learning_rate, weight_decay=optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: training.learning_rate_factor(step, optim.max_steps, optim.warmup_steps)
    )
    began, recent = time.perf_counter(), []
    steps = training.tracked(optim.max_steps, name, config.progress)
    for step, (sources, targets) in zip(steps, batches):  # noqa: B905 (batches have no end)
        source, mask = pad_rows(sources, pad, device)
        target, _ = pad_rows(targets, pad, device)
        # Padding comes after the targets, and attention is causal.
        logits, labels = model(source, target[:, :-1], source_mask=mask).flatten(0, 1), target[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=pad, label_smoothing=optim.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        recent.append(float(loss.detach()))
        if (step + 1) % 20 == 0 or step + 1 == optim.max_steps:
            run.log(model=name, step=step + 1, loss=sum(recent) / len(recent))
            recent.clear()
    costs = {"seconds": time.perf_counter() - began, "parameters": sum(p.numel() for p in model.parameters())}
    return Translator(model.eval(), tokenizer, config.writing, config.data.max_tokens), costs


def score(held_out: Sequence[HeldOut], texts: Sequence[str]) -> dict[str, float]:
    """Return the share of translations that are a reference letter for letter, chrF and BLEU over all references."""
    exact = sum(text in one.references for one, text in zip(held_out, texts, strict=True))
    references = [one.references for one in held_out]
    return {"exact": exact / len(held_out), **text_scores(texts, references, ["chrf", "bleu"])}


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
