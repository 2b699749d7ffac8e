"""The command line: every flag, by group. Nothing here starts TensorFlow."""

from __future__ import annotations

from absl import flags

from ...engine.step.ranges import HUGE
from ...engine.strategies import registry
from . import benchmark_flags, gpu_flags, input_flags, mesh_flags, mode_flags, rules
from .groups import GROUPS, HELP, USES, group

__all__ = ["ESSENTIAL", "GROUPS", "HELP", "USES"]

MODES = ("train_and_eval", "train", "eval", "benchmark", "export", "generate")
WIRE_DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("float32", "bfloat16", "float16")
SCHEDULES = ("constant", "cosine", "exponential", "polynomial", "piecewise")


_path, _integer, _number, _string, _repeated = rules.path, rules.whole, rules.number, rules.text, rules.repeated
_boolean, _enum = flags.DEFINE_bool, flags.DEFINE_enum
_COUNT = {"lower": 0}
_SECONDS = {"lower": 0, "upper": 1e6}
_NAME = {"wants": "a name"}
_SERVERS = ("strategy", "parameter_server")
_CLUSTERS = ("strategy", "multi_worker", "parameter_server")
_REPLICAS = ("strategy", "mirrored", "multi_worker", "tpu")
_LOCAL_SGD = ("sync_every_steps",)

ESSENTIAL = (
    "mode model model_arg input input_arg data_dir validation_split run_dir config seed strategy num_virtual_devices "
    "train_steps train_epochs global_batch_size optimizer learning_rate learning_rate_schedule precision jit "
    "eval_every_steps checkpoint_every_steps early_stopping_patience restore_best result_json"
).split()


def _define_what() -> None:
    run = group("The run")
    run(_enum, "mode", "train_and_eval", "What to do.", enum_values=MODES)
    run(
        rules.folder,
        "run_dir",
        None,
        "Checkpoints, TensorBoard files, config and result live here, gs://... too; an existing run resumes.",
    )
    run(_path, "config", None, "Flags by name in a YAML or JSON file, a run's config.json too; the command line wins.")
    run(_integer, "seed", 0, "The run's only source of randomness, below 2^31.", lower=0, upper=2**31 - 1)
    run(_integer, "train_steps", None, "Updates in all. One of --train_steps and --train_epochs.", lower=1)
    run(
        _number,
        "train_epochs",
        None,
        "Passes over the training data in all; 10 if neither is given.",
        above=0,
        upper=1e9,
    )
    run(_boolean, "allow_changed_config", False, "Resume a run_dir although its configuration was another.")
    run(_path, "result_json", None, "Write the result here too.")

    model = group("Model")
    model(_string, "model", None, "One that comes with Crankshaft, or a .py file with a class Model.", **rules.MODULE)
    model(
        _repeated,
        "model_arg",
        [],
        "NAME=VALUE for the model, e.g. hidden_units=2048,2048. Repeatable.",
        **rules.ARGUMENT,
    )
    model(_path, "init_from", None, "Start from the weights (no more) of this run, checkpoint or Keras file.")

    input_flags.define(group("Input"))


def _define_where() -> None:
    where = group("Where it runs")
    where(rules.one_of, "strategy", "one_device", "How steps are distributed.", known=registry.names)
    where(
        _integer,
        "num_virtual_devices",
        0,
        "Split the CPU (or the one GPU) into so many devices; 0 leaves it.",
        lower=0,
        upper=1000,
        only=("strategy", "mirrored"),
    )
    mesh_flags.define(where, _boolean)
    where(
        _string,
        "tpu_address",
        "",
        "The TPU's name or grpc:// address; empty finds the local one.",
        wants="a TPU's name or address",
        rule=rules.matching(r"[\w.:/-]+", "it is neither name nor address; use e.g. local or grpc://10.0.0.2:8470"),
        may_be_empty=True,
        only=("strategy", "tpu"),
    )
    gpu_flags.define(where, _string, _boolean)


