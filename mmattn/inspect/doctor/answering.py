"""A model, a pipeline, an address or a function as one function from questions and their evidence to answers."""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from mmattn.errors import ConfigError

Answer = Callable[[list[str], list[list[Any]]], list[str]]
"""From questions and the evidence of each (images of Pillow, texts) to answers."""
NEW_TOKENS = 24


def make_answer(model: object, processor: Any, batch_size: int, batched: bool) -> Answer:
    """Return the function that answers questions from evidence; arguments as of `doctor`.

    Raises:
        ConfigError: none of these, or a model without a processor.
    """
    if isinstance(model, str):
        return _endpoint(model, batch_size)
    if hasattr(model, "make_memory"):
        return _our_pictures(model)
    if hasattr(model, "task") and hasattr(model, "model"):
        pipe: Any = model
        model, processor = pipe.model, getattr(pipe, "processor", None) or pipe.tokenizer
    if isinstance(model, nn.Module) and hasattr(model, "generate") and processor is not None:
        return _model(model, processor)
    if isinstance(model, nn.Module) or not callable(model):
        raise ConfigError(
            f"doctor cannot ask {type(model).__name__}: give a model of transformers with processor=, a pipeline, an "
            "address, or a function (question, evidence) -> answer"
        )
    if batched:
        return model
    return lambda questions, evidence: [model(*one) for one in zip(questions, evidence, strict=True)]


def _split(question: str, evidence: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the pictures, and the question after the passages."""
    texts = [part for part in evidence if isinstance(part, str)]
    return [part for part in evidence if not isinstance(part, str)], "\n\n".join([*texts, question])


def _model(model: Any, processor: Any) -> Answer:
    """Ask a model of transformers as it is, in its chat template if it has one, without sampling."""
    processor = copy.deepcopy(processor)  # padding and the pad token are settings of a tokenizer
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    text_only = getattr(processor, "image_processor", None) is None
    token = getattr(processor, "image_token", "")
    templated = bool(getattr(processor, "chat_template", None))

    def prompt(pictures: list[Any], text: str) -> str:
        if not templated:
            return f"{token}\n" * len(pictures) + text
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        chat = [{"role": "user", "content": text if text_only else parts}]
        return str(processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def answer(questions: list[str], evidence: list[list[Any]]) -> list[str]:
        pairs = [_split(*one) for one in zip(questions, evidence, strict=True)]
        pictures = {"images": [one for one, _ in pairs]} if any(one for one, _ in pairs) else {}
        options = {"padding": True, "padding_side": "left", "add_special_tokens": not templated}
        inputs = processor(text=[prompt(*one) for one in pairs], return_tensors="pt", **options, **pictures)
        kinds = {name: model.dtype if one.is_floating_point() else one.dtype for name, one in inputs.items()}
        placed = {name: inputs[name].to(model.device, kind) for name, kind in kinds.items() if name != "token_type_ids"}
        out = model.generate(**placed, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = out if model.config.is_encoder_decoder else out[:, inputs["input_ids"].shape[1] :]
        return list(tokenizer.batch_decode(new, skip_special_tokens=True))

    return answer


def _our_pictures(pipe: Any) -> Answer:
    """Ask a pipeline of ours for pictures, and without a picture its host."""

    def answer(questions: list[str], evidence: list[list[Any]]) -> list[str]:
        if not any(evidence):
            with pipe.model.disable_adapter():
                return list(pipe([torch.zeros(3, 8, 8)] * len(questions), questions))
        return list(pipe([one for (one,) in evidence], questions))

    return answer


def _endpoint(url: str, requests: int) -> Answer:
    """Ask an endpoint of the OpenAI shape, with so many requests at once."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"an endpoint has an address such as http://127.0.0.1:8000/v1, got {url!r}")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('MMATTN_API_KEY', '')}"}
    pool = ThreadPoolExecutor(requests)

    def fetch(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)

    name = fetch("/models")["data"][0]["id"]

    def ask(question: str, evidence: list[Any]) -> str:
        pictures, text = _split(question, evidence)
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": _data(one)}} for one in pictures]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS}
        return fetch("/chat/completions", body)["choices"][0]["message"]["content"] or ""

    return lambda questions, evidence: list(pool.map(ask, questions, evidence))


def _data(picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
