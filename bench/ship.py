"""[ship] 300 MB of files to three hosts: over the head's cable once, and not at all the second time."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import Goal, Row, quick, row, say
from bench.peers import scratch
from bench.stage import Host, HostsCluster, several
from racimo.spec.run import RunSpec

HOSTS = 4
"""The head, which sends, and three that get the files."""
TOTAL_BYTES, QUICK_TOTAL_BYTES = 300_000_000, 30_000_000
FILES = 30
LIMIT_S = 300.0
OVERHEAD = 1.08
"""Of frames, TCP and TLS, and of the little that a cluster says meanwhile."""
IDLE_BYTES = 300_000
NETWORK_ONLY_S = 8e-9
"""Seconds per byte at 1 Gbit."""
MODULE = "only_on_some_hosts"
SCRIPT = f"import {MODULE}\n\n\ndef train(config):\n    {MODULE}.nothing\n"


def run() -> list[Row]:
    total_bytes = QUICK_TOTAL_BYTES if quick() else TOTAL_BYTES
    with scratch("ship") as folder:
        project = make_project(folder, total_bytes)
        with several(folder, HOSTS, slots=[0, 1, 1, 1]) as cluster:
            plain_s = plain_copy_s(cluster, project, folder)
            first_bytes, first_s = ship(cluster, project)
            second_bytes, second_s = ship(cluster, project)
            with (project / "main.py").open("a") as file:
                file.write("# changed\n")
            third_bytes, third_s = ship(cluster, project)
    with scratch("ship") as folder:
        refused_s, words = missing_module(folder)
    return [
        row("sent over the head's cable at the first submit, of the files' size", 100 * first_bytes / total_bytes, "%",
            Goal("<=", 100 * OVERHEAD)),
        row("sent over the head's cable at the second submit", max(0, second_bytes - IDLE_BYTES), "bytes",
            Goal("==", 0), note=f"beyond {IDLE_BYTES / 1e3:g} kB of orders, beats and answers",
            peers={"with those": second_bytes}),
        row("sent after one small file has changed", third_bytes / 1e6, "MB"),
        row("first submit until all three have run", first_s, "s",
            peers={"plain copy from the head to one host, then on from it to the others": plain_s,
                   "the cable alone, once": total_bytes * NETWORK_ONLY_S}),
        row("second submit until all three have run", second_s, "s", peers={"after a small change": third_s}),
        row("a module that one host lacks: refused after", refused_s, "s", peers={"words": words}),
        row("host and module are named", int("h4" in words and MODULE in words), "yes=1", Goal("==", 1)),
    ]  # fmt: skip


def make_project(folder: Path, total_bytes: int) -> Path:
    project = folder / "project"
    project.mkdir()
    random_source = random.Random(1)
    for number in range(FILES):
        (project / f"part-{number:02d}.bin").write_bytes(random_source.randbytes(total_bytes // FILES))
    (project / "main.py").write_text("import os\nprint(len(os.listdir('.')))\n")
    return project


def sent_bytes(host: Host) -> int:
    """What the host has put on its cable so far."""
    done = host.run(["cat", "/sys/class/net/eth0/statistics/tx_bytes"])
    return int(done.stdout)


def ship(cluster: HostsCluster, project: Path) -> tuple[int, float]:
    """(bytes over the head's cable, seconds) of a run on all three."""
    before, began_s = sent_bytes(cluster.head), time.monotonic()
    command = (sys.executable, "-S", "main.py")
    run = cluster.submit(RunSpec(command=command, workers=3, files="."), project)
    view = cluster.wait(run, LIMIT_S)
    if view.status != "succeeded":
        raise RuntimeError(cluster.story(run, view))
    seconds = time.monotonic() - began_s
    sent = sent_bytes(cluster.head) - before
    say(f"  {sent / 1e6:.1f} MB over the head's cable, {seconds:.1f} s")
    return sent, seconds


SERVER = "import http.server, functools, sys; h = functools.partial(http.server.SimpleHTTPRequestHandler, directory="
SERVER += "sys.argv[1]); http.server.ThreadingHTTPServer(('', 8123), h).serve_forever()"
CLIENT = "import sys, urllib.request, pathlib, os; out = pathlib.Path(sys.argv[2]); out.mkdir(exist_ok=True)\n"
CLIENT += "for name in sys.argv[3:]: (out / name).write_bytes(urllib.request.urlopen(sys.argv[1] + name).read())"


def plain_copy_s(cluster: HostsCluster, project: Path, folder: Path) -> float:
    """The same files by plain HTTP: from the head to one host, and from there to both others at once."""
    hosts = list(cluster.hosts)
    names = sorted(path.name for path in project.iterdir())
    copies = [folder / f"copy-{number}" for number in range(3)]
    servers = [
        hosts[0].popen([sys.executable, "-c", SERVER, str(project)], stderr=subprocess.DEVNULL),
        hosts[1].popen([sys.executable, "-c", SERVER, str(copies[0])], stderr=subprocess.DEVNULL),
    ]
    try:
        time.sleep(1.0)
        began_s = time.monotonic()
        fetch(hosts[1], hosts[0], copies[0], names).wait(LIMIT_S)
        both = [fetch(host, hosts[1], copy, names) for host, copy in zip(hosts[2:], copies[1:], strict=True)]
        codes = [process.wait(LIMIT_S) for process in both]
        seconds = time.monotonic() - began_s
    finally:
        for server in servers:
            server.kill()
            server.wait()
    if any(codes):
        raise RuntimeError("the plain copy failed")
    for copy in copies:
        shutil.rmtree(copy)
    say(f"  plain copy: {seconds:.1f} s")
    return seconds


def fetch(host: Host, source: Host, to: Path, names: list[str]) -> "subprocess.Popen[bytes]":
    return host.popen([sys.executable, "-c", CLIENT, f"http://{source.address}:8123/", str(to), *names])


def missing_module(folder: Path) -> tuple[float, str]:
    """A module that the fourth host lacks is found before anything starts there. Seconds, and the run's words."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / f"{MODULE}.py").write_text("nothing = None\n")
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(modules), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    try:
        with several(folder, HOSTS, joined=HOSTS - 1, slots=[0, 1, 1, 1]) as cluster:
            os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
            cluster.join(cluster.hosts[3])
            cluster.wait_nodes(HOSTS)
            began_s = time.monotonic()
            run = cluster.submit(RunSpec(train="train.py:train", workers=3), project)
            view = cluster.wait(run, LIMIT_S)
            seconds = time.monotonic() - began_s
            words = f"{view.status}: {view.failure.message if view.failure else view.reason}"
            say(f"  after {seconds:.1f} s {words}")
            return seconds, words
    finally:
        if str(modules) in os.environ.get("PYTHONPATH", ""):
            os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