def _define_how_it_runs() -> None:
    where = group("Where it runs")
    where(_integer, "steps_per_loop", 0, "Steps in one compiled call; 0 fits them to a quarter of a second.", **_COUNT)
    where(
        _enum, "jit", "auto", "XLA for the training loop; auto measures both ways.", enum_values=("auto", "on", "off")
    )
    where(
        _integer,
        "batch_parts",
        0,
        "Parts of each batch for a CPU's cores to take one each; 0: one a core where the model's are faster so.",
        lower=0,
        upper=1000,
    )
    where(
        _enum,
        "communication",
        "auto",
        "How sums travel between hosts: ring (TensorFlow's, over gRPC), nccl (GPUs).",
        enum_values=("auto", "ring", "nccl"),
        only=("strategy", "multi_worker"),
    )
    where(
        _number,
        "cluster_timeout_seconds",
        300.0,
        "How long to wait for all workers to come.",
        **_SECONDS,
        only=_CLUSTERS,
    )
    where(
        _number,
        "step_timeout_seconds",
        None,
        "A worker without progress for so long names who is stuck, and ends, as does a run whose files or stream give "
        "nothing for half as long; 0 is never. 600, in a debugger 0, if not given.",
        **_SECONDS,
    )
    where(_boolean, "tune_allocator", True, "Keep freed memory in the process (glibc): worth up to 2x on CPUs.")


def _define_between_replicas() -> None:
    between = group("Between replicas", for_all=_REPLICAS)
    between(
        _enum,
        "reduce_dtype",
        "float32",
        "What gradients travel as between replicas; what a step pulls from and pushes to parameter servers.",
        enum_values=WIRE_DTYPES,
        only=(*_REPLICAS, "parameter_server"),
    )
    between(
        _integer, "powersgd_rank", 0, "Gradients travel as two matrices of this rank (PowerSGD); 0 is off.", **_COUNT
    )
    between(
        _integer,
        "sync_every_steps",
        1,
        "Replicas train alone for so many steps, then meet (local SGD, DiLoCo); 1 is always in step.",
        lower=1,
    )
    between(
        _number,
        "outer_learning_rate",
        0.7,
        "Of the step that they take together then; 1 averages.",
        lower=0,
        upper=HUGE,
        only=_LOCAL_SGD,
    )
    between(_number, "outer_momentum", 0.9, "Of that step, Nesterov's; 0 is none.", lower=0, below=1, only=_LOCAL_SGD)


def _define_servers() -> None:
    servers = group("Parameter servers", for_all=_SERVERS)
    servers(
        _integer,
        "max_staleness_steps",
        None,
        "A worker more updates than this ahead of the slowest waits; 0 makes rounds. None waits if not given.",
        **_COUNT,
    )
    servers(
        _integer,
        "pull_every_steps",
        1,
        "A worker computes with the variables that it pulled for so many steps, within a closure.",
        lower=1,
    )
    servers(
        _repeated,
        "variable_placement",
        [],
        "REGEX=ps:N puts variables in whose path it is found on that server, e.g. embedding=ps:0. Repeatable.",
        wants="REGEX=ps:N",
        rule=rules.matching(r".+=ps:\d+", "it is no REGEX=ps:N; use e.g. table=ps:0"),
    )


def _define_rule() -> None:
    update = group("The update")
    update(
        _string,
        "optimizer",
        "adam",
        "sgd momentum adam adamw adagrad rmsprop ftrl, or a class of tf.keras.optimizers.",
        **_NAME,
    )
    update(
        _repeated, "optimizer_arg", [], "NAME=VALUE for the optimizer, e.g. beta_1=0.8. Repeatable.", **rules.ARGUMENT
    )
    update(
        _number,
        "learning_rate",
        1e-3,
        "The learning rate, or the one that the schedule starts from.",
        lower=0,
        upper=HUGE,
    )
    update(_enum, "learning_rate_schedule", "constant", "How it changes.", enum_values=SCHEDULES)
    update(
        _repeated,
        "learning_rate_schedule_arg",
        [],
        "NAME=VALUE for the schedule, e.g. decay_rate=0.9. Repeatable.",
        **rules.ARGUMENT,
    )
    update(_integer, "warmup_steps", 0, "Steps in which the rate rises linearly to where it begins.", **_COUNT)
    update(
        _number,
        "weight_decay",
        None,
        "Decoupled decay, times the rate; the optimizer's own if not given.",
        lower=0,
        upper=HUGE,
    )


