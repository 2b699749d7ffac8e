"""A worker or parameter server: runs TensorFlow's server until the coordinator ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from ...engine.checkpoints.run_dir import RunDir
from ...engine.data.source import Source
from ...runner import failures
from ...runner.host import exits, startup
from ...runner.host.signals import Handlers
from ...runner.host.tasks import Cluster
from ..ask.requests import Requests, answer_stacks
from ..clusters import arrival, rendezvous

_POLL_SECONDS = 1.0
# A lease that a worker runs keeps one thread of its server waiting, and servers ask for the lease's tensors by
# another (TensorFlow's grpc_eager_service_impl.h, EnqueueHandler): with one alone, as on one core, neither continues.
_LEAST_THREADS = 2


def fail_fast() -> None:
    """Makes calls to a missing task fail at once. To be called in every task, before TensorFlow starts."""
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def serve(
    cluster: Cluster,
    timeout_seconds: float,
    quiet: bool,
    load: Callable[[], Sequence[Source]],
    import_rest: Callable[[], None],
    gpus: Sequence[int] | None = None,
    run_dir: RunDir | None = None,
) -> NoReturn:
    """Serves until a signal, the run's end, or until the coordinator has been gone for too long. Ends the process.

    Args:
      cluster: tasks of the run, with this process as a worker or a parameter server.
      timeout_seconds: how long the coordinator may be away, at the start too.
      quiet: leave out TensorFlow's messages about errors, which the coordinator receives.
      load: returns the sources that a worker reads by itself; called where the coordinator's data is one.
      import_rest: imports what `load` and the end can need.
      gpus: as `engine.machine.gpus.use_only` has them; a parameter server takes none by default.
      run_dir: folder of requests for this task's stacks, where a worker also announces its address; None for neither.

    Raises:
      UsageError: the requested GPUs do not exist.
    """
    if gpus is None and cluster.kind == "ps":
        gpus = ()
    # The coordinator need not wait for what takes long.
    with rendezvous.Rendezvous(cluster), startup.quiet_startup(quiet):
        import tensorflow as tf

        from ...engine.machine.gpus import server_options, use_only
        from .sources import Sources

        use_only(gpus)
        import_rest()

    # Without the evaluator, whose entry would make the coordinator hang.
    spec = tf.train.ClusterSpec({kind: list(cluster.job(kind)) for kind in ("chief", "worker", "ps")})
    options = server_options()
    options.experimental.disable_thread_spinning = True  # leaves cores to others while it waits
    threads = os.environ.get("TF_NUM_INTEROP_THREADS", "")  # as TensorFlow reads it (its process_util.cc)
    options.inter_op_parallelism_threads = max(
        _LEAST_THREADS, int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))
    )
    answering = Sources(load, f"{cluster.task} ({cluster.address})").answer()  # before anybody can ask
    with rendezvous.refuse_other_hosts(cluster):
        server = tf.distribute.Server(spec, cluster.kind, cluster.task_id, protocol="grpc", config=options)
    for number, code in ((signal.SIGTERM, failures.EXIT_TERMINATED), (signal.SIGINT, failures.EXIT_INTERRUPTED)):
        # At once: all that it holds is in a checkpoint, and its threads may be busy within TensorFlow.
        signal.signal(number, lambda *_, code=code: exits.leave(code))
    # It warns of the end, which comes later: until then the coordinator saves, for which it needs its servers.
    warned = threading.Event()
    Handlers([signal.SIGUSR1], lambda *_: warned.set()).install()
    (chief,) = cluster.job("chief")
    coordinator = rendezvous.Presence(chief, timeout_seconds, cluster.identity)
    wait = rendezvous.Wait(cluster.task, timeout_seconds)
    requests = Requests(
        run_dir.requests if run_dir else None, lambda kind, task: kind == "stacks" and task == cluster.task
    )
    while not coordinator.is_gone():
        if coordinator.refusal:
            line = f"the coordinator ({chief}) has not started: {coordinator.refusal}"
            exits.leave(failures.fail(failures.EXIT_USAGE, line))
        answer_stacks(requests)
        if run_dir and cluster.kind == "worker" and not cluster.is_chosen:
            arrival.announce(cluster, run_dir.workers)
        if not coordinator.came:
            wait.log_progress(f"the coordinator ({chief}) to come")
        if (answering.dismissed.is_set() or warned.is_set()) and not rendezvous.answers(chief):
            # Its run has ended, well or by the same signal, and so has its process.
            exits.leave(0 if answering.dismissed.is_set() else failures.EXIT_TERMINATED)
        time.sleep(_POLL_SECONDS)
    line = f"the coordinator ({chief}) has not answered for {timeout_seconds:g} s: it has ended, or is stopped"
    code = failures.fail(failures.EXIT_FAILED, f"{line}; {cluster.task} ends")
    del server, answering
    exits.leave(code)
