"""`doctor`: the checks of an adapted model on a batch, or of the folder of a saved adapter, as a table of verdicts."""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Mapping
from importlib import metadata
from os import PathLike

import torch
from torch import Tensor

from mmattn.adapters.base import adapter_kinds
from mmattn.adapters.files import load_folder
from mmattn.adapters.host_models import given_cache
from mmattn.adapters.text_state import TextState
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, NonFiniteError, check_int
from mmattn.hosts import host_kinds, load
from mmattn.hosts.context import Arguments, Call, Keywords
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.probe import in_eval_mode
from mmattn.inspect.doctor.checks import CHECKS, OF_SLOTS, RowMemory, Trial, openings
from mmattn.inspect.doctor.looking import examine
from mmattn.inspect.doctor.questions import make_answer, read_items
from mmattn.inspect.doctor.report import Report
from mmattn.memory import Memory
from mmattn.progress import counted


def doctor(
    model: object,
    data: object,
    *,
    processor: object = None,
    batched: bool = False,
    batch_size: int = 8,
    max_questions: int = 64,
    progress: bool = False,
) -> Report:
    """Check whether a model uses its evidence, or check an adapted model on a batch.

    A model that answers questions from pictures or texts is asked each question with the right, different, blank, moved
    and no evidence, alone, twice and in batches. A sound model gets a FAIL in at most 1 of 100 reports (exact tests at
    a joint level of 1 %). Use about 30 questions or more. A counterfactual is another row with the same question and
    another answer. An answer is right if it contains the text of its row as separate words or a separate number.

    An adapted model is checked on a batch: whether memory arrives in each active adapter, and only at the allowed
    tokens. This takes about twenty calls without gradients, and restores hooks, modes and random states. Checks of
    slots are skipped for memories without slots (prefixes, passages, another model's cache).

    Args:
        model: a function `(question, evidence) -> answer`, whose evidence is a list of Pillow images and texts; a model
            or pipeline of transformers that takes pictures or texts; an mmattn pipeline that takes pictures; the
            address of an OpenAI-compatible endpoint ("http://…/v1"); or an adapted model.
        data: rows with a prompt (the question), a text (its answer), and images or passages, or their file or folder,
            see `mmattn.training.read_rows`; `metadata={"kind": ...}` names the kind of a question. For an adapted model
            the keyword arguments of a call, with `memory`.
        processor: processor of a transformers model; its tokenizer if it reads only texts.
        batched: True if the function takes a list of questions and a list of their evidence, and returns a list.
        batch_size: maximum questions per batch; for an endpoint, concurrent requests.
        max_questions: maximum number of questions drawn from the data.
        progress: show how many answers there are; a question needs about ten.

    Returns:
        The verdicts; for questions also the figures and every answer.

    Raises:
        ConfigError: rows without questions or evidence, a model that cannot be asked, or a batch without a visible
            memory.
        ConditionError: no adapter is active, or the batch has a cache.
    """
    if not isinstance(model, AdaptedModel):
        check_int("batch_size", batch_size)
        items = read_items(data, check_int("max_questions", max_questions))
        with counted(None, "answers", progress) as advance:
            return examine(make_answer(model, processor, batch_size, batched), items, batch_size, advance)
    batch, report = _checked_batch(data), Report()
    with in_eval_mode(model), torch.no_grad():
        memories = memories_of(model, batch)
        for name, memory in memories.items():
            trial = Trial(model, name, batch, memory)
            trial.output  # noqa: B018 - a batch that the model itself refuses is no matter of health
            title = f"{name}: " if len(memories) > 1 else ""
            for check, run in CHECKS.items():
                if not isinstance(memory, Memory) and check in OF_SLOTS:
                    continue
                try:
                    verdict, answer = run(trial)
                except Exception as error:
                    verdict, answer = False, f"the check stopped with {type(error).__name__}: {error}"
                report.add(verdict, title + check, answer)
    trained, total = model.trainable_parameters()
    report.add(None, "trainable parameters", f"{trained:,} of {total:,} ({trained / max(total, 1):.2%})")
    report.add(None, "versions", versions(model))
    return report


