"""TensorFlow's and Keras's private names: each is still there, and none is used outside of engine/internals/."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re

import keras
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDER = ROOT / "engine" / "internals"
_FILES = (
    "patches.py",
    "tensorflow.py",
    "keras.py",
    "keras_calls.py",
    "keras_copy.py",
    "keras_optimizers.py",
    "keras_scopes.py",
    "keras_state.py",
    "pipelines.py",
)
_PARTS = ROOT / "parts" / "keras_models"
OF_PRIVATE = [*(FOLDER / name for name in _FILES), _PARTS / "keras_compile.py", _PARTS / "keras_internals.py"]
_OPTIMIZER, _LAYER = "keras.optimizers.Optimizer", "keras.layers.Layer"
_CONTEXT = "tensorflow.python.eager.context.Context"
_REDUCE = "tensorflow.python.distribute"
_COMPILED = "keras.src.trainers.compile_utils"
# Attributes that engine/internals/ reads or sets, and whose they are.
OF_OWNERS = {
    "tensorflow.python.data.experimental.ops.distribute": "_AutoShardDataset",
    "tensorflow.python.data.experimental.ops.from_list": "_ListDataset",
    f"{_REDUCE}.cross_device_utils.CollectiveReplicaLauncher": "_all_gather _next_instance_key _ordering_token",
    f"{_REDUCE}.parameter_server_strategy_v2.ParameterServerStrategyV2Extended": "_allow_run_without_coordinator",
    _OPTIMIZER: (
        "_all_reduce_sum_gradients _apply_weight_decay _backend_apply_gradients "
        "_backend_increment_gradient_accumulators _backend_reset_gradient_accumulators _clip_by_norm _clip_gradients "
        "_distributed_tf_update_step _filter_empty_gradients _overwrite_model_variables_with_average_value "
        "_overwrite_variable_with_gradient _overwrite_variables_directly_with_gradients "
        "_update_model_variables_moving_average "
        "_backend_update_step _distribution_strategy _exclude_from_weight_decay "
        "_exclude_from_weight_decay_pattern _iterations _learning_rate _model_variables_moving_average "
        "_use_weight_decay"
    ),
    f"{_REDUCE}.mirrored_strategy.MirroredStrategy": "_collective_key_base",
    "keras.Model": ("_compile_config _compile_loss _compile_metrics _compute_loss _distribute_strategy _loss_tracker"),
    _CONTEXT: (
        "_collective_ops_server_def _config _initialized _rng _seed abort_collective_ops config executor device_name"
    ),
    f"{_REDUCE}.coordinator.cluster_coordinator.ClusterCoordinator": "_create_per_worker_resources",
    f"{_REDUCE}.collective_all_reduce_strategy.CollectiveAllReduceExtended": (
        "_collective_keys _cross_device_ops _get_variable_creator_initial_value _num_workers"
    ),
    _LAYER: (
        "_call_has_training_arg _dtype_policy _flatten_layers _get_own_losses _layers _non_trainable_variables "
        "_losses _metrics _seed_generators _tracker _trainable_variables"
    ),
    "keras.layers.BatchNormalization": "_moments _reduction_axes",
    "keras.src.losses.losses.LossFunctionWrapper": "_fn_kwargs",
    f"{_COMPILED}.CompileLoss": "_flat_losses",
    f"{_COMPILED}.CompileMetrics": "_flat_metrics _flat_weighted_metrics _flatten_y",
    "tensorflow.python.ops.script_ops.FuncRegistry": "_funcs",
    "tensorflow.Graph": "_get_function",
    f"{_REDUCE}.cross_device_ops.CollectiveAllReduce": "_launchers",
    "tensorflow.python.framework.registry.Registry": "_registry",
    f"{_REDUCE}.distribute_lib": "_get_default_strategy",
    f"{_REDUCE}.distribute_lib.ReplicaContextBase": "_merge_call _replica_id",
    "keras.Variable": "_name _value",
    "tensorflow.python.ops.script_ops": "_py_funcs",
    "tensorflow.python.debug.lib.check_numerics_callback": "_state",
    "tensorflow.python.ops.summary_ops_v2": "_summary_state",
    "keras.src.ops.function.Function": "_inputs_struct _run_through_graph",
    "tensorflow.python.trackable.base.Trackable": (
        "_self_unconditional_checkpoint_dependencies _self_unconditional_dependency_names _serialize_to_tensors"
    ),
    f"{_REDUCE}.coordinator.values.RemoteValueImpl": "_type_spec",
    f"{_REDUCE}.coordinator.values.PerWorkerValues": "_values",
    "tensorflow.python.eager.context": "anonymous_name",
    "tensorflow.compiler.tf2xla.python.xla": "optimization_barrier",
    "tensorflow.python.data.experimental.ops.testing": "sleep",
    "keras.src.backend.common.variables": "AutocastScope",
    _COMPILED: "CompileLoss CompileMetrics",
    "keras.src.saving.serialization_lib": "SafeModeScope",
    "keras.src.losses.loss": "apply_mask squeeze_or_expand_to_same_rank",
    "tensorflow.__internal__.tracking": "AutoTrackable",
    "keras.src.backend.common.global_state": "GLOBAL_STATE_TRACKER",
    "tensorflow.python.ops.resource_variable_ops": "UninitializedVariable",
    "keras.src.backend.config": "backend",  # of engine/__init__.py, which looks before Keras is imported
    "tensorflow.python.data.ops.batch_op": "_BatchDataset _ParallelBatchDataset",
    "tensorflow.python.data.ops.padded_batch_op": "_PaddedBatchDataset",
    "tensorflow.python.data.ops.rebatch_op": "_RebatchDataset",
    "tensorflow.python.data.experimental.ops.batching": "_MapAndBatchDataset",
    "tensorflow.python.data.ops.map_op": "_MapDataset _ParallelMapDataset",
    "tensorflow.python.data.ops.concatenate_op": "_ConcatenateDataset",
    "tensorflow.python.data.ops.repeat_op": "_RepeatDataset",
    "tensorflow.python.data.ops.zip_op": "_ZipDataset",
    "tensorflow.python.data.ops.shuffle_op": "_ShuffleDataset",
    "tensorflow.python.data.ops.scan_op": "_ScanDataset",
    "tensorflow.python.data.ops.shard_op": "_ShardDataset",
    "tensorflow.python.data.ops.skip_op": "_SkipDataset",
    "tensorflow.python.data.ops.take_op": "_TakeDataset",
    "tensorflow.python.data.ops.snapshot_op": "_SnapshotDataset",
    "tensorflow.python.data.ops.unbatch_op": "_UnbatchDataset",
    "tensorflow.python.data.ops.from_tensor_slices_op": "_TensorSliceDataset",
    "tensorflow.python.data.ops.from_tensors_op": "_TensorDataset",
    "tensorflow.python.data.ops.range_op": "_RangeDataset",
    "tensorflow.python.data.ops.dataset_ops": "_OptionsDataset _RestructuredDataset _VariantDataset",
    "tensorflow.python.data.ops.prefetch_op": "_PrefetchDataset",
    "keras.metrics.Accuracy": "_direction",
    "keras.callbacks.TensorBoard": "_should_trace",
    "keras.src.backend.tensorflow.trainer": "TensorFlowTrainer",
    "tensorflow.data.Dataset": "_inputs _functions",
    "tensorflow.python.data.ops.cache_op.CacheDataset": "_filename",
    "tensorflow.python.data.ops.map_op._ParallelMapDataset": "_deterministic",
    "tensorflow.python.data.ops.padded_batch_op._PaddedBatchDataset": "_batch_size _drop_remainder",
    "tensorflow.python.data.ops.repeat_op._RepeatDataset": "_count",
    "tensorflow.python.data.ops.shard_op._ShardDataset": "_index _num_shards",
    "tensorflow.python.data.ops.shuffle_op._ShuffleDataset": "_reshuffle_each_iteration _seed2",
    "tensorflow.python.data.ops.snapshot_op._SnapshotDataset": "_path",
    "tensorflow.python.framework.func_graph.FuncGraph": "_watched_variables",
}
OWNERS = {name: owner for owner, names in OF_OWNERS.items() for name in names.split()}

# Of Python's library, in its documentation.
DOCUMENTED = {"_current_frames"}
# Of Python's library, which has no others for forks and the end of a process; its own modules use them for the like.
OF_PYTHON = {
    "runner/host/exits.py": {"_children", "_exit_function", "_exitfunc", "_registry", "_run_exitfuncs", "_shutdown"},
    "runner/host/forks.py": {"_at_fork_reinit"},
}


def found(owner: str):
    """What a dotted name stands for, or None."""
    parts = owner.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            thing = getattr(thing, name, None)
        return thing
    return None


def has(owner, name: str) -> bool:
    """Whether it has the attribute, or makes it in a method."""
    if owner is None or hasattr(owner, name):
        return owner is not None
    kinds = [kind for kind in inspect.getmro(owner) if kind is not object] if inspect.isclass(owner) else []
    return any(
        f"self.{name} " in inspect.getsource(kind) or f"self.{name}:" in inspect.getsource(kind) for kind in kinds
    )


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_the_private_name_is_there(name):
    versions = f"TensorFlow {tf.__version__} with Keras {keras.__version__}"
    assert has(found(OWNERS[name]), name), (
        f"{versions} has no {OWNERS[name]}.{name} any more; find what does its work now, and mend engine/internals/"
    )


def test_a_name_that_is_not_there_is_missed():
    assert not has(found(_LAYER), "_flattened_layers")
    assert not has(found("tensorflow.python.eager.contexts"), "context")
    assert not has(found("tensorflow.python.eager.context.Contexts"), "config")


def foreign(path: pathlib.Path) -> set[str]:
    """Private attributes that a file takes from what is not its own, and the private modules that it imports from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("tensorflow.python", "keras.src")):
            names |= {alias.name for alias in node.names if not inspect.ismodule(found(f"{node.module}.{alias.name}"))}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names |= set() if is_own else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_"):
            is_name = node.value.isidentifier() and node.value.strip("_") and not node.value.startswith("__")
            names |= {node.value} if is_name else set()
    return names


