"""What would help where nothing fits into memory: alternatives that were tried and work, with their numbers.

In: the setting that failed, a function that says whether another setting fits. Out: a hint. Invariant: nothing is suggested for which no program that
fits was found, or that the caller has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING

from hapx.cluster.spec import ClusterSpec
from hapx.cluster.units import show
from hapx.cost.memory import RESERVE, states_of
from hapx.cost.remat import with_blocks
from hapx.errors import InsufficientMemoryError
from hapx.restriction import AUTO

if TYPE_CHECKING:
    from hapx.planner import Setting

MIB = 2**20
CLOSE = 1.1  # times: by how much least peaks may be too high
Attempt = Callable[["Setting"], InsufficientMemoryError | None]
More = Callable[["Setting", InsufficientMemoryError, Attempt], Iterable[str]]


def no_more(setting: Setting, error: InsufficientMemoryError, attempt: Attempt) -> Iterable[str]:
    """No further suggestions."""
    return ()


def may_fit(error: InsufficientMemoryError, part: float) -> bool:
    """Whether what needs at least this part of the memory is worth a try."""
    return error.times == inf or error.times * part <= CLOSE  # inf: not known


def advised(error: InsufficientMemoryError, setting: Setting, attempt: Attempt, more: More = no_more) -> InsufficientMemoryError:
    """The error with a hint. attempt: looks for a program that fits, returns the error if there is none; more: tries further suggestions."""
    larger = _larger(error, setting, attempt)
    found = [*_alternatives(setting, error, attempt), *more(setting, error, attempt), *([larger] if larger is not None else ())]
    hint = f"what fits: {', or '.join(found)}" if found else "no single change that was tried fits: use more devices or a smaller model"
    return InsufficientMemoryError(error.what, where=error.where, allowed=error.allowed, hint=hint, needs=error.needs, times=error.times)


def _alternatives(setting: Setting, error: InsufficientMemoryError, attempt: Attempt) -> Iterator[str]:
    rule = setting.rule
    has_blocks = rule.remat == "none" and with_blocks(setting.graph) is not setting.graph
    if has_blocks and attempt(replace(setting, rule=replace(rule, remat="blocks"))) is None:
        yield 'remat="blocks"'
    if rule.name != AUTO.name and attempt(replace(setting, rule=replace(AUTO, remat=rule.remat))) is None:
        yield 'strategy="auto"'
    states = states_of(setting.optimizer)
    for optimizer in ("sgd-momentum", "sgd"):
        part = (1 + states_of(optimizer)) / (1 + states)  # of a parameter with its states
        if part < 1 and may_fit(error, part) and attempt(replace(setting, optimizer=optimizer)) is None:
            yield f"{'SGD with momentum' if 'momentum' in optimizer else 'SGD'} instead of {setting.optimizer}"
            return


def _larger(error: InsufficientMemoryError, setting: Setting, attempt: Attempt) -> str | None:
    """More memory on the types of devices that lack it, as much as the program of least memory needs."""
    types: dict[str, int] = {}
    failure: InsufficientMemoryError | None = error
    for _ in range(len(setting.cluster.device_types)):
        assert failure is not None
        for device, needs in failure.needs.items():
            name = setting.cluster.devices[device].type
            types[name] = max(types.get(name, 0), ceil(needs / (1 - RESERVE) / MIB) * MIB)
        failure = attempt(replace(setting, cluster=_with_memory(setting.cluster, types)))
        if failure is None:
            return " and ".join(f"{show(size, 'size', 4)} on each {name}" for name, size in types.items())
    return None


def _with_memory(cluster: ClusterSpec, sizes: Mapping[str, int]) -> ClusterSpec:
    return replace(cluster, device_types={n: replace(t, memory=max(t.memory, sizes.get(n, 0))) for n, t in cluster.device_types.items()})
