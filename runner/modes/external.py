"""External data, passed to a call of a run: checked against the run's form, and its program."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import tensorflow as tf

from ...engine.data import form
from ...engine.data.entry import user_data, views
from ...engine.data.feeds.combined import Combined
from ...engine.data.source import Split
from ...engine.data.streamed import is_off, is_part
from ...engine.strategies.base import Program
from ..base import BaseRun
from ..data.inputs import eval_batch_size, order_seed
from ..failures import UsageError
from ..saved import fingerprints
from ..saved.preprocessor import Names, check_names

_STREAMS = 4  # whose positions are kept: each may hold a shuffle's buffer


def checked(run: BaseRun, data, trains: bool = False) -> Split:
    """Returns data as a `Source` or a `Stream`, the same one for the same dataset; or as several, to train on.

    Raises:
      UsageError: its form is not the run's.
    """
    train: Any = run.splits.get("train")
    if not (trains and isinstance(train, Combined)):
        run_example = run.example
        if not trains and run.inputs.evaluation is not None:  # which a model's own step may take in another form
            evaluated = form.example(run.inputs.evaluation)
            run_example = run_example if form.field_names(evaluated) == form.field_names(run_example) else evaluated
        return _checked(run, data, run_example, by_batch=not trains and _takes_any_batch(run, data))
    if not isinstance(data, dict) or data.keys() != train.members.keys():
        raise UsageError(f"the run trains on several inputs per step; give a dictionary of {', '.join(train.members)}")
    most = max(_STREAMS, len(train.members))
    return train.mapped(lambda name, member: _checked(run, data[name], form.example(member), most))


def _takes_any_batch(run: BaseRun, data) -> bool:
    """Returns whether each batch of data is a step of an evaluation, as in Keras and `launch.fit`."""
    is_part = run.strategy.num_hosts > 1 and (run.config.auto_shard_policy in ("file", "off") or is_off(data))
    return run.config.has_compiled_model and run.config.strategy != "parameter_server" and not is_part


def _checked(run: BaseRun, data, run_example, most_streams: int = _STREAMS, by_batch: bool = False) -> Split:
    for dataset, was_by_batch, split in run.external_streams:
        if dataset is data and was_by_batch == by_batch:
            return split
    labels = form.fields(run_example).labels
    given_rules = rules(run.names, run_example, run.config.has_compiled_model)
    given_rules = dataclasses.replace(given_rules, by_batch=by_batch)
    split = views.with_floats_like(user_data.split("given", data, given_rules), form.element_spec(run_example))
    if isinstance(labels, form.WeighedLabels):
        shapes = tf.nest.map_structure(lambda x: tf.TensorShape(x.shape[1:]), labels.weights)
        split = views.with_output_weights(split, shapes)
    specs = map(form.fields, (form.element_spec(run_example), split.element_spec))
    wanted, actual = (x.features if x.labels is None else (x.features, x.labels) for x in specs)  # without weights
    if wanted != actual:
        check_like(run, "data", wanted, actual, "resize or pad it, or open a run with data of this size")
    if not split.by_index:
        run.external_streams[:] = [*run.external_streams[1 - most_streams :], (data, by_batch, split)]
    return split


def is_own(run: BaseRun, split: Split, is_passed: bool = True) -> bool:
    """Returns whether data is of this worker's own examples, rather than the same on all.

    Args:
      is_passed: whether it is passed to a call, rather than the run's own, whose arrays all workers have.
    """
    policy = run.config.auto_shard_policy.upper()
    return run.strategy.num_hosts > 1 and ((is_passed and policy == "OFF") or is_part(split, policy))


def describe(split: Any) -> str:
    """Describes data by its number of examples and their form, so that workers can compare theirs."""
    if isinstance(split, Combined):
        return ", ".join(f"{name}: {describe(member)}" for name, member in split.members.items())
    many = f"{len(split)} examples" if split.by_index else "a stream"
    return f"{many} of {fingerprints.layout(split)}"


def program(run: BaseRun, step: Literal["train", "eval"], split: Split, steps: int | None = None) -> Program:
    """Returns the program of a step on external data; the caller closes it after the call.

    Args:
      split: split that `checked` returned.
      steps: number of steps; None for whole epochs.
    """
    config = run.config
    if step == "eval":
        return run.strategy.external(step, split, eval_batch_size(run.config, split), is_own=is_own(run, split))
    seed = order_seed(config, run.inputs.updates_before)
    return run.strategy.external(step, split, config.global_batch_size, seed, steps, is_own(run, split))


def rules(names: Names, example: Any, weighs_outputs: bool) -> user_data.Rules:
    """Returns the rules for reading data that is passed after the run's own.

    Args:
      example: features that the run takes, also with labels: a nest of arrays or specs [examples, ...].
      weighs_outputs: see `user_data.Rules`.
    """
    return user_data.Rules(
        weighs_outputs=weighs_outputs,
        keeps_batch_size=weighs_outputs,
        rank=len(tf.nest.flatten(example)[0].shape),
        look_up=names.look_up,
        may_lack=names.may_lack,
        keeps_float64=any(tf.as_dtype(x.dtype) == tf.float64 for x in tf.nest.flatten(example)),
    )


def check_like(run: BaseRun, name: str, wanted, spec, if_resized: str) -> None:
    """Raises `UsageError` where one example, a nest of specs, is not what a run takes.

    Args:
      run: the run; that of a compiled Keras model takes any lengths, or none.
      name: description of the data, for messages.
      wanted: form of an example that the run takes, a nest of specs.
      spec: form of an example of the data, a nest of specs.
      if_resized: fix for examples that differ in size alone, for the message.
    """

    def shown(specs) -> str:
        return str(tf.nest.map_structure(lambda x: f"{tf.as_dtype(x.dtype).name}{[*x.shape]}", specs))

    def fits(x, y) -> bool:
        return tf.as_dtype(x.dtype) == tf.as_dtype(y.dtype) and tf.TensorShape(x.shape).is_compatible_with(y.shape)

    def structures(specs) -> list:
        return [(tf.as_dtype(x.dtype), len(x.shape)) for x in tf.nest.flatten(specs)]

    def has_lengths(specs) -> bool:
        return form.values(specs) != specs

    wanted, spec = map(form.values if run.config.has_compiled_model else form.measured, (wanted, spec))
    lacks_lengths = has_lengths(wanted) and not has_lengths(spec)
    has_more = has_lengths(spec) and not has_lengths(wanted)
    wanted, spec = (form.map_padded(lambda padded: form.Padded(*padded), specs) for specs in (wanted, spec))
    try:
        fits_run = all(tf.nest.flatten(tf.nest.map_structure(fits, wanted, spec)))
    except (TypeError, ValueError):  # other structures
        fits_run = False
    if not fits_run and isinstance(wanted, dict) and isinstance(spec, dict):
        check_names("the data", wanted, spec)
    if not fits_run:
        line = f"{name} are {shown(spec)} an example; this run's are {shown(wanted)}"
        if lacks_lengths:
            line += "; the run needs each example's length: give a tf.RaggedTensor, a crankshaft.Padded or a Source"
        elif has_more:
            line += "; the run takes no lengths: give arrays, or batches that are padded as its own data's"
        elif isinstance(spec, tuple) and not isinstance(wanted, (tuple, dict)):
            line += "; a list or tuple is several inputs: give one array, as np.array(list) makes of numbers or text"
        elif structures(wanted) == structures(spec):
            line += f"; {if_resized}"
        raise UsageError(line)
