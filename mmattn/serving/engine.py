"""One adapted model that answers many requests at once, by the continuous batching of transformers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from fastapi import HTTPException
from torch import Tensor

from mmattn.data.text_batches import check_prompt
from mmattn.errors import ConditionError, ConfigError, TextError, check_float, check_int
from mmattn.hosts.causal_lm.continuous_batching import paused
from mmattn.memory import Memory
from mmattn.pipelines.generation import Prompt, end_ids, memory_arguments, prompt_rows
from mmattn.tokenization import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.continuous_batching import GenerationOutput
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import FutureRequestState

    from mmattn.pipelines.base import Pipeline

PAGE = 16
#: Tokens of a prompt that say how the text of an answer continues.
_BEFORE = 4
#: Of a step on the CPU, so that a long prompt does not hold up those who write.
TOKENS = 512
#: The keyword under which transformers carries a sampler with its request.
KEY = "sampler"
RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Limits:
    """Limits of a server; a request beyond them is refused with a status code, but for `max_tokens`.

    Args:
        max_requests: requests that run or wait; another gets 429 with Retry-After.
        max_body_bytes: of a request, pictures included; 413.
        max_tokens: new tokens of an answer; a request for more gets so many.
        max_documents: documents of a request; 400.
        max_pixels: of a picture; 400, before it is decoded.
        timeout: seconds until an unfinished request is given up; 504.

    Raises:
        ConfigError: a number below its range.
    """

    max_requests: int = 64
    max_body_bytes: int = 20_000_000
    max_tokens: int = 256
    max_documents: int = 256
    max_pixels: int = 25_000_000
    timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "max_tokens", "max_documents", "max_pixels"):
            check_int(name, getattr(self, name))
        check_float("timeout", self.timeout, at_least=0.001)


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of a request, in the words of OpenAI; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 for all
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # the most likely tokens at each place; None for no log-probabilities

    @property
    def is_greedy(self) -> bool:
        """True where the largest logit is all that counts."""
        return not (self.temperature or self.presence_penalty or self.frequency_penalty) and self.logprobs is None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token by the model, and of the most likely tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Job:
    """A prompt with its memory, and how its answer is written."""

    ids: list[int]
    memory: Memory | None  # of one row; None for the bare host
    max_tokens: int
    sampling: SamplingSettings = SamplingSettings()
    stops: Sequence[str] = ()  # texts that end it
    echoes: bool = False  # the answer stands behind its prompt, so that its first blank counts


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    text: str
    tokens: int  # generated so far
    finish_reason: str | None = None  # "stop" or "length", of the last piece
    logprobs: Sequence[TokenLogprob] = ()  # of its tokens


class Writer:
    """Turns the tokens of one answer into pieces of text."""

    def __init__(self, job: Job, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], device: torch.device) -> None:
        self.job, self.tokenizer, self.ends = job, tokenizer, ends
        self.sampler = None if job.sampling.is_greedy else Sampler(job.sampling, device)
        self._sent, self._scored = 0, 0  # characters, log-probabilities
        self._special = set(special_ids(tokenizer).values()) if job.echoes else set()

    def read(self, tokens: Sequence[int], is_last: bool) -> Piece | None:
        """Return what is new in the text of all tokens so far; None while a character or a stop text may go on."""
        raw = self._text(tokens)
        places = [place for place in (raw.find(stop) for stop in self.job.stops) if place >= 0]
        reason = "stop" if places or (is_last and tokens and tokens[-1] in self.ends) else "length" if is_last else None
        end = None  # of the text, where tokens go on behind it
        if places:
            end = min(places)
        elif not is_last:
            if raw.endswith("\N{REPLACEMENT CHARACTER}"):
                return None
            held = _held(raw, self.job.stops)
            end = len(raw) - held if held else None
        text = raw[:end] if self.job.echoes else raw[:end].lstrip()
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return Piece(new, len(tokens), reason, self._logprobs(tokens, end))

    def _text(self, tokens: Sequence[int]) -> str:
        if self.job.echoes:  # the first blank of an answer is there behind a prompt only
            before, new = self.job.ids[-_BEFORE:], [token for token in tokens if token not in self._special]
            head, whole = self.tokenizer.decode(before), self.tokenizer.decode([*before, *new])
            if whole.startswith(head):
                return str(whole[len(head) :])
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _logprobs(self, tokens: Sequence[int], end: int | None) -> list[TokenLogprob]:
        """Return the log-probabilities that no piece had yet, of the tokens that begin before the end of the text."""
        if self.sampler is None or self.sampler.settings.logprobs is None:
            return []
        begin = self._scored
        numbers = [n for n in range(begin, len(tokens)) if end is None or len(self._text(tokens[:n])) < end]
        self._scored += len(numbers)
        return [self.sampler.logprobs[n] for n in numbers]


def _held(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin a stop text."""
    begins = (stop[:size] for stop in stops for size in range(1, len(stop)))
    return max((len(begin) for begin in begins if text.endswith(begin)), default=0)


