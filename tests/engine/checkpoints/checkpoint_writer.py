"""Run by test_checkpoints: imports TensorFlow once, then forks a process for each line it reads, which only saves.

Each such process restores first, says what it found on one line, and then writes checkpoints of a state of 50 MB in
which every variable equals the step, until it is killed. argv: the directory of the checkpoints, how many of them stay.
"""

import os
import sys

import tensorflow as tf

from crankshaft.engine.checkpoints import Checkpoints

VARIABLES = 5
LENGTH = 2_500_000


def write_for_ever(directory: str, keep: int) -> None:
    variables = [tf.Variable(tf.zeros([LENGTH])) for _ in range(VARIABLES)]
    step = tf.Variable(0, dtype=tf.int64)
    state = tf.train.Checkpoint(variables=variables, step=step)
    checkpoints = Checkpoints(directory, state, keep=keep, about={})
    checkpoints.clean()
    manifest = checkpoints.restore()
    first = manifest.step if manifest else 0
    whole = all(bool(tf.reduce_all(variable == float(first))) for variable in variables)
    whole = whole and int(step) == first and (manifest is None or manifest.host_state == {"best": first})
    print("restored", os.getpid(), first, whole, flush=True)
    for number in range(first + 1, first + 10_000):
        for variable in variables:
            variable.assign(tf.fill([LENGTH], float(number)))
        step.assign(number)
        checkpoints.save(number, {"best": number})


def main(directory: str, keep: int) -> None:
    for _ in sys.stdin:
        process = os.fork()  # TensorFlow has run nothing yet, so has no threads to lose
        if process == 0:
            try:
                write_for_ever(directory, keep)
            finally:
                os._exit(1)
        os.waitpid(process, 0)
        print("ended", flush=True)


main(sys.argv[1], int(sys.argv[2]))
