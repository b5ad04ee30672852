"""Graphs of a module for the whole batch and for one of so many micro-batches of it.

In: a module and example inputs. Out: graphs, as `hapx.graph.capture` makes them. While the planner is loaded and the whole batch is captured, a copy
of the process can already capture the micro-batches that will be asked for: on two cores that takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hapx.errors import HapError
from hapx.graph.capture import capture
from hapx.graph.capture_inputs import bind_inputs
from hapx.graph.capture_trace import load_exporter
from hapx.ir import Graph
from hapx.processes import Later, beside, is_copy

if TYPE_CHECKING:
    from torch import Tensor, nn

SLOW = 5  # times as long as it takes here: a copy that has not captured by then does not come to an end


def first_rows(inputs: Any, whole: int, batch: int) -> Any:
    """Example inputs (tensors in tuples, lists and dicts) with `batch` rows where they have `whole` of them."""
    if isinstance(inputs, Mapping):
        return {name: first_rows(value, whole, batch) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(first_rows(value, whole, batch) for value in inputs)
    return inputs[:batch] if getattr(inputs, "shape", None) and inputs.shape[0] == whole else inputs


class Captures:
    """Attributes: `seconds`: that capturing took so far, at most (at least 1). `coming`: numbers of micro-batches that a copy captures."""

    def __init__(self, module: nn.Module, example_inputs: Any, loss_fn: Callable[..., Tensor] | None = None):
        self.module, self.example_inputs, self.loss_fn = module, example_inputs, loss_fn
        self.seconds = 1.0
        self.coming: tuple[int, ...] = ()
        self._copy: Later[dict[int, Graph]] | None = None
        self._stack = ExitStack()  # holds the copy
        self._known: dict[int, Graph] = {}

    @contextmanager
    def ahead(self, numbers: Callable[[int], Sequence[int]]) -> Iterator[None]:
        """Inside, micro-batches are captured by a copy of the process, if there can be one. numbers: of a batch's size, how many there may be."""
        wanted: tuple[int, ...] = ()
        with suppress(HapError):  # what is wrong with the inputs is said where the whole batch is captured
            batch = bind_inputs(self.module, self.example_inputs, self.loss_fn is not None).batch
            wanted = tuple(numbers(batch))
        if not wanted:
            yield
            return
        with self._stack:
            load_exporter()
            # a copy that fails says nothing: what is asked for is captured here then
            copy = self._stack.enter_context(beside(lambda: {n: self._part(batch, n) for n in wanted} if is_copy() else {}))
            self._copy, self.coming = (copy, wanted) if copy.elsewhere else (None, ())
            try:
                yield
            finally:
                self._copy, self.coming = None, ()

    def whole(self) -> Graph:
        """Of the whole batch. Raises CaptureError and UnsupportedOperatorError."""
        return self._timed(self.example_inputs)

    def part(self, batch: int, number: int) -> Graph:
        """Of one of `number` equal parts of a batch. What a copy captures is wanted first: one that captures other parts ends. Raises as `whole`."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            self._known = copy.result(SLOW * self.seconds) if number in self.coming else {}
            self.coming = ()
            self._stack.close()
        return self._known.pop(number, None) or self._part(batch, number)

    def smaller(self, batch: int, rows: int) -> Graph:
        """Of the first rows of a batch. Raises as `whole`."""
        return self._timed(first_rows(self.example_inputs, batch, rows))

    def _part(self, batch: int, number: int) -> Graph:
        return self.smaller(batch, batch // number)

    def _timed(self, inputs: Any) -> Graph:
        began = time.perf_counter()
        graph: Graph = capture(self.module, inputs, loss_fn=self.loss_fn)
        self.seconds = max(self.seconds, time.perf_counter() - began)
        return graph
