"""What Ray wrote before it ended, as one sentence of ours: its own text is for nobody who types `racimo`."""

import re

_KNOWN = (
    (r"Version mismatch", "the head's Ray or Python is of another version than the one here"),
    (r"AuthenticationError|Unauthenticated|InvalidAuthToken|authentication token", "the head's Ray refuses this"
     " machine's token"),
    (r"Address already in use|is already running at", "a port that it needs is taken by another program"),
    (r"No space left on device", "the disk is full"),
    (r"Cannot allocate memory|MemoryError|bad_alloc", "there is not enough memory for it"),
    (r"cluster ID|ClusterID|cluster_id", "the head's Ray began anew"),
    (r"Failed to connect to GCS|Unable to connect to GCS|failed to connect|timed out|Timed out", "the head's Ray does"
     " not answer"),
    (r"No module named|ImportError", "it is not installed completely here"),
)  # fmt: skip
_PATTERNS = tuple((re.compile(pattern), sentence) for pattern, sentence in _KNOWN)


def why_it_ended(output: str, code: int | None, lived_s: float) -> str:
    """`code`: exit code of the process that runs Ray, negative for a signal, None if only a part of it ended."""
    for pattern, sentence in _PATTERNS:
        if pattern.search(output):
            return f"Ray ended after {lived_s:.0f} s: {sentence}"
    how = "a part of it died" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"Ray ended after {lived_s:.0f} s ({how})"
