"""Sampling of each request by its own settings, as a processor of logits in transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import FutureRequestState

#: The keyword under which transformers carries a sampler with its request.
KEY = "sampler"


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