class Engine:
    """A pipeline whose model answers requests as they come, each with its own memory.

    Args:
        pipe: what answers.
        limits: of the server.

    Raises:
        ConfigError: a pipeline of another task, or arguments of `generate` that a server does not support.
        ConditionError: an adapter whose tokens attend to a part of their memory only.
    """

    def __init__(self, pipe: Pipeline, limits: Limits) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if pipe.config.task == "text-to-image":
            raise ConfigError("the adapter is for text-to-image, and a server writes texts: use mmattn.pipeline")
        greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": pipe.config.generation.get("max_new_tokens")}
        unsupported = [name for name, value in pipe.config.generation.items() if greedy.get(name, ...) != value]
        if unsupported:
            raise ConfigError(
                f"`mmattn serve` does not support {', '.join(unsupported)} in pipeline_config.json: remove it"
            )
        self.pipe, self.limits = pipe, limits
        self.running = 0
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self.ends = end_ids(pipe.model, pipe.tokenizer)
        host: PreTrainedModel = pipe.model.host
        text = host.config.get_text_config()
        context = int(getattr(text, "max_position_embeddings", 2048))
        blocks = min(limits.max_requests * -(-context // PAGE), 4096)
        device = pipe.device.type
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            # On a GPU transformers fills the free memory.
            num_blocks=blocks if device == "cpu" else None,
            max_batch_tokens=TOKENS if device == "cpu" else None,
            # Penalties need the tokens of the step before.
            use_async_batching=False,
        )
        answers = GenerationConfig(do_sample=False, eos_token_id=self.ends, pad_token_id=self.ends[0])
        self.manager = host.init_continuous_batching(generation_config=answers, continuous_batching_config=config)
        add_samplers(self.manager)
        self.manager.memories.share_prompts()

    async def stop(self) -> None:
        """Finish the requests that were taken, then end."""
        await self._idle.wait()
        await asyncio.to_thread(self.manager.stop, block=True)

    def healthy(self) -> bool:
        """Return True while requests are answered."""
        return bool(self.manager.is_running())

    def enter(self, answers: int = 1) -> None:
        """Accept a request for so many answers; `leave` must follow. 429 at the limit."""
        most = self.limits.max_requests
        if self.running + answers > most:
            raise HTTPException(429, f"{most} requests run or wait already: try again", RETRY)
        self.running += answers
        self._idle.clear()

    def leave(self, answers: int = 1) -> None:
        """Note the end of a request that was taken."""
        self.running -= answers
        if not self.running:
            self._idle.set()

    def fit(self, prompt: Prompt, max_tokens: int) -> tuple[list[int], int]:
        """Return the ids of a prompt, and `max_tokens` or the room behind it; TextError where there is none."""
        (ids,) = prompt_rows(self.pipe.tokenizer, [prompt])
        input_ids, config = torch.tensor([ids]), self.pipe.model.config
        check_prompt(input_ids, torch.ones_like(input_ids), config, min(max_tokens, 1))
        processor, rooms = self.manager.batch_processor, [len(ids) + max_tokens]
        rooms += [] if processor is None else [PAGE * processor.cache.num_blocks]
        rooms += [getattr(config, "max_position_embeddings", None) or rooms[0]]
        if min(rooms) - len(ids) < min(max_tokens, 1):
            raise TextError(f"a prompt of {len(ids)} tokens does not fit the {min(rooms)} of the cache: shorten it")
        return ids, min(rooms) - len(ids)

    @torch.no_grad()
    def score(self, ids: list[int], memory: Memory | None, top: int) -> list[TokenLogprob]:
        """Return the log-probabilities of the ids of a prompt but the first."""
        with paused(self.pipe.model):
            prompt = torch.tensor([ids], device=self.pipe.device)
            given = memory_arguments(memory, prompt, self.pipe.config.visible_from)
            logits = self.pipe.model(prompt, **given).logits[0]
        return [token_logprob(row, token, top) for row, token in zip(logits, ids[1:], strict=False)]

    async def answer(self, jobs: Sequence[Job], deadline: float) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the answers to jobs piece by piece, each with its number; leaving the loop cancels them.

        Args:
            jobs: to be answered.
            deadline: in seconds of the loop's clock; 504 after it.
        """
        results: asyncio.Queue[tuple[int, GenerationOutput | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        alarm = loop.call_at(deadline, results.put_nowait, (-1, None))
        writers = [Writer(job, self.pipe.tokenizer, self.ends, self.pipe.device) for job in jobs]
        names: dict[int, str] = {}
        try:
            for number, writer in enumerate(writers):
                names[number] = f"request-{next(self._numbers)}"
                self.manager.register_result_handler(
                    names[number], lambda result, number=number: results.put_nowait((number, result))
                )
                await self._add(names[number], writer)
            while names:
                number, result = await results.get()
                if result is None:
                    raise self.late()
                if number not in names:  # it came to a stop text
                    continue
                if result.error is not None:
                    if not self.healthy():
                        raise self._stopped()
                    raise ConditionError(f"the request failed: {result.error}")
                piece = writers[number].read(result.generated_tokens, result.is_finished())
                if piece is None:
                    continue
                if piece.finish_reason is not None:
                    self._end(names.pop(number), result.is_finished())
                yield number, piece
        finally:
            alarm.cancel()
            for name in names.values():
                self._end(name, is_finished=False)
            # Tokens that were generated before the cancellation arrived have no handler.
            while self.manager.get_result(timeout=0) is not None:
                pass

    async def _add(self, name: str, writer: Writer) -> None:
        """Queue a request; one that is left meanwhile is cancelled when it is queued."""
        job = writer.job
        sampler = {} if writer.sampler is None else {KEY: writer.sampler}
        options = {"memory": job.memory, "max_new_tokens": job.max_tokens, "streaming": True, **sampler}
        if job.memory is not None and self.pipe.config.visible_from == "last_token":
            options["visible_from"] = len(job.ids) - 1
        adding = asyncio.ensure_future(asyncio.to_thread(self.manager.add_request, job.ids, name, **options))
        try:
            if await asyncio.shield(adding) is None:
                raise self._stopped()
        except asyncio.CancelledError:
            adding.add_done_callback(lambda done: done.exception() or self.manager.cancel_request(name))
            raise

    def late(self) -> HTTPException:
        """Return the error of a request that takes too long."""
        return HTTPException(504, f"no answer within {self.limits.timeout:g} s")

    def _stopped(self) -> HTTPException:
        return HTTPException(503, "the model of this server has stopped: try again", RETRY)

    def _end(self, name: str, is_finished: bool) -> None:
        if not is_finished:
            self.manager.cancel_request(name)
        self.manager.output_router.result_handlers.pop(name, None)


class Sampler:
    """Chooses the tokens of one request from its logits, with a generator of its own."""

    def __init__(self, settings: SamplingSettings, device: torch.device) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self.settings = settings
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._warpers = LogitsProcessorList()
        if settings.temperature:
            self._generator = torch.Generator(device)
            if settings.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(settings.seed)
            self._warpers.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_k:
            self._warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self._warpers.append(TopPLogitsWarper(settings.top_p))

    def __deepcopy__(self, memo: dict[int, object]) -> Sampler:
        return self  # transformers copies the state of a request that it preempts

    def choose(self, logits: Tensor) -> int:
        """Return the next token by logits (v,)."""
        settings = self.settings
        scores = logits
        if self.tokens and (settings.presence_penalty or settings.frequency_penalty):
            ids, counts = torch.tensor(self.tokens, device=logits.device).unique(return_counts=True)
            scores = logits.index_add(0, ids, -(settings.presence_penalty + settings.frequency_penalty * counts))
        if settings.temperature:
            # The largest of logits with Gumbel noise is a sample of their distribution.
            scores = self._warpers(self.tokens, scores[None])[0]
            noise = torch.empty_like(scores).exponential_(generator=self._generator).log()
            token = int((scores - noise).argmax())
        else:
            token = int(scores.argmax())
        self.tokens.append(token)
        if settings.logprobs is not None:
            self.logprobs.append(token_logprob(logits, token, settings.logprobs))
        return token


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of a token by logits (v,), and of the `top` most likely ones."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def add_samplers(manager: ContinuousBatchingManager) -> None:
    """Let the requests of a manager bring a sampler; the others stay greedy."""
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    class RequestSamplers(ContinuousBatchingLogitsProcessor):
        """Leaves the requests of a step that have a sampler one possible token each."""

        supported_kwargs: dict[str, type] = {KEY: Sampler}
        ignored_kwargs: tuple[str, ...] = ()
        samplers: Sequence[Sampler | None] = ()

        def fill_defaults(self, int32_tensor: Tensor) -> None:
            int32_tensor.zero_()

        def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
            self.samplers = [request.state.logit_processor_kwargs.get(KEY) for request in requests_with_new_token]
            return torch.zeros(len(self.samplers), dtype=torch.int32)

        def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
            for row, sampler in enumerate(self.samplers):
                # Logits that are not finite end the request elsewhere.
                if sampler is not None and torch.isfinite(scores[row].amax()):
                    token = sampler.choose(scores[row])
                    scores[row] = -torch.inf
                    scores[row, token] = 0
            return scores

    processors = manager.logit_processor
    processors.logits_processor.append(RequestSamplers())
    processors.supported_keys |= RequestSamplers.supported_kwargs
    processors.tensors_required += 1
    processors.do_processing = True
