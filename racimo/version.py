"""The package's version and the version of the protocols between its processes."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 2
"""Raised whenever a message between client, control process, agent and worker changes its meaning."""
