"""Starts the services of this machine, and starts them again when they die.

`python -m racimo.control.supervisor --home DIR [--service]`, detached by whoever starts it. Standard library only: it
lives as long as the cluster and should weigh nothing. It holds `supervisor.lock` for life, adopts services that
outlived an earlier supervisor (pid and start time), waits on pidfds, and is itself watched by the services
(`racimo.act.guardian`). Which services there are the home says (`racimo.control.roles`).

`--service` is for systemd: where another supervisor holds the lock, this one waits to take its place.

The cluster ends when `processes/shutdown` exists (the control process writes it when asked to shut down; SIGTERM here
does the same): services are then not started again, and what they leave behind is ended too.
"""

import fcntl
import os
import select
import signal
import sys
import time

from racimo.act import guardian
from racimo.control.roles import (
    AGENT_BY_ITSELF_S,
    END_FIRST,
    END_MOST_S,
    RAY_DELAY_MOST_S,
    has_joined,
    program_of,
    roles_of,
)
from racimo.control.supervisor_log import bound_own_log, last_line, rotate, say

# Paths and output by os.* throughout: pathlib and logging would double this process's size.

STABLE_AFTER_S = 5.0
"""A service that lived this long is started again at once when it dies; an earlier death doubles the delay."""

EXIT_REFUSED = 78
"""The control process refuses to start on this home and nothing but a person can change that (sysexits' EX_CONFIG)."""

PR_SET_CHILD_SUBREAPER = 36


class Service:
    """One service process, as this supervisor knows it now."""

    __slots__ = ("delay_s", "due_s", "pid", "pidfd", "role", "started_s")

    def __init__(self, role: str) -> None:
        self.role = role
        self.pid = 0
        self.pidfd: int | None = None
        self.started_s = 0.0
        self.delay_s = 0.0
        self.due_s: float | None = 0.0
        """When to start it (monotonic); None while it lives."""


