"""The table of operators: one frozen `OpEntry` per operator, everything about it in one place.

An entry turns a node into *rules*: for one mesh axis, the states of its operands and outputs (Hoare triples of HAP section 4.1).
All-Replicated and all-Invariant are implied for every entry. Rules speak of *sites* (a factor of a dim: `outer` blocks, each cut
alike); how finely a site is cut is decided for the whole graph at once (`hapx.theory.grains`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hapx.ir import CONTINUOUS, Node, OpCall, Ref, TensorRef
from hapx.rules import Rule as Rule
from hapx.rules import Site as Site
from hapx.rules import Slot as Slot
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Placement, Sharded
from hapx.theory.signature import may_split, parse

Sites = Mapping[str, frozenset[Site]]
Rules = tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """A node with its operands' tensors (one per occurrence, in argument order) and the sites known so far."""

    node: Node
    operands: tuple[TensorRef, ...]
    sites: Sites

    @property
    def call(self) -> OpCall:
        return self.node.call

    def position(self, argument: str) -> int | None:
        """Index among the operand occurrences of the tensor argument, None when it is not a tensor."""
        index = 0
        for name, value in self.call.args:
            if isinstance(value, Ref):
                if name == argument:
                    return index
                index += 1
            elif isinstance(value, tuple):
                index += sum(isinstance(v, Ref) for v in value)
        return None

    def outers(self, positions: Iterable[tuple[TensorRef, int]]) -> tuple[int, ...]:
        """Every `outer` known for one of the (tensor, dim) positions, 1 included, ascending."""
        found = {1}
        for ref, dim in positions:
            found |= {s.outer for s in self.sites.get(ref.name, frozenset()) if s.dim == dim}
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What a composite body is made from: the node, operand and output placements, and the variant on each axis."""

    node: Node
    index: int
    operands: tuple[TensorRef, ...]
    pre: tuple[Placement, ...]
    post: tuple[Placement, ...]
    variants: tuple[str, ...]

    def axes(self, *variants: str) -> tuple[int, ...]:
        return tuple(a for a, v in enumerate(self.variants) if v in variants)


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One operator. `rules`: node -> rules beyond the implied ones. `body`: local call from the placements (None: the node's own).
    `implied`: whether all-Replicated and all-Invariant hold (they do for deterministic operators).
    `reason`: for an operator with implied rules only, why nothing else is true.
    For people: `signature` (or a sentence) says what may be split, `sum` over what it sums, `linear` where Partial passes, `composites`
    which composites its body may call."""

    targets: tuple[str, ...]
    rules: Callable[[Context], Iterable[Rule]]
    body: Callable[[LocalCall], OpCall | None] | None = None
    implied: bool = True
    reason: str = ""
    signature: str = ""
    sum: str = ""
    linear: str = ""
    composites: tuple[str, ...] = ()


REGISTRY: dict[str, OpEntry] = {}


def register(entry: OpEntry) -> OpEntry:
    """Add an entry; a target has one entry."""
    for target in entry.targets:
        assert target not in REGISTRY, f"{target} has two entries"
        REGISTRY[target] = entry
    return entry


def lookup(call: OpCall) -> OpEntry | None:
    """Entry of a call, by overload ("aten.sum.dim_IntList") or by operator ("aten.sum")."""
    return REGISTRY.get(call.target) or REGISTRY.get(call.op)


def signature_rules(text: str, sum: str = "", linear: str = "", addend: str = "") -> Callable[[Context], list[Rule]]:
    """Rules of an operator that is what its signature says.

    Members of a list argument are operands of its name, or "name[0]", "name[1]", ... where they differ.
    sum: indices over which the operator sums (splitting one leaves the outputs Partial).
    linear: groups "a b | c" of operands; if all tensors of a group are Partial and the others Replicated, outputs are Partial.
    addend: operands added to the sum: Partial whenever the output is.
    """
    signature = parse(text)
    summed, groups, addends = tuple(sum.split()), tuple(g.split() for g in linear.split("|") if g.strip()), tuple(addend.split())

    def rules(context: Context) -> list[Rule]:
        named = {o.name: o for o in signature.operands}
        # per occurrence: (argument name, index per dim or None when the argument is not in the signature)
        names = _occurrences(context.call, named)
        indices = [named[n].indices(len(r.shape)) if n in named else None for n, r in zip(names, context.operands, strict=True)]
        outputs = [o.indices(len(r.shape)) for o, r in zip(_outputs(signature, context.node), context.node.outputs, strict=True)]
        found = [r for index in _indices(indices, outputs) for r in _split(context, names, indices, outputs, index, summed, addends)]
        if all(o.dtype in CONTINUOUS for o in context.node.outputs):
            found += _linear(context, names, groups)
        return found

    return rules


def _occurrences(call: OpCall, named: Collection[str] = ()) -> list[str]:
    """The argument of every operand; members of a list are told apart if the signature does."""
    names: list[str] = []
    for name, value in call.args:
        if isinstance(value, Ref):
            names.append(name)
        elif isinstance(value, tuple):
            count = len([v for v in value if isinstance(v, Ref)])
            names += [member if (member := f"{name}[{i}]") in named else name for i in range(count)]
    return names


def _outputs(signature: object, node: Node) -> list:  # type: ignore[type-arg]
    outputs = list(signature.outputs)  # type: ignore[attr-defined]
    return outputs if len(outputs) == len(node.outputs) else [outputs[0]] * len(node.outputs)


