"""`pipeline_config.json`: the models, the memory and the prompt that go with an adapter, by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmattn.adapters.files import CONFIG, replace_card
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.json_files import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "pipeline_config.json"

#: Arguments of `generate` and of a training, as JSON values.
Settings = dict[str, bool | int | float | str | None]
Task = Literal["image-to-text", "question-answering", "passage-answering", "text-to-image", "memory-to-text"]
#: The first token of a prompt that sees the memory.
VisibleFrom = Literal["first_token", "last_token"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelReference(_Strict):
    """A model and its tokenizer by name.

    Args:
        name: a short name of `mmattn.models`, a name on the Hugging Face hub, a folder, or "assets/…" for a model
            installed with mmattn. Relative folders are relative to the adapter's.
        revision: branch, tag or commit on the hub.
        quantization: "int8" (torchao), "bnb8" or "bnb4" (bitsandbytes).
        lora: folder of the LoRA that the host had in training.
        tokenizer_fingerprint: sha256 of the tokenizer.
    """

    name: str
    revision: str | None = None
    quantization: Literal["int8", "bnb8", "bnb4"] | None = None
    lora: str | None = None
    tokenizer_fingerprint: str | None = None

    @classmethod
    def of(cls, name: str, tokenizer: PreTrainedTokenizerBase, **fields: object) -> ModelReference:
        """Return the reference of a model that was loaded under a name; a folder becomes an absolute path.

        Args:
            name: as it was loaded.
            tokenizer: of transformers, as it was loaded.
            **fields: the other fields.
        """
        named = {"name": absolute(name), "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
        return cls.model_validate(named | fields)


class EncoderReference(_Strict):
    """An encoder by name.

    Args:
        name: name of an encoder of images or texts, as in `load_image_encoder` and `load_text_encoder`.
        pooling: for texts, as in `TextEncoder`.
        pooled: for images, one slot for each image.
    """

    name: str
    pooling: str | None = None
    pooled: bool = False

    @classmethod
    def of(cls, name: str, **fields: object) -> EncoderReference:
        """Return the reference of an encoder that was loaded under a name; files and folders become absolute paths.

        Args:
            name: as it was loaded.
            **fields: the other fields.
        """
        kind, colon, rest = name.partition(":")
        network, second, more = rest.partition(":")
        path = absolute(name)
        if kind == "timm":
            path = f"{kind}{colon}{absolute(network)}{second}{more}"
        elif kind == "torchvision":
            path = f"{kind}{colon}{network}{second}{absolute(more)}"
        return cls.model_validate({"name": path, **fields})


class MemoryConfig(_Strict):
    """Settings of the memory made of the hits of an index.

    Args:
        top_k: number of entries that a question, or a chunk of text, attends to.
        margin: leave out entries whose score is lower than the best by more than this; None leaves none out.
        fields: of an entry's JSON line; the concatenated vectors of their texts are its encoded token, and the first
            field is searched. None where entries are passages that the host itself reads.
        text: template of its fields, by which an entry is displayed.
    """

    top_k: int = Field(ge=1)
    margin: float | None = Field(None, ge=0)
    fields: tuple[str, ...] | None = None
    text: str | None = None


class PipelineConfig(_Strict):
    """Settings that `mmattn.pipeline` needs in addition to the adapter.

    Args:
        task: "image-to-text", "question-answering", "passage-answering" with passages that the host has read,
            "text-to-image", or "memory-to-text" with a memory that comes with each call.
        host: the language model, or the UNet with its text encoder.
        encoder: of the pictures, or of the texts of the index; None for "memory-to-text".
        memory: settings of the memory of an index; None for the other tasks.
        prompt: start of the text; "{question}" stands for the question, and for "passage-answering" "{passages}" for
            the passages. There, and for "image-to-text" and "memory-to-text" with a question, it is a template whose
            special tokens are tokens, such as that of a chat.
        refusal: the answer if nothing in the index answers.
        visible_from: the first token that sees the memory, "first_token" or "last_token" of the prompt, as in training;
            tokens before it are the bare host's. "last_token" is for "image-to-text" and "memory-to-text".
        generation: arguments of `generate`, or for drawing num_inference_steps and guidance_scale.
        trained_on: the data, in one sentence.
        training: settings of the training that the card shows.
        results: a table in Markdown that the card shows, with the command that prints it.

    >>> config = PipelineConfig(
    ...     task="image-to-text", host=ModelReference(name="gpt2"), encoder=EncoderReference(name="ViT-B-32:openai")
    ... )
    >>> config.prompt
    ''
    """

    format: Literal["mmattn-pipeline"] = "mmattn-pipeline"
    format_version: Literal[1] = 1
    task: Task
    host: ModelReference
    encoder: EncoderReference | None = None
    memory: MemoryConfig | None = None
    prompt: str = ""
    refusal: str | None = None
    visible_from: VisibleFrom = "first_token"
    generation: Settings = {}
    trained_on: str = ""
    training: Settings = {}
    results: str = ""

    @model_validator(mode="after")
    def _fits_its_task(self) -> PipelineConfig:
        if (self.task in ("image-to-text", "text-to-image", "memory-to-text")) != (self.memory is None):
            raise ValueError(f"memory must be {'left out' if self.memory else 'given'} for the task {self.task}")
        if (self.task == "memory-to-text") != (self.encoder is None):
            raise ValueError(f"encoder must be {'left out' if self.encoder else 'given'} for the task {self.task}")
        if self.visible_from == "last_token" and self.task not in ("image-to-text", "memory-to-text"):
            raise ValueError(f"visible_from must be first_token for the task {self.task}")
        if self.answers_questions and "{question}" not in self.prompt:
            raise ValueError(f"prompt must have {{question}} in it for the task {self.task}")
        return self

    @property
    def answers_questions(self) -> bool:
        """True for the tasks "question-answering" and "passage-answering"."""
        return self.task in ("question-answering", "passage-answering")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the file beside a saved adapter, and its content on the card of the folder.

        Args:
            folder: where `save_adapter` wrote the adapter.

        Raises:
            AdapterFileError: no adapter is there.
            OSError: the disk is full, or the folder is not writable.
        """
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise AdapterFileError(f"{folder} has no {CONFIG}, so no adapter to describe: call save_adapter first")
        write_json(folder / FILE, self.model_dump(mode="json"))
        replace_card(folder, self.card)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> PipelineConfig:
        """Read what `save` wrote.

        Args:
            folder: of the adapter.

        Raises:
            AdapterFileError: the file is missing, damaged, newer or something else.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise AdapterFileError(
                f"{os.fspath(folder)!r} has no {FILE}: load the adapter with mmattn.load(host, folder), or write the "
                "file with mmattn.pipelines.PipelineConfig(...).save(folder)"
            )
        content = read_json(path)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors()[:5])
            raise AdapterFileError(f"{path} cannot be read: {wrong}") from error

    def card(self, plain: str) -> str:
        """Return the README of the adapter's folder (usage, training, results) for that of `save_adapter`."""
        title, _, rest = plain.partition("\n```python\n")
        end = rest[max(rest.rfind("\nWritten by mmattn"), 0) :]
        parts = [title, f"\n```python\n{self._usage()}\n```\n"]
        if self.trained_on:
            settings = ", ".join(f"{name} {value}" for name, value in self.training.items())
            parts.append(f"\n## Training\n\n{self.trained_on}{f' ({settings})' if settings else ''}\n")
        if self.results:
            parts.append(f"\n## Results\n\n{self.results.strip()}\n")
        return "".join([*parts, end])

    def _usage(self) -> str:
        answering = (
            'pipe = mmattn.pipeline("this folder", index="index")\n'
            'answer = pipe("a question")\nprint(answer.text, answer.sources[0].text)'
        )
        question = ', "a question"' if "{question}" in self.prompt else ""
        call = {
            "image-to-text": f'pipe = mmattn.pipeline("this folder")\nprint(pipe("photo.jpg"{question}))',
            "question-answering": answering,
            "passage-answering": answering,
            "memory-to-text": 'pipe = mmattn.pipeline("this folder")\n'
            'print(pipe("a text", memory))  # vectors (1, m, e)',
            "text-to-image": 'pipe = mmattn.pipeline("this folder")\n'
            'pipe("a prompt", "example.png").resize((256, 256)).save("picture.png")',
        }[self.task]
        return f"import mmattn\n\n{call}"


def absolute(name: str) -> str:
    """Return the absolute path of a file or folder, and any other name unchanged."""
    return name if name.startswith("assets/") or not os.path.exists(name) else os.path.abspath(name)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of the vocabulary and the special tokens of a tokenizer."""
    vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise ConfigError(f"{type(tokenizer).__name__} has no vocabulary, so it has no fingerprint")
    digest = hashlib.sha256()
    for word, number in sorted(vocabulary.items(), key=lambda pair: pair[1]):
        digest.update(f"{number} {word!r}\n".encode())
    digest.update(repr(sorted(map(str, tokenizer.all_special_tokens))).encode())
    return digest.hexdigest()
