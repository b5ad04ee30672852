"""The peak of memory of real training steps, one rank at a time: what the allocator was asked for, not what the process holds.

In: a plan, this rank's executor or a step. Out: bytes. The peak is what is allocated before the step (parameters, optimizer state, buffers, the
batch) plus the highest running total of the allocation events of the step. On a CPU the events are those of `torch.profiler`; on CUDA the caching
allocator counts itself. Invariant: nothing that was allocated before the step is freed in it (gradients are dropped before), so the running total
starts at zero and ends at the gradients. Not counted is what cuBLAS keeps for itself (for forward's thread and for backward's, 32 MiB on Hopper, 8
elsewhere): it has its place in the part of a device's memory that is not planned with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from hapx.collectives import communicator
from hapx.plan import Plan
from hapx.runtime.executor import Executor
from hapx.runtime.local import Communicators

PATIENCE = 0.002  # s


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes. before: allocated before the step; during: the most that the step adds at any time; left: what it leaves (gradients)."""

    before: int
    during: int
    left: int

    @property
    def total(self) -> int:
        return self.before + self.during


def allocation_peak(step: Callable[[], None], held: Iterable[Tensor], device: torch.device, left: Callable[[], Iterable[Tensor]] = tuple) -> Peak:
    """The peak of one call of `step`. held: all tensors that exist before it; left: returns those that it leaves; tensors that share storage count
    once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return Peak(before, torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()), key=lambda e: e[0])
    alive = {t.untyped_storage().data_ptr() for t in left()}
    highest, running = _running_total([(address, size) for _, address, size in events], alive)
    return Peak(sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in held)}.values()), highest, running)


def _allocations(nodes: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes; negative: freed) of all allocation events of a profile."""
    for node in nodes:
        if node.tag == _EventType.Allocation:
            yield node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size
        yield from _allocations(node.children)


def _running_total(events: Sequence[tuple[int, int]], alive: Collection[int]) -> tuple[int, int]:
    """(highest, last) sum of (address, bytes). What is never freed although it is not `alive` at the end was freed by a thread that the profiler does
    not see: copies that gloo makes for itself. It is left out."""
    running = highest = 0
    counted = _freed_here(events, alive)
    for i, (_, size) in enumerate(events):
        if i in counted:
            running += size
            highest = max(highest, running)
    return highest, running


def _freed_here(events: Sequence[tuple[int, int]], alive: Collection[int]) -> set[int]:
    """Numbers of the events of blocks whose end is known."""
    made: dict[int, int] = {}
    counted: set[int] = set()
    for i, (address, size) in enumerate(events):
        if size > 0:
            made[address] = i
        elif address in made:
            counted |= {made.pop(address), i}
    return counted | {i for address, i in made.items() if address in alive}


@contextmanager
def _patience() -> Iterator[None]:
    """The profiler sees only what this thread frees, but a thread of gloo may be the last to hold what it has sent. After every collective it gets
    time to let go, while this thread still holds everything."""
    places: list[tuple[ModuleType, str]] = [(dist, name) for name in ("all_reduce", "broadcast", "reduce", "all_to_all_single")]
    places += [(communicator, name) for name in ("_gather_equal", "_reduce_scatter_equal")]
    before = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, before, strict=True):
        setattr(module, name, _patient(function))
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)


def _patient(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if work is None:
            time.sleep(PATIENCE)
            return None
        return _Waiting(work)

    return call


class _Waiting:
    """A collective under way, after which a moment is waited."""

    def __init__(self, work: Any):
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(PATIENCE)


def training_peak(
    plan: Plan, rank: int, module: torch.nn.Module, communicators: Communicators, inputs: Mapping[str, Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer], *, device: torch.device | None = None, steps: int = 2,
) -> Peak:  # fmt: skip
    """The peak of a training step of `plan` on this rank (a collective call): forward, backward, update, with gradients set to None before it. A
    first step, which is not measured, makes the optimizer's state. The least of `steps`, in case a thread of gloo still let go too late."""
    executor = Executor(plan, rank, module, communicators, device=device)
    given = {name: t.to(executor.device) for name, t in inputs.items()}
    update = optimizer(executor.module.parameters())
    loss = plan.graphs[plan.first].loss

    def step() -> None:
        executor.run(plan.first, given)[loss].backward()
        update.step()

    step()
    state = [t for own in update.state.values() for t in own.values() if isinstance(t, Tensor)]
    held = [*executor.module.parameters(), *executor.module.buffers(), *state, *given.values()]
    found = []
    with _patience():
        for _ in range(steps):
            update.zero_grad()
            found.append(allocation_peak(step, held, executor.device, lambda: [p.grad for p in executor.module.parameters() if p.grad is not None]))
    least = min(found, key=lambda peak: peak.total)
    return replace(least, before=least.before - _workspaces(executor.device))


def _workspaces(device: torch.device) -> int:
    """Bytes that cuBLAS keeps; it makes them anew when it needs them."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return held - torch.cuda.memory_allocated(device)
