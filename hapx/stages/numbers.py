"""Whether there may be pipelines, and which numbers of micro-batches are tried for a batch on a cluster."""

from __future__ import annotations

from hapx.cluster.spec import ClusterSpec
from hapx.restriction import Restriction


def may_have_stages(rule: Restriction, cluster: ClusterSpec) -> bool:
    """Whether stages on parts of a cluster may be looked for: what is said of the one mesh of all devices cannot be said of stages."""
    one_mesh = rule.mesh not in ("auto", "flat") or cluster.mesh not in ("auto", "flat") or isinstance(rule.ratios, tuple)
    return rule.max_stages > 1 and cluster.num_devices > 1 and not one_mesh


def numbers_of_micro_batches(batch: int, cluster: ClusterSpec, scarce: bool = False) -> tuple[int, ...]:
    """Those that are tried: divisors of the batch near 4 and 2 times as many as there are machines (eight at least), or devices of
    a single one; near 32 times where memory is scarce."""
    unit = stages_at_most(cluster)
    divisors = [n for n in range(2, batch + 1) if batch % n == 0]
    found: list[int] = []
    for wanted in (32 * unit,) if scarce else (4 * unit, 2 * unit):
        found += sorted((n for n in divisors if n not in found), key=lambda n: (abs(n - wanted), n))[:1]
    return tuple(found)


def stages_at_most(cluster: ClusterSpec) -> int:
    """Stages that a pipeline may have, roughly."""
    return max(len(cluster.machines), 8) if len(cluster.machines) > 1 else cluster.num_devices
