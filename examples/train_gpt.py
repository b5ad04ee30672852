"""Trains a character-level GPT on the source of the Python standard library, on devices that differ.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=4 examples/train_gpt.py          (or: make demo)

First the ranks are slowed on purpose, to speeds of 4:4:1:1, and an even split, a split in proportion to speed and the plan of hapx are
timed. Then the model is trained with all ranks at full speed. On GPUs the same script runs with NCCL, one GPU per rank; nothing is slowed there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import hapx
from hapx.profile.calibrate import calibrate
from hapx.profile.throttle import Throttle, attach, slowed
from hapx.report.table import plan_table

sys.path.insert(0, str(Path(__file__).parent))
from models.gpt import GPT
from text import Text, standard_library

SLOWED = (0.48, 0.48, 0.12, 0.12)  # shares of a core: 4:4:1:1, 1.2 cores in all
BATCH, CONTEXT = 64, 64
WIDTH, HEADS, LAYERS = 192, 6, 3
LEARNING_RATE, WARMUP, MAX_NORM = 3e-3, 15, 1.0
BEGAN = time.perf_counter()
STRATEGIES = {"even": "dp-even", "proportional": "dp-proportional", "hapx": "auto"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cluster", default=str(Path(__file__).parents[1] / "cluster_specs" / "laptop-4.yaml"), help="cluster file with one device per rank"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps at full speed")
    parser.add_argument("--timed", type=int, default=20, help="timed steps of each of the three plans")
    parser.add_argument("--out", default="runs/demo", help="directory for plans, curve, text and numbers")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = start()
    rank = dist.get_rank()
    say = print_line if rank == 0 else silent
    cluster = hapx.ClusterSpec.load(args.cluster)
    text = standard_library()
    out = Path(args.out)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)

    speeds = SLOWED if device.type == "cpu" and cluster.num_devices == len(SLOWED) else (1.0,) * cluster.num_devices
    throttle = Throttle(speeds[rank])
    parameters = sum(p.numel() for p in model_of(text).parameters())
    say(f"text     {text.source}/*.py: {len(text.train) + len(text.validation):,} characters, {len(text.symbols)} symbols")
    say(f"model    GPT, {LAYERS} layers of width {WIDTH}, {parameters / 1e6:.2f} M parameters; {BATCH} x {CONTEXT} characters a step")

    heading(say, "1  calibrate")
    full = calibrate(cluster, device=device)
    say(f"at full speed   {rates(full)}")
    slow = full
    if min(speeds) < 1:
        slow = slowed(calibrate(cluster, device=device, clock=time.thread_time), speeds)
        say(f"slowed          {rates(slow)}   (for the comparison below: {':'.join(f'{s / min(speeds):g}' for s in speeds)})")
    say(f"link            {full.machines[0].intra}")

    heading(say, "2  plan")
    models = {}
    for name, strategy in STRATEGIES.items():
        torch.manual_seed(0)
        models[name] = hapx.HAP(model_of(text), slow, text.batch(BATCH, CONTEXT, generator(0)), strategy=strategy)
    say(plan_table(models["hapx"].plan, models["even"].plan))
    if rank == 0:
        for name, model in models.items():
            model.plan.save(out / f"plan-{name}.json")

    heading(say, "3  compare")
    if min(speeds) < 1:
        say("The four ranks are now slowed on purpose, each sleeping off its share: speeds 4:4:1:1. The same steps with three plans:")
        for model in models.values():
            attach(throttle, model)
    others = Others()
    measured = compare(models, text, args.timed, throttle, device)
    disturbed = others.cores()
    numbers = comparison(say, {name: m.plan for name, m in models.items()}, measured)
    if min(speeds) < 1 and disturbed is not None:
        say(f"meanwhile others used {disturbed:.2f} cores of this machine" + (": too much for times to be trusted" if disturbed > 0.15 else ""))
    del models

    heading(say, "4  train")
    say(f"All ranks at full speed, planned again for {rates(full)}:")
    torch.manual_seed(0)
    model = hapx.HAP(model_of(text), full, text.batch(BATCH, CONTEXT, generator(0)))
    say(f"batch {':'.join(map(str, model.batch_sizes))}, predicted {model.plan.iteration_time * 1e3:.0f} ms a step")
    losses, rate = train(model, text, args.steps, device, rank)
    validation = validate(model, text, device)

    heading(say, "5  result")
    state = model.full_state_dict()
    if rank == 0:
        say(f"validation loss  {validation:.3f} nats, {text.entropy - validation:.3f} below the text's unigram entropy of {text.entropy:.3f}")
        numbers |= {"validation_loss": validation, "unigram_entropy": text.entropy, "tokens_per_second": rate, "losses": losses}
        report(out, text, state, losses, numbers)
        say(f"total time       {time.perf_counter() - BEGAN:.0f} s")
    dist.barrier()
    dist.destroy_process_group()


# ---- the processes -----------------------------------------------------------------------------------------------------


def start() -> torch.device:
    """Joins the ranks; one thread each on CPUs, one GPU each where there are GPUs."""
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        sys.exit("start it with a launcher: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=4 examples/train_gpt.py")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def stop(number: int, _: Any) -> NoReturn:
    """Ctrl-C, or the launcher ends this rank: at once and quietly, wherever it waits."""
    if os.environ["RANK"] == "0" and number == signal.SIGINT:
        os.write(1, b"\ninterrupted\n")
    os._exit(130)


def print_line(line: str = "") -> None:
    print(line, flush=True)


def silent(line: str = "") -> None:
    """What the other ranks say."""


def heading(say: Callable[[str], None], title: str) -> None:
    say(f"\n-- {title} {'-' * (70 - len(title))} {time.perf_counter() - BEGAN:.0f} s")


# ---- the model and its data --------------------------------------------------------------------------------------------


def model_of(text: Text) -> GPT:
    return GPT(len(text.symbols), WIDTH, HEADS, LAYERS, CONTEXT)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rates(cluster: hapx.ClusterSpec) -> str:
    """Measured speed of each device."""
    return ", ".join(f"{cluster.type_of(d.index).speed('float32') / 1e9:.3g}" for d in cluster.devices) + " GFLOP/s"


def optimizer_of(model: hapx.HAP) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def step(model: hapx.HAP, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    loss = model(*batch)
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    return loss.detach()


# ---- the comparison ------------------------------------------------------------------------------------------------------


@dataclass
class Timed:
    """Seconds of each step, and the losses."""

    seconds: list[float]
    losses: list[float]


def compare(models: dict[str, hapx.HAP], text: Text, steps: int, throttle: Throttle, device: torch.device) -> dict[str, Timed]:
    """The same steps with every plan, in turns of five so that whatever else the machine does meets all of them; two steps to warm up."""
    result = {name: Timed([], []) for name in models}
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    batches = {name: generator(1) for name in models}
    for first in (-2, *range(0, steps, 5)):
        for name, model in models.items():
            for k in range(first, 0 if first < 0 else min(first + 5, steps)):
                batch = [t.to(device) for t in text.batch(BATCH, CONTEXT, batches[name])]
                dist.barrier()
                throttle.restart()
                began = time.perf_counter()
                loss = step(model, optimizers[name], batch)
                finish(throttle, device)
                if k >= 0:
                    result[name].seconds.append(time.perf_counter() - began)
                    result[name].losses.append(float(loss))
    return result


class Others:
    """Cores that other processes (or other virtual machines) take from this one, from its construction on; Linux only. Call it on all ranks."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = time.perf_counter(), self._busy(), time.process_time()

    @staticmethod
    def _busy() -> float | None:
        """CPU seconds of the machine that were not idle."""
        try:
            ticks = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    def cores(self) -> float | None:
        own: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(own, time.process_time() - self.own)
        busy = self._busy()
        if self.busy is None or busy is None:
            return None
        return max((busy - self.busy - sum(own)) / (time.perf_counter() - self.began), 0.0)


