"""One device of a training run: its parameters, its local programs, its gradients. Knows nothing of processes.

In: a plan, the user's module, communicators (over torch.distributed, or between threads). Out: the graph's outputs, and gradients in
`.grad` of the module's parameters. Invariant: what the devices compute together is what the module computes alone on the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from hapx.collectives.communicator import Communicator
from hapx.collectives.rng import Rng
from hapx.errors import LaunchError
from hapx.layout import divide
from hapx.plan import Communication, Plan, ProgramKey
from hapx.runtime.build import LocalProgram
from hapx.runtime.gradients import BUCKET_BYTES, GradientSynchroniser
from hapx.runtime.local import Communicators, Position
from hapx.runtime.norms import clip_grad_norm_
from hapx.runtime.parameters import Home, ParameterStore
from hapx.runtime.stage import StageRunner
from hapx.states import Placement, Sharded

# forward passes in training between two alignments of parameters that several kinds of devices keep (rounding differs between kinds)
ALIGN_EVERY = 100


class Executor:
    """Runs a plan on one device.

    Args:
        plan: with one stage.
        rank: number of this device in the cluster.
        module: the user's; its parameters and buffers are replaced by this device's pieces, in place.
        communicators: of `hapx.collectives.communicator.create_groups` for the plan's mesh.
        seed: of the random numbers; the same on all ranks.
        gradient_dtype: in which gradients of parameters are summed over devices; None: the parameter's own.
        store: of a module whose tensors are this device's pieces already; None: they are cut.
    """

    def __init__(
        self, plan: Plan, rank: int, module: nn.Module, communicators: Communicators, *,
        seed: int = 0, device: torch.device | None = None, bucket_bytes: int = BUCKET_BYTES, gradient_dtype: torch.dtype | None = None,
        store: ParameterStore | None = None,
    ):  # fmt: skip
        if len(plan.stages) != 1:
            raise LaunchError(
                f"the plan has {len(plan.stages)} pipeline stages", where="Executor", allowed="one stage", hint="hapx.runtime.pipeline runs several"
            )
        self.rank, self.module, self.communicators = rank, module, communicators
        self.device = device or torch.device("cpu")
        self.rng = Rng(seed)
        self.begins: Callable[[], None] = lambda: None  # called when a run begins
        self.drifts = len({plan.cluster.devices[d].type for d in plan.stages[0].mesh.devices}) > 1
        self.everyone = communicators[tuple(range(len(plan.stages[0].mesh.axes)))]
        home = Home(0, Position.of(plan.stages[0], plan.first, rank), communicators)
        self.store = store or ParameterStore(module, plan, (home,), self.everyone, self.device)
        self.gradients = GradientSynchroniser(dict(module.named_parameters(remove_duplicate=False)), communicators, gradient_dtype)
        self.runner = StageRunner(plan, 0, rank, module, communicators, self.rng, self.gradients, device=self.device, bucket_bytes=bucket_bytes)

    def around(self, module: nn.Module) -> Executor:
        """One that runs a copy of the module: the same pieces, devices and random numbers; gradients and programs of its own."""
        other = Executor(
            self.plan, self.rank, module, self.communicators, device=self.device, bucket_bytes=self.runner.bucket_bytes,
            gradient_dtype=self.gradients.dtype, store=self.store.around(module),
        )  # fmt: skip
        other.rng.follow(self.rng)
        return other

    @property
    def plan(self) -> Plan:
        return self.runner.plan

    @plan.setter
    def plan(self, longer: Plan) -> None:
        """The same plan with more programs."""
        self.runner.plan = longer

    @property
    def started(self) -> bool:
        """Whether a program was built."""
        return bool(self.runner.programs)

    def wrap(self, wrapper: Callable[[Communicator], Communicator]) -> None:
        """Puts something between the device and its communicators, before the first program is built."""
        self.communicators = {axes: wrapper(c) for axes, c in self.communicators.items()}
        self.runner.communicators = self.gradients.communicators = self.communicators
        self.everyone = self.store.everyone = self.communicators[tuple(range(len(self.plan.stages[0].mesh.axes)))]

    def position(self, key: ProgramKey) -> Position:
        return self.runner.position(key)

    def program(self, key: ProgramKey, local_inputs: Mapping[str, Placement] | None = None) -> LocalProgram:
        """The local program, built at its first use."""
        return self.runner.program(key, local_inputs)

    def code(self, key: ProgramKey) -> str:
        """The local program as Python text."""
        return self.program(key).code

    # ---- running ------------------------------------------------------------------------------------------------------

    def run(self, key: ProgramKey, inputs: Mapping[str, Tensor], local_inputs: Mapping[str, Placement] | None = None) -> dict[str, Tensor]:
        """One forward pass. `inputs`: by the graph's names, whole, except for `local_inputs`. Returns the graph's outputs by name,
        as this device has them, and updates the module's buffers."""
        self.begins()
        self.runner.program(key, local_inputs)  # built before anything changes
        if key.mode == "eval":
            with self.rng.evaluating():
                return self.runner.run(key, inputs, local_inputs)
        self.rng.next_step()
        if self.drifts and self.rng.step % ALIGN_EVERY == 0:
            self.store.align()
        return self.runner.run(key, inputs, local_inputs)

    def clear(self) -> None:
        """Forgets gradients that were kept aside."""
        self.gradients.clear()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward of forward passes inside keeps gradients aside; they join the next one outside."""
        return self.gradients.no_sync()

    def gathered(self, key: ProgramKey, name: str, piece: Tensor) -> Tensor:
        """A result, whole, from the pieces of all devices (a collective call)."""
        placement = next(p.placement for p in self.plan.stages[0].programs[key].gives if p.tensor == name)
        return self.position(key).gather(piece, placement, self.communicators)

    # ---- batches ------------------------------------------------------------------------------------------------------

    def cut_placement(self, key: ProgramKey, name: str) -> Placement | None:
        """The placement, cut along dim 0 only, in which the program uses the input, if that is its only use."""
        uses = [i.triple for i in self.plan.stages[0].programs[key].instructions if any(p.tensor == name for p in i.triple.pre)]
        targets = set()
        for triple in uses:
            if triple.node is None and isinstance(triple.body, tuple) and all(_cuts_batch(c) for c in triple.body):
                targets.add(triple.post[0].placement)
            elif any(p.tensor == name and not any(isinstance(s, Sharded) for s in p.placement.states) for p in triple.pre):
                return None
        return targets.pop() if len(targets) == 1 else None

    def batch_sizes(self, key: ProgramKey) -> tuple[int, ...]:
        """How many samples of the global batch each rank computes; where ranks compute the same samples, or all, how many of them it
        would bring."""
        graph, stage = self.plan.graphs[key], self.plan.stages[0]
        for name in graph.input_names:
            placement = self.cut_placement(key, name)
            if placement is None or graph.refs[name].shape[:1] != (graph.batch,):
                continue
            rows: dict[tuple[int, ...], list[int]] = {}
            for device in stage.mesh.devices:  # devices with the same coordinates on the cutting axes have the same samples
                coordinates = stage.mesh.coordinates(device)
                rows.setdefault(tuple(c for c, s in zip(coordinates, placement.states, strict=True) if isinstance(s, Sharded)), []).append(device)
            sizes = [0] * len(stage.mesh.devices)
            for devices in rows.values():
                number = self.position(key).at(devices[0]).shape(graph.refs[name].shape, placement)[0]
                for device, size in zip(devices, divide(number, len(devices)), strict=True):
                    sizes[device] = size
            return tuple(sizes)
        return share_out(graph.batch, self.plan.shares)

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `hapx.runtime.norms`."""
        return clip_grad_norm_(self.store, max_norm, norm_type)

    def seed_with(self, scale: Callable[[], float]) -> None:
        """Nothing to do with one stage: backward begins with what arrives at the loss."""


def _cuts_batch(c: Communication) -> bool:
    return isinstance(c.target, Sharded) and c.target.dim == 0 and c.target.outer == 1


def share_out(n: int, shares: Sequence[float]) -> tuple[int, ...]:
    """n samples in proportion to `shares`, by largest remainder; ties go to the first."""
    exact = [n * s / sum(shares) for s in shares]
    sizes = [math.floor(e + 1e-9) for e in exact]
    order = sorted(range(len(shares)), key=lambda i: (sizes[i] - exact[i], i))
    for i in order[: n - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)
