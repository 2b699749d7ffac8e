"""Write any input's examples into shards that are read by their indices.

For example:

  crankshaft prepare --input=digits --output_dir=shards/digits
  crankshaft prepare --input=csv --data_dir=logs/*.csv --output_dir=shards/logs
  crankshaft train --model=mlp --input=tfrecord --data_dir=shards/digits

Examples keep their order, types and values, so a run on the shards trains as one on the input itself does. A call that
was interrupted is taken up again by the same call: shards that are whole are kept.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

from ..engine.machine import cpus
from ..input.records.shard_writing import ShardRequest
from . import errors, explanations
from .command_line import given, help, own_files, own_flags, registry, rules
from .errors import UsageError
from .host import process

FLAGS = flags.FlagValues()  # apart from crankshaft train's


def _define_flags() -> None:
    own: dict[str, Any] = {"flag_values": FLAGS}
    module: dict[str, Any] = {**rules.MODULE, **own}
    rules.text("input", None, "What is written: an input, or a .py file with a function load.", **module)
    rules.arguments("input_arg", [], "NAME=VALUE for the input. Repeatable.", **own)
    rules.files("data_dir", None, "Where the input's files are, as crankshaft train takes it.", **own)
    rules.files("eval_data_dir", None, "Where those to evaluate on are, likewise.", **own)
    rules.whole("seed", 0, "The seed that the input is given, as crankshaft train gives it.", lower=0, **own)
    rules.path("output_dir", None, "Where the shards are written: in its folders train and eval.", **own)
    rules.whole("shards", 16, "Of the training data; those to evaluate on have as many examples each.", lower=1, **own)
    flags.DEFINE_enum("format", "tfrecord", ["tfrecord", "array_record"], "Of the shards.", flag_values=FLAGS)
    rules.whole("processes", None, "Processes that write shards; one a core if not given.", lower=1, upper=1000, **own)


_define_flags()


def main(argv: list[str]) -> None:
    """Writes what the command line asks for, and exits the process."""
    process.prepare_streams()
    try:
        own_flags.read(argv, FLAGS, help.doc_of(__name__), "crankshaft prepare --input=... --output_dir=... [flags]")
        if not FLAGS.output_dir:
            raise UsageError("--output_dir is not given; name a folder for the shards")
        code = _run()
    except OSError as error:
        line = f"{explanations.of_system(error)}; what is whole is kept, the same call goes on"
        code = errors.fail(errors.EXIT_FAILED, line)
    except Exception as error:  # the border of the program
        code = errors.fail(*explanations.explain(error, has_debug=False))
    except KeyboardInterrupt:
        code = errors.fail(errors.EXIT_INTERRUPTED, "interrupted; what is whole is kept, the same call goes on")
    sys.exit(code)


def _run() -> int:
    entry = registry.find("input", FLAGS.input)
    arguments: Mapping[str, Any] = registry.parse_arguments("input_arg", FLAGS.input_arg, entry)
    if FLAGS.eval_data_dir and not entry.reads_eval_data:
        raise UsageError(f"--eval_data_dir is not read by --input={entry.name}; leave it out")
    process.prepare(tunes_allocator=False)
    with process.without_start_up_noise(quiet=False):
        from .run import shards

    request = ShardRequest(
        input=own_files.absolute(FLAGS.input),
        arguments={**arguments, **({"eval_data_dir": FLAGS.eval_data_dir or ""} if entry.reads_eval_data else {})},
        data_dir=FLAGS.data_dir,
        seed=FLAGS.seed,
        output_dir=FLAGS.output_dir,
        shards=FLAGS.shards,
        format=FLAGS.format,
    )
    most = FLAGS.processes or max(1, int(cpus.usable_cores()))
    summary = shards.prepare(request, most, lambda line: print(f"[prepare] {line}", flush=True))
    words = shlex.join(given.words({"input": FLAGS.format, "data_dir": FLAGS.output_dir}))
    print(f"[prepare] {summary}; train on it by crankshaft train {words}", flush=True)
    return 0
