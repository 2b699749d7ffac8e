"""Trains with a fixed seed in one checkout, and compares all bits of all variables with those of another.

A change that should not alter results is shown by it, on the commits before and after:

    git worktree add ../before/crankshaft $(git merge-base HEAD origin/main)
    python -m benchmarks.bits --checkout=../before/crankshaft --out=before.json
    python -m benchmarks.bits --out=after.json
    python -m benchmarks.bits --compare before.json after.json

The last prints a line for each case that differs, and ends with 1 if there is one. Both runs take place on one machine:
bits depend on the CPU, TensorFlow and the number of threads, so all are pinned to the same two cores. Variables are
read from each run's last checkpoint, by their names in it: one that is renamed counts as different, since runs begun
before could not be resumed. Only commands and flags of `crankshaft` are used, so that any two commits can be compared.
`--only=REGEX` takes some of the cases, `--list` names them with their commands. `--digests` makes one step of each,
and compares the digests of the traced steps (`engine.checks.digests`) instead of bits: in seconds, of what has no
names, on any machine.

`--begun-by=COMMIT` (`make upgrades`) shows what an upgrade does to runs: each case is begun by that commit, stopped in
mid-epoch, and continued by this checkout. It ends with the bits of the commit's own run, without a stop or, if these
are others, continued by itself; or the new version refuses it in a line. Other bits without one fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CORES = 2
TIMEOUT_SECONDS = 540
STOPPED_AT = 55  # of 100 steps: within an epoch
_LAST_LINES = 5

MODELS = {
    "mlp_dropout": "--model=mlp --model_arg=dropout=0.2 --input=digits",
    "cnn": "--model=cnn --input=digits",
    "cnn_batch_norm": "--model=cnn --model_arg=batch_norm=true --input=digits",
    "wide_deep": "--model=wide_deep --input=synthetic_clicks --input_arg=examples=20000 --input_arg=eval_examples=2000",
    "resnet20": "--model=resnet --input=digits",
    "language_model": "--model=transformer_lm --model_arg=layers=1 --model_arg=width=16 --model_arg=heads=2 "
    "--input=text --input_arg=context=16 --global_batch_size=8",
}
# XLA on a CPU has no kernels for tables' updates, and slow ones for convolutions, so batches are small.
XLA = {
    "mlp_dropout": "",
    "cnn": "--global_batch_size=16",
    "cnn_batch_norm": "--global_batch_size=16",
    "resnet20": "--global_batch_size=8",
}
# Ways through the engine that the flags above do not take, on one device.
WAYS = {
    "streamed": ("mlp_dropout", "--resident_data_mb=0"),
    "with_options": (
        "cnn_batch_norm",
        "--precision=bfloat16 --accumulate_steps=2 --clip_norm=1 --ema_decay=0.9 --weight_decay=0.01 --warmup_steps=10",
    ),
}
# With dropout (each replica's own masks) and with batch normalisation (statistics that are averaged over replicas).
ON_SEVERAL = ("mlp_dropout", "cnn_batch_norm")
# Strategies by name: the command, and flags. Leases of a given length, as the time that they take is chance.
STRATEGIES = {
    "mirrored": ("train", "--strategy=mirrored --num_virtual_devices=2"),
    "local_sgd": ("train", "--strategy=mirrored --num_virtual_devices=2 --sync_every_steps=4"),
    "workers": ("local --workers=2 --", ""),
    "server": ("local --workers=1 --ps=1 --", "--steps_per_loop=10"),
    "mesh": ("train", "--strategy=mirrored --num_virtual_devices=4 --mesh=data:2,model:2"),
    "shard_optimizer": ("train", "--strategy=mirrored --num_virtual_devices=2 --shard_optimizer --clip_norm=1"),
}
# Strategies that train others than `ON_SEVERAL`.
ON_STRATEGY = {"server": (*ON_SEVERAL, "wide_deep"), "mesh": ("language_model",), "shard_optimizer": ("mlp_dropout",)}
# Data of a script's own: what reads by indices, and what only gives the next batch.
FORMS = str(ROOT / "benchmarks" / "forms.py")
ON_FORMS = {
    "source": ("one_device", "shuffled_in_windows", "mirrored", "workers", "server"),
    "stream": ("one_device", "mirrored", "workers", "server"),
    # Each change of a number adds a case: 1.0.0 does not round these weights twice, and weighs this step's gradients.
    "class_weight": ("one_device",),
    "own_step": ("mirrored",),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: its name, and the command after `python`, without a folder."""

    name: str
    command: str


