"""One run of a schedule on one device: its actions, one after another, and what is kept between them.

In: the pipeline of this device, a program's key, whole inputs, the cotangent of the loss. Out: per micro-batch the loss and the results of this
device's stages; gradients in `.grad`. Invariants: what a micro-batch keeps is dropped by its `free`; a tensor that was sent is kept until its handle
was waited for, which happens at the first `free` at which the schedule has certainly delivered it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hapx.collectives.communicator import Handle
from hapx.plan import Action, ProgramKey
from hapx.runtime.crossings import Way
from hapx.runtime.micro_batches import split
from hapx.runtime.reshard import Pending

if TYPE_CHECKING:
    from hapx.runtime.pipeline import Pipeline


@dataclass
class Kept:
    """What a stage keeps of a micro-batch between forward and backward: received tensors (leaves of autograd) and outputs, by name; cotangents of the
    outputs that have arrived."""

    received: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)


class Step:
    """See the module. seed: cotangent of the loss. `training`: whether backward passes are run."""

    def __init__(self, pipeline: Pipeline, key: ProgramKey, inputs: Mapping[str, Tensor], seed: float):
        self.pipeline, self.key, self.seed = pipeline, key, seed
        plan = pipeline.plan
        self.graph, self.crossings = plan.graphs[key], pipeline.crossings(key)
        assert self.graph.micro_batches is not None
        counter = pipeline.counter(key)
        counts = counter.counts(inputs, {n: pipeline.store.full(n, pipeline.module.get_buffer(n)) for n in counter.buffers})
        self.micro_batches = [{**own, **counts} for own in split(inputs, self.graph.micro_batches)]
        self.actions = plan.schedules[key].actions[pipeline.group] if pipeline.group >= 0 else ()
        self.delivered = pipeline.delivered(key)
        self.training = torch.is_grad_enabled() and key.mode == "train"
        self.last = {a.stage: a.micro_batch for a in self.actions if a.kind == "backward"}
        self.kept: dict[tuple[int, int], Kept] = {}
        self.sending: dict[Action, list[Handle]] = {}
        self.posted: dict[tuple[int, int, str], list[tuple[Way, Pending]]] = {}
        self.results: list[dict[str, Tensor]] = [{} for _ in self.micro_batches]

    def run(self) -> list[dict[str, Tensor]]:
        """Per micro-batch, the loss and results of this device's stages, detached."""
        for action in self.actions:
            if self.training or (action.kind not in ("backward", "synchronise") and action.direction == "forward"):
                getattr(self, f"_{action.kind}")(action)
        return self.results

    def wait(self) -> None:
        """For everything that was sent."""
        for handles in self.sending.values():
            for handle in handles:
                handle.wait()
        self.sending.clear()

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
        self.sending[action] = way.resharder.send(tensors)

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
        waits = self.training and action.micro_batch != self.last.get(action.stage)  # its gradients join those of the last one
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
        roots = dict.fromkeys(graph.roots)
        # the caller's autocast is not for backward: operators compute there in the dtypes of their forward passes
        with torch.autocast(self.pipeline.device.type, enabled=False):
            torch.autograd.backward([own.outputs[n] for n in roots], [self._seed(n, own) for n in roots])
        own.outputs, own.cotangents = {}, {}

    def _seed(self, name: str, own: Kept) -> Tensor:
        """Where backward of a stage begins: what has arrived, and the seed at the loss."""
        if name != self.graph.loss:
            return own.cotangents[name]
        seed = torch.full_like(own.outputs[name], self.seed)
        return seed + own.cotangents[name] if name in own.cotangents else seed

    def _synchronise(self, action: Action) -> None:
        for tie in self.crossings.ties:
            for resharder in tie.senders.get(action.stage, ()):
                self.sending.setdefault(action, []).extend(resharder.send([self.pipeline.gradient(tie.name)]))

    def _free(self, action: Action) -> None:
        self.kept.pop((action.stage, action.micro_batch), None)
        for send in self.delivered.get(action, ()):
            for handle in self.sending.pop(send, ()):
                handle.wait()


def _cotangent(received: Tensor) -> Tensor:
    """What flows back to where a tensor came from; nothing did where the micro-batch has no elements here."""
    return received.grad if received.grad is not None else torch.zeros_like(received)
