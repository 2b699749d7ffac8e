"""Runs TensorFlow's profiler over a few steps: a trace for TensorBoard, and the ops that took longest.

The trace is read by the schema that TensorFlow brings (tensorflow/tsl/profiler/protobuf/xplane.proto): planes of a host
or a device, of lines (threads, streams), of events.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from ....engine.errors import reason
from ...parameter_servers.leases import COUNT_SCOPE
from .rounds import ENDLESS

STEPS = 10
_LEAST_TRACE_MS = 200  # other tasks' shortest trace: its beginning and end hardly count
# The name of an executor's event for an op, and the start of a step's scope in it.
_EXECUTED = re.compile(r"(?P<name>[^:\s]+):(?P<type>[A-Z_][A-Za-z0-9_]*)")
_CALLED = re.compile(r".*StatefulPartitionedCall/|\bwhile(_\d+)?/((body/_|step_)\d+/)?")
# Ops that only wait for other ops, which they run.
_CONTROL = re.compile(
    r"_*(Stateless|Stateful)?(While|If|Case|PartitionedCall|_inference\w*)|.*\b(while|cond|conditional|call)"
)


class NoTraceError(Exception):
    """The computing tasks returned no trace. One line."""


def profile(strategy, folder: str, steps: int = STEPS) -> dict | None:
    """Trains for `steps` steps under the profiler. All processes that train together have to call it.

    Args:
      strategy: strategy whose training is compiled, warm and awaited, and continues. If other tasks compute for it,
        they are traced for as long as `steps` steps take, and the steps are those in the trace.
      folder: folder for TensorBoard, whose `plugins/profile/` gets the chief's trace.

    Returns:
      trace: the folder. steps: number of traced steps. ops: [{name, type, ms_per_step, share}], the longest first; a
      share is of all ops' time, threads added up. ops_ms_per_step: that time. In other processes than the chief, None.
    """
    before, program = set(_files(folder)), strategy.training
    if tasks := strategy.computing_tasks:
        _trace_tasks(strategy, folder, steps)
        files = set(_files(folder)) - before
        space = _read(files)
        # Each step updates the counter on the servers once.
        events = ((plane, event) for plane in space.planes for line in plane.lines for event in line.events)
        by_op = Counter(op for plane, event in events if (op := _op(plane, event, is_device=False)))
        counted = (times for (name, _), times in by_op.items() if name.startswith(f"{COUNT_SCOPE}/"))
        traced_steps = max(counted, default=0)
        if len(files) < len(tasks) or not traced_steps:
            raise NoTraceError(
                f"{len(files)} of {len(tasks)} tasks left a trace in {folder}, of {traced_steps} steps; use a "
                "run_dir that all of them share"
            )
        steps = traced_steps
    else:
        if strategy.is_chief:
            tf.profiler.experimental.start(folder)
        try:
            end = program.step + steps
            while program.step < end:
                result = strategy.run(program, end - program.step)
            result.sums.read()  # waits for the devices
        finally:
            if strategy.is_chief:
                tf.profiler.experimental.stop()
        if not strategy.is_chief:
            return None
        space = _read(set(_files(folder)) - before)
    listed = ops(space, steps)
    return {"trace": folder, "steps": steps, "ops_ms_per_step": sum(op["ms_per_step"] for op in listed), "ops": listed}


def _trace_tasks(strategy, folder: str, steps: int) -> None:
    """Makes each computing task write a trace into `folder`, which all of them share."""
    program = strategy.training
    before, end = time.perf_counter(), program.step + steps
    while program.step < end:
        strategy.run(program, end - program.step)
    milliseconds = max(_LEAST_TRACE_MS, round(1e3 * (time.perf_counter() - before)))
    addresses = ",".join(f"grpc://{address}" for address in strategy.computing_tasks)
    failed = []

    def trace():
        try:
            tf.profiler.experimental.client.trace(addresses, folder, milliseconds)
        except Exception as error:  # reaches the caller's thread
            failed.append(error)

    # A daemon: if training fails, the process does not wait for a trace.
    tracing = threading.Thread(target=trace, name="trace", daemon=True)
    tracing.start()
    while tracing.is_alive():
        strategy.run(program, ENDLESS)
    while not strategy.in_step:
        strategy.run(program, 1)
    if failed:
        raise NoTraceError(reason(failed[0])) from failed[0]


def _read(paths) -> xplane_pb2.XSpace:
    space = xplane_pb2.XSpace()
    for path in paths:
        space.MergeFromString(path.read_bytes())
    return space


def ops(space: xplane_pb2.XSpace, steps: int) -> list[dict]:
    """Returns a trace's ops, as `profile` does: TensorFlow's and, if XLA compiled the loop, XLA's.

    With devices besides the host, these are the devices' kernels, by the op that started them.
    """
    devices = [plane for plane in space.planes if plane.name.startswith("/device:") and plane.lines]
    planes = devices or [plane for plane in space.planes if plane.name.startswith("/host:CPU")]
    times: defaultdict[tuple[str, str], int] = defaultdict(int)
    for plane in planes:
        for line in plane.lines:
            if not devices or line.name.startswith("Stream"):
                for name, type_, picoseconds in _own_times(plane, line, is_device=bool(devices)):
                    times[name, type_] += picoseconds
    total = sum(times.values())
    return [
        {"name": name, "type": type_, "ms_per_step": 1e-9 * time / steps, "share": time / total}
        for (name, type_), time in sorted(times.items(), key=lambda item: -item[1])
        if time
    ]


def _own_times(plane, line, is_device: bool) -> Iterator[tuple[str, str, int]]:
    """Yields (name, type, picoseconds) of a line's ops, without the time of the ops within them."""
    events = [(event.offset_ps, event.duration_ps, op) for event in line.events if (op := _op(plane, event, is_device))]
    events.sort(key=lambda event: (event[0], -event[1]))
    open_ops: list[list[Any]] = []  # [end, name and type, own time]; each op is within the previous one
    for start, duration, op in [*events, (float("inf"), 0, None)]:
        while open_ops and open_ops[-1][0] <= start:
            _, (name, type_), own_time = open_ops.pop()
            if not _CONTROL.fullmatch(type_):
                yield name, type_, max(own_time, 0)
        if open_ops:
            open_ops[-1][2] -= duration
        open_ops.append([start + duration, op, duration])


def _op(plane, event, is_device: bool) -> tuple[str, str] | None:
    """Finds an event's op, (name, type); None for an event that is not an op."""
    event_name = plane.event_metadata[event.metadata_id].name
    stats = {plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats}
    if "tf_op" in stats and (match := _EXECUTED.fullmatch(_text(plane, stats["tf_op"]))):
        return _CALLED.sub("", match["name"]), match["type"]
    if "hlo_op" in stats:
        name = _text(plane, stats["hlo_op"])
        base = re.sub(r"(_\d+)?(\.\d+)?$", "", name)
        return name, "fusion" if base.endswith("fusion") else base
    if is_device:
        return event_name, "kernel"
    match = _EXECUTED.fullmatch(event_name)
    return (_CALLED.sub("", match["name"]), match["type"]) if match else None


def _text(plane, stat) -> str:
    return stat.str_value or plane.stat_metadata[stat.ref_value].name


def _files(folder: str) -> Iterator[Path]:
    return Path(folder).glob("plugins/profile/*/*.xplane.pb")
