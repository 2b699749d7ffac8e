"""TensorFlow's private functions, each behind a name that says its purpose.

`tests/engine/internals/test_private_names.py` lists those that a new TensorFlow lacks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import linecache
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.debug.lib import check_numerics_callback
from tensorflow.python.distribute import collective_util, cross_device_utils, distribute_lib
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps_utils, config, op_def_registry
from tensorflow.python.ops import resource_variable_ops, script_ops, summary_ops_v2
from tensorflow.python.util import pywrap_xla_ops

from ..errors import UsageError
from ..own_code import GENERATED

R = TypeVar("R")
# Marks a function of this package that `tf.data` gets: to convert it by AutoGraph would take longer than its trace.
unconverted = tf.autograph.experimental.do_not_convert
# Saves its attributes, and is not a tf.Module.
TrackableNode = tf.__internal__.tracking.AutoTrackable
_KINDS_OF_TRACKABLE = "tensorflow.python.trackable.base"  # the module of those without contents of their own
_LOADED = "tensorflow.python.saved_model.load"  # the module of what a loaded SavedModel is


def converted(function: Callable[..., R]) -> Callable[..., R]:
    """Returns a function that AutoGraph converts as `tf.data` would, also where an `unconverted` one calls it."""
    return tf.__internal__.autograph.tf_convert(function, tf.__internal__.autograph.control_status_ctx())


def has_started() -> bool:
    """Returns whether TensorFlow has initialized its devices and threads."""
    return context.context()._initialized


def joined_cluster() -> tuple[int, tuple[str, ...]] | None:
    """Returns this process's index among the workers that its server has joined, and their addresses.

    None without a server. A coordinator's is of no workers.
    """
    here = context.context()
    if (server := here._collective_ops_server_def) is None:
        return None if here.get_server_def() is None else (0, ())
    (job,) = server.cluster.job
    return server.task_index, tuple(job.tasks[task] for task in sorted(job.tasks))


def session_config() -> tf.compat.v1.ConfigProto:
    """Returns a copy of the settings for this process's devices and servers."""
    return context.context().config


def receive_in_chunks(size_bytes: int) -> None:
    """Makes this process's server, before its start, send tensors in chunks of this size."""
    configuration = session_config()
    configuration.experimental.recv_buf_max_chunk = size_bytes
    context.context()._config = configuration  # TensorFlow 2 has no public setter for it


def current_device() -> str:
    """Returns the device set by `tf.device` here; "" without one."""
    return context.context().device_name


def wait_for_operations() -> None:
    """Waits for the operations started by this thread."""
    context.context().executor.wait()


def abort_collectives(reason: str) -> None:
    """Makes this process's collectives fail, waiting and later ones. Raises tf.errors.OpError if they already do."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)


def remove_generated_files() -> None:
    """Removes the temporary files of code that AutoGraph has generated in this process; their lines stay readable.

    TensorFlow removes them only as Python exits, so not those of a killed process, and never their compiled form.
    """
    files = [module.__file__ or "" for name, module in [*sys.modules.items()] if name.startswith(GENERATED)]
    for file in filter(os.path.exists, files):
        lines = linecache.getlines(file)
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)  # None: it is not looked for again
        for path in (importlib.util.cache_from_source(file), file):
            with contextlib.suppress(OSError):
                os.remove(path)


def runtime() -> object:
    """Returns TensorFlow's runtime of this process, to which functions that it compiles belong."""
    return context.context()


def summary_writer() -> tf.summary.SummaryWriter | None:
    """Returns this thread's default writer of summaries, to which steps that are traced now would write."""
    return summary_ops_v2._summary_state.writer


def random_state() -> dict[str, Any]:
    """Returns TensorFlow's global seed and its generator, for `restore_random_state`."""
    eager = context.context()
    return {name: getattr(eager, name, None) for name in ("_seed", "_rng")}


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets this thread's eager seed and generator to those of `random_state`."""
    vars(context.context()).update(state)


def collective_keys() -> int:
    """Returns the number from which the next `MirroredStrategy` numbers its collectives, as all do that are made."""
    return tf.distribute.MirroredStrategy._collective_key_base


def set_collective_keys(first: int) -> None:
    """Has the next `MirroredStrategy` number its collectives from another number, which no other may use."""
    tf.distribute.MirroredStrategy._collective_key_base = first


def gather(replica: tf.distribute.ReplicaContext, value: tf.Tensor) -> tf.Tensor:
    """Concatenates all replicas' values along the first axis by one collective; in `MultiWorkerMirroredStrategy`.

    `ReplicaContext.all_gather` first gathers the shapes, which must be equal here.
    """
    launcher = replica.strategy.extended._cross_device_ops._launchers[replica._replica_id]
    return launcher._all_gather(value, options=None)


