"""Requests in the interface of OpenAI, extended by documents and vectors.

A field that OpenAI knows and this server does not support accepts only its default value, which clients send.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, model_validator

from mmattn.serving.engine import SamplingSettings

#: Default values of unsupported fields.
NoList = Annotated[list[JsonValue], Field(max_length=0)] | None
NoObject = Annotated[dict[str, JsonValue], Field(max_length=0)] | None
#: False, and not the 0 that equals it.
No = Annotated[Literal[False] | None, BeforeValidator(lambda value: repr(value) if type(value) is int else value)]
#: In JSON 2.0 is an integer, too. Behind bounds, which the schema would lose otherwise.
Whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31), Whole]], Field(min_length=1)]
Vector = Annotated[list[float], Field(min_length=1)]


class Strict(BaseModel, extra="forbid", strict=True):
    """A part of a request; fields of other names are refused."""


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None


class GenerationRequest(Strict):
    """Fields of both paths."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int | None, Field(ge=-1), Whole] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63), Whole] = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    n: Annotated[int | None, Field(ge=1, le=128), Whole] = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    user: str | None = None
    metadata: dict[str, str] | None = None
    documents: Annotated[list[dict[str, JsonValue]], Field(min_length=1)] | None = (
        None  # entries with the fields that the adapter reads
    )
    passages: Annotated[int | None, Field(ge=1, le=256), Whole] = None  # entries of the index that are read
    # Or vectors (m, e) of the adapter's encoder.
    memory: Annotated[list[Vector], Field(min_length=1)] | None = None
    max_tokens: Annotated[int | None, Field(ge=1), Whole] = None
    logit_bias: NoObject = None

    @model_validator(mode="after")
    def _fits(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: say stream=true, or leave it out")
        return self

    @property
    def token_limits(self) -> list[int]:
        """New tokens of an answer, at most; none for no limit."""
        return [] if self.max_tokens is None else [self.max_tokens]

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def sampling(self, logprobs: int | None, choice: int) -> SamplingSettings:
        """Return the settings of one of n answers; without a temperature it is 1 where another field asks to sample."""
        top_k = max(self.top_k or 0, 0)
        samples = bool(self.top_p not in (None, 1) or top_k or self.seed is not None or (self.n or 1) > 1)
        return SamplingSettings(
            # A smaller temperature overflows the logits.
            temperature=float(samples) if self.temperature is None else self.temperature * (self.temperature > 1e-5),
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logprobs=logprobs,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Ids are a whole prompt; a text stands in the prompt of the pipeline."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)] = ""
    image: str | None = None  # a data URL
    max_tokens: Annotated[int | None, Field(ge=0), Whole] = None  # 0 scores a prompt that is echoed
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20), Whole] = None
    best_of: Annotated[int | None, Field(ge=1, le=1), Whole] = None
    suffix: Literal[""] | None = None

    @property
    def top(self) -> int | None:
        """The most likely tokens at each place that are wanted; None for no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def pictures(self) -> list[str]:
        """Data URLs of pictures."""
        return [] if self.image is None else [self.image]


class ImageUrl(Strict):
    """A picture as data."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class TextPart(Strict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class PicturePart(Strict):
    """A part of a message that is a picture."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user"]
    content: str | Annotated[list[Annotated[TextPart | PicturePart, Field(discriminator="type")]], Field(min_length=1)]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its text, without pictures."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart) and part.text)

    @property
    def pictures(self) -> list[str]:
        """Data URLs of its pictures."""
        parts = [] if isinstance(self.content, str) else self.content
        return [part.image_url.url for part in parts if isinstance(part, PicturePart)]


class AssistantMessage(Strict):
    """An answer of before, as clients send it back."""

    role: Literal["assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: NoList = None
    annotations: NoList = None

    @property
    def text(self) -> str:
        """Its text."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class TextFormat(Strict):
    """The format of an answer that is a text."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Annotated[Message | AssistantMessage, Field(discriminator="role")]] = Field(min_length=1)
    max_completion_tokens: Annotated[int | None, Field(ge=1), Whole] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20), Whole] = None
    response_format: TextFormat | None = None
    tools: NoList = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: NoList = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: say logprobs=true, or leave it out")
        return self

    @property
    def top(self) -> int | None:
        """The most likely tokens at each place that are wanted; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limits(self) -> list[int]:
        """New tokens of an answer, at most, by both names; the least holds."""
        return [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]

    @property
    def pictures(self) -> list[str]:
        """Data URLs of the pictures of all messages."""
        return [url for message in self.messages if isinstance(message, Message) for url in message.pictures]


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: str | None = None