def _define_what_else_an_update_is() -> None:
    update = group("The update")
    update(
        _string,
        "weight_decay_exclude",
        "bias|gamma|beta|(gain|scale)$",
        "Variables whose path this finds are not decayed.",
        wants="a regular expression",
        rule=rules.regular_expression,
        may_be_empty=True,
    )
    update(_number, "clip_norm", 0.0, "Clip the gradients' global norm to this; 0 is off.", lower=0, upper=HUGE)
    update(
        _number, "clip_variable_norm", 0.0, "Clip the norm of each variable's gradient; 0 is off.", lower=0, upper=HUGE
    )
    update(
        _number, "clip_value", 0.0, "Clip each value of the gradients to [-this, this]; 0 is off.", lower=0, upper=HUGE
    )
    update(
        _number,
        "ema_decay",
        0.0,
        "Decay of the weights' moving average used in evaluation; 0 is off. Embedding tables stay out of it.",
        lower=0,
        below=1,
    )
    update(_integer, "accumulate_steps", 1, "Micro-batches that one update is made of.", lower=1)
    update(
        _enum, "precision", "float32", "What layers compute in (float16: dynamic loss scale).", enum_values=PRECISIONS
    )
    update(
        _enum,
        "on_nonfinite",
        "raise",
        "A step that is not finite: stop, or leave it out.",
        enum_values=("raise", "skip"),
    )


def _define_when() -> None:
    when, kept = (group("When (in steps; 0 is never)", for_all=use) for use in (None, ("run_dir",)))
    when(
        _integer,
        "eval_every_steps",
        None,
        "Evaluate; each epoch if not given. The end is evaluated in any case.",
        **_COUNT,
    )
    kept(_integer, "checkpoint_every_steps", 1000, "Write a checkpoint. The end is written in any case.", **_COUNT)
    when(_integer, "summary_every_steps", 500, "Write scalars to TensorBoard.", **_COUNT)
    kept(_integer, "histogram_every_steps", 0, "Write histograms of weights and gradients.", **_COUNT)
    kept(_integer, "keep_checkpoints", 5, "Newest checkpoints that stay; 0 keeps all.", **_COUNT)
    when(
        _string,
        "monitor",
        "eval_loss",
        "What best checkpoint, early stopping and plateau watch.",
        wants="a metric's name",
        rule=rules.matching(r"(eval|train)_.+", "it is no metric's name; use e.g. eval_loss or train_loss"),
    )
    when(_integer, "early_stopping_patience", 0, "Stop after so many evaluations without improvement.", **_COUNT)
    when(
        _number,
        "early_stopping_min_delta",
        0.0,
        "Better by no more than this is no improvement.",
        lower=0,
        upper=HUGE,
        only=("early_stopping_patience",),
    )
    when(_integer, "reduce_lr_patience", 0, "Lower the rate after so many evaluations without improvement.", **_COUNT)
    when(
        _number,
        "reduce_lr_min_delta",
        1e-4,
        "Better by no more than this is no improvement.",
        lower=0,
        upper=HUGE,
        only=("reduce_lr_patience",),
    )
    when(
        _number,
        "reduce_lr_factor",
        0.1,
        "Times this, down to a thousandth in all.",
        above=0,
        below=1,
        only=("reduce_lr_patience",),
    )
    when(_boolean, "restore_best", False, "End with the weights of the best evaluation: eval and export take them too.")


def _define_what_is_shown() -> None:
    show = group("What is shown and checked")
    modes = ("auto", "bar", "plain", "off")
    show(_enum, "progress", "auto", "Live bar, plain lines, or off: nothing of a run.", enum_values=modes)
    show(_boolean, "debug", False, "Check shapes and labels in each step; full tracebacks.")
    show(
        _integer,
        "check_sync_every_steps",
        0,
        "Compare all replicas' variables, and name one that differs; 0 is never.",
        **_COUNT,
        only=_REPLICAS,
    )
    show(_boolean, "check_numerics", False, "Name the first op that gives inf or nan. Slow.")


_define_what()
_define_where()
_define_how_it_runs()
_define_between_replicas()
_define_servers()
_define_rule()
_define_what_else_an_update_is()
_define_when()
_define_what_is_shown()
mode_flags.define(group("Modes other than training"), _enum)
mode_flags.define_generation(group("Generation", for_all=("mode", "generate")))
benchmark_flags.define()


def own() -> list[str]:
    """Returns the names of flags that a user's script, or a module of theirs, has defined."""
    modules = flags.FLAGS.flags_by_module_dict()
    theirs = [name for name in modules if name.split(".")[0] not in ("absl", "crankshaft", "tensorflow", "keras")]
    return [flag.name for name in theirs for flag in modules[name]]
