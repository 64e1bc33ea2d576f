"""httpx without its own command line, whose imports (click, rich) cost as much as the rest: `racimo ps` is quick.

httpx goes without `httpx._main` where that cannot be imported; so here it cannot, and afterwards it can again.
"""

import sys
from typing import Any

_COMMAND_LINE = "httpx._main"

if "httpx" in sys.modules:
    import httpx
else:
    modules: dict[str, Any] = sys.modules
    modules[_COMMAND_LINE] = None
    try:
        import httpx
    finally:
        del modules[_COMMAND_LINE]

__all__ = ["httpx"]
