"""Which versions a machine has, and whether two machines can be of one cluster."""

import functools
import importlib.metadata
import platform

from racimo.version import __version__

SAME_MINOR = ("python", "torch")
"""What must agree in its first two numbers, for the same bits and the same pickles; patch differences are accepted."""


@functools.cache
def own_versions() -> dict[str, str]:
    """Of this process's machine, read once: it takes milliseconds."""
    versions = {"python": platform.python_version(), "racimo": __version__}
    try:
        versions["torch"] = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pass
    return versions


def version_problem(head: dict[str, str], node: dict[str, str]) -> str:
    """One sentence with both versions if a node cannot be of that head's cluster, else ""."""
    for name in SAME_MINOR:
        theirs, ours = head.get(name, ""), node.get(name, "")
        if theirs and not ours:
            return f"this node has no {name}, the head has {name} {theirs}"
        if theirs and minor_of(theirs) != minor_of(ours):
            return f"this node has {name} {ours}, the head {theirs}: the first two numbers must be the same"
    return ""


def minor_of(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])
