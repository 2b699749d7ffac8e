"""Reads the tasks of a run from the environment that Slurm's `srun` gives each of them.

Each variable is checked, and its names are counted, before any is expanded.

`tf.distribute.cluster_resolver.SlurmClusterResolver` reads the same, but needs TensorFlow's import, which waits for the
peers here, calls `scontrol`, and gives all jobs the port 8888 (tensorflow#36094), so that two cannot share a node.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping

from ...runner.failures import UsageError
from ...runner.host.tasks import MOST_TASKS, Tasks

# Ports that no job has reserved, below those that Linux gives to callers (32768, ip_local_port_range): each step of a
# job has a slot of them, by a hash of what distinguishes it.
_FIRST_PORT, _PORTS = 10240, 22528
_MOST_IN_SLOT = 128  # unless a node has more tasks
_NUMBER = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")
_PART = r"(?:[\w.-]|\[[^\[\]]*\])+"  # of a list of nodes: a name, with the numbers of several in brackets
_NODES = re.compile(f"{_PART}(?:,{_PART})*", re.ASCII)


def tasks(environment: Mapping[str, str]) -> Tasks | None:
    """Reads the tasks of the job's step that this process is one of; None outside of a step.

    https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES". A task's port is the node's `--resv-ports` by
    its number there, if the step has some, else one of a slot that is a hash of cluster, job, step and number of
    requeues: a job that is requeued since a port was taken has others.

    Raises:
      UsageError: a variable has another form, or has a distribution of tasks that no list of addresses can express.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    values = [environment.get(name) for name in names]
    if None in values:
        return None  # in a batch script, salloc's shell, or not in Slurm at all
    node_list, per_node, rank, job, step = (str(value) for value in values)
    for name, value in zip(names[2:], (rank, job, step), strict=True):
        if not _NUMBER.fullmatch(value):
            raise UsageError(f"{name}={value!r} is not a number; start the tasks by srun")
    nodes, counts = expand_nodes(node_list), expand_counts(per_node)
    if len(nodes) != len(counts):
        raise UsageError(
            f"SLURM_STEP_NODELIST={node_list} has {len(nodes)} nodes, and SLURM_STEP_TASKS_PER_NODE={per_node} "
            f"{len(counts)}; start the tasks by srun"
        )
    nodes_of_ranks = _nodes_of_ranks(counts, environment, int(rank))
    cluster, restarts = (environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"))
    job_id = f"{cluster}/{job}.{step}/{restarts}"
    reserved, most = environment.get("SLURM_STEP_RESV_PORTS", ""), max(counts)
    if reserved:
        ports = _reserved(reserved, most)
        addresses = [f"{nodes[node]}:{ports[local]}" for node, local in nodes_of_ranks]
    else:
        # Of other nodes too if there are enough: several nodes may be one host's.
        size = max(most, min(most * len(nodes), _MOST_IN_SLOT))
        first = _FIRST_PORT + zlib.crc32(job_id.encode()) % max(1, _PORTS // size) * size
        addresses = [f"{nodes[node]}:{first + (node * most + local) % size}" for node, local in nodes_of_ranks]
    return Tasks(f"Slurm's job {job}.{step}", tuple(addresses), int(rank), job_id)


def _nodes_of_ranks(counts: list[int], environment: Mapping[str, str], rank: int) -> list[tuple[int, int]]:
    """Returns (node, number on it) of each task, by the distribution that agrees with this task's own variables."""
    node_id, local_id = (environment.get(name, "") for name in ("SLURM_NODEID", "SLURM_LOCALID"))
    block = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    cyclic = sorted(block, key=lambda pair: pair[::-1])
    distribution = environment.get("SLURM_DISTRIBUTION", "")
    # Slurm's variables do not have the tasks of other nodes: this task's own numbers decide between the two.
    for nodes_of_ranks in (cyclic, block) if distribution.startswith("cyclic") else (block, cyclic):
        if rank < len(nodes_of_ranks) and tuple(map(str, nodes_of_ranks[rank])) == (node_id, local_id):
            return nodes_of_ranks
    raise UsageError(
        f"SLURM_PROCID={rank} is task {local_id or '?'} of node {node_id or '?'}, which neither a block nor a cyclic "
        "distribution has there; use srun --distribution=block"
    )


def _reserved(text: str, needed: int) -> list[int]:
    """Returns the ports that Slurm has reserved, for a node's tasks by their numbers there. Raises `UsageError`."""
    ranges = [_whole_range(part, "SLURM_STEP_RESV_PORTS", text) for part in text.split(",")]
    if any(ports.stop > 1 << 16 for ports in ranges):
        raise UsageError(f"SLURM_STEP_RESV_PORTS={text!r} has a port above 65535; start the tasks by srun")
    ports = [*itertools.islice(itertools.chain.from_iterable(ranges), needed)]
    if len(ports) < needed:
        raise UsageError(
            f"SLURM_STEP_RESV_PORTS={text} has {len(ports)} ports for up to {needed} tasks of a node; "
            f"use srun --resv-ports={needed}"
        )
    return ports


def _whole_range(text: str, name: str, value: str) -> range:
    match = _RANGE.fullmatch(text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"{name}={value!r} is not a list of numbers and ranges")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def expand_nodes(text: str) -> list[str]:
    """Expands a list of nodes in Slurm's form, e.g. `gpu[01-03,7],login`, to names. Raises `UsageError`."""
    if not _NODES.fullmatch(text):
        raise UsageError(f"SLURM_STEP_NODELIST={text!r} is not a list of nodes such as gpu[01-03,7],login")
    names: list[str] = []
    for part in re.findall(_PART, text):
        names += map("".join, itertools.product(*_choices(part, text, MOST_TASKS - len(names))))
    return names


def _choices(part: str, text: str, most: int) -> list[list[str]]:
    """Returns the texts of each piece of a part of a list; the last piece varies fastest.

    Raises:
      UsageError: a bracket has another form, or there are more names than `most`.
    """
    choices, size = [], 1
    for plain, brackets in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
        numbers = [] if plain else brackets.split(",")
        ranges = [_whole_range(part, "SLURM_STEP_NODELIST", text) for part in numbers]
        size *= 1 if plain else sum(map(len, ranges))
        if size > most:
            raise UsageError(
                f"SLURM_STEP_NODELIST={text!r} has more than {MOST_TASKS:,} nodes; start the tasks by srun"
            )
        widths = [len(part.partition("-")[0]) for part in numbers]
        pairs = zip(ranges, widths, strict=True)
        choices.append([plain] if plain else [f"{n:0{width}d}" for numbers, width in pairs for n in numbers])
    return choices


def expand_counts(text: str) -> list[int]:
    """Expands a list of counts in Slurm's form, e.g. `2(x3),1`, to one per node. Raises `UsageError`."""
    counts: list[int] = []
    tasks = 0
    for part in text.split(","):
        if not (match := _COUNT.fullmatch(part)):
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts such as 2(x3),1")
        tasks += int(match[1]) * int(match[2] or 1)
        if tasks > MOST_TASKS:
            raise UsageError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} has more than {MOST_TASKS:,} tasks; start the tasks by srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
