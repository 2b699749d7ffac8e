# Made by docs/make_pages.py, for type checkers and editors.
import numpy as np
import tensorflow as tf
from .engine.build import build_embeddings as build_embeddings, build_layers as build_layers, learning_rate as learning_rate, make_optimizer as make_optimizer
from .engine.data.form import Padded as Padded
from .engine.data.run_data import Data as Data
from .engine.data.source import Source as Source, Spec as Spec
from .engine.metrics.means import auc as auc, confusion_matrix as confusion_matrix, mean as mean, root_mean_square as root_mean_square
from .engine.metrics.pairs import Mean as Mean
from .engine.optimizers.averaging import Averaged as Averaged
from .engine.step.batches import weighed as weighed
from .engine.step.context import step_context as step_context
from .engine.step.gathering import gather as gather
from .engine.step.gradients import Update as Update, minimize as minimize
from .engine.step.options import StepOptions as StepOptions
from .engine.trainer import Trainer as Trainer
from .engine.version import __version__ as __version__
from .launch.api import load_model as load_model
from .launch.train import main as main
from .parts.keras_models.keras_metrics import KerasMetric as KerasMetric
from .parts.keras_models.keras_trainer import KerasTrainer as KerasTrainer
from .parts.tables import Embedding as Embedding
from .runner.failures import RunError as RunError, UsageError as UsageError
from .runner.history import HistoryEntries, Means
from .runner.saved.preprocessor import Names
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Generic, Literal
from typing_extensions import TypeVar

_Trainer = TypeVar('_Trainer', bound=Trainer, default=Any)

__all__ = ['Averaged', 'Data', 'Embedding', 'KerasMetric', 'KerasTrainer', 'Mean', 'Padded', 'Run', 'RunError', 'Source', 'Spec', 'StepOptions', 'Trainer', 'Update', 'UsageError', 'auc', 'build_embeddings', 'build_layers', 'confusion_matrix', 'fit', 'gather', 'learning_rate', 'load_model', 'main', 'make_optimizer', 'mean', 'minimize', 'open_run', 'root_mean_square', 'run', 'step_context', 'weighed']

