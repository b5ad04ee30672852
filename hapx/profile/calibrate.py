"""Measures what the devices and links of a cluster really do, in about two seconds.

In: a cluster, and the process group if there is one (then every rank calls it, rank = number of the device). Out: the same cluster with
measured numbers: FLOP/s of matrix products (efficiency 1.0), the memory bandwidth that element-wise operators reach, the time that a kernel
takes to start, and the links. Every number is a median of repeats. Devices of one type whose speeds are alike are one type
and get its median (so that the planner sees few kinds); others become types of their own, "my-core-1", "my-core-2". Every rank returns the
same cluster.

Links follow the alpha-beta model of `hapx.cost.network` (m devices, N bytes, latency a, bandwidth b):

    all_reduce  t(N) = 2 ceil(log2 m) a + 2 (m-1)/m N / b,     all_gather  t(N) = ceil(log2 m) a + (m-1)/m N / b,

(a reduce_scatter is an all_gather backwards), each solved for a and b from a small and a large message; the mean of the three counts. Sums of single
numbers (losses, counts, norms) are measured too: t = 2 ceil(log2 m) a'. Where processes share cores, a' is a fraction of a, since a ring of gloo
has hardly anything to send.

With `clock` the time of computations is read from another clock than the wall's (`time.thread_time`: what a core does for this process
alone); communication is always measured on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log2
from statistics import harmonic_mean, mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, layer_norm

from hapx.cluster.spec import PRECISIONS, ClusterSpec, DeviceType, Link, Machine
from hapx.collectives.communicator import Communicator, ProcessGroupCommunicator
from hapx.errors import LaunchError

SNAP = 0.15
REPEATS = 5
MATRICES = ((512, 256, 1024), (1024, 160, 640), (2048, 512, 512))  # rows (tokens) x inner x columns: the sizes of small models
GPU_MATRICES = ((4096, 1024, 4096), (8192, 2048, 2048), (16384, 768, 3072))
ELEMENTS, GPU_ELEMENTS = (1024, 512), (16384, 2048)  # rows and columns of the tensors between products
SMALL_MESSAGE, LARGE_MESSAGE = 4 * 2**10, 2 * 2**20
BETWEEN = 16 * 2**20  # bytes that a CPU touches between two chains of small kernels: between two kernels of a kind, a model's tensors pass its caches

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """One device: FLOP/s, B/s, s."""

    flops: float
    memory_bandwidth: float
    kernel_latency: float


def calibrate(
    cluster: ClusterSpec,
    *,
    device: torch.device | str = "cpu",
    precision: str = "float32",
    seconds: float = 2.0,
    clock: Clock | None = None,
    pause: Callable[[], None] | None = None,
    snap: float | None = None,
) -> ClusterSpec:
    """The cluster with measured numbers. A collective call if a process group is there; then its size must be that of the cluster.

    Args:
        device: the one that this process computes on.
        precision: dtype of the products; its FLOP/s are replaced, other dtypes keep their speed.
        seconds: about how long all of it may take.
        clock: what computations cost, in seconds; default is the wall clock (after the device has finished).
        pause: called between repeats.
        snap: devices of one type whose speeds differ by less than this part are alike. Default: `SNAP` for GPUs; 1, always alike, for CPU
            processes, which share cores: what differs between them is the scheduler's work, not the device's.
    """
    device, grouped = torch.device(device), dist.is_available() and dist.is_initialized()
    if grouped and dist.get_world_size() != cluster.num_devices:
        raise LaunchError(
            f"{dist.get_world_size()} processes were started", where=f"cluster {cluster.name}", allowed=f"{cluster.num_devices}, one per device"
        )
    share = seconds / 2 if grouped else seconds
    if grouped:
        ProcessGroupCommunicator().barrier()  # all at once, as in training
    mine = measure_device(device, precision, share, clock=clock, pause=pause)
    every = _gathered(asdict(mine)) if grouped else [asdict(mine)] * cluster.num_devices
    near = snap if snap is not None else (1.0 if device.type == "cpu" else SNAP)
    result = with_devices(cluster, [Measured(**m) for m in every], precision, near)
    return with_links(result, _measure_links(cluster, device, seconds - share)) if grouped and cluster.num_devices > 1 else result


# ---- one device ------------------------------------------------------------------------------------------------------


def measure_device(
    device: torch.device, precision: str = "float32", seconds: float = 1.0, *, clock: Clock | None = None, pause: Callable[[], None] | None = None
) -> Measured:
    """What this device reaches in products and element-wise operators with the sizes of models, and in operators on almost nothing."""
    gpu = device.type != "cpu"
    timer = _Timer(device, clock or time.perf_counter, pause or (lambda: None))
    dtype = getattr(torch, precision)
    sizes = GPU_MATRICES if gpu else MATRICES
    products = [_product(m, k, n, dtype, device) for m, k, n in sizes]

    def multiply() -> None:
        for product in products:
            product()

    flops = timer.rate(sum(2.0 * m * k * n for m, k, n in sizes), multiply, seconds / 2)
    rows, width = GPU_ELEMENTS if gpu else ELEMENTS
    chain = _Chain(torch.ones(rows, width, dtype=dtype, device=device, requires_grad=True), 1)
    bandwidth = timer.rate(chain.bytes, chain.run, seconds / 4)
    short = _Chain(torch.ones(4, 8, dtype=dtype, device=device, requires_grad=True), 10 if gpu else 3)
    between = None if gpu else torch.ones(BETWEEN // 4).neg_
    return Measured(flops, bandwidth, 1.0 / timer.rate(float(short.kernels), short.run, seconds / 4, between))


class _Chain:
    """Sum, layer norm and GELU, `repeat` times, forward and backward: what a model does between its products. Large tensors show the memory
    bandwidth that such operators reach, tiny ones the time that a kernel takes to start (autograd included).

    Bytes and kernels are counted as the cost model counts them: what is read and written forward, twice that backward; one kernel each."""

    def __init__(self, x: torch.Tensor, repeat: int):
        self.x, self.repeat = x, repeat
        self.scale = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device, requires_grad=True)
        self.bytes, self.kernels = float(3 * (3 + 2 + 2) * repeat * x.nbytes), 2 * 3 * repeat

    def run(self) -> None:
        y = self.x
        for _ in range(self.repeat):
            y = gelu(layer_norm(y + self.x, self.scale.shape, self.scale))
        y.backward(torch.ones_like(y))
        self.x.grad = self.scale.grad = None


def _product(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


@dataclass(frozen=True)
class _Timer:
    device: torch.device
    clock: Clock
    pause: Callable[[], None]

    def rate(self, amount: float, work: Callable[[], object], seconds: float, between: Callable[[], object] | None = None) -> float:
        """Amount of work per second: median of `REPEATS`, in about `seconds` on the wall. A repeat is long enough to meet everything that
        else happens on the machine, processes that share a core above all. between: is called before each piece of work, and does not count."""
        work()  # first calls allocate
        begin = time.perf_counter()
        if between is not None:
            between()
        work()
        self._finish()
        count = max(round(seconds / REPEATS / max(time.perf_counter() - begin, 1e-6)), 1)
        times = []
        for _ in range(REPEATS):
            times.append(self._one(count, work) if between is None else sum(self._one(1, work, between) for _ in range(count)))
            self.pause()
        return amount * count / max(median(times), 1e-9)

    def _one(self, count: int, work: Callable[[], object], between: Callable[[], object] | None = None) -> float:
        if between is not None:
            between()
        start = self.clock()
        for _ in range(count):
            work()
        self._finish()
        return self.clock() - start

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ---- links -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Links:
    """Measured links: per machine the one inside (None: one device), and the one between machines (None: one machine)."""

    inside: tuple[Link | None, ...]
    between: Link | None


def _measure_links(cluster: ClusterSpec, device: torch.device, seconds: float) -> Links:
    """Every rank calls it: groups are made by all, and machines are measured one after another's turn at the same time."""
    members = cluster.members
    one_machine = len(members) == 1
    groups = [None if one_machine or len(ranks) < 2 else dist.new_group(ranks) for ranks in members]
    mine = cluster.devices[dist.get_rank()].machine
    own: dict[str, float] | None = None
    if len(members[mine]) > 1:
        own = asdict(measure_link(groups[mine], device, seconds / (1 if one_machine else 2)))
    every = _gathered(own)
    inside = tuple(None if every[ranks[0]] is None else Link(**every[ranks[0]]) for ranks in members)
    if one_machine:
        return Links(inside, None)
    across = _gathered(asdict(measure_link(None, device, seconds / 2)))
    for group in groups:
        if group is not None and dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return Links(inside, Link(**across[0]))


