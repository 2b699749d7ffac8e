"""TensorBoard: a hook that writes a run's figures to a directory, and to `train/` and `eval/` below it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import numpy as np
import tensorflow as tf

from ...engine import logging
from ...engine.data import form
from ...engine.errors import reason
from ...engine.hooks.background import BackgroundThread
from ...engine.hooks.base import Period, Status, Windowed
from ...engine.hooks.figures import read as read_figures
from ...engine.internals.variables import compiled_once, variable_path
from ...engine.inventory import Inventory
from ...engine.mesh.sharded import variable_sharding
from ...engine.meter import Totals
from . import event_values
from .event_files import EventFiles
from .probe import Probe

_HISTOGRAM_BYTES = 64 << 20  # larger tables, possibly on another host, get no histogram


class TensorBoard(Windowed):
    """Writes scalars periodically, at epochs' ends and at the last step, and evaluations, if any.

    `train/`: each metric's mean since the last time, learning_rate, loss_scale if there is one, epoch, steps_per_sec,
    examples_per_sec and the values of `Totals.input`; `tables/...`, of tables that assign rows to ids; with several
    workers `workers/<i>/...`, see `Totals.workers`; the histograms `weights/...` and `gradients/...`, of sharded
    variables those of the first shard; once, the model's graph, some inputs if they look like images, and the
    configuration as a table. `eval/`: the metrics of each evaluation. The directory itself: once, the hyperparameters,
    which TensorBoard shows with the scalars of both.

    A resumed run continues in the same folders, and makes TensorBoard discard the events that a killed process wrote
    after the checkpoint, so that no step appears twice.

    Args:
      directory: `run_dir/tensorboard`.
      every_steps: period of scalars; 0 writes only the last step and evaluations.
      more: other periods at whose ends scalars are written, such as an epoch.
      histogram_every_steps: period of histograms; 0 disables them.
      config: the hyper-parameters, {name: value}.
      probe: what steps leave of gradients and images; None omits them.
      writer: the thread that writes; None starts one.
    """

    name = "tensorboard"

    def __init__(
        self,
        directory: str | None,
        every_steps: int,
        histogram_every_steps: int = 0,
        more: Collection[int | Period] = (),
        config: dict | None = None,
        probe: Probe | None = None,
        writer: BackgroundThread | None = None,
    ):
        super().__init__(every_steps, at_end=True, more=more)
        self.histogram_every_steps = histogram_every_steps
        self.config = config or {}
        self.probe = probe
        self._files = EventFiles(directory, writer)
        self._inventory: Inventory
        self._restored = False
        self._has_images = probe is None or not probe.has_pictures
        self._weights: Callable | None = None

    def begin(self, status: Status) -> None:
        self._files.open(status.step if self._restored or status.step else None)
        self._has_images = self._has_images or self._restored
        trainer = status.state.trainer
        self._inventory = trainer.inventory
        if not self._restored:
            if self.config:
                self._files.put("", 0, lambda: event_values.hyper_parameters(self.config))
                self._files.put("train", 0, lambda: event_values.table("configuration", self.config))
            if lines := dict(enumerate(status.strategy.summary_lines())):
                self._files.put("train", 0, lambda: event_values.table("strategy", lines))
            self._put_graph(trainer)

    def rewind(self, status: Status) -> None:
        # New files, which begin with the step from which TensorBoard discards the old ones' events.
        self._files.close()
        self._restored = True
        self.begin(status)

    def next_due(self, step: int, status: Status) -> int | None:
        due = super().next_due(step, status)
        if not self.histogram_every_steps:
            return due
        histograms = (step // self.histogram_every_steps + 1) * self.histogram_every_steps
        return histograms if due is None else min(due, histograms)

    def __call__(self, status: Status) -> None:
        super().__call__(status)
        # Once, as soon as a step has left some.
        if not self._has_images and self.probe and (features := self.probe.pictures()) is not None:
            pictures, self._has_images = np.asarray(features), True
            self._files.put("train", 0, lambda: event_values.images("inputs", event_values.shades(pictures)))
        if status.evaluation is not None:
            # As it is now: the thread writes it later.
            evaluation = copy.copy(status.evaluation)
            self._files.put("eval", status.step, lambda: event_values.evaluation(evaluation))
        if self.histogram_every_steps and status.step % self.histogram_every_steps == 0:
            self._put_histograms(status)

    def act(self, status: Status) -> None:
        figures = {**read_figures(self._inventory), "epoch": status.epochs}
        totals = self.window.take()
        figures |= {**totals.speeds, **totals.input, **status.strategy.figures()}
        # The thread reads the sums, and so waits for the device.
        self._files.put("train", status.step, lambda: _training_scalars(totals, figures))

    def before_save(self, status: Status) -> None:
        self._files.flush(0.0 if status.in_memory else None)  # so that a run resumed from it has no gap

    def end(self, status: Status) -> None:
        self._files.close()

    def close(self) -> None:
        self._files.close()

    def host_state(self) -> dict:
        return {"has_begun": True}

    def restore_host_state(self, values: dict) -> None:
        self._restored = values["has_begun"]

    def _put_histograms(self, status: Status) -> None:
        if self._weights is None:
            variables = [v for v in self._inventory.all_weights if 4 * v.shape.num_elements() <= _HISTOGRAM_BYTES]
            # For a sharded variable this is the first replica's shard, as the name says.
            by_path = {f"{variable_path(v)}{'/first_part' if variable_sharding(v) else ''}": v for v in variables}
            self._weights = compiled_once(
                lambda: {path: event_values.histogram(tf.convert_to_tensor(v)) for path, v in by_path.items()}
            )
        weights, gradients = self._weights(), self.probe.gradients() if self.probe else {}

        def values() -> list:
            counted = {name: one for name, one in gradients.items() if np.any(one.counts)}
            named = (("weights", weights), ("gradients", counted))
            return event_values.histograms({f"{kind}/{path}": one for kind, by in named for path, one in by.items()})

        self._files.put("train", status.step, values)

    def _put_graph(self, trainer) -> None:
        """Writes the graph of the forward pass, of the first model of several; none if it can't be traced."""
        models = self._inventory.models
        if not models:
            return
        model = models[0]
        alone = getattr(trainer, "model", None) is model
        forward = tf.function(lambda x: (trainer.forward if alone else model)(x, training=False), autograph=False)
        features = form.features(form.measured(trainer.run_context.example))
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *np.shape(x)[1:]], np.asarray(x).dtype), features)
        try:
            graph = forward.get_concrete_function(specs).graph
        except Exception as error:  # of any class: it has no call, or its inputs are not the features
            logging.info("no graph of %s for TensorBoard: %s", model.name, reason(error))
            return
        self._files.put("train", 0, lambda: graph.as_graph_def(add_shapes=True).SerializeToString())


def _training_scalars(totals: Totals, figures_of_run: dict) -> list:
    scalars: dict[str, float] = {}
    for worker, figures in enumerate(totals.workers()):
        scalars |= {f"workers/{worker}/{name}": value for name, value in figures.items()}
    scalars |= totals.means() | figures_of_run
    return event_values.scalars({name: float(value) for name, value in scalars.items()})
