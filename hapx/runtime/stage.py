"""One stage of a plan on one device: its local programs, and how a forward pass of one is run.

In: a plan, the number of the stage, the user's module with this device's pieces inside, communicators of the stage's mesh. Out: the outputs of the
stage's graph, as this device has them; the module's buffers are updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hapx.collectives.freed import freeing
from hapx.collectives.rng import Rng
from hapx.plan import Plan, ProgramKey
from hapx.runtime.build import LocalProgram, build_local
from hapx.runtime.gradients import BUCKET_BYTES, GradientSynchroniser
from hapx.runtime.local import Communicators, Position
from hapx.states import Placement


class StageRunner:
    """See the module. `plan` may be replaced by one with more programs. gradients: where parameters go through when a gradient is wanted."""

    def __init__(
        self, plan: Plan, number: int, rank: int, module: nn.Module, communicators: Communicators, rng: Rng, gradients: GradientSynchroniser, *,
        device: torch.device, bucket_bytes: int = BUCKET_BYTES,
    ):  # fmt: skip
        self.plan, self.number, self.rank, self.module, self.communicators = plan, number, rank, module, communicators
        self.rng, self.gradients, self.device, self.bucket_bytes = rng, gradients, device, bucket_bytes
        self.programs: dict[tuple[ProgramKey, tuple[tuple[str, Placement], ...]], LocalProgram] = {}
        self.owners: dict[tuple[str, ...], list[tuple[nn.Module, str]]] = {}

    def position(self, key: ProgramKey) -> Position:
        return Position.of(self.plan.stages[self.number], key, self.rank)

    def program(self, key: ProgramKey, local_inputs: Mapping[str, Placement] | None = None) -> LocalProgram:
        """The local program, built at its first use."""
        local = tuple(sorted((local_inputs or {}).items(), key=lambda item: item[0]))
        if (key, local) not in self.programs:
            self.programs[key, local] = build_local(
                self.plan, self.rank, key, self.communicators, self.rng, stage=self.number,
                device=self.device, local_inputs=dict(local), bucket_bytes=self.bucket_bytes, gradient_dtype=self.gradients.dtype,
            )  # fmt: skip
        return self.programs[key, local]

    def _owners(self, names: tuple[str, ...]) -> list[tuple[nn.Module, str]]:
        """The modules that have these parameters, and what they call them. (Modules are what they were when the program was captured.)"""
        if names not in self.owners:
            paths = [name.rpartition(".") for name in names]
            self.owners[names] = [(self.module.get_submodule(path), own) for path, _, own in paths]
        return self.owners[names]

    def run(self, key: ProgramKey, inputs: Mapping[str, Tensor], local_inputs: Mapping[str, Placement] | None = None) -> dict[str, Tensor]:
        """One forward pass. `inputs`: by the graph's names, whole, except for `local_inputs` and for what was received. Returns outputs by name."""
        program = self.program(key, local_inputs)
        program.under_way.current = self.gradients.begin(program.layout) if torch.is_grad_enabled() else None
        arguments = [owner._parameters[name] for owner, name in self._owners(program.parameters)]
        # autograd keeps what it needs of a buffer, which must not be overwritten below
        kept = program.snapshots if torch.is_grad_enabled() else frozenset()
        arguments += [self.module.get_buffer(n).clone() if n in kept else self.module.get_buffer(n) for n in program.buffers]
        arguments += [inputs[n] for n in program.inputs]
        # the program says itself in which dtypes it computes, whatever the caller has on; hooks for all that autograd keeps take a tenth of forward
        with freeing() if program.frees else nullcontext(), torch.autocast(self.device.type, enabled=False):
            values = program.module(*arguments)
        program.under_way.current = None  # the pass belongs to the graph that autograd keeps, not to the program
        results = {}
        for output, value in zip(program.graph.outputs, values, strict=True):
            if output.role == "buffer":
                assert output.target is not None
                with torch.no_grad():
                    self.module.get_buffer(output.target).copy_(value)
            else:
                results[output.tensor] = value
        return results