def finish(throttle: Throttle, device: torch.device) -> None:
    """The end of a step: everything is computed and paid for, on every rank."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    throttle.pay()
    dist.barrier()


def comparison(say: Callable[[str], None], plans: dict[str, hapx.Plan], measured: dict[str, Timed]) -> dict[str, Any]:
    """Prints predicted and measured times; returns the numbers."""
    numbers = {name: {"predicted": plan.iteration_time, "measured": median(measured[name].seconds)} for name, plan in plans.items()}
    even = numbers["even"]
    say(f"\n{'plan':<14}{'predicted':>12}{'measured':>12}{'predicted gain':>17}{'measured gain':>16}   shares")
    for name, n in numbers.items():
        gains = [even[k] / n[k] for k in ("predicted", "measured")]
        shares = ":".join(f"{s * 100:.0f}" for s in plans[name].shares)
        say(f"{name:<14}{n['predicted'] * 1e3:>9.0f} ms{n['measured'] * 1e3:>9.0f} ms{gains[0]:>16.2f}x{gains[1]:>15.2f}x   {shares}")
    apart = max(abs(a - b) for m in measured.values() for a, b in zip(m.losses, measured["even"].losses, strict=True))
    say(f"\nmedians of {len(measured['even'].seconds)} steps; the losses of the three differ by at most {apart:.1e}")
    hap, proportional = numbers["hapx"]["measured"], numbers["proportional"]["measured"]
    say(f"hapx is {even['measured'] / hap:.2f}x as fast as an even split and {proportional / hap:.2f}x as fast as a proportional one")
    return {"comparison": numbers}


# ---- training ------------------------------------------------------------------------------------------------------------


def train(model: hapx.HAP, text: Text, steps: int, device: torch.device, rank: int) -> tuple[list[float], float]:
    """The losses of all steps, and tokens per second."""
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * k / steps)))
    batches = generator(2)
    losses: list[float] = []
    began = time.perf_counter()
    with progress(steps, rank) as advance:
        for _ in range(steps):
            losses.append(float(step(model, optimizer, [t.to(device) for t in text.batch(BATCH, CONTEXT, batches)])))
            schedule.step()
            advance(losses[-1], len(losses) * BATCH * CONTEXT / (time.perf_counter() - began))
    return losses, steps * BATCH * CONTEXT / (time.perf_counter() - began)


@contextmanager
def progress(steps: int, rank: int) -> Iterator[Callable[[float, float], None]]:
    """A progress bar on rank 0: call it with loss and tokens per second after each step. Lines where the output is not a terminal."""
    if rank:
        yield lambda loss, rate: None
        return
    if not sys.stdout.isatty():
        count = iter(range(1, steps + 1))

        def lines(loss: float, rate: float) -> None:
            if (k := next(count)) % 25 == 0 or k == steps:
                print_line(f"step {k:>4}/{steps}  loss {loss:.3f}  {rate:,.0f} tokens/s")

        yield lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("train", total=steps, loss=float("nan"), rate=0.0)
        yield lambda loss, rate: bar.update(task, advance=1, loss=loss, rate=rate)


@torch.no_grad()
def validate(model: hapx.HAP, text: Text, device: torch.device, batches: int = 20) -> float:
    """Mean loss on text that was held out."""
    model.eval()
    pieces = generator(3)
    losses = [float(model(*(t.to(device) for t in text.batch(BATCH, CONTEXT, pieces, validation=True)))) for _ in range(batches)]
    model.train()
    return sum(losses) / len(losses)


# ---- what is left behind -------------------------------------------------------------------------------------------------


def report(out: Path, text: Text, state: dict[str, torch.Tensor], losses: Sequence[float], numbers: dict[str, Any]) -> None:
    """On rank 0: a sample, the curve and the numbers, as files and on the screen."""
    model = model_of(text)
    model.load_state_dict({name: t.cpu() for name, t in state.items()})
    sample = generate(model, text, "def ", 400)
    print_line("\n" + "\n".join("    " + line for line in sample.splitlines()) + "\n")
    (out / "sample.txt").write_text(sample, encoding="utf-8")
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    torch.save(model.state_dict(), out / "model.pt")
    draw(out / "loss.png", losses, numbers)
    for path in sorted(out.iterdir()):
        print_line(f"written          {path}")


@torch.no_grad()
def generate(model: GPT, text: Text, prompt: str, length: int) -> str:
    """Text in the model's manner, from the trained weights in an ordinary single-device model."""
    model.eval()
    chance, symbols = generator(4), text.encode(prompt)
    for _ in range(length):
        logits = model.logits(torch.tensor([symbols[-CONTEXT:]]))[0, -1] / 0.8
        logits[0] = -math.inf  # not a character
        symbols.append(int(torch.multinomial(torch.softmax(logits, 0), 1, generator=chance)))
    return text.decode(symbols)


def draw(path: Path, losses: Sequence[float], numbers: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    axes.plot(range(1, len(losses) + 1), losses, label="training loss")
    axes.axhline(numbers["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy of the text")
    axes.plot([len(losses)], [numbers["validation_loss"]], "o", label="validation loss")
    axes.set(xlabel="step", ylabel="nats per character", title="Character-level GPT, trained by hapx")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    try:
        main()
    except hapx.HapError as error:  # every rank has it; one says it
        if os.environ["RANK"] == "0":
            print_line(f"{type(error).__name__}: {error}")
        os._exit(1)
