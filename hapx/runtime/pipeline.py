"""A plan of several stages on one device: dispatches the static action list of its group, micro-batch by micro-batch.

In: a plan, the user's module, communicators of the device's stages, a messenger to the devices of other stages. Out: the outputs of the whole batch,
and gradients in `.grad` of the module's parameters. A forward pass in training runs the whole schedule, backward included, with the gradient
scaler's scale as the cotangent of the loss, and keeps the gradients aside; `loss.backward()` adds them, times what arrives there over that scale.

Invariant: what the devices compute together is what one device computes that runs the micro-batches one after another, their losses weighted so that
they sum up to the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hapx.collectives.communicator import Communicator
from hapx.collectives.rng import Rng
from hapx.errors import LaunchError
from hapx.ir import TensorRef
from hapx.plan import Action, Plan, ProgramKey
from hapx.runtime.build import LocalProgram
from hapx.runtime.counts import Counter
from hapx.runtime.crossings import Crossings, Messengers, Way, crossings
from hapx.runtime.executor import ALIGN_EVERY, share_out
from hapx.runtime.gradients import BUCKET_BYTES, GradientSynchroniser
from hapx.runtime.local import Communicators, Position
from hapx.runtime.micro_batches import join, split
from hapx.runtime.norms import clip_grad_norm_
from hapx.runtime.parameters import Home, ParameterStore
from hapx.runtime.reshard import Pending
from hapx.runtime.stage import StageRunner
from hapx.states import Placement


@dataclass
class Kept:
    """What a stage keeps of a micro-batch between forward and backward: received tensors (leaves of autograd) and outputs, by name; cotangents of the
    outputs that have arrived."""

    received: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)


class _Step:
    """One run of a schedule on this device."""

    def __init__(self, pipeline: Pipeline, key: ProgramKey, inputs: Mapping[str, Tensor], seed: float):
        self.pipeline, self.key, self.seed = pipeline, key, seed
        plan = pipeline.plan
        self.graph, self.crossings = plan.graphs[key], pipeline.crossings(key)
        assert self.graph.micro_batches is not None
        counter = pipeline.counter(key)
        counts = counter.counts(inputs, {n: pipeline.store.full(n, pipeline.module.get_buffer(n)) for n in counter.buffers})
        self.micro_batches = [{**own, **counts} for own in split(inputs, self.graph.micro_batches)]
        self.actions = plan.schedules[key].actions[pipeline.group] if pipeline.group >= 0 else ()
        self.training = torch.is_grad_enabled() and key.mode == "train"
        self.last = {a.stage: a.micro_batch for a in self.actions if a.kind == "backward"}
        self.kept: dict[tuple[int, int], Kept] = {}
        self.sending: list[Any] = []
        self.posted: dict[tuple[int, int, str], list[tuple[Way, Pending]]] = {}
        self.results: list[dict[str, Tensor]] = [{} for _ in self.micro_batches]

    def run(self) -> list[dict[str, Tensor]]:
        """Per micro-batch, the loss and results of this device's stages, detached."""
        for action in self.actions:
            if self.training or (action.kind != "backward" and action.kind != "synchronise" and action.direction == "forward"):
                getattr(self, f"_{action.kind}")(action)
        return self.results

    def wait(self) -> None:
        """For everything that was sent."""
        for handle in self.sending:
            handle.wait()

    def _own(self, action: Action) -> Kept:
        return self.kept.setdefault((action.stage, action.micro_batch), Kept())

    def _way(self, action: Action) -> Way:
        ends = (action.stage, action.peer) if action.kind == "send" else (action.peer, action.stage)
        return self.crossings.ways[(*ends, action.direction)]

    def _send(self, action: Action) -> None:
        own, way = self._own(action), self._way(action)
        if action.direction == "forward":
            tensors = [own.outputs[n].detach() for n in way.names]
        else:
            tensors = [_cotangent(own.received[n]) for n in way.names]
        self.sending += way.resharder.send(tensors)

    def _receive(self, action: Action) -> None:
        way = self._way(action)
        self.posted.setdefault((action.stage, action.micro_batch, action.direction), []).append((way, way.resharder.post()))

    def _arrived(self, action: Action) -> Iterator[tuple[str, Tensor]]:
        """What a run waits for, in the order in which it was asked for."""
        for way, pending in self.posted.pop((action.stage, action.micro_batch, action.kind), ()):
            yield from zip(way.names, way.resharder.finish(pending), strict=True)

    def _forward(self, action: Action) -> None:
        pipeline, own = self.pipeline, self._own(action)
        for name, tensor in self._arrived(action):
            own.received[name] = tensor.requires_grad_(self.training and self.graph.refs[name].requires_grad)
        pipeline.rng.step = pipeline.base + action.micro_batch
        waits = self.training and action.micro_batch != self.last[action.stage]  # its gradients join those of the last one
        with pipeline.gradients[action.stage].no_sync() if waits else nullcontext():
            outputs = pipeline.runners[action.stage].run(self.key, {**self.micro_batches[action.micro_batch], **own.received})
        own.outputs = outputs
        for output in pipeline.plan.part(self.key, action.stage).outputs:
            if output.role in ("loss", "result"):
                self.results[action.micro_batch][output.tensor] = outputs[output.tensor].detach()

    def _backward(self, action: Action) -> None:
        own, graph = self._own(action), self.pipeline.plan.part(self.key, action.stage)
        for name, tensor in self._arrived(action):
            own.cotangents[name] = own.cotangents[name] + tensor if name in own.cotangents else tensor
        pairs = [(own.outputs[n], own.cotangents[n] if n in own.cotangents else self._seed(own.outputs[n])) for n in graph.roots]
        torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])
        own.outputs, own.cotangents = {}, {}

    def _seed(self, loss: Tensor) -> Tensor:
        return torch.full_like(loss, self.seed)

    def _synchronise(self, action: Action) -> None:
        for tie in self.crossings.ties:
            for resharder in tie.senders.get(action.stage, ()):
                self.sending += resharder.send([self.pipeline.gradient(tie.name)])

    def _free(self, action: Action) -> None:
        self.kept.pop((action.stage, action.micro_batch), None)


