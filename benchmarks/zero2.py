"""ZeRO-2: data parallelism whose gradients and optimizer states are in shards (Rajbhandari et al. 2020).

In: a setting on equal devices. Out: seconds per iteration by the event-driven simulator, bytes per device. The program is that of even data
parallelism; what changes is in a cost model of its own, because a plan has no parameter that is whole while its optimizer state is not: gradients are
reduce-scattered, in the same buckets, every device updates its shard, and the parameters are gathered at the end of the step.
"""

from __future__ import annotations

from dataclasses import replace

from hapx.cost.memory import states_of
from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.terms import Term
from hapx.ir import Kind, TensorRef
from hapx.lower import memory
from hapx.plan import Communication, Form
from hapx.planner import Counters, Setting, plan_spmd
from hapx.restriction import BASELINES, with_remat
from hapx.simulate import simulate_program
from hapx.states import Placement


class Zero2(CostModel):
    """The costs of data parallelism with gradients and optimizer states in shards, parameters whole."""

    def update(self, ref: TensorRef, placement: Placement) -> Term:
        return _scaled(super().update(ref, placement), 1 / self._devices)

    def conversion(self, ref: TensorRef, path: tuple[Communication, ...], target: Placement) -> StepCost:
        step = super().conversion(ref, path, target)
        return replace(step, communication=tuple(_reduce_scatter(c) if c.direction == "synchronise" else c for c in step.communication))

    def gather(self) -> float:
        """Seconds of the all-gather of all parameters, in one call."""
        size = self.view.constant(float(sum(r.bytes for r in self.graph.of_kind(Kind.PARAMETER))))
        term = self.links[0].all_gather(Form.PADDED, size.scaled([1 / self._devices] * len(self.kinds)), size)
        return float(term.at({}).max()) if term is not None else 0.0

    @property
    def _devices(self) -> int:
        return self.theory.mesh.sizes[0]


def zero2(setting: Setting) -> tuple[float, int]:
    """(seconds, bytes of the fullest device)."""
    types = {name: replace(t, memory=2**60) for name, t in setting.cluster.device_types.items()}
    free = replace(setting, cluster=replace(setting.cluster, device_types=types), rule=with_remat(BASELINES["dp-even"], "none"))
    best = plan_spmd(free, Counters())[0]
    costs = Zero2(best.theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode)
    time = simulate_program(best.program, setting.graph, costs, best.lengths).total
    states, devices = states_of(setting.optimizer), setting.cluster.num_devices
    spared = sum(r.bytes + 4 * states * r.size for r in setting.graph.of_kind(Kind.PARAMETER)) * (1 - 1 / devices)
    return time + costs.gather(), max(memory(best)) - round(spared)


def _reduce_scatter(c: CommunicationCost) -> CommunicationCost:
    """The first half of an all-reduce, in volume and in messages (`hapx.cost.network`)."""
    return replace(c, term=_scaled(c.term, 0.5))


def _scaled(term: Term, factor: float) -> Term:
    return Term(tuple(p.scaled([factor] * len(p.const)) for p in term.pieces))
