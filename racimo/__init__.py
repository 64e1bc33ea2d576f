"""Racimo joins servers into one AI cluster. This module is what a user imports."""

from racimo.version import __version__

__all__ = ["__version__"]
