"""Parameters that backward makes again: gathered ones, which are freed after their use in forward, and copies in another dtype.

In: a forward pass run inside of `freeing()`, in which conversions with `free` register what they gathered; calls with `reading`, which casts their
operands. Out: a graph that keeps tokens instead of the gathered tensors and the copies (and of views of them, which operators save just
as often). Invariants: gradients are those of the graph that keeps everything; all ranks gather again in the same order, because autograd
visits equal programs in equal order; in one backward pass a tensor is gathered once, and dropped when every token of it has been redeemed.
Hooks for what autograd keeps cost time: inside of `freeing()` all operators have them, outside of it those that read a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_ACTIVE = threading.local()


class FreedParameter:
    """One gathered tensor: how to get it back. `regather` returns a tensor with the layout of the first one."""

    def __init__(self, gathered: Tensor, regather: Callable[[], Tensor]):
        self.storage = weakref.ref(gathered.untyped_storage())
        self.dtype, self.nbytes, self.regather = gathered.dtype, gathered.untyped_storage().nbytes(), regather
        self.handed_out = 0
        self.redeemed = 0
        self.cached: Tensor | None = None

    def redeem(self) -> Tensor:
        """The gathered tensor, for one token."""
        whole = self.cached
        if whole is None:
            with torch.no_grad():
                whole = self.regather()
            assert whole.untyped_storage().nbytes() == self.nbytes, "gathered again with another layout"
        self.redeemed += 1
        # counted, not left to reference counts, so that all ranks agree on when to gather
        self.cached = whole if self.redeemed < self.handed_out else None
        return whole


class _Token:
    """Stands for a saved tensor that is (a view of) a freed parameter."""

    def __init__(self, parameter: FreedParameter, t: Tensor):
        self.parameter = parameter
        self.size, self.stride, self.offset = t.size(), t.stride(), t.storage_offset()
        parameter.handed_out += 1

    def tensor(self) -> Tensor:
        return self.parameter.redeem().as_strided(self.size, self.stride, self.offset)


class Kept(NamedTuple):
    """A saved tensor. Autograd does not look itself whether one that goes through hooks was changed."""

    saved: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.saved._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.saved.shape)} that backward needs was changed in place after the forward pass "
                "(a parameter by optimizer.step(), a buffer or an input by the caller): call backward before, or run forward again"
            )
        return self.saved


class _Copy(NamedTuple):
    """Stands for a saved tensor that is (a view of) a copy of a parameter in another dtype. source: the parameter, as it is kept."""

    source: Kept | _Token
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        return self.source.tensor().to(self.dtype).as_strided(self.size, self.stride)


class freeing:
    """Context manager for a forward pass: `free` conversions inside of it do not keep what they gathered. Outside of it they do."""

    def __init__(self) -> None:
        self._parameters: dict[int, FreedParameter] = {}
        self._hooks = saved_tensors_hooks(self.pack, _again)
        self._before: freeing | None = None

    def __enter__(self) -> freeing:
        self._before = getattr(_ACTIVE, "registry", None)
        _ACTIVE.registry = self
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        _ACTIVE.registry = self._before
        self._parameters.clear()

    def register(self, gathered: Tensor, regather: Callable[[Tensor], Tensor], source: Tensor) -> None:
        """From now on, saved tensors that share memory with `gathered` become tokens; `regather(source)` makes it again. A source
        that is itself a freed parameter is not kept either."""
        kept = self.pack(source.detach())

        def again() -> Tensor:
            return regather(kept.tensor())

        storage = gathered.untyped_storage()
        if storage.nbytes():
            self._parameters[storage.data_ptr()] = FreedParameter(gathered, again)

    def pack(self, t: Tensor) -> _Token | Kept:
        """What autograd keeps of a tensor that an operator saves."""
        storage = t.untyped_storage()
        parameter = self._parameters.get(storage.data_ptr())
        # the address may have been reused since: only the very same storage counts
        if parameter is None or parameter.storage() is not storage or parameter.dtype != t.dtype:
            return _kept(t)
        return _Token(parameter, t)


def _kept(t: Tensor) -> Kept:
    return Kept(t, t._version)


def _again(kept: Kept | _Token | _Copy) -> Tensor:
    return kept.tensor()


def free_after_forward(gathered: Tensor, regather: Callable[[Tensor], Tensor], source: Tensor) -> None:
    """Registers `gathered` = regather(source) with the `freeing()` under way in this thread, if any."""
    registry: freeing | None = getattr(_ACTIVE, "registry", None)
    if registry is not None:
        registry.register(gathered, regather, source)


def reading(function: Callable[..., Any], operands: Sequence[Tensor], dtypes: Mapping[int, torch.dtype]) -> Any:
    """`function` of the operands, of which those with these numbers, parameters, are read in these dtypes. Their copies are not kept for backward,
    but made again there, each time that they are asked for."""
    read, copies = list(operands), {}
    for i, dtype in dtypes.items():
        read[i] = copy = operands[i].to(dtype)
        if copy.requires_grad and copy.numel():
            copies[copy.data_ptr()] = operands[i], dtype
    if not copies:
        return function(*read)
    registry: freeing | None = getattr(_ACTIVE, "registry", None)
    keep = _kept if registry is None else registry.pack

    def pack(t: Tensor) -> Kept | _Token | _Copy:
        found = copies.get(t.data_ptr())
        if found is None or t.dtype != found[1]:
            return keep(t)
        source, dtype = found
        return _Copy(keep(source.detach()), dtype, t.size(), t.stride())

    try:
        with saved_tensors_hooks(pack, _again):
            return function(*read)
    finally:
        copies.clear()  # autograd keeps `pack`
