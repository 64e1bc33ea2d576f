"""A home that was a head's and becomes a node's: what made it a head is set aside whole, to make it one again."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from racimo.act.journal_file import SqliteJournal
from racimo.client.discovery import supervisor_alive
from racimo.client.ending import service_records
from racimo.client.interrupts import uninterrupted
from racimo.client.say import Say
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home
from racimo.state.fold import fold
from racimo.state.state import State

NAMED_RUNS = 5
OWN_HOME = "export RACIMO_HOME=$HOME/.racimo-node   # a home of its own for this node"
_OF_NODE = ("workers", "files", "runs", "events.jsonl")


def refuse_busy_head(home: Home) -> None:
    """`RacimoError` join-refused where this home's cluster is up, or keeps runs that have not ended."""
    if not home.journal_file.exists():
        return
    if supervisor_alive(home) or service_records(home):
        words = f"{home.root} is the head of a running cluster: a home is a head's or a node's, not both"
        raise RacimoError("join-refused", words, f"racimo down   # ends that cluster, then join again\n{OWN_HOME}")
    try:
        runs = _open_runs(home)
    except RacimoError as error:
        words = f"{home.root} was the head of a cluster whose journal cannot be read: {error.message}"
        hint = f"{OWN_HOME}\nmv {home.root} {home.root}.old   # if it is not wanted"
        raise RacimoError("join-refused", words, hint) from None
    if runs:
        more = f" and {len(runs) - NAMED_RUNS} more" if len(runs) > NAMED_RUNS else ""
        words = f"{home.root} was the head of a cluster that keeps {', '.join(runs[:NAMED_RUNS])}{more} for its next up"
        stop = f"racimo up && racimo stop {runs[0]} && racimo down   # ends them, then join again"
        raise RacimoError("join-refused", words, f"{stop}\n{OWN_HOME}")


def _open_runs(home: Home) -> list[str]:
    journal = SqliteJournal(home.journal_file)
    try:
        content, records = journal.load()
        state = fold(records, State.from_bytes(content)) if content is not None else fold(records)
    except ValueError as error:
        raise RacimoError("journal-unreadable", str(error)) from None
    finally:
        journal.close()
    return list(state.open_runs)


@contextlib.contextmanager
def head_set_aside(home: Home, say: Say) -> Iterator[None]:
    """Moves what made this home a head's into a dated folder in it, with the same paths; back again if what is done
    inside fails. The name of its node stays, and so do environments."""
    if not home.journal_file.exists():
        yield
        return
    aside = home.root / time.strftime("head-%Y%m%d-%H%M%S")
    name = home.node_dir / "id"
    with uninterrupted():
        _move(home.root, aside)
        if name.exists():  # the node may get another one
            shutil.copy2(name, aside / "node" / "id")
    try:
        yield
    except BaseException:
        with uninterrupted():
            if (aside / "node" / "id").exists():
                (aside / "node" / "id").replace(name)
            _move(aside, home.root)
        raise
    say(
        f"this home was a head's: its journal, token and outputs are in {aside} now (to be that head again:"
        f" racimo down, then cp -a {aside}/. {home.root}/)"
    )


def _move(source: Path, target: Path) -> None:
    """`RacimoError` start-failed."""
    home = Home(source)
    found = (
        home.journal_file.parent, home.cluster_file, home.config_file, home.token_file, home.certificate_file,
        home.output_dir(""), *(home.node_dir / name for name in _OF_NODE),
    )  # fmt: skip
    try:
        (target / "node").mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in found:
            if path.exists():
                path.rename(target / path.relative_to(source))
        for folder in (home.node_dir, source):
            with contextlib.suppress(OSError):  # not empty: it is a home
                folder.rmdir()
    except OSError as error:
        raise RacimoError("start-failed", f"cannot set aside what is in {source}: {error.strerror}") from None
