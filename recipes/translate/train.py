"""Train a translator and its controls, from the pairs to the table: `mmattn train config.yaml`.

Every row of the table sees the same pairs in the same order for the same number of steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mmattn
from mmattn import inspect, training
from mmattn.errors import ConfigError, import_extra

from .alignment import draw
from .measure import measure, measure_pages
from .pairs import Question, load_pairs
from .sentences import Batches, padded, train_tokenizer
from .settings import Config
from .writing import Translator

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
    """Leave settings, metrics, model, tokenizer, translations, alignments and the table in the run's folder."""
    config = Config(**settings)
    import_extra("matplotlib", "viz")  # rather missed now than after the last step
    run = training.RunFolder(config.out)
    if not run.begin(config.model_dump(mode="json")):
        return run.path
    device = training.make_accelerator(device=config.device).device
    pairs, questions = load_pairs(config.data, config.seed)
    tokenizer = train_tokenizer(pairs, config.data.vocabulary)
    batches = Batches.of(tokenizer, pairs, config.data.max_tokens, config.optim.batch_size, config.seed)
    if not len(batches):
        raise ConfigError(f"no pair has at most data.max_tokens={config.data.max_tokens} tokens: raise it")
    questions = readable(tokenizer, questions, config.data.max_tokens)
    print(f"{len(batches)} pairs to train on, {len(questions)} held-out sentences, {len(tokenizer)} tokens")
    translator, seconds = train_model(config, tokenizer, batches, config.model.positions, run, device)
    translator.model.save(run.path / "model.safetensors")
    tokenizer.save_pretrained(run.path / "tokenizer")
    trained = {"seconds": seconds, "parameters": parameters(translator.model)}
    row, written = measure(config.model.positions, translator, questions)
    rows = [{**row, **trained}]
    rows.append(measure(f"{config.model.positions}, another's source", translator, questions, shuffled=True)[0])
    lines = [
        {"source": question.source, "written": text, "references": question.references}
        for question, text in zip(questions, written, strict=True)
    ]
    run.write_json("translations.json", lines)
    right = [question for question, text in zip(questions, written, strict=True) if text in question.references]
    draw_alignments(config, run, translator, right or questions)
    pages = [measure_pages(translator, questions, beams) for beams in sorted({1, config.writing.beams})]
    for name in [*(code for code in CODES if code != config.model.positions), NO_SOURCE] if config.controls else []:
        other, seconds = train_model(config, tokenizer, batches, name, run, device)
        trained = {"seconds": seconds, "parameters": parameters(other.model)}
        rows.append({**measure(name, other, questions)[0], **trained})
    content = {
        "seed": config.seed,
        "pairs": len(batches),
        "held_out": len(questions),
        "steps": config.optim.max_steps,
        "rows": rows,
        "pages": pages,
    }
    run.write_json("table.json", content)
    text = table([content])
    run.write_text("table.md", text)
    print(text)
    return run.path


def train_model(
    config: Config, tokenizer: Any, batches: Batches, name: str, run: training.RunFolder, device: torch.device
) -> tuple[Translator, float]:
    """A model with the position code `name`, or without cross-attention and with the code of the settings; seconds."""
    torch.manual_seed(config.seed)
    known = name != NO_SOURCE
    asked = {**config.model.model_dump(), "positions": name if known else config.model.positions}
    model = mmattn.seq2seq.EncoderDecoder(
        len(tokenizer), **asked, max_length=config.data.max_tokens, cross_attention=known
    )
    model = model.to(device).train()
    pad, optim = tokenizer.pad_token_id, config.optim
    groups = training.parameter_groups(model, optim.learning_rate, weight_decay=optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    learning_rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: training.learning_rate_factor(step, optim.max_steps, optim.warmup_steps)
    )
    began, recent = time.perf_counter(), []
    steps = training.tracked(optim.max_steps, name, config.progress)
    for step, (sources, targets) in zip(steps, batches):  # noqa: B905 (batches have no end)
        source, mask = padded(sources, pad, device)
        target, _ = padded(targets, pad, device)
        # The padding comes after the targets: no token of theirs sees it.
        logits, labels = model(source, target[:, :-1], source_mask=mask).flatten(0, 1), target[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=pad, label_smoothing=optim.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        learning_rate.step()
        recent.append(float(loss.detach()))
        if (step + 1) % 20 == 0 or step + 1 == optim.max_steps:
            run.log(model=name, step=step + 1, loss=sum(recent) / len(recent))
            recent.clear()
    translator = Translator(model.eval(), tokenizer, config.writing, config.data.max_tokens)
    return translator, time.perf_counter() - began


def readable(tokenizer: Any, questions: list[Question], max_tokens: int) -> list[Question]:
    """The questions that are not longer than what is trained on."""
    sources = training.encode_texts(tokenizer, [question.source for question in questions])
    return [question for question, ids in zip(questions, sources, strict=True) if len(ids) <= max_tokens]


def draw_alignments(config: Config, run: training.RunFolder, translator: Translator, questions: list[Question]) -> None:
    """A picture and a text of where the words of short ones of these looked, and the same for `mmattn explore`."""
    short = [question.source for question in questions if 3 <= len(question.source.split()) <= 6]
    sources = (short or [question.source for question in questions])[: config.alignment.sentences]
    looks = {source: translator.look(source, config.alignment) for source in sources}
    looks = {source: look for source, look in looks.items() if look.target}
    run.write_text("alignment.txt", "\n".join(map(str, looks.values())))
    if looks:
        draw(list(looks.values()), run.path / "alignment.png")
        inspect.save_traces([translator.trace(source) for source in looks], run.path)


def parameters(model: torch.nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def table(contents: list[dict[str, Any]]) -> str:
    """The rows of one or several `table.json`, and what the pages of keys and values save."""
    runs = [[{"seconds": None, "parameters": None, **row} for row in one["rows"]] for one in contents]
    first = contents[0]
    lines = [training.spread_table("", COLUMNS, runs), ""]
    lines.append(f"{first['pairs']:,} pairs, {first['held_out']:,} held-out sentences, {first['steps']:,} steps.")
    for places in zip(*(one["pages"] for one in contents), strict=True):
        saved = [1 - page["paged"] / page["plain"] for page in places]
        same = "the same texts" if all(page["same"] for page in places) else "OTHER TEXTS"
        beams = f"{places[0]['beams']} beam{'s' if places[0]['beams'] > 1 else ''}"
        plain, paged = (sum(page[kind] for page in places) / len(places) / 2**20 for kind in ("plain", "paged"))
        share = training.mean_and_spread(saved, 100, ".0f", " %")
        lines.append(
            f"Keys and values of the targets, {beams}: {plain:.1f} MB in one piece, {paged:.1f} MB in pages of "
            f"{places[0]['page_size']} tokens ({share} saved), {same}."
        )
    return "\n".join(lines)
