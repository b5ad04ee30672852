"""An exported program as one flat list of operator calls over slots.

In: the exported graph module and a slot for each of its placeholders. Out: `Call`s, in order, and the slots of the results.

Invariant: nested graphs (of no_grad and autocast contexts) are inlined, getitem is resolved, and the result of a call that writes in
place is the slot of the tensor that it writes. Calls that turn tensors into Python numbers or shapes are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from hapx.errors import CaptureError, UnsupportedOperatorError
from hapx.graph import normalize_args as arguments
from hapx.graph.capture_trace import MARK
from hapx.graph.normalize_args import name_of
from hapx.graph.regions import Mark


class Slot:
    """What a tensor variable of the program holds now. A write in place changes `name` and `fake`; `storage` stays."""

    __slots__ = ("fake", "name", "storage")

    def __init__(self) -> None:
        self.name: str = ""
        self.fake: Tensor | None = None
        self.storage: int = -1


@dataclass
class Call:
    """An operator call of the flattened program; `out` is a slot or a list of slots. `written`: the argument changed in place."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    base: str
    mark: Mark
    module: str
    written: str | None = None

    def slots(self) -> Iterator[Slot]:
        yield from slots_in((self.args, tuple(self.kwargs.values())))

    @property
    def where(self) -> str:
        place = f"module {self.module!r}" if self.module else ""
        return ", ".join(filter(None, (self.mark.where, place)))


def slots_in(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from slots_in(v)


class Flattener:
    """Turns the exported graph and the graphs nested in it into one list of calls over slots."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self.calls: list[Call] = []

    def run(self, module: fx.GraphModule, inputs: Sequence[Any], outer: Mark) -> Any:
        """Append the calls of `module`; the slots of its outputs. `outer`: context of nodes that carry no mark."""
        env: dict[fx.Node, Any] = {}
        pending = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(pending)
            elif node.op == "get_attr":
                env[node] = _attribute(module, str(node.target))
            elif node.op == "output":
                return self._resolve(node.args[0], env)
            elif node.op == "call_function":
                env[node] = self._call(node, env, outer)
            else:
                raise CaptureError(f"the exported program has a {node.op} node, which is not understood", where=str(node.target))
        raise AssertionError("a graph without output")

    def _resolve(self, value: Any, env: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return env[value]
        if isinstance(value, tuple | list):
            return type(value)(self._resolve(v, env) for v in value)
        return value

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Any], outer: Mark) -> Any:
        target = node.target
        args = tuple(self._resolve(a, env) for a in node.args)
        if getattr(target, "__name__", "") == "getitem" and not isinstance(target, torch._ops.OpOverload):
            return args[0][args[1]]
        mark = self._mark(node, outer)
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._inline(node, args, mark)
        path = self._path(node)
        if not isinstance(target, torch._ops.OpOverload):
            raise _data_dependent(node, mark, path)
        kwargs = {k: self._resolve(v, env) for k, v in node.kwargs.items()}
        out, written = self._outputs(node, target, args, kwargs, mark, path)
        self.calls.append(Call(target, args, kwargs, out, node.name, mark, path, written))
        return out

    def _outputs(self, node: fx.Node, op: torch._ops.OpOverload, args: Any, kwargs: Any, mark: Mark, path: str) -> tuple[Any, str | None]:
        """The slots of the results: that of the argument, where the operator returns what it has written."""
        written = arguments.written_arguments(op)
        if written:
            place = arguments.bind(op, args, kwargs)[written[0]]
            if len(written) > 1 or not isinstance(place, Slot):
                raise UnsupportedOperatorError(f"{name_of(op)} changes several tensors in place", where=mark.where)
            return place, written[0]
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return Slot(), None
        if isinstance(value, tuple | list) and all(isinstance(v, Tensor) or v is None for v in value):
            return [Slot() for _ in value], None
        if value is None and not op._schema.returns:
            return None, None
        raise _data_dependent(node, mark, path)

    def _inline(self, node: fx.Node, args: tuple[Any, ...], mark: Mark) -> Any:
        """The body of a no_grad or autocast context, in place."""
        name = str(node.target)
        body = next((i for i, a in enumerate(args) if isinstance(a, fx.GraphModule)), None)
        if body is None or name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            raise UnsupportedOperatorError(
                f"the model uses {name}, which cannot be planned", where=mark.where or self._path(node), hint="write it with plain operators"
            )
        if name == "wrap_with_set_grad_enabled":
            inner = replace(mark, grad=bool(args[0]))
        else:
            dtype = str(args[1] or torch.get_autocast_dtype(args[0])).removeprefix("torch.")
            inner = replace(mark, autocast=dtype if args[2] else None)
        return self.run(args[body], args[body + 1 :], inner)

    def _mark(self, node: fx.Node, outer: Mark) -> Mark:
        mark = (node.meta.get("custom") or {}).get(MARK)
        return mark if isinstance(mark, Mark) else outer

    def _path(self, node: fx.Node) -> str:
        """Dotted path of the innermost module."""
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        return f"{path}.".removeprefix(self._prefix).removesuffix(".")


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, Tensor):
        raise CaptureError(f"the model uses the tensor {path!r}, which is neither parameter nor buffer", hint="use register_buffer")
    return value


def _data_dependent(node: fx.Node, mark: Mark, path: str) -> CaptureError:
    if "functorch" in (getattr(node.target, "__module__", None) or ""):
        return CaptureError("torch.vmap cannot be captured", where=mark.where or path, hint="write it with plain operators on the whole batch")
    return CaptureError(
        f"{node.target} turns a tensor into a Python number or a shape, so the computation depends on the values of a tensor",
        where=mark.where or path,
        hint="use torch.where or a mask instead of .item(), nonzero() or boolean indexing",
    )
