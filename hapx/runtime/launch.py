"""The processes of a run: join them, check that they are what the cluster file says, and keep them in step.

In: a cluster and the environment of a launcher (torchrun), or a process group that exists already. Out: a `World`. Invariant: whatever
is wrong, and wherever, every rank gets one clear error and none waits for ever: decisions are made from what all ranks know, rank 0's
failures are sent instead of its results, and before a step's first collective the ranks agree on what they are about to run.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hapx import errors
from hapx.cluster.spec import ClusterSpec
from hapx.collectives.communicator import ProcessGroupCommunicator, own_device, release_groups
from hapx.collectives.lost import lost_rank
from hapx.errors import HapError, LaunchError

TIMEOUT = timedelta(minutes=10)
PLANNING_TIMEOUT = timedelta(minutes=60)  # the others wait while rank 0 plans
LAUNCH_HINT = "start one process per device, for example: torchrun --nproc-per-node=4 train.py"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank says about itself. `device`: "cpu", or which GPU. `memory`: bytes, 0 where unknown. `cluster`: hash of the file it has read."""

    rank: int
    host: str
    device: str
    name: str
    memory: int
    torch: str
    cluster: str


@dataclass(frozen=True)
class World:
    """All processes of the run. `control`: a group on the CPU for decisions, apart from the tensors' groups."""

    rank: int
    size: int
    device: torch.device
    control: ProcessGroupCommunicator

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LaunchError(
            "a distributed model holds connections, which no file can", where="HAP",
            hint="save model.full_state_dict(), or everything with hapx.save_checkpoint(...)",
        )  # fmt: skip

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.size
        with lost_rank():
            dist.all_gather_object(values, value, group=self.control.group)
        return values

    def from_first(self, make: Callable[[], str], what: str) -> str:
        """The text that `make` gives on rank 0. If it fails there, its error is raised on every rank."""
        message: list[Any] = [None]
        error: BaseException | None = None
        if self.rank == 0:
            try:
                message = [("text", make())]
            except Exception as caught:  # sent to all, then raised again
                error, message = caught, [_pack(caught)]
        with lost_rank():
            dist.broadcast_object_list(message, src=0, group=self.control.group)
        if error is not None:
            raise error
        kind, value = message[0]
        if kind == "text":
            return str(value)
        raise _unpack(kind, value, what)

    def together(self, work: Callable[[], Any], what: str) -> Any:
        """The result of `work`, run on every rank. If it fails on any, all raise: those where it failed their own error, the others
        that of the first rank that failed."""
        error: BaseException | None = None
        result: Any = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else _pack(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise _unpack(*failure, f"rank {rank}: {what}")
        return result

    def agree(self, text: str | None) -> None:
        """Raises LaunchError on every rank unless all pass the same text. None: this rank has failed, the others must not go on."""
        own = "an error before the step" if text is None else text
        number = int.from_bytes(hashlib.sha256(own.encode()).digest()[:8], "big") >> 2
        both = torch.tensor([number, -number], dtype=torch.int64)
        with lost_rank():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.control.group)
        if text is None or int(both[0]) != -int(both[1]):
            said: dict[str, list[int]] = {}
            for rank, words in enumerate(self.gather(own)):
                said.setdefault(words, []).append(rank)
            if text is not None:
                lines = "; ".join(f"{_ranks(ranks)}: {words}" for words, ranks in said.items())
                raise LaunchError(
                    f"the ranks are about to run different steps: {lines}",
                    hint="every rank must call the model with the same shapes, dtypes and mode",
                )


def join(cluster: ClusterSpec) -> World:
    """Initialises the process group if nobody has, and checks the ranks against the cluster. Raises LaunchError, on all ranks."""
    if not dist.is_initialized():
        _initialise()
        atexit.register(_leave)
    else:
        atexit.register(release_groups)  # whoever has initialised it destroys it
    rank, size = dist.get_rank(), dist.get_world_size()
    device = own_device()
    control = dist.new_group(backend="gloo", timeout=PLANNING_TIMEOUT)
    assert control is not None
    world = World(rank, size, device, ProcessGroupCommunicator(control))
    facts = [Facts(**f) for f in world.gather(asdict(_facts(rank, device, cluster)))]
    shared = len({(f.host, f.device) for f in facts}) < size
    check(facts, cluster, simulated=shared)
    return world


