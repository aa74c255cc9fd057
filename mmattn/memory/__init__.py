"""Types that `memory=` accepts: padded embeddings, a part that many rows share, a stream."""

from mmattn.memory.memory import Memory
from mmattn.memory.shared import ShardedMemory, SharedMemory
from mmattn.memory.stream import MemoryStream, SlidingBuffer

__all__ = [
    "Memory",
    "MemoryStream",
    "ShardedMemory",
    "SharedMemory",
    "SlidingBuffer",
]
