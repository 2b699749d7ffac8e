"""A stand-in for Kubernetes' Job controller, with podman as the kubelet: runs the objects of examples/.

Each Pod is made from its Job's template and started by `podman kube play`; one that ends is started again by the Job's
own rules. What is not here: a scheduler, network policies, waits between restarts; probes are run when a test asks. A
pod's name is known in the network at once, as with a headless Service. Podman 4.3 knows neither fsGroup
nor claims of a size, so volumes are folders of this machine's that belong to the pods' user. The image is of folders
alone, in which this machine's own files are seen, and can't be written.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import yaml

from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]
_IMAGE = "localhost/this-machine"
_USER = 1000
_LINKS = ("bin", "sbin", "lib", "lib64")
_CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4000:4000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""


@dataclasses.dataclass
class Job:
    """A Job of Kubernetes', as far as it is run here.

    Attributes:
      manifest: the object.
      done: the indices whose pods have ended with 0.
      failures: by index, the ends that count.
      failed: why the Job has failed; empty if it has not.
    """

    manifest: dict
    done: set[int] = dataclasses.field(default_factory=set)
    failures: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failed: str = ""

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self.manifest["spec"]["completions"]

    def ended(self, index: int, code: int, is_disrupted: bool) -> None:
        """Counts the end of a pod as the Job says (https://kubernetes.io/docs/concepts/workloads/controllers/job)."""
        spec = self.manifest["spec"]
        if code == 0:
            self.done.add(index)
            return
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            conditions = [each["type"] for each in rule.get("onPodConditions", ())]
            if (codes and code in codes["values"]) or (is_disrupted and "DisruptionTarget" in conditions):
                if rule["action"] == "FailJob":
                    self.failed = f"pod {index} has ended with {code}"
                return
        self.failures[index] += 1
        is_per_index = "backoffLimitPerIndex" in spec
        count = self.failures[index] if is_per_index else self.failures.total()
        if count > spec["backoffLimitPerIndex" if is_per_index else "backoffLimit"]:
            self.failed = f"more failures than its limit: {dict(self.failures)}"


class JobController:
    """Runs the Jobs of one manifest after another. Logs of all attempts of a pod are in FOLDER/POD.log."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.runs = _folder_of_the_user(folder / "runs")
        self._network = ""
        self._jobs: dict[str, Job] = {}
        self._disrupted: set[str] = set()
        configuration = folder / "containers.conf"
        configuration.write_text(_CONFIGURATION.format(folder=folder))
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
        self._import_image()

    def podman(self, *words: str, **options) -> str:
        """Returns what a command of podman's prints."""
        # Conmon leaves a file `oom` in its folder where a container runs out of memory.
        options = {"env": self._environment, "cwd": self.folder, **options}
        done = subprocess.run(self._command(*words), capture_output=True, check=False, **options)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.decode().strip()

    def _command(self, *words: str) -> tuple[str, ...]:
        return ("podman", "--root", str(self.folder / "storage"), "--runroot", str(self.folder / "state"), *words)

    def _import_image(self) -> None:
        image = self.folder / "image"
        for name in ("usr", "proc", "sys", "dev", "tmp", "run", "var/tmp", "root"):
            (image / name).mkdir(parents=True)
        for name in _LINKS:
            (image / name).symlink_to(f"usr/{name}")
        shutil.copytree("/etc/alternatives", image / "etc/alternatives", symlinks=True)
        for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache"):
            shutil.copy(f"/etc/{name}", image / "etc")
        tar = subprocess.run(["tar", "-C", image, "-c", "."], capture_output=True, check=True).stdout
        path = f"{pathlib.Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        self.podman("import", "--change", f"ENV PATH={path}", "-", _IMAGE, input=tar)

    def apply(self, text: str, command: Sequence[str]) -> None:
        """Starts the pods of a manifest's Jobs, in a network of its Service's name.

        Args:
          text: the manifest.
          command: the program and its flags that replace `crankshaft train` and its flags; --num_ps stays.
        """
        objects = list(yaml.safe_load_all(text))
        (self._network,) = (each["metadata"]["name"] for each in objects if each["kind"] in ("Service", "JobSet"))
        self._jobs = {each["metadata"]["name"]: Job(each) for each in jobs_of(objects)}
        for job in self._jobs.values():
            (container,) = job.manifest["spec"]["template"]["spec"]["containers"]
            stay = [word for word in container["command"] if word.startswith("--num_ps=")]
            container["command"] = [*command, *stay]
        self.podman("network", "create", self._network)
        for name, job in self._jobs.items():
            for index in range(job.manifest["spec"]["completions"]):
                self._start(name, index)

    def _start(self, job: str, index: int) -> None:
        pod = f"{job}-{index}"
        (self.folder / f"{pod}.yaml").write_text(yaml.safe_dump(self._pod(job, index)))
        network = f"{self._network}:alias={pod}.{self._network}"
        self.podman("kube", "play", "--network", network, str(self.folder / f"{pod}.yaml"))

    def _pod(self, job: str, index: int) -> dict:
        """Returns the Pod of a Job's index, with this machine's files."""
        template = copy.deepcopy(self._jobs[job].manifest["spec"]["template"])
        spec = template["spec"]
        (container,) = spec["containers"]
        container["image"] = _IMAGE
        container["imagePullPolicy"] = "Never"
        container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        # Podman opens a container's ports on the host, and has systemd run the probes: `is_live` runs one.
        for name in ("ports", "startupProbe", "livenessProbe"):
            container.pop(name, None)
        folders = {}
        for volume in spec["volumes"]:
            own = f"{job}-{index}-{volume['name']}"
            is_claim = "persistentVolumeClaim" in volume
            folders[volume["name"]] = self.runs if is_claim else _folder_of_the_user(self.folder / own)
        for number, path in enumerate(("/usr", sys.base_prefix, sys.prefix, ROOT)):
            container["volumeMounts"].append({"name": f"machine-{number}", "mountPath": str(path), "readOnly": True})
            folders[f"machine-{number}"] = path
        spec["volumes"] = [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()]
        spec["hostname"] = f"{job}-{index}"
        metadata = {**template["metadata"], "name": f"{job}-{index}"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def step(self) -> None:
        """Acts on the pods that have ended: removes each, and starts its next, once it is gone, if the Job says so."""
        for pod, (state, code) in self._states().items():
            if state != "exited":
                continue
            job, _, index = pod.rpartition("-")
            self._keep_log(pod, f"exit code {code}")
            self.podman("pod", "rm", "--force", pod)
            self._jobs[job].ended(int(index), code, pod in self._disrupted)
            self._disrupted.discard(pod)
            if int(index) not in self._jobs[job].done and not self.why_failed:
                self._start(job, int(index))

    def _keep_log(self, pod: str, end: str) -> None:
        with open(self.folder / f"{pod}.log", "a") as log:
            command = self._command("logs", f"{pod}-task")
            subprocess.run(command, env=self._environment, stdout=log, stderr=log, check=True)
            log.write(f"{end}\n")

    @property
    def why_failed(self) -> str:
        """Why a Job has failed; empty if none has."""
        return "; ".join(f"{name}: {job.failed}" for name, job in self._jobs.items() if job.failed)

    @property
    def is_complete(self) -> bool:
        return all(job.is_complete for job in self._jobs.values())

    def logs(self) -> str:
        """Returns what all pods have printed so far; a pod that runs is seen each time from its start on."""
        for pod, (state, _) in self._states().items():
            self._keep_log(pod, state)
        paths = sorted(path for name in self._jobs for path in self.folder.glob(f"{name}-*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def _states(self) -> dict[str, tuple[str, int]]:
        """Returns (state, exit code) of each pod that there is."""
        containers = json.loads(self.podman("ps", "--all", "--format=json"))
        tasks = [container for container in containers if not container["IsInfra"]]
        return {task["Names"][0].removesuffix("-task"): (task["State"], task["ExitCode"]) for task in tasks}

    def until(self, condition: Callable[[], object]) -> None:
        """Lets the Jobs go on until a condition holds; fails if a Job fails before."""

        def holds() -> object:
            if condition():
                return True
            self.step()
            assert not self.why_failed, f"{self.why_failed}\n{self.logs()}"
            return condition()

        wait_until(holds, shows=self.logs, pause=0.5)

    def address(self, pod: str) -> str:
        """Returns a pod's IP address; empty where it is not running."""
        if self._states().get(pod, ("", 0))[0] != "running":
            return ""
        infra = self.podman("pod", "inspect", "--format={{.InfraContainerID}}", pod)
        networks = json.loads(self.podman("inspect", infra))[0]["NetworkSettings"]["Networks"]
        return networks[self._network]["IPAddress"]

    def is_live(self, pod: str) -> bool:
        """Returns what the pod's liveness probe says."""
        job, _, _ = pod.rpartition("-")
        (container,) = self._jobs[job].manifest["spec"]["template"]["spec"]["containers"]
        command = self._command("exec", f"{pod}-task", *container["livenessProbe"]["exec"]["command"])
        return subprocess.run(command, env=self._environment, capture_output=True, check=False).returncode == 0

    def signal(self, pod: str, name: str) -> None:
        self.podman("kill", f"--signal={name}", f"{pod}-task")

    def delete(self, pod: str) -> None:
        """Ends a pod as `kubectl delete` does: SIGTERM, and SIGKILL once its grace period is over."""
        job, _, index = pod.rpartition("-")
        grace = self._pod(job, int(index))["spec"]["terminationGracePeriodSeconds"]
        self.podman("stop", f"--time={grace}", f"{pod}-task")

    def evict(self, pod: str) -> None:
        """Ends a pod as a drain of its node does: likewise, and Kubernetes notes that it was disrupted."""
        self._disrupted.add(pod)
        self.delete(pod)

    def remove(self) -> None:
        """Removes all that was applied."""
        self.podman("pod", "rm", "--all", "--force", "--time=0")
        if self._network:
            self.podman("network", "rm", "--force", self._network)
        self._jobs, self._network = {}, ""


def jobs_of(objects: list[dict]) -> list[dict]:
    """Lists the Jobs among a manifest's objects, with those that a JobSet would make."""
    jobs = [each for each in objects if each["kind"] == "Job"]
    for job_set in (each for each in objects if each["kind"] == "JobSet"):
        for replicated in job_set["spec"]["replicatedJobs"]:
            assert replicated["replicas"] == 1
            name = f"{job_set['metadata']['name']}-{replicated['name']}-0"
            jobs.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]})
    return jobs


def _folder_of_the_user(path: pathlib.Path) -> pathlib.Path:
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, _USER, _USER)
    return path
