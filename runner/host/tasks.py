"""The tasks of a run, their addresses, and which of them this process is: the result of discovery."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence

from ...engine.errors import counted
from ..failures import UsageError
from .locks import LockedRunDir

SECRET = "CRANKSHAFT_JOB_SECRET"  # an environment variable, the same for all workers of a job and unknown to others
MARK = "CRANKSHAFT_SUPERVISOR"  # in the environment of each task that a supervisor has started
_SECRET_CHARACTERS = 16
MOST_TASKS = 1 << 16  # more are a mistake in a variable, which is not expanded


@dataclasses.dataclass(frozen=True)
class Tasks:
    """The tasks that one source names, without their kinds.

    Attributes:
      source: description of where the tasks were read, for people: "Slurm's job 7.0".
      addresses: "host:port" of each task.
      index: this process's task.
      job_id: what distinguishes the job from all others of its scheduler, where it has also chosen the ports; else "".

    Example:
      >>> Tasks("mine", ("host1:2222", "host2:2222"), index=0).addresses[0]
      'host1:2222'
    """

    source: str
    addresses: tuple[str, ...]
    index: int
    job_id: str = ""


# What reads the tasks that a scheduler has started, by a variable that it sets in each, in the order in which they are
# asked; of those that come with Crankshaft the module in `parts.clusters`, which has a function `tasks`.
SCHEDULERS: dict[str, Callable[[Mapping[str, str]], Tasks | None] | str] = {
    "SLURM_STEP_NODELIST": "slurm",
    "CRANKSHAFT_JOBS": "kubernetes",
}


def register(variable: str, tasks: Callable[[Mapping[str, str]], Tasks | None]) -> None:
    """Registers a scheduler of a script's own; before the script calls `crankshaft.main` or `run`.

    Args:
      variable: an environment variable that it sets in each task.
      tasks: gets the environment, and returns its `Tasks`; None outside of a job of several.

    Example:
      >>> register("MY_HOSTS", lambda x: Tasks("mine", tuple(x["MY_HOSTS"].split(",")), int(x["MY_INDEX"])))
      >>> del SCHEDULERS["MY_HOSTS"]
    """
    SCHEDULERS[variable] = tasks


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a run and which of them this process is.

    Attributes:
      addresses: (name, "host:port") of each task, in the order of TensorFlow's ids: the chief if there is one, then
        the workers. A name is "chief" or, for example, "worker 1".
      index: this task's index in `addresses`.
      secret: the job's, which authenticates the workers' datagrams; empty without one.
      source: description of where the tasks were read from, for people: "TF_CONFIG".
      job_id: see `Tasks`.
      bind: the address of this host at which this task's own sockets listen; empty: where the others know it.
      is_chosen: whether Crankshaft's supervisor chose the addresses, and can choose others.
      port_seconds: how long this task waits for its port, which it has had in an earlier attempt; 0 in the first.
      absent: (name, "host:port") of the job's workers that this attempt lacks.
      newcomers: the folder where workers at new addresses announce themselves, if this task can start again with them.
      lock: lock on the run_dir, if the parent of this task, the chief, has taken it.
    """

    addresses: tuple[tuple[str, str], ...]
    index: int
    secret: bytes = dataclasses.field(default=b"", repr=False)
    source: str = "TF_CONFIG"
    job_id: str = ""
    bind: str = ""
    is_chosen: bool = False
    port_seconds: float = 0.0
    absent: tuple[tuple[str, str], ...] = ()
    newcomers: str | None = None
    lock: LockedRunDir | None = None

    def subset(self, members: Sequence[int], lock: LockedRunDir | None) -> Cluster:
        """Makes the cluster of some workers, by their numbers among all; their names stay."""
        addresses = tuple(self.addresses[number] for number in members)
        absent = tuple(pair for pair in self.addresses if pair not in addresses)
        index = members.index(self.index)
        return dataclasses.replace(self, addresses=addresses, index=index, absent=absent, lock=lock)

    def with_workers(self, workers: Sequence[str], folder: str) -> Cluster:
        """Makes the coordinator's cluster of other workers, at addresses; newcomers announce themselves in a folder."""
        named = tuple((f"worker {number}", address) for number, address in enumerate(workers))
        addresses = self.addresses[:1] + named + self.addresses[1 + len(self.job("worker")) :]
        return dataclasses.replace(self, addresses=addresses, newcomers=folder)

    @property
    def task(self) -> str:
        return self.addresses[self.index][0]

    @property
    def address(self) -> str:
        return self.addresses[self.index][1]

    @property
    def is_chief(self) -> bool:
        """Whether this task writes and prints: the chief, or worker 0 where no task is called chief."""
        return self.index == 0

    @property
    def is_on_one_host(self) -> bool:
        """Whether all addresses are loopback's, so that every task is on this machine."""
        return all(_is_loopback(split(address)[0]) for _, address in self.addresses)

    @property
    def identity(self) -> bytes:
        """The key by which the job's tasks sign what they announce: its secret, its id and its tasks.

        Without an evaluator, which only reads files, and workers around servers, which come and go.
        """
        kinds = ("chief", "ps") if self.job("ps") else ("chief", "worker")
        named = sorted(f"{name}={address}" for name, address in self.addresses + self.absent if name.startswith(kinds))
        words = [self.job_id] * bool(self.job_id) + named  # without an id as in earlier builds, whose tasks may be here
        return b"\0".join([self.secret, *map(str.encode, words)])

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    @property
    def kind(self) -> str:
        """The task's type: chief, worker, ps, evaluator."""
        return self.task.split()[0]

    @property
    def task_id(self) -> int:
        """The task's index among those of its type."""
        return self.job(self.kind).index(self.address)

    def job(self, kind: str) -> tuple[str, ...]:
        """Returns the addresses of the tasks of a type, in their order."""
        return tuple(address for name, address in self.addresses if name.split()[0] == kind)

    @property
    def peers(self) -> tuple[tuple[str, str], ...]:
        """All others that this task works with; an evaluator, which only reads files, is not among them."""
        others = self.addresses[: self.index] + self.addresses[self.index + 1 :]
        return tuple(other for other in others if other[0] != "evaluator")


