"""What autograd keeps for backward, of a sample call or of anything, seen by its saved-tensor hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hapx.plan import Axis, Mesh
from hapx.theory.probe import _call, truth
from hapx.theory.samples import Sample
from hapx.theory.settings import Dealt, Setting

ALONE = Setting(Mesh("alone", (Axis("d", 1, "devices"),), (0,), 0), Dealt(1, None, 1))


@contextmanager
def keeping() -> Iterator[list[Tensor]]:
    """The tensors that are kept for backward of what is done inside."""
    kept: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(note, lambda t: t):
        yield kept


def bytes_beside(kept: Iterable[Tensor], known: Iterable[Tensor]) -> int:
    """Bytes of the storages of kept tensors that are not those of known ones."""
    storages = set(map(_storage, known))
    return sum({_storage(t): t.untyped_storage().nbytes() for t in kept if _storage(t) not in storages}.values())


def _called(sample: Sample) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Operands, as leaves of autograd, and outputs of a sample call on one device. (What is true of it is found out once.)"""
    case = truth(sample)
    leaves = [x.clone().requires_grad_(r.requires_grad) for x, r in zip(case.operands, case.refs, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return leaves, _call(case.node.call, leaves, ALONE, (0,), {})


def storages_of_results(sample: Sample) -> list[tuple[int, int]]:
    """Of every storage that the call makes: its bytes, and those of the results in it."""
    operands, outputs = _called(sample)
    found: dict[int, tuple[int, int]] = {}
    for t in outputs:
        held, size = found.get(_storage(t), (t.untyped_storage().nbytes(), 0))
        found[_storage(t)] = held, size + t.numel() * t.element_size()
    given = set(map(_storage, operands))
    return [pair for storage, pair in found.items() if storage not in given]


def kept_by_autograd(sample: Sample) -> tuple[set[str], int]:
    """(operands and outputs that are kept, bytes of other storages that are)."""
    case = truth(sample)
    with keeping() as kept:
        leaves, outputs = _called(sample)
    names = {_storage(x): r.name for x, r in zip(leaves, case.refs, strict=True)}
    for x, r in zip(outputs, case.node.outputs, strict=True):
        names.setdefault(_storage(x), r.name)
    return {names[_storage(t)] for t in kept if _storage(t) in names}, bytes_beside(kept, [*leaves, *outputs])


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
