"""Which numbers of micro-batches are tried for a batch on a cluster."""

from __future__ import annotations

from hapx.cluster.spec import ClusterSpec


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
