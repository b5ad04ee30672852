"""The command `hapx`.

In: a command line. Out: text on stdout, exit status 0; or one clear line on stderr and exit status 2 for whatever a user can get wrong.
Torch and the planner are imported by the commands that need them, not by this module.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from hapx import __version__
from hapx.errors import HapError
from hapx.processes import without_collections
from hapx.warnings import HapWarning

if TYPE_CHECKING:
    from hapx.plan import Plan

app = typer.Typer(
    help="Trains one unchanged PyTorch model on GPUs that differ.", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

PLAN_FILE = typer.Argument(metavar="PLAN", help="A file that `hapx plan --out` wrote.")


def main() -> None:
    """Entry point of the command. Exit status 2 for a user's mistake; a warning of hapx is one line."""
    usual = warnings.showwarning

    def show_one_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        if issubclass(category, HapWarning):
            typer.echo(f"hapx: {' '.join(str(message).split())}", err=True)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show_one_line
    atexit.register(gc.freeze)  # nothing is left to be done: looking for garbage in all that planning has made would take seconds
    app()


@contextmanager
def _one_line() -> Iterator[None]:
    """A user's mistake is one line on stderr."""
    try:
        yield
    except HapError as error:
        _fail(f"{type(error).__name__}: {error}" if type(error) is not HapError else str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"hapx: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hapx {__version__}")
        raise typer.Exit


