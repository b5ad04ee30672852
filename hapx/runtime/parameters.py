"""The parameters and buffers of a module, as a plan stores them on one device.

In: the user's module (the same on every rank), a plan, this device's places in its stages. Out: the same module objects with local pieces
inside. Invariants: values are those of rank 0's module; names, sharing (tied parameters) and order stay; sharding goes tensor by
tensor, so at most one tensor exists twice at a time; `full` of every piece is the single-device tensor, under the same name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hapx.collectives.communicator import Communicator
from hapx.errors import HapError, PlanError
from hapx.ir import Kind
from hapx.plan import Plan
from hapx.runtime.local import Communicators, Position
from hapx.runtime.materialise import materialise
from hapx.states import REPLICATED, Placement, Sharded


@dataclass(frozen=True)
class Home:
    """A stage that this device has a part in: its number, the device's place in its mesh, and the mesh's communicators."""

    stage: int
    position: Position
    communicators: Communicators


class ParameterStore:
    """Parameters and buffers of `module`, stored as `plan` says. Those of stages that this device has no part in are empty here.

    Args:
        module: is changed in place.
        homes: the stages of this device; parameters have the same lengths in every program.
        everyone: all devices of the cluster, by number.
        device: where the pieces go.
    """

    def __init__(self, module: nn.Module, plan: Plan, homes: Sequence[Home], everyone: Communicator, device: torch.device):
        self.module, self.plan, self.everyone, self.device = module, plan, everyone, device
        self.homes = {home.stage: home for home in homes}
        self.storage = dict(plan.storage_of)
        known = {id(t): self.storage[n] for n, t in self._named(remove_duplicate=False) if n in self.storage}
        self.storage |= {n: known[id(t)] for n, t in self._named(remove_duplicate=False) if id(t) in known}  # ties that the graph does not see
        self.shapes = {n: tuple(t.shape) for n, t in self._named(remove_duplicate=False)}
        self._check()
        self._shard()

    def around(self, module: nn.Module) -> ParameterStore:
        """The same store of a copy of its module, whose tensors are this device's pieces already."""
        store = copy.copy(self)
        store.module = module
        return store

    def stages(self, name: str) -> tuple[int, ...]:
        """The stages that keep a parameter or buffer; one that the graph does not use is whole on all devices of all stages."""
        stored = self.storage.get(name)
        return tuple(c.stage for c in stored.copies) if stored is not None else tuple(range(len(self.plan.stages)))

    def home(self, name: str) -> Home | None:
        """Where this device keeps a parameter or buffer."""
        return next((self.homes[s] for s in self.stages(name) if s in self.homes), None)

    def placement(self, name: str, stage: int) -> Placement:
        """How a stage stores a parameter or buffer."""
        stored = self.storage.get(name)
        if stored is None:
            return Placement((REPLICATED,) * len(self.plan.stages[stage].mesh.axes))
        return next(c.placement for c in stored.copies if c.stage == stage)

    def _named(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        yield from self.module.named_parameters(remove_duplicate=remove_duplicate)
        yield from self.module.named_buffers(remove_duplicate=remove_duplicate)

    def _check(self) -> None:
        """The plan must speak of this module."""
        refs = self.plan.graphs[self.plan.first].refs.values()
        for ref in refs:
            if ref.kind not in (Kind.PARAMETER, Kind.BUFFER):
                continue
            if ref.name not in self.shapes:
                raise PlanError(f"the plan is for another model: there is no {ref.kind.value} {ref.name!r}", hint="plan again for this model")
            if self.shapes[ref.name] != ref.shape:
                found = list(self.shapes[ref.name])
                raise PlanError(
                    f"the plan is for another model: {ref.name} has shape {found}", allowed=str(list(ref.shape)), hint="plan again for this model"
                )

    # ---- sharding -----------------------------------------------------------------------------------------------------

    def _shard(self) -> None:
        done = frozenset[int]()
        if any(t.is_meta for _, t in self._named()):
            done = materialise(self.module, self.everyone, self.device, self._place)
        for name, tensor in self._named():
            if id(tensor) not in done:
                tensor.data = self._piece(name, tensor.data)

    def _place(self, name: str) -> tuple[Position, Placement] | None:
        """How this device keeps a parameter or buffer."""
        home = self.home(name)
        return (home.position, self.placement(name, home.stage)) if home is not None else None

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        """This device's piece of rank 0's value, in memory of its own (a collective call)."""
        return self._taken(name, self.everyone.broadcast(whole.to(self.device), 0))

    def _taken(self, name: str, whole: Tensor) -> Tensor:
        home = self.home(name)
        return home.position.take(whole, self.placement(name, home.stage)) if home is not None else whole.new_empty(0)

    # ---- whole tensors ------------------------------------------------------------------------------------------------

    def full(self, name: str, piece: Tensor) -> Tensor:
        """The single-device tensor of which every rank passes its piece (a collective call)."""
        owner = self.stages(name)[0]
        home = self.homes.get(owner)
        if home is not None:
            whole = home.position.gather(piece, self.placement(name, owner), home.communicators)
            if len(self.plan.stages) == 1:
                return whole
        else:
            whole = piece.new_empty(self.shapes[name])
        return self.everyone.broadcast(whole, self.plan.stages[owner].devices[0])

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers, whole, on every rank, under the keys of the module's own `state_dict`."""
        return {name: self.full(name, t).clone() if isinstance(t, Tensor) else t for name, t in self.module.state_dict().items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of all parameters that have one, whole, on every rank; tied parameters under each of their names."""
        named = list(self.module.named_parameters(remove_duplicate=False))
        there = self._anywhere([p.grad is not None for _, p in named])
        found = [(name, p, p.grad if p.grad is not None else torch.zeros_like(p)) for (name, p), has in zip(named, there, strict=True) if has]
        return {name: self.full(name, gradient).clone() for name, _, gradient in found}

    def _anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Whether each is true on any device (on all devices of a stage they are alike)."""
        if len(self.plan.stages) == 1 or not flags:
            return list(flags)
        return [bool(f) for f in self.everyone.all_reduce(torch.tensor(flags, dtype=torch.float32, device=self.device), "max").tolist()]

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Keeps this device's piece of every tensor. Raises HapError for missing or unknown keys and for wrong shapes."""
        own = {n: t for n, t in self.module.state_dict().items() if isinstance(t, Tensor)}
        missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
        if missing or unknown:
            parts = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
            raise HapError(f"the state dict does not fit the model: {'; '.join(parts)}", where="load_full_state_dict")
        for name in own:
            if tuple(state[name].shape) != self.shapes[name]:
                raise HapError(f"{name} has shape {list(state[name].shape)}", where="load_full_state_dict", allowed=str(list(self.shapes[name])))
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self._taken(name, state[name]))

    @torch.no_grad()
    def align(self) -> None:
        """Makes the copies of every parameter equal again: along axes that do not cut it, coordinate 0 decides (a collective call).

        Kernels of different GPU models round differently, so copies that are updated on each device drift apart. `.data`: a graph
        that waits for its backward must not notice."""
        for name, parameter in self.module.named_parameters():
            home = self.home(name)
            if home is None:
                continue
            states = self.placement(name, home.stage).states
            whole = tuple(a for a, s in enumerate(states) if not isinstance(s, Sharded) and home.position.mesh.sizes[a] > 1)
            if whole and parameter.requires_grad and parameter.numel():
                parameter.data.copy_(home.communicators[whole].broadcast(parameter.data, 0))

    def counted(self, name: str) -> bool:
        """Whether this device counts its piece of a tensor when elements of all devices are added up, so that each counts once: in the first stage
        that keeps it, and along an axis that does not cut, only coordinate 0 does."""
        owner = self.stages(name)[0]
        home = self.homes.get(owner)
        if home is None:
            return False
        placement = self.placement(name, owner)
        return all(c == 0 or home.position.block(placement, a) is not None for a, c in enumerate(home.position.coordinates))
