"""Every flag of `crankshaft train`, defined once: name, type, default, rule, help, and the runs that it applies to.

The command line, `crankshaft.run`'s keywords, files of flags, docs/flags.md, resume and what workers have to agree on
are made from the fields of `Flags`; `rules.coerce` makes a field's value of what any of them gives. Nothing here
starts TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...engine.arguments import HUGE
from ...engine.step.options import ON_NONFINITE, PRECISIONS, SCHEDULES
from ...engine.strategies import registry
from . import rules
from .rules import (
    ARGUMENT,
    AutoOrNumber,
    Boolean,
    FilePaths,
    FlagInfo,
    Integer,
    Number,
    OneOf,
    Path,
    Text,
    fields,
    flag,
)
from .user_files import Module

MODES = ("train_and_eval", "train", "eval", "benchmark", "export", "predict", "generate")
AUTO_SHARD_POLICIES = ("auto", "file", "data", "off")

_SERVERS = ("strategy", "parameter_server")
_CLUSTERS = ("strategy", *registry.CLUSTERED)
_MESHES = ("strategy", "mirrored", "multi_worker")
_REPLICAS = ("strategy", "mirrored", "multi_worker", "tpu")
EITHER = (("train_steps", "train_epochs"),)  # two ways to set a length
_LOCAL_SGD = ("sync_every_steps",)
_NEEDS_RUN_DIR = ("run_dir",)
_WRITES: dict[str, Any] = {"use": _NEEDS_RUN_DIR, "is_period": True}

_run_flag = functools.partial(flag, group="The run")
_model_flag = functools.partial(flag, group="Model")
_input_flag = functools.partial(flag, group="Input")
_placement_flag = functools.partial(flag, group="Where it runs")
_between_flag = functools.partial(flag, group="Between replicas", use=_REPLICAS)
_servers_flag = functools.partial(flag, group="Parameter servers", use=_SERVERS)
_update_flag = functools.partial(flag, group="The update")
_when_flag = functools.partial(flag, group="When (in steps; 0 is never)")
_shown_flag = functools.partial(flag, group="What is shown and checked")
_modes_flag = functools.partial(flag, group="Modes other than training")
_generation_flag = functools.partial(flag, group="Generation", use=("mode", "generate"), of_call=True)
_benchmark_flag = functools.partial(flag, group="Benchmark mode", use=("mode", "benchmark"), of_call=True)


@dataclasses.dataclass(kw_only=True)
class Flags:
    """The values of a command line; arguments of NAME=VALUE are parsed."""

    # The run
    mode: str = _run_flag(OneOf(MODES), "train_and_eval", "What to run.", of_call=True)
    run_dir: str | None = _run_flag(
        Path(may_be_remote=True),
        None,
        "Folder of checkpoints, log and results (also gs://...); an existing run resumes.",
        of_call=True,
        may_be_elsewhere=True,
    )
    config: str | None = _run_flag(
        Path(),
        None,
        "YAML or JSON file of flags, also a run's config.json; the command line takes precedence.",
        of_call=True,
    )
    seed: int = _run_flag(
        Integer(0, 2**31 - 1), 0, "Seed of the run's random numbers; a data function seeds its own.", decides=True
    )
    train_steps: int | None = _run_flag(
        Integer(1), None, "Training steps (updates). Give one of --train_steps and --train_epochs."
    )
    train_epochs: float | None = _run_flag(
        Number(upper=1e9, above=0), None, "Passes over the training data; 10 if neither is given."
    )
    stop_at_step: int | None = _run_flag(
        Integer(1),
        None,
        "Save and end at this step; schedules keep the full length, and the run can be resumed.",
        of_call=True,
        is_period=True,
    )
    allow_changed_config: bool = _run_flag(Boolean(), False, "Resume even if the configuration changed.", of_call=True)
    max_restarts: int = _run_flag(
        Integer(0),
        0,
        "Restarts of this task after failures within ten minutes; a scheduler's count too.",
        of_call=True,
        may_differ=True,
    )
    min_workers: int = _run_flag(
        Integer(0),
        0,
        "With --max_restarts: continue without workers that leave or do not return, while as many are left; 0: all "
        "are needed.",
        use=("strategy", "multi_worker"),
        of_call=True,
    )
    result_json: str | None = _run_flag(
        Path(),
        None,
        "Also write the result to this file, or the error that ended the command.",
        of_call=True,
        may_differ=True,
    )

    tensorboard_dir: str | None = _run_flag(
        Path(may_be_remote=True),
        None,
        "Folder of TensorBoard's files, by default run_dir/tensorboard.",
        use=_NEEDS_RUN_DIR,
        of_call=True,
        may_differ=True,
    )
    export_dir: str | None = _run_flag(
        Path(may_be_remote=True),
        None,
        "Also export the model as training ends: a SavedModel to a folder of its step in this one, or FILE.keras.",
        use=_NEEDS_RUN_DIR,
        of_call=True,
        may_differ=True,
    )

    # Model
    model: str | None = _model_flag(
        Module(),
        None,
        "Bundled model, or a .py file or package.module[:Name] that defines a class Model.",
        decides=True,
    )
    model_arg: Mapping[str, Any] = _model_flag(
        ARGUMENT, {}, "Argument of the model, e.g. hidden_units=2048,2048. Repeatable.", decides=True
    )
    init_from: str | None = _model_flag(
        Path(),
        None,
        "Run, checkpoint or Keras file from which to load the weights.",
        of_call=True,
        may_be_elsewhere=True,
    )

    # Input
    input: str | None = _input_flag(
        Module(),
        None,
        "Bundled input, or a .py file or package.module[:name] that defines a function load.",
        decides=True,
    )
    input_arg: Mapping[str, Any] = _input_flag(
        ARGUMENT, {}, "Argument of the input, e.g. examples=10000. Repeatable.", decides=True
    )
    data_dir: str | None = _input_flag(
        FilePaths(), None, "Files of the input: a folder, a glob, or several separated by commas.", may_differ=True
    )
    eval_data_dir: str | None = _input_flag(
        FilePaths(), None, "Files of the evaluation data, for inputs that read it separately.", may_differ=True
    )
    global_batch_size: int = _input_flag(
        Integer(1), 64, "Global batch size: examples per update, across all replicas.", decides=True
    )
    validation_split: float = _input_flag(
        Number(lower=0, upper=1), 0.0, "Fraction of the training data, from its end, to evaluate on.", decides=True
    )
    eval_batch_size: int = _input_flag(Integer(1), 512, "Examples per evaluation step, across all replicas.")
    resident_data_mb: int = _input_flag(Integer(0), 1024, "Cache arrays of up to this many MiB on each device.")
    shuffle_window: int = _input_flag(
        Integer(0, 1 << 20),
        0,
        "Shuffle chunks of files, then examples within windows of this many chunks; 0: single examples.",
        decides=True,
    )
    bucket_by: str | None = _input_flag(
        Text("axis:boundaries", rules.check_buckets),
        None,
        "Batch examples of similar length: the unknown dimension and each bucket's longest length, e.g. "
        "0:100,200,400; a third part (0:100,200:12800) bounds examples times length.",
        decides=True,
    )
    max_bad_records: int = _input_flag(Integer(0), 0, "Unreadable examples to skip before the run fails.")
    shuffle_buffer: int = _input_flag(
        Integer(0),
        10_000,
        "Examples in the shuffle buffer of a tf.data.Dataset; 0 keeps the order of any data.",
        decides=True,
    )
    auto_shard_policy: str = _input_flag(
        OneOf(AUTO_SHARD_POLICIES),
        "auto",
        "How workers shard a tf.data.Dataset: by file; by example, reading all (data); by file if possible (auto); "
        "each worker gives its own part (off).",
        decides=True,
    )

    # Where it runs
    strategy: str = _placement_flag(OneOf(registry.names), "one_device", "Distribution strategy.")
    num_virtual_devices: int = _placement_flag(
        Integer(0, 1000),
        0,
        "Split the CPU, or the one GPU, into this many virtual devices.",
        use=("strategy", "mirrored"),
    )
    mesh: str | None = _placement_flag(
        Text("data:D,model:M", rules.check_mesh),
        None,
        "Mesh of replicas: layers of parts.sharding are sharded over M of them.",
        use=_MESHES,
    )
    shard_optimizer: bool = _placement_flag(
        Boolean(), False, "Shard optimizer state (slots) across replicas (ZeRO, stage 1).", use=_MESHES
    )
    recompute: bool = _placement_flag(
        Boolean(), False, "Activation checkpointing: recompute the model's blocks in the backward pass."
    )
    gpus: str | None = _placement_flag(
        Text(
            "GPUs' numbers, or none",
            rules.matching("none|\\d{1,4}(,\\d{1,4})*", "it is not a list of GPUs' numbers; use e.g. 0,1, or none"),
        ),
        None,
        "Indices of the GPUs to use, or none; by default all (one_device: the first).",
        of_call=True,
        may_differ=True,
    )
    steps_per_loop: int = _placement_flag(
        Integer(0), 0, "Steps per compiled call; 0 chooses about a quarter of a second of them."
    )
    jit: str = _placement_flag(
        OneOf(("auto", "on", "off")), "auto", "Compile the training loop with XLA; auto measures both."
    )
    communication: str = _placement_flag(
        OneOf(("auto", "ring", "nccl")),
        "auto",
        "Collectives between hosts: TensorFlow's ring over gRPC, or NCCL (GPUs).",
        use=("strategy", "multi_worker"),
    )
    cluster_hosts: str | None = _placement_flag(
        Text(
            "host:port,host:port",
            rules.matching("[^,\\s]+(,[^,\\s]+)*", "it is not a list of addresses; use e.g. a:2222,b:2222"),
        ),
        None,
        "Address of each task: all workers; or a coordinator, workers, --num_ps servers, an evaluator.",
        of_call=True,
    )
    task_index: int | None = _placement_flag(
        Integer(0), None, "Index of this process in --cluster_hosts, from 0.", of_call=True, may_differ=True
    )
    bind: str | None = _placement_flag(
        Text("an IP address", rules.check_ip_address),
        None,
        "Address at which Crankshaft's own sockets listen; TensorFlow's servers listen on all.",
        of_call=True,
        may_differ=True,
    )
    num_ps: int = _placement_flag(
        Integer(0), 0, "Parameter servers among the tasks of --cluster_hosts, Slurm or Kubernetes.", of_call=True
    )
    evaluator: bool = _placement_flag(
        Boolean(),
        False,
        "With servers: the last task, or that outside of TF_CONFIG's cluster, evaluates checkpoints.",
        of_call=True,
    )
    cluster_timeout_seconds: float = _placement_flag(
        Number(lower=0, upper=1e6),
        300.0,
        "How long to wait for all workers to connect.",
        use=_CLUSTERS,
        may_differ=True,
    )
    step_timeout_seconds: float | None = _placement_flag(
        Number(lower=0, upper=1e6),
        None,
        "End a worker without progress for this long, and name who is stuck; input that returns nothing for half as"
        " long, too; 0: never. Default: 600, in a debugger 0.",
        may_differ=True,
    )
    # Between replicas
    reduce_dtype: str = _between_flag(
        OneOf(PRECISIONS),
        "float32",
        "Data type of gradients between replicas, and of values to and from parameter servers.",
        use=(*_REPLICAS, "parameter_server"),
        decides=True,
    )
    sync_every_steps: int = _between_flag(
        Integer(1), 1, "Synchronize replicas every this many steps (local SGD, DiLoCo).", decides=True
    )
    outer_arg: Mapping[str, Any] = _between_flag(
        ARGUMENT,
        {},
        "Argument of the outer update at a synchronization: learning_rate (1 averages), momentum.",
        use=_LOCAL_SGD,
        decides=True,
    )

    # Parameter servers
    max_staleness_steps: int | None = _servers_flag(
        Integer(0), None, "Bound on staleness: workers run in rounds of at most this plus one steps."
    )
    variable_placement: Sequence[str] = _servers_flag(
        Text("REGEX=ps:N", rules.matching(".+=ps:\\d+", "it is not of the form REGEX=ps:N; use e.g. table=ps:0")),
        [],
        "Place variables whose path matches on that server, e.g. embedding=ps:0. Repeatable.",
        several=True,
    )

    # The update
    optimizer: str = _update_flag(
        Text("a name"),
        "adam",
        "The update rule: sgd, momentum, adam, adamw, adagrad, rmsprop, ftrl, a class of tf.keras.optimizers, or "
        "package.module[:Name] with a class Optimizer.",
        decides=True,
    )
    optimizer_arg: Mapping[str, Any] = _update_flag(
        ARGUMENT,
        {},
        "Argument of the optimizer, e.g. beta_1=0.8; of each also clipnorm and clipvalue (clip each variable's "
        "gradient by its norm, by value) and weight_decay_exclude (regular expression of paths).",
        decides=True,
    )
    learning_rate: float = _update_flag(
        Number(lower=0, upper=HUGE), 0.001, "Learning rate, or where its schedule begins.", decides=True
    )
    learning_rate_schedule: str = _update_flag(OneOf(SCHEDULES), "constant", "Learning-rate schedule.", decides=True)
    learning_rate_schedule_arg: Mapping[str, Any] = _update_flag(
        ARGUMENT, {}, "Argument of the schedule, e.g. decay_rate=0.9. Repeatable.", decides=True
    )
    warmup_steps: int = _update_flag(Integer(0), 0, "Steps over which the learning rate rises linearly.", decides=True)
    weight_decay: float | None = _update_flag(
        Number(lower=0, upper=HUGE),
        None,
        "Decoupled weight decay, times the learning rate; default: the optimizer's. Not of biases and normalizations' "
        "gains (weight_decay_exclude); of tables, only of rows in use.",
        decides=True,
    )
    freeze: Sequence[str] = _update_flag(
        Text("REGEX or REGEX:EPOCHS", rules.check_freeze),
        [],
        "REGEX[:EPOCHS]: freeze weights whose path matches, for the first EPOCHS or always. Repeatable.",
        several=True,
        decides=True,
    )
    clip_norm: float = _update_flag(
        Number(lower=0, upper=HUGE), 0.0, "Clip gradients to this global norm; 0: off.", decides=True
    )
    ema_decay: float = _update_flag(
        Number(lower=0, below=1),
        0.0,
        "Decay of the moving average of weights that evaluation uses, at most (1+n)/(10+n) after n updates; 0: off."
        " Tables are not averaged.",
        decides=True,
    )
    accumulate_steps: int = _update_flag(
        Integer(1), 1, "Gradient accumulation: micro-batches per update.", decides=True
    )
    precision: str = _update_flag(
        OneOf(PRECISIONS),
        "float32",
        "Data type that layers compute in (float16: with dynamic loss scaling). Default: Keras's mixed policy, if the "
        "program has set one.",
        decides=True,
    )
    on_nonfinite: str = _update_flag(
        OneOf(ON_NONFINITE), "raise", "If a step is not finite: stop the run; or skip its update.", decides=True
    )

    # When (in steps; 0 is never)
    eval_every_steps: int | None = _when_flag(
        Integer(0), None, "Evaluation; by default each epoch. The end is always evaluated.", is_period=True
    )
    eval_batches: int = _when_flag(
        Integer(0),
        0,
        "Evaluate only the first N batches during training; 0: all.",
        use=("mode", "train_and_eval", "train"),
    )
    checkpoint_every_minutes: float = _when_flag(
        Number(lower=0, upper=1e6),
        5.0,
        "Minutes between checkpoints; 0: off. The end is saved too.",
        use=_NEEDS_RUN_DIR,
    )
    checkpoint_every_steps: int | None = _when_flag(
        Integer(0), None, "Checkpoint; with an evaluator, or if workers may join, by this alone: 1000.", **_WRITES
    )
    summary_every_steps: int = _when_flag(Integer(0), 500, "Scalars in TensorBoard, also after each epoch.", **_WRITES)
    histogram_every_steps: int = _when_flag(
        Integer(0), 0, "Histograms of weights and, without parameter servers, gradients.", **_WRITES
    )
    keep_checkpoints: int = _when_flag(
        Integer(0), 5, "Recent checkpoints to keep; 0 keeps all.", use=_NEEDS_RUN_DIR, may_differ=True
    )
    snapshot_seconds: str | float = _when_flag(
        AutoOrNumber(lower=0, upper=1e6),
        "auto",
        "Seconds between snapshots in memory; auto: at most every second, and 0.5 % of the time; 0: none.",
        use=_NEEDS_RUN_DIR,
    )
    monitor: str = _when_flag(
        Text("a metric's name", rules.check_monitored),
        "eval_loss",
        "Metric of the best checkpoint, early stopping and reduce_lr; max:eval_NAME or min:eval_NAME sets a direction.",
    )
    early_stopping: Mapping[str, Any] = _when_flag(
        ARGUMENT, {}, "Stop after patience=N evaluations without an improvement of more than min_delta=0."
    )
    reduce_lr: Mapping[str, Any] = _when_flag(
        ARGUMENT,
        {},
        "Multiply the learning rate by factor=0.1 after patience=N evaluations without an improvement of more than "
        "min_delta=1e-4.",
    )
    restore_best: bool = _when_flag(
        Boolean(), False, "End with the weights of the best evaluation; eval and export use them too."
    )

    # What is shown and checked
    progress: str = _shown_flag(
        OneOf(("auto", "bar", "plain", "off")),
        "auto",
        "A live bar, plain lines, or nothing.",
        of_call=True,
        may_differ=True,
    )
    log_format: str = _shown_flag(
        OneOf(("text", "json")),
        "text",
        "json: print progress and evaluations as one JSON object per line, with the keys of the run's log.",
        of_call=True,
        may_differ=True,
    )
    debug: bool = _shown_flag(
        Boolean(),
        False,
        "Check shapes and labels in each step, and print full tracebacks.",
        of_call=True,
        may_differ=True,
    )
    run_eagerly: bool = _shown_flag(
        Boolean(),
        False,
        "Execute training steps op by op, on one device, so that print and a debugger work in losses and layers. Slow.",
        of_call=True,
    )
    metrics_port: int | None = _shown_flag(
        Integer(0, 65535),
        None,
        "Serve Prometheus metrics on this port of loopback or --bind; a host's other tasks on the next ports.",
        of_call=True,
        may_differ=True,
    )
    check_sync_every_steps: int = _shown_flag(
        Integer(0),
        0,
        "Also compare all replicas' variables at this interval; 0: only after the first call and before saving.",
        use=_REPLICAS,
        is_period=True,
    )
    check_numerics: bool = _shown_flag(
        Boolean(), False, "Name the first op that returns inf or NaN. Slow.", of_call=True
    )

    # Modes other than training
    eval_checkpoint: str = _modes_flag(
        Text("latest, best, all, or a step", rules.matching("latest|best|all|\\d+", "it is not a step either")),
        "latest",
        "Checkpoint to use; all: eval only.",
        use=("mode", "eval", "export", "predict", "generate"),
        of_call=True,
    )
    follow: bool = _modes_flag(
        Boolean(),
        False,
        "eval, with eval_checkpoint=all: wait for each checkpoint of a run that trains, until it ends; on the CPU by"
        " default.",
        use=("mode", "eval"),
        of_call=True,
    )
    output: str | None = _modes_flag(
        Path(),
        None,
        "export: folder of the SavedModel, by default run_dir/export, or FILE.keras; predict: FILE.csv, .parquet or"
        " .npz.",
        use=("mode", "export", "predict"),
        of_call=True,
        may_differ=True,
    )
    export_model: str | None = _modes_flag(
        Text("a name"),
        None,
        "export, predict: a Keras model of the trainer, e.g. generator, instead of Trainer.forward.",
        use=("mode", "export", "predict"),
        of_call=True,
    )
    export_since: str | None = _modes_flag(
        Path(),
        None,
        "export: folder of an earlier export; tables/NAME.delta.parquet then has what changed since in a table with "
        "admit_after.",
        use=("mode", "export"),
        of_call=True,
    )
    predict_split: str | None = _modes_flag(
        Text(
            "eval, train, or eval/NAME of several",
            rules.matching("eval|train|eval/.+", "it is none of eval, train, eval/NAME"),
        ),
        None,
        "predict: split of the data; by default eval, if the data has one.",
        use=("mode", "predict"),
        of_call=True,
    )

    # Generation
    prompt: str = _generation_flag(Text("text", may_be_empty=True), "", "Text to continue; by default a new document.")
    sampling: Mapping[str, Any] = _generation_flag(
        ARGUMENT,
        {},
        "tokens=200: at most this many; temperature=0.8: higher values make unlikely tokens more frequent, 0 takes "
        "the likeliest; top_k=40: sample from this many of the likeliest, 0 from all.",
    )

    # Benchmark mode
    benchmark_arg: Mapping[str, Any] = _benchmark_flag(
        ARGUMENT,
        {},
        "seconds=3, about, per round, or steps=N; rounds=3; profile=true traces ten steps for TensorBoard; "
        "fail_below=F exits with 3 if the rate is significantly below this fraction of the baseline's. Repeatable.",
    )
    baseline: str | None = _benchmark_flag(
        Path(), None, "Earlier result (--result_json) to compare with.", may_differ=True
    )


FIELDS = fields(Flags)
FLAG_INFO: dict[str, FlagInfo] = {name: field.metadata["info"] for name, field in FIELDS.items()}
GROUPS = {
    group: [name for name, info in FLAG_INFO.items() if info.group == group]
    for group in dict.fromkeys(info.group for info in FLAG_INFO.values())
}
USES = {name: info.use for name, info in FLAG_INFO.items() if info.use}
ARGUMENTS = [name for name, info in FLAG_INFO.items() if info.takes_arguments]


def replaced_by(names: Collection[str]) -> set[str]:
    """Lists the flags that are replaced by flags of these names, which set the same in another way."""
    return {name for pair in EITHER if not {*pair}.isdisjoint(names) for name in pair if name not in names}


def flags_with(has_property: Callable[[FlagInfo], bool]) -> list[str]:
    """Lists the names of the flags with a property."""
    return [name for name, info in FLAG_INFO.items() if has_property(info)]


DECIDING = flags_with(lambda flag: flag.decides)  # the flags that decide a run's numbers
