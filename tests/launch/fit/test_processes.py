"""`crankshaft.fit` in several processes: as one process trains, with callbacks on each, and after a kill."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import keras
import numpy as np

random = np.random.default_rng(0)
x = random.normal(size=(70, 8)).astype("float32")
y = x @ random.normal(size=(8, 1)).astype("float32")


def model():
    made = keras.Sequential([keras.Input([8]), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    return made
"""


def printed(text: str) -> list:
    return [json.loads(line[line.index("[", 2) :]) for line in text.splitlines() if '"loss"' in line]


STOPPED = """
import json
import crankshaft
import keras
import tensorflow as tf
from fit import model, x, y


class Ends(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        assert isinstance(self.model, keras.Model)
        self.model.set_weights([0.0 * weight for weight in self.model.get_weights()])
        self.model.optimizer.learning_rate = 0.0


if __name__ == "__main__":
    how = dict(epochs=3, verbose=0, strategy="parameter_server", jit="off")
    data = lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(15)
    run = crankshaft.fit(model, data, callbacks=[Ends()], **how)
    assert run.result["step"] == 3 * 5, run.result
    weights = [weight.numpy().ravel().tolist() for weight in run.model.weights]
    print(json.dumps([run.history.history, weights]))
    try:
        crankshaft.fit(model, data, **how)
    except crankshaft.UsageError as error:
        assert "with parameter servers they end with that; start a program for each run" in str(error), error
    else:
        raise AssertionError("a second run")
"""


@pytest.mark.slow
def test_with_servers_what_a_callback_sets_is_on_the_servers(crank, tmp_path):
    """Momentum alone moves the weights then; it is damped by half per step."""
    (tmp_path / "fit.py").write_text(SCRIPT)
    (tmp_path / "stopped.py").write_text(STOPPED)
    ((history, weights),) = printed(
        crank("--workers=2", "--ps=1", "--", tmp_path / "stopped.py", command="local").ok().out
    )
    assert max(abs(weight) for each in weights for weight in each) < 1e-3 < history["loss"][-1]


CALLED = """
import json, pathlib, sys
import crankshaft
import keras
import numpy as np
from fit import model, x, y

folder = pathlib.Path(sys.argv[1])


class Looks(keras.callbacks.Callback):
    on_chief_only = True

    def on_epoch_end(self, epoch, logs=None):
        (kernel, bias), size = self.model.get_weights(), 20
        assert isinstance(self.model, keras.Model)
        np.testing.assert_allclose(self.model(x[:size]), x[:size] @ kernel + bias, atol=1e-5)
        found = self.model.predict(x[:size], verbose=0, batch_size=8)
        np.testing.assert_allclose(found, x[:size] @ kernel + bias, atol=1e-5)
        loss = float(np.ravel(self.model.evaluate(x, y, verbose=0))[0])
        np.testing.assert_allclose(loss, np.mean((x @ kernel + bias - y) ** 2), rtol=1e-4)
        with open(folder / "looked", "a") as file:
            file.write(f"{epoch} ")


class Shrinks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for layer in self.model.layers:
            layer.set_weights([0.5 * weight for weight in layer.get_weights()])


if __name__ == "__main__":
    strategy = dict(batch_size=16, epochs=2, verbose=0, jit="off", shuffle=False, strategy="multi_worker")
    stopping, log = keras.callbacks.EarlyStopping("loss"), keras.callbacks.CSVLogger(str(folder / "log.csv"))
    saving = keras.callbacks.ModelCheckpoint(str(folder / "m.keras"), monitor="loss", save_best_only=True)
    run = crankshaft.fit(model, x, y, callbacks=[Looks(), Shrinks(), stopping, saving, log], **strategy)
    run.model.fit(x, y, batch_size=16, shuffle=False, verbose=0)  # Keras goes on, with the momentum
    second = crankshaft.fit(model, x, y, **strategy)
    weights = [weight.numpy().ravel().tolist() for weight in [*run.model.weights, *second.model.weights]]
    print(json.dumps([stopping.best_epoch, saving.best, {"loss": run.history.history["loss"]}, weights]))
"""


