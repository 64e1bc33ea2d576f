"""Which attempt of a run may write checkpoints at a place.

Workers of an attempt that was given up may live on for a while on machines that nobody hears, and a URL or a network
file system is the same place for them and for those that went on elsewhere. So each attempt but the first leaves its
number there before it looks for a checkpoint, and whoever finds a higher one than its own writes and deletes nothing.
"""

from pathlib import Path

import fsspec

from racimo.agent.whole_file import write_whole

MARK = "racimo-attempt"
"""A file beside the checkpoints with the number of the newest attempt."""


class Fenced(Exception):
    """A newer attempt of the run writes here now."""

    def __init__(self, newest: int) -> None:
        super().__init__(f"attempt {newest} of this run has begun elsewhere, and writes there now")


class Fence:
    """`attempt` 0: whoever only reads."""

    def __init__(self, root: str, is_url: bool, attempt: int) -> None:
        self.attempt = attempt
        self._root, self._is_url = root, is_url

    def claim(self) -> None:
        """From here on no earlier attempt writes. Raises what the place raises."""
        if self.attempt <= max(self._newest(), 1):
            return
        mark = str(self.attempt).encode()
        if self._is_url:
            fs, path = fsspec.core.url_to_fs(self._root)
            fs.makedirs(path, exist_ok=True)
            fs.pipe_file(f"{path}/{MARK}", mark)
        else:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            write_whole(Path(self._root) / MARK, mark)

    def check(self, written_by: int = 0) -> None:
        """Raises `Fenced` if a newer attempt has claimed the place, or (`written_by`) wrote what would be replaced."""
        newest = max(self._newest(), written_by) if self.attempt else 0
        if newest > self.attempt:
            raise Fenced(newest)

    def _newest(self) -> int:
        try:
            if self._is_url:
                fs, path = fsspec.core.url_to_fs(self._root)
                content = fs.cat_file(f"{path}/{MARK}")
            else:
                content = (Path(self._root) / MARK).read_bytes()
        except FileNotFoundError:
            return 0
        return int(content) if content.isdigit() else 0