def run(
    trainer_class: type[_Trainer] | None = None,
    *,
    data: Any = None,
    hooks: Sequence[Any] = (),
    may_change: Sequence[str] = (),
    mode: str | PathLike[str] | None = 'train_and_eval',
    run_dir: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    seed: int | np.integer[Any] | None = 0,
    train_steps: int | np.integer[Any] | None = None,
    train_epochs: float | np.floating[Any] | np.integer[Any] | None = None,
    stop_at_step: int | np.integer[Any] | None = None,
    allow_changed_config: bool | Literal[0, 1] | np.bool_ | None = False,
    max_restarts: int | np.integer[Any] | None = 0,
    min_workers: int | np.integer[Any] | None = 0,
    result_json: str | PathLike[str] | None = None,
    tensorboard_dir: str | PathLike[str] | None = None,
    export_dir: str | PathLike[str] | None = None,
    model: str | PathLike[str] | None = None,
    model_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    init_from: str | PathLike[str] | None = None,
    input: str | PathLike[str] | None = None,
    input_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    data_dir: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    eval_data_dir: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    global_batch_size: int | np.integer[Any] | None = 64,
    validation_split: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    eval_batch_size: int | np.integer[Any] | None = 512,
    resident_data_mb: int | np.integer[Any] | None = 1024,
    shuffle_window: int | np.integer[Any] | None = 0,
    bucket_by: str | PathLike[str] | int | np.integer[Any] | None = None,
    max_bad_records: int | np.integer[Any] | None = 0,
    shuffle_buffer: int | np.integer[Any] | None = 10000,
    auto_shard_policy: str | PathLike[str] | None = 'auto',
    strategy: str | PathLike[str] | None = 'one_device',
    num_virtual_devices: int | np.integer[Any] | None = 0,
    mesh: str | PathLike[str] | int | np.integer[Any] | None = None,
    shard_optimizer: bool | Literal[0, 1] | np.bool_ | None = False,
    recompute: bool | Literal[0, 1] | np.bool_ | None = False,
    gpus: str | PathLike[str] | int | np.integer[Any] | None = None,
    steps_per_loop: int | np.integer[Any] | None = 0,
    jit: str | PathLike[str] | None = 'auto',
    communication: str | PathLike[str] | None = 'auto',
    cluster_hosts: str | PathLike[str] | int | np.integer[Any] | None = None,
    task_index: int | np.integer[Any] | None = None,
    bind: str | PathLike[str] | int | np.integer[Any] | None = None,
    num_ps: int | np.integer[Any] | None = 0,
    evaluator: bool | Literal[0, 1] | np.bool_ | None = False,
    cluster_timeout_seconds: float | np.floating[Any] | np.integer[Any] | None = 300.0,
    step_timeout_seconds: float | np.floating[Any] | np.integer[Any] | None = None,
    reduce_dtype: str | PathLike[str] | None = 'float32',
    sync_every_steps: int | np.integer[Any] | None = 1,
    outer_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    max_staleness_steps: int | np.integer[Any] | None = None,
    variable_placement: str | PathLike[str] | int | np.integer[Any] | Sequence[str | PathLike[str] | int | np.integer[Any]] | None = [],
    optimizer: str | PathLike[str] | int | np.integer[Any] | None = 'adam',
    optimizer_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    learning_rate: float | np.floating[Any] | np.integer[Any] | None = 0.001,
    learning_rate_schedule: str | PathLike[str] | None = 'constant',
    learning_rate_schedule_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    warmup_steps: int | np.integer[Any] | None = 0,
    weight_decay: float | np.floating[Any] | np.integer[Any] | None = None,
    freeze: str | PathLike[str] | int | np.integer[Any] | Sequence[str | PathLike[str] | int | np.integer[Any]] | None = [],
    clip_norm: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    ema_decay: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    accumulate_steps: int | np.integer[Any] | None = 1,
    precision: str | PathLike[str] | None = 'float32',
    on_nonfinite: str | PathLike[str] | None = 'raise',
    eval_every_steps: int | np.integer[Any] | None = None,
    eval_batches: int | np.integer[Any] | None = 0,
    checkpoint_every_minutes: float | np.floating[Any] | np.integer[Any] | None = 5.0,
    checkpoint_every_steps: int | np.integer[Any] | None = None,
    summary_every_steps: int | np.integer[Any] | None = 500,
    histogram_every_steps: int | np.integer[Any] | None = 0,
    keep_checkpoints: int | np.integer[Any] | None = 5,
    snapshot_seconds: float | np.floating[Any] | np.integer[Any] | Literal['auto'] | None = 'auto',
    monitor: str | PathLike[str] | int | np.integer[Any] | None = 'eval_loss',
    early_stopping: Mapping[str, Any] | Sequence[str] | str | None = {},
    reduce_lr: Mapping[str, Any] | Sequence[str] | str | None = {},
    restore_best: bool | Literal[0, 1] | np.bool_ | None = False,
    progress: str | PathLike[str] | None = 'auto',
    log_format: str | PathLike[str] | None = 'text',
    debug: bool | Literal[0, 1] | np.bool_ | None = False,
    run_eagerly: bool | Literal[0, 1] | np.bool_ | None = False,
    metrics_port: int | np.integer[Any] | None = None,
    check_sync_every_steps: int | np.integer[Any] | None = 0,
    check_numerics: bool | Literal[0, 1] | np.bool_ | None = False,
    eval_checkpoint: str | PathLike[str] | int | np.integer[Any] | None = 'latest',
    follow: bool | Literal[0, 1] | np.bool_ | None = False,
    output: str | PathLike[str] | None = None,
    export_model: str | PathLike[str] | int | np.integer[Any] | None = None,
    export_since: str | PathLike[str] | None = None,
    predict_split: str | PathLike[str] | int | np.integer[Any] | None = None,
    prompt: str | PathLike[str] | int | np.integer[Any] | None = '',
    sampling: Mapping[str, Any] | Sequence[str] | str | None = {},
    benchmark_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    baseline: str | PathLike[str] | None = None,
) -> Run[_Trainer]:
    """Runs a model with its flags as keywords: `run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1)`.

    Ctrl-C, SIGTERM and SIGHUP stop and save the run first; then Ctrl-C raises KeyboardInterrupt, and the others have
    their usual effect. Threads are left as they are: only a process that belongs to the run (`main`) gives each core of
    a CPU a micro-batch.

    Args:
      trainer_class: as `crankshaft.main` takes it.
      data: as `crankshaft.main` takes it.
      hooks: as `crankshaft.main` takes them.
      may_change: as `crankshaft.main` takes it.
      mode: What to run.
      run_dir: Folder of checkpoints, log and results (also gs://...); an existing run resumes.
      config: YAML or JSON file of flags, also a run's config.json; the command line takes precedence.
      seed: Seed of the run's random numbers; a data function seeds its own.
      train_steps: Training steps (updates). Give one of --train_steps and --train_epochs.
      train_epochs: Passes over the training data; 10 if neither is given.
      stop_at_step: Save and end at this step; schedules keep the full length, and the run can be resumed.
      allow_changed_config: Resume even if the configuration changed.
      max_restarts: Restarts of this task after failures within ten minutes; a scheduler's count too.
      min_workers: With --max_restarts: continue without workers that leave or do not return, while as many are left; 0:
        all are needed.
      result_json: Also write the result to this file, or the error that ended the command.
      tensorboard_dir: Folder of TensorBoard's files, by default run_dir/tensorboard.
      export_dir: Also export the model as training ends: a SavedModel to a folder of its step in this one, or
        FILE.keras.
      model: Bundled model, or a .py file or package.module[:Name] that defines a class Model.
      model_arg: Argument of the model, e.g. hidden_units=2048,2048. Repeatable.
      init_from: Run, checkpoint or Keras file from which to load the weights.
      input: Bundled input, or a .py file or package.module[:name] that defines a function load.
      input_arg: Argument of the input, e.g. examples=10000. Repeatable.
      data_dir: Files of the input: a folder, a glob, or several separated by commas.
      eval_data_dir: Files of the evaluation data, for inputs that read it separately.
      global_batch_size: Global batch size: examples per update, across all replicas.
      validation_split: Fraction of the training data, from its end, to evaluate on.
      eval_batch_size: Examples per evaluation step, across all replicas.
      resident_data_mb: Cache arrays of up to this many MiB on each device.
      shuffle_window: Shuffle chunks of files, then examples within windows of this many chunks; 0: single examples.
      bucket_by: Batch examples of similar length: the unknown dimension and each bucket's longest length, e.g.
        0:100,200,400; a third part (0:100,200:12800) bounds examples times length.
      max_bad_records: Unreadable examples to skip before the run fails.
      shuffle_buffer: Examples in the shuffle buffer of a tf.data.Dataset; 0 keeps the order of any data.
      auto_shard_policy: How workers shard a tf.data.Dataset: by file; by example, reading all (data); by file if
        possible (auto); each worker gives its own part (off).
      strategy: Distribution strategy.
      num_virtual_devices: Split the CPU, or the one GPU, into this many virtual devices.
      mesh: Mesh of replicas: layers of parts.sharding are sharded over M of them.
      shard_optimizer: Shard optimizer state (slots) across replicas (ZeRO, stage 1).
      recompute: Activation checkpointing: recompute the model's blocks in the backward pass.
      gpus: Indices of the GPUs to use, or none; by default all (one_device: the first).
      steps_per_loop: Steps per compiled call; 0 chooses about a quarter of a second of them.
      jit: Compile the training loop with XLA; auto measures both.
      communication: Collectives between hosts: TensorFlow's ring over gRPC, or NCCL (GPUs).
      cluster_hosts: Address of each task: all workers; or a coordinator, workers, --num_ps servers, an evaluator.
      task_index: Index of this process in --cluster_hosts, from 0.
      bind: Address at which Crankshaft's own sockets listen; TensorFlow's servers listen on all.
      num_ps: Parameter servers among the tasks of --cluster_hosts, Slurm or Kubernetes.
      evaluator: With servers: the last task, or that outside of TF_CONFIG's cluster, evaluates checkpoints.
      cluster_timeout_seconds: How long to wait for all workers to connect.
      step_timeout_seconds: End a worker without progress for this long, and name who is stuck; input that returns
        nothing for half as long, too; 0: never. Default: 600, in a debugger 0.
      reduce_dtype: Data type of gradients between replicas, and of values to and from parameter servers.
      sync_every_steps: Synchronize replicas every this many steps (local SGD, DiLoCo).
      outer_arg: Argument of the outer update at a synchronization: learning_rate (1 averages), momentum.
      max_staleness_steps: Bound on staleness: workers run in rounds of at most this plus one steps.
      variable_placement: Place variables whose path matches on that server, e.g. embedding=ps:0. Repeatable.
      optimizer: The update rule: sgd, momentum, adam, adamw, adagrad, rmsprop, ftrl, a class of tf.keras.optimizers, or
        package.module[:Name] with a class Optimizer.
      optimizer_arg: Argument of the optimizer, e.g. beta_1=0.8; of each also clipnorm and clipvalue (clip each
        variable's gradient by its norm, by value) and weight_decay_exclude (regular expression of paths).
      learning_rate: Learning rate, or where its schedule begins.
      learning_rate_schedule: Learning-rate schedule.
      learning_rate_schedule_arg: Argument of the schedule, e.g. decay_rate=0.9. Repeatable.
      warmup_steps: Steps over which the learning rate rises linearly.
      weight_decay: Decoupled weight decay, times the learning rate; default: the optimizer's. Not of biases and
        normalizations' gains (weight_decay_exclude); of tables, only of rows in use.
      freeze: REGEX[:EPOCHS]: freeze weights whose path matches, for the first EPOCHS or always. Repeatable.
      clip_norm: Clip gradients to this global norm; 0: off.
      ema_decay: Decay of the moving average of weights that evaluation uses, at most (1+n)/(10+n) after n updates; 0:
        off. Tables are not averaged.
      accumulate_steps: Gradient accumulation: micro-batches per update.
      precision: Data type that layers compute in (float16: with dynamic loss scaling). Default: Keras's mixed policy,
        if the program has set one.
      on_nonfinite: If a step is not finite: stop the run; or skip its update.
      eval_every_steps: Evaluation; by default each epoch. The end is always evaluated.
      eval_batches: Evaluate only the first N batches during training; 0: all.
      checkpoint_every_minutes: Minutes between checkpoints; 0: off. The end is saved too.
      checkpoint_every_steps: Checkpoint; with an evaluator, or if workers may join, by this alone: 1000.
      summary_every_steps: Scalars in TensorBoard, also after each epoch.
      histogram_every_steps: Histograms of weights and, without parameter servers, gradients.
      keep_checkpoints: Recent checkpoints to keep; 0 keeps all.
      snapshot_seconds: Seconds between snapshots in memory; auto: at most every second, and 0.5 % of the time; 0: none.
      monitor: Metric of the best checkpoint, early stopping and reduce_lr; max:eval_NAME or min:eval_NAME sets a
        direction.
      early_stopping: Stop after patience=N evaluations without an improvement of more than min_delta=0.
      reduce_lr: Multiply the learning rate by factor=0.1 after patience=N evaluations without an improvement of more
        than min_delta=1e-4.
      restore_best: End with the weights of the best evaluation; eval and export use them too.
      progress: A live bar, plain lines, or nothing.
      log_format: json: print progress and evaluations as one JSON object per line, with the keys of the run's log.
      debug: Check shapes and labels in each step, and print full tracebacks.
      run_eagerly: Execute training steps op by op, on one device, so that print and a debugger work in losses and
        layers. Slow.
      metrics_port: Serve Prometheus metrics on this port of loopback or --bind; a host's other tasks on the next ports.
      check_sync_every_steps: Also compare all replicas' variables at this interval; 0: only after the first call and
        before saving.
      check_numerics: Name the first op that returns inf or NaN. Slow.
      eval_checkpoint: Checkpoint to use; all: eval only.
      follow: eval, with eval_checkpoint=all: wait for each checkpoint of a run that trains, until it ends; on the CPU
        by default.
      output: export: folder of the SavedModel, by default run_dir/export, or FILE.keras; predict: FILE.csv, .parquet or
        .npz.
      export_model: export, predict: a Keras model of the trainer, e.g. generator, instead of Trainer.forward.
      export_since: export: folder of an earlier export; tables/NAME.delta.parquet then has what changed since in a
        table with admit_after.
      predict_split: predict: split of the data; by default eval, if the data has one.
      prompt: Text to continue; by default a new document.
      sampling: tokens=200: at most this many; temperature=0.8: higher values make unlikely tokens more frequent, 0
        takes the likeliest; top_k=40: sample from this many of the likeliest, 0 from all.
      benchmark_arg: seconds=3, about, per round, or steps=N; rounds=3; profile=true traces ten steps for TensorBoard;
        fail_below=F exits with 3 if the rate is significantly below this fraction of the baseline's. Repeatable.
      baseline: Earlier result (--result_json) to compare with.

    Raises:
      UsageError: a mistake in the arguments (a ValueError); the message is the line that the command would print.
      RunError: the run failed (a RuntimeError), with such a line too; its cause is the exception that ended it.

    Example:
      >>> run(PlaneTrainer, data=data, train_steps=100, learning_rate=0.1).result["eval"]  # doctest: +SKIP
    """