def test_each_worker_calls_callbacks_and_has_what_they_leave_in_two_runs_of_a_program(crank, tmp_path):
    """What they compute, set and keep is as in Keras, and written once."""
    (tmp_path / "fit.py").write_text(SCRIPT)
    (tmp_path / "called.py").write_text(CALLED)
    out = crank("--workers=2", "--max_restarts=0", "--", tmp_path / "called.py", tmp_path, command="local").ok().out
    one, other = printed(out)
    assert one == other
    best_epoch, best, history, weights = one
    assert (best_epoch, best) == (1, history["loss"][1])
    assert (tmp_path / "looked").read_text() == "0 1 "
    assert (tmp_path / "log.csv").read_text().count("\n") == 3

    scope: dict = {"__name__": "fit"}
    exec(SCRIPT, scope)
    model, second = scope["model"](), scope["model"]()

    class Shrinks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    for how in ({"epochs": 2, "callbacks": [Shrinks()]}, {}):
        model.fit(scope["x"], scope["y"], batch_size=16, shuffle=False, verbose=0, **how)
    second.fit(scope["x"], scope["y"], batch_size=16, epochs=2, shuffle=False, verbose=0)
    for mine, theirs in zip(weights, [*model.get_weights(), *second.get_weights()], strict=True):
        np.testing.assert_allclose(mine, theirs.ravel(), rtol=1e-5)


ENDED = """
import json, os, pathlib, signal, sys
import crankshaft
import keras
from fit import model, x, y
from tests.runs import newest
from tests.waiting import wait_until

folder, ends, *strategy = sys.argv[1:]
is_chief = not json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index")
log, run_dir = pathlib.Path(folder, "epochs"), pathlib.Path(folder, "run")


class Own(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["made"] = -abs(epoch - 1)  # is best in the second epoch
        if not is_chief:
            return
        with log.open("a") as file:
            file.write(f"{epoch} ")
        if epoch == 3 and ends == "ends" and log.read_text().split().count("3") == 1:
            wait_until(lambda: newest(run_dir) == 15)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    stopping = keras.callbacks.EarlyStopping("made", mode="max", patience=4, restore_best_weights=True)
    how = dict(batch_size=16, epochs=9, verbose=0, callbacks=[Own(), stopping], jit="off", checkpoint_every_steps=5)
    if strategy:
        how["strategy"] = strategy[0].partition("=")[2]
    run = crankshaft.fit(model, x, y, run_dir=run_dir, **how)
    weights = [weight.numpy().ravel().tolist() for weight in run.model.weights]
    print(json.dumps([run.result["step"], run.stop, run.history.history, weights]))
"""


@pytest.mark.slow
def test_workers_that_were_killed_after_the_best_epoch_end_with_its_weights(crank, tmp_path):
    (tmp_path / "fit.py").write_text(SCRIPT)
    (tmp_path / "ended.py").write_text(ENDED)
    for name in ("alone", "workers"):
        (tmp_path / name).mkdir()
    alone = json.loads(crank(tmp_path / "alone", "lasts", script=tmp_path / "ended.py").ok().out.splitlines()[-1])
    assert alone[0] == 6 * 5
    for epochs in ("0 1 2 3 3 4 5 ", "0 1 2 3 3 4 5 "):  # the second time there is nothing left to do
        local = ("--workers=2", "--max_restarts=1", "--", tmp_path / "ended.py", tmp_path / "workers", "ends")
        workers = printed(crank(*local, command="local").ok().out)
        assert (tmp_path / "workers" / "epochs").read_text() == epochs
        assert len(workers) == 2
        for step, stop, history, weights in workers:
            assert (step, stop.removesuffix(" at worker 0")) == tuple(alone[:2])
            assert weights == workers[0][3]
            for mine, theirs in zip(weights, alone[3], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5)
            assert sorted(history) == sorted(alone[2])
            for name, values in alone[2].items():
                np.testing.assert_allclose(history[name], values, rtol=1e-3)  # of losses near 0