def cases() -> list[Case]:
    rows = [(f"{model}/one_device", "train", f"{flags} --jit=off") for model, flags in MODELS.items()]
    rows += [(f"{model}/xla", "train", f"{MODELS[model]} {more} --jit=on") for model, more in XLA.items()]
    rows += [(f"{model}/{name}", "train", f"{MODELS[model]} {more} --jit=off") for name, (model, more) in WAYS.items()]
    for strategy, (command, more) in STRATEGIES.items():
        models = ON_STRATEGY.get(strategy, ON_SEVERAL)
        rows += [(f"{model}/{strategy}", command, f"{MODELS[model]} {more} --jit=off") for model in models]
    rows = [(name, f"-m crankshaft {command}", flags) for name, command, flags in rows]
    for form, ways in ON_FORMS.items():
        for way in ways:
            command, more = STRATEGIES.get(way, ("train", "--shuffle_window=4" if way.startswith("shuffled") else ""))
            start = FORMS if command == "train" else f"-m crankshaft {command} {FORMS}"
            rows.append((f"{form}/{way}", start, f"--form={form} {more} --jit=off"))
    rest = "--train_steps=100 --seed=0 --progress=plain"
    return [Case(name, " ".join(f"{command} {flags} {rest}".split())) for name, command, flags in rows]


# -- Training ---------------------------------------------------------------------------------------------------------


def train(case: Case, folder: Path, run_dir: Path, *flags: str) -> str | None:
    """Runs the case on the package that lies in `folder`, and gives its last lines if it failed."""
    command = [sys.executable, *shlex.split(case.command), f"--run_dir={run_dir}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it has not ended within {TIMEOUT_SECONDS} s"
    return "\n".join(done.stdout.splitlines()[-_LAST_LINES:]) if done.returncode else None


def digests(run_dir: Path) -> dict[str, str]:
    """SHA-256 of each variable's dtype, shape and bytes in the run's last checkpoint, by its name there."""
    return {
        name: hashlib.sha256(f"{value.dtype} {value.shape}".encode() + value.tobytes()).hexdigest()
        for name, value in saved(run_dir).items()
    }


def saved(run_dir: Path) -> dict[str, np.ndarray]:
    """Each variable in the run's last checkpoint, by its name there."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(run_dir / "checkpoints")))
    return {
        name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): reader.get_tensor(name)
        for name, dtype in sorted(reader.get_variable_to_dtype_map().items())
        if dtype != tf.string  # the graph of objects is not a variable
    }


def evaluated(run_dir: Path) -> dict[str, str]:
    """What the run's last evaluation gave, to the last digit."""
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return {f"result/{name}": repr(value) for name, value in sorted((result.get("eval") or {}).items())}


def step_digests(run_dir: Path) -> dict[str, str]:
    """The digests of the training steps that the run has traced."""
    (path,) = (run_dir / "checkpoints").glob("*.manifest.json")
    steps = json.loads(path.read_text(encoding="utf-8"))["host_state"]["state"]["steps"]["digests"]
    return {f"step/{number}": digest for number, digest in enumerate(steps)}


def run_cases(checkout: Path, wanted: list[Case], by_digests: bool) -> dict[str, dict]:
    """Each case by name: its command and its variables, or its error. One after the other."""
    one_step = ["--train_steps=1", "--mode=train"] if by_digests else []
    results = {}
    with tempfile.TemporaryDirectory(prefix="crankshaft-bits-") as folder:
        package = Path(folder, "package")
        package.mkdir()
        (package / "crankshaft").symlink_to(checkout)  # a package is found by its folder's name
        for case in wanted:
            run_dir = Path(folder, case.name)
            error = train(case, package, run_dir, *one_step)
            if error is None:
                variables = step_digests(run_dir) if by_digests else digests(run_dir) | evaluated(run_dir)
                whole = hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).hexdigest()
                print(f"{case.name:<28} {whole[:16]}  {len(variables)} values", flush=True)
                results[case.name] = {"command": case.command, "values": variables}
            else:
                print(f"{case.name:<28} failed: {error}", flush=True)
                results[case.name] = {"command": case.command, "error": error}
    return results