class Supervisor:
    def __init__(self, root: str, lock: int) -> None:
        self.root = root
        self.lock = lock
        self.services = {role: Service(role) for role in roles_of(root)}
        self.leaving: list[Service] = []
        """Services that the home no longer names, told to end."""
        self.joined = has_joined(root)
        self.ever_stable = False
        self.exit_codes: dict[int, int] = {}
        """Wait statuses of children that were reaped, until their pidfd has been looked at."""
        self.poll = select.poll()
        self.wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poll.register(self.wake_read, select.POLLIN)

    @property
    def mark(self) -> str:
        return os.path.join(self.root, guardian.PROCESSES_DIR, guardian.SHUTDOWN_MARK)

    @property
    def ending(self) -> bool:
        return os.path.exists(self.mark)

    def run(self) -> int:
        """Until the cluster is asked to end. Returns the exit code."""
        for service in self.services.values():
            self.adopt(service)
        if self.ending and all(service.pidfd is None for service in self.services.values()):
            self.end_leftovers()  # of a shutdown that was cut short
            os.unlink(self.mark)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self.ask_for_end())
        signal.signal(signal.SIGINT, lambda number, frame: self.ask_for_end())
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # wakes: the home's files have changed
        refused = False
        while not self.ending and not refused:
            if not guardian.holds_lock(self.lock, self.root):
                return self.end_without_home()
            self.follow_home()
            self.start_due()
            self.wait(self.next_due_s())
            refused = self.look()
        self.end()
        return EXIT_REFUSED if refused else 0

    def follow_home(self) -> None:
        """Takes on the services that the home has come to name, and lets go of those that it no longer does. A machine
        that is no longer a node does not become a head by that: it ends."""
        if self.joined and not has_joined(self.root):
            say("this home has left its cluster")
            self.ask_for_end()
            return
        roles = roles_of(self.root)
        for role in roles:
            if role not in self.services:
                self.services[role] = Service(role)
        for role in [role for role in self.services if role not in roles]:
            service = self.services.pop(role)
            if service.pidfd is not None:
                say(f"{role} is no longer needed: ending process {service.pid}")
                signal.pidfd_send_signal(service.pidfd, signal.SIGTERM)
                self.leaving.append(service)

    def adopt(self, service: Service) -> bool:
        """Takes over a living process of that role, left by an earlier supervisor."""
        record = guardian.read_live(self.root, service.role)
        pidfd = None if record is None else guardian.open_pidfd(record)
        if record is None or pidfd is None:
            return False
        self.attach(service, record.pid, pidfd)
        say(f"{service.role} lives already as process {record.pid}")
        return True

    def attach(self, service: Service, pid: int, pidfd: int) -> None:
        service.pid, service.pidfd = pid, pidfd
        service.started_s, service.due_s = time.monotonic(), None
        self.poll.register(pidfd, select.POLLIN)

    def start_due(self) -> None:
        """Starts what is due."""
        now_s = time.monotonic()
        for service in self.services.values():
            if service.due_s is None or service.due_s > now_s or self.adopt(service):
                continue
            environment = guardian.clean_environment()
            environment[guardian.SUPERVISED_VARIABLE] = "1"
            log = os.path.join(self.root, guardian.LOGS_DIR, f"{service.role}.log")
            rotate(log)
            try:
                pid = guardian.spawn(program_of(service.role, self.root), environment, log)
            except OSError as error:  # such as no more processes; tried again later
                service.delay_s = guardian.next_delay_s(service.delay_s)
                service.due_s = now_s + service.delay_s
                say(f"{service.role} could not be started ({error.strerror}); trying again in {service.delay_s:g} s")
                continue
            self.attach(service, pid, os.pidfd_open(pid))
            self.record(service)
            say(f"{service.role} started as process {pid}")

    def record(self, service: Service) -> None:
        try:
            guardian.write_record(self.root, service.role, service.pid)
        except OSError as error:  # a full disk: the service writes its own record as well
            say(f"cannot record {service.role}: {error.strerror}")

    def next_due_s(self) -> float:
        due_s = [service.due_s for service in self.services.values() if service.due_s is not None]
        return min([time.monotonic() + guardian.LOOK_AT_HOME_S, *due_s])

    def wait(self, until_s: float) -> None:
        """Until a service ended, a signal came or `until_s`; reaps children, adopted orphans among them."""
        timeout_ms = max(0.0, until_s - time.monotonic()) * 1000 + 1
        for fd, _ in self.poll.poll(timeout_ms):
            if fd == self.wake_read:
                try:
                    while os.read(fd, 4096):
                        pass
                except BlockingIOError:
                    pass
        self.reap()

    def reap(self) -> None:
        own = {service.pid for service in (*self.services.values(), *self.leaving)}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in own:
                self.exit_codes[pid] = os.waitstatus_to_exitcode(status)

    def look(self) -> bool:
        """Notes which services have ended and when to start them again. True if the control process refuses this
        home for good and never worked on it."""
        for service in [one for one in self.leaving if one.pidfd is not None and is_over(one.pidfd)]:
            self.forget(service)
            self.leaving.remove(service)
        for service in self.services.values():
            if service.pidfd is None or not is_over(service.pidfd):
                continue
            code = self.forget(service)
            now_s = time.monotonic()
            lived_s = now_s - service.started_s
            if lived_s >= STABLE_AFTER_S:
                service.delay_s = 0.0
                self.ever_stable = True
            if service.role == "control" and code == EXIT_REFUSED and not self.ever_stable:
                say("control refused to start: " + last_line(os.path.join(self.root, guardian.LOGS_DIR, "control.log")))
                return True
            if self.ending:
                say(f"{service.role} (process {service.pid}) ended, {ending_of(code)}")
                continue
            service.due_s = now_s + service.delay_s
            again = "at once" if service.delay_s == 0 else f"in {service.delay_s:g} s"
            say(f"{service.role} (process {service.pid}) ended after {lived_s:.1f} s, {ending_of(code)}; again {again}")
            most_s = RAY_DELAY_MOST_S if service.role == "ray" else guardian.RESTART_DELAY_MOST_S
            service.delay_s = guardian.next_delay_s(service.delay_s, most_s)
            bound_own_log(self.root)
        return False

    def forget(self, service: Service) -> int | None:
        """Lets go of an ended service; its exit code (negative: a signal), None if it was not this process's child."""
        assert service.pidfd is not None
        self.reap()
        self.poll.unregister(service.pidfd)
        os.close(service.pidfd)
        service.pidfd = None
        return self.exit_codes.pop(service.pid, None)

    def ask_for_end(self) -> None:
        """SIGTERM: as if the API had been asked to shut down."""
        try:
            os.close(os.open(self.mark, os.O_WRONLY | os.O_CREAT, 0o600))
        except FileNotFoundError:
            pass  # the home is gone, which ends the cluster as well

    def end(self) -> None:
        """Ends all services, then whatever they left, then the records."""
        say("ending the cluster")
        first = [self.services[role] for role in END_FIRST if role in self.services]
        rest = [service for role, service in self.services.items() if role not in END_FIRST]
        for service in (*first, *self.leaving):
            self.signal_end(service)
        for service in (*first, *self.leaving):
            self.await_end(service, END_MOST_S[service.role])
        for service in rest:
            # Where a control process was here, it has told the agent already.
            if "control" not in self.services or not self.await_end(service, AGENT_BY_ITSELF_S, kill=False):
                self.signal_end(service)
        for service in rest:
            self.await_end(service, END_MOST_S[service.role])
        self.end_leftovers()
        folder = os.path.join(self.root, guardian.PROCESSES_DIR)
        for name in os.listdir(folder):  # all of them have ended; the supervisor's own goes with the rest
            unlink(os.path.join(folder, name))
        say("ended")

    def signal_end(self, service: Service) -> None:
        if service.pidfd is not None:
            signal.pidfd_send_signal(service.pidfd, signal.SIGTERM)

    def end_without_home(self) -> int:
        """The home was deleted, moved, or replaced by another: nothing can be saved there, so what this supervisor
        knows is killed, and nothing in the folder (perhaps another cluster's by now) is touched."""
        from racimo.act import leftovers  # only needed once, at the end

        say(f"{self.root} is no longer this cluster's folder: ending without it")
        pidfds = {service.pid: service.pidfd for service in self.services.values() if service.pidfd is not None}
        ended = leftovers.end_trees([pid for pid, pidfd in pidfds.items() if not is_over(pidfd)])
        say(f"killed {ended} processes")
        return 0

    def await_end(self, service: Service, most_s: float, *, kill: bool = True) -> bool:
        """Waits for a service to end; one that takes longer is killed, or left alone. True if it has ended."""
        if service.pidfd is None:
            return True
        until_s = time.monotonic() + most_s
        while not is_over(service.pidfd):
            if time.monotonic() >= until_s:
                if not kill:
                    return False
                say(f"{service.role} did not end within {most_s:g} s: killing process {service.pid}")
                signal.pidfd_send_signal(service.pidfd, signal.SIGKILL)
                until_s += most_s
            self.wait(until_s)
        self.forget(service)
        return True

    def end_leftovers(self) -> None:
        from racimo.act import leftovers  # only needed once, at the end

        ended = leftovers.end_all(self.root)
        if ended:
            say(f"killed {ended} processes that the agent had left")
        self.reap()


