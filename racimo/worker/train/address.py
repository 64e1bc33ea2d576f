"""Where a worker can be reached, as one line of text that travels with each generation.

`PATH` alone on a single machine, `PATH tcp:IP:PORT node:ID` once the machine has an address on the network between
nodes.
"""

import re

import msgspec

_FORM = re.compile(r"(?P<path>.*?)(?: tcp:(?P<host>\S+):(?P<port>\d+) node:(?P<node>\S+))?", re.DOTALL)


class Address(msgspec.Struct, frozen=True):
    """`node` "" is one without a name: the machine of whoever asks."""

    path: str
    host: str = ""
    port: int = 0
    node: str = ""

    def __str__(self) -> str:
        return f"{self.path} tcp:{self.host}:{self.port} node:{self.node}" if self.node else self.path

    def is_here(self, node: str) -> bool:
        """Whether it is on the machine `node`, so that memory can be shared."""
        return not self.node or self.node == node


def parse_address(text: str) -> Address:
    found = _FORM.fullmatch(text)
    assert found is not None
    return Address(found["path"], found["host"] or "", int(found["port"] or 0), found["node"] or "")
