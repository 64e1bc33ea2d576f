"""Reads a SQLite write-ahead log before SQLite does, which drops a torn tail without a word.

Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log. A frame is valid if its salts are the header's and
its running checksum is right; what ends with a commit frame counts, and everything after the first bad frame is lost.
"""

import struct
from pathlib import Path

import msgspec

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN = 0x377F0682, 0x377F0683


class WalReport(msgspec.Struct, frozen=True, kw_only=True):
    """What SQLite will keep of a log (`num_commits`) and what it will drop.

    `torn_bytes`: behind the last whole transaction. `num_lost_commits`: whole ones behind a damaged place.
    `unreadable_bytes`: of a log that SQLite ignores as a whole, as its header is damaged.
    """

    num_commits: int = 0
    torn_bytes: int = 0
    num_lost_commits: int = 0
    unreadable_bytes: int = 0

    @property
    def lost_records(self) -> bool:
        """True if durable records are certainly gone."""
        return bool(self.num_lost_commits or self.unreadable_bytes)

    @property
    def note(self) -> str:
        """One sentence for people, or "" if the log is whole."""
        if self.unreadable_bytes:
            return (
                f"the journal's write-ahead log has a damaged header: the {self.unreadable_bytes} bytes in it are lost"
            )
        if self.num_lost_commits:
            return (
                f"the journal's write-ahead log is damaged: {self.num_commits} transactions in it are good,"
                f" {self.num_lost_commits} behind the damage are lost"
            )
        if self.torn_bytes:
            return (
                f"the journal's log ends in the middle of a write, which has been cut off ({self.torn_bytes} bytes);"
                f" {self.num_commits} transactions before it are whole"
            )
        return ""


def inspect_wal(path: Path) -> WalReport:
    """Reads the log at `path`; a missing or empty one is whole. The database must not be open."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return WalReport()
    if not content:
        return WalReport()
    if len(content) < _HEADER.size:
        return WalReport(torn_bytes=len(content))
    magic, _, page_size, _, salt1, salt2, *stored = _HEADER.unpack_from(content)
    word = "<" if magic == _MAGIC_LITTLE_ENDIAN else ">"
    checksum = _checksum(content[: _HEADER.size - 8], word, (0, 0))
    frame_size = _FRAME.size + page_size
    if magic not in (_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN) or checksum != tuple(stored) or page_size < 512:
        # SQLite ignores the whole log then; how much was in it cannot be read from it any more.
        return WalReport(unreadable_bytes=len(content))
    return _read_frames(content, frame_size, word, (salt1, salt2), checksum)


def _read_frames(
    content: bytes, frame_size: int, word: str, salts: tuple[int, int], checksum: tuple[int, int]
) -> WalReport:
    num_commits, num_commits_behind, tail, broken = 0, 0, 0, False
    for offset in range(_HEADER.size, len(content), frame_size):
        size = min(frame_size, len(content) - offset)
        if size < _FRAME.size:
            tail += size
            break
        _, pages_after_commit, *rest = _FRAME.unpack_from(content, offset)
        if tuple(rest[:2]) != salts:
            break  # left over from before the log was last begun anew
        if size == frame_size and not broken:
            checksum = _checksum(content[offset : offset + 8], word, checksum)
            checksum = _checksum(content[offset + _FRAME.size : offset + frame_size], word, checksum)
        broken = broken or size < frame_size or checksum != tuple(rest[2:])
        tail += size
        if pages_after_commit and broken:
            num_commits_behind += 1
        elif pages_after_commit:
            num_commits, tail = num_commits + 1, 0
    # One commit frame behind the damage ends the damaged transaction itself: a torn last write.
    num_lost = num_commits_behind if num_commits_behind > 1 else 0
    return WalReport(num_commits=num_commits, torn_bytes=tail, num_lost_commits=num_lost)


def _checksum(content: bytes, word: str, start: tuple[int, int]) -> tuple[int, int]:
    first, second = start
    words = struct.unpack(f"{word}{len(content) // 4}I", content)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second
