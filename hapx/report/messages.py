"""Every communication of an iteration: which collective of which tensors, in what form, how many bytes, how long, how often, and what limits it.

In: a `Pricing`. Out: `Traffic`, one row per kind of communication of a layer (parameters of a module together, equal layers as one), and a table of
them, the most expensive first. Bytes are those of `hapx.report.pricing.Message`: of the tensor as it is whole along the axis, per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hapx.plan import Form
from hapx.report.folding import fold
from hapx.report.pricing import Message, Pricing, Sent
from hapx.report.render import new_table, render
from hapx.report.words import Vocabulary, collective_text, size_text, time_text

# of parameters a module's tensors are one row: they are synchronised in common buckets, or gathered together
OF_PARAMETERS = frozenset({"gradients", "weights"})


@dataclass(frozen=True, slots=True)
class Traffic(Sent):
    """Communications that are alike; size, seconds, volume: of one of them. times: how many there are per iteration; tensors: of all of them."""

    layer: str
    times: int
    tensors: tuple[str, ...]

    @property
    def total(self) -> float:
        return self.seconds * self.times

    def limit(self) -> str:
        return link_text(self.crosses, self.volume, self.seconds)


def link_text(crosses: bool, volume: float, seconds: float) -> str:
    """What a communication waits for: "network: bytes 98%"; `network` is that between machines, `inside` the links of one machine."""
    part = volume / seconds if seconds else 0.0
    return f"{'network' if crosses else 'inside'}: {f'bytes {part:.0%}' if part >= 0.5 else f'latency {1 - part:.0%}'}"


def traffic(pricing: Pricing) -> tuple[Traffic, ...]:
    """All communications of an iteration, the most expensive first."""
    groups: dict[tuple[object, ...], list[tuple[str, Message]]] = {}
    for step in pricing.steps:
        for m in step.messages:
            kind = (m.what, m.direction, m.collective, m.form, m.axis)
            key = (step.module, *kind) if m.what in OF_PARAMETERS else (step.module, *kind, m.size, m.seconds)
            groups.setdefault(key, []).append((step.module, m))
    drafts = [_draft(members) for members in groups.values()]
    alike = [(t.what, t.direction, t.collective, t.form, t.axis, t.size, f"{t.seconds:.9e}", t.times) for t in drafts]
    found = []
    for layer, members in fold([(t.layer, like) for t, like in zip(drafts, alike, strict=True)]):
        first, tensors = drafts[members[0]], tuple(n for m in members for n in drafts[m].tensors)
        found.append(replace(first, layer=layer, times=first.times * len(members), tensors=tensors))
    return tuple(sorted(found, key=lambda t: -t.total))


def _draft(members: Sequence[tuple[str, Message]]) -> Traffic:
    module, m = members[0]
    together = m.what in OF_PARAMETERS
    size, seconds, volume = ((sum(getattr(x, name) for _, x in members) if together else getattr(m, name)) for name in ("size", "seconds", "volume"))
    times, tensors = 1 if together else len(members), tuple(x.tensor for _, x in members)
    return Traffic(m.what, m.direction, m.collective, m.form, m.axis, size, seconds, volume, m.crosses, module, times, tensors)


def traffic_table(rows: Sequence[Traffic], words: Vocabulary, most: int | None = None) -> str:
    """The rows as text, those of the same tensors that take equally long as one; `most`: only so many, and a line on the rest."""
    if not rows:
        return "nothing is communicated"
    pairs: dict[tuple[object, ...], list[Traffic]] = {}
    for t in rows:
        pairs.setdefault((t.layer, t.what, t.axis, t.size, f"{t.seconds:.6e}", t.times, t.tensors), []).append(t)
    lines = sorted(pairs.values(), key=lambda pair: -sum(t.total for t in pair))
    several = len(words.mesh.axes) > 1
    columns = ("layer", "what", "collective, forward / backward", *(["over"] if several else []), "bytes", "time", "times", "total", "limited by")
    table = new_table(*columns, right=("bytes", "time", "times", "total"), whole=("layer", "what", "limited by"))
    for pair in lines[:most]:
        t, times, total = pair[0], sum(t.times for t in pair), sum(t.total for t in pair)
        over = [words.mesh.axes[t.axis].name] if several else []
        numbers = size_text(t.size), time_text(t.seconds), str(times), time_text(total)
        table.add_row(t.layer or "(model)", t.what, _collectives(pair), *over, *numbers, t.limit())
    rest = [t for pair in lines[most:] for t in pair] if most is not None else []
    more = f"\nand {sum(t.times for t in rest)} more that take {time_text(sum(t.total for t in rest))} together" if rest else ""
    return render(table) + more


def _collectives(pair: Sequence[Traffic]) -> str:
    """What runs forward / backward: "all-gather / reduce-scatter", "- / all-reduce"."""
    forward, backward = (" + ".join(_collective(t) for t in pair if (t.direction == "forward") is there) or "-" for there in (True, False))
    return f"{forward} / {backward}"


def _collective(t: Traffic) -> str:
    form = {Form.NONE: "", Form.PADDED: "", Form.GROUPED: " grouped", Form.POINT_TO_POINT: " point-to-point"}[t.form]
    return collective_text(t.collective) + form
