"""Every flag of `crankshaft train`, each said once: name, type, default, rule, help, and what it is for.

The command line, `crankshaft.run`'s keywords, files of flags, docs/flags.md, resume and what workers have to agree on
are made from the fields of `Flags`. Nothing here starts TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import flags

from ...engine.internals.arguments import HUGE
from ...engine.strategies import registry
from . import rules

MODES = ("train_and_eval", "train", "eval", "benchmark", "export", "predict", "generate")
WIRE_DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("float32", "bfloat16", "float16")
SCHEDULES = ("constant", "cosine", "cosine_restarts", "exponential", "polynomial", "piecewise")
AUTO_SHARD_POLICIES = ("auto", "file", "data", "hint", "off")
SPLITS = ("eval", "train")

# What a flag is for: (another flag, values of it), or, without values, any but the other's default.
Use = tuple[str, ...]

_boolean, _enum, _arguments = flags.DEFINE_bool, flags.DEFINE_enum, rules.arguments
_path, _files, _integer, _number, _string = rules.path, rules.files, rules.whole, rules.number, rules.text
_COUNT = {"lower": 0}
_SECONDS = {"lower": 0, "upper": 1e6}
_NAME = {"wants": "a name"}
_SERVERS = ("strategy", "parameter_server")
_CLUSTERS = ("strategy", "multi_worker", "parameter_server")
_MESHES = ("strategy", "mirrored", "multi_worker")
_REPLICAS = ("strategy", "mirrored", "multi_worker", "tpu")
REPLACED = {  # flags that are gone, and what to use
    "benchmark_part": "in a checkout of Crankshaft, `python -m benchmarks.parts --part=NAME` times parts of a step",
    "own_network": 'start it in a network of its own: unshare -rn sh -c "ip link set lo up; exec crankshaft local ..."',
}
EITHER = (("train_steps", "train_epochs"), ("benchmark_steps", "benchmark_seconds"))  # a length, said in two ways
_LOCAL_SGD = ("sync_every_steps",)
_OF_A_FOLDER = ("run_dir",)
_WRITES: dict[str, Any] = {**_COUNT, "use": _OF_A_FOLDER, "is_period": True}


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of a flag besides its name, type and default.

    Attributes:
      group: under which it stands in --help.
      define: defines it for absl: `define(name=, default=, help=, **rule)`.
      rule: its range, choices or rule.
      help: what it is, in a line.
      use: what it is for, if not for all runs; see `Use`.
      decides: whether it decides a run's numbers: a run_dir is resumed only with the same value.
      of_call: whether it is of one call: a call that reads a run does not take it over from it.
      may_differ: whether workers that train together may be given different values.
      may_be_elsewhere: whether only that it is given has to agree: a folder may have another name on another host.
      is_period: whether it says when something is due that reads the weights.
    """

    group: str
    define: Callable[..., Any]
    rule: Mapping[str, Any]
    help: str
    use: Use | None = None
    decides: bool = False
    of_call: bool = False
    may_differ: bool = False
    may_be_elsewhere: bool = False
    is_period: bool = False