def open_run(
    trainer_class: type[_Trainer] | None = None,
    *,
    data: Any = None,
    hooks: Sequence[Any] = (),
    may_change: Sequence[str] = (),
    mode: str | PathLike[str] | None = 'train_and_eval',
    run_dir: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    seed: int | np.integer[Any] | None = 0,
    train_steps: int | np.integer[Any] | None = None,
    train_epochs: float | np.floating[Any] | np.integer[Any] | None = None,
    stop_at_step: int | np.integer[Any] | None = None,
    allow_changed_config: bool | Literal[0, 1] | np.bool_ | None = False,
    max_restarts: int | np.integer[Any] | None = 0,
    min_workers: int | np.integer[Any] | None = 0,
    result_json: str | PathLike[str] | None = None,
    tensorboard_dir: str | PathLike[str] | None = None,
    export_dir: str | PathLike[str] | None = None,
    model: str | PathLike[str] | None = None,
    model_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    init_from: str | PathLike[str] | None = None,
    input: str | PathLike[str] | None = None,
    input_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    data_dir: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    eval_data_dir: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    global_batch_size: int | np.integer[Any] | None = 64,
    validation_split: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    eval_batch_size: int | np.integer[Any] | None = 512,
    resident_data_mb: int | np.integer[Any] | None = 1024,
    shuffle_window: int | np.integer[Any] | None = 0,
    bucket_by: str | PathLike[str] | int | np.integer[Any] | None = None,
    max_bad_records: int | np.integer[Any] | None = 0,
    shuffle_buffer: int | np.integer[Any] | None = 10000,
    auto_shard_policy: str | PathLike[str] | None = 'auto',
    strategy: str | PathLike[str] | None = 'one_device',
    num_virtual_devices: int | np.integer[Any] | None = 0,
    mesh: str | PathLike[str] | int | np.integer[Any] | None = None,
    shard_optimizer: bool | Literal[0, 1] | np.bool_ | None = False,
    recompute: bool | Literal[0, 1] | np.bool_ | None = False,
    gpus: str | PathLike[str] | int | np.integer[Any] | None = None,
    steps_per_loop: int | np.integer[Any] | None = 0,
    jit: str | PathLike[str] | None = 'auto',
    communication: str | PathLike[str] | None = 'auto',
    cluster_hosts: str | PathLike[str] | int | np.integer[Any] | None = None,
    task_index: int | np.integer[Any] | None = None,
    bind: str | PathLike[str] | int | np.integer[Any] | None = None,
    num_ps: int | np.integer[Any] | None = 0,
    evaluator: bool | Literal[0, 1] | np.bool_ | None = False,
    cluster_timeout_seconds: float | np.floating[Any] | np.integer[Any] | None = 300.0,
    step_timeout_seconds: float | np.floating[Any] | np.integer[Any] | None = None,
    reduce_dtype: str | PathLike[str] | None = 'float32',
    sync_every_steps: int | np.integer[Any] | None = 1,
    outer_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    max_staleness_steps: int | np.integer[Any] | None = None,
    variable_placement: str | PathLike[str] | int | np.integer[Any] | Sequence[str | PathLike[str] | int | np.integer[Any]] | None = [],
    optimizer: str | PathLike[str] | int | np.integer[Any] | None = 'adam',
    optimizer_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    learning_rate: float | np.floating[Any] | np.integer[Any] | None = 0.001,
    learning_rate_schedule: str | PathLike[str] | None = 'constant',
    learning_rate_schedule_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    warmup_steps: int | np.integer[Any] | None = 0,
    weight_decay: float | np.floating[Any] | np.integer[Any] | None = None,
    freeze: str | PathLike[str] | int | np.integer[Any] | Sequence[str | PathLike[str] | int | np.integer[Any]] | None = [],
    clip_norm: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    ema_decay: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    accumulate_steps: int | np.integer[Any] | None = 1,
    precision: str | PathLike[str] | None = 'float32',
    on_nonfinite: str | PathLike[str] | None = 'raise',
    eval_every_steps: int | np.integer[Any] | None = None,
    eval_batches: int | np.integer[Any] | None = 0,
    checkpoint_every_minutes: float | np.floating[Any] | np.integer[Any] | None = 5.0,
    checkpoint_every_steps: int | np.integer[Any] | None = None,
    summary_every_steps: int | np.integer[Any] | None = 500,
    histogram_every_steps: int | np.integer[Any] | None = 0,
    keep_checkpoints: int | np.integer[Any] | None = 5,
    snapshot_seconds: float | np.floating[Any] | np.integer[Any] | Literal['auto'] | None = 'auto',
    monitor: str | PathLike[str] | int | np.integer[Any] | None = 'eval_loss',
    early_stopping: Mapping[str, Any] | Sequence[str] | str | None = {},
    reduce_lr: Mapping[str, Any] | Sequence[str] | str | None = {},
    restore_best: bool | Literal[0, 1] | np.bool_ | None = False,
    progress: str | PathLike[str] | None = 'auto',
    log_format: str | PathLike[str] | None = 'text',
    debug: bool | Literal[0, 1] | np.bool_ | None = False,
    run_eagerly: bool | Literal[0, 1] | np.bool_ | None = False,
    metrics_port: int | np.integer[Any] | None = None,
    check_sync_every_steps: int | np.integer[Any] | None = 0,
    check_numerics: bool | Literal[0, 1] | np.bool_ | None = False,
    eval_checkpoint: str | PathLike[str] | int | np.integer[Any] | None = 'latest',
    follow: bool | Literal[0, 1] | np.bool_ | None = False,
    output: str | PathLike[str] | None = None,
    export_model: str | PathLike[str] | int | np.integer[Any] | None = None,
    export_since: str | PathLike[str] | None = None,
    predict_split: str | PathLike[str] | int | np.integer[Any] | None = None,
    prompt: str | PathLike[str] | int | np.integer[Any] | None = '',
    sampling: Mapping[str, Any] | Sequence[str] | str | None = {},
    benchmark_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    baseline: str | PathLike[str] | None = None,
) -> Run[_Trainer]:
    """Opens a run for a program that has its own loop: it is assembled once, and can train many times.

    With a run_dir it resumes from the latest checkpoint, if any. It has no end unless `train_steps` or
    `train_epochs` sets one. When the context ends, also by your own exception or by Ctrl-C, the run is saved and
    closed. A signal ends a call of `train` at a step, and then has its usual effect;
    SIGTERM and SIGHUP save and close the run before, between two calls too. A run that is left open is saved and
    closed once the program holds it no more, as its folder is opened again or as the program ends; one of several
    processes is then not saved.

    With mode="eval" it only reads the run of run_dir, also beside the process that trains it: it has the weights of
    `eval_checkpoint`, and later those of `restore`; it evaluates and predicts, and writes nothing.

    Args:
      trainer_class: as `crankshaft.main` takes it.
      data: as `crankshaft.main` takes it: the training data, and the form of all data passed later.
      hooks: as `crankshaft.main` takes them.
      may_change: as `crankshaft.main` takes it.
      mode: What to run.
      run_dir: Folder of checkpoints, log and results (also gs://...); an existing run resumes.
      config: YAML or JSON file of flags, also a run's config.json; the command line takes precedence.
      seed: Seed of the run's random numbers; a data function seeds its own.
      train_steps: Training steps (updates). Give one of --train_steps and --train_epochs.
      train_epochs: Passes over the training data; 10 if neither is given.
      stop_at_step: Save and end at this step; schedules keep the full length, and the run can be resumed.
      allow_changed_config: Resume even if the configuration changed.
      max_restarts: Restarts of this task after failures within ten minutes; a scheduler's count too.
      min_workers: With --max_restarts: continue without workers that leave or do not return, while as many are left; 0:
        all are needed.
      result_json: Also write the result to this file, or the error that ended the command.
      tensorboard_dir: Folder of TensorBoard's files, by default run_dir/tensorboard.
      export_dir: Also export the model as training ends: a SavedModel to a folder of its step in this one, or
        FILE.keras.
      model: Bundled model, or a .py file or package.module[:Name] that defines a class Model.
      model_arg: Argument of the model, e.g. hidden_units=2048,2048. Repeatable.
      init_from: Run, checkpoint or Keras file from which to load the weights.
      input: Bundled input, or a .py file or package.module[:name] that defines a function load.
      input_arg: Argument of the input, e.g. examples=10000. Repeatable.
      data_dir: Files of the input: a folder, a glob, or several separated by commas.
      eval_data_dir: Files of the evaluation data, for inputs that read it separately.
      global_batch_size: Global batch size: examples per update, across all replicas.
      validation_split: Fraction of the training data, from its end, to evaluate on.
      eval_batch_size: Examples per evaluation step, across all replicas.
      resident_data_mb: Cache arrays of up to this many MiB on each device.
      shuffle_window: Shuffle chunks of files, then examples within windows of this many chunks; 0: single examples.
      bucket_by: Batch examples of similar length: the unknown dimension and each bucket's longest length, e.g.
        0:100,200,400; a third part (0:100,200:12800) bounds examples times length.
      max_bad_records: Unreadable examples to skip before the run fails.
      shuffle_buffer: Examples in the shuffle buffer of a tf.data.Dataset; 0 keeps the order of any data.
      auto_shard_policy: How workers shard a tf.data.Dataset: by file; by example, reading all (data); by file if
        possible (auto); each worker gives its own part (off).
      strategy: Distribution strategy.
      num_virtual_devices: Split the CPU, or the one GPU, into this many virtual devices.
      mesh: Mesh of replicas: layers of parts.sharding are sharded over M of them.
      shard_optimizer: Shard optimizer state (slots) across replicas (ZeRO, stage 1).
      recompute: Activation checkpointing: recompute the model's blocks in the backward pass.
      gpus: Indices of the GPUs to use, or none; by default all (one_device: the first).
      steps_per_loop: Steps per compiled call; 0 chooses about a quarter of a second of them.
      jit: Compile the training loop with XLA; auto measures both.
      communication: Collectives between hosts: TensorFlow's ring over gRPC, or NCCL (GPUs).
      cluster_hosts: Address of each task: all workers; or a coordinator, workers, --num_ps servers, an evaluator.
      task_index: Index of this process in --cluster_hosts, from 0.
      bind: Address at which Crankshaft's own sockets listen; TensorFlow's servers listen on all.
      num_ps: Parameter servers among the tasks of --cluster_hosts, Slurm or Kubernetes.
      evaluator: With servers: the last task, or that outside of TF_CONFIG's cluster, evaluates checkpoints.
      cluster_timeout_seconds: How long to wait for all workers to connect.
      step_timeout_seconds: End a worker without progress for this long, and name who is stuck; input that returns
        nothing for half as long, too; 0: never. Default: 600, in a debugger 0.
      reduce_dtype: Data type of gradients between replicas, and of values to and from parameter servers.
      sync_every_steps: Synchronize replicas every this many steps (local SGD, DiLoCo).
      outer_arg: Argument of the outer update at a synchronization: learning_rate (1 averages), momentum.
      max_staleness_steps: Bound on staleness: workers run in rounds of at most this plus one steps.
      variable_placement: Place variables whose path matches on that server, e.g. embedding=ps:0. Repeatable.
      optimizer: The update rule: sgd, momentum, adam, adamw, adagrad, rmsprop, ftrl, a class of tf.keras.optimizers, or
        package.module[:Name] with a class Optimizer.
      optimizer_arg: Argument of the optimizer, e.g. beta_1=0.8; of each also clipnorm and clipvalue (clip each
        variable's gradient by its norm, by value) and weight_decay_exclude (regular expression of paths).
      learning_rate: Learning rate, or where its schedule begins.
      learning_rate_schedule: Learning-rate schedule.
      learning_rate_schedule_arg: Argument of the schedule, e.g. decay_rate=0.9. Repeatable.
      warmup_steps: Steps over which the learning rate rises linearly.
      weight_decay: Decoupled weight decay, times the learning rate; default: the optimizer's. Not of biases and
        normalizations' gains (weight_decay_exclude); of tables, only of rows in use.
      freeze: REGEX[:EPOCHS]: freeze weights whose path matches, for the first EPOCHS or always. Repeatable.
      clip_norm: Clip gradients to this global norm; 0: off.
      ema_decay: Decay of the moving average of weights that evaluation uses, at most (1+n)/(10+n) after n updates; 0:
        off. Tables are not averaged.
      accumulate_steps: Gradient accumulation: micro-batches per update.
      precision: Data type that layers compute in (float16: with dynamic loss scaling). Default: Keras's mixed policy,
        if the program has set one.
      on_nonfinite: If a step is not finite: stop the run; or skip its update.
      eval_every_steps: Evaluation; by default each epoch. The end is always evaluated.
      eval_batches: Evaluate only the first N batches during training; 0: all.
      checkpoint_every_minutes: Minutes between checkpoints; 0: off. The end is saved too.
      checkpoint_every_steps: Checkpoint; with an evaluator, or if workers may join, by this alone: 1000.
      summary_every_steps: Scalars in TensorBoard, also after each epoch.
      histogram_every_steps: Histograms of weights and, without parameter servers, gradients.
      keep_checkpoints: Recent checkpoints to keep; 0 keeps all.
      snapshot_seconds: Seconds between snapshots in memory; auto: at most every second, and 0.5 % of the time; 0: none.
      monitor: Metric of the best checkpoint, early stopping and reduce_lr; max:eval_NAME or min:eval_NAME sets a
        direction.
      early_stopping: Stop after patience=N evaluations without an improvement of more than min_delta=0.
      reduce_lr: Multiply the learning rate by factor=0.1 after patience=N evaluations without an improvement of more
        than min_delta=1e-4.
      restore_best: End with the weights of the best evaluation; eval and export use them too.
      progress: A live bar, plain lines, or nothing.
      log_format: json: print progress and evaluations as one JSON object per line, with the keys of the run's log.
      debug: Check shapes and labels in each step, and print full tracebacks.
      run_eagerly: Execute training steps op by op, on one device, so that print and a debugger work in losses and
        layers. Slow.
      metrics_port: Serve Prometheus metrics on this port of loopback or --bind; a host's other tasks on the next ports.
      check_sync_every_steps: Also compare all replicas' variables at this interval; 0: only after the first call and
        before saving.
      check_numerics: Name the first op that returns inf or NaN. Slow.
      eval_checkpoint: Checkpoint to use; all: eval only.
      follow: eval, with eval_checkpoint=all: wait for each checkpoint of a run that trains, until it ends; on the CPU
        by default.
      output: export: folder of the SavedModel, by default run_dir/export, or FILE.keras; predict: FILE.csv, .parquet or
        .npz.
      export_model: export, predict: a Keras model of the trainer, e.g. generator, instead of Trainer.forward.
      export_since: export: folder of an earlier export; tables/NAME.delta.parquet then has what changed since in a
        table with admit_after.
      predict_split: predict: split of the data; by default eval, if the data has one.
      prompt: Text to continue; by default a new document.
      sampling: tokens=200: at most this many; temperature=0.8: higher values make unlikely tokens more frequent, 0
        takes the likeliest; top_k=40: sample from this many of the likeliest, 0 from all.
      benchmark_arg: seconds=3, about, per round, or steps=N; rounds=3; profile=true traces ten steps for TensorBoard;
        fail_below=F exits with 3 if the rate is significantly below this fraction of the baseline's. Repeatable.
      baseline: Earlier result (--result_json) to compare with.

    Raises:
      UsageError: a mistake in the arguments.
      RunError: the run could not be assembled.

    Example:
      >>> with open_run(PlaneTrainer, data=data, learning_rate=0.1) as run:  # doctest: +SKIP
      ...     for _ in range(10):
      ...         print(run.step, run.train(steps=10)["loss"])
    """
