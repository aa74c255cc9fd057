"""Train a translator and its controls: `mmattn train CONFIG`, or `python train.py`.

Every row of the table sees the same pairs in the same order for the same number of steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mmattn
from mmattn import inspect, training
from mmattn.errors import ConfigError

from .alignment import draw
from .measure import measure, measure_pages
from .pairs import Question, load_pairs
from .sentences import Batches, padded, train_tokenizer
from .settings import Config
from .tables import table
from .writing import Translator

CODES = ("sinusoidal", "learned", "rotary", "alibi")
NO_SOURCE = "no cross-attention"


def main(settings: dict[str, Any]) -> Path:
    """Leave settings, metrics, model, tokenizer, translations, alignments and the table in the run's folder."""
    config = Config(**settings)
    run = training.RunFolder(config.out)
    run.write_config(config.model_dump(mode="json"))
    pairs, questions = load_pairs(config.data, config.seed)
    tokenizer = train_tokenizer(pairs, config.data.vocabulary)
    batches = Batches.of(tokenizer, pairs, config.data.max_tokens, config.optim.batch_size, config.seed)
    if not len(batches):
        raise ConfigError(f"no pair has at most data.max_tokens={config.data.max_tokens} tokens: raise it")
    questions = readable(tokenizer, questions, config.data.max_tokens)
    print(f"{len(batches)} pairs to train on, {len(questions)} held-out sentences, {len(tokenizer)} tokens")
    translator, fitted = train_model(config, tokenizer, batches, config.model.positions, run)
    translator.model.save(run.path / "model.safetensors")
    tokenizer.save_pretrained(run.path / "tokenizer")
    if fitted.interrupted:
        print(f"stopped after {fitted.steps} steps; the model as it was then is in {run.path}")
        return run.path
    trained = {"seconds": fitted.seconds, "parameters": parameters(translator.model)}
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
        other, fitted = train_model(config, tokenizer, batches, name, run)
        if fitted.interrupted:
            print(f"stopped in a control; what was measured before it is in {run.path}")
            break
        trained = {"seconds": fitted.seconds, "parameters": parameters(other.model)}
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
    config: Config, tokenizer: Any, batches: Batches, name: str, run: training.RunFolder
) -> tuple[Translator, training.FitResult]:
    """A model with the position code `name`, or without cross-attention and with the code of the settings."""
    torch.manual_seed(config.seed)
    known = name != NO_SOURCE
    asked = {**config.model.model_dump(), "positions": name if known else config.model.positions}
    model = mmattn.seq2seq.EncoderDecoder(
        len(tokenizer), **asked, max_length=config.data.max_tokens, cross_attention=known
    ).train()
    pad, order, optim = tokenizer.pad_token_id, iter(batches), config.optim

    def compute_loss(step: int) -> torch.Tensor:
        sources, targets = next(order)
        source, mask = padded(sources, pad)
        target, _ = padded(targets, pad)
        # The padding comes after the targets: no token of theirs sees it.
        logits = model(source, target[:, :-1], source_mask=mask)
        labels = target[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=pad, label_smoothing=optim.label_smoothing)

    fitted = training.fit(
        training.parameter_groups(model, optim.learning_rate, weight_decay=optim.weight_decay),
        compute_loss,
        optim.max_steps,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        label=name,
        log=lambda line: run.log(model=name, **line),
        progress=config.progress,
    )
    return Translator(model.eval(), tokenizer, config.writing, config.data.max_tokens), fitted


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


if __name__ == "__main__":
    main({})
