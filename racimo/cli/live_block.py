"""Lines at the bottom of a terminal that are replaced as a whole, in one write, so that nothing flickers."""

import os
import re
from collections.abc import Sequence
from typing import TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
"""Around one change of the screen; a terminal that does not know them ignores them."""
TO_LINE_END, BELOW = "\x1b[K", "\x1b[J"


class LiveBlock:
    """`show` replaces what it showed before, also where the terminal has become narrower meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: list[str] = []

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows) that lines may take."""
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, rows = 80, 24
        return max(1, columns - 1), max(1, rows - 1)

    def show(self, lines: Sequence[str], above: Sequence[str] = ()) -> None:
        """`above`: lines that stay, over the block."""
        text = [_BEGIN, self._back()]
        text += [f"{line}{TO_LINE_END}\n" for line in (*above, *lines)]
        self._stream.write("".join((*text, BELOW, _END)))
        self._stream.flush()
        self._shown = list(lines)

    def clear(self) -> None:
        self.show(())

    def _back(self) -> str:
        """To where the block begins: a line that is now wider than the terminal takes several."""
        columns = self.size[0] + 1
        num_rows = sum(max(1, -(-len(_COLOURS.sub("", line)) // columns)) for line in self._shown)
        return f"\x1b[{num_rows}F" if num_rows else "\r"
