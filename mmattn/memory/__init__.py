"""Types that `memory=` accepts: padded embeddings, a part that many rows share, a stream, a searched index."""

from mmattn.memory.memory import Memory
from mmattn.memory.searched_entries import SearchedMemory
from mmattn.memory.shared import ShardedMemory, SharedMemory
from mmattn.memory.stream import MemoryStream, SlidingBuffer

__all__ = [
    "Memory",
    "MemoryStream",
    "SearchedMemory",
    "ShardedMemory",
    "SharedMemory",
    "SlidingBuffer",
]
