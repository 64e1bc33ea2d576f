"""Many small contents in one request: each as its SHA-256 (32 bytes), its size (4 bytes, big-endian) and itself."""

import struct
from collections.abc import Iterator

from racimo.spec.errors import RacimoError

MAX_BUNDLE_BYTES = 16 * 2**20
MAX_CONTENT_BYTES = 256 * 2**10
"""Larger ones go by themselves, in pieces."""
_HEAD = struct.Struct(">32sI")


def framed(sha256: str, content: bytes) -> bytes:
    return _HEAD.pack(bytes.fromhex(sha256), len(content)) + content


def framed_bytes(size_bytes: int) -> int:
    """What a content of so many bytes takes in a bundle."""
    return _HEAD.size + size_bytes


def contents(bundle: bytes) -> Iterator[tuple[str, bytes]]:
    """`(sha256, content)` in order. `RacimoError` invalid-request where it is cut short or a content is too large."""
    offset = 0
    while offset < len(bundle):
        if offset + _HEAD.size > len(bundle):
            raise RacimoError("invalid-request", "the bundle ends in the middle of a head")
        digest, size_bytes = _HEAD.unpack_from(bundle, offset)
        offset += _HEAD.size
        if size_bytes > MAX_CONTENT_BYTES or offset + size_bytes > len(bundle):
            raise RacimoError("invalid-request", f"the bundle says {size_bytes} bytes and has {len(bundle) - offset}")
        yield digest.hex(), bundle[offset : offset + size_bytes]
        offset += size_bytes
