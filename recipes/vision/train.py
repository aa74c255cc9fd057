"""Do pictures help a language model with words? Train an adapter on pictures with descriptions, and its controls.

    mmattn train config.yaml                        # drawn flowers
    mmattn train config_flowers12.yaml data.path=…  # photographs

A frozen language model attends to the patches of a picture. Each row of the table is trained on the same texts in the
same order for as many steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import mmattn
from mmattn import inspect, pipelines, training
from mmattn.errors import import_extra

from .data import Data, encode, load_data
from .measure import Measure, bits_saved, other_species
from .settings import AdapterSettings, Config

COLUMNS = {
    "perplexity": ("held-out perplexity", 1, ".2f", ""),
    "bits_saved": ("bits saved per description", 1, "+.2f", ""),
    "species_perplexity": ("perplexity of the species word", 1, ".2f", ""),
    "species_accuracy": ("species right in caption", 100, ".0f", " %"),
    "attribute_accuracy": ("attributes right in caption", 100, ".0f", " %"),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}
TRACES = 6  # held-out pictures in attention.safetensors


def main(config: dict[str, Any]) -> Path:
    """Run with these settings (see settings.py) and return the run's folder."""
    settings = Config.model_validate(config)
    import_extra("matplotlib", "viz")  # fail now rather than after the last step
    run = training.RunFolder(settings.out)
    if not run.begin(settings.model_dump(mode="json")):
        return run.path
    device = settings.optim.arguments(settings).device
    torch.manual_seed(settings.seed)

    # Data: each picture becomes a memory of one slot per patch. Mirrored pictures follow the others.
    data = load_data(settings.data, settings.seed)
    encoder = pipelines.load_image_encoder(settings.encoder, device)
    encode_part = partial(encode, encoder, folder=Path(settings.data.cache), progress=settings.progress)
    mirrors = [False, True] if settings.data.flip else [False]
    memory = mmattn.Memory.stack([encode_part(data.train, mirror=mirror) for mirror in mirrors])
    held_out = encode_part(data.held_out, mirror=False).to(device)

    # Model: a frozen language model with gated cross-attention.
    lm, tokenizer = pipelines.load_language_model(settings.lm, device)
    ids = training.encode_texts(tokenizer, data.texts, getattr(lm.config, "max_position_embeddings", None))
    print(
        f"{len(data.train)} pictures to train on, {len(data.held_out)} held out, {len(data.texts)} texts, "
        f"{len(data.species)} species; memories of {memory.length} slots of width {memory.dim}"
    )
    measure = Measure(data, tokenizer, ids, settings.max_new_tokens)
    rows = [measure.row("frozen LM", lm)[0]]
    torch.manual_seed(settings.seed)
    model = mmattn.attach(lm, make_adapter(settings.adapter, memory.dim))
    model.print_trainable_parameters()
    parameters, layers = model.trainable_parameters()[0], model.adapter("default").layers

    # Training.
    with hidden_states(model, settings):
        seconds = train(model, "adapter", measure, memory, settings, run)
    model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
    pipeline_config = make_pipeline_config(settings, tokenizer, data)
    pipeline_config.save(run.path / "adapter")
    if seconds is None:
        print(f"the adapter as it was then is in {run.path / 'adapter'}")
        return run.path
    run.plot_losses()

    # Measuring: the right picture, shuffled pictures, no picture, and a text-only LoRA of equal size.
    try:
        shuffled = held_out[torch.tensor(other_species(data.held_out, settings.seed))]
        for name, pictures in (("right picture", held_out), ("shuffled pictures", shuffled), ("no picture", None)):
            # Without a picture the whole host runs: its figures must be those of the frozen LM bit for bit.
            with contextlib.nullcontext() if pictures is None else hidden_states(model, settings):
                row, texts = measure.row(f"adapter, {name}", model, pictures)
            rows.append(row | {"parameters": parameters, "seconds": seconds})
            if pictures is held_out:
                save_captions(run, model, measure, held_out, texts, encoder.grid)
        model.unload()
        if settings.controls:
            control = train_lora(lm, parameters, layers, measure, settings, run)
            rows.insert(1, control)
            for row in rows:
                row["bits_saved"] = bits_saved(row["nats"], control["nats"])
            run.plot_losses()
    except KeyboardInterrupt:
        print(f"stopped before the table was complete; the trained adapter is in {run.path / 'adapter'}")
        return run.path
    content = {
        "species": len(data.species),
        "bound_bits": math.log2(len(data.species)),
        "held_out_pictures": len(data.held_out),
        "pairs": len(measure.pairs),
        "seed": settings.seed,
        "rows": [{name: value for name, value in row.items() if name != "nats"} for row in rows],
    }
    results = run.finish(content, table)
    pipeline_config.model_copy(update={"results": results}).save(run.path / "adapter")
    return run.path


def make_adapter(settings: AdapterSettings, memory_dim: int) -> mmattn.GatedAdapter:
    """Return the adapter of the settings; without `every` and `layers` it acts after every layer."""
    options = settings.model_dump()
    if settings.every is None and settings.layers is None:
        options["every"] = 1
    return mmattn.GatedAdapter(memory_dim=memory_dim, **options)


