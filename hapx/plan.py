"""A `Plan` as data: everything the runtime needs, and enough to verify, simulate, show and re-plan it where the model is not.

Data only: no torch. Saved as JSON by `hapx.codec`. Programs are written over *properties* (tensor, placement): a local variable of
the program is a tensor in a placement, and each instruction makes new ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple

from hapx.cluster.spec import ClusterSpec
from hapx.ir import Graph, OpCall, Value
from hapx.numbering import Numbered, numbered
from hapx.parts import part
from hapx.restriction import Restriction
from hapx.states import Cut, Placement, Property, Row, State

VERSION = 2


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis. micro_batches: its coordinates run one after another."""

    name: str
    size: int
    kind: Literal["devices", "machines", "micro_batches"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices (numbers of the cluster) laid out row-major over axes; at most one axis is `uneven` (its shares are chosen)."""

    name: str
    axes: tuple[Axis, ...]
    devices: tuple[int, ...]
    uneven: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Coordinates of a cluster device in this mesh."""
        index, result = self.devices.index(device), []
        for size in reversed(self.sizes):
            index, c = divmod(index, size)
            result.append(c)
        return tuple(reversed(result))

    def device(self, coordinates: tuple[int, ...]) -> int:
        index = 0
        for size, c in zip(self.sizes, coordinates, strict=True):
            index = index * size + c
        return self.devices[index]

    def group(self, device: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Devices that differ from `device` only along `axes`, in row-major order of those axes."""
        mine = self.coordinates(device)
        return tuple(d for d in self.devices if all(c == m for a, (c, m) in enumerate(zip(self.coordinates(d), mine, strict=True)) if a not in axes))

    def row(self, axis: int, kind: Literal["compute", "storage"] = "compute", segment: int = 0) -> Row:
        """The ratio row of an axis: chosen if the axis is uneven, else even."""
        return Row(kind if axis == self.uneven else "even", segment if axis == self.uneven else 0, axis)


class Form(Enum):
    """How a collective is carried out. PADDED: equal sizes, padding dropped. GROUPED: one broadcast (or reduce) per owner.
    POINT_TO_POINT: sends and receives. NONE: nothing moves."""

    NONE = "none"
    PADDED = "padded"
    GROUPED = "grouped"
    POINT_TO_POINT = "point_to_point"

    __hash__ = object.__hash__  # quicker than that of its name


@dataclass(frozen=True, slots=True)
class Communication:
    """One conversion along one axis. What runs forward and backward follows from (source, target); see hapx.collectives.
    `gradient`: whether a cotangent flows back. `free`: for a gathered parameter, gather again in backward instead of keeping it."""

    axis: int
    source: State
    target: State
    form: Form
    gradient: bool
    free: bool = False

    def __str__(self) -> str:
        form = f" {self.form.value}" if self.form is not Form.NONE else ""
        return f"{self.source}->{self.target}@{self.axis}{form}{' free' if self.free else ''}"


@dataclass(frozen=True, slots=True)
class LocalShape:
    """As an argument: the local shape (a list of ints) of a tensor with global `shape` in `placement`."""

    shape: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class LocalSize:
    """As an argument: how many of `size` things that lie along dim 0 of `placement` are local (groups of channels, say)."""

    size: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class LocalOffset:
    """As an argument: global index of the first local element of `dim` in `placement`."""

    dim: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class LocalIndices:
    """As an argument: per dim of a tensor with global `shape`, the global indices of the local elements (None: all of them)."""

    shape: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """As an argument: the `hapx.layout.Block` by which `axis` cuts a tensor in `placement`."""

    axis: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Axes:
    """As an argument of a composite: a communicator over these mesh axes (None at run time when empty)."""

    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Triple:
    """{pre} body {post}. `node` is None for a conversion, whose body is a path of communications along single axes;
    otherwise `body` is one call. Inside the call a `Ref` names an operand; `pre` says in which placement each occurrence is read
    (one property per occurrence, in order). `work`: per axis, the cut that divides this instruction's work, or None.
    """

    node: int | None
    pre: tuple[Property, ...]
    post: tuple[Property, ...]
    body: OpCall | tuple[Communication, ...]
    work: tuple[Cut | None, ...] = ()

    @property
    def placements(self) -> dict[str, Placement]:
        """Where operands are read and results made, by tensor."""
        return {p.tensor: p.placement for p in (*self.pre, *self.post)}

    def __str__(self) -> str:
        pre, post = (" ".join(map(str, ps)) for ps in (self.pre, self.post))
        body = self.body.target if isinstance(self.body, OpCall) else " then ".join(map(str, self.body))
        return f"{{{pre}}} {body} {{{post}}}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """A triple in a program. `remat`: number of the rematerialisation group, or None."""

    triple: Triple
    remat: int | None = None

    def __str__(self) -> str:
        return str(self.triple)


@dataclass(frozen=True, slots=True)
class ProgramKey:
    mode: Literal["train", "eval"]
    shapes: tuple[tuple[int, ...], ...]
    autocast: str | None = None


def key_of(graph: Graph, autocast: str | None = None) -> ProgramKey:
    """The key of a graph's program."""
    return ProgramKey(graph.mode, tuple(graph.refs[n].shape for n in graph.input_names), autocast)


@dataclass(frozen=True)
class Program:
    """Instructions that lead from `needs` (parameters and buffers as stored, inputs Replicated) to `gives` (the graph's outputs)."""

    key: ProgramKey
    mesh: Mesh
    instructions: tuple[Instruction, ...]
    needs: tuple[Property, ...]
    gives: tuple[Property, ...]

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # what was found out about it is not sent along

    @cached_property
    def numbered(self) -> Numbered:
        triples = [i.triple for i in self.instructions]
        return numbered([t.pre for t in triples], [t.post for t in triples], self.needs, self.gives)

    def __str__(self) -> str:
        lines = [f"needs {' '.join(map(str, self.needs))}"]
        lines += [f"{k:4d}  {i}" for k, i in enumerate(self.instructions)]
        return "\n".join([*lines, f"gives {' '.join(map(str, self.gives))}"])


@dataclass(frozen=True, slots=True)
class Copy:
    """A parameter or buffer as one stage stores it: Invariant or Sharded on each axis."""

    stage: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Storage:
    """How a parameter or buffer is kept between steps; several copies when it is tied across stages."""

    name: str
    aliases: tuple[str, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of the model on part of the cluster. `nodes`: per program, the part [start, stop) of the graph's nodes that it runs. `shares`: per row
    along the row's axis. `lengths`: integer units per cut, for every program (parameters' cuts have the same lengths in all of them)."""

    devices: tuple[int, ...]
    nodes: Mapping[ProgramKey, tuple[int, int]]
    mesh: Mesh
    shares: Mapping[Row, tuple[float, ...]]
    lengths: Mapping[ProgramKey, Mapping[Cut, tuple[int, ...]]]
    programs: Mapping[ProgramKey, Program]

    @property
    def ratios(self) -> tuple[tuple[float, ...], ...]:
        """Rows x size of the row's axis."""
        return tuple(self.shares.values())

    @property
    def program(self) -> Program:
        """The first training program."""
        return next(iter(self.programs.values()))


class Boundary(NamedTuple):
    """A tensor that crosses between stages: (stage, layout) it leaves and (stage, layout) it arrives in. Derived from programs, never stored."""

    tensor: str
    source: tuple[int, Property]
    target: tuple[int, Property]


Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a group of devices does for one micro-batch of one of its stages.

    forward, backward: run the stage's program. send, receive: all tensors that cross between `stage` and `peer`, another stage: activations
    ("forward") or their cotangents ("backward"). synchronise: the gradients of the stage are complete; they are summed over the copies of parameters
    that are tied across stages (micro_batch: the last one). free: what the stage has kept of the micro-batch is dropped."""

    kind: Literal["forward", "backward", "send", "receive", "synchronise", "free"]
    stage: int
    micro_batch: int
    peer: int = -1
    direction: Direction = "forward"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule: samples of each micro-batch and, per group of devices (in the order of their first stages), its actions."""

    name: str
    micro_batches: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Plan:
    """A distributed training plan. See the public interface for the meaning of the fields users read.

    `graphs`: by the shapes of a whole batch; with several stages, the graph of one micro-batch of it. `schedules`: of plans with several stages."""

    version: int
    graphs: Mapping[ProgramKey, Graph]
    cluster: ClusterSpec
    restriction: Restriction
    storage: tuple[Storage, ...]
    stages: tuple[Stage, ...]
    schedules: Mapping[ProgramKey, Schedule]
    iteration_time: float
    memory: tuple[int, ...]
    shares: tuple[float, ...]
    precision: str
    optimizer: str
    statistics: Mapping[str, Any] = field(compare=False)

    @cached_property
    def storage_of(self) -> Mapping[str, Storage]:
        """By every name of the parameter or buffer, aliases included."""
        return {name: s for s in self.storage for name in (s.name, *s.aliases)}

    @property
    def first(self) -> ProgramKey:
        return next(iter(self.graphs))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that have stages, in the order of their first stages."""
        return tuple(dict.fromkeys(s.devices for s in self.stages))

    @property
    def ties(self) -> list[tuple[int, ...]]:
        """Sets of stages that share a parameter."""
        return [tuple(c.stage for c in s.copies) for s in self.storage if len(s.copies) > 1]

    def part(self, key: ProgramKey, stage: int) -> Graph:
        """The graph of a stage."""
        if (key, stage) not in self._parts:
            self._parts[key, stage] = part(self.graphs[key], *self.stages[stage].nodes[key])
        return self._parts[key, stage]

    @cached_property
    def _parts(self) -> dict[tuple[ProgramKey, int], Graph]:
        return {}

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Numbers of the stages that a device has a part in."""
        return tuple(i for i, s in enumerate(self.stages) if device in s.devices)

    def boundaries(self, key: ProgramKey) -> tuple[Boundary, ...]:
        """What crosses between stages: each received tensor comes straight from the stage that makes it."""
        made = {p.tensor: (i, p) for i, s in enumerate(self.stages) for p in s.programs[key].gives}
        needed = [(i, p) for i, s in enumerate(self.stages) for p in s.programs[key].needs if p.tensor in made and made[p.tensor][0] < i]
        return tuple(Boundary(p.tensor, made[p.tensor], (i, p)) for i, p in needed)

    @cached_property
    def digest(self) -> str:
        """Hash of everything but the statistics: ranks compare it, equal plans have equal digests."""
        from hapx import codec

        return codec.digest(self)

    def __str__(self) -> str:
        """A table for people."""
        from hapx.report.table import plan_table

        return plan_table(self)

    def verify(self) -> None:
        """Replay every program against the theory and compare every number that must agree. Raises PlanError; needs no model."""
        from hapx.verify import verify

        verify(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically. Raises PlanError where the file cannot be written."""
        from hapx import codec

        codec.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Raises PlanError for a damaged file; `verify` proves the plan itself."""
        from hapx import codec

        return codec.load(path)


__all__ = [
    "Action", "Axes", "Axis", "Boundary", "Communication", "Copy", "Direction", "Form", "Instruction", "LocalBlock", "LocalIndices", "LocalOffset",
    "LocalShape", "LocalSize", "Mesh", "Plan", "Program", "ProgramKey", "Schedule", "Stage", "Storage", "Triple", "Value",
]  # fmt: skip