def _in(group: str, for_all: Use | None = None, **of_all: bool) -> Callable[..., Any]:
    """Returns a function that makes a field of a group; `use`, or `for_all`, says what a flag is for."""
    known = {field.name for field in dataclasses.fields(About) if field.default is False}

    def field(define: Callable[..., Any], default: Any, help: str, use: Use | None = None, **more: Any) -> Any:
        about = {**of_all, **{name: more.pop(name) for name in [*more] if name in known}}
        metadata = {"about": About(group, define, more, help, use or for_all, **about)}
        if isinstance(default, (list, dict)):
            return dataclasses.field(default_factory=default.copy, metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    return field


_run, _model, _input, _where = map(_in, ("The run", "Model", "Input", "Where it runs"))
_between = _in("Between replicas", for_all=_REPLICAS)
_servers = _in("Parameter servers", for_all=_SERVERS)
_update, _when = map(_in, ("The update", "When (in steps; 0 is never)"))
_shown, _modes = map(_in, ("What is shown and checked", "Modes other than training"))
_generation = _in("Generation", for_all=("mode", "generate"), of_call=True)
_benchmark = _in("Benchmark mode", for_all=("mode", "benchmark"), of_call=True)


@dataclasses.dataclass(kw_only=True)
class Flags:
    """The values of a command line; arguments of NAME=VALUE are parsed."""

    # The run
    mode: str = _run(_enum, "train_and_eval", "What to run.", enum_values=MODES, of_call=True)
    run_dir: str | None = _run(
        rules.folder,
        None,
        "Directory of checkpoints, TensorBoard files, config and result (also gs://...); an existing run resumes.",
        of_call=True,
        may_be_elsewhere=True,
    )
    config: str | None = _run(
        _path,
        None,
        "YAML or JSON file of flags, also a run's config.json; the command line takes precedence.",
        of_call=True,
    )
    seed: int = _run(
        _integer, 0, "Seed of all random numbers of the run, below 2^31.", lower=0, upper=2**31 - 1, decides=True
    )
    train_steps: int | None = _run(
        _integer, None, "Number of training steps (updates). Give one of --train_steps and --train_epochs.", lower=1
    )
    train_epochs: float | None = _run(
        _number, None, "Number of passes over the training data; 10 if neither is given.", above=0, upper=1e9
    )
    allow_changed_config: bool = _run(_boolean, False, "Resume even if the configuration changed.", of_call=True)
    result_json: str | None = _run(_path, None, "Also write the result to this file.", of_call=True, may_differ=True)

    # Model
    model: str | None = _model(
        _string, None, "A bundled model, or a .py file that defines a class Model.", **rules.MODULE, decides=True
    )
    model_arg: Mapping[str, Any] = _model(
        _arguments, {}, "NAME=VALUE argument of the model, e.g. hidden_units=2048,2048. Repeatable.", decides=True
    )
    init_from: str | None = _model(
        _path,
        None,
        "Initialize the weights, and nothing else, from this run, checkpoint or Keras file.",
        of_call=True,
        may_be_elsewhere=True,
    )

    # Input
    input: str | None = _input(
        _string, None, "A bundled input, or a .py file that defines a function load.", **rules.MODULE, decides=True
    )
    input_arg: Mapping[str, Any] = _input(
        _arguments, {}, "NAME=VALUE argument of the input, e.g. examples=10000. Repeatable.", decides=True
    )
    data_dir: str | None = _input(
        _files, None, "Files of the input: a folder, a glob, or several separated by commas.", may_differ=True
    )
    eval_data_dir: str | None = _input(
        _files, None, "Files of the evaluation data, for inputs that read it separately.", may_differ=True
    )
    global_batch_size: int = _input(
        _integer, 64, "Global batch size: examples per update, across all replicas.", lower=1, decides=True
    )
    validation_split: float = _input(
        _number,
        0.0,
        "Fraction of the training data, taken from its end, to evaluate on.",
        lower=0,
        upper=1,
        decides=True,
    )
    eval_batch_size: int = _input(_integer, 512, "Examples per evaluation step, across all replicas.", lower=1)
    resident_data_mb: int = _input(_integer, 1024, "Keep arrays of up to this many MiB on each device.", lower=0)
    shuffle_window: int = _input(
        _integer,
        0,
        "Shuffle chunks of files, then examples within windows of this many chunks; 0: single examples.",
        lower=0,
        upper=1 << 20,
        decides=True,
    )
    max_bad_records: int = _input(_integer, 0, "Number of unreadable examples to skip before the run fails.", lower=0)
    shuffle_buffer: int = _input(
        _integer,
        10_000,
        "Examples in the shuffle buffer of a tf.data.Dataset; 0 keeps the order of any data.",
        lower=0,
        decides=True,
    )
    auto_shard_policy: str = _input(
        _enum,
        "auto",
        "How workers shard a tf.data.Dataset: by file, or by example, reading all; auto: by file if possible.",
        enum_values=AUTO_SHARD_POLICIES,
        decides=True,
    )

    # Where it runs
    strategy: str = _where(rules.one_of, "one_device", "Distribution strategy.", known=registry.names)
    num_virtual_devices: int = _where(
        _integer,
        0,
        "Split the CPU, or the one GPU, into this many virtual devices; 0 does not split it.",
        lower=0,
        upper=1000,
        use=("strategy", "mirrored"),
    )
    mesh: str | None = _where(
        _string,
        None,
        "Mesh of replicas, data:D,model:M: layers of engine.parallel are sharded over M replicas.",
        wants="data:D,model:M",
        rule=rules.mesh,
        use=_MESHES,
    )
    shard_optimizer: bool = _where(
        _boolean, False, "Shard the optimizer's slots and its update across replicas (ZeRO, stage 1).", use=_MESHES
    )
    recompute: bool = _where(
        _boolean,
        False,
        "Recompute the model's blocks in the backward pass: less memory for activations, a third more computation.",
    )
    tpu_address: str = _where(
        _string,
        "",
        "Name or grpc:// address of the TPU; empty for the local one.",
        wants="a TPU's name or address",
        rule=rules.matching("[\\w.:/-]+", "it is neither name nor address; use e.g. local or grpc://10.0.0.2:8470"),
        may_be_empty=True,
        use=("strategy", "tpu"),
        of_call=True,
    )
    gpus: str | None = _where(
        _string,
        None,
        "Indices of the GPUs to use, e.g. 0,1, or none; by default all (one_device: the first).",
        wants="GPUs' numbers, or none",
        rule=rules.matching("none|\\d{1,4}(,\\d{1,4})*", "it is not a list of GPUs' numbers; use e.g. 0,1, or none"),
        of_call=True,
        may_differ=True,
    )
    steps_per_loop: int = _where(
        _integer, 0, "Steps per compiled call; 0 chooses about a quarter of a second of them.", **_COUNT
    )
    jit: str = _where(
        _enum,
        "auto",
        "Compile the training loop with XLA; auto measures both and keeps the faster.",
        enum_values=("auto", "on", "off"),
    )
    communication: str = _where(
        _enum,
        "auto",
        "Collectives between hosts: ring (TensorFlow's, over gRPC) or nccl (GPUs).",
        enum_values=("auto", "ring", "nccl"),
        use=("strategy", "multi_worker"),
    )
    cluster_hosts: str | None = _where(
        _string,
        None,
        "host:port of each task: all workers; or a coordinator, workers, --num_ps servers, an evaluator.",
        wants="host:port,host:port",
        rule=rules.matching("[^,\\s]+(,[^,\\s]+)*", "it is not a list of addresses; use e.g. a:2222,b:2222"),
        of_call=True,
    )
    task_index: int | None = _where(
        _integer, None, "Index of this process in --cluster_hosts, from 0.", lower=0, of_call=True, may_differ=True
    )
    bind: str | None = _where(
        _string,
        None,
        "Address of this host at which Crankshaft's own sockets listen; TensorFlow's servers listen on all.",
        wants="an IP address",
        rule=rules.ip_address,
        of_call=True,
        may_differ=True,
    )
    num_ps: int = _where(
        _integer,
        0,
        "Number of parameter servers among the tasks of --cluster_hosts, Slurm or Kubernetes.",
        **_COUNT,
        of_call=True,
    )
    evaluator: bool = _where(_boolean, False, "With --num_ps: the last task evaluates each checkpoint.", of_call=True)
    cluster_timeout_seconds: float = _where(
        _number, 300.0, "How long to wait for all workers to connect.", **_SECONDS, use=_CLUSTERS, may_differ=True
    )
    step_timeout_seconds: float | None = _where(
        _number,
        None,
        "End a worker that makes no progress for this long, and name who is stuck; files or a stream that return "
        "nothing for half as long end the run too; 0 disables this. Default: 600, in a debugger 0.",
        **_SECONDS,
        may_differ=True,
    )
    # Between replicas
    reduce_dtype: str = _between(
        _enum,
        "float32",
        "Data type of gradients between replicas, and of values to and from parameter servers.",
        enum_values=WIRE_DTYPES,
        use=(*_REPLICAS, "parameter_server"),
        decides=True,
    )
    powersgd_rank: int = _between(
        _integer,
        0,
        "Compress gradients to two matrices of this rank (PowerSGD); 0 disables this.",
        **_COUNT,
        decides=True,
    )
    sync_every_steps: int = _between(
        _integer,
        1,
        "Synchronize replicas every this many steps (local SGD, DiLoCo); 1 synchronizes each step.",
        lower=1,
        decides=True,
    )
    outer_arg: Mapping[str, Any] = _between(
        _arguments,
        {},
        "NAME=VALUE argument of the outer update at a synchronization: learning_rate, where 1 averages; momentum.",
        use=_LOCAL_SGD,
        decides=True,
    )

    # Parameter servers
    max_staleness_steps: int | None = _servers(
        _integer,
        None,
        "Bound on staleness: workers run in rounds of at most this plus one steps. Default: no rounds.",
        **_COUNT,
    )
    variable_placement: Sequence[str] = _servers(
        rules.repeated,
        [],
        "REGEX=ps:N places variables whose path matches on that server, e.g. embedding=ps:0. Repeatable.",
        wants="REGEX=ps:N",
        rule=rules.matching(".+=ps:\\d+", "it is not of the form REGEX=ps:N; use e.g. table=ps:0"),
    )

    # The update
    optimizer: str = _update(
        _string,
        "adam",
        "sgd momentum adam adamw adagrad rmsprop ftrl, or a class of tf.keras.optimizers.",
        **_NAME,
        decides=True,
    )
    optimizer_arg: Mapping[str, Any] = _update(
        _arguments,
        {},
        "NAME=VALUE argument of the optimizer, e.g. beta_1=0.8. Every optimizer takes clipnorm (clips each "
        "variable's gradient by its norm), clipvalue (clips each value), and weight_decay_exclude (a regular "
        "expression of variable paths that do not decay).",
        decides=True,
    )
    learning_rate: float = _update(
        _number,
        0.001,
        "Learning rate, or the initial learning rate of the schedule.",
        lower=0,
        upper=HUGE,
        decides=True,
    )
    learning_rate_schedule: str = _update(
        _enum, "constant", "Learning-rate schedule.", enum_values=SCHEDULES, decides=True
    )
    learning_rate_schedule_arg: Mapping[str, Any] = _update(
        _arguments, {}, "NAME=VALUE argument of the schedule, e.g. decay_rate=0.9. Repeatable.", decides=True
    )
    warmup_steps: int = _update(
        _integer, 0, "Steps over which the learning rate rises linearly.", **_COUNT, decides=True
    )
    weight_decay: float | None = _update(
        _number,
        None,
        "Decoupled weight decay, times the learning rate; default: the optimizer's. Of tables, only used rows decay.",
        lower=0,
        upper=HUGE,
        decides=True,
    )
    freeze: Sequence[str] = _update(
        rules.repeated,
        [],
        "REGEX[:EPOCHS]: freeze weights whose path matches, for the first EPOCHS or always. Repeatable.",
        wants="REGEX or REGEX:EPOCHS",
        rule=rules.freezing,
        decides=True,
    )
    clip_norm: float = _update(
        _number,
        0.0,
        "Clip gradients to this global norm; 0 disables clipping. See also --optimizer_arg.",
        lower=0,
        upper=HUGE,
        decides=True,
    )
    ema_decay: float = _update(
        _number,
        0.0,
        "Decay of the moving average of weights that evaluation uses; after n updates at most (1+n)/(10+n), "
        "unless --optimizer_arg=ema_warmup=false; 0 disables it. Embedding tables are not averaged.",
        lower=0,
        below=1,
        decides=True,
    )
    accumulate_steps: int = _update(_integer, 1, "Micro-batches per update.", lower=1, decides=True)
    precision: str = _update(
        _enum,
        "float32",
        "Data type that layers compute in (float16: with dynamic loss scaling).",
        enum_values=PRECISIONS,
        decides=True,
    )
    on_nonfinite: str = _update(
        _enum,
        "raise",
        "What to do with a step whose gradients are not finite: stop the run, or skip the step.",
        enum_values=("raise", "skip"),
        decides=True,
    )

    # When (in steps; 0 is never)
    eval_every_steps: int | None = _when(
        _integer,
        None,
        "Evaluation interval; by default each epoch. The end is always evaluated.",
        **_COUNT,
        is_period=True,
    )
    checkpoint_every_steps: int = _when(_integer, 1000, "Checkpoint interval. The end is always saved.", **_WRITES)
    summary_every_steps: int = _when(
        _integer,
        500,
        "Interval of scalars in TensorBoard, also written after each epoch; 0: only at the end.",
        **_WRITES,
    )
    histogram_every_steps: int = _when(_integer, 0, "Interval of histograms of weights and gradients.", **_WRITES)
    keep_checkpoints: int = _when(
        _integer, 5, "Number of recent checkpoints to keep; 0 keeps all.", **_COUNT, use=_OF_A_FOLDER, may_differ=True
    )
    monitor: str = _when(
        _string,
        "eval_loss",
        "Metric of the best checkpoint, early stopping and reduce_lr; max:eval_NAME or min:eval_NAME sets a direction.",
        wants="a metric's name",
        rule=rules.monitored,
    )
    early_stopping: Mapping[str, Any] = _when(
        _arguments, {}, "Stop after patience=N evaluations without an improvement of more than min_delta=0."
    )
    reduce_lr: Mapping[str, Any] = _when(
        _arguments,
        {},
        "Multiply the learning rate by factor=0.1, at most to a thousandth, after patience=N evaluations without "
        "an improvement of more than min_delta=1e-4.",
    )
    restore_best: bool = _when(
        _boolean, False, "End with the weights of the best evaluation; eval and export use them too."
    )

    # What is shown and checked
    progress: str = _shown(
        _enum,
        "auto",
        "Progress display: a live bar, plain lines, or off, which prints nothing.",
        enum_values=("auto", "bar", "plain", "off"),
        of_call=True,
        may_differ=True,
    )
    debug: bool = _shown(
        _boolean,
        False,
        "Check shapes and labels in each step, and print full tracebacks.",
        of_call=True,
        may_differ=True,
    )
    metrics_port: int | None = _shown(
        _integer,
        None,
        "Serve Prometheus metrics on this port of loopback or --bind; more tasks of a host on the next ports.",
        lower=0,
        upper=65535,
        of_call=True,
        may_differ=True,
    )
    check_sync_every_steps: int = _shown(
        _integer,
        0,
        "Also compare all replicas' variables at this interval; 0 compares only before saving.",
        **_COUNT,
        use=_REPLICAS,
        is_period=True,
    )
    check_numerics: bool = _shown(_boolean, False, "Name the first op that returns inf or NaN. Slow.", of_call=True)

    # Modes other than training
    eval_checkpoint: str = _modes(
        _string,
        "latest",
        "eval, export, predict, generate: latest, best, or a step; eval: all, too.",
        wants="latest, best, all, or a step",
        rule=rules.matching("latest|best|all|\\d+", "it is not a step either"),
        use=("mode", "eval", "export", "predict", "generate"),
        of_call=True,
    )
    output: str | None = _modes(
        _path,
        None,
        "export: directory of the SavedModel, by default run_dir/export, or FILE.keras for Trainer.model alone; "
        "predict: FILE.csv, .parquet or .npz.",
        use=("mode", "export", "predict"),
        of_call=True,
        may_differ=True,
    )
    export_model: str | None = _modes(
        _string,
        None,
        "export, predict: name of a Keras model of the trainer, e.g. generator, in place of Trainer.forward.",
        wants="a name",
        use=("mode", "export", "predict"),
        of_call=True,
    )
    predict_split: str | None = _modes(
        _enum,
        None,
        "predict: split of the data; by default eval, if the data has one.",
        enum_values=SPLITS,
        use=("mode", "predict"),
        of_call=True,
    )

    # Generation
    prompt: str = _generation(
        _string, "", "Text to continue; by default a new document.", wants="text", may_be_empty=True
    )
    tokens: int = _generation(
        _integer, 200, "Maximum number of tokens to generate; a document may end earlier.", lower=1
    )
    sampling: Mapping[str, Any] = _generation(
        _arguments,
        {},
        "temperature=0.8: higher values make unlikely tokens more frequent, 0 takes the likeliest; top_k=40: "
        "sample from this many of the likeliest, 0 from all.",
    )

    # Benchmark mode
    benchmark_steps: int | None = _benchmark(_integer, None, "Steps per round, instead of a time.", lower=1)
    benchmark_seconds: float | None = _benchmark(
        _number, None, "Approximate seconds per round; 3 if neither is given.", above=0, upper=1e6
    )
    benchmark_rounds: int = _benchmark(_integer, 3, "Number of rounds.", lower=1)
    profile: bool = _benchmark(
        _boolean, False, "Write a TensorBoard trace of ten steps, and list the ten most expensive ops.", may_differ=True
    )
    baseline: str | None = _benchmark(_path, None, "Earlier result (--result_json) to compare with.", may_differ=True)
    fail_below: float | None = _benchmark(
        _number,
        None,
        "Exit with 3 if the rate is significantly below this fraction of the baseline's.",
        lower=0,
        upper=1e6,
    )


ABOUT: dict[str, About] = {field.name: field.metadata["about"] for field in dataclasses.fields(Flags)}
GROUPS = {about.group: [name for name, each in ABOUT.items() if each.group == about.group] for about in ABOUT.values()}
HELP = {name: about.help for name, about in ABOUT.items()}  # as written: absl adds to the help
USES = {name: about.use for name, about in ABOUT.items() if about.use}
ARGUMENTS = [name for name, about in ABOUT.items() if about.define is _arguments]


def in_place_of(names: Collection[str]) -> set[str]:
    """Returns the flags that are replaced by flags of these names, which say the same in another way."""
    return {name for pair in EITHER if not {*pair}.isdisjoint(names) for name in pair if name not in names}


def named(is_meant: Callable[[About], bool]) -> list[str]:
    """Returns the names of the flags of which something holds."""
    return [name for name, about in ABOUT.items() if is_meant(about)]


def _define() -> None:
    defaults = vars(Flags())
    for name, about in ABOUT.items():
        default = [] if name in ARGUMENTS else defaults[name]
        about.define(name=name, default=default, help=about.help, **about.rule)


_define()


def own() -> list[str]:
    """Returns the names of flags that a user's script, or a module of theirs, has defined."""
    modules = flags.FLAGS.flags_by_module_dict()
    theirs = [name for name in modules if name.split(".")[0] not in ("absl", "crankshaft", "tensorflow", "keras")]
    return [flag.name for name in theirs for flag in modules[name]]
