"""Checks which compiled Keras models a run can train, and reads what `compile` decides about a step."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from ...engine.errors import UsageError
from ...engine.internals import keras_calls
from ...engine.step.options import CLIPS, StepOptions
from .own_step import METHODS

# Methods of a Keras model that its `fit` calls and a run does not, and what serves instead of each.
_INSTEAD = {
    "fit": "do to the data what it does, as by dataset.map(preprocessor), and pass a model of a class without it, such "
    "as keras.Model(model.inputs, model.outputs), compiled; predictions take such data too",
    "make_train_function": "override train_step",
    "make_test_function": "override test_step",
    "get_metrics_result": "return the values from compute_metrics",
    "reset_metrics": "leave it out if it resets metrics, as each epoch does, or override their reset_state",
}
# Arguments of `compile` about the update, and the run's options that would set them a second time.
_SET_BY_COMPILE = {
    **dict.fromkeys(("optimizer", "optimizer_arg", "weight_decay"), "optimizer"),
    **dict.fromkeys(
        ("learning_rate", "learning_rate_schedule", "learning_rate_schedule_arg", "warmup_steps"),
        "optimizer's learning_rate",
    ),
    "clip_norm": "optimizer's global_clipnorm",
    "clip_variable_norm": "optimizer's clipnorm",
    "clip_value": "optimizer's clipvalue",
}


def check(model, trains: bool = True) -> None:
    """Raises UsageError or ValueError if the model can't be trained as compiled; or, not `trains`, predict."""
    keras_calls.refuse_keras_2(model)
    if not isinstance(model, keras_calls.Trainable):
        raise UsageError(
            f"a {type(model).__name__} is not a Keras model; pass a compiled one, or a function that returns one"
        )
    name = type(model).__name__
    if not model.compiled:
        raise UsageError(f"{name} is not compiled; call model.compile(optimizer=..., loss=...) first")
    overridden = [method for method in _INSTEAD if trains and keras_calls.overrides(model, method)]
    if overridden := [method for method in overridden if not getattr(model, method).__module__.startswith("keras.")]:
        instead = ", and ".join(_INSTEAD[method] for method in overridden)
        raise UsageError(f"{name} overrides {', '.join(overridden)}, which no run calls; {instead} (docs/keras.md)")
    if model.optimizer is None and not keras_calls.overrides(model, "train_step"):
        raise UsageError(f"{name} is compiled without an optimizer; call model.compile(optimizer=..., loss=...)")


def step_options(options: StepOptions, model: tf.keras.Model, is_built: bool) -> StepOptions:
    """Returns the run's options with those of `compile`. Raises UsageError if both set one."""
    optimizer, compiled = getattr(model.optimizer, "inner_optimizer", model.optimizer), options
    if not any(keras_calls.overrides(model, method) for method in METHODS):  # in whose steps each optimizer has its own
        compiled = dataclasses.replace(
            options,
            precision=options.precision if optimizer is model.optimizer else "float16",
            clip_norm=optimizer.global_clipnorm or 0.0,
            clip_variable_norm=optimizer.clipnorm or 0.0,
            clip_value=optimizer.clipvalue or 0.0,
        )
    for name, argument in _SET_BY_COMPILE.items():
        allowed = getattr(StepOptions(), name), getattr(compiled, name) if name in CLIPS else None
        if getattr(options, name) not in allowed:
            raise UsageError(
                f"{name} is set, and the model is compiled with an optimizer; set the {argument} in compile"
            )
    scaled = () if optimizer is model.optimizer else ("float16",)
    if is_built and options.precision not in ("float32", model.dtype_policy.compute_dtype, *scaled):
        raise UsageError(
            f"precision={options.precision}: the model is already made, in {model.dtype_policy.name}; call "
            f"keras.config.set_dtype_policy('mixed_{options.precision}') before, or pass a function that makes it"
        )
    if not is_built and model.run_eagerly:  # how steps run is chosen before the function makes its model
        raise UsageError(
            "compile(run_eagerly=True) in a function comes too late; leave it out there, and pass run_eagerly=True to "
            "fit or run, on one device"
        )
    return compiled