def measure_link(group: dist.ProcessGroup | None, device: torch.device, seconds: float = 1.0) -> Link:
    """Latency and bandwidth between the processes of `group` (None: all), as the runtime's own collectives reach them."""
    comm = ProcessGroupCommunicator(group)
    rounds, volume = ceil(log2(comm.size)), (comm.size - 1) / comm.size
    fits = []
    for run, times in ((_reduce, 2), (_gather, 1), (_scatter, 1)):
        small, large = (_collective_time(run, comm, _message(size, comm.size, device), seconds / 7) for size in (SMALL_MESSAGE, LARGE_MESSAGE))
        fits.append(solve_link(small, large, times * rounds, times * volume))
    latency = mean(f.latency for f in fits)
    scalar = _collective_time(_reduce, comm, torch.zeros(1, device=device), seconds / 7) / (2 * rounds)
    return Link(harmonic_mean(f.bandwidth for f in fits), latency, min(scalar, latency))


def _message(size: int, parts: int, device: torch.device) -> torch.Tensor:
    """A tensor of about `size` bytes that divides into `parts` pieces."""
    return torch.zeros(size // 4 // parts * parts, device=device)


def _reduce(comm: Communicator, whole: torch.Tensor) -> None:
    comm.all_reduce(whole)


def _gather(comm: Communicator, whole: torch.Tensor) -> None:
    piece = len(whole) // comm.size
    comm.all_gather(whole[:piece], [piece] * comm.size)


def _scatter(comm: Communicator, whole: torch.Tensor) -> None:
    comm.reduce_scatter(whole, [len(whole) // comm.size] * comm.size)


def solve_link(small: float, large: float, rounds: float, volume: float) -> Link:
    """a and b of  t(N) = rounds * a + volume * N / b  through the times of the small and the large message.

    Noise can make the small one look slower than its latency allows; the link then has the bandwidth of the large one alone."""
    slope = max(large - small, 0.1 * large) / (LARGE_MESSAGE - SMALL_MESSAGE)
    return Link(volume / slope, max(small - slope * SMALL_MESSAGE, 1e-7) / rounds)


def _collective_time(run: Callable[[Communicator, torch.Tensor], None], comm: ProcessGroupCommunicator, whole: torch.Tensor, seconds: float) -> float:
    """Seconds of one collective: median of `REPEATS` rounds of several in a row. All ranks repeat equally often: rank 0 counts."""

    def round_of(count: int) -> float:
        comm.barrier()
        start = time.perf_counter()
        for _ in range(count):
            run(comm, whole)
        if whole.device.type == "cuda":
            torch.cuda.synchronize(whole.device)
        return (time.perf_counter() - start) / count

    first = max(round_of(1), round_of(1))
    count = torch.tensor([min(max(int(seconds / REPEATS / max(first, 1e-6)), 1), 40)], device=whole.device)
    several = int(comm.broadcast(count, 0))
    return median(round_of(several) for _ in range(REPEATS))


# ---- the cluster with measured numbers ---------------------------------------------------------------------------------


def _gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def with_devices(cluster: ClusterSpec, measured: Sequence[Measured], precision: str = "float32", near: float = SNAP) -> ClusterSpec:
    """The cluster with these numbers, one per device; similar devices of one type stay one type."""
    assert len(measured) == cluster.num_devices
    names: dict[int, str] = {}
    types: dict[str, DeviceType] = {}
    for name, old in cluster.device_types.items():
        groups = alike({d.index: measured[d.index].flops for d in cluster.devices if d.type == name}, near)
        for i, members in enumerate(groups):
            new = name if len(groups) == 1 else f"{name}-{i + 1}"
            types[new] = _measured_type(replace(old, name=new), [measured[d] for d in members], precision)
            names |= dict.fromkeys(members, new)
    place = iter(range(cluster.num_devices))
    machines = tuple(Machine(m.name, tuple(names[next(place)] for _ in m.devices), m.intra) for m in cluster.machines)
    return replace(cluster, machines=machines, device_types=types, profile=None)


def alike(speeds: Mapping[int, float], near: float = SNAP) -> list[list[int]]:
    """Devices by speed, fastest first, in groups whose members differ by less than `near`."""
    groups: list[list[int]] = []
    for device in sorted(speeds, key=lambda d: (-speeds[d], d)):
        if not groups or speeds[device] < (1 - near) * speeds[groups[-1][0]]:
            groups.append([])
        groups[-1].append(device)
    return groups


def _measured_type(old: DeviceType, every: Sequence[Measured], precision: str) -> DeviceType:
    flops = median(m.flops for m in every)
    return old.measured(
        {PRECISIONS.get(precision, precision): flops},
        memory_bandwidth=median(m.memory_bandwidth for m in every),
        kernel_latency=median(m.kernel_latency for m in every),
        source="measured",
    )


def with_links(cluster: ClusterSpec, links: Links) -> ClusterSpec:
    """The cluster with measured links where there are any."""
    machines = tuple(replace(m, intra=link or m.intra) for m, link in zip(cluster.machines, links.inside, strict=True))
    return replace(cluster, machines=machines, inter=links.between or (machines[0].intra if len(machines) == 1 else cluster.inter))