def upgrades(commit: str, wanted: list[Case]) -> int:
    """Continues runs that a commit began; prints a line for each case, and gives the exit status."""
    left = 0
    with tempfile.TemporaryDirectory(prefix="crankshaft-upgrades-") as folder:
        old, new = Path(folder, "old"), Path(folder, "new")
        (old / "crankshaft").mkdir(parents=True)
        new.mkdir()
        (new / "crankshaft").symlink_to(ROOT)
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
        if archive.returncode:
            raise SystemExit(f"error: {archive.stderr.decode().strip()}; give a commit, or fetch all of the history")
        subprocess.run(["tar", "-x", "-C", str(old / "crankshaft")], input=archive.stdout, check=True)
        for case in wanted:
            whole, begun, own = (Path(folder, case.name, name) for name in ("whole", "begun", "own"))
            if failure := train(case, old, whole) or train(case, old, begun, f"--train_steps={STOPPED_AT}"):
                found = f"not in {commit}: {failure.splitlines()[-1]}"
            elif shutil.copytree(begun, own) and (refusal := train(case, new, begun)):
                found = f"refused: {refusal.splitlines()[-1]}"
            elif digests(whole) == digests(begun):
                found = "the same bits"
            elif not train(case, old, own) and digests(own) == digests(begun):
                found = "the bits of a run that the commit continues, which are not those of its run without a stop"
            else:
                found, left = "OTHER BITS, and no line", left + 1
            print(f"{case.name:<28} {found}", flush=True)
    return 1 if left else 0


def pin() -> list[int]:
    """Has this process and its children use two cores, the same ones each time."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise SystemExit(f"error: {len(cores)} core may be used, and the cases need {CORES}; use taskset")
    os.sched_setaffinity(0, cores)
    return cores


def cpu_model() -> str:
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match.group(1) if match else platform.machine()


def commit_of(checkout: Path) -> str:
    """The commit, with a plus sign where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")


# -- Comparing --------------------------------------------------------------------------------------------------------


def difference(before: dict, after: dict) -> str | None:
    """How one case's values differ, in a line."""
    for when, case in (("before", before), ("after", after)):
        if "error" in case:
            return f"failed {when}: {case['error'].splitlines()[-1] if case['error'] else 'without a message'}"
    old, new = before["values"], after["values"]
    differing = [name for name in old if name in new and old[name] != new[name]]
    gone, added = [name for name in old if name not in new], [name for name in new if name not in old]
    differences = []
    if differing:
        differences.append(f"{len(differing)} of {len(old)} differ: {_some(differing)}")
    if (gone or added) and sorted(old.values()) == sorted(new.values()):
        differences.append(f"same bits, {len(gone)} under other names: {_some(gone)} -> {_some(added)}")
    else:
        differences += [
            f"{len(names)} {title}: {_some(names)}" for names, title in ((gone, "gone"), (added, "added")) if names
        ]
    return "; ".join(differences) or None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def compare(paths: list[str]) -> int:
    """Prints a line for each case that differs; gives the exit status. A case that one side lacks is not compared."""
    before, after = (json.loads(Path(path).read_text(encoding="utf-8")) for path in paths)
    for about in ("cpu", "python", "tensorflow"):
        if before[about] != after[about]:
            print(f"not comparable: {about} was {before[about]} and is {after[about]}")
            return 1
    shared = [name for name in before["cases"] if name in after["cases"]]
    compared = {name: difference(before["cases"][name], after["cases"][name]) for name in shared}
    for name, differences in compared.items():
        if differences:
            print(f"{name}: {differences}")
    alike = sum(differences is None for differences in compared.values())
    left_out = len(before["cases"].keys() ^ after["cases"].keys())
    print(
        f"{alike} of {len(shared)} cases have the same bits in {before['commit'][:9]} and {after['commit'][:9]}"
        + (f"; {left_out} are in one file alone" if left_out else "")
    )
    return 0 if shared and alike == len(shared) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose package to run [this one]")
    parser.add_argument("--out", type=Path, help="the JSON file that is written")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name has it")
    parser.add_argument("--list", action="store_true", help="name the cases, and do not run them")
    parser.add_argument("--digests", action="store_true", help="compare traced steps, not bits")
    parser.add_argument("--begun-by", metavar="COMMIT", help="continue runs that this commit began")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="two such files")
    args = parser.parse_args()
    if args.compare:
        return compare(args.compare)
    wanted = [case for case in cases() if re.search(args.only, case.name)]
    if args.list or not wanted:
        print("\n".join(f"{case.name:<28} python {case.command}" for case in wanted or cases()))
        return 0 if wanted else parser.error(f"--only={args.only} is in none of these cases' names")
    checkout = args.checkout.resolve()
    if not (checkout / "engine").is_dir():
        parser.error(f"--checkout={args.checkout} is not a checkout of crankshaft: it has no folder engine")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's words on how it starts
    commit, cores = commit_of(checkout), pin()
    if args.begun_by:
        return upgrades(args.begun_by, wanted)
    results = run_cases(checkout, wanted, args.digests)
    if args.out:
        import tensorflow as tf

        about = {"cpu": cpu_model(), "cores": cores, "python": platform.python_version(), "tensorflow": tf.__version__}
        text = json.dumps({"commit": commit, **about, "cases": results}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")
    return 1 if any("error" in case for case in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