def default_strategy() -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy of variables that are made in no other's scope."""
    return distribute_lib._get_default_strategy()


def single_replica_context() -> contextlib.AbstractContextManager[tf.distribute.ReplicaContext]:
    """Makes this replica the only one of its strategy for code traced within: sums and gathers return its own values.

    Variables stay this replica's copies. The engine's own collectives span all replicas (`all_replicas_context`).
    """

    def own(value):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)

    return _replica_context(
        is_only=True,
        num_replicas_in_sync=property(lambda self: 1),
        replica_id_in_sync_group=property(lambda self: tf.constant(0)),
        all_reduce=lambda self, reduce_op, value, options=None: own(value),
        all_gather=lambda self, value, axis, options=None: own(value),
    )


def outside_scopes(call: Callable[[], R]) -> R:
    """Calls a function outside the graph and the strategy's scope that the caller has entered: in another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def variables_outside_function() -> contextlib.AbstractContextManager:
    """Makes variables in this context, of a function that is traced, as if they were made outside of it.

    A traced function lifts their initial values out of its graph, which it can't from that of a replica.
    """
    strategy = tf.distribute.get_strategy()
    names = ("initial_value", "trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")

    def make(keywords: Mapping[str, Any]) -> tf.Variable:
        with strategy.scope() if strategy is not default_strategy() else contextlib.nullcontext():
            return tf.Variable(**{name: value for name, value in keywords.items() if name in names})

    return tf.variable_creator_scope(lambda _, **keywords: outside_scopes(lambda: make(keywords)))


def forbid_exchange(why: str) -> contextlib.AbstractContextManager[tf.distribute.ReplicaContext]:
    """Makes sums and gathers across replicas, except the engine's, raise ValueError in code traced within."""

    def refuse(self, *_, **__):
        raise UsageError(why)

    return _replica_context(is_only=False, all_reduce=refuse, all_gather=refuse)


def weighing_losses(weight: tf.Tensor) -> contextlib.AbstractContextManager:
    """Makes gradients through sums and gathers within those of the weighted sum of all replicas' losses.

    They come out divided by the replica's own weight, since all its gradients are multiplied by that later. Within the
    two above replicas do not meet, and nothing changes.

    Args:
      weight: scalar float32; 0 of a replica whose loss does not count.
    """
    replica = tf.distribute.get_replica_context()
    context = type(replica)
    if hasattr(context, "unextended") or replica.num_replicas_in_sync == 1:
        return contextlib.nullcontext()

    def scale(factor: tf.Tensor, value: Any) -> Any:
        def identity(x: tf.Tensor) -> tuple:
            return tf.identity(x), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

        return tf.nest.map_structure(tf.custom_gradient(identity), value, expand_composites=True)

    own = functools.partial(scale, tf.math.divide_no_nan(1.0, weight))
    return _replica_context(
        is_only=False,
        all_reduce=lambda self, reduce_op, value, options=None: scale(
            weight, context.all_reduce(self, reduce_op, own(value), options)
        ),
        all_gather=lambda self, value, axis, options=None: scale(
            weight, context.all_gather(self, own(value), axis, options)
        ),
    )


def all_replicas_context() -> contextlib.AbstractContextManager[tf.distribute.ReplicaContext]:
    """Reverts the three above within them; yields this replica's context."""
    return _replica_context()


def is_only_replica() -> bool:
    """Returns whether code traced here is within `single_replica_context`."""
    return getattr(type(tf.distribute.get_replica_context()), "is_only", False)


@contextlib.contextmanager
def _replica_context(**members: Any) -> Iterator[tf.distribute.ReplicaContext]:
    """Changes the class of this replica's context within, to a subclass with other members.

    It stays the replica's own context: in TensorFlow's default one each replica would update all copies of a variable.
    """
    replica = tf.distribute.get_replica_context()
    before = type(replica)
    context = getattr(before, "unextended", before)
    replica.__class__ = type(context.__name__, (context,), {"unextended": context, **members}) if members else context
    try:
        yield replica
    finally:
        replica.__class__ = before