def _indices(indices: Sequence[tuple[str, ...] | None], outputs: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    everything = [i for group in (*indices, *outputs) if group for i in group]
    return tuple(dict.fromkeys(i for i in everything if may_split(i)))


def _split(
    context: Context,
    names: Sequence[str],
    indices: Sequence[tuple[str, ...] | None],
    outputs: Sequence[tuple[str, ...]],
    index: str,
    summed: tuple[str, ...],
    addends: tuple[str, ...],
) -> list[Rule]:
    """Rules that split one index: one for every way (`outer`) in which a dim with this index is known to be blocked."""
    in_output = any(index in o for o in outputs)
    if not in_output and index not in summed:
        return []
    in_dims = [_dim(i, index, r) for i, r in zip(indices, context.operands, strict=True)]
    out_dims = [_dim(o, index, r) for o, r in zip(outputs, context.node.outputs, strict=True)]
    positions = [(r, d) for r, d in zip((*context.operands, *context.node.outputs), (*in_dims, *out_dims), strict=True) if d is not None]
    if not positions or (in_output and any(d is None for d in out_dims)):
        return []
    rules = []
    for outer in context.outers(positions):
        if any(r.shape[d] % outer or r.shape[d] == outer for r, d in positions):
            continue
        rest: Slot = REPLICATED if in_output else PARTIAL
        operands = tuple(Site(d, outer) if d is not None else (rest if n in addends else REPLICATED) for n, d in zip(names, in_dims, strict=True))
        results: tuple[Slot, ...] = tuple(Site(d, outer) if d is not None else PARTIAL for d in out_dims)
        rules.append(Rule(operands, results, divides=True))
    return rules


def _dim(indices: tuple[str, ...] | None, index: str, ref: TensorRef) -> int | None:
    """Dim of `ref` that carries `index`; broadcast dims of size 1 do not count."""
    if indices is None or index not in indices:
        return None
    dim = indices.index(index)
    return dim if ref.shape[dim] > 1 else None


def _linear(context: Context, names: Sequence[str], groups: Sequence[Sequence[str]]) -> list[Rule]:
    rules = []
    for group in groups:
        if any(not _tensor_or_absent(context.call.get(n)) for n in group):
            continue  # a number in the place of an addend would be added on every device
        operands = tuple(PARTIAL if n in group else REPLICATED for n in names)
        members = [r for n, r in zip(names, context.operands, strict=True) if n in group]
        if members and all(m.dtype in CONTINUOUS for m in members):
            rules.append(Rule(operands, (PARTIAL,) * len(context.node.outputs)))
    return rules


def _tensor_or_absent(value: object) -> bool:
    return value is None or isinstance(value, Ref) or (isinstance(value, tuple) and all(isinstance(v, Ref) for v in value))


def op(
    targets: str,
    signature: str | Callable[[Context], str],
    *,
    sum: str = "",
    linear: str = "",
    addend: str = "",
    extra: Callable[[Context], Iterable[Rule]] | None = None,
    body: Callable[[LocalCall], OpCall | None] | None = None,
    reason: str = "",
    composites: str = "",
) -> OpEntry:
    """Register operators (space-separated targets) by signature; `extra` adds rules of composites, `body` makes their calls."""

    def rules(context: Context) -> Iterable[Rule]:
        text = signature if isinstance(signature, str) else signature(context)
        return [*signature_rules(text, sum, linear, addend)(context), *(extra(context) if extra else ())]

    shown = signature if isinstance(signature, str) else sentence(signature)
    return register(OpEntry(tuple(targets.split()), rules, body, True, reason, shown, sum, linear, tuple(composites.split())))


def sentence(function: Callable[..., object]) -> str:
    """What a function of a table says about itself: the first line of its docstring."""
    return (function.__doc__ or "").strip().partition("\n")[0]


def implied_rules(context: Context) -> tuple[Rule, ...]:
    """All-Replicated; and all-Invariant where a gradient flows (a value without gradient is Replicated in both)."""
    replicated = Rule((REPLICATED,) * len(context.operands), (REPLICATED,) * len(context.node.outputs))
    if not any(r.requires_grad for r in context.node.outputs):
        return (replicated,)
    invariant = Rule(
        tuple(INVARIANT if r.requires_grad else REPLICATED for r in context.operands),
        tuple(INVARIANT if r.requires_grad else REPLICATED for r in context.node.outputs),
    )
    return (replicated, invariant) if invariant != replicated else (replicated,)


def without_gradient(context: Context, rules: Iterable[Rule]) -> Iterable[Rule]:
    """The rules, and those in which an operand is Invariant instead of Replicated where no gradient flows back to it."""
    free = [i for i, r in enumerate(context.operands) if r.requires_grad]
    if any(r.requires_grad for r in context.node.outputs) or not free:
        yield from rules
        return
    for rule in rules:
        yield rule
        for chosen in range(1, 2 ** len(free)):
            swapped = [i for k, i in enumerate(free) if chosen >> k & 1]
            if all(rule.operands[i] == REPLICATED for i in swapped):
                yield replace(rule, operands=tuple(INVARIANT if i in swapped else s for i, s in enumerate(rule.operands)))


def resolve(slot: Slot, units: int, size: int, cut: object) -> object:
    """A slot as a state, given its cut."""
    if isinstance(slot, Site):
        return Sharded(slot.dim, slot.outer, size // (slot.outer * units), cut)  # type: ignore[arg-type]
    return slot
