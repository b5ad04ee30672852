"""Graphs of less than a whole batch: of one of several micro-batches, and of a smaller batch, which needs less memory.

In: the captures of a module and the graph of its whole batch. Out: graphs; and, where nothing fits into memory, which smaller batch and which number
of micro-batches would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hapx.advice import Attempt, may_fit
from hapx.errors import CaptureError, HapError, InsufficientMemoryError, PlanError
from hapx.ir import Graph
from hapx.plan import key_of
from hapx.theory.discover import discover
from hapx.theory.normalise import normalised

if TYPE_CHECKING:
    from hapx.graph.captures import Captures
    from hapx.setting import Setting

SMALLER = (2, 4, 8)  # parts of the batch that are tried as a batch where nothing fits, the largest first,
MICRO_BATCHES = (2, 4, 8, 16, 32)  # and numbers of micro-batches


class Batches:
    """Of one module and its whole batch."""

    def __init__(self, captures: Captures, whole: Graph, number: int | None, *, in_parts: bool):
        """number: of micro-batches, where it is given. in_parts: whether there may be micro-batches at all."""
        self.captures, self.whole, self.number, self.may_have_parts = captures, whole, number, in_parts
        self._mixing: PlanError | None = None

    def part(self, number: int) -> Graph:
        """Of one of so many micro-batches. Raises CaptureError where the model takes none so small; where no number was asked for, PlanError
        then, and where an operator mixes samples: micro-batches that do not train as the whole batch does are never chosen unasked."""
        if self._mixing is not None:  # in parts of any size
            raise self._mixing
        graph = self._cut(number)
        if self.number is None and (mixing := _mixing(graph)):
            target, source = mixing[0]
            hint = "micro_batches=<a number> plans a pipeline all the same"
            self._mixing = PlanError(f"{target} mixes the samples of a batch", where=source, hint=hint)
            raise self._mixing
        return graph

    def that_fit(self, setting: Setting, error: InsufficientMemoryError, attempt: Attempt) -> Iterator[str]:
        """Where the whole batch fits nowhere: the largest smaller batch with which a program was found that fits, and the fewest micro-batches, if
        they have not been tried."""
        yield from self._smaller(setting, error, attempt)
        if self.may_have_parts and (self.number is not None or self._mixing is not None):
            yield from self._in_parts(setting, error, attempt)

    def _smaller(self, setting: Setting, error: InsufficientMemoryError, attempt: Attempt) -> Iterator[str]:
        for number in SMALLER:
            rows = self.whole.batch // number
            if rows == 0:
                return
            if not may_fit(error, 1 / number):
                continue
            try:
                graph = self.captures.smaller(self.whole.batch, rows)
            except HapError:  # a model that wants this very batch
                return
            if attempt(_of(setting, graph)) is None:
                yield f"a batch of {rows}"
                return

    def _in_parts(self, setting: Setting, error: InsufficientMemoryError, attempt: Attempt) -> Iterator[str]:
        for number in MICRO_BATCHES:
            if number <= (self.number or 1) or self.whole.batch % number or not may_fit(error, 1 / number):
                continue
            try:
                graph = self._cut(number)
            except HapError:
                return
            if attempt(replace(_of(setting, graph), repeats=number)) is None:
                mixing = _mixing(graph)
                yield f"micro_batches={number}" + (f" (with which {mixing[0][0]} sees one micro-batch only)" if mixing else "")
                return

    def _cut(self, number: int) -> Graph:
        """Of a micro-batch, with exact losses."""
        batch = self.whole.batch
        try:
            own = self.captures.part(batch, number)
        except CaptureError as error:
            if self.number is None:
                raise PlanError(error.what) from error
            raise CaptureError(
                f"the model takes a batch of {batch}, but not one of {batch // number}: {error.what}", where=f"micro_batches={number}",
                allowed="fewer, larger micro-batches", hint=f"the line is {error.where}" if error.where else None,
            ) from error  # fmt: skip
        return normalised(own, self.whole)


def _of(setting: Setting, graph: Graph) -> Setting:
    """The setting of another graph of the same model."""
    graph = discover(graph)
    return replace(setting, graph=graph, key=key_of(graph, setting.key.autocast))


def _mixing(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Operators that mix samples in the graph of a micro-batch, which therefore does not train as the whole batch does, and where they are."""
    return graph.micro_batches.mixing if graph.micro_batches is not None else ()
