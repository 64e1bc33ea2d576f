"""`python -m racimo.worker.tune.propose_process`: proposes points for a tune run, beside one of its workers.

Code of a user and of Optuna runs here and not in the control process. It may be killed at any time: all it knows was
told, and is told again. It ends by itself when it was not asked for a while, so nothing is left of one that nobody
knows any more.
"""

import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from racimo.agent.frames import FrameBuffer, FrameError, encode_frame
from racimo.agent.propose_protocol import ProposerAsk
from racimo.agent.protocol import MessageToWorker, WorkerHello
from racimo.worker.context import load_context
from racimo.worker.tune.propose_answers import Answers

IDLE_MOST_S = 120.0
"""Without a question for so long it ends; another one is begun in about a second when there is one again."""
RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.05, 1.0
_READ_BYTES = 256 * 1024

_decode = msgspec.msgpack.Decoder(MessageToWorker).decode


class _Connection:
    """To the node's agent, which may die and come back."""

    def __init__(self, path: str, worker: str, answers: Answers, idle_most_s: float) -> None:
        self._path, self._answers, self._idle_most_s = path, answers, idle_most_s
        self._hello = WorkerHello(worker=worker, pid=os.getpid())
        self._asked_at_s = time.monotonic()

    def serve(self) -> None:
        """Until nobody asks any more."""
        pause_s = RECONNECT_FIRST_S
        while self._left_s > 0:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(self._path)
                    connection.sendall(encode_frame(self._hello))
                    pause_s = RECONNECT_FIRST_S
                    self._talk(connection)
                except TimeoutError:
                    return
                except (OSError, FrameError) as error:
                    # No agent at the moment: the supervisor starts it again, and it will be found at the same path.
                    print(f"racimo: no agent: {error}", file=sys.stderr)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, RECONNECT_MOST_S)

    @property
    def _left_s(self) -> float:
        return self._asked_at_s + self._idle_most_s - time.monotonic()

    def _talk(self, connection: socket.socket) -> None:
        """`TimeoutError` when it was idle for too long, another `OSError` when the connection ends."""
        frames = FrameBuffer()
        while True:
            connection.settimeout(max(self._left_s, 0.001))
            content = connection.recv(_READ_BYTES)
            if not content:
                raise ConnectionResetError("it closed the connection")
            asks = [message for frame in frames.feed(content) if isinstance(message := _decode(frame), ProposerAsk)]
            if asks:  # of several only the newest is still waited for
                proposed = self._answers.answer(asks[-1])
                self._asked_at_s = time.monotonic()
                connection.settimeout(None)
                connection.sendall(encode_frame(proposed))


def main() -> int:
    context = load_context()
    if context is None:
        print("racimo: this is a part of a cluster's tune runs", file=sys.stderr)
        return 2
    answers = Answers(Path.cwd(), context.worker)
    _Connection(context.agent_socket, context.worker, answers, IDLE_MOST_S).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