def hidden_states(model: Any, settings: Config) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which hidden states below the trained layers come from the cache, if set."""
    if not settings.optim.cache_hidden_states:
        return contextlib.nullcontext()
    return training.cached_hidden_states(model, Path(settings.data.cache) / "hidden_states")


def train(
    model: Any, name: str, measure: Measure, memory: mmattn.Memory | None, settings: Config, run: training.RunFolder
) -> float | None:
    """Train on pairs of a picture and one of its descriptions, without `memory` on the descriptions alone.

    Returns the seconds; None after Ctrl-C.
    """
    optim = settings.optim
    texts = [picture.species.texts for picture in measure.data.train] * (2 if settings.data.flip else 1)
    pairs = training.PairSampler(texts, optim.per_device_train_batch_size, settings.seed)

    def collate(rows: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        (step, *_), pictures, texts = zip(*rows, strict=True)
        batch_memory = None
        if memory is not None:
            seed = settings.seed * 1_000_003 + step
            batch_memory = memory[torch.tensor(pictures)]
            batch_memory = training.augment_memory(batch_memory, keep_fraction=optim.keep_fraction, seed=seed)
        batch = training.collate([measure.ids[text] for text in texts], batch_memory)
        return {**batch.kwargs(), "labels": batch.labels}

    trainer = training.AdapterTrainer(
        model,
        optim.arguments(
            settings,
            learning_rate=optim.learning_rate if memory is not None else optim.lora_learning_rate,
            train_sampling_strategy="sequential",
        ),
        data_collator=collate,
        train_dataset=[(step, *pair) for step in range(optim.max_steps) for pair in pairs.pairs(step)],
        gate_learning_rate=optim.gate_learning_rate,
    )
    try:
        return run.train(trainer, name, settings.progress)
    except KeyboardInterrupt:
        return None


def train_lora(
    lm: Any, parameters: int, layers: Sequence[int], measure: Measure, settings: Config, run: training.RunFolder
) -> dict[str, Any]:
    """Train and measure the control: a LoRA on the texts, with as many parameters as the adapter, in its layers."""
    torch.manual_seed(settings.seed)
    lora = training.matched_lora(lm, parameters, layers=layers)
    count = sum(p.numel() for p in lora.parameters() if p.requires_grad)
    print(f"LoRA, text only: {count:,} trained parameters beside {parameters:,} of the adapter")
    with hidden_states(lora, settings):
        seconds = train(lora, "lora", measure, None, settings, run)
        if seconds is None:
            raise KeyboardInterrupt  # a baseline that was stopped early would flatter the adapter
        row, _ = measure.row("LoRA, text only", lora)
    lora.unload()
    return row | {"parameters": count, "seconds": seconds}


def save_captions(
    run: training.RunFolder,
    model: Any,
    measure: Measure,
    memory: mmattn.Memory,
    captions: Sequence[str],
    grid: tuple[int, int] | None,
) -> None:
    """Write all captions, and of some the attention of each word to the patches, for `mmattn explore`."""
    held_out, tokenizer = measure.data.held_out, measure.tokenizer
    pairs = zip(held_out, captions, strict=True)
    lines = [{"picture": one.image, "species": one.species.name, "caption": caption} for one, caption in pairs]
    run.write_json("captions.json", lines)
    if grid is None or grid[0] * grid[1] != memory.length:  # the encoder has no patches
        return
    traces = []
    for number in range(0, len(captions), -(-len(captions) // TRACES)):
        title, picture = captions[number], mmattn.load_image(held_out[number].image)
        (ids,) = training.encode_texts(tokenizer, [title or " "])
        words = [tokenizer.decode([token]) for token in ids]
        traces.append(inspect.attribute(model, ids, memory[number], words, grid=grid, picture=picture, title=title))
    inspect.save_traces(traces, run.path)


def make_pipeline_config(settings: Config, tokenizer: PreTrainedTokenizerBase, data: Data) -> pipelines.PipelineConfig:
    """Return the file that lets `mmattn caption` load the adapter with its models."""
    return pipelines.PipelineConfig(
        task="image-to-text",
        host=pipelines.ModelReference.of(settings.lm, tokenizer),
        encoder=pipelines.EncoderReference.of(settings.encoder),
        generation={"max_new_tokens": settings.max_new_tokens},
        trained_on=f"{len(data.train)} pictures of {len(data.species)} species from {settings.data.path}.",
        training={"recipe": "vision", "seed": settings.seed, "steps": settings.optim.max_steps},
    )


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with notes on how to read it."""
    first, notes = contents[0], []
    if len(contents) > 1:
        notes.append(f"{len(contents)} seeds, mean ± half the range.")
    notes += [
        f"log2({first['species']} species) = {first['bound_bits']:.2f} bits: all that the species can save.",
        f"Means over {first['pairs']} pairs of one of {first['held_out_pictures']} held-out pictures and a description "
        "of its species. The descriptions were seen in training, with other pictures and by the LoRA as well.",
        "Shuffled: each picture replaced by one of another species. No picture: the host's own output.",
    ]
    rows = training.spread_table("", COLUMNS, [content["rows"] for content in contents])
    return "\n".join([rows, "", *(f"- {note}" for note in notes)])