def _cotangent(received: Tensor) -> Tensor:
    """What flows back to where a tensor came from; nothing did where the micro-batch has no elements here."""
    return received.grad if received.grad is not None else torch.zeros_like(received)


class Pipeline:
    """Runs a plan of several stages on one device. The arguments are those of `hapx.runtime.executor.Executor`, but for

    communicators: per stage, those of its mesh (empty where this device has no part in it).
    everyone: all devices of the cluster, by number.
    messengers: makes a messenger for the lanes of a program.
    scale: of the gradient scaler; the cotangent of the loss.
    """

    def __init__(
        self, plan: Plan, rank: int, module: nn.Module, communicators: Sequence[Communicators], everyone: Communicator, messengers: Messengers, *,
        seed: int = 0, device: torch.device | None = None, scale: Callable[[], float] = lambda: 1.0, bucket_bytes: int = BUCKET_BYTES,
        gradient_dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self.rank, self.module, self.everyone, self.messengers = rank, module, everyone, messengers
        self.device, self.rng, self.base = device or torch.device("cpu"), Rng(seed), 0
        self.scale = scale
        self.all_communicators = tuple(communicators)
        self._plan = plan
        own = plan.stages_of(rank)
        self.group = next((i for i, devices in enumerate(plan.groups) if rank in devices), -1)
        homes = [Home(s, Position.of(plan.stages[s], plan.first, rank), communicators[s]) for s in own]
        self.store = ParameterStore(module, plan, homes, everyone, self.device)
        named = dict(module.named_parameters(remove_duplicate=False))
        self.gradients = {s: GradientSynchroniser(named, communicators[s], gradient_dtype) for s in own}
        self.runners = {
            s: StageRunner(plan, s, rank, module, communicators[s], self.rng, self.gradients[s], device=self.device, bucket_bytes=bucket_bytes)
            for s in own
        }
        self.drifts = any(len({plan.cluster.devices[d].type for d in stage.devices}) > 1 for stage in plan.stages)
        self._counters: dict[ProgramKey, Counter] = {}
        self._crossings: dict[ProgramKey, Crossings] = {}

    @property
    def plan(self) -> Plan:
        return self._plan

    @plan.setter
    def plan(self, longer: Plan) -> None:
        """The same plan with more programs."""
        self._plan = longer
        for runner in self.runners.values():
            runner.plan = longer

    # ---- what is made once --------------------------------------------------------------------------------------------

    def counter(self, key: ProgramKey) -> Counter:
        """Weights of the losses of micro-batches."""
        if key not in self._counters:
            self._counters[key] = Counter(self.plan.graphs[key], self.device)
        return self._counters[key]

    def crossings(self, key: ProgramKey) -> Crossings:
        """What crosses between stages (the first time a collective call)."""
        if key not in self._crossings:
            self._crossings[key] = crossings(self.plan, key, self.rank, self.all_communicators, self.messengers, self.device)
        return self._crossings[key]

    def _of(self, stage: int) -> Communicators:
        return self.all_communicators[stage]

    def gradient(self, name: str) -> Tensor:
        """This device's gradient of a parameter, zeros where it has none."""
        parameter = self.module.get_parameter(name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    # ---- running ------------------------------------------------------------------------------------------------------

    def run(self, key: ProgramKey, inputs: Mapping[str, Tensor], local_inputs: Mapping[str, Placement] | None = None) -> dict[str, Tensor]:
        """One forward pass of the whole batch; in training, with gradients wanted, the backward passes too. `inputs`: by the graph's names, whole.
        Returns the graph's outputs by name: the loss on every device, results as the devices of their stage have them (empty elsewhere)."""
        if local_inputs:
            raise LaunchError("a pipeline takes whole batches", where="HAP", allowed='inputs="global"')
        times = len(self.plan.schedules[key].micro_batches)
        if key.mode == "train":
            if self.drifts and (self.rng.step + times) // ALIGN_EVERY > self.rng.step // ALIGN_EVERY:
                self.store.align()
            self.base = self.rng.step + 1
        step = _Step(self, key, inputs, self.scale())
        results, gradients = self._with_gradients(step) if step.training else (step.run(), [])
        step.wait()
        if key.mode == "train":
            self.rng.step = self.base + times - 1
        outputs = self._outputs(key, results)
        if step.training:
            loss = self.plan.graphs[key].loss
            anchor = torch.zeros((), requires_grad=True, device=self.device)
            outputs[loss] = _Ran.apply(anchor, self, gradients, step.seed, outputs[loss])
        return outputs

    def _with_gradients(self, step: _Step) -> tuple[list[dict[str, Tensor]], list[Tensor | None]]:
        """Runs a schedule; the gradients that it makes are taken out of the parameters again."""
        parameters = list(self.module.parameters())
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            results = step.run()
            self._sum_ties(step.crossings)
            return results, [p.grad for p in parameters]
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient

    def _sum_ties(self, found: Crossings) -> None:
        """The gradients of all copies, in the order of their stages, so that all copies have the same sum."""
        for tie in found.ties:
            for ways in tie.receivers.values():
                own = self.gradient(tie.name)
                parts = [own if way is None else way.finish(way.post())[0] for way in ways]
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                self.module.get_parameter(tie.name).grad = total

    def _outputs(self, key: ProgramKey, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Outputs of the whole batch from those of its micro-batches. Where a stage is elsewhere, its results are empty."""
        plan, graph = self.plan, self.plan.graphs[key]
        wanted = [o for o in graph.outputs if o.role != "buffer"]
        absent = {o.tensor: self._absent(graph.refs[o.tensor]) for o in wanted if self.stage_of(key, o.tensor) not in self.runners}
        joined = join(graph, [{**absent, **own} for own in parts])
        joined[graph.loss] = self.everyone.broadcast(joined[graph.loss], plan.stages[self.stage_of(key, graph.loss)].devices[0])
        return joined

    def _absent(self, ref: TensorRef) -> Tensor:
        shape = (0, *ref.shape[1:]) if ref.shape else ()
        return torch.zeros(shape, dtype=getattr(torch, ref.dtype), device=self.device)

    def stage_of(self, key: ProgramKey, tensor: str) -> int:
        """The stage that makes an output."""
        return next(i for i, s in enumerate(self.plan.stages) for p in s.programs[key].gives if p.tensor == tensor)

    def gathered(self, key: ProgramKey, name: str, piece: Tensor) -> Tensor:
        """A result, whole, on all devices, from the pieces of those of its stage (a collective call)."""
        stage = self.stage_of(key, name)
        source = self.plan.stages[stage].devices[0]
        whole = piece
        if stage in self.runners:
            placement = next(p.placement for p in self.plan.stages[stage].programs[key].gives if p.tensor == name)
            whole = self.runners[stage].position(key).gather(piece, placement, self._of(stage))
        return self.everyone.broadcast(whole, source)

    def batch_sizes(self, key: ProgramKey) -> tuple[int, ...]:
        """How many samples of the global batch each rank would bring, by its share of the work."""
        return share_out(sum(self.plan.schedules[key].micro_batches), self.plan.shares)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `hapx.runtime.norms`."""
        return clip_grad_norm_(self.store, max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[None]:
        """A pipeline sums its gradients within every forward call: accumulation needs no care."""
        return nullcontext()

    def clear(self) -> None:
        """Nothing is kept aside between calls."""

    def seed_with(self, scale: Callable[[], float]) -> None:
        """By what the loss is going to be multiplied before `backward`."""
        self.scale = scale

    def program(self, key: ProgramKey) -> LocalProgram:
        """The local program of this device's first stage."""
        return self.runners[min(self.runners)].program(key)

    def add(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Adds gradients, times a factor, to those of the module's parameters."""
        for p, gradient in zip(self.module.parameters(), gradients, strict=True):
            if gradient is not None:
                scaled = gradient if factor == 1.0 else gradient * factor
                p.grad = scaled.clone() if p.grad is None else p.grad + scaled


class _Ran(torch.autograd.Function):
    """The loss of a schedule that has run, backward included: backward hands out its gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pipeline: Pipeline, gradients: list[Tensor | None], seed: float, loss: Tensor) -> Tensor:
        ctx.pipeline, ctx.gradients, ctx.seed = pipeline, gradients, seed
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.pipeline.add(ctx.gradients, float(cotangent.double()) / ctx.seed)
        return None, None, None, None, None
