"""A program with an open run, in each of its tasks: open_run.py --how=HOW.

HOW is `other`, which ends in calls that differ; `apart`, in weights that differ; `term`, one of whose workers gets
SIGTERM; `several`, which trains on several inputs per step; `look`, which evaluates a run of a classifier that was
trained before, predicts by it, and sets its weights to 0; `fails`, in metrics of its own; `own`, whose workers each
give examples of their own to calls.
"""

import argparse
import json
import os
import signal
import threading

import numpy as np
import tensorflow as tf

import crankshaft
from crankshaft.models.logistic import Model
from tests.engine.trainers import Columns
from tests.launch import several_inputs

POINTS = np.random.default_rng(0).normal(size=(300, 3)).astype("float32")
HEIGHTS = POINTS @ np.float32([[1.0], [-2.0], [0.5]]) + 3.0


class Plane(Columns):
    def build_model(self):
        return tf.keras.Sequential([tf.keras.layers.Input([3]), tf.keras.layers.Dense(1)])


class Classes(Model):
    """A logistic regression whose metrics depend on the order of all examples."""

    def predictions(self, outputs, batch):
        return {"outputs": outputs, "labels": batch[1], "half": tf.cast(batch[1], tf.bfloat16)}

    def compute_metrics(self, predictions):
        logits, labels = predictions["outputs"], predictions["labels"]
        behind = (logits > logits[np.arange(len(labels)), labels][:, np.newaxis]).sum(1)
        return {
            "behind": float(behind @ np.arange(len(labels))),
            "labels": float(predictions["half"].astype(int) @ np.arange(len(labels))),
        }


class Failing(Classes):
    def compute_metrics(self, predictions):
        return {"behind": predictions["missing"]}


def look(strategy: str, run_dir: str) -> dict:
    asked = {"input": "digits", "eval_batch_size": 100, "jit": "off", "progress": "off"}
    with crankshaft.open_run(Classes, run_dir=run_dir, strategy=strategy, **asked) as run:
        evaluated = run.evaluate()
        found = {"step": run.step, "matrix": evaluated.confusion["confusion"].tolist()}
        found["computed"] = [evaluated[name] for name in ("behind", "labels")]
        found["predicted"] = run.predict(split="eval").tolist()
        run.set_weights([np.zeros_like(weight) for weight in run.model.get_weights()])
        found["of_zeros"] = run.evaluate()["loss"]
    return found


def several(strategy: str, run_dir: str) -> dict:
    data = several_inputs.arrays if strategy == "parameter_server" else several_inputs.streams
    asked = {**several_inputs.ASKED, "shuffle_buffer": 0, "run_dir": run_dir, "strategy": strategy}
    with crankshaft.open_run(several_inputs.Both, data=data, **asked) as run:
        run.train(steps=9)
        found = {"step": run.step, "weights": [weight.tolist() for weight in run.model.get_weights()]}
        found["far"] = run.train(data={"near": data().evaluation, "far": (several_inputs.U,)}, steps=1)["far"]
    return found


def term(strategy: str, run_dir: str) -> None:
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    asked = {"learning_rate": 0.05, "jit": "off", "progress": "off", "mode": "train", "strategy": strategy}
    with crankshaft.open_run(Plane, data=((POINTS, HEIGHTS),), run_dir=run_dir, **asked) as run:
        for number in range(1000):
            run.train(steps=2)
            if number == 3 and worker == 1:
                os.kill(os.getpid(), signal.SIGTERM)


