"""Crankshaft beside Keras fit on the same work: a script, not a test. Each measurement is a process of its own.

The peers run in turn (A B C A B C ...), so that a machine that drifts does not decide, and the table has medians. Run
it from the repository: `.venv/bin/python tests/benchmarks/keras_fit.py --json=keras_fit.json`.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from race import (
    BATCH_SIZE,
    INPUT_FLAGS,
    PYTHON,
    ROOT,
    WORKLOADS,
    Race,
    Workload,
    add_arguments,
    check_arguments,
    find_about,
    keras_model,
    load_data,
    quality_table,
    report,
    run_process,
    run_script,
    table,
    write_figures,
    write_result,
)

CRANKSHAFT = (PYTHON, "-m", "launch.train")
STEPS_PER_EXECUTION = 50
CLOSE = 0.85  # of fit's two settings, the slower one is measured again if it has this share of the faster one's rate
PRECISIONS = {"mlp": ("float32",), "wide": ("float32",), "cnn": ("float32", "bfloat16")}

# Fit as people write it, and with many steps in one call, without XLA and with it.
KERAS = {
    "fit": {},
    "fit_best_jit_off": {"steps_per_execution": STEPS_PER_EXECUTION, "jit_compile": False},
    "fit_best_jit_on": {"steps_per_execution": STEPS_PER_EXECUTION, "jit_compile": True},
}


# -- Keras, in a process of its own -----------------------------------------------------------------------------------


def stopwatch(seconds: float, stride: int):
    """A Keras callback that ends fit after `seconds` of steady state. `stride` is the steps between two calls of it.

    The first half second is warm-up. Ends of epochs that fall into the span count: they are part of what fit costs.
    """
    import tensorflow as tf

    class Stopwatch(tf.keras.callbacks.Callback):
        started = None
        steps = 0

        def on_train_begin(self, logs=None):
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            now = time.perf_counter()
            if self.started is None:
                self.started = now if now - self.begun >= 0.5 else None
                return
            self.steps += stride
            if now - self.started >= seconds:
                self.rate = self.steps / (now - self.started)
                self.model.stop_training = True

    return Stopwatch()


def run_keras(workload: Workload, settings: dict, seconds: float, quality_steps: int) -> dict:
    """One measurement of fit: trains `quality_steps`, which compiles, evaluates, then goes on and is timed."""
    import tensorflow as tf

    data = load_data()
    x, y = data.train
    tf.keras.utils.set_random_seed(0)
    model = keras_model(workload)
    model.compile(
        optimizer="adam",
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **settings,
    )
    few = quality_steps * BATCH_SIZE
    model.fit(x[:few], y[:few], batch_size=BATCH_SIZE)
    loss, accuracy = model.evaluate(*data.eval, batch_size=BATCH_SIZE, verbose=0)
    watch = stopwatch(seconds, settings.get("steps_per_execution", 1))
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=1_000_000, callbacks=[watch])
    return {"steps_per_sec": watch.rate, "loss": float(loss), "accuracy": float(accuracy)}


# -- The race ---------------------------------------------------------------------------------------------------------


class FitRace(Race):
    """Fit in its settings, and Crankshaft in its precisions."""

    def best_keras(self) -> str:
        """The faster of fit's two tuned settings."""
        return max((peer for peer in KERAS if peer != "fit"), key=self.rate)

    def run_round(self) -> None:
        """Measures each peer once, in turn."""
        for peer in KERAS:
            # A tuned setting that is out of the race is not run again: XLA takes a minute for a few CNN steps.
            hopeless = (
                peer != "fit" and peer in self.measured and self.rate(peer) < CLOSE * self.rate(self.best_keras())
            )
            if not hopeless:
                self.measure_command(peer, self.keras_command(peer))
        for precision in PRECISIONS[self.name]:
            self.measure_command(f"crankshaft_{precision}", self.crankshaft_command(precision))

    def measure_command(self, peer: str, command: list[str]) -> None:
        self.measure(peer, shlex.join(command), lambda folder: self.run(peer, command, folder))

    def run(self, peer: str, command: list[str], folder: Path) -> dict:
        path = folder / "result.json"
        result = run_process([*command, f"--result_json={path}"], path)
        if peer not in KERAS:
            result |= self.quality(peer, lambda: self.run_quality(peer, folder))
        return result

    def keras_command(self, peer: str) -> list[str]:
        options = [f"--keras={peer}", f"--workloads={self.name}"]
        options += [f"--seconds={self.seconds:g}", f"--quality_steps={self.quality_steps}"]
        return [PYTHON, str(Path(__file__).resolve().relative_to(ROOT)), *options]

    def crankshaft_command(self, precision: str) -> list[str]:
        peer = f"crankshaft_{precision}"
        # As many steps as take about the seconds that fit had: by the round before, or else by fit's own rate.
        rate = self.rate(peer if peer in self.measured else self.best_keras())
        steps = max(100, round(rate * self.seconds))
        return [*self.crankshaft_flags(precision), "--mode=benchmark", "--jit=auto", f"--benchmark_steps={steps}"]

    def crankshaft_flags(self, precision: str) -> list[str]:
        flags = [*self.workload.flags, *INPUT_FLAGS, f"--global_batch_size={BATCH_SIZE}"]
        return [*CRANKSHAFT, *flags, f"--precision={precision}", "--progress=off"]

    def run_quality(self, peer: str, folder: Path) -> dict:
        path = folder / "quality.json"
        steps = ["--mode=train_and_eval", f"--train_steps={self.quality_steps}", f"--run_dir={folder / 'run'}"]
        flags = self.crankshaft_flags(peer.removeprefix("crankshaft_"))
        return run_process([*flags, *steps, f"--result_json={path}"], path)


