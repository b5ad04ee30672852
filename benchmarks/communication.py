"""Which way to communicate is best, and where that changes: tables, and with `--write DIR` plots, of what the cost model says.

    python -m benchmarks.communication --write docs

1. Forms of an uneven gather over the share of its largest shard (HAP, Figure 4): crossover_forms.svg.
2. Even, proportional and balanced shares, and data or tensor parallelism, over the bandwidth (HAP, Figure 2): crossover_ratio.svg.
3. How the planner has the gradients of a data-parallel model made, over batch, bandwidth and skew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.crossover import (
    FORMS,
    STRATEGIES,
    Ratio,
    at_bandwidth,
    choices,
    equal_devices,
    gather_seconds,
    skew_by_formula,
    skew_where_grouped_wins,
    sweep,
)
from hapx.cluster.spec import ClusterSpec

COMMAND = "python -m benchmarks.communication"
MIB = 2**20
SIZES = (2**18, MIB, 4 * MIB, 64 * MIB)
SHOWN = 4 * MIB
SHARES = (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
BANDWIDTHS = sweep(1.0, 1000.0, 13)
BATCHES = (64, 1024, 2048, 4096, 16384)
SKEWS = (0.25, 0.4, 0.7)
GIGABITS = (10.4, 1000.0)


def clusters() -> dict[str, ClusterSpec]:
    return {"4 machines of 1": equal_devices(4), "2 machines of 2": equal_devices(2, 2)}


# --- tables -------------------------------------------------------------------------------------------------------------------


def forms_table(console: Console) -> None:
    for name, cluster in clusters().items():
        table = Table(title=f"All-gather of 4 MiB, ms: {name}, 10.4 Gbit/s", title_justify="left")
        for heading in ("largest share", *(f.value for f in FORMS), "best"):
            table.add_column(heading, justify="right")
        for share in SHARES:
            seconds = {form: gather_seconds(cluster, SHOWN, share, form) for form in FORMS}
            table.add_row(f"{share:.0%}", *(f"{s * 1e3:.2f}" for s in seconds.values()), min(seconds, key=seconds.__getitem__).value)
        console.print(table)
    table = Table(title="Largest share from which grouped beats padded", title_justify="left")
    for heading in ("bytes gathered", "from the terms", "by formula"):
        table.add_column(heading, justify="right")
    cluster = clusters()["4 machines of 1"]
    for size in SIZES:
        found = skew_where_grouped_wins(cluster, size)
        formula = skew_by_formula(4, size, cluster.inter.bandwidth, cluster.inter.latency)
        table.add_row(f"{size / MIB:g} MiB", "never" if found is None else f"{found:.1%}", f"{formula:.1%}")
    console.print(table)


def ratio_table(console: Console, found: Sequence[Ratio]) -> None:
    table = Table(title="Four layers of width 2048, batch 2048, on 2 V100 + 2 P100 in machines of their own: predicted ms", title_justify="left")
    for heading in ("Gbit/s", "comp./comm.", *STRATEGIES, "share of a V100", "best plain one"):
        table.add_column(heading, justify="right")
    for r in found:
        seconds = (f"{r.seconds[name] * 1e3:.2f}" for name in STRATEGIES)
        table.add_row(f"{r.gigabits:g}", f"{r.ratio:.2f}", *seconds, f"{r.fast:.1%}", r.best)
    console.print(table)
    for left, right in (("tensor, proportional", "tensor, even"), ("data, proportional", "tensor, balanced")):
        at = overtakes(found, left, right)
        console.print(f"{left} beats {right} from {at} on" if at else f"{left} never beats {right} up to {found[-1].gigabits:g} Gbit/s")


def overtakes(found: Sequence[Ratio], left: str, right: str) -> str | None:
    """The first bandwidth, and ratio, at which `left` takes less time than `right`, having taken more before."""
    for before, after in pairwise(found):
        if before.seconds[left] >= before.seconds[right] and after.seconds[left] < after.seconds[right]:
            return f"{after.gigabits:g} Gbit/s (computation / communication {after.ratio:.2f})"
    return None


def choices_table(console: Console) -> None:
    title = "Gradients in a data-parallel plan on 4 machines of 1: table of 32768 x 1024, layers of 1024 x 4096 and 4096 x 1024"
    table = Table(title=title, title_justify="left")
    for heading in ("Gbit/s", "largest share", "batch", "table", "first", "second"):
        table.add_column(heading, justify="right")
    for gigabits in GIGABITS:
        for skew in SKEWS:
            for batch in BATCHES:
                how = choices(batch, gigabits, skew)
                table.add_row(f"{gigabits:g}", f"{skew:.0%}", str(batch), *(how[name] for name in ("table", "first", "second")))
    console.print(table)


# --- plots --------------------------------------------------------------------------------------------------------------------

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "black")


def plot_forms(path: Path) -> None:
    """Left: time over the skew; right: where padded and grouped cross, over the size of what is gathered."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    cluster = clusters()["4 machines of 1"]
    shares = [0.25 + 0.7 * i / 70 for i in range(71)]
    for form, colour, style in zip(FORMS, COLOURS, ("-", "-", "--"), strict=False):
        seconds = [1e3 * gather_seconds(cluster, SHOWN, s, form) for s in shares]
        left.plot([100 * s for s in shares], seconds, colour, linestyle=style, label=form.value.replace("_", "-"))
    at = skew_where_grouped_wins(cluster, SHOWN)
    if at is not None:
        left.axvline(100 * at, color="gray", linestyle=":")
        left.annotate(f"{at:.0%}", (100 * at, 0.4), xytext=(4, 0), textcoords="offset points", color="gray")
    left.set(title="4 MiB on 4 machines", xlabel="share of the largest shard (%)", ylabel="all-gather (ms)", ylim=(0, None))
    left.legend()
    sizes = [2**16 * 2 ** (i / 4) for i in range(41)]
    for devices, colour in zip((3, 4, 8), COLOURS[3:], strict=True):
        found = [(n / 2**20, s) for n in sizes if (s := skew_where_grouped_wins(equal_devices(devices), n)) is not None]
        right.plot([n for n, _ in found], [100 * s for _, s in found], colour, label=f"{devices} machines")
    right.set(title="grouped broadcasts win above the line", xscale="log", xlabel="bytes gathered (MiB)", ylim=(0, 100))
    right.set_ylabel("share of the largest shard (%)")
    right.legend()
    for place in (left, right):
        place.grid(alpha=0.3)
    figure.suptitle(f"Forms of an uneven all-gather, 10.4 Gbit/s and 50 us between machines ({COMMAND})", fontsize=10)
    _save(figure, path)