@contextlib.contextmanager
def around_exchanges(enter: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Enters a context of this replica's at each exchange within.

    There the replicas of a process, each traced in a thread of its own, take turns.
    """
    replica = tf.distribute.get_replica_context()
    merge_call = replica._merge_call

    def merge_within(*arguments):
        with enter():
            return merge_call(*arguments)

    replica._merge_call = merge_within
    try:
        yield
    finally:
        replica._merge_call = merge_call


def replica_id() -> int | tf.Tensor:
    """Returns this replica's id in its strategy, an int if known when tracing; 0 outside replicas."""
    if tf.distribute.get_replica_context() is None:
        return 0
    with all_replicas_context() as replica:
        static = tf.get_static_value(replica.replica_id_in_sync_group)
        return replica.replica_id_in_sync_group if static is None else int(static)


def ordering_token(device: str) -> tf.Variable:
    """Returns a token that orders a replica's collectives of all groups; without it they hang in a single process."""
    with tf.init_scope(), tf.device(device):
        return tf.Variable(0.0, trainable=False)


class Collectives:
    """A replica's exchanges with the others of its group. Created on the host, called in replica code.

    Args:
      group_key: unique to the group in all its processes.
      token: the token that `ordering_token` returned, shared by all groups of the replica.
    """

    def __init__(self, group_key: int, size: int, device: str, token: tf.Variable):
        keys = cross_device_utils.CollectiveKeys(group_key_start=group_key)
        keys.get_group_key([device])
        self._launcher = cross_device_utils.CollectiveReplicaLauncher(
            group_key, size, keys, device, collective_util.Options()
        )
        self._launcher._ordering_token = token
        self._group_key, self._size, self._device = group_key, size, device

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the group, the same bits on each."""
        return self._launcher.all_reduce(value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Returns all values, concatenated along the first axis in the order of the replicas."""
        return self._launcher._all_gather(value, options=None)

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        """Sends value[i] of [size, ...] to replica i; returns the received values by sender."""
        with tf.device(self._device):
            sent = tf.raw_ops.CollectiveAllToAllV2(
                input=value,
                group_size=self._size,
                group_key=self._group_key,
                instance_key=self._launcher._next_instance_key(),
                ordering_token=[self._launcher._ordering_token.handle],
            )
        return tf.ensure_shape(sent, value.shape)


@contextlib.contextmanager
def own_initial_values(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, note: Callable[[tf.Tensor], None]
) -> Iterator[None]:
    """Makes variables of each worker's own initial value, which `note` gets; TensorFlow broadcasts the first worker's.

    That is a collective per variable, one after the other. TensorFlow takes a key for each: of the strategy's own, a
    worker that makes one variable more would meet nobody in its next collective.
    """
    extended = strategy.extended
    shared, workers, keys = (
        extended._get_variable_creator_initial_value,
        extended._num_workers,
        extended._collective_keys,
    )
    extended._collective_keys = cross_device_utils.CollectiveKeys()

    def own(replica_id: int, **keywords):
        make = shared(replica_id=replica_id, **keywords)

        def initial_value() -> tf.Tensor:
            if not tf.executing_eagerly():  # there is no value yet
                return make()
            extended._num_workers = 1  # among more TensorFlow would broadcast
            try:
                value = make()
            finally:
                extended._num_workers = workers
            note(value)
            return value

        return make if replica_id else initial_value

    extended._get_variable_creator_initial_value = own
    try:
        yield
    finally:
        extended._collective_keys = keys
        del extended._get_variable_creator_initial_value


def broadcast_from_first_worker(strategy: tf.distribute.MultiWorkerMirroredStrategy, value: tf.Tensor) -> tf.Tensor:
    """Returns the first worker's value of a tensor. All workers call it."""
    device = strategy.extended.worker_devices[0]
    variable_initializer = strategy.extended._get_variable_creator_initial_value
    return variable_initializer(replica_id=0, device=device, primary_var=None, initial_value=value, dtype=value.dtype)()


def divide_by_files(dataset: tf.data.Dataset, workers: int, worker: int) -> tf.data.Dataset:
    """Returns a worker's part of a dataset by its own `auto_shard_policy`, which otherwise only strategies apply."""
    return distribute._AutoShardDataset(dataset, workers, worker)


def iterator_state(iterator: tf.data.Iterator, ignores_functions: bool = False) -> bytes:
    """Returns a plain iterator's state, including buffers.

    Raises tf.errors.OpError for a function with a state of its own that the iterator calls, unless `ignores_functions`.
    """
    policy = tf.data.experimental.ExternalStatePolicy
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    serialized = tf.raw_ops.SerializeIterator(
        resource_handle=resource,
        external_state_policy=(policy.IGNORE if ignores_functions else policy.FAIL).value,
    )
    return tf.io.serialize_tensor(serialized).numpy()


def restore_iterator(iterator: tf.data.Iterator, state: bytes) -> None:
    """Sets a plain iterator over the same pipeline to a result of `iterator_state`. Raises tf.errors.OpError."""
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=tf.io.parse_tensor(state, tf.variant))


