"""What trials in one process must not do to each other, and limits that hold wherever their code is."""

import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from trial_stage import TrialStage, slice_of

import racimo
from racimo.worker.train import run as current
from racimo.worker.tune import surroundings as module
from racimo.worker.tune.surroundings import Surroundings
from racimo.worker.tune.watchdog import Watchdog


def seen() -> dict[str, Any]:
    return {
        "folder": Path.cwd(), "path": list(sys.path), "arguments": list(sys.argv), "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(), "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "numpy": numpy.geterr(),
        "alarm": signal.getsignal(signal.SIGALRM), "usr1": signal.getsignal(signal.SIGUSR1),
        "filters": list(warnings.filters), "recursion": sys.getrecursionlimit(), "out": sys.stdout,
        "hook": sys.excepthook, "device": torch.get_default_device(),
        "precision": torch.get_float32_matmul_precision(),
    }  # fmt: skip


def test_every_setting_of_the_process_is_as_it_was_after_a_trial(tmp_path: Path) -> None:
    before, around = seen(), Surroundings()
    os.chdir(tmp_path)
    sys.path.insert(0, "/elsewhere")
    sys.argv.append("--x")
    os.environ["TRIAL"] = "1"
    os.environ.pop("PATH")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    numpy.seterr(all="raise")
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.alarm(1000)
    warnings.simplefilter("error")
    sys.setrecursionlimit(5_000)
    sys.stdout = sys.stderr
    sys.excepthook = print  # type: ignore[assignment]
    try:
        assert seen() != before
    finally:
        around.put_back()
    assert seen() == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_processes_that_a_trial_left_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_CHILDREN_S", 0.3)
    around = Surroundings()
    gentle = subprocess.Popen(["sleep", "600"])
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    stubborn = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    around.put_back()
    for child in (gentle, stubborn):
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
        child.wait()
    stubborn.stdout.close()


def test_a_thread_belongs_to_the_trial_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """syne-tune#214: a late thread's report must not come under the next trial, nor that of a thread it starts."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(current, "_between_trials", False)
    current.serve_trials()
    stage = TrialStage(tmp_path)
    go_on, outcomes = threading.Event(), []

    def report_late() -> None:
        go_on.wait(10)
        inner = threading.Thread(target=report)
        inner.start()
        inner.join()
        report()

    def report() -> None:
        try:
            racimo.current_run().report(loss=9.0)
            outcomes.append("reported")
        except SystemExit:
            outcomes.append("left")

    threads = []

    def train(config: dict[str, Any]) -> float:
        threads.append(threading.Thread(target=report_late))
        threads[0].start()
        return 1.0

    stage.call(train, slice_of(trial=0))
    with stage.begun(slice_of(trial=1, number=2)) as run:
        assert racimo.current_run() is run
        go_on.set()
        threads[0].join()
    assert outcomes == ["left", "left"]
    assert [(report.trial, report.values) for report in stage.reports] == [(0, {"loss": 1.0})]


def test_each_trial_begins_with_the_same_random_numbers(tmp_path: Path) -> None:
    stage = TrialStage(tmp_path)
    drawn = []

    def train(config: dict[str, Any]) -> float:
        drawn.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
        return 0.0

    for number in range(2):
        stage.call(train, slice_of(trial=number, number=number + 1))
    assert drawn[0] == drawn[1]


def test_a_limit_that_is_put_off_is_not_passed() -> None:
    passed = threading.Event()
    watchdog = Watchdog()
    watchdog.watch(0.2, passed.set)
    watchdog.put_off(60.0)
    assert not passed.wait(0.4)
    watchdog.watch(0.05, passed.set)
    assert passed.wait(5.0)


def test_a_limit_at_rest_is_not_passed() -> None:
    passed = threading.Event()
    watchdog = Watchdog()
    watchdog.watch(0.1, passed.set)
    watchdog.rest()
    assert not passed.wait(0.3)
