"""The page of `benchmarks.paper`: tables as markdown, plots beside it as SVG.

In: results, the lines of the verdict, the command that made them. Out: PAGE.md, PAGE-throughput.svg (samples per second over devices, a panel per
model and cluster), PAGE-ablation.svg (times without each part of hapx, relative to all of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper import HAPX, HOMOGENEOUS, MODELS, PAPER, Result, columns, of, rows

CLUSTERS = {PAPER: "2 machines of V100, 6 of P100", HOMOGENEOUS: "8 machines of V100"}


def write_page(path: Path, results: Sequence[Result], lines: Sequence[str], command: str) -> None:
    """Writes the page and its plots. Needs matplotlib (extra `demo`)."""
    plots = [p for p in (_throughput(path, results), _ablation(path, results)) if p is not None]
    systems = columns(results)
    text = [
        "# The paper's evaluation, simulated", "",
        f"Made by `{command}`. Milliseconds per iteration, in brackets times hapx; square brackets: does not fit into memory (bytes of the",
        "fullest device). Models, clusters and systems: see `benchmarks/paper.py`, `benchmarks/baselines.py` and `benchmarks/cuts.py`. Every number",
        "is of the event-driven simulator (`hapx/simulate.py`), none was measured on GPUs.", "",
        *(f"- {line}" for line in lines), "",
        f"| case | {' | '.join(systems)} |", f"|---|{'---:|' * len(systems)}",
        *(f"| {case} | {' | '.join(cells)} |" for case, cells in rows(results)), "",
        *(f"![{plot.stem}]({plot.name})" for plot in plots), "",
    ]  # fmt: skip
    path.write_text("\n".join(text), encoding="utf-8")


def _throughput(path: Path, results: Sequence[Result]) -> Path | None:
    """Samples per second over devices; a panel per model, a row of panels per cluster."""
    from matplotlib.figure import Figure

    shown = [c for c in CLUSTERS if any(r.case.cluster == c for r in results)]
    models = [m for m in MODELS if any(r.case.model == m for r in results)]
    figure = Figure(figsize=(3.6 * len(models), 3.2 * len(shown) + 0.8), layout="constrained")
    panels = figure.subplots(len(shown), len(models), squeeze=False)
    names = [n for n in columns(results) if not any(r.system == n and r.kind == "ablation" for r in results)]
    for row, cluster in enumerate(shown):
        for column, model in enumerate(models):
            panel = panels[row][column]
            for number, name in enumerate(names):
                here = sorted(
                    (r for r in results if (r.case.cluster, r.case.model, r.system) == (cluster, model, name) and r.fits), key=lambda r: r.case.gpus
                )
                style = {"linewidth": 2.2, "color": "black"} if name == HAPX else {"linewidth": 1.0, "color": f"C{number}"}
                panel.plot([r.case.gpus for r in here], [r.throughput for r in here], marker="o", markersize=3, label=name, **style)
            panel.set(
                title=f"{model}, {CLUSTERS[cluster]}", xlabel="GPUs", ylabel="samples per second" if column == 0 else "", xscale="log", ylim=(0, None)
            )
            panel.title.set_fontsize(8)
            gpus = sorted({r.case.gpus for r in results})
            panel.set_xticks(gpus, [str(g) for g in gpus], minor=False)
            panel.minorticks_off()
    known = {label: line for panel in panels.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return _save(figure, path.with_name(f"{path.stem}-throughput.svg"))


def _ablation(path: Path, results: Sequence[Result]) -> Path | None:
    """Bars: how many times as long an iteration takes without each part."""
    from matplotlib.figure import Figure

    parts = [n for n in columns(results) if any(r.system == n and r.kind == "ablation" for r in results)]
    cases = [case for case, _ in rows(results) if any(name in of(results, case) for name in parts)]
    if not cases:
        return None
    figure = Figure(figsize=(1.6 + 0.8 * len(cases), 3.6), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / len(parts)
    for number, name in enumerate(parts):
        places = [i + (number - (len(parts) - 1) / 2) * width for i in range(len(cases))]
        times = [of(results, c)[name].time / of(results, c)[HAPX].time if of(results, c)[name].fits else 0.0 for c in cases]
        panel.bar(places, times, width, label=name)
        for place, seconds in zip(places, times, strict=True):
            if not seconds:
                panel.text(place, 0.85, "does not fit", rotation=90, ha="center", va="bottom", fontsize=6)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(cases)), [f"{c.model}\n{c.gpus}" for c in cases], fontsize=7)
    panel.set(ylabel="time, hapx = 1", ylim=(0.8, None))
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return _save(figure, path.with_name(f"{path.stem}-ablation.svg"))


def _save(figure: object, path: Path) -> Path:
    """Without a date, so that the same numbers give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "hapx"}):
        figure.savefig(path, metadata={"Date": None})  # type: ignore[attr-defined]
    return path