def shuffled(dataset: tf.data.Dataset, buffer_size: int, seed: tf.Tensor) -> tf.data.Dataset:
    """Shuffles a dataset, equally each time it is read: `dataset.shuffle` creates an op that can't be saved.

    Args:
      seed: scalar int64, possibly of a graph.
    """
    spec = dataset.element_spec
    mixed = tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=tf.constant(1, tf.int64),
        seed2=seed,
        reshuffle_each_iteration=False,
        output_types=[part.dtype for part in tf.nest.flatten(spec)],
        output_shapes=[part.shape for part in tf.nest.flatten(spec)],
    )
    return tf.data.experimental.from_variant(mixed, spec)


def variable_without_value(shape: Sequence, dtype: tf.DType, name: str | None, trainable: bool | None) -> tf.Variable:
    """Creates a variable in a graph without memory: its device and colocation are known, its value is not."""
    return resource_variable_ops.UninitializedVariable(
        shape=shape, dtype=dtype, name=name, trainable=trainable, distribute_strategy=tf.distribute.get_strategy()
    )


@contextlib.contextmanager
def elementwise_equality() -> Iterator[None]:
    """Makes == and != compare tensors' elements in functions traced within a `tf.Graph`, as elsewhere in TensorFlow."""
    before = tf.Tensor.__eq__, tf.Tensor.__ne__

    def in_function(compare: Callable, otherwise: Callable) -> Callable:
        def method(self, other):
            elements = other is not None and tf.compat.v1.get_default_graph().building_function
            return (compare if elements else otherwise)(self, other)

        return method

    tf.Tensor.__eq__ = in_function(tf.equal, before[0])
    tf.Tensor.__ne__ = in_function(tf.not_equal, before[1])
    try:
        yield
    finally:
        tf.Tensor.__eq__, tf.Tensor.__ne__ = before


class TemporaryVariable(NamedTuple):
    """A variable that exists during one run of its graph."""

    handle: tf.Tensor
    dtype: tf.DType
    shape: tf.TensorShape
    device: str = ""


def temporary_variable(value: tf.Tensor, shape: Any = None) -> TemporaryVariable:
    """Creates a variable with this value in each run of the graph, for kernels that update one.

    Args:
      shape: the shape of all its values; None is that of the first.
    """
    shape = value.shape if shape is None else tf.TensorShape(shape)
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=shape, shared_name=context.anonymous_name())
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return TemporaryVariable(handle, value.dtype, shape)


def allow_compute_on_coordinator(distribution: tf.distribute.ParameterServerStrategy) -> None:
    """Allows the coordinator's own process to call `distribution.run` without a warning."""
    distribution.extended._allow_run_without_coordinator = True


def on_each_worker(coordinator: tf.distribute.coordinator.ClusterCoordinator, make: Callable[[], Any], specs: Any):
    """Calls `make` for each worker, in the scope of its devices, and again for one that returns.

    Datasets, which have a public function for this, keep arrays in their graph, below 2 GiB.

    Args:
      make: returns a nest of tensors.
      specs: the specs of these tensors.

    Returns:
      An argument for scheduled functions; each worker gets its own.
    """
    resources = coordinator._create_per_worker_resources(make)
    for value in resources._values:
        value._type_spec = specs  # TensorFlow knows it only for compiled functions
    return resources


def weak_method(method: Callable, otherwise: Callable[[], Any]) -> Callable:
    """Returns a function that calls a method without keeping its object alive, or `otherwise` if that is gone.

    For `tf.numpy_function`: TensorFlow keeps functions called in a graph until the process ends (its script_ops.py).
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments):
        function = reference()
        return function(*arguments) if function else otherwise()

    return call


def timestamp() -> tf.Tensor:
    """Returns the seconds since 1970 at which this runs, scalar float64, by the clock of this process.

    `tf.timestamp` raises an error if TensorFlow's kernels have to be deterministic.
    """
    return tf.numpy_function(time.time, [], tf.float64) if config.is_op_determinism_enabled() else tf.timestamp()


def seconds_since(began: tf.Tensor) -> tf.Tensor:
    """Returns the seconds since a `timestamp`; 0 if the clock was set back meanwhile: graphs have no monotonic one."""
    return tf.maximum(timestamp() - began, 0.0)


def answer_to(name: str, function: Callable) -> None:
    """Makes this process call `function` for each `called_by_name(name)` in a graph, also another process's.

    As long as the function exists: TensorFlow has a weak reference.

    Args:
      function: takes NumPy arrays and returns a list of them.
    """
    script_ops._py_funcs._funcs[name] = function


def called_by_name(name: str, inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Calls the function that `answer_to` has registered in the executing process; returns tensors of these types."""
    return tf.raw_ops.PyFunc(input=list(inputs), token=name, Tout=list(dtypes))