def make_cluster(
    source: str, addresses: Sequence[tuple[str, str]], index: int, environment: Mapping[str, str], job_id: str = ""
) -> Cluster:
    """Makes the cluster of some tasks. Raises `UsageError` where an address is wrong, or the job's secret.

    Args:
      environment: the process's variables, where the secret is.
    """
    _check_addresses(source, addresses)
    secret = environment.get(SECRET, "")
    if secret and len(secret) < _SECRET_CHARACTERS:
        raise UsageError(
            f"{SECRET} has {len(secret)} characters, which can be guessed; give all workers the same "
            f"{_SECRET_CHARACTERS} or more, by chance, or leave it out"
        )
    normal = tuple((name, _normalized(address)) for name, address in addresses)
    return Cluster(normal, index, secret.encode(errors="surrogateescape"), source, job_id)


def counts(kinds: Mapping[str, int]) -> str:
    """Describes the numbers of tasks of each kind, for people: "2 workers, 1 ps"."""
    return ", ".join(counted(count, kind) if kind == "worker" else f"{count} {kind}" for kind, count in kinds.items())


def split(address: str) -> tuple[str, int]:
    """Returns (host, port) of "host:port" or "[IPv6]:port"; ("", 0) if it is neither."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/\[\]]+)):(\d{1,9})", address, flags=re.ASCII)
    return (match[1] or match[2], int(match[3])) if match else ("", 0)


def _normalized(address: str) -> str:
    """Spells an address as all tasks do: names of hosts have no case, and IPv6 numbers one form."""
    host, port = split(address)
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return f"{host.rstrip('.').lower()}:{port}"
    return f"[{number}]:{port}" if number.version == 6 else f"{number}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_addresses(source: str, addresses: Sequence[tuple[str, str]]) -> None:
    """Raises `UsageError` unless each address of (name, address) is "host:port", and no task's is another's."""
    owners: dict[str, str] = {}
    for name, address in addresses:
        if not isinstance(address, str):
            raise UsageError(f"{source}'s {name} is {str(address)!r}; write its address as 'host:port'")
        host, port = split(address)
        if not host:
            is_ip6 = address.count(":") > 1 and "/" not in address
            form = "'[IPv6]:port', with the brackets" if is_ip6 else "'host:port', without a scheme"
            raise UsageError(f"{source}'s {name} is {address!r}; write its address as {form}")
        if not 1 <= port <= 65535:
            raise UsageError(f"{source}'s {name} is {address!r}, whose port is out of range; use 1 to 65535")
        if (normal := _normalized(address)) in owners:
            raise UsageError(f"{source}'s {owners[normal]} and {name} are both {normal}; give each its own port")
        owners[normal] = name