@app.callback()
def _hapx(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


# ---- commands --------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="file.py:factory or module:factory; it returns (module, example_inputs).")],
    cluster: Annotated[Path, typer.Option("--cluster", "-c", help="The cluster file (YAML).")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here (JSON).")] = None,
    strategy: Annotated[str, typer.Option(help="auto, dp-even, dp-proportional, zero, tensor-parallel.")] = "auto",
    optimizer: Annotated[str, typer.Option(help="For the memory model.")] = "adamw",
    remat: Annotated[str, typer.Option(help="auto, none, blocks: compute repeated blocks again in backward.")] = "auto",
) -> None:
    """Finds the fastest program for a model on a cluster and prints the plan."""
    with _one_line(), without_collections():  # nor while torch is loaded, which takes a second less so
        from hapx.cluster.spec import ClusterSpec
        from hapx.restriction import restriction, with_remat

        spec, allowed = ClusterSpec.load(cluster), with_remat(restriction(strategy), remat)  # before torch is loaded: mistakes are told at once
        if out is not None and not out.parent.is_dir():
            _fail(f"--out {out}: there is no directory {out.parent}")
        module, example_inputs = load_target(target)
        import hapx
        from hapx.report.progress import shown

        with shown() as progress:
            found = hapx.plan(module, spec, example_inputs, strategy=allowed, optimizer=optimizer, progress=progress)
        typer.echo(str(found))
        if out is not None:
            found.save(out)
            typer.echo(f"\nwritten to {out}")


@app.command()
def show(
    file: Annotated[Path, PLAN_FILE],
    communication: Annotated[bool, typer.Option("--communication", help="Every communication: form, bytes, time, what limits it.")] = False,
    phases: Annotated[bool, typer.Option("--phases", help="What bounds each phase: which devices and why, or a link.")] = False,
    why: Annotated[bool, typer.Option("--why", help="What the next best alternatives to the most expensive choices would cost.")] = False,
    statistics: Annotated[bool, typer.Option("--statistics", help="What the search did and proved.")] = False,
    program: Annotated[bool, typer.Option("--program", help="The program, instruction by instruction.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All of these but the program.")] = False,
) -> None:
    """Explains a plan: layers, where time and memory go, the most expensive communications; by the options more, instead of these."""
    with _one_line():
        from hapx.report.progress import shown
        from hapx.report.show import REASONS, SECTIONS, overview, programs

        found = _load(file)
        wanted = {"communication": communication, "phases": phases, "statistics": statistics}
        if everything or not any((*wanted.values(), why, program)):
            typer.echo(overview(found))
        for name, section in SECTIONS.items():
            if wanted[name] or everything:
                typer.echo(f"\n{section(found)}")
        if why or everything:
            for reason in REASONS:
                with shown() as progress:
                    text = reason(found, progress)
                if text is not None:
                    typer.echo(f"\n{text}")
        if program:
            typer.echo(f"\n{programs(found)}")


@app.command()
def compare(files: Annotated[list[Path], typer.Argument(metavar="PLAN PLAN", help="Two or more plan files.")]) -> None:
    """Puts plans side by side: predicted time, memory, shares."""
    with _one_line():
        from hapx.report.compare import compare_table

        if len(files) < 2:
            _fail("compare needs at least two plan files")
        typer.echo(compare_table(_named(files)))


@app.command()
def whatif(
    file: Annotated[Path, PLAN_FILE],
    drop: Annotated[list[str] | None, typer.Option(help="A machine, machines of a name, or a device type to leave out; may be repeated.")] = None,
    add: Annotated[list[str] | None, typer.Option(help='One more machine, as "2xA100-SXM4-40GB"; may be repeated.')] = None,
    bandwidth: Annotated[str | None, typer.Option(help='Of the links between machines, as "25 Gbit/s".')] = None,
) -> None:
    """Plans the model of a plan again for a changed cluster and compares; without changes: is it faster without the slowest type of device?
    Without any other type, or all machines of a name?"""
    with _one_line():
        from hapx.report.progress import shown
        from hapx.report.whatif import changed, describe, fewer, taken_as, whatif_table

        found, drop, add = _load(file), drop or [], add or []
        clusters = {}
        if drop or add or bandwidth:
            wanted = changed(found.cluster, drop, add, bandwidth)
            slowest = {name: c for name, c in fewer(found).items() if name.endswith("(the slowest)") and c.to_dict() != wanted.to_dict()}
            clusters = {describe(drop, add, bandwidth): wanted, **slowest}
        else:
            clusters = fewer(found)
        if not clusters:
            _fail("nothing to compare: all devices are of one type in one machine; allowed: --drop, --add, --bandwidth")
        with shown() as progress:
            text = whatif_table(found, clusters, progress)
        typer.echo("\n\n".join([text, *taken_as(found.cluster, add)]))


@app.command()
def simulate(
    file: Annotated[Path, PLAN_FILE],
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev or chrome://tracing here (JSON).")] = None,
) -> None:
    """Simulates one iteration of a plan, event by event."""
    with _one_line():
        from hapx.simulate import simulate as run

        if trace is not None and not trace.parent.is_dir():
            _fail(f"--trace {trace}: there is no directory {trace.parent}")
        timeline = run(_load(file))
        typer.echo(str(timeline))
        if trace is not None:
            _written(trace, timeline.save_trace)


@app.command()
def devices() -> None:
    """Lists the device types that cluster files may name."""
    from hapx.report.catalogue import catalogue_table

    typer.echo(catalogue_table())


@app.command()
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A cluster file (YAML).")]) -> None:
    """Checks a cluster file and prints what it means."""
    with _one_line():
        from hapx.cluster.spec import ClusterSpec

        typer.echo(str(ClusterSpec.load(file)))


@app.command()
def audit(quick: Annotated[bool, typer.Option("--quick", help="Fewer settings; about a tenth of the time.")] = False) -> None:
    """Checks the operator table by executing every rule: none may be wrong. Exit status 1 if one is."""
    with _one_line():
        from hapx.theory.audit import audit as run

        report = run(quick=quick)
        typer.echo(str(report))
        if report.unsound:
            raise typer.Exit(1)


# ---- files and targets -------------------------------------------------------------------------------------------------


def _load(file: Path) -> Plan:
    """A plan file; a name that is not there gets a suggestion."""
    from hapx.plan import Plan

    if not file.is_file():
        _fail(f"{file}: no such plan file{_near(file.name, [p.name for p in _siblings(file, '*.json')])}")
    return Plan.load(file)


def _named(files: list[Path]) -> dict[str, Plan]:
    """Plans by the shortest names that tell them apart."""
    short = [f.stem for f in files]
    return {name if short.count(name) == 1 else f"{i + 1}: {name}": _load(f) for i, (name, f) in enumerate(zip(short, files, strict=True))}


def _written(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        _fail(f"{path}: cannot be written: {error.strerror or error}")
    typer.echo(f"written to {path}")


def load_target(target: str) -> tuple[Any, Any]:
    """What the factory of TARGET returns: (module, example_inputs). A user's mistake ends the command with one line."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        _fail(f"{target!r} is not a target; allowed: file.py:factory or module:factory")
    found = _import_file(Path(place)) if place.endswith(".py") or "/" in place else _import_module(place)
    factory = getattr(found, name, None)
    if factory is None:
        public = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
        own = [n for n in public if getattr(getattr(found, n), "__module__", None) == found.__name__]
        has = f"; it has: {', '.join(own)}" if own else ""
        _fail(f"{place} has no factory {name!r}{_near(name, own) or has}")
    if not callable(factory):
        _fail(f"{target}: {name} is a {type(factory).__name__}, not a function that returns (module, example_inputs)")
    try:
        made = factory()
    except HapError:
        raise
    except Exception as error:
        _fail(f"{target} raised {type(error).__name__}: {error}{_line_of(error)}")
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "named_parameters")):
        _fail(
            f"{target} returned {_described(made)}; allowed: (torch.nn.Module, example inputs), the inputs as a tuple or a dict of keyword arguments"
        )
    return made


def _import_file(path: Path) -> Any:
    if not path.is_file():
        _fail(f"{path}: no such file{_near(path.name, [p.name for p in _siblings(path, '*.py')])}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles of the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _fail(f"{path} cannot be imported: {type(error).__name__}: {error}{_line_of(error)}")
    return module


def _import_module(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            _fail(f"there is no module {name!r}; allowed: file.py:factory, or module:factory of a module that Python finds")
        _fail(f"{name} cannot be imported: {error}")
    except Exception as error:
        _fail(f"{name} cannot be imported: {type(error).__name__}: {error}{_line_of(error)}")


def _siblings(path: Path, pattern: str) -> list[Path]:
    return sorted(path.parent.glob(pattern)) if path.parent.is_dir() else []


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 3, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _line_of(error: BaseException) -> str:
    """Where in the user's code an exception was raised."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f" ({at.tb_frame.f_code.co_filename}:{at.tb_lineno})" if at is not None else ""


def _described(value: Any) -> str:
    return f"a tuple of {len(value)}: {', '.join(type(v).__name__ for v in value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
