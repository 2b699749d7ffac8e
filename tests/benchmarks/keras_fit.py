"""Crankshaft beside Keras fit on the same work: a script, not a test. Each measurement is a process of its own.

The peers run in turn (A B C A B C ...), so that a machine that drifts does not decide, and the table has medians. Run
it from the repository: `.venv/bin/python tests/benchmarks/keras_fit.py --json=keras_fit.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# From the repository, where commands are run, so that they can be copied to another machine.
PYTHON = os.path.relpath(sys.executable, ROOT) if sys.executable.startswith(f"{ROOT}{os.sep}") else sys.executable
CRANKSHAFT = (PYTHON, "-m", "launch.train")
BATCH_SIZE = 64
EXAMPLES = 60_032  # as many as MNIST has, made a multiple of the batch
EVAL_EXAMPLES = 4_096
STEPS_PER_EXECUTION = 50
CLOSE = 0.85  # of fit's two settings, the slower one is measured again if it has this share of the faster one's rate
MEASUREMENT_TIMEOUT_SECONDS = 600

# What changes how fast a peer is: no peer gets these variables, so that each runs as it comes.
TUNING = ("GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "OMP_", "ONEDNN_", "TF_", "XLA_")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, as Keras layers (`units` of the dense ones; None is the reference CNN) and as Crankshaft's flags."""

    title: str
    flags: tuple[str, ...]
    units: tuple[int, ...] | None
    precisions: tuple[str, ...] = ("float32",)


WORKLOADS = {
    "mlp": Workload("mlp 784-128-10", ("--model=mlp", "--model_arg=hidden_units=128"), (128,)),
    "wide": Workload("mlp 784-2048-2048-10", ("--model=mlp", "--model_arg=hidden_units=2048,2048"), (2048, 2048)),
    "cnn": Workload("reference CNN", ("--model=cnn",), None, ("float32", "bfloat16")),
}

# Fit as people write it, and with many steps in one call, without XLA and with it.
KERAS = {
    "fit": {},
    "fit_best_jit_off": {"steps_per_execution": STEPS_PER_EXECUTION, "jit_compile": False},
    "fit_best_jit_on": {"steps_per_execution": STEPS_PER_EXECUTION, "jit_compile": True},
}


# -- Keras, in a process of its own -----------------------------------------------------------------------------------


def keras_model(workload: Workload):
    import tensorflow as tf

    layers = tf.keras.layers
    if workload.units:
        body = [layers.Flatten(), *[layers.Dense(units, activation="relu") for units in workload.units]]
    else:
        body = [
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ]
    return tf.keras.Sequential([layers.Input((28, 28, 1)), *body, layers.Dense(10)])


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
    sys.path.insert(0, str(ROOT))
    import tensorflow as tf

    from input import synthetic

    data = synthetic.load(None, 0, examples=EXAMPLES, eval_examples=EVAL_EXAMPLES)
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