def fit(
    model: tf.keras.Model | Callable[..., tf.keras.Model],
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = 'auto',
    callbacks: Sequence[Any] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    hooks: Sequence[Any] = (),
    mode: str | PathLike[str] | None = 'train_and_eval',
    run_dir: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    seed: int | np.integer[Any] | None = 0,
    stop_at_step: int | np.integer[Any] | None = None,
    allow_changed_config: bool | Literal[0, 1] | np.bool_ | None = False,
    max_restarts: int | np.integer[Any] | None = 0,
    min_workers: int | np.integer[Any] | None = 0,
    result_json: str | PathLike[str] | None = None,
    tensorboard_dir: str | PathLike[str] | None = None,
    export_dir: str | PathLike[str] | None = None,
    model_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    init_from: str | PathLike[str] | None = None,
    input_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    data_dir: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    eval_data_dir: str | PathLike[str] | Sequence[str | PathLike[str]] | None = None,
    resident_data_mb: int | np.integer[Any] | None = 1024,
    shuffle_window: int | np.integer[Any] | None = 0,
    bucket_by: str | PathLike[str] | int | np.integer[Any] | None = None,
    max_bad_records: int | np.integer[Any] | None = 0,
    shuffle_buffer: int | np.integer[Any] | None = 10000,
    auto_shard_policy: str | PathLike[str] | None = 'auto',
    strategy: str | PathLike[str] | None = 'one_device',
    num_virtual_devices: int | np.integer[Any] | None = 0,
    mesh: str | PathLike[str] | int | np.integer[Any] | None = None,
    shard_optimizer: bool | Literal[0, 1] | np.bool_ | None = False,
    recompute: bool | Literal[0, 1] | np.bool_ | None = False,
    gpus: str | PathLike[str] | int | np.integer[Any] | None = None,
    steps_per_loop: int | np.integer[Any] | None = 0,
    jit: str | PathLike[str] | None = 'auto',
    communication: str | PathLike[str] | None = 'auto',
    cluster_hosts: str | PathLike[str] | int | np.integer[Any] | None = None,
    task_index: int | np.integer[Any] | None = None,
    bind: str | PathLike[str] | int | np.integer[Any] | None = None,
    num_ps: int | np.integer[Any] | None = 0,
    evaluator: bool | Literal[0, 1] | np.bool_ | None = False,
    cluster_timeout_seconds: float | np.floating[Any] | np.integer[Any] | None = 300.0,
    step_timeout_seconds: float | np.floating[Any] | np.integer[Any] | None = None,
    reduce_dtype: str | PathLike[str] | None = 'float32',
    sync_every_steps: int | np.integer[Any] | None = 1,
    outer_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    max_staleness_steps: int | np.integer[Any] | None = None,
    variable_placement: str | PathLike[str] | int | np.integer[Any] | Sequence[str | PathLike[str] | int | np.integer[Any]] | None = [],
    optimizer: str | PathLike[str] | int | np.integer[Any] | None = 'adam',
    optimizer_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    learning_rate: float | np.floating[Any] | np.integer[Any] | None = 0.001,
    learning_rate_schedule: str | PathLike[str] | None = 'constant',
    learning_rate_schedule_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    warmup_steps: int | np.integer[Any] | None = 0,
    weight_decay: float | np.floating[Any] | np.integer[Any] | None = None,
    freeze: str | PathLike[str] | int | np.integer[Any] | Sequence[str | PathLike[str] | int | np.integer[Any]] | None = [],
    clip_norm: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    ema_decay: float | np.floating[Any] | np.integer[Any] | None = 0.0,
    accumulate_steps: int | np.integer[Any] | None = 1,
    precision: str | PathLike[str] | None = 'float32',
    on_nonfinite: str | PathLike[str] | None = 'raise',
    eval_batches: int | np.integer[Any] | None = 0,
    checkpoint_every_minutes: float | np.floating[Any] | np.integer[Any] | None = 5.0,
    checkpoint_every_steps: int | np.integer[Any] | None = None,
    summary_every_steps: int | np.integer[Any] | None = 500,
    histogram_every_steps: int | np.integer[Any] | None = 0,
    keep_checkpoints: int | np.integer[Any] | None = 5,
    snapshot_seconds: float | np.floating[Any] | np.integer[Any] | Literal['auto'] | None = 'auto',
    monitor: str | PathLike[str] | int | np.integer[Any] | None = 'eval_loss',
    early_stopping: Mapping[str, Any] | Sequence[str] | str | None = {},
    reduce_lr: Mapping[str, Any] | Sequence[str] | str | None = {},
    restore_best: bool | Literal[0, 1] | np.bool_ | None = False,
    log_format: str | PathLike[str] | None = 'text',
    debug: bool | Literal[0, 1] | np.bool_ | None = False,
    run_eagerly: bool | Literal[0, 1] | np.bool_ | None = False,
    metrics_port: int | np.integer[Any] | None = None,
    check_sync_every_steps: int | np.integer[Any] | None = 0,
    check_numerics: bool | Literal[0, 1] | np.bool_ | None = False,
    eval_checkpoint: str | PathLike[str] | int | np.integer[Any] | None = 'latest',
    follow: bool | Literal[0, 1] | np.bool_ | None = False,
    output: str | PathLike[str] | None = None,
    export_model: str | PathLike[str] | int | np.integer[Any] | None = None,
    export_since: str | PathLike[str] | None = None,
    predict_split: str | PathLike[str] | int | np.integer[Any] | None = None,
    prompt: str | PathLike[str] | int | np.integer[Any] | None = '',
    sampling: Mapping[str, Any] | Sequence[str] | str | None = {},
    benchmark_arg: Mapping[str, Any] | Sequence[str] | str | None = {},
    baseline: str | PathLike[str] | None = None,
) -> Run:
    """Trains a compiled Keras model with the names and defaults of its own `fit`, and returns the run.

    One device, or the MirroredStrategy in whose scope the model was made, trains the model itself, else a copy. It then
    has the trained weights and its optimizer its state, so a second call continues from there. The run's
    `history.history` is Keras's. A mistake is a `UsageError`. Exceptions of callbacks, hooks and data are unchanged.

    Args:
      model: a compiled model; or a function that makes it, for strategies of several processes, which must exist first.
      x: array, dictionary or list of arrays, data frame, `tf.data.Dataset`, `PyDataset` or generator of batches,
        `Source`, an input's name, or a function without arguments that returns x or (x, y). A dataset and a
        generator keep their order.
      y: labels, in the structure of the model's outputs; None if x comes with them.
      batch_size: global batch size; None is that of batches in x, or else the examples over `steps_per_epoch`, or 32.
      epochs: the epoch at which the run ends, counted from 0.
      verbose: 0 is silent, 1 and "auto" a bar on a terminal, 2 lines.
      callbacks: Keras's. The folder of a `BackupAndRestore` is the run's run_dir, unless `run_dir` is passed.
      validation_split: fraction of the examples, the last ones, for evaluation.
      validation_data: (x, y), (x, y, weights), or any form of x.
      shuffle: whether each epoch has its own order.
      class_weight: weights by class; other classes weigh 1.
      sample_weight: one number per example; or an array [examples, steps] for the steps of sequences; or one of either
        per output, in a list or dictionary like the outputs, in which None or a missing name is 1.
      initial_epoch: the number of the first epoch.
      steps_per_epoch: steps from one `on_epoch_end` to the next, fewer where the data ends; None is all of the data.
      validation_steps: batches per evaluation; None is all.
      validation_batch_size: batch size of evaluations of data that does not come in batches; None is `batch_size`.
      validation_freq: epochs from one evaluation to the next, or a list of the epochs after which to evaluate, from 1.
      hooks: `engine.hooks`, in addition to the callbacks.
      mode: What to run.
      run_dir: Folder of checkpoints, log and results (also gs://...); an existing run resumes.
      config: YAML or JSON file of flags, also a run's config.json; the command line takes precedence.
      seed: Seed of the run's random numbers; a data function seeds its own.
      stop_at_step: Save and end at this step; schedules keep the full length, and the run can be resumed.
      allow_changed_config: Resume even if the configuration changed.
      max_restarts: Restarts of this task after failures within ten minutes; a scheduler's count too.
      min_workers: With --max_restarts: continue without workers that leave or do not return, while as many are left; 0:
        all are needed.
      result_json: Also write the result to this file, or the error that ended the command.
      tensorboard_dir: Folder of TensorBoard's files, by default run_dir/tensorboard.
      export_dir: Also export the model as training ends: a SavedModel to a folder of its step in this one, or
        FILE.keras.
      model_arg: Argument of the model, e.g. hidden_units=2048,2048. Repeatable.
      init_from: Run, checkpoint or Keras file from which to load the weights.
      input_arg: Argument of the input, e.g. examples=10000. Repeatable.
      data_dir: Files of the input: a folder, a glob, or several separated by commas.
      eval_data_dir: Files of the evaluation data, for inputs that read it separately.
      resident_data_mb: Cache arrays of up to this many MiB on each device.
      shuffle_window: Shuffle chunks of files, then examples within windows of this many chunks; 0: single examples.
      bucket_by: Batch examples of similar length: the unknown dimension and each bucket's longest length, e.g.
        0:100,200,400; a third part (0:100,200:12800) bounds examples times length.
      max_bad_records: Unreadable examples to skip before the run fails.
      shuffle_buffer: Examples in the shuffle buffer of a tf.data.Dataset; 0 keeps the order of any data.
      auto_shard_policy: How workers shard a tf.data.Dataset: by file; by example, reading all (data); by file if
        possible (auto); each worker gives its own part (off).
      strategy: Distribution strategy.
      num_virtual_devices: Split the CPU, or the one GPU, into this many virtual devices.
      mesh: Mesh of replicas: layers of parts.sharding are sharded over M of them.
      shard_optimizer: Shard optimizer state (slots) across replicas (ZeRO, stage 1).
      recompute: Activation checkpointing: recompute the model's blocks in the backward pass.
      gpus: Indices of the GPUs to use, or none; by default all (one_device: the first).
      steps_per_loop: Steps per compiled call; 0 chooses about a quarter of a second of them.
      jit: Compile the training loop with XLA; auto measures both.
      communication: Collectives between hosts: TensorFlow's ring over gRPC, or NCCL (GPUs).
      cluster_hosts: Address of each task: all workers; or a coordinator, workers, --num_ps servers, an evaluator.
      task_index: Index of this process in --cluster_hosts, from 0.
      bind: Address at which Crankshaft's own sockets listen; TensorFlow's servers listen on all.
      num_ps: Parameter servers among the tasks of --cluster_hosts, Slurm or Kubernetes.
      evaluator: With servers: the last task, or that outside of TF_CONFIG's cluster, evaluates checkpoints.
      cluster_timeout_seconds: How long to wait for all workers to connect.
      step_timeout_seconds: End a worker without progress for this long, and name who is stuck; input that returns
        nothing for half as long, too; 0: never. Default: 600, in a debugger 0.
      reduce_dtype: Data type of gradients between replicas, and of values to and from parameter servers.
      sync_every_steps: Synchronize replicas every this many steps (local SGD, DiLoCo).
      outer_arg: Argument of the outer update at a synchronization: learning_rate (1 averages), momentum.
      max_staleness_steps: Bound on staleness: workers run in rounds of at most this plus one steps.
      variable_placement: Place variables whose path matches on that server, e.g. embedding=ps:0. Repeatable.
      optimizer: The update rule: sgd, momentum, adam, adamw, adagrad, rmsprop, ftrl, a class of tf.keras.optimizers, or
        package.module[:Name] with a class Optimizer.
      optimizer_arg: Argument of the optimizer, e.g. beta_1=0.8; of each also clipnorm and clipvalue (clip each
        variable's gradient by its norm, by value) and weight_decay_exclude (regular expression of paths).
      learning_rate: Learning rate, or where its schedule begins.
      learning_rate_schedule: Learning-rate schedule.
      learning_rate_schedule_arg: Argument of the schedule, e.g. decay_rate=0.9. Repeatable.
      warmup_steps: Steps over which the learning rate rises linearly.
      weight_decay: Decoupled weight decay, times the learning rate; default: the optimizer's. Not of biases and
        normalizations' gains (weight_decay_exclude); of tables, only of rows in use.
      freeze: REGEX[:EPOCHS]: freeze weights whose path matches, for the first EPOCHS or always. Repeatable.
      clip_norm: Clip gradients to this global norm; 0: off.
      ema_decay: Decay of the moving average of weights that evaluation uses, at most (1+n)/(10+n) after n updates; 0:
        off. Tables are not averaged.
      accumulate_steps: Gradient accumulation: micro-batches per update.
      precision: Data type that layers compute in (float16: with dynamic loss scaling). Default: Keras's mixed policy,
        if the program has set one.
      on_nonfinite: If a step is not finite: stop the run; or skip its update.
      eval_batches: Evaluate only the first N batches during training; 0: all.
      checkpoint_every_minutes: Minutes between checkpoints; 0: off. The end is saved too.
      checkpoint_every_steps: Checkpoint; with an evaluator, or if workers may join, by this alone: 1000.
      summary_every_steps: Scalars in TensorBoard, also after each epoch.
      histogram_every_steps: Histograms of weights and, without parameter servers, gradients.
      keep_checkpoints: Recent checkpoints to keep; 0 keeps all.
      snapshot_seconds: Seconds between snapshots in memory; auto: at most every second, and 0.5 % of the time; 0: none.
      monitor: Metric of the best checkpoint, early stopping and reduce_lr; max:eval_NAME or min:eval_NAME sets a
        direction.
      early_stopping: Stop after patience=N evaluations without an improvement of more than min_delta=0.
      reduce_lr: Multiply the learning rate by factor=0.1 after patience=N evaluations without an improvement of more
        than min_delta=1e-4.
      restore_best: End with the weights of the best evaluation; eval and export use them too.
      log_format: json: print progress and evaluations as one JSON object per line, with the keys of the run's log.
      debug: Check shapes and labels in each step, and print full tracebacks.
      run_eagerly: Execute training steps op by op, on one device, so that print and a debugger work in losses and
        layers. Slow.
      metrics_port: Serve Prometheus metrics on this port of loopback or --bind; a host's other tasks on the next ports.
      check_sync_every_steps: Also compare all replicas' variables at this interval; 0: only after the first call and
        before saving.
      check_numerics: Name the first op that returns inf or NaN. Slow.
      eval_checkpoint: Checkpoint to use; all: eval only.
      follow: eval, with eval_checkpoint=all: wait for each checkpoint of a run that trains, until it ends; on the CPU
        by default.
      output: export: folder of the SavedModel, by default run_dir/export, or FILE.keras; predict: FILE.csv, .parquet or
        .npz.
      export_model: export, predict: a Keras model of the trainer, e.g. generator, instead of Trainer.forward.
      export_since: export: folder of an earlier export; tables/NAME.delta.parquet then has what changed since in a
        table with admit_after.
      predict_split: predict: split of the data; by default eval, if the data has one.
      prompt: Text to continue; by default a new document.
      sampling: tokens=200: at most this many; temperature=0.8: higher values make unlikely tokens more frequent, 0
        takes the likeliest; top_k=40: sample from this many of the likeliest, 0 from all.
      benchmark_arg: seconds=3, about, per round, or steps=N; rounds=3; profile=true traces ten steps for TensorBoard;
        fail_below=F exits with 3 if the rate is significantly below this fraction of the baseline's. Repeatable.
      baseline: Earlier result (--result_json) to compare with.

    Example:
      >>> model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> run = fit(model, tf.ones([8, 1]), tf.ones([8, 1]), epochs=3, verbose=0, jit="off")
      >>> len(run.history.history["loss"])
      3
    """
