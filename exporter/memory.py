"""How glibc's allocator returns freed memory to the system. With another C library nothing is done.

By default, glibc raises the size from which a block is mapped on its own whenever a mapped block is
freed, up to 32 MiB. After one large answer, such as a line of 16 MiB, blocks of this size lie
between small ones on the heap, and most of their memory stays with the process for ever.
"""

import ctypes
from contextlib import suppress


MAPPED_FROM = 384 * 1024
"""Bytes from which a block is mapped on its own, and so returned when it is freed.

It is more than the 256 KiB that asyncio reserves for each read from a socket, because mapping a
block costs a read some microseconds.
"""
_M_MMAP_THRESHOLD = -3


def map_large_blocks() -> None:
    """Map each block of at least `MAPPED_FROM` bytes on its own, whatever was freed before."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM)


def trim_memory() -> None:
    """Return freed memory now; otherwise glibc keeps all memory below its highest used block."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
