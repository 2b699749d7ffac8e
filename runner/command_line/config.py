"""A run's configuration: the flags' values, and what they say of the run."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...engine import logging
from ...engine.checkpoints import manifest as manifests
from ...engine.checkpoints.run_dir import NAMES, RunDir
from ...engine.data.run_data import Data
from ...engine.machine.files import read_json
from ...engine.metrics.monitored import Monitored
from ...input import data_json
from ..failures import UsageError
from ..host.remote import RemoteFolder
from . import parsing, registry, saved_config, user_files
from .flags import ARGUMENTS, DECIDING, FLAG_INFO, GROUPS, Flags, flags_with
from .rules import parse_freeze
from .values import differences, plain, shown

if TYPE_CHECKING:
    from ..host.tasks import Cluster

KERAS_FILES = (".keras", ".weights.h5")  # files of weights that --init_from takes beside checkpoints

PERIODS = flags_with(lambda flag: flag.is_period)
READING = ("eval", "export", "predict", "generate")  # modes that read a run, and change nothing of it
WITHOUT_DATA = ("export", "generate")  # those of them that read the run's description of its data instead of data
_UPDATE_ARGUMENTS = ("optimizer_arg", "learning_rate_schedule_arg")
_CHECKPOINT_STEPS = 1000
# Schedules that end at the run's end, so that its length decides numbers too.
SCHEDULES_TO_THE_END = ("cosine", "polynomial", "exponential")


@dataclasses.dataclass(kw_only=True, eq=False)
class Config(Flags):
    """A command line with its flags' values complete; the model and input that it names are imported on first use.

    `checks.check` checks it once it is made. It changes once more: `checks.apply_data_flags`, when the data is loaded.

    Attributes:
      program_trainer: the Trainer that a program brings; None where --model names one.
      cluster: tasks of a strategy that has workers, and which of them this process is; None without.
      script_flags: the values of the script's own flags that decide a run's numbers, by name.
      owns_process: whether the process exists for this run alone, so that the run may set its threads.
      remote: remote folder that --run_dir names, if it is on another file system; `run_dir` is its copy here.
      is_endless: whether only the run's caller knows its length.
      from_run: names of the flags that have the values of the run that is read.
      set_by_data: names of the flags that the data sets once it is loaded (`Data.flags`); empty afterwards.
      to_trainer: makes a Trainer of the compiled Keras model that --model=FILE may have; see `launch.program`.
    """

    program_trainer: type | None = None
    cluster: Cluster | None = None
    script_flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    owns_process: bool = True
    remote: RemoteFolder | None = None
    is_endless: bool = False
    from_run: frozenset[str] = frozenset()
    set_by_data: frozenset[str] = frozenset()
    to_trainer: Callable[[ModuleType], type | None] | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The flags' values by name."""
        return {name: getattr(self, name) for name in FLAG_INFO}

    @functools.cached_property
    def model_entry(self) -> registry.Entry:
        """The model, imported, and with it TensorFlow. Raises what its module raises."""
        return (
            registry.class_entry(self.program_trainer)
            if self.program_trainer
            else registry.find("model", self.model, self.to_trainer)
        )

    @functools.cached_property
    def input_entry(self) -> registry.Entry | None:
        """The input, imported; None where a program brings its data. Raises what its module raises."""
        return registry.find("input", self.input) if self.input else None

    @property
    def trainer_class(self) -> Any:
        """The Trainer: the program's own, or the one that --model names."""
        return self.model_entry.make

    @property
    def has_compiled_model(self) -> bool:
        """Whether the Trainer is that of a compiled Keras model, which gets arrays without their examples' lengths."""
        return getattr(self.program_trainer, "weighs_outputs", False)

    @property
    def trains(self) -> bool:
        """Whether the mode changes the run."""
        return self.mode in ("train", "train_and_eval")

    @property
    def leaves_optimizer_out(self) -> bool:
        """Whether the mode applies no optimizer, and this one is code of the user's own, which it does not import."""
        return self.mode in READING and user_files.is_own(self.optimizer)

    @property
    def configured_run_dir(self) -> str | None:
        """The folder of the run's files: --run_dir unchanged."""
        return self.remote.url if self.remote else self.run_dir

    @property
    def tasks(self) -> Cluster:
        """The cluster, where the strategy has one."""
        assert self.cluster, f"strategy={self.strategy} has no cluster"
        return self.cluster

    @property
    def files(self) -> RunDir:
        """The files of the run, where it has a run_dir."""
        assert self.run_dir, "run_dir is not given"
        return RunDir(self.run_dir)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def progress_mode(self) -> str:
        """What `runner.progress` shows here: nothing but on the chief, and JSON in place of a bar or lines."""
        if not self.is_chief or self.progress == "off":
            return "off"
        return "json" if self.log_format == "json" else self.progress

    @property
    def placement_rules(self) -> list[tuple[str, int]]:
        """The rules of --variable_placement, as (regular expression, number of the server). Raises `UsageError`."""
        servers = len(self.tasks.job("ps"))
        rules = []
        for placement in self.variable_placement:
            pattern, _, server = placement.rpartition("=ps:")
            if not pattern or not server.isdecimal() or int(server) >= servers:
                raise UsageError(
                    f"variable_placement={placement} is not of the form REGEX=ps:N with N from 0 to {servers - 1}; use "
                    "e.g. table=ps:0"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"variable_placement={placement} is not a regular expression: {error}") from None
            rules.append((pattern, int(server)))
        return rules

    def frozen_steps(self, steps_per_epoch: int, shift: int) -> tuple[tuple[str, int | None], ...]:
        """Returns the rules of --freeze: (regular expression, the step until which; None is the whole run).

        Args:
          shift: see `engine.data.order.Order`.

        Raises `UsageError`.
        """
        rules: list[tuple[str, int | None]] = []
        for rule in self.freeze:
            pattern, epochs = parse_freeze(rule)
            until = None if epochs is None else max(0, steps_from_epochs(epochs, steps_per_epoch) - shift)
            if until and until % self.sync_every_steps:
                raise UsageError(
                    f"freeze={rule} ends at step {until}, between two syncs "
                    f"(sync_every_steps={self.sync_every_steps}); give epochs that end at one"
                )
            rules.append((pattern, until))
        return tuple(rules)

    @property
    def gpu_numbers(self) -> tuple[int, ...] | None:
        """The numbers of --gpus, () for none; None without the flag."""
        if not self.gpus:
            return None
        return () if self.gpus == "none" else tuple(map(int, self.gpus.split(",")))

    @property
    def serves(self) -> bool:
        """Whether this process is a worker or parameter server, which only executes a coordinator's requests."""
        return self.strategy == "parameter_server" and self.tasks.kind in ("worker", "ps")

    @property
    def has_evaluator(self) -> bool:
        """Whether one of the run's processes only evaluates."""
        return self.cluster is not None and bool(self.cluster.job("evaluator"))

    @property
    def checkpoint_period(self) -> tuple[int, float]:
        """The steps and the seconds from one checkpoint to the next, 0 for never.

        Where others wait for them, an evaluator or workers that may join, a clock does not decide.
        """
        if self.has_evaluator or (self.cluster and (self.cluster.absent or self.cluster.newcomers)):
            default = whole_periods(_CHECKPOINT_STEPS, self.sync_every_steps)
            return default if self.checkpoint_every_steps is None else self.checkpoint_every_steps, 0.0
        return self.checkpoint_every_steps or 0, 60 * self.checkpoint_every_minutes

    @property
    def monitored(self) -> Monitored:
        """The metric of the best checkpoint, early stopping and the plateau."""
        return Monitored.parse(self.monitor)

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates each checkpoint that others write."""
        return self.strategy == "parameter_server" and self.tasks.kind == "evaluator"

    @property
    def coordinates(self) -> bool:
        """Whether this process is the coordinator of workers and parameter servers."""
        return self.strategy == "parameter_server" and self.tasks.kind == "chief"

    @functools.cached_property
    def trained_on(self) -> Data | None:
        """The description of the data that the run was trained on, whose preprocessing other data takes.

        None of a run without a checkpoint, which begins.
        """
        if not self.has_checkpoint:
            return None
        try:
            return data_json.from_json(read_json(self.files.model), NAMES.model)
        except (OSError, ValueError, KeyError, TypeError):  # training writes it again, and other modes refuse it
            return None

    @property
    def keeps_ids(self) -> bool:
        """Whether an input leaves ids as they are: the model takes any, or the run began when none were numbered."""
        takes_any = any(str(self.model_arg.get(name) or 0) != "0" for name in ("hash_buckets", "table_capacity"))
        return takes_any or self.has_checkpoint

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has one already; a benchmark reads none."""
        return bool(self.run_dir) and self.mode != "benchmark" and self.files.newest() is not None

    @property
    def needs_labels(self) -> bool:
        """Whether an input must have labels: new data to predict on may have none."""
        return self.mode != "predict"

    @property
    def reads_evaluation_alone(self) -> bool:
        """Whether the evaluation's files replace those that the run was trained on."""
        return self.mode in READING and self.data_dir is not None and self.data_dir == self.eval_data_dir

    @property
    def writes_run(self) -> bool:
        """Whether this process writes the run's files."""
        return bool(self.run_dir) and self.trains and self.is_chief

    @property
    def no_jit_reason(self) -> str | None:
        """The reason why XLA can't be used with these flags, or None if it can."""
        if self.run_eagerly:
            return "run_eagerly executes steps op by op"
        checking = "debug" if self.debug else "check_numerics" if self.check_numerics else None
        return checking and f"XLA leaves the checks of {checking} out"

    @property
    def output_path(self) -> str:
        """The output of a prediction or an export: a file, or the folder in which an export has a folder per step."""
        path = (self.export_dir if self.trains else self.output) or ""
        return self.files.export if not path or "://" in path else path

    @property
    def tensorboard(self) -> str:
        """The folder of TensorBoard's files; for one in a bucket the run's own, from which they are copied."""
        path = self.tensorboard_dir or ""
        return self.files.tensorboard if not path or "://" in path else path

    def configured_arguments(self, flag: str) -> dict[str, Any]:
        """Returns the values of a NAME=VALUE flag, with the types of their defaults. Raises `UsageError`."""
        values = getattr(self, flag)
        if not values and flag in registry.ENTRIES:
            return {}
        try:
            return registry.coerce_arguments(flag, values, self.entry(flag))
        except UsageError as error:
            if flag not in self.from_run:
                raise
            raise UsageError(f"{RunDir(self.run_dir or '').config}: {error.message}; {saved_config.FIX}") from None

    def arguments(self, flag: str) -> dict[str, Any]:
        """Returns `configured_arguments`, and the defaults of the others."""
        return {**self.entry(flag).defaults, **self.configured_arguments(flag)}

    def entry(self, flag: str) -> registry.Entry:
        """Returns what a NAME=VALUE flag's arguments are passed to. Raises `UsageError`."""
        if flag == "model_arg":
            return self.model_entry
        if flag == "input_arg":
            return self.input_entry or registry.Entry("the script's data", "", {})
        if flag == "learning_rate_schedule_arg":
            return registry.schedules()[self.learning_rate_schedule]
        if flag != "optimizer_arg":
            return registry.ENTRIES[flag]
        if self.leaves_optimizer_out:
            return registry.Entry(self.optimizer, "", self.optimizer_arg)
        return registry.optimizer(self.optimizer)

    def deciding(self) -> dict[str, Any]:
        """Returns the values that decide a run's numbers, arguments with their defaults filled in. Plain JSON."""
        values = {name: self.values[name] for name in DECIDING}
        for name in ARGUMENTS:
            if name in values:  # an optimizer's and a schedule's defaults are their own
                values[name] = self.configured_arguments(name) if name in _UPDATE_ARGUMENTS else self.arguments(name)
        values["model"] = self.model_entry.name
        if self.input_entry:
            values["input"] = self.input_entry.name
        if self.learning_rate_schedule in SCHEDULES_TO_THE_END:
            values["train_steps"], values["train_epochs"] = self.train_steps, self.train_epochs
        if self.script_flags:
            values["script_flags"] = self.script_flags
        return plain(values)

    @functools.cached_property
    def keras_defaults(self) -> dict[str, Any]:
        """Keras's defaults within the run: those that it began with, or this program's. Plain JSON. Imports Keras.

        Raises:
          UsageError: a file has others than Keras takes, or the model was made with others.
        """
        from ...engine.internals.keras_state import is_default
        from ..host.isolation import program_defaults

        here = program_defaults(getattr(self.program_trainer, "default_policy", None))
        path, before = self._recorded_keras_defaults()
        values = {**here, **before}
        for name, value in before.items():
            if value != here.get(name) and not is_default(name, value):
                raise UsageError(f"{path} has {shown({name: value})}, which Keras can't be set to; {saved_config.FIX}")
        if changed := "; ".join(differences(values, here)):
            if getattr(self.program_trainer, "is_built", False):
                raise UsageError(
                    f"{path} has other defaults of Keras than this program, which has made the model ({changed}); set "
                    "them by keras.config before the model is made, or pass a function that makes it"
                )
            if self.is_chief:
                logging.warning("the run has Keras's defaults of %s, not this program's (%s)", path, changed)
        return values

    def _recorded_keras_defaults(self) -> tuple[str, dict[str, Any]]:
        """Reads Keras's defaults from the file that the run has them of: (its path, defaults); without one ("", {})."""
        if self.run_dir and self.mode != "benchmark" and (saved := saved_config.load(self.run_dir)):
            path = self.files.config
            if "keras" not in saved and self.is_chief:
                logging.warning("%s is without Keras's defaults, so the run has this program's", path)
            return path, saved.get("keras", {})
        if (path := self.config or "").endswith(".json"):
            content = parsing.load_mapping("config", path, "flags", "")
            return path, saved_config.check(path, content).get("keras", {}) if "deciding" in content else {}
        if not (path := self.init_from or ""):
            return "", {}
        checkpoints = [manifests.manifest_at(path), RunDir(path).newest(), *manifests.read_all(path)[0]]
        saved_with: dict[str, Any] = next((manifest.about.get("keras", {}) for manifest in checkpoints if manifest), {})
        # By this one a weight belongs to a pixel. The others are for each run to choose, as its precision is.
        return path, {name: value for name, value in saved_with.items() if name == "image_data_format"}

    def as_json(self) -> dict[str, Any]:
        """Returns all values, those that decide, and Keras's defaults, as config.json holds them. Plain JSON."""
        arguments = {name: self.configured_arguments(name) for name in ARGUMENTS}
        values = {**self.values, **arguments, "run_dir": self.configured_run_dir}
        return plain({"flags": values, "deciding": self.deciding(), "keras": self.keras_defaults})


def steps_from_epochs(epochs: float, steps_per_epoch: int) -> int:
    """Converts a number of epochs, as a decimal (1.1 is 11/10), to steps."""
    return math.ceil(Fraction(repr(epochs)) * steps_per_epoch)


def whole_periods(steps: int, period_steps: int) -> int:
    """Rounds steps up to a multiple of the steps between two syncs."""
    return -(-steps // period_steps) * period_steps


def data_config(run_dir: str) -> Config:
    """Makes a configuration with a run's flags of its data, and defaults otherwise. Raises `UsageError`."""
    path, saved = RunDir(run_dir).config, saved_config.load(run_dir)
    values = saved_config.typed_values(path, saved or {"flags": {}}, ["seed", *GROUPS["Input"]])
    values = saved_config.without_places(path, values)
    return Config(**values, run_dir=run_dir, mode="predict")


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Lists the GPUs that TensorFlow would find, as CUDA_VISIBLE_DEVICES names them; without starting it."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    try:
        return [str(index) for index in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []
