"""What users type: `HAP`, and `plan` of `hapx.planning`.

`HAP` is the module as this rank runs it. Everything is done elsewhere: planning in `hapx.planner`, processes in `hapx.runtime.launch`, the local
programs in `hapx.runtime.executor`.

Invariants of `HAP`: names of parameters, buffers and state are the single-device model's; the loss has the single-device value on
every rank, and gradients are the single-device gradients, cut as the plan stores the parameters.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hapx import codec
from hapx.cluster.spec import ClusterSpec
from hapx.collectives.communicator import Communicator, ProcessGroupCommunicator, create_groups
from hapx.collectives.messages import create_messenger
from hapx.errors import HapError, LaunchError, PlanError
from hapx.graph.capture import capture
from hapx.graph.capture_conditions import Conditions, Seen, Watch, renew
from hapx.graph.capture_inputs import Inputs, bind_inputs, caller_autocast
from hapx.graph.capture_refusals import refuse_lazy
from hapx.graph.captures import first_rows
from hapx.ir import FLOATING, Graph
from hapx.plan import Plan, ProgramKey
from hapx.planning import Cluster, plan
from hapx.restriction import Restriction
from hapx.runtime.data import ShareSampler
from hapx.runtime.executor import Executor, share_out
from hapx.runtime.handout import beside_the_loss
from hapx.runtime.launch import World, join
from hapx.runtime.local_inputs import LocalInputs
from hapx.runtime.pipeline import Pipeline
from hapx.runtime.results import rebuild
from hapx.runtime.whole_gradients import watch
from hapx.theory.normalise import normalised
from hapx.verify import verify


class HAP(nn.Module):
    """`module` on this rank of `cluster_spec`. Call it like the module; create the optimizer from its parameters afterwards.

    Args:
        module: its parameters are replaced by this rank's pieces, in place; values start equal to rank 0's.
        cluster_spec: a path, dict or ClusterSpec; it has as many devices as there are ranks, and rank i is device i.
        example_inputs: a tuple or a dict, with `loss_fn` (inputs, *targets); without them the first call plans.
        plan: a Plan or the path of one, instead of planning.
        inputs: "global": every rank passes the whole batch; "local": every rank passes its share (`batch_sizes`).
        gather_outputs: whether results other than the loss are whole on every rank, or this rank's pieces.
        gradient_dtype: in which gradients of parameters are summed over ranks ("bfloat16", torch.bfloat16, ...); by default each in its
            parameter's dtype. `.grad` always has the parameter's dtype.

    The rest is as in `plan`. Calls under `torch.autocast` run a program of their own: make the model under autocast too (or leave
    example_inputs out), so that the plan is made for it. For float16 see `hapx.GradScaler`.
    """

    def __init__(
        self, module: nn.Module, cluster_spec: Cluster, example_inputs: Any = None, *,
        plan: Plan | str | os.PathLike[str] | None = None, inputs: Literal["global", "local"] = "global",
        loss_fn: Callable[..., Tensor] | None = None, strategy: str | Restriction = "auto", optimizer: str = "adamw", precision: str | None = None,
        remat: str = "auto", micro_batches: int | str = "auto", gather_outputs: bool = False, gradient_dtype: str | torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self._gradient_dtype = _floating(gradient_dtype)
        if inputs not in ("global", "local"):
            raise HapError(f"inputs={inputs!r}", where="HAP", allowed='"global" or "local"')
        self._cluster = ClusterSpec.load(cluster_spec)
        self._world = join(self._cluster)
        self._stand_for(module)
        self._loss_fn, self._local_inputs, self._gather_outputs = loss_fn, inputs == "local", gather_outputs
        self._options: dict[str, Any] = {"strategy": strategy, "optimizer": optimizer, "precision": precision, "remat": remat}
        # a pipeline takes whole batches
        self._options["micro_batches"] = 1 if inputs == "local" and micro_batches == "auto" else micro_batches
        self._given: Any = plan
        self._executor: Executor | Pipeline | None = None
        self._loss_scale: Callable[[], float] = lambda: 1.0  # of a gradient scaler: a pipeline's backward passes begin with it
        self._seen, self._watch = Seen(), Watch(module)
        self.training = module.training
        object.__setattr__(self, "_twin", self._world.together(lambda: _meta_twin(module), "copying the module"))
        _same_model(self._world, module)
        if example_inputs is not None or plan is not None:
            self._start(example_inputs)
        elif any(p.is_meta for p in module.parameters()):
            raise LaunchError("a model on `meta` gets its values when it is planned, before the optimizer is created", hint="pass example_inputs")

    def _stand_for(self, module: nn.Module) -> None:
        """The user's module is no submodule, so that names stay its own: what it has registered is registered here, too, in the same dicts."""
        object.__setattr__(self, "module", module)
        vars(self).update({name: vars(module)[name] for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")})

    def __deepcopy__(self, memo: dict[int, Any]) -> HAP:
        """A model with tensors of its own that runs the same plan, as averages of weights keep one (`torch.optim.swa_utils.AveragedModel`).

        Copying is no collective call, but calling the copy is one: all ranks need theirs. Raises LaunchError before there is a plan."""
        executor = self._running()
        other = HAP.__new__(HAP)
        nn.Module.__init__(other)
        memo[id(self)] = other
        module = copy.deepcopy(self.module, memo)
        vars(other).update({name: value for name, value in vars(self).items() if name not in vars(other)})
        other._stand_for(module)
        other.training, other._loss_scale = self.training, lambda: 1.0
        other._seen, other._watch = Seen(), Watch(module)
        if isinstance(executor, Pipeline):
            other._executor = executor.around(module, lambda: other._loss_scale())
        else:
            other._executor = executor.around(module)
        watch(other._executor.store)
        return other

    # ---- planning -----------------------------------------------------------------------------------------------------

    def _start(self, example_inputs: Any, call: Inputs | None = None) -> None:
        """Plan on rank 0, tell everybody, shard the module. call: that of the example, if there is one."""
        if self._given is None and not self._twin.training:
            self._twin.train()
        text, compared = json.loads(self._world.from_first(lambda: json.dumps(self._first_plan(example_inputs)), "planning"))
        found: Plan = self._world.together(lambda: _checked(text, self._cluster), "reading the plan")
        if self._local_inputs and found.schedules:
            stages = "one stage" if len(found.stages) == 1 else f"{len(found.stages)} stages"
            raise LaunchError(
                f"a pipeline of {stages} takes whole batches", where='HAP(..., inputs="local")', allowed='inputs="global"',
                hint="a plan without micro-batches takes the ranks' own shares: plan with micro_batches=1",
            )  # fmt: skip
        if compared:
            known = self._world.together(lambda: self._conditions(call, example_inputs), "reading the inputs")
            flags = {f"{n}.training" if n else "training": m.training for n, m in self._twin.named_modules()}  # as it was planned
            self._seen.accept(found.first, known | flags)
        groups = [create_groups(stage.mesh) for stage in found.stages]
        seed = int(self._world.from_first(lambda: str(torch.initial_seed()), "drawing a seed"))
        options: dict[str, Any] = {"seed": seed, "device": self._world.device, "gradient_dtype": self._gradient_dtype}
        start: Callable[[], Executor | Pipeline] = lambda: Executor(found, self._world.rank, self.module, groups[0], **options)  # noqa: E731
        if found.schedules:
            options["scale"] = lambda: self._loss_scale()
            start = lambda: Pipeline(found, self._world.rank, self.module, groups, ProcessGroupCommunicator(), create_messenger, **options)  # noqa: E731
        self._executor = self._world.together(start, "sharding the model")
        watch(self._executor.store)

    def _first_plan(self, example_inputs: Any) -> tuple[str, bool]:
        """On rank 0: a new plan, or the user's; and whether its graph is known to be the model's."""
        twin: nn.Module = self._twin
        if self._given is None:
            from hapx.report.progress import shown  # a line for whoever looks at rank 0's terminal

            with shown() as progress:
                found = plan(twin, self._cluster, example_inputs, loss_fn=self._loss_fn, progress=progress, **self._options)
            return _to_json(found), True
        found = self._given if isinstance(self._given, Plan) else Plan.load(self._given)
        if example_inputs is None:
            return _to_json(found), False  # compared at the first call
        graph, parts = self._captured_at(example_inputs, found.first.mode == "train")
        if tuple(graph.refs[n].shape for n in graph.input_names) != found.first.shapes:
            return _to_json(found), False
        _compare(found, graph, found.first, parts)
        return _to_json(found), True

    def _captured_at(self, example: Any, training: bool) -> tuple[Graph, Callable[[int], Graph]]:
        """The graph of a call, and what gives that of one of so many micro-batches of it."""

        def captured(inputs: Any) -> Graph:
            return capture(self._twin, inputs, loss_fn=self._loss_fn, training=training)

        whole = captured(example)
        return whole, lambda number: normalised(captured(first_rows(example, whole.batch, whole.batch // number)), whole)

    def _ensure(self, key: ProgramKey, call: Inputs, now: Conditions) -> None:
        """There is a program for `key`, and it is the model's under the conditions of the call (a collective call)."""
        if self._executor is None:
            self._start(self._example(call), call)
        executor = self._running()
        changed = self._seen.changed(key, now)
        if key in executor.plan.graphs and key in self._seen and not changed:
            return

        def make() -> str:
            renew(self._twin, self.module)
            graph, parts = self._captured_at(self._example(call), key.mode == "train")
            if key in executor.plan.graphs:
                _compare(executor.plan, graph, key, parts, self._seen.says(key, now) if changed else "")
                return ""
            if not executor.plan.schedules:
                from hapx.planner import extend

                return _to_json(extend(executor.plan, graph, key))
            from hapx.pipelines import extend_stages

            return _to_json(extend_stages(executor.plan, key, graph, parts))

        text = self._world.from_first(make, "planning")
        if text:
            executor.plan = self._world.together(lambda: _checked(text, self._cluster), "reading the plan")
        self._seen.accept(key, now)

    def _conditions(self, call: Inputs | None, example: Any = None) -> Conditions:
        """What a program of a call takes for constant. example: instead of a call, as in `plan`."""
        with_loss_fn = self._loss_fn is not None
        return self._watch.conditions(call if call is not None else bind_inputs(self.module, example, with_loss_fn), with_loss_fn)

    def _example(self, call: Inputs) -> Any:
        """A call as example inputs."""
        args, kwargs = call.call(call.tensors)
        if self._loss_fn is not None:
            positional, keyword, targets = args
            return (keyword or positional, targets)
        return args if not kwargs else _named(self.module, args, kwargs)

    def _running(self) -> Executor | Pipeline:
        if self._executor is None:
            raise LaunchError("the model has no plan yet", where="HAP", hint="pass example_inputs, or call the model once")
        return self._executor

    # ---- running ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns on one device, with the loss of the whole batch. Other results are this rank's pieces, or whole with
        `gather_outputs`, to look at: a backward from them raises LaunchError. Objects that are no tensors, caches of generation for one, are left
        out."""
        call, key, now = self._announce(args, kwargs)
        local = LocalInputs(self._world, call.tensors) if self._local_inputs else None
        if local is not None:
            key = ProgramKey(key.mode, local.shapes, key.autocast)
            call = Inputs(call.args, call.kwargs, call.names, local.whole_on_meta())
        self._ensure(key, call, now)
        executor = self._running()
        graph = executor.plan.graphs[key]
        tensors = dict(zip(graph.given, call.tensors, strict=True))
        cut = None
        if local is not None:
            tensors, cut = local.arrange(executor, key)
        outputs = executor.run(key, {n: t.to(self._world.device) for n, t in tensors.items()}, cut)
        return self._results(graph, key, outputs)

    def _announce(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Inputs, ProgramKey, Conditions]:
        """Agrees with all ranks on what is run next."""
        try:
            call = self._bind(args, kwargs)
            autocast = caller_autocast()
            mode: Literal["train", "eval"] = "train" if self.training else "eval"
            shapes = tuple(tuple(t.shape) for t in call.tensors)
            told = [f"{n} {t.dtype}{list(t.shape[1:] if self._local_inputs else t.shape)}" for n, t in zip(call.names, call.tensors, strict=True)]
            now = self._conditions(call)
            text = f"{mode} {', '.join(told)}{f' autocast {autocast}' if autocast else ''}{'' if torch.is_grad_enabled() else ' no_grad'}"
            text += self._seen.news(now)
        except Exception:
            self._world.agree(None)
            raise
        self._world.agree(text)
        return call, ProgramKey(mode, shapes, autocast), now

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        if self._loss_fn is None:
            return bind_inputs(self.module, args if not kwargs else _named(self.module, args, kwargs))
        if kwargs or not args:
            told = f"{len(args)} arguments and {len(kwargs)} by name" if kwargs else "no arguments"
            raise LaunchError(f"called with {told}", where="HAP with loss_fn", allowed="model(inputs, *targets)")
        return bind_inputs(self.module, args, with_loss_fn=True)

    def _results(self, graph: Graph, key: ProgramKey, outputs: Mapping[str, Tensor]) -> Any:
        loss = outputs[graph.loss]
        if graph.returns is None:
            return loss
        results = {str(o.target): o.tensor for o in graph.outputs if o.role == "result"}
        values = {place: outputs[name] for place, name in results.items()}
        if self._gather_outputs:
            executor = self._running()
            values = {place: executor.gathered(key, name, outputs[name]) for place, name in results.items()}
        wanted = {place for place, name in results.items() if graph.refs[name].requires_grad and torch.is_grad_enabled()}
        values = {place: beside_the_loss(value) if place in wanted else value.detach() for place, value in values.items()}
        return rebuild(graph.returns, {"": loss, **values})

    # ---- what users ask for ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan, with all programs so far."""
        return self._running().plan

    @property
    def everyone(self) -> Communicator:
        """A communicator of all ranks."""
        return self._running().everyone

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._world.device

    @property
    def code(self) -> str:
        """The local training program as Python text; in a pipeline, those of this rank's stages."""
        executor = self._running()
        return executor.code(executor.plan.first)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of the planned global batch per rank."""
        executor = self._running()
        return executor.batch_sizes(executor.plan.first)

    def batch_sizes_for(self, n: int) -> tuple[int, ...]:
        """Samples per rank of a global batch of `n`."""
        executor = self._running()
        for key, graph in executor.plan.graphs.items():
            if graph.batch == n and key.mode == ("train" if self.training else "eval"):
                return executor.batch_sizes(key)
        return share_out(n, executor.plan.shares)

    def seed_with(self, scale: Callable[[], float]) -> None:
        """Tells a pipeline by what the loss is going to be multiplied before `backward` (`hapx.GradScaler` does so)."""
        self._loss_scale = scale

    def sampler(self, dataset: Sized, batch_size: int, shuffle: bool = True, seed: int = 0) -> ShareSampler:
        """A DataLoader's `batch_sampler`: this rank's share of the same global batches. For inputs="local"."""
        return ShareSampler(dataset, batch_size, self.batch_sizes_for, self._world.rank, shuffle, seed)

    def no_sync(self) -> AbstractContextManager[None]:
        """As in DDP: gradients of forward passes inside are accumulated without communication and joined by the next one outside."""
        return self._running().no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients by their global norm over all ranks, and returns it."""
        return self._running().clip_grad_norm_(max_norm, norm_type)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The single-device state, whole, on every rank (a collective call)."""
        return self._running().store.full_state_dict()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads single-device state; every rank passes the same and keeps its pieces."""
        self._running().store.load_full_state_dict(state)

    def full_gradients(self) -> dict[str, Tensor]:
        """The single-device gradients, whole, on every rank (a collective call); parameters without one are left out."""
        return self._running().store.full_gradients()

    # ---- an nn.Module with the wrapped module's names --------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's pieces, under the single-device names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads pieces that `state_dict` of the same rank and plan gave."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> HAP:
        self.module.train(mode)
        self.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._executor is not None:
            self._executor.clear()

    def apply(self, fn: Callable[[nn.Module], None]) -> HAP:
        """As of the module. Raises LaunchError where it has written into parameters, of which this rank has pieces."""
        before = [(n, p, p._version) for n, p in self.named_parameters()]
        self.module.apply(fn)
        if changed := [n for n, p, version in before if p._version != version]:
            raise LaunchError(
                f"a function has written into {', '.join(changed[:3])}{', ...' if changed[3:] else ''}, of which this rank may have a piece only",
                where="HAP.apply", hint="initialise the module before HAP(...), or use model.load_full_state_dict(...)",
            )  # fmt: skip
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HAP:
        raise LaunchError(
            "a distributed model stays on the device and in the dtype it was planned for", where="HAP.to", hint="convert the module before HAP(...)"
        )

    def extra_repr(self) -> str:
        return f"rank {self._world.rank} of {self._world.size}: {type(self.module).__name__}"


def _named(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call with positional and keyword arguments as keyword arguments only."""
    import inspect

    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _floating(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating dtype by name. Raises HapError for anything else."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATING:
        raise HapError(f"gradient_dtype={dtype!r}", where="HAP", allowed=f"None, {', '.join(sorted(FLOATING))}")
    found: torch.dtype = getattr(torch, name)
    return found


def _to_json(found: Plan) -> str:
    return json.dumps(codec.encode(found))


def _checked(text: str, cluster: ClusterSpec) -> Plan:
    """The plan of a message. Raises PlanError unless it is sound and for this cluster."""
    found: Plan = codec.decode(json.loads(text), Plan)
    ours, theirs = ([m.devices for m in c.machines] for c in (cluster, found.cluster))
    if ours != theirs:
        raise PlanError(
            f"the plan is for another cluster, {found.cluster.name!r}", where=f"cluster {cluster.name!r}", hint="plan again for this cluster"
        )
    verify(found)
    return found


def _compare(found: Plan, graph: Graph, key: ProgramKey, parts: Callable[[int], Graph], changed: str = "") -> None:
    """The plan's graph must be the model's, down to every argument. parts: gives the graph of one of so many micro-batches. changed: what is not as
    it was when it was."""
    micro = found.graphs[key].micro_batches
    graph = graph if micro is None else parts(micro.number)
    if graph.hash != found.graphs[key].hash:
        where = f"{key.mode} program for {_shapes(key)}"
        if changed:
            raise PlanError(
                f"the model computes something else than was planned: {changed}", where=where,
                hint="pass what varies as a tensor, or set it before hapx.HAP and make another one when it changes",
            )  # fmt: skip
        raise PlanError("the plan was made for another computation than this model's", where=where, hint="plan again for this model")


def _same_model(world: World, module: nn.Module) -> None:
    """Raises LaunchError on every rank unless all have the same parameters and buffers: what is moved between them must fit."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    own = {name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in tensors}
    everyone = world.gather(own)
    for name in dict.fromkeys(n for there in everyone for n in there):
        said = [there.get(name, "none") for there in everyone]
        if len(set(said)) > 1:
            told = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(said))
            raise LaunchError(f"the ranks have different models: {name} is {told}", hint="every rank must make the same model")


def _shapes(key: ProgramKey) -> str:
    return ", ".join(str(list(s)) for s in key.shapes)


def _meta_twin(module: nn.Module) -> nn.Module:
    """A copy of the module without values: later programs are captured from it, when the module holds pieces only."""
    refuse_lazy(module)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise LaunchError(
            f"the module cannot be copied: {error}", where=type(module).__name__, hint="attributes must support copy.deepcopy"
        ) from error