# -- The report -------------------------------------------------------------------------------------------------------


def speed_rows(race: FitRace) -> list[list[str]]:
    best = race.best_keras()
    xla = "with XLA" if best.endswith("on") else "without XLA"
    rows = []
    for precision in PRECISIONS[race.name]:
        ours = f"crankshaft_{precision}"
        ratios = [f"**{race.rate(ours) / race.rate(peer):.2f}x**" for peer in ("fit", best)]
        title = race.workload.title + ("" if precision == "float32" else f", {precision} (over their float32)")
        rows.append([title, race.cell("fit"), f"{race.cell(best)} {xla}", race.cell(ours), *ratios])
    return rows


def speed_table(races: list[FitRace]) -> str:
    peers = ["Keras fit", "fit at its best", "Crankshaft"]
    return table(
        ["steps/s: median (least–most)", *peers, "against fit", "against its best"],
        [row for race in races for row in speed_rows(race)],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    # What this script calls itself with, for one measurement of fit.
    parser.add_argument("--keras", choices=KERAS, help=argparse.SUPPRESS)
    parser.add_argument("--result_json", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    if arguments.quality_steps % STEPS_PER_EXECUTION or arguments.quality_steps < 1:
        parser.error(f"--quality_steps={arguments.quality_steps} is no multiple of {STEPS_PER_EXECUTION}; use 100")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.keras:
        workload = WORKLOADS[arguments.workloads[0]]
        result = run_keras(workload, KERAS[arguments.keras], arguments.seconds, arguments.quality_steps)
        write_result(arguments.result_json, result)
        return
    about = find_about(arguments)
    races = [FitRace(name, arguments.seconds, arguments.quality_steps) for name in arguments.workloads]
    for race in races:
        for _ in range(arguments.rounds):
            race.run_round()
    environment = races[0].measured["crankshaft_float32"][0]["environment"]
    about |= {name: environment[name] for name in ("cpu", "usable_cores", "versions")}
    note = (
        f"Batch {BATCH_SIZE} of 28x28x1 float32 in memory, Adam; rounds in turn: {about['rounds']}, "
        f"{about['seconds']:g} s a measurement, compilation apart. "
        f"Fit at its best: steps_per_execution={STEPS_PER_EXECUTION} and the faster of XLA and not."
    )
    print(report(races, about, note, speed_table(races), quality_table(races, arguments.quality_steps)))
    if arguments.json:
        write_figures(arguments.json, about, races)


if __name__ == "__main__":
    run_script(main)