class Run(Generic[_Trainer]):
    """A run: the result of `crankshaft.run`, or an open run of `open_run`.

    Attributes:
      run_dir: the folder of its files; None without one.
      is_open: whether it is open.
    """
    @property
    def names(self) -> Names:
        """Names of the model's numbers: `classes`, by label number, and `ids(features)`, which looks up text."""
    @property
    def trainer(self) -> _Trainer:
        """The trainer, on which the run works."""
    @property
    def step(self) -> int:
        """Updates done."""
    @property
    def stop(self) -> str | None:
        """Why the run has stopped training: its end, or a hook's reason; None while it trains."""
    run_dir: str | None
    is_open: bool
    def __enter__(self) -> Run[_Trainer]:
        ...
    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        ...
    def close(self) -> None:
        """Ends the run: saves it, writes its result, and frees what it holds. A run that is closed stays so.

        Raises:
          RunError: the run can't be saved: its weights are not finite, or a call was interrupted in the middle.
        """
    def train(self, steps: int | None = None, epochs: float | None = None, data: Any = None) -> Means:
        """Trains the given number of steps or epochs, from where the run is.

        With neither, it trains to the end of a run that has one. It ends earlier where the run does, or a hook stops
        it: `stop` then has the reason, and further calls raise. On a GPU it returns before all is done.

        Args:
          steps: number of updates.
          epochs: passes over the data; a part of one is rounded up to whole steps.
          data: what to train on instead of the run's own data: of its form, and of any length, which costs no
            compilation. Arrays and sources are shuffled (not with `shuffle_buffer=0`), streams read in their order:
            with `steps`, the same dataset continues where the last call left it, and is read no further. Batches are of
            `global_batch_size` examples, or of all if they are fewer. These steps count as the run's, and its own data
            continues with the batch of the step that they lead to.

        Returns:
          The means of the metrics over these steps, by name; read where they are looked at.

        Raises:
          UsageError: the run is closed or has stopped, the length is not one, or data is of another form.
          RunError: training failed. After an error outside the compiled steps, in a hook or in the data, the run can
            continue from its step; after one within them, `restore` takes it back to a checkpoint.
        """
    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint of the current state, and waits until it is on the disk.

        Args:
          extra: sets `extra`, which each checkpoint from now on has with it.

        Raises:
          UsageError: the run is closed or has no run_dir, or `extra` is not a dictionary of plain JSON.
        """
    def restore(self, which: str | int) -> None:
        """Takes the run back to a checkpoint: weights, optimizer, step, position in the data, hooks and `extra`.

        Keras callbacks get their state of that step, with `stop_training`, best weights and the history; lines that a
        CSVLogger has written since are cut. Those without a state are named, once.

        Args:
          which: "best", by --monitor, "latest", or the step of a checkpoint that is kept.

        Raises:
          UsageError: the run is closed, or the checkpoint does not exist.
        """
    def reset_patience(self) -> None:
        """Makes early stopping and `reduce_lr` begin again: the next evaluation is the first that they see.

        A run that early stopping has stopped continues, on other data for example: `train` trains again.

        Raises:
          UsageError: the run is closed.
        """
    @property
    def extra(self) -> dict[str, Any]:
        """The program's own values in each checkpoint, plain JSON by name; a resumed run restores them."""
    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        ...
    @property
    def result(self) -> dict[str, Any]:
        """As `result.json` has it, plain JSON: step, train, eval, steps_per_sec, stop and more; {} of an open run."""
    @property
    def code(self) -> int:
        """The exit code of a process that has done nothing but the run."""
    @property
    def history(self) -> HistoryEntries:
        """The entries so far, one for each window of training metrics or evaluation."""
    def page(self) -> Any:
        """Returns the page of `crankshaft monitor` as it is now, which a notebook shows below its cell.

        Raises:
          UsageError: the run has no run_dir, whose log the page shows.
        """
    @property
    def models(self) -> dict[str, tf.keras.Model]:
        """The Keras models among the trainer's attributes, by name, with their current weights.

        If weights are sharded over a mesh, copies on this process's device.
        """
    @property
    def model(self) -> Any:
        """The trained Keras model, with the last weights; with their moving average, if there is one.

        After training on one device it is the model that is trained; on replicas or servers, and with an average, one
        copy on this process's device, which has the run's weights after each call. Weights that you set are the run's.

        It computes `Trainer.forward`; `models` has the Keras models alone.
        """
    def set_weights(self, values: Sequence[Any] | Mapping[str, Any], name: str | None = None) -> None:
        """Sets weights, on all replicas, shards and servers, and their moving averages; the optimizer keeps its state.

        The next checkpoint has them. Each process of a run makes the call, with the same values. An `Averaged`
        model keeps its own weights, which are set by its name.

        Args:
          values: a list of arrays in the order of `run.model.get_weights()`; or some weights by name: a variable's
            `path` (`run.model.weights[0].path`), or an embedding table's name, whose array is [rows, width].
          name: name of the model, among `models`, that a list of values is for.

        Raises:
          UsageError: the run is closed, or an array's name, shape or type is not the model's; nothing is changed.

        Example:
          >>> run.set_weights([0.5 * array for array in run.model.get_weights()])  # doctest: +SKIP
        """
    def best_model(self) -> Any:
        """Returns a Keras model, as `model`, with the weights of the best evaluation by --monitor.

        Raises:
          UsageError: none was kept.
        """
    def predict(self, data: Any = None, name: str | None = None, *, split: str | None = None, columns: bool = False) -> Any:
        """Computes the outputs of `Trainer.forward`, as NumPy arrays in the examples' order, 16-bit ones as float32.

        Examples are computed `eval_batch_size` at a time, across all replicas, with the weights that evaluations use;
        each process of a run makes the call, and has all outputs. What samples in predictions too, such as dropout
        with `training=True`, draws other samples at each call.

        Args:
          data: features in the form of the run's: an array, a dictionary or a tuple of arrays, whose first axis is
            examples; what was text before it was looked up for training may be text or ids. Or a `Source`, a `Stream`,
            a `tf.data.Dataset` or a `PyDataset`, with labels or without; or the name of an input, such as "digits".
            None is the run's own data.
          name: name of a model among `models`, which then takes the features instead of `Trainer.forward`.
          split: "eval" ("eval/NAME" of several evaluation sets) or "train", of the run's own data or a named input's;
            None is "eval", if there is one.
          columns: whether to return arrays by name, as `--mode=predict` writes them: "class", "class_name",
            "probability" and so on, and "id" where the data names its examples.

        Raises:
          UsageError: the model does not take such features, or the split or model does not exist.

        Example:
          >>> run.predict(split="eval").argmax(-1)  # doctest: +SKIP
        """
    def generate(self, prompt: str | Sequence[int] = '', *, tokens: int = 200, temperature: float = 0.8, top_k: int = 40, seed: int | None = None) -> str | list[int]:
        """Generates text after a prompt, up to a document's end, with the weights that evaluations use.

        Args:
          prompt: text, of a run on text, which the model reads as a document's beginning; then text is returned. Or
            tokens, one or more, which are used unchanged; the result is then tokens too.
          tokens: largest number of tokens to generate.
          temperature: 0 always takes the likeliest.
          top_k: number of the likeliest tokens to sample from; 0 is all.
          seed: seed of the samples; None is the run's.

        Raises:
          UsageError: the model predicts no next token (`engine.generation.Generates`), the prompt is empty, or an
            argument is out of range.
        """
    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Computes the metrics' means, with the weights that evaluations use, each example once.

        Args:
          data: a split of the form of the run's, of any length: arrays, a source or a stream; None is the run's own
            evaluation data.

        Raises:
          UsageError: data is of another form, or the run has none to evaluate on.
        """
