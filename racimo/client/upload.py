"""Sends contents to the cluster: several at a time, large ones in pieces and many small ones together, none that is not
what its name says."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator

from racimo.client.session import Session
from racimo.client.snapshot import LocalFile, read_parts
from racimo.control.bundle import MAX_BUNDLE_BYTES, MAX_CONTENT_BYTES, framed, framed_bytes

MAX_SENDERS = 8
BUNDLES_FROM = 64
"""So many small files are sent together; fewer one by one, each counting for itself."""
SEND_TIMEOUT_S = 300.0
"""For the answer to one content: the cluster writes it through to its disk."""


class _Cancelled(Exception):
    """Another sender failed, or the user wants to stop."""


Content = tuple[str, LocalFile]


class Upload:
    """`sessions` makes a session for a further sender (they are not for several threads)."""

    def __init__(self, sessions: Callable[[], Session]) -> None:
        self._sessions = sessions
        self._waiting: queue.SimpleQueue[list[Content]] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._errors: list[BaseException] = []

    def send(self, own: Session, contents: Iterable[Content]) -> None:
        """Sends `(sha256, file)` pairs, the largest first. Raises the first error of any sender: `RacimoError`."""
        ordered = _bundled(sorted(contents, key=lambda content: -content[1].size_bytes))
        for several in ordered:
            self._waiting.put(several)
        threads = [
            threading.Thread(target=self._help, name=f"upload {number}", daemon=True)
            for number in range(1, min(MAX_SENDERS, len(ordered)))
        ]
        for thread in threads:
            thread.start()
        try:
            self._work(own)
        except _Cancelled:
            pass  # its reason is among the errors
        finally:
            # With nothing left waiting this only ends what an error here leaves useless.
            if not self._waiting.empty():
                self._cancelled.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _help(self) -> None:
        session = self._sessions()
        try:
            self._work(session)
        except _Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for this one
            self._errors.append(error)
            self._cancelled.set()
        finally:
            session.close()

    def _work(self, session: Session) -> None:
        while not self._cancelled.is_set():
            try:
                several = self._waiting.get_nowait()
            except queue.Empty:
                return
            if len(several) > 1:
                bundle = b"".join(framed(sha256, b"".join(self._parts(file, sha256))) for sha256, file in several)
                session.call("POST", "/v1/blobs", type(None), content=bundle, timeout_s=SEND_TIMEOUT_S)
                continue
            ((sha256, file),) = several
            session.call(
                "PUT",
                f"/v1/blobs/{sha256}",
                type(None),
                content=lambda sha256=sha256, file=file: self._parts(file, sha256),  # type: ignore[misc]
                content_bytes=file.size_bytes,
                timeout_s=SEND_TIMEOUT_S,
            )

    def _parts(self, file: LocalFile, sha256: str) -> Iterator[bytes]:
        for part in read_parts(file, sha256):
            if self._cancelled.is_set():
                raise _Cancelled
            yield part


def _bundled(contents: list[Content]) -> list[list[Content]]:
    """Each content by itself, but many small ones together."""
    small = [content for content in contents if content[1].size_bytes <= MAX_CONTENT_BYTES]
    if len(small) < BUNDLES_FROM:
        return [[content] for content in contents]
    found = [[content] for content in contents if content[1].size_bytes > MAX_CONTENT_BYTES]
    bundle: list[Content] = []
    bundle_bytes = 0
    most_bytes = min(MAX_BUNDLE_BYTES, 1 + sum(framed_bytes(file.size_bytes) for _, file in small) // MAX_SENDERS)
    for content in small:
        size_bytes = framed_bytes(content[1].size_bytes)
        if bundle and bundle_bytes + size_bytes > most_bytes:
            found.append(bundle)
            bundle, bundle_bytes = [], 0
        bundle.append(content)
        bundle_bytes += size_bytes
    return [*found, bundle] if bundle else found