def test_each_private_name_of_internals_has_its_owner_here():
    missing = set().union(*map(foreign, OF_PRIVATE))
    assert sorted(missing - OWNERS.keys()) == []


def own(paths) -> set[str]:
    """The private names that files define: functions, classes, attributes of self."""
    names = {"_asdict", "_fields", "_replace", "_exit", "_mmap"}  # Python's, and NumPy's map of a file
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names


def test_no_other_folder_uses_a_private_name_or_imports_a_private_module():
    paths = [
        path
        for folder in ("engine", "launch", "models", "input", "parts", "runner")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    others = [path for path in paths if path not in OF_PRIVATE]
    defined, private = own(others), {name for name in OWNERS if name.startswith("_")}
    astray = []
    for path in others:
        shown, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        attributes = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        used = {name for name in attributes if re.match(r"_[a-zA-Z]", name)} | (foreign(path) & private)
        allowed = defined | DOCUMENTED | OF_PYTHON.get(shown, set())
        astray += [f"{shown}: {name}" for name in sorted(used - allowed)]
        astray += [
            f"{shown}: {line.strip()}"
            for line in text.splitlines()
            if line.lstrip().startswith(("from ", "import "))
            and any(module in line for module in ("tensorflow.python", "tensorflow.compiler", "keras.src"))
        ]
    assert astray == []