def run_process(command: list[str], result_path: Path) -> dict:
    """Runs one peer to its end and reads the result that it wrote."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(TUNING)}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=MEASUREMENT_TIMEOUT_SECONDS
    )
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return json.loads(result_path.read_text(encoding="utf-8"))


@dataclasses.dataclass
class Race:
    """One workload's peers and what has been measured of each: name to a list, one entry a round."""

    name: str
    seconds: float
    quality_steps: int
    measured: dict[str, list[dict]] = dataclasses.field(default_factory=dict)
    commands: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    def rates(self, peer: str) -> list[float]:
        return [measurement["steps_per_sec"] for measurement in self.measured.get(peer, [])]

    def rate(self, peer: str) -> float:
        return statistics.median(self.rates(peer))

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
                self.measure(peer, self.keras_command(peer))
        for precision in self.workload.precisions:
            self.measure(f"crankshaft_{precision}", self.crankshaft_command(precision))

    def measure(self, peer: str, command: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            started, load_before = time.perf_counter(), os.getloadavg()[0]
            result = run_process([*command, f"--result_json={path}"], path)
            if "accuracy" not in result:
                result |= self.crankshaft_quality(peer, Path(folder))
        self.commands[peer] = shlex.join(command)
        self.measured.setdefault(peer, []).append({**result, "load_before": load_before})
        print(
            f"{self.name:<5} {peer:<20} {result['steps_per_sec']:9.1f} steps/s  "
            f"(load before {load_before:.2f}, took {time.perf_counter() - started:.0f} s)",
            file=sys.stderr,
        )

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
        data = [f"--input_arg=examples={EXAMPLES}", f"--input_arg=eval_examples={EVAL_EXAMPLES}"]
        flags = [*self.workload.flags, "--input=synthetic", *data, f"--global_batch_size={BATCH_SIZE}"]
        return [*CRANKSHAFT, *flags, f"--precision={precision}", "--progress=off"]

    def crankshaft_quality(self, peer: str, folder: Path) -> dict:
        """Loss and accuracy after `quality_steps`: a run of its own, and the same each time, so made once."""
        if peer in self.measured:
            return {name: self.measured[peer][0][name] for name in ("loss", "accuracy")}
        path = folder / "quality.json"
        steps = ["--mode=train_and_eval", f"--train_steps={self.quality_steps}", f"--run_dir={folder / 'run'}"]
        flags = self.crankshaft_flags(peer.removeprefix("crankshaft_"))
        result = run_process([*flags, *steps, f"--result_json={path}"], path)
        return {name: result["eval"][name] for name in ("loss", "accuracy")}


# -- The report -------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speed_rows(race: Race) -> list[list[str]]:
    def cell(peer):
        rates = race.rates(peer)
        return f"{race.rate(peer):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"

    best = race.best_keras()
    xla = "with XLA" if best.endswith("on") else "without XLA"
    rows = []
    for precision in race.workload.precisions:
        ours = f"crankshaft_{precision}"
        ratios = [f"**{race.rate(ours) / race.rate(peer):.2f}x**" for peer in ("fit", best)]
        title = race.workload.title + ("" if precision == "float32" else f", {precision} (over their float32)")
        rows.append([title, cell("fit"), f"{cell(best)} {xla}", cell(ours), *ratios])
    return rows


def quality_rows(race: Race) -> list[list[str]]:
    firsts = {peer: measurements[0] for peer, measurements in race.measured.items()}
    return [[race.workload.title, peer, f"{r['loss']:.4f}", f"{r['accuracy']:.2%}"] for peer, r in firsts.items()]


def report(races: list[Race], about: dict) -> str:
    speed = table(
        [
            "steps/s: median (least–most)",
            "Keras fit",
            "fit at its best",
            "Crankshaft",
            "against fit",
            "against its best",
        ],
        [row for race in races for row in speed_rows(race)],
    )
    quality = table(
        [f"after {about['quality_steps']} steps", "peer", "evaluation loss", "accuracy"],
        [row for race in races for row in quality_rows(race)],
    )
    commands = "\n".join(command for race in races for command in race.commands.values())
    return "\n\n".join(
        (
            f"{about['date']}, {about['cpu']}, {about['usable_cores']:g} cores, load before {about['load_before']}; "
            + ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version),
            f"Batch {BATCH_SIZE} of 28x28x1 float32 in memory, Adam; rounds in turn: {about['rounds']}, "
            f"{about['seconds']:g} s a measurement, compilation apart. "
            f"Fit at its best: steps_per_execution={STEPS_PER_EXECUTION} and the faster of XLA and not.",
            speed,
            quality,
            f"```\n{about['command']}\n\n# each measurement, in a process of its own:\n{commands}\n```",
        )
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each peer (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="steady state of each measurement (%(default)s)")
    parser.add_argument("--quality_steps", type=int, default=100, help="before loss and accuracy are compared")
    parser.add_argument("--json", help="write the figures here too")
    # What this script calls itself with, for one measurement of fit.
    parser.add_argument("--keras", choices=KERAS, help=argparse.SUPPRESS)
    parser.add_argument("--result_json", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads.split(",")
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"--workloads={','.join(sorted(unknown))} is unknown; use some of {', '.join(WORKLOADS)}")
    if arguments.quality_steps % STEPS_PER_EXECUTION or arguments.quality_steps < 1:
        parser.error(f"--quality_steps={arguments.quality_steps} is no multiple of {STEPS_PER_EXECUTION}; use 100")
    if arguments.rounds < 1:
        parser.error(f"--rounds={arguments.rounds} measures nothing; use 1 or more")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.keras:
        workload = WORKLOADS[arguments.workloads[0]]
        result = run_keras(workload, KERAS[arguments.keras], arguments.seconds, arguments.quality_steps)
        Path(arguments.result_json).write_text(json.dumps(result), encoding="utf-8")
        return
    date = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    load_before = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    races = [Race(name, arguments.seconds, arguments.quality_steps) for name in arguments.workloads]
    for race in races:
        for _ in range(arguments.rounds):
            race.run_round()
    environment = races[0].measured["crankshaft_float32"][0]["environment"]
    about = {
        "date": date,
        "command": shlex.join([".venv/bin/python", *sys.argv]),
        "load_before": load_before,
        **{name: getattr(arguments, name) for name in ("rounds", "seconds", "quality_steps")},
        **{name: environment[name] for name in ("cpu", "usable_cores", "versions")},
    }
    print(report(races, about))
    if arguments.json:
        measured = {race.name: race.measured for race in races}
        Path(arguments.json).write_text(json.dumps({**about, "measured": measured}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
