"""Questions with evidence (pictures and passages of rows, also different, blank, moved ones), and who answers them."""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import re
import unicodedata
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from os import PathLike, fspath
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmattn.data.readers import read_rows
from mmattn.data.rows import Row, make_row
from mmattn.encoders.images import load_image
from mmattn.errors import ConfigError, import_extra

Parts = Sequence[tuple[str, object]]
"""Pictures and passages in their order, each with its kind."""
Change = Callable[[Tensor], Tensor]
"""From a picture (height, width, 3) in numbers from 0 to 255 to a changed one."""
BLANK = "(This page is left blank.)"
#: Passages that the evidence is moved among.
DISTRACTORS = 7
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
#: Changes that undo a wrong preprocessing, and what is wrong if a model answers better then.
ALTERATIONS: dict[str, tuple[Change, str]] = {
    "red and blue swapped": (lambda x: x.flip(-1), "channels are read in another order (RGB, BGR)"),
    "negative": (lambda x: 255 - x, "light and dark are read inverted"),
    "paler": (lambda x: 128 + x / 2, "see the normalisation (mean, std) of pixels, perhaps done twice"),
    "of more contrast": (lambda x: 2 * x - 128, "see the normalisation (mean, std) of pixels, perhaps left out"),
    "upside down": (lambda x: x.flip(0), "rows of pixels are read in reverse"),
}


class Item(NamedTuple):
    """A question about the evidence of a row, its answer, and the evidence of another row with what follows from it.

    `different_answer` is None if that row asks a different question; else its evidence is a counterfactual. `kind` is
    the kind of the question, if the metadata of its row have one.
    """

    row: int
    question: str
    answer: str
    parts: Parts
    different_parts: Parts
    different_answer: str | None
    kind: str = ""


def read_items(data: object, count: int) -> list[Item]:
    """Return at most so many questions of rows, or of their file or folder, drawn at random.

    The other row of each asks the same and has another answer, or else it is any with another answer.
    """
    rows = _rows(data)
    if not rows:
        raise ConfigError("doctor needs rows with questions, got none")
    parts = [_parts(row) for row in rows]
    bad = [number for number, row in enumerate(rows) if not (row.prompt.strip() and row.text.strip() and parts[number])]
    if bad:
        raise ConfigError(
            f"{len(bad)} of {len(rows)} rows lack a question, an answer or evidence, such as {bad[:3]}: give each a "
            "prompt, its answer as text, and image, images, passage or passages"
        )
    by_question: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_question[row.prompt].append(number)
    random, items = Random(0), []
    for number in random.sample(range(len(rows)), min(count, len(rows))):
        row, keys = rows[number], contents(parts[number])
        same, answer = by_question[row.prompt], row.text
        candidates = random.sample(same, min(len(same), 1000)) + random.sample(range(len(rows)), min(len(rows), 1000))
        wrong = (n for n in candidates if not (is_right(rows[n].text, answer) or is_right(answer, rows[n].text)))
        other = next((n for n in wrong if contents(parts[n]) != keys), None)
        if other is None:
            raise ConfigError(f"no row has another answer and different evidence than row {number}: give more rows")
        text = rows[other].text if rows[other].prompt == row.prompt else None
        kind = str((row.metadata or {}).get("kind") or "")
        items.append(Item(number, row.prompt, row.text, parts[number], parts[other], text, kind))
    return items


def _rows(data: object) -> Sequence[Row]:
    if isinstance(data, (str, PathLike)):
        data = read_rows(fspath(data), split="train")
    if not isinstance(data, Iterable):
        raise ConfigError(f"doctor needs rows, or their file or folder; got {type(data).__name__}")
    rows: list[Any] = [make_row(row) if isinstance(row, Mapping) else row for row in data]
    wrong = {type(row).__name__ for row in rows if not isinstance(row, Row)}
    if wrong:
        raise ConfigError(f"doctor needs rows, as dicts or Row; got {', '.join(sorted(wrong))}")
    return rows


def _parts(row: Row) -> Parts:
    """Return the pictures and passages of a row in their order, each with its kind."""
    return [*(("pictures", image) for image in row.images), *(("passages", text) for text in row.passages)]


def plain_pictures(count: int = 64) -> list[dict[str, object]]:
    """Return rows that ask for the colour of a picture of one colour, to tell requests apart."""
    new, names = import_extra("PIL.Image", "vision").new, [COLOURS[number % len(COLOURS)] for number in range(count)]
    question = "What colour is this picture? Answer with one word."
    return [{"prompt": question, "image": new("RGB", (64, 64), name), "text": name} for name in names]


def contents(parts: Parts, change: Change | None = None) -> list[object]:
    """Return the evidence as a model is given it: images of Pillow, new ones at each call, and texts."""
    return [_picture(part, change) if kind == "pictures" else part for kind, part in parts]


def _picture(source: object, change: Change | None) -> object:
    picture = load_image(source)
    if change is None:
        return picture
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
    return load_image(change(pixels.float()).clamp(0, 255).to(torch.uint8))