def _initialise() -> None:
    missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise LaunchError(f"no process group and no launcher: {', '.join(missing)} not set", where="environment", hint=LAUNCH_HINT)
    cuda = torch.cuda.is_available()
    options: dict[str, Any] = {}
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        if local >= torch.cuda.device_count():
            raise LaunchError(
                f"local rank {local} has no GPU: there are {torch.cuda.device_count()}", allowed="one process per GPU", hint=LAUNCH_HINT
            )
        torch.cuda.set_device(local)
        options["device_id"] = torch.device("cuda", local)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT, **options)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    release_groups()


def _facts(rank: int, device: torch.device, cluster: ClusterSpec) -> Facts:
    name, memory, which = "cpu", 0, "cpu"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory, which = properties.name, properties.total_memory, f"GPU {properties.uuid}"
    text = json.dumps(cluster.to_dict(), sort_keys=True)
    return Facts(rank, socket.gethostname(), which, name, memory, torch.__version__, hashlib.sha256(text.encode()).hexdigest()[:12])


def check(facts: Sequence[Facts], cluster: ClusterSpec, simulated: bool) -> None:
    """Raises LaunchError where the processes contradict the cluster. Rank i is device i. `simulated`: ranks that share devices may all share one
    host, whatever machines the cluster has."""
    if len(facts) != cluster.num_devices:
        what = f"{_count(len(facts), 'process', 'es')} for a cluster of {_count(cluster.num_devices, 'device', 's')}"
        allowed, hint = f"a world size of {cluster.num_devices}", "start as many processes as the cluster has devices"
        raise LaunchError(what, where=f"cluster {cluster.name!r}", allowed=allowed, hint=hint)
    for what in ("torch", "cluster"):
        values = {getattr(f, what) for f in facts}
        if len(values) > 1:
            told = "; ".join(f"{_ranks([f.rank for f in facts if getattr(f, what) == v])}: {v}" for v in sorted(values))
            raise LaunchError(f"the ranks have different {'versions of torch' if what == 'torch' else 'cluster files'}: {told}")
    hosts = {f.host for f in facts}
    if not (simulated and len(hosts) == 1):
        _check_hosts(facts, cluster)
    for f in facts:
        if f.name != "cpu":
            _check_device(f, cluster)


def _check_hosts(facts: Sequence[Facts], cluster: ClusterSpec) -> None:
    home: dict[str, int] = {}
    for number, machine in enumerate(cluster.machines):
        mine = [f for f in facts if cluster.devices[f.rank].machine == number]
        hosts = sorted({f.host for f in mine})
        where, ranks = f"machine {machine.name!r}", _ranks([f.rank for f in mine])
        if len(hosts) > 1:
            raise LaunchError(
                f"{ranks} are one machine in the cluster file but run on {', '.join(hosts)}", where=where, hint="rank i must be device i"
            )
        if home.setdefault(hosts[0], number) != number:
            other = cluster.machines[home[hosts[0]]].name
            raise LaunchError(
                f"{ranks} run on {hosts[0]}, as do those of machine {other!r}", where=where, hint="rank i must be device i, one host per machine"
            )


def _check_device(f: Facts, cluster: ClusterSpec) -> None:
    kind = cluster.type_of(f.rank)
    if f.memory and f.memory < 0.9 * kind.memory:
        raise LaunchError(
            f"the device has {f.memory / 2**30:.1f} GiB", where=f"rank {f.rank} ({f.name})", allowed=f"{kind.memory / 2**30:.1f} GiB, a {kind.name}"
        )
    # catalogue names hold the model's name, "V100-SXM2-16GB"; names that users give need not
    model = next((part for part in re.split(r"[-_ ]", kind.name) if re.search(r"\d", part)), None)
    if kind.source != "user" and model is not None and model.lower() not in f.name.lower().replace(" ", ""):
        raise LaunchError(
            f"the device is a {f.name}", where=f"rank {f.rank} on {f.host}", allowed=kind.name, hint="rank i must be device i of the cluster file"
        )


# ---- errors that travel ----------------------------------------------------------------------------------------------------


def _pack(error: BaseException) -> tuple[str, Any]:
    """An error as plain data."""
    if isinstance(error, HapError):
        return type(error).__name__, (error.what, error.where, error.allowed, error.hint)
    return "crash", "".join(traceback.format_exception(error))


def _unpack(kind: str, value: Any, what: str) -> HapError:
    if kind == "crash":
        return LaunchError(f"{what} failed on another rank:\n{value}")
    said, where, allowed, hint = value
    known = getattr(errors, kind, HapError)
    result: HapError = known(said, where=where, allowed=allowed, hint=hint)
    return result


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _count(n: int, noun: str, plural: str) -> str:
    return f"{n} {noun}{'' if n == 1 else plural}"
