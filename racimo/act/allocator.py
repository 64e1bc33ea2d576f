"""How this process's C library keeps memory that was freed: as little as it can."""

import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE_BYTES = 128 * 1024
MAX_ARENAS = 2


def give_back_freed_memory() -> None:
    """Large pieces go back to the kernel when they are freed, and threads share their heaps.

    glibc raises that limit by itself as soon as a large piece is freed, and gives each thread a heap of its own: a
    process that has passed on contents through its threads would keep hundreds of MB for life. Other C libraries have
    no such call, and nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_ARENA_MAX, MAX_ARENAS)