def function_graph(graph: tf.Graph, name: str) -> tf.Graph:
    """Returns the graph of a function that a graph calls by this name; None for `ctc_loss`'s, which has no object."""
    return getattr(graph._get_function(name), "graph", None) or tf.__internal__.FuncGraph(name)


@functools.cache
def function_attributes(kind: str) -> list[str]:
    """Returns the names of the attributes by which a kind of op names functions, in alphabetical order."""
    # By the kind, once: to read an op's own attributes TensorFlow copies all of them, most of a check's time.
    definition = op_def_registry.get(kind)
    attributes = definition.attr if definition else ()  # a function may be a kind of its own
    return sorted(attribute.name for attribute in attributes if attribute.type in ("func", "list(func)"))


def is_in_function(graph: tf.Graph) -> bool:
    """Returns whether code traced here is in a `tf.function` that code of a graph calls, not only in its loops."""
    here = tf.compat.v1.get_default_graph()
    while here is not graph and isinstance(here, tf.__internal__.FuncGraph):
        if type(here) is tf.__internal__.FuncGraph:  # loops and conditions have subclasses
            return True
        here = here.outer_graph
    return False


def variables_read(graph: tf.Graph) -> list[tf.Variable]:
    """Returns the variables, each replica's own, that are read in the graph being traced."""
    return list(getattr(graph, "_watched_variables", ()))


def may_write(op: tf.Operation) -> list[tf.Tensor]:
    """Lists the handles among an op's inputs of which it may do more than read; a call does what its functions do."""
    return list(auto_control_deps_utils.get_read_write_resource_inputs(op)[1])


def xla_kernels() -> set[str]:
    """Returns the kinds of ops that XLA has a kernel for, on CPUs or GPUs."""
    return {*pywrap_xla_ops.get_cpu_kernel_names(), *pywrap_xla_ops.get_gpu_kernel_names()}


@functools.cache
def has_two_seeds(kind: str) -> bool:
    """Returns whether ops of a kind have two seeds, by TensorFlow's registry."""
    definition = op_def_registry.get(kind)
    return definition is not None and {"seed", "seed2"} <= {attribute.name for attribute in definition.attr}


def has_state_beside_variables(node: Any) -> bool:
    """Returns whether a trackable object saves more than its variables, like a table or an iterator."""
    for kind in type(node).__mro__:
        if _KINDS_OF_TRACKABLE in kind.__module__:
            return False
        if "_serialize_to_tensors" in vars(kind) and kind.__name__ != "AutoTrackable":
            return True
    return False


def is_saved_model(node: Any) -> bool:
    """Returns whether an object was loaded by `tf.saved_model.load`."""
    return type(node).__module__ == _LOADED


def is_deterministic() -> bool:
    """Returns whether TensorFlow's kernels in this process have to be deterministic."""
    return config.is_op_determinism_enabled()


def set_deterministic(value: bool) -> None:
    """Sets whether TensorFlow's kernels in this process have to be deterministic."""
    (config.enable_op_determinism if value else config.disable_op_determinism)()


def numerics_check() -> Any:
    """Returns what checks each number that this thread computes (`tf.debugging.enable_check_numerics`), or None."""
    return getattr(check_numerics_callback._state, "check_numerics_callback", None)


@contextlib.contextmanager
def checking_numerics(checks: bool | None) -> Iterator[None]:
    """Sets whether each number is checked that this thread computes or traces; None leaves it. Restores what it found.

    An op that yields an inf or NaN raises `tf.errors.InvalidArgumentError`. It is slow, and XLA can't compile it.
    """
    found = numerics_check()
    if checks is not None:
        (tf.debugging.enable_check_numerics if checks else tf.debugging.disable_check_numerics)()
    try:
        yield
    finally:
        if numerics_check() is not found:
            tf.debugging.disable_check_numerics()
            if found is not None:
                check_numerics_callback._state.check_numerics_callback = found  # with the program's limits
                tf.debugging.enable_check_numerics()


@contextlib.contextmanager
def tracing_for_xla() -> Iterator[None]:
    """Traces operations for XLA, which computes them deterministically by itself.

    For its own kernels TensorFlow replaces some while it traces, such as the gradient of a cross entropy by a sum of
    segments: XLA adds these one after the other, in a loop whose turns the host launches.
    """
    before = is_deterministic()
    set_deterministic(False)
    try:
        yield
    finally:
        set_deterministic(before)
