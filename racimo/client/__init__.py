"""What speaks to a cluster: the `Client`, finding and starting clusters, snapshots of files. Loaded on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from racimo.client.api import Client, submit

__all__ = ["Client", "submit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from racimo.client import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
