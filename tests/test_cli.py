"""The command line: what it prints, and one clear line with exit status 2 for what users get wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hapx.cli import app
from support.plans import mlp_batch_split
from support.small_stages import gpt

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "cluster_specs"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


def mistake(*args: str | Path) -> str:
    """The one line on stderr of a command that must fail with status 2."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    plan = replace(mlp_batch_split((64, 256, 10), (4, 2, 1, 1)), memory=(1, 2, 3, 4))
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_version() -> None:
    import hapx

    assert run("--version").stdout == f"hapx {hapx.__version__}\n"


def test_devices_lists_the_catalogue() -> None:
    from hapx.cluster.catalogue import CATALOGUE

    text = run("devices").stdout
    assert text.isascii()
    assert all(name in text for name in CATALOGUE)
    assert len(text.splitlines()) > 20


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda p: p.stem)
def test_check_says_what_a_cluster_file_means(path: Path) -> None:
    result = run("check", path)
    assert result.exit_code == 0
    assert path.stem in result.stdout


def test_check_names_the_mistake(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("machines: [{name: a, device: RTX-4091, devices: 1}]\nnetwork: {intra: {bandwidth: 1 GB/s, latency: 1 us}}\n")
    line = mistake("check", path)
    assert line.startswith(f"hapx: ClusterSpecError: {path}: machines[0].device: unknown device 'RTX-4091'")
    assert "did you mean" in line


def test_show(plan_file: Path) -> None:
    result = run("show", plan_file)
    assert result.exit_code == 0
    assert result.stdout.startswith("plan for by-hand: 4 devices, strategy auto")
    assert "{x:R}" not in result.stdout
    assert "{x:R}" in run("show", plan_file, "--program").stdout


def test_show_explains(plan_file: Path) -> None:
    overview = run("show", plan_file).stdout
    for heading in ("layer ", "predicted iteration: ", "communication, the most expensive of ", "memory\n"):
        assert heading in overview
    sections = {"--communication": "communication; bytes: ", "--phases": "phases: ", "--statistics": "search: ", "--why": "why: "}
    for option, heading in sections.items():
        found = run("show", plan_file, option)
        assert found.exit_code == 0 and not found.stderr  # no progress where there is no terminal
        assert found.stdout.strip().startswith(heading)
    everything = run("show", plan_file, "--all").stdout
    assert everything.startswith(overview)
    assert all(heading in everything for heading in sections.values())
    assert max(map(len, everything.splitlines())) <= 120


def test_simulate_writes_a_trace(plan_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    result = run("simulate", plan_file, "--trace", trace)
    assert result.exit_code == 0
    assert result.stdout.startswith("one iteration: ")
    assert {e["pid"] for e in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2, 3}


def test_compare(plan_file: Path) -> None:
    result = run("compare", plan_file, plan_file)
    assert result.exit_code == 0
    assert "speedup" in result.stdout


def test_files_that_are_not_there(plan_file: Path, tmp_path: Path) -> None:
    assert mistake("show", tmp_path / "plam.json").endswith("no such plan file; did you mean plan.json?")
    assert "there is no directory" in mistake("simulate", plan_file, "--trace", tmp_path / "none" / "t.json")
    assert "at least two plan files" in mistake("compare", plan_file)


def test_a_damaged_plan(plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text()[:-20])
    assert mistake("show", plan_file).startswith("hapx: PlanError: ")


def test_an_unknown_command_and_a_missing_option() -> None:
    result = run("shwo", "x")
    assert result.exit_code == 2
    assert "Did you mean 'show'?" in result.stderr
    result = run("plan", "a.py:build")
    assert result.exit_code == 2
    assert "--cluster" in result.stderr


FACTORIES = """
import torch
from torch import nn

def build():
    return nn.Linear(2, 2), (torch.zeros(4, 2),)

def mean():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
        def forward(self, x):
            return self.layer(x).square().mean()
    return Mean(), (torch.zeros(4096, 64),)

def broken():
    raise ValueError("no data here")

def nothing():
    return None

number = 3
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "some_models.py"
    path.write_text(FACTORIES)
    return path


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        (":biuld", "has no factory 'biuld'; did you mean build?"), (":q", "it has: build, mean, broken, nothing"), (":number", "is a int, not"),
        (":broken", "raised ValueError: no data here ("), (":nothing", "returned a NoneType; allowed: (torch.nn.Module, example inputs)"),
        ("", "is not a target; allowed: file.py:factory or module:factory"),
    ],
)  # fmt: skip
def test_targets_that_are_none(target: Path, suffix: str, expected: str) -> None:
    assert expected in mistake("plan", f"{target}{suffix}", "--cluster", SPECS / "a100x8.yaml")


def test_plan_prints_and_writes_a_plan(target: Path, tmp_path: Path) -> None:
    from hapx.plan import Plan

    out = tmp_path / "plan.json"
    result = run("plan", f"{target}:mean", "--cluster", SPECS / "rtx4090_rtx3060.yaml", "--strategy", "dp-proportional", "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("plan for rtx4090_rtx3060: 2 devices, strategy dp-proportional")
    assert result.stdout.endswith(f"written to {out}\n")
    plan = Plan.load(out)
    assert plan.shares[0] > plan.shares[1] > 0
    assert str(plan) in result.stdout


def test_remat_is_an_option_of_plan(target: Path) -> None:
    where = ("--cluster", SPECS / "rtx4090_rtx3060.yaml")
    assert run("plan", f"{target}:mean", *where, "--remat", "blocks", "--strategy", "dp-even").exit_code == 0
    assert "remat='all'; allowed: 'auto', 'none', 'blocks'" in mistake("plan", f"{target}:mean", *where, "--remat", "all")


def test_a_model_without_a_loss(target: Path) -> None:
    assert mistake("plan", f"{target}:build", "--cluster", SPECS / "a100x8.yaml").startswith("hapx: CaptureError: ")


def test_target_files_that_are_not_there_or_broken(target: Path) -> None:
    cluster = ("--cluster", SPECS / "a100x8.yaml")
    assert "did you mean some_models.py?" in mistake("plan", f"{target.parent / 'some_model.py'}:build", *cluster)
    assert "there is no module 'not_a_module'" in mistake("plan", "not_a_module:build", *cluster)
    target.write_text("def build(:\n")
    assert "cannot be imported: SyntaxError" in mistake("plan", f"{target}:build", *cluster)


def test_mistakes_in_options_are_told_before_the_model_is_loaded(target: Path, tmp_path: Path) -> None:
    target.write_text("raise SystemExit('the model was loaded')")
    assert "ClusterSpecError" in mistake("plan", f"{target}:build", "--cluster", tmp_path / "none.yaml")
    assert "did you mean dp-even?" in mistake("plan", f"{target}:build", "--cluster", SPECS / "a100x8.yaml", "--strategy", "dp-evn")
    assert "there is no directory" in mistake("plan", f"{target}:build", "--cluster", SPECS / "a100x8.yaml", "--out", tmp_path / "none" / "p.json")


def test_the_light_commands_do_not_load_torch() -> None:
    code = (
        "import sys; sys.argv = ['hapx', 'devices']\n"
        "import hapx, hapx.cli\n"
        "try: hapx.cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'scipy', 'numpy'} & set(sys.modules), 'heavy imports'"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "V100-SXM2-16GB" in result.stdout


def test_a_custom_operator_is_told_of_in_one_line_and_planned() -> None:
    target = f"{ROOT / 'tests' / 'support' / 'custom_model.py'}:build"
    command = [sys.executable, "-m", "hapx", "plan", target, "--cluster", str(SPECS / "rtx4090_rtx3060.yaml")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "hapx: hapx_tests.swish.default has no entry; by execution it has the rules S0 -> S0; S1 -> S1 (in model (custom_model.py:"
    )
    assert "predicted iteration" in result.stdout


def test_plans_of_several_stages(tmp_path: Path) -> None:
    path, trace = tmp_path / "stages.json", tmp_path / "t.json"
    gpt().save(path)
    shown = run("show", path).stdout
    assert shown.startswith(str(gpt()))
    assert "stage 1, device 1: 1 slow, layers blocks.1, norm, head" in shown
    assert "stage 0, device 0" in run("show", path, "--program").stdout
    assert "between stages, for each micro-batch" in run("show", path, "--communication").stdout
    assert run("simulate", path, "--trace", trace).stdout.startswith(f"one iteration: {gpt().iteration_time * 1e3:.3f} ms")
    assert "F3@1" in {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert "2 stages, 4x 1f1b" in run("compare", path, path).stdout
    assert f"planned again with {len(gpt().schedules[gpt().first].micro_batches)} micro-batches each" in run("whatif", path).stdout