def blank(parts: Parts) -> list[object]:
    """Return grey pictures of the same size, and passages that say nothing."""
    grey = contents(parts, lambda pixels: torch.full_like(pixels, 127))
    return [BLANK if isinstance(part, str) else part for part in grey]


def moved(place: str, number: int, items: Sequence[Item]) -> list[object]:
    """Return the passages of an item "first", "in the middle" or "last" among those of other items."""
    texts = [part for item in [*items[number + 1 :], *items[:number]] for _, part in item.parts]
    around = [text for text in texts if not is_right(items[number].answer, str(text))][:DISTRACTORS]
    before = {"first": 0, "in the middle": len(around) // 2, "last": len(around)}[place]
    return [*around[:before], *contents(items[number].parts), *around[before:]]


def is_right(expected: str, answer: str) -> bool:
    """Return True if an answer has the expected text as words or a number of its own.

    Capitals, line breaks, full-width letters and the spelling of accents do not matter. In scripts without blanks
    between words it may stand anywhere, but not in a longer number or after a negation.

    >>> is_right("red", "It is Red."), is_right("red", "It is covered."), is_right("3", "It is 3.5.")
    (True, False, False)
    >>> is_right("红色", "他的车是红色的。"), is_right("是", "不是")
    (True, False)
    """
    phrase, text = _plain(expected), _plain(answer)
    phrase = phrase.rstrip(_ENDS) or phrase
    place = text.find(phrase)
    while place >= 0:
        if not (_joined(text, place, True) or _joined(text, place + len(phrase), False)):
            return True
        place = text.find(phrase, place + 1)
    return False


#: What may stand after the expected text, where it ends a sentence.
_ENDS = " .,;:!?。、！？，！；：।؟"
_LETTER = r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]"
"""Letters and digits but of Thai, Lao, Burmese, Khmer, Japanese, Chinese and Korean, whose words touch each other."""
_WORD = re.compile(_LETTER + "{2}")
#: Particles follow a Korean word without a blank, but nothing stands before it.
_STARTED = re.compile(r"(?<=[\uac00-\ud7af])[\uac00-\ud7af]|(?<=[不没沒非無无未])|(?<=ไม่)")
#: Digits with a separator between them, a sign or point before a digit, and Chinese numerals.
_NUMBER = re.compile(
    rf"(?<=\d)[.,:/⁄'’–-]?\d|(?<=\d[.,:/⁄'’–-])\d|(?<=[.–-])(?<!{_LETTER}[.–-])\d"
    "|(?<=[零〇一二三四五六七八九十百千万萬])[零〇一二三四五六七八九十百千万萬]"
)


@lru_cache(4096)
def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text.replace("−", "-")).casefold().split())


def _joined(text: str, place: int, start: bool) -> bool:
    """Return True if a word or number goes on across a place, at the start or the end of a phrase."""
    letters = place
    while letters and unicodedata.category(text[letters - 1])[0] == "M":
        letters -= 1
    pair = text[max(letters - 1, 0) : letters] + text[place : place + 1]
    marked = pair[:1].isalnum() and unicodedata.category(pair[-1])[0] == "M"
    started = start and _STARTED.match(text, place)
    return bool(marked or started or _WORD.fullmatch(pair) or _NUMBER.match(text, place))


Answer = Callable[[list[str], list[list[Any]]], list[str]]
"""From questions and the evidence of each (images of Pillow, texts) to answers."""
NEW_TOKENS = 24


def make_answer(model: object, processor: Any, batch_size: int, batched: bool) -> Answer:
    """Return the function that answers questions from evidence; arguments as of `doctor`."""
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
    return lambda questions, evidence: [model(*pair) for pair in zip(questions, evidence, strict=True)]


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
        pairs = [_split(*pair) for pair in zip(questions, evidence, strict=True)]
        pictures = {"images": [images for images, _ in pairs]} if any(images for images, _ in pairs) else {}
        options = {"padding": True, "padding_side": "left", "add_special_tokens": not templated}
        inputs = processor(text=[prompt(*pair) for pair in pairs], return_tensors="pt", **options, **pictures)
        kinds = {name: model.dtype if value.is_floating_point() else value.dtype for name, value in inputs.items()}
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
        return list(pipe([picture for (picture,) in evidence], questions))

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
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise ConfigError(f"{url}{path} answers {error.code}: {said}") from error
        except urllib.error.URLError as error:
            raise ConfigError(f"nothing answers at {url} ({error.reason}): is the server running?") from error

    name = fetch("/models")["data"][0]["id"]

    def ask(question: str, evidence: list[Any]) -> str:
        pictures, text = _split(question, evidence)
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": _data(picture)}} for picture in pictures]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS}
        return fetch("/chat/completions", body)["choices"][0]["message"]["content"] or ""

    return lambda questions, evidence: list(pool.map(ask, questions, evidence))


def _data(picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
