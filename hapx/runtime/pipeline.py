"""A plan of several stages on one device: dispatches the static action list of its group, micro-batch by micro-batch.

In: a plan, the user's module, communicators of the device's stages, a messenger to the devices of other stages. Out: the outputs of the whole batch,
and gradients in `.grad` of the module's parameters. A forward pass in training runs the whole schedule, backward included, with the gradient
scaler's scale as the cotangent of the loss, and keeps the gradients aside; `loss.backward()` adds them, times what arrives there over that scale.

Invariant: what the devices compute together is what one device computes that runs the micro-batches one after another, their losses weighted so that
they sum up to the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from hapx.collectives.communicator import Communicator
from hapx.collectives.mailbox import Lane
from hapx.collectives.messages import Messenger
from hapx.collectives.rng import Rng
from hapx.errors import LaunchError, PlanError
from hapx.ir import Kind, TensorRef
from hapx.plan import Action, Plan, ProgramKey
from hapx.runtime.build import LocalProgram
from hapx.runtime.counts import Counter
from hapx.runtime.crossings import Crossings, Messengers, crossings
from hapx.runtime.executor import ALIGN_EVERY, share_out
from hapx.runtime.gradients import BUCKET_BYTES, GradientSynchroniser
from hapx.runtime.handout import with_gradients, without_gradients
from hapx.runtime.local import Communicators, Position
from hapx.runtime.micro_batches import join, joined_shape, rejoin, unjoin
from hapx.runtime.norms import clip_grad_norm_
from hapx.runtime.parameters import Home, ParameterStore
from hapx.runtime.stage import StageRunner
from hapx.runtime.step import Step
from hapx.schedules import delivered
from hapx.states import Placement


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
        gradient_dtype: torch.dtype | None = None, store: ParameterStore | None = None,
    ):  # fmt: skip
        self.rank, self.module, self.everyone, self.messengers = rank, module, everyone, messengers
        self.device, self.rng, self.base = device or torch.device("cpu"), Rng(seed), 0
        self.scale = scale
        self.begins: Callable[[], None] = lambda: None  # called when a run begins
        self.all_communicators = tuple(communicators)
        self._plan = plan
        own = plan.stages_of(rank)
        self.group = next((i for i, devices in enumerate(plan.groups) if rank in devices), -1)
        homes = [Home(s, Position.of(plan.stages[s], plan.first, rank), communicators[s]) for s in own]
        _check_buffers(plan)
        self.store = store or ParameterStore(module, plan, homes, everyone, self.device)
        self._bucket_bytes, self._gradient_dtype = bucket_bytes, gradient_dtype
        named = dict(module.named_parameters(remove_duplicate=False))
        self.gradients = {s: GradientSynchroniser(named, communicators[s], gradient_dtype) for s in own}
        self.runners = {
            s: StageRunner(plan, s, rank, module, communicators[s], self.rng, self.gradients[s], device=self.device, bucket_bytes=bucket_bytes)
            for s in own
        }
        self.drifts = _drifts(plan)
        self._counters: dict[ProgramKey, Counter] = {}
        self._crossings: dict[ProgramKey, Crossings] = {}
        self._delivered: dict[ProgramKey, Mapping[Action, tuple[Action, ...]]] = {}
        self._ran: set[tuple[ProgramKey, bool] | str] = set()  # programs, with or without backward, and what else has run

    def around(self, module: nn.Module, scale: Callable[[], float]) -> Pipeline:
        """One that runs a copy of the module: the same pieces, devices and random numbers; gradients and programs of its own."""
        other = Pipeline(
            self.plan, self.rank, module, self.all_communicators, self.everyone, self.messengers, device=self.device, scale=scale,
            bucket_bytes=self._bucket_bytes, gradient_dtype=self._gradient_dtype, store=self.store.around(module),
        )  # fmt: skip
        other.rng.follow(self.rng)
        return other

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

    def delivered(self, key: ProgramKey) -> Mapping[Action, tuple[Action, ...]]:
        """What this device has sent may be waited for at these actions (`hapx.schedules.delivered`)."""
        if key not in self._delivered:
            every = delivered(self.plan.schedules[key], len(self.plan.stages), self.plan.ties)
            self._delivered[key] = every[self.group] if self.group >= 0 else {}
        return self._delivered[key]

    @property
    def started(self) -> bool:
        """Whether a program was built."""
        return bool(self._crossings) or any(runner.programs for runner in self.runners.values())

    def wrap(self, wrapper: Callable[[Communicator], Communicator], messengers: Callable[[Messenger], Messenger]) -> None:
        """Puts something between the device and its communicators and messengers, before the first program is built."""
        self.all_communicators = tuple({axes: wrapper(c) for axes, c in own.items()} for own in self.all_communicators)
        self.everyone = self.store.everyone = wrapper(self.everyone)
        self.store.homes = {s: replace(home, communicators=self.all_communicators[s]) for s, home in self.store.homes.items()}
        for stage, runner in self.runners.items():
            runner.communicators = self.gradients[stage].communicators = self.all_communicators[stage]
        inner = self.messengers

        def made(lanes: Iterable[Lane]) -> Messenger:
            return messengers(inner(lanes))

        self.messengers = made

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
        self.begins()
        if local_inputs:
            raise LaunchError("a pipeline takes whole batches", where="HAP", allowed='inputs="global"')
        self._check_inputs(key, inputs)
        times = len(self.plan.schedules[key].micro_batches)
        if key.mode == "train" and self.drifts and (self.rng.step + times) // ALIGN_EVERY > self.rng.step // ALIGN_EVERY:
            self.align(key)
        step = Step(self, key, inputs, self.scale())
        with self._numbers(key, times), self._carefully(step.crossings.messenger, (key, step.training)):
            results, gradients = self._with_gradients(step) if step.training else (step.run(), [])
            step.wait()
        outputs = self._outputs(key, results)
        loss = self.plan.graphs[key].loss
        if step.training:
            outputs[loss] = with_gradients(outputs[loss], tuple(self.module.parameters()), gradients, step.seed)
        elif torch.is_grad_enabled():
            outputs[loss] = without_gradients(outputs[loss])
        return outputs

    @contextmanager
    def _numbers(self, key: ProgramKey, times: int) -> Iterator[None]:
        """Random numbers of the next `times` micro-batches."""
        with nullcontext() if key.mode == "train" else self.rng.evaluating(times):
            self.base = self.rng.step + (key.mode == "train")
            yield
            self.rng.step = self.base + times - 1

    @contextmanager
    def _carefully(self, messenger: Messenger, kind: tuple[ProgramKey, bool] | str) -> Iterator[None]:
        """What runs for the first time may load kernels, for which no message may wait on a device."""
        with nullcontext() if kind in self._ran else messenger.over_hosts():
            yield
        self._ran.add(kind)

    def _check_inputs(self, key: ProgramKey, inputs: Mapping[str, Tensor]) -> None:
        """Raises LaunchError, before anything is sent, for inputs that are not the batch that the program is for."""
        graph = self.plan.graphs[key]
        assert graph.micro_batches is not None
        for name in graph.given:
            ref, found = graph.refs[name], inputs[name]
            whole = (ref.shape[0] * graph.micro_batches.number, *ref.shape[1:]) if name in graph.micro_batches.cut else ref.shape
            if tuple(found.shape) != whole or found.dtype != getattr(torch, ref.dtype):
                raise LaunchError(
                    f"{name} is {str(found.dtype).removeprefix('torch.')}{list(found.shape)}", where=f"rank {self.rank}",
                    allowed=f"{ref.dtype}{list(whole)}, {graph.micro_batches.number} micro-batches of {graph.batch}",
                )  # fmt: skip

    @torch.no_grad()
    def align(self, key: ProgramKey) -> None:
        """`ParameterStore.align`, also over the stages that share a parameter: the first one decides (a collective call)."""
        self.store.align()
        found, sending = self.crossings(key), []
        with self._carefully(found.messenger, "align"):
            for tie in found.ties:
                value = self.module.get_parameter(tie.name).data
                first = tie.stages[0]
                for stage, ways in tie.senders.items():
                    sending += [h for way in ways for h in way.send([value])] if stage == first else []
                for stage, arriving in tie.receivers.items():
                    way = arriving[0]
                    if stage != first and way is not None:
                        value.copy_(way.finish(way.post())[0])
            for handle in sending:
                handle.wait()

    def _with_gradients(self, step: Step) -> tuple[list[dict[str, Tensor]], list[Tensor | None]]:
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
        """A result, whole, on all devices, from the pieces of those of its stage, micro-batch by micro-batch (a collective call)."""
        stage, graph = self.stage_of(key, name), self.plan.graphs[key]
        source = self.plan.stages[stage].devices[0]
        whole = piece.new_empty(joined_shape(graph, name))
        if stage in self.runners:
            placement = {p.tensor: p.placement for p in self.plan.stages[stage].programs[key].gives}[name]
            position = self.runners[stage].position(key)
            whole = rejoin(graph, name, [position.gather(p, placement, self._of(stage)) for p in unjoin(graph, name, piece)])
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

    def code(self, key: ProgramKey) -> str:
        """The local programs of this device's stages as Python text."""
        parts = [f"# stage {stage} of {len(self.plan.stages)}\n{runner.program(key).code}" for stage, runner in sorted(self.runners.items())]
        return "\n\n".join(parts) or "# this device has no part in any stage\n"

    def programs(self, key: ProgramKey) -> list[LocalProgram]:
        """The local programs of this device's stages."""
        return [runner.program(key) for _, runner in sorted(self.runners.items())]


def _drifts(plan: Plan) -> bool:
    """Whether several kinds of devices keep the same parameter."""
    kinds = [{plan.cluster.devices[d].type for d in stage.devices} for stage in plan.stages]
    return any(len(set[str]().union(*(kinds[c.stage] for c in s.copies))) > 1 for s in plan.storage)


def _check_buffers(plan: Plan) -> None:
    """Raises PlanError where a buffer is written by stages that are not on the same devices as all that use it."""
    for graph in plan.graphs.values():
        written = graph.written.keys() | {r.name for r in graph.of_kind(Kind.BUFFER) if r.mutated}
        for stored in plan.storage:
            homes = {plan.stages[c.stage].devices for c in stored.copies}
            if len(homes) > 1 and written & {stored.name, *stored.aliases}:
                raise PlanError(f"buffer {stored.name} is written, and stages on different devices use it", where="storage", allowed="one stage")
