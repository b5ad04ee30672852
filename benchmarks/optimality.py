"""How good the programs are that the search finds, and their ratios: five tables.

    python -m benchmarks.optimality [--graphs 300] [--orders 40] [--time-limit 60] [--only 1,3] [--write docs/optimality.md]

1 compares the search with exhaustive enumeration, 2 with a mixed integer program, 3 says what the fixed order costs, 4 what the search's limits cost,
5 compares what the alternation finds with a global reference.
Ends with an error where the search is further from the optimum than it says. `--write` puts the tables that were made into the page, and leaves the
others as they are there.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.budgets import cut_table
from benchmarks.joint import joint_table
from benchmarks.orders import order_table
from benchmarks.whole_models import whole_models
from benchmarks.whole_space import whole_space

HEAD = """# Optimality

How near the programs of the search (`hapx/synth`) are to the best ones, at given shares. The space: nodes in one fixed topological order;
every triple of the theory; before each operand at most one conversion (a path that changes each mesh axis once, in every legal order, form and
kind of gathering) from a placement that is there or free; every way to store a parameter. Made by
`python -m benchmarks.optimality --write docs/optimality.md`; times are of the machine it ran on.
"""


@dataclass(frozen=True)
class Section:
    """text: what the table shows, for the page. make: the table, and whether all is as it must be."""

    title: str
    text: str
    make: Callable[[argparse.Namespace], tuple[Table, bool]]


SECTIONS = {
    "1": Section(
        "The whole space",
        """Random graphs over registered operators with real costs on four devices of one to three kinds. Each node keeps a part of its triples,
so that at least 1000 and at most 5000 programs are legal; `hapx/synth/exhaustive.py` goes through all of them, one by one, without anything of the
search. Where memory binds, the limits are what a program drawn at random needs and the cheapest one exceeds.""",
        lambda options: whole_space(options.graphs),
    ),
    "2": Section(
        "Whole models",
        """Models of two layers, all triples, all forms of collectives on flat meshes (on 2x2 padded ones, and of transformers a part of the triples,
drawn at random). `benchmarks/milp.py` states the program: networks of availability per tensor, clocks per kind of devices for the maxima of phases.
Its bound is proven by HiGHS. *Reported gap* is what the search itself says (`plan.statistics["gap"]`): where it is 0, the search ended with a proof
of its own. Memory binds halfway between what the cheapest and what the smallest program needs.""",
        lambda options: whole_models(options.time_limit),
    ),
    "3": Section(
        "The fixed order",
        """Random graphs of two or three branches. The same theory is searched in all topological orders (a sample, where there are too many).
Optima of whole theories of such graphs communicate little, so their order hardly matters; theories thinned to two triples per node must communicate.
Cost is relative to the best order.""",
        lambda options: (order_table(options.orders, options.orders), True),
    ),
    "4": Section(
        "The search's limits",
        """A search that keeps more partial programs than its budget ends with the best program so far and reports by how much, at most, it is above
the best one. Here are smaller budgets too, against the optimum of table 2. Searches begin with programs that people write by hand, so that even a
budget of 0 gives a good one. On two axes, problems of more than 110 steps are solved to 0.1 %, not further.""",
        lambda options: cut_table(options.time_limit),
    ),
    "5": Section(
        "Joint quality: programs and ratios",
        """Random small problems on two to four kinds of devices; in every fifth memory binds. What the alternation finds, against the best pair from
a grid over all shares of device kinds and from random shares, with A* at every point and the linear program and further alternation after it
(`benchmarks/joint.py`, which alone prints more).""",
        lambda options: joint_table(options.cases),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimality", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--graphs", type=int, default=300, help="random graphs per mesh in table 1")
    parser.add_argument("--orders", type=int, default=40, help="graphs per mesh, and orders of each at most, in table 3")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of the integer program per model")
    parser.add_argument("--cases", type=int, default=200, help="problems in table 5")
    parser.add_argument("--only", default=",".join(SECTIONS), help="tables to make, such as 1,3")
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m benchmarks.optimality", *(sys.argv[1:] if arguments is None else arguments)])
    print(command)
    warnings.simplefilter("ignore")  # operators that run whole
    made: dict[str, str] = {}
    wrong = []
    for number in options.only.split(","):
        section, began = SECTIONS[number], time.perf_counter()
        table, good = section.make(options)
        Console(width=200).print(table)
        made[number] = f"## {number}. {section.title}\n\n{section.text}\n\n{markdown(table)}\n`{command}`, {time.perf_counter() - began:.0f} s\n"
        wrong += [] if good else [number]
    if options.write is not None:
        write(options.write, made)
    if wrong:
        print(f"WRONG: table {', '.join(wrong)}")
    return len(wrong) > 0


def markdown(table: Table) -> str:
    """A table for a page, without its title."""
    table.box, table.title = box.MARKDOWN, None
    out = StringIO()
    Console(file=out, width=400).print(table)
    return "\n".join(line.strip() for line in out.getvalue().splitlines() if line.strip()) + "\n"


def write(page: Path, made: dict[str, str]) -> None:
    """Puts sections into a page, in the place of those that have their numbers."""
    known = re.split(r"(?m)^(?=## \d)", page.read_text()) if page.exists() else [HEAD]
    sections = {text.split(".")[0].removeprefix("## "): text for text in known[1:]} | made
    page.write_text("\n".join([HEAD, *(sections[n].rstrip() + "\n" for n in sorted(sections))]))


if __name__ == "__main__":
    sys.exit(main())
