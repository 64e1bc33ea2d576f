"""Sends contents to the cluster: several at a time, large ones in pieces, none that is not what its name says."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator

from racimo.client.session import Session
from racimo.client.snapshot import LocalFile, read_parts

MAX_SENDERS = 8
SEND_TIMEOUT_S = 300.0
"""For the answer to one content: the cluster writes it through to its disk."""


class _Cancelled(Exception):
    """Another sender failed, or the user wants to stop."""


class Upload:
    """`sessions` makes a session for a further sender (they are not for several threads)."""

    def __init__(self, sessions: Callable[[], Session]) -> None:
        self._sessions = sessions
        self._waiting: queue.SimpleQueue[tuple[str, LocalFile]] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._errors: list[BaseException] = []

    def send(self, own: Session, contents: Iterable[tuple[str, LocalFile]]) -> None:
        """Sends `(sha256, file)` pairs, the largest first. Raises the first error of any sender: `RacimoError`."""
        ordered = sorted(contents, key=lambda content: -content[1].size_bytes)
        for content in ordered:
            self._waiting.put(content)
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
                sha256, file = self._waiting.get_nowait()
            except queue.Empty:
                return
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
