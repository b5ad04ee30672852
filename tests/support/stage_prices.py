"""Random inter-operator problems: clusters of mixed machines, answers, crossings and bounds out of a random generator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hapx.cluster.spec import ClusterSpec, Link
from hapx.stages.costs import GPIPE, ONE_F_ONE_B, UNLIMITED, Answer, Discipline, Prices, eager
from hapx.stages.submeshes import Shape

SPEEDS = {"fast": 4.0, "medium": 3.0, "slow": 1.0}


def cluster_of(*machines: list[str], intra: tuple[float, ...] = (1e10,)) -> ClusterSpec:
    """A machine per list of devices; the links inside take turns."""
    return ClusterSpec.load(
        {
            "machines": [
                {"name": f"m{i}", "devices": devices, "intra": {"bandwidth": intra[i % len(intra)], "latency": "1 us"}}
                for i, devices in enumerate(machines)
            ],
            "device_types": {k: {"flops": v * 1e12, "memory": "2 GiB", "memory_bandwidth": "10 GB/s"} for k, v in SPEEDS.items()},
            "network": {"inter": {"bandwidth": "1 Gbit/s", "latency": "10 us"}},
        }
    )


def random_cluster(seed: int, most: int = 5) -> ClusterSpec:
    """Up to `most` devices in up to three machines, alike or not, with equal devices or not."""
    draw = random.Random(seed)
    machines: list[list[str]] = []
    while len(machines) < 3 and (room := most - sum(map(len, machines))) > 0:
        if machines and len(machines[-1]) <= room and draw.random() < 0.4:
            machines.append(list(machines[-1]))
        else:
            kinds = draw.sample(sorted(SPEEDS), draw.choice([1, 1, 2]))
            machines.append([draw.choice(kinds) for _ in range(draw.randint(1, min(4, room)))])
        if draw.random() < 0.3:
            break
    return cluster_of(*machines, intra=draw.choice([(1e10,), (1e10, 2e10)]))


@dataclass
class World:
    """Prices that are drawn when they are first asked for, the same whenever they are asked. asked: how often."""

    seed: int
    layers: tuple[str, ...]
    micro_batches: int
    loose: float = 2.0
    together: float = 0.5  # 1: devices share the work of a stage without loss
    asked: int = 0
    known: dict[tuple[object, ...], tuple[Answer, ...]] = field(default_factory=dict)

    def _draw(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed} {self.micro_batches} {key}")

    def _answers(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        key = (self.layers[start:stop], str(shape), shape.parts[0].intra)
        if key not in self.known:
            self.known[key] = self._drawn(start, stop, shape)
        return self.known[key]

    def _drawn(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        draw = self._draw("answer", self.layers[start:stop], str(shape), shape.parts[0].intra)
        work = sum(1 + len(name) for name in self.layers[start:stop]) / sum(SPEEDS[t] for t in shape.types) ** self.together / self.micro_batches
        made = []
        for _ in range(draw.choice([0, 1, 2, 2, 3])):
            most = draw.choice([1, 1, 2, 3, 5, UNLIMITED])
            made.append(Answer(work * draw.uniform(0.7, 1.6), draw.choice([0.0, work * self.micro_batches * draw.uniform(0, 1)]), most))
        return tuple(made)

    def ask(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        self.asked += 1
        return self._answers(start, stop, shape)

    def bound(self, start: int, stop: int, shape: Shape) -> Answer:
        answers = self._answers(start, stop, shape)
        if not answers:
            return Answer(0.0, 0.0, UNLIMITED)
        share = self._draw("bound", self.layers[start:stop], str(shape)).uniform(1 / self.loose, 1)
        micro, iteration, most = (pick(getattr(a, f) for a in answers) for f, pick in (("micro", min), ("iteration", min), ("most_in_flight", max)))
        return Answer(micro * share, iteration * share, most)

    def crossing(self, boundary: int, front: Shape, back: Shape, link: Link) -> float:
        draw = self._draw("crossing", boundary, str(front), str(back))
        return self.least_crossing(boundary, front, link) * draw.choice([1.0, draw.uniform(1, 4)])

    def least_crossing(self, boundary: int, front: Shape, link: Link) -> float:
        draw = self._draw("least", boundary, str(front))
        return draw.choice([0.0, 0.1, 0.5]) * (1.0 if link.bandwidth < 1e9 else 0.1) / self.micro_batches

    def prices(self) -> Prices:
        return Prices(self.micro_batches, self.ask, self.bound, self.crossing, self.least_crossing)


def random_worlds(seed: int) -> tuple[tuple[str, ...], list[World], tuple[Discipline, ...]]:
    """Layers (some alike), one world per number of micro-batches, disciplines."""
    draw = random.Random(seed)
    layers = tuple(draw.choice(["a", "a", "a", "bb", "cccc"]) for _ in range(draw.choice([1, 2, 3, 4, 5, 6, 6, 6])))
    counts = draw.sample([1, 2, 4, 8, 16], draw.randint(1, 2))
    disciplines = tuple(draw.sample([ONE_F_ONE_B, GPIPE, eager(2), eager(3)], draw.randint(1, 2)))
    return layers, [World(seed, layers, n, draw.choice([1.0, 2.0, 10.0]), draw.choice([0.0, 0.1, 0.3, 0.6, 1.0])) for n in counts], disciplines
