"""What a server takes: sizes, numbers and times."""

from __future__ import annotations

from dataclasses import dataclass

from mmattn.errors import check_float, check_int


@dataclass(frozen=True)
class Limits:
    """What a server takes; more is refused with a status that says so.

    Args:
        max_requests: requests that run or wait; another gets 429 with Retry-After.
        max_body_bytes: of a request, pictures included; 413.
        max_tokens: new tokens of an answer; 400.
        max_documents: documents of a request; 400.
        timeout: seconds until a request that is not done is given up; 504.

    Raises:
        ConfigError: a number below its range.
    """

    max_requests: int = 64
    max_body_bytes: int = 20_000_000
    max_tokens: int = 256
    max_documents: int = 256
    timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "max_tokens", "max_documents"):
            check_int(name, getattr(self, name))
        check_float("timeout", self.timeout, at_least=0.001)