def diagnose(folder: str | PathLike[str], host: str | PathLike[str] | None = None) -> Report:
    """Check the folder of a saved adapter: its files, finite weights, and gates that are open.

    Gates start at 0, where an adapter adds nothing. With a host, all checks of `doctor` run too, on a random batch.
    """
    report = Report()
    try:
        config, tensors = load_folder(folder)
    except (AdapterFileError, NonFiniteError) as error:
        report.add(False, "files", str(error))
        return report
    host_config = config["host"]
    count = sum(tensor.numel() for tensor in tensors.values())
    report.add(True, "files", f"complete, checksums agree, written by mmattn {config['mmattn_version']}")
    report.add(True, "kind", f"{config['kind']}, {count:,} parameters, at layers {config['layers']}")
    report.add(
        True,
        "host",
        f"{host_config['class']} of {host_config['num_layers']} layers, width {host_config['hidden_size']}",
    )
    reads = getattr(adapter_kinds().get(config["kind"]), "reads", None)
    report.add(True, "memory", reads or f"width {config['adapter']['memory_dim']}")
    if host is None:
        ok, answer = openings(tensors)
        report.add(ok, "gates", answer)
        return report
    kind = host_kinds().get(host_config["kind"])
    if kind is None:
        raise AdapterFileError(
            f"the adapter needs a host of kind {host_config['kind']!r}; registered: {', '.join(host_kinds())}. "
            "Import the package that registers it"
        )
    loaded = kind.load_host(host)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(loaded, folder)
    other = [str(warning.message) for warning in caught if "the weights of this" in str(warning.message)]
    report.add(not other, "weights of the host", other[0] if other else f"those it was trained on, {os.fspath(host)}")
    report.lines += doctor(model, random_batch(model)).lines
    return report


def versions(model: AdaptedModel) -> str:
    """Return the versions of Python, mmattn, torch and the package of the host."""
    numbers = {"Python": platform.python_version()}
    for name in ("mmattn", "torch", type(model.host).__module__.partition(".")[0]):
        with contextlib.suppress(metadata.PackageNotFoundError):  # mmattn from source, a host of one's own
            numbers[name] = metadata.version(name)
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


# Rows of a random batch.
ROWS = 3


def memories_of(model: AdaptedModel, batch: Keywords) -> dict[str, RowMemory]:
    """Return the memory of each active adapter in a batch, by name."""
    bound = {name: memory for name, memory in model.bind(batch["memory"]).items() if name in model.active}
    if not bound:
        raise ConditionError(f"no active adapter is given a memory (active: {model.active}): set_adapter(name) first")
    memories: dict[str, RowMemory] = {}
    arguments = {name: value for name, value in batch.items() if name != "memory"}
    for name, source in bound.items():
        if isinstance(source.shared, RowMemory) and not isinstance(source.shared, Memory):
            memories[name] = source.shared
            continue
        text = model.text_state(Call({}), (), arguments) if source.follows_text else TextState(0, 0)
        with model.disable_adapter():
            memories[name] = memory = source.as_memory(text)
        if not bool(memory.real_slots().any()):
            raise ConfigError(
                f"every slot of the memory for adapter {name!r} is masked: give doctor a memory with real slots"
            )
    return memories


def _checked_batch(batch: object) -> Keywords:
    if not isinstance(batch, Mapping) or batch.get("memory") is None:
        kind = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            f"doctor needs the arguments of a call by name, with a memory (dict(input_ids=..., memory=...)); got {kind}"
        )
    if given_cache(batch) is not None:
        raise ConditionError("doctor calls the model many times, which would fill its cache: give the whole text")
    return batch


def random_batch(model: AdaptedModel, name: str = "default") -> Arguments:
    """Return a random batch for one adapter of a model, some slots of the memory masked."""
    generator = torch.Generator().manual_seed(0)
    adapter = model.adapter(name)
    device = adapter.weight.device
    batch = model.example_batch(generator, adapter.config, ROWS)
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    memory = adapter.config.example_memory(generator, ROWS)
    return moved | {"memory": {name: memory.to(device) if isinstance(memory, Memory) else memory}}
