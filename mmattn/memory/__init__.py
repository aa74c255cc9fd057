"""Types that `memory=` accepts: padded embeddings, a part that many rows share, a stream."""

from mmattn.memory.memory import Memory
from mmattn.memory.shared import SharedMemory
from mmattn.memory.stream import MemoryStream, SlidingBuffer

__all__ = [
    "Memory",
    "MemoryStream",
    "SharedMemory",
    "SlidingBuffer",
]
