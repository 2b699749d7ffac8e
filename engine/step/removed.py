"""Names that `Trainer` once had, and what to use instead: one clear line for code that still uses them."""

from __future__ import annotations

_HELD = "engine.holdings.Holdings(self)"
# By name, what to write instead. Methods that a step or `build` called may not be overridden either: nothing would call
# them.
CALLED = {
    "apply_gradients": "optimizer.apply(gradients, variables), or Update(gradients).apply(optimizer, ...)",
    "build_embeddings": "crankshaft.engine.build_embeddings(self)",
    "build_layers": "a model that is built already, from build_model, or crankshaft.engine.build_layers(self, model)",
    "check_finite": "Update(gradients).finite",
    "checked_loss": "crankshaft.weighed(self.loss, outputs, batch)",
    "clip": "gradients.clipped(variables, Update(gradients).norm)",
    "compute_metrics": "eval_step(batch)",
    "divide": "gradients.over(count), of the gradients that self.reduction.sum returns",
    "end_update": "update.end(metrics), of an Update",
    "global_norm": "Update(gradients).norm",
    "make_optimizer": "crankshaft.make_optimizer(self, variables), with an optimizer if it is not build_optimizer's",
    "step_metrics": "update.end(metrics), of an Update",
    "summed_gradients": "compute_gradients(batch)",
}
READ = {
    **{name: f"self.given.{name}" for name in ("example", "num_classes", "num_servers", "options", "vocabulary")},
    **{
        name: f"{_HELD}.{name}"
        for name in ("all_weights", "models", "moving_statistics", "optimizers", "steady_variables", "table_figures")
    },
    "embedding_tables": f"{_HELD}.tables",
    "held_layers": f"{_HELD}.layers",
    "loss_scale": "crankshaft.step_context().scaled(total), and gradients.unscaled()",
    "replica": "crankshaft.step_context().replica",
    "stateless_seed": "crankshaft.step_context().seed()",
    "step": "crankshaft.step_context().step",
}


def check_class(cls: type) -> None:
    """Raises TypeError where a subclass of `Trainer` overrides what nothing calls any more."""
    for name in CALLED:
        if name in vars(cls):
            raise TypeError(f"{cls.__name__}.{name}: Trainer.{name} is gone, and would not be called; {_cure(name)}")


def check_name(owner: str, name: str) -> None:
    """Raises AttributeError where a trainer that lacks an attribute is asked for one that every `Trainer` once had."""
    if name in CALLED or name in READ:
        raise AttributeError(f"{owner}.{name} is gone; {_cure(name)}")


def _cure(name: str) -> str:
    return f"use {(CALLED | READ)[name]}"