def is_over(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def ending_of(code: int | None) -> str:
    if code is None:
        return "exit unknown"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def hold_lock(root: str, *, wait: bool = False) -> int | None:
    """The descriptor that holds this home's supervisor lock; None if another process has it (and, with `wait`, has
    ended the cluster meanwhile)."""
    fd = os.open(os.path.join(root, guardian.LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(fd, 100, 0).decode(errors="replace").strip() or "another process"
            said = f"the supervisor of {root} is process {holder} already"
            if wait and outlives_holder(root, said):
                continue
            if not wait:
                say(said)
            os.close(fd)
            return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def outlives_holder(root: str, said: str) -> bool:
    """Waits beside the supervisor that there is, and passes SIGTERM on to it. True if it died rather than end the
    cluster, so that its place is free. `said`: a sentence for the log, once it waits."""
    record = guardian.read_live(root, "supervisor")
    pidfd = None if record is None else guardian.open_pidfd(record)
    if pidfd is None:
        time.sleep(guardian.RESTART_DELAY_FIRST_S)  # it is about to say who it is, or has just died
        return True
    asked = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    say(said)
    select.select([pidfd], [], [])
    os.close(pidfd)
    # A cluster that was ended leaves no records.
    return not asked and os.path.exists(guardian.record_path(root, "supervisor"))


def become_subreaper() -> None:
    """Orphans of services become children of this process, which reaps them: no zombies where pid 1 does not care."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        say(f"cannot adopt orphans: {os.strerror(ctypes.get_errno())}")


def main() -> int:
    arguments = sys.argv[1:]
    as_service = arguments[2:] == ["--service"]
    if arguments[:1] != ["--home"] or len(arguments) != (3 if as_service else 2):
        say("usage: python -m racimo.control.supervisor --home DIR [--service]")
        return 2
    root = os.path.abspath(arguments[1])
    for folder in (root, os.path.join(root, guardian.PROCESSES_DIR), os.path.join(root, guardian.LOGS_DIR)):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    os.chdir(root)
    lock = hold_lock(root, wait=as_service)
    if lock is None:
        return 0 if as_service else guardian.SUPERVISOR_HELD
    bound_own_log(root)
    guardian.write_record(root, "supervisor")
    become_subreaper()
    return Supervisor(root, lock).run()


if __name__ == "__main__":
    sys.exit(main())
