"""Views with fixed values, from which the golden screens are rendered."""

from racimo.agent.protocol import ProcessUsage
from racimo.control.views import ClusterView, Finding, NodeView, RunProgress, RunView, WorkerView
from racimo.spec.run import RunSpec
from racimo.state.events import (
    AttemptPlanned,
    GenerationAnnounced,
    Record,
    RunEnded,
    RunSubmitted,
    ScaleRequested,
    WorkerExited,
    WorkersLeaving,
    WorkerStarted,
)
from racimo.state.nouns import Device, Exit, Failure, Node, Placement, Reason

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in train
    loss = model(batch.x)
ValueError: shapes do not fit
"""

FAILURE = Failure(
    code="worker-raised",
    message="ValueError: shapes do not fit",
    hint="racimo logs gpt-4",
    traceback=TRACEBACK,
    rank=1,
    worker="gpt-4/1/1",
    others=2,
)

PROGRESS = RunProgress(
    run="gpt-3",
    status="running",
    num_workers=3,
    step=120,
    until=2000,
    loss=2.31467,
    step_s=0.12,
    tokens_per_s=12_345.6,
    remaining_s=225.6,
    cost=0.0123,
    generation=2,
)

WORKERS = (
    WorkerView(id="gpt-3/1/0", index=0, rank=0, node="node-1", devices=(0,), status="ready", pid=4711),
    WorkerView(
        id="gpt-3/1/1", index=1, rank=1, node="node-1", devices=(1,), status="exited", pid=4712,
        exit=Exit(outcome="killed", signal=9),
    ),
    WorkerView(id="gpt-3/1/2", index=2, rank=1, node="node-1", devices=(2,), status="ready", pid=4713),
)  # fmt: skip

TRAINING = RunView(
    id="gpt-3",
    kind="train",
    status="running",
    spec=RunSpec(train="train.py:train", workers="2..4", retries=1),
    reason=Reason(code="running", text="2 of 2..4 workers; a third joins when a device is free"),
    submitted_wall_s=1_700_000_000.0,
    queued_s=0.4,
    running_s=185.0,
    attempt=1,
    elastic=True,
    least=2,
    most=4,
    num_live_workers=3,
    generation=2,
    device_s=555.0,
    cost=0.0123,
    price_known=True,
    workers=WORKERS,
    progress=PROGRESS,
    output_dir="/home/ana/.racimo/outputs/gpt-3",
)

WAITING = RunView(
    id="echo-5",
    kind="command",
    status="queued",
    spec=RunSpec(command=("echo", "hi"), workers=4),
    reason=Reason(
        code="devices-busy",
        text="needs 4 devices; 1 of 4 is free, 3 are held by gpt-3",
        counts={"needed": 4, "free": 1, "held": 3},
    ),
    submitted_wall_s=1_700_000_100.0,
    queued_s=42.0,
    least=4,
    most=4,
)

FAILED = RunView(
    id="gpt-4",
    kind="train",
    status="failed",
    spec=RunSpec(train="train.py", args=("--lr", "3e-4"), workers=4),
    reason=Reason(code="failed", text="a worker failed and no retries are left"),
    failure=FAILURE,
    submitted_wall_s=1_700_000_050.0,
    queued_s=0.1,
    running_s=3.2,
    attempt=1,
    least=4,
    most=4,
    device_s=12.8,
    cost=0.0,
    price_known=False,
    output_dir="/home/ana/.racimo/outputs/gpt-4",
)

NODE = NodeView(
    node=Node(
        id="node-1",
        host="ana-laptop",
        devices=tuple(Device(index) for index in range(4)),
        price_per_device_hour=0.08,
        memory_bytes=24 * 10**9,
    ),
    num_free=2,
    leases={0: "gpt-3/1/0", 2: "gpt-3/1/2"},
    free_memory_bytes=11 * 10**9,
    free_disk_bytes=52 * 10**9,
)

SILENT_NODE = NodeView(
    node=Node(
        id="gpu-7f3a",
        host="gpu",
        devices=tuple(Device(index, "cuda", "NVIDIA H100") for index in range(8)),
        status="silent",
        reason=Reason(code="node-silent", text="it does not answer; its workers keep their devices"),
        address="10.0.0.2",
    ),
    num_free=8,
    silent_s=41.0,
)

DRAINING_NODE = NodeView(
    node=Node(
        id="lab-91c2",
        host="lab",
        devices=tuple(Device(index) for index in range(16)),
        reason=Reason(code="draining", text="drained on request; the rest is stopped in 9m 50s"),
        draining=True,
        address="10.0.0.3",
    ),
    num_free=12,
    leases={index: f"gpt-3/1/{index}" for index in range(6)},
    free_memory_bytes=60 * 10**9,
    free_disk_bytes=800 * 10**9,
    drain_left_s=590.0,
)

FINDINGS_HERE = (
    Finding(about="versions", verdict="ok", found="racimo 0.1.0, Python 3.11.7"),
    Finding(about="home", verdict="wrong", found="others can write to it", cure="chmod 700 /home/ana/.racimo"),
)
FINDINGS = (
    Finding(about="disk", node="lab-91c2", verdict="ok", found="800 GB of 1.0 TB free"),
    Finding(about="clock", node="gpu-7f3a", verdict="wrong", found="2m 05s behind", cure="timedatectl set-ntp true"),
    Finding(about="way", node="lab-91c2", peer="gpu-7f3a", verdict="ok", found="118 MB/s, round trip 0.21 ms"),
    Finding(about="way", node="gpu-7f3a", peer="lab-91c2", verdict="note", found="9.1 MB/s, round trip 0.20 ms"),
)

CLUSTER = ClusterView(
    id="c-1",
    version="0.1.0",
    protocol=1,
    home="/home/ana/.racimo",
    address="http://127.0.0.1:40123",
    started_wall_s=1_700_000_000.0,
    num_devices=4,
    num_free=2,
    price_per_device_hour=0.0,
    num_queued=1,
    num_running=1,
    num_ended=3,
    processes=(
        ProcessUsage(role="supervisor", pid=100, resident_bytes=11_000_000, private_bytes=5_000_000, cpu_s=0.1),
        ProcessUsage(role="zygote torch", pid=103, resident_bytes=299_000_000, private_bytes=180_000_000, cpu_s=2.4),
    ),
    warnings=("the torch zygote is still importing torch",),
)

_WHY = Reason(code="planned", text="first in the queue, 2 devices free")
_HEALED = Reason(code="healed", text="worker 1 was killed")
_SCALED = Reason(code="scaled", text="asked for")
_OVER = Reason(code="failed", text="no retries left")
EVENTS = tuple(
    Record(seq=number, at_s=float(number), wall_s=1_700_000_000.0 + number, event=event)
    for number, event in enumerate(
        (
            RunSubmitted(run="gpt-3", spec=TRAINING.spec, request="r", wall_s=1_700_000_000.0),
            AttemptPlanned(
                run="gpt-3",
                attempt=1,
                placements=(
                    Placement(index=0, node="node-1", devices=(0,)),
                    Placement(index=1, node="node-1", devices=(1,)),
                ),
                reason=_WHY,
            ),
            WorkerStarted(run="gpt-3", attempt=1, index=0, pid=4711),
            WorkerExited(run="gpt-3", attempt=1, index=1, exit=Exit(outcome="killed", signal=9), commits=40),
            GenerationAnnounced(
                run="gpt-3",
                attempt=1,
                number=2,
                members=(0, 2),
                reason=_HEALED,
            ),
            ScaleRequested(run="gpt-3", least=1, most=2),
            WorkersLeaving(run="gpt-3", attempt=1, indices=(2,), how="release", reason=_SCALED),
            RunEnded(run="gpt-3", status="failed", reason=_OVER, failure=FAILURE),
        )
    )
)
