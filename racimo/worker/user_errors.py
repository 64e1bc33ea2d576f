"""An exception of user code as a `Failure`: its code, one sentence, and the traceback without our own frames."""

import errno
import traceback
from collections.abc import Iterator
from pathlib import Path

import racimo
from racimo.spec.errors import RacimoError
from racimo.state.nouns import Failure

MAX_TRACEBACK_CHARS = 32_000
MAX_MESSAGE_CHARS = 1_000

_TRACEBACK_HEAD = "Traceback (most recent call last):"
_OWN_FOLDER = f"{Path(racimo.__file__).parent}/"
_ALLOCATOR_WORDS = ("DefaultCPUAllocator", "can't allocate memory", "CUDA out of memory")


def failure_from(error: BaseException, cwd: str, rank: int, worker: str) -> Failure:
    """The `Failure` that ends a worker with this exception; file names below `cwd` are shown relative to it."""
    if isinstance(error, RacimoError):
        code, message, hint = error.code, error.message, error.hint
    else:
        code, hint = _code_of(error), ""
        message = _in_one_line(error)
    place = _place_of(error, cwd)
    return Failure(
        code=code,
        message=message[:MAX_MESSAGE_CHARS] + (f" ({place})" if place else ""),
        hint=hint,
        traceback=user_traceback(error, cwd),
        rank=rank,
        worker=worker,
    )


def _in_one_line(error: BaseException) -> str:
    """`TypeError: sum() received ...` and a "…" where more lines follow; of a syntax error, what comes after its place.

    A data-loading process hands on its exception as a traceback in the message of another: then the one inside counts.
    """
    lines = [line for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        return lines[-1].strip()
    begins = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK_HEAD)]
    if begins:
        inside = lines[begins[-1] + 1 :]
        lines = inside[next((number for number, line in enumerate(inside) if not line.startswith(" ")), 0) :] or lines
    first, *more = lines
    if more and first.rstrip().endswith(f"{type(error).__name__}:"):
        first = f"{first.rstrip()} {more.pop(0).strip()}"  # the message began with an empty line
    return first.strip() + (" …" if more else "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _code_of(error: BaseException) -> str:
    """The root of the chain counts: a `RuntimeError` raised because the disk was full is a full disk."""
    for link in _chain(error):
        if isinstance(link, RacimoError):
            return link.code
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk-full"
        if isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM):
            return "out-of-memory"
        out_of_memory = type(link).__name__ == "OutOfMemoryError"
        if out_of_memory or (isinstance(link, RuntimeError) and any(word in str(link) for word in _ALLOCATOR_WORDS)):
            return "out-of-memory"
    return "syntax-error" if isinstance(error, SyntaxError) and error.__traceback__ is not None else "worker-raised"


def _place_of(error: BaseException, cwd: str) -> str:
    """`file:line` of the innermost frame in the run's own files."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(cwd + "/")]
    if not frames:
        return ""
    return f"{frames[-1].filename.removeprefix(cwd + '/')}:{frames[-1].lineno}"


def user_traceback(error: BaseException, cwd: str) -> str:
    """As Python prints it, from the user's first frame on; our frames are left out, but for one that itself raised
    what is not of our making (`dataset[index]`, say). The end is kept if it is long.

    A `RacimoError` without a user's frame is its own message alone, a syntax error is shown as Python shows it.
    """
    formatted = traceback.TracebackException.from_exception(error)
    kept = _user_frames(formatted, cwd)
    if not kept and isinstance(error, SyntaxError | RacimoError):
        text = "".join(formatted.format_exception_only())
        if isinstance(error, RacimoError):
            text = f"racimo: {error}\n"
        return text.replace(cwd + "/", "")
    pending: list[traceback.TracebackException | None] = [formatted]
    while pending:
        part = pending.pop()
        if part is not None:
            frames = _user_frames(part, cwd)
            if frames:
                part.stack = traceback.StackSummary.from_list(frames)
            pending += [part.__cause__, part.__context__]
    text = "".join(formatted.format()).replace(cwd + "/", "")
    return text[-MAX_TRACEBACK_CHARS:]


def _user_frames(part: traceback.TracebackException, cwd: str) -> list[traceback.FrameSummary]:
    """Frames from the first one in the run's own files on, less ours. Where we raised on purpose, up to the last of
    the user's; else the one that raised stays, whosever it is."""
    users = [position for position, frame in enumerate(part.stack) if frame.filename.startswith(cwd + "/")]
    if not users:
        return []
    on_purpose = part.exc_type is not None and issubclass(part.exc_type, RacimoError)
    frames = list(part.stack[users[0] : users[-1] + 1 if on_purpose else None])
    return [frame for frame in frames if frame is frames[-1] or not frame.filename.startswith(_OWN_FOLDER)]
