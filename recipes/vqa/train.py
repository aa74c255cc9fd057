"""Can a language model that has never seen a picture learn to answer questions about pictures? easy-VQA on SmolLM2.

    mmattn train config.yaml

The language model and the encoder of the pictures stay frozen, and an adapter between them is trained. Only the last
token of a question sees the picture; what comes before it was read once. All rows of the table answer the same
questions of the public test split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import pipelines, training
from mmattn.errors import import_extra

from .data import (
    Data,
    answer_shares,
    encode,
    load_data,
    prior_rows,
    prompt_template,
    row,
    spelling_shares,
    train_rows,
    training_tokens,
)
from .report import draw_answers, table
from .settings import Config
from .spoken import answer_spoken


def main(config: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    settings = Config.model_validate(config)
    import_extra("matplotlib", "viz")  # fail now rather than after the last step
    run = training.RunFolder(settings.out)
    if not run.begin(settings.model_dump(mode="json")):
        return run.path
    device = settings.optim.arguments(settings).device
    torch.manual_seed(settings.seed)

    # Data: each picture becomes a memory of one slot per patch, each question a prompt.
    lm, tokenizer = pipelines.load_language_model(settings.lm, device)
    questions = (settings.train_questions, settings.test_questions)
    data = load_data(tokenizer, *questions, settings.seed, settings.spellings)
    encoder = pipelines.load_image_encoder(settings.encoder, device)
    train_memory, test_memory = (
        encode(encoder, questions, Path(settings.cache)).to(device) for questions in (data.train, data.test)
    )
    print(
        f"{len(data.train)} questions about {train_memory.batch} pictures to train on, {len(data.test)} about "
        f"{test_memory.batch} others to test; memories of {train_memory.length} slots of width {train_memory.dim}"
    )
    rows = prior_rows(data)
    if settings.spoken:
        pictures = {"train": train_memory, "test": test_memory}
        content = answer_spoken(lm, tokenizer, data, pictures, rows, settings, run)
        run.plot_losses()
        run.finish(content, table)
        return run.path

    # Model: a frozen language model with gated cross-attention in its upper layers.
    if settings.start is None:
        model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=train_memory.dim, **settings.adapter.model_dump()))
    else:
        model = mmattn.load(lm, settings.start)
    model.print_trainable_parameters()
    parameters = model.trainable_parameters()[0]
    texts, tokens = training_tokens(data)
    with training.cached_prompts(model, texts) as prompts:
        answer = partial(predict, model, prompts, data)
        rows.append(row(data, "frozen model, no picture", answer(None)))

        def loss(rows: Tensor) -> Tensor:
            texts, pictures, target = rows.T
            logits = model(**prompts[texts], memory=train_memory[pictures]).logits[:, -1]
            return F.cross_entropy(logits.float(), target)

        seconds = None
        with contextlib.suppress(KeyboardInterrupt):
            seconds = train_rows(model, "adapter", tokens, loss, settings, run, use_cache=True)
        model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
        pipeline_config = make_pipeline_config(settings, tokenizer, data)
        pipeline_config.save(run.path / "adapter")
        if seconds is None:
            print(f"the adapter as it was then is in {run.path / 'adapter'}")
            return run.path
        right = answer(test_memory)
        other = torch.randperm(test_memory.batch, generator=torch.Generator().manual_seed(settings.seed))
        cost = {"parameters": parameters, "seconds": seconds}
        rows.append(row(data, "adapter, no picture", answer(None)) | cost)
        rows.append(row(data, "adapter, shuffled pictures", answer(test_memory[other])) | cost)
        rows.append(row(data, "adapter, right picture", right) | cost)
        draw_answers(run, model, prompts, encoder, data, test_memory, right)
    if settings.controls:
        model.unload()
        rows.insert(2, train_lora(lm, parameters, data, settings, run, device))
    run.plot_losses()
    content = {"test_questions": len(data.test), "spellings": spelling_shares(data, right), "rows": rows}
    results = run.finish(content | {"seed": settings.seed}, table)
    pipeline_config.model_copy(update={"results": results}).save(run.path / "adapter")
    return run.path


def make_pipeline_config(settings: Config, tokenizer: Any, data: Data) -> pipelines.PipelineConfig:
    """Return the file that lets `mmattn.pipeline` and `mmattn caption` load the adapter with its models."""
    return pipelines.PipelineConfig(
        task="image-to-text",
        host=pipelines.ModelReference.of(settings.lm, tokenizer),
        encoder=pipelines.EncoderReference.of(settings.encoder),
        prompt=prompt_template(tokenizer),
        visible_from="last_token",
        generation={"max_new_tokens": max(map(len, data.ends))},
        trained_on=f"{len(data.train):,} questions of easy-VQA about {len(data.train.pictures):,} drawn pictures.",
        training={"recipe": "vqa", "seed": settings.seed, "steps": settings.optim.max_steps},
    )


@torch.no_grad()
def predict(model: Any, prompts: training.PromptCache, data: Data, memory: mmattn.Memory | None) -> Tensor:
    """Return the first token (n,) of the answer to each test question, greedily from the whole vocabulary."""
    if memory is None:  # the answer to each question is the same for all pictures
        parts = torch.arange(len(data.prompts)).split(128)
        return torch.cat([model(**prompts[rows]).logits[:, -1].argmax(-1).cpu() for rows in parts])[data.test.prompt]
    tokens = []
    for rows in torch.arange(len(data.test)).split(128):
        logits = model(**prompts[data.test.prompt[rows]], memory=memory[data.test.picture[rows]]).logits
        tokens.append(logits[:, -1].argmax(-1).cpu())
    return torch.cat(tokens)


def last_logits(model: Any, prompts: Sequence[Sequence[int]], device: torch.device, **memory: Any) -> Tensor:
    """Return the logits (b, vocabulary) after whole prompts."""
    batch = training.collate(prompts).to(device)
    assert batch.attention_mask is not None
    places, number = (batch.attention_mask.sum(1) - 1).unique(return_inverse=True)
    texts = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "logits_to_keep": places}
    logits: Tensor = model(**texts, **memory).logits
    return logits[torch.arange(len(prompts)), number].float()


def train_lora(
    lm: Any, parameters: int, data: Data, settings: Config, run: training.RunFolder, device: torch.device
) -> dict[str, Any]:
    """Train and measure the control: a LoRA in the same layers, with as many parameters as the adapter.

    It learns how often each answer stands behind each question in training, which is all that questions tell.
    """
    torch.manual_seed(settings.seed)
    layers = range(settings.adapter.layers[0] + 1, len(lm.model.layers))
    lora = training.matched_lora(lm, parameters, layers=layers)
    count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    print(f"LoRA, questions only: {count:,} trained parameters beside {parameters:,} of the adapter")
    tokens = data.tokens.to(device)
    shares = answer_shares(data).to(device).repeat(len(data.prompts) // len(data.texts), 1)

    def logits(rows: Tensor) -> Tensor:
        return last_logits(lora, [data.prompts[row] for row in rows.tolist()], device)

    def loss(rows: Tensor) -> Tensor:
        return -(logits(rows).log_softmax(-1)[:, tokens] * shares[rows]).sum(-1).mean()

    questions = [row for row in range(len(data.prompts)) if shares[row].any()]
    fields = {
        "max_steps": settings.optim.lora_steps,
        "per_device_train_batch_size": min(16, len(questions)),
        "learning_rate": settings.optim.lora_learning_rate,
        "weight_decay": 0.0,
        "warmup_steps": 5,
    }
    with training.cached_hidden_states(lora, Path(settings.cache) / "states"):
        seconds = train_rows(lora, "LoRA", questions, loss, settings, run, **fields)
        with torch.no_grad():
            parts = torch.arange(len(data.prompts)).split(16)
            answers = torch.cat([logits(part).argmax(-1).cpu() for part in parts])
    lora.unload()
    measured = row(data, "LoRA, questions only", answers[data.test.prompt])
    return measured | {"parameters": count, "seconds": seconds}