def own(strategy: str, run_dir: str) -> dict:
    """Each worker gives 12 rows of its own, and makes a call in another thread; a process alone gives those of both."""
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else None
    rows = np.split(np.arange(24), 2)
    # Batches of 16 and 8, half of each from each worker.
    mine = rows[worker] if worker is not None else np.concatenate([rows[0][:8], rows[1][:8], rows[0][8:], rows[1][8:]])
    asked = {"optimizer": "sgd", "learning_rate": 0.05, "global_batch_size": 16, "eval_batch_size": 16}
    asked |= {"shuffle_buffer": 0, "jit": "off", "progress": "off", "mode": "train", "strategy": strategy}
    found, whole = {"worker": worker}, ((POINTS, HEIGHTS),)
    with crankshaft.open_run(Plane, data=whole, run_dir=run_dir, auto_shard_policy="off", **asked) as run:
        found["loss"] = run.train(data=(POINTS[mine], HEIGHTS[mine]), epochs=1)["loss"]
        dataset = tf.data.Dataset.from_tensor_slices((POINTS[mine], HEIGHTS[mine])).batch(3)
        run.train(data=dataset, epochs=1)
        found["weights"] = np.concatenate([np.ravel(weight) for weight in run.model.get_weights()]).tolist()
        found["evaluated"] = run.evaluate((POINTS[mine], HEIGHTS[mine]))["loss"]
        found["predicted"] = run.predict(POINTS[mine]).tolist() if worker is not None else None
        found["all"] = run.predict(POINTS[:24]).tolist() if worker is None else None
        if worker is not None:
            found["refused"] = refusals = []

            def refuse(call) -> None:
                try:
                    call()
                except crankshaft.UsageError as error:
                    refusals.append(str(error))

            thread = threading.Thread(target=refuse, args=(lambda: run.predict(POINTS[mine]),))
            thread.start()
            thread.join()
            refuse(lambda: run.evaluate((POINTS[: 4 + worker], HEIGHTS[: 4 + worker])))
    if worker is not None:
        with crankshaft.open_run(Plane, data=whole, **asked) as run:
            refuse(lambda: run.train(data=(POINTS[mine], HEIGHTS[mine]), epochs=1))
    return found


def main(strategy: str, run_dir: str, other: str = "") -> dict:
    data = (POINTS[:200], HEIGHTS[:200]), (POINTS[200:], HEIGHTS[200:])
    asked = {"learning_rate": 0.05, "global_batch_size": 32, "jit": "off", "progress": "off", "strategy": strategy}
    asked |= {"eval_every_steps": 5, "eval_batch_size": 30, "eval_batches": 2}
    with crankshaft.open_run(Plane, data=data, run_dir=run_dir, **asked) as run:
        found = {"own": [run.train(steps=3)["loss"], run.train(steps=4)["loss"]]}
        found["given"] = run.train(data=(POINTS[:45], HEIGHTS[:45]), epochs=2)["loss"]
        found["step"] = run.step
        found["partial"] = [row["eval_loss"] for row in run.history if "eval_loss" in row]
        found["evaluated"] = [run.evaluate()["loss"], run.evaluate(data[1])["loss"]]
        found["predicted"] = np.concatenate([run.predict(POINTS[:45]), run.predict(split="eval")]).tolist()
        run.save(extra={"a": 1})
        run.train(steps=2)
        run.restore("latest")
        found["restored"] = [run.step, run.extra, run.evaluate()["loss"]]
        if other:
            print("found", json.dumps(found), flush=True)
            worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
            if other == "apart":
                run.model.layers[-1].bias.assign([1.0 + worker])
                run.evaluate()
            run.train(steps=1 + worker)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("strategy", "run_dir", "progress", "how"):
        parser.add_argument(f"--{name}")
    given = parser.parse_args()
    if given.how == "look":
        print("found", json.dumps(look(given.strategy, given.run_dir)), flush=True)
    elif given.how == "several":
        print("found", json.dumps(several(given.strategy, given.run_dir)), flush=True)
    elif given.how == "own":
        print("found", json.dumps(own(given.strategy, given.run_dir)), flush=True)
    elif given.how == "fails":
        asked = {"input": "digits", "train_steps": 1, "jit": "off", "strategy": given.strategy}
        crankshaft.run(Failing, run_dir=given.run_dir, **asked)
    elif given.how == "term":
        term(given.strategy, given.run_dir)
    else:
        main(given.strategy, given.run_dir, given.how)