def plot_ratio(path: Path, found: Sequence[Ratio]) -> None:
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(2, 1))
    x = [r.gigabits for r in found]
    for name, colour in zip(STRATEGIES, COLOURS, strict=True):
        style = {"linestyle": "--", "linewidth": 2} if name == "planner" else {"marker": "o", "markersize": 3}
        above.plot(x, [r.seconds[name] / r.seconds[r.best] for r in found], color=colour, label=name, **style)
    above.set(xscale="log", ylabel="iteration / best of the plain strategies", ylim=(0.8, 1.4))
    above.legend(fontsize=8, loc="upper center", ncols=2)
    below.plot(x, [100 * r.fast for r in found], color=COLOURS[4], marker="o", markersize=3, label="tensor, balanced")
    below.axhline(25, color="gray", linestyle=":")
    below.annotate("even", (x[0], 25), xytext=(2, 3), textcoords="offset points", color="gray", fontsize=8)
    below.set(ylabel="share of a V100 (%)", xlabel="bandwidth between machines (Gbit/s)")
    top = above.secondary_xaxis("top")
    top.set_xticks(x[::2], [f"{r.ratio:.2g}" for r in found[::2]])
    top.tick_params(which="minor", length=0)
    top.set_xlabel('computation / communication of "tensor, even"', fontsize=9)
    for place in (above, below):
        place.grid(alpha=0.3)
    what = "Four layers of width 2048, batch 2048, on 2 V100 and 2 P100 in machines of their own"
    figure.suptitle(f"{what}\n({COMMAND}; where it is not seen, the planner is below the scale)", fontsize=10)
    _save(figure, path)


def _save(figure: object, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()  # type: ignore[attr-defined]
    # no date and fixed identifiers: the same numbers give the same file
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with plt.rc_context({"svg.hashsalt": "hapx"}):
        figure.savefig(path, metadata=metadata)  # type: ignore[attr-defined]
    plt.close(figure)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Crossovers between ways to communicate, from the cost model.")
    parser.add_argument("--write", metavar="DIR", type=Path, help="also save the plots there")
    parser.add_argument("--format", default="svg", choices=("svg", "png"), help="of the plots")
    arguments = parser.parse_args(argv)
    console = Console(width=180)
    forms_table(console)
    found = [at_bandwidth(g) for g in BANDWIDTHS]
    ratio_table(console, found)
    choices_table(console)
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        plot_forms(arguments.write / f"crossover_forms.{arguments.format}")
        plot_ratio(arguments.write / f"crossover_ratio.{arguments.format}", found)
    console.print(f"\n{COMMAND}{f' --write {arguments.write}' if arguments.write else ''}")


if __name__ == "__main__":
    main()
