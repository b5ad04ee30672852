"""Finds the rules of one call by execution: for operators that the table does not know, custom ones of `torch.library` included.

In: a node and its operands. Out: the rules for one mesh axis that held in every trial (all-Replicated and all-Invariant are implied), or
`Unprobed`, which says why nothing can be said. `recheck` runs the trials of given rules only.

Every combination of operand and output states that holds forward in the first trial is tried in all of them (`hapx.theory.probe_trials`), on
uneven lengths and lengths of zero, outputs and gradients. Kernels of custom operators must take empty tensors themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod

import torch

from hapx.ir import CONTINUOUS, Kind, Node, OpCall, Ref, TensorRef
from hapx.operators import find_overload
from hapx.rules import Rule, Site, Slot
from hapx.states import PARTIAL, REPLICATED, Cut, Placement
from hapx.theory.conversion import free
from hapx.theory.probe import Locals, Run, Truth, deal, in_placement, run_all
from hapx.theory.probe_trials import SETTINGS, Trial, Trials, Unprobed, state
from hapx.theory.settings import Setting

COMBINATIONS = 3000  # of operand states, at most


@dataclass(frozen=True)
class Found:
    """Rules that held, the strongest only. `differentiable`: whether the operator has a gradient at all."""

    rules: tuple[Rule, ...]
    differentiable: bool


def find_rules(node: Node, operands: Sequence[TensorRef]) -> Found:
    """The rules of a node, without those that follow from another by free conversions. Alike calls are probed once in a process.

    Raises Unprobed where execution says nothing, UnsupportedOperatorError where it says that the operator is random or in place."""
    call, tensors = _anonymous(node, operands)
    return _find(call, tensors, repr(call.call))


@lru_cache(maxsize=1024)
def _find(node: Node, operands: tuple[TensorRef, ...], text: str) -> Found:
    """`text` tells calls apart that Python calls equal: 1, 1.0 and True."""
    with _quiet():
        trials = Trials(node, operands)
        candidates = [r for r in _candidates(trials) if trials.failure(r) is None]
        return Found(_strongest(trials, candidates), trials.differentiable)


def recheck(node: Node, operands: Sequence[TensorRef], rules: Sequence[Rule]) -> str | None:
    """What is wrong with one of the rules, None if nothing is. Raises as `find_rules`."""
    found = find_rules(node, operands).rules
    with _quiet():
        others = [r for r in rules if r not in found]
        trials = Trials(*_anonymous(node, operands)) if others else None
        return next((f"{r}: {wrong}" for r in others if trials is not None and (wrong := trials.failure(r)) is not None), None)


def _anonymous(node: Node, operands: Sequence[TensorRef]) -> tuple[Node, tuple[TensorRef, ...]]:
    """Node and operands with names by position: equal for alike calls of one line."""
    numbers: dict[str, str] = {}
    for name in node.call.refs():
        numbers.setdefault(name, f"x{len(numbers)}")
    outputs = tuple(replace(r, name=f"out{i}") for i, r in enumerate(node.outputs))
    call = OpCall(node.call.target, tuple((k, _renamed(v, numbers)) for k, v in node.call.args))
    return replace(node, call=call, outputs=outputs), tuple(replace(r, name=numbers[r.name], kind=Kind.VALUE) for r in operands)


def _renamed(value: object, names: Mapping[str, str]) -> object:
    if isinstance(value, Ref):
        return Ref(names[value.name])
    return tuple(_renamed(v, names) for v in value) if isinstance(value, tuple) else value


def is_registered(target: str) -> bool:
    """Whether this process has the operator."""
    try:
        find_overload(target)
    except (AttributeError, RuntimeError, ValueError, AssertionError):
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread (the tensors are tiny), no warnings of kernels, the random generator as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def _candidates(trials: Trials) -> Iterator[Rule]:
    """Rules that hold forward in the first trial."""
    trial, setting = trials.small[0], SETTINGS[0]
    for pre in _pre(trials):
        units = gcd(*(r.shape[s.dim] for r, s in zip(trial.truth.refs, pre, strict=True) if isinstance(s, Site)))
        if units != 1:
            yield from _posts(trials, trial, setting, pre, units)


def _posts(trials: Trials, trial: Trial, setting: Setting, pre: tuple[Slot, ...], units: int) -> Iterator[Rule]:
    cut = Cut(setting.mesh.row(0), units)
    placements = tuple(Placement((state(s, r, cut),)) for r, s in zip(trial.truth.refs, pre, strict=True))
    runs = _forward(trial.truth, placements, setting)
    if runs is None:
        return
    options: list[list[Slot]] = []
    for i, (ref, real) in enumerate(zip(trial.truth.node.outputs, trials.node.outputs, strict=True)):
        found: list[Slot] = []
        for slot in _slots(real):
            if isinstance(slot, Site) and (units == 0 or ref.shape[slot.dim] % units):
                continue
            made = [r.outputs[i] for r in runs]
            placement = Placement((state(slot, ref, cut),))
            if in_placement(made, placement, trial.truth.outputs[i], setting, trial.truth.tolerance):
                found.append(slot)
        options.append(found)
    for post in product(*options):
        yield Rule(pre, post, divides=any(isinstance(s, Site) for s in (*pre, *post)))


def _pre(trials: Trials) -> list[tuple[Slot, ...]]:
    """Combinations of operand states; dims that are split together have sizes of which one is a multiple of the other."""

    def is_related(slot: Slot, ref: TensorRef, size: int) -> bool:
        return not isinstance(slot, Site) or ref.shape[slot.dim] % size == 0 or size % ref.shape[slot.dim] == 0

    def related(size: int, partial: bool) -> list[list[Slot]]:
        return [[s for s in _slots(r) if (partial or s != PARTIAL) and is_related(s, r, size)] for r in trials.operands]

    for partial in (True, False):
        groups = [related(size, partial) for size in trials.sizes]
        whole = [[s for s in _slots(r) if not isinstance(s, Site)] for r in trials.operands]
        if sum(prod(map(len, g)) for g in (*groups, whole)) <= COMBINATIONS:
            found = dict.fromkeys(c for g in (*groups, whole) for c in product(*g))
            return [c for c in found if any(s != REPLICATED for s in c)]
    raise Unprobed(f"its {len(trials.operands)} operands have too many combinations of states")


def _strongest(trials: Trials, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules from which all others follow by free conversions."""
    trial, setting = trials.small[0], SETTINGS[0]
    refs, count = (*trial.truth.refs, *trial.truth.node.outputs), len(trial.truth.refs)
    placed = {r: p for r in rules if (p := trial.placements(r, setting)) is not None}

    def follows(rule: Rule, other: Rule) -> bool:
        a, b = placed[rule], placed[other]
        pre = all(map(free, refs[:count], a[:count], b[:count]))
        return pre and all(map(free, refs[count:], b[count:], a[count:]))

    kept: list[Rule] = []
    for rule in placed:
        if not any(follows(rule, other) for other in kept):
            kept = [k for k in kept if not follows(k, rule)] + [rule]
    return tuple(sorted(kept, key=str))


def _slots(ref: TensorRef) -> list[Slot]:
    """States that are tried for a tensor. Integers are Partial only where an operator sums, which none of these is known to do."""
    partial: list[Slot] = [PARTIAL] if ref.dtype in CONTINUOUS else []
    return [REPLICATED, *partial, *(Site(d) for d, n in enumerate(ref.shape) if n > 1)]


def _forward(truth: Truth, pre: tuple[Placement, ...], setting: Setting) -> list[Run] | None:
    """The outputs of all devices; None where the call does not run on such operands."""
    generator = torch.Generator().manual_seed(0)
    operands: list[Locals] = [deal(x, p, setting, generator) for x, p in zip(truth.operands, pre, strict=True)]
    whole = tuple(Placement((REPLICATED,)) for _ in truth.outputs)
    try:
        return run_all(truth.node.call, truth, operands, [None] * len(truth.outputs), whole, setting)
    except Exception:  # the call does not run on such operands
        return None


__all__ = ["Found", "Unprobed", "find_rules", "is_registered", "recheck"]
