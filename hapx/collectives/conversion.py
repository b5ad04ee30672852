"""Differentiable conversions between two states along one axis.

In: the local tensor of this device in the source state. Out: its local tensor in the target state. Invariant: if the locals are in the
source state of a reference tensor e, the results are in the target state of e; and if cotangents arrive in the dual of the target
state of a reference cotangent, those that leave are in the dual of the source state of it. Which operation runs
forward and backward is read from `hapx.transposes.TRANSPOSES`; every rank runs it, also with empty tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hapx.collectives.blocks import exchange_shards, gather_shards, pad_shard, reduce_scatter_shards, slice_shard
from hapx.collectives.communicator import Communicator
from hapx.collectives.freed import free_after_forward
from hapx.errors import PlanError
from hapx.layout import Block
from hapx.plan import Communication, Form
from hapx.states import Sharded
from hapx.transposes import TRANSPOSES


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conversion: Conversion) -> Tensor:
        ctx.conversion = conversion
        return conversion.run_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return ctx.conversion.run_backward(cotangent), None


class Conversion(torch.nn.Module):
    """One conversion of `tensor` along one axis, whose devices are those of `comm`.

    Args:
        communication: from which state to which, in which form. Without `gradient`, the result is a constant to autograd. With `free`,
            what was gathered is gathered again in backward if the forward pass runs inside of `hapx.collectives.freeing()`.
        source_block: cut of the source, if it is Sharded: of the tensor as it would be local without this axis.
        target_block: cut of the target, if it is Sharded.
        tensor: name of the tensor, for people.
        sum_dtype: in which real cotangents are summed over devices; None: their own.
    """

    def __init__(
        self, communication: Communication, comm: Communicator, source_block: Block | None, target_block: Block | None, tensor: str,
        sum_dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.sum_dtype = sum_dtype
        source, target = communication.source, communication.target
        if source == target or (type(source), type(target)) not in TRANSPOSES:
            raise PlanError(f"no communication leads from {source} to {target}", where=f"conversion of {tensor}")
        for state, block in ((source, source_block), (target, target_block)):
            if isinstance(state, Sharded) != (block is not None) or (block is not None and len(block.lengths) != comm.size):
                raise PlanError(f"{state} does not fit its cut {block} on {comm.size} devices", where=f"conversion of {tensor}")
        self.communication, self.comm, self.tensor = communication, comm, tensor
        self.source_block, self.target_block = source_block, target_block
        self.forward_name, self.backward_name = TRANSPOSES[type(source), type(target)]
        runs = {self.forward_name, self.backward_name} if communication.gradient else {self.forward_name}
        if communication.form is Form.NONE and runs & {"all_gather", "reduce_scatter"}:
            forms = "padded, grouped, point_to_point"
            raise PlanError(f"{communication} moves shards and has no form", where=f"conversion of {tensor}", allowed=forms)

    def forward(self, x: Tensor) -> Tensor:
        if not self.communication.gradient:
            with torch.no_grad():
                return self.run_forward(x)
        y: Tensor = _Convert.apply(x, self)
        if self.communication.free and y.requires_grad:
            free_after_forward(y, self.run_forward, x)
        return y

    def run_forward(self, x: Tensor) -> Tensor:
        """The conversion itself, not differentiable."""
        return self._run(self.forward_name, x, self.source_block, self.target_block)

    def run_backward(self, cotangent: Tensor) -> Tensor:
        """Its transpose, not differentiable."""
        if self.sum_dtype is None or cotangent.is_complex() or self.backward_name not in ("all_reduce", "reduce_scatter"):
            return self._run(self.backward_name, cotangent, self.target_block, self.source_block)
        return self._run(self.backward_name, cotangent.to(self.sum_dtype), self.target_block, self.source_block).to(cotangent.dtype)

    def _run(self, name: str, t: Tensor, held: Block | None, wanted: Block | None) -> Tensor:
        comm, form = self.comm, self.communication.form
        block = wanted if held is None else held
        if name == "all_reduce":
            return comm.all_reduce(t)
        if name == "none":
            return t.view_as(t)
        if name == "mask":  # not 1/m of it everywhere: that is not exact in low precision
            return t.clone() if comm.rank == 0 else torch.zeros_like(t)
        assert block is not None
        if name == "all_gather":
            return gather_shards(t, block, comm, form)
        if name == "reduce_scatter":
            return reduce_scatter_shards(t, block, comm, form)
        if name == "slice":
            return slice_shard(t, block, comm.rank)
        if name == "pad":
            return pad_shard(t, block, comm.rank)
        assert name == "all_to_all" and held is not None and wanted is not None, name
        return exchange_shards(t, held, wanted, comm)

    def extra_repr(self) -> str:
        directions = f"{self.forward_name} / {self.backward_name}"
        cuts = ", ".join(f"dim {b.dim} as {'+'.join(map(str, b.lengths))}" for b in (self.source_block, self.target_block) if b is not None)
        what = f"{self.tensor}: {self.communication}, forward / backward: {directions}"
        return f"{what}{f', {cuts}' if cuts else ''}, device {self.comm.rank} of {self.comm.size}"
