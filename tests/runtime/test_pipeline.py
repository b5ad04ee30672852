"""A pipeline as its user sees it, on one device's threads: `loss.backward()` in all its forms, results, state, norms, evaluation, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.collectives.messages import Messenger
from hapx.errors import LaunchError, PlanError
from hapx.plan import Plan
from hapx.runtime.pipeline import Pipeline
from support.equivalence import MAKING, run_ranks
from support.models import CNN, GPT, MLP
from support.random_stages import Job, at_blocks, random_stages, train_micro
from support.staged import pipeline_on, with_program

WIDTHS = (6, 8, 8, 3)
SPLIT = ((0, 1), (2,))


def example(model: Callable[[], Any], step: int) -> Sequence[Tensor]:
    found: Sequence[Tensor] = model().example(8, step)
    return found


def job(model: Callable[[], Any], number: int = 4, draws: bool = False) -> Job:
    return Job(model, partial(example, model), number, draws)


MLP_JOB, GPT_JOB = job(partial(MLP, WIDTHS)), job(partial(GPT, 11, 8, 2, 2, 4))


def on_all(plan: Plan, work: Job, use: Callable[[Pipeline], Any], **options: Any) -> list[Any]:
    """What `use` gives on every device."""

    def rank(threads: Any = None) -> Any:
        with MAKING:
            module = work.model()
        return use(pipeline_on(plan, module, threads, **options))

    return run_ranks(plan, rank)


def loss_of(pipeline: Pipeline, work: Job, step: int = 0) -> Tensor:
    plan = pipeline.plan
    graph = plan.graphs[plan.first]
    return pipeline.run(plan.first, dict(zip(graph.given, work.inputs(step), strict=True)))[graph.loss]


def alone(work: Job, use: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Gradients of one device."""
    module = work.model()
    use(module)
    return {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert set(found) == set(expected)
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


# ---- backward --------------------------------------------------------------------------------------------------------------


def accumulated(loss: Callable[[int], Tensor]) -> None:
    for step in range(3):
        loss(step).backward()


def together(loss: Callable[[int], Tensor]) -> None:
    (loss(0) + 0.5 * loss(1)).backward()


def scaled(loss: Callable[[int], Tensor]) -> None:
    (2 * loss(0)).backward()


def repeated(loss: Callable[[int], Tensor]) -> None:
    first = loss(0)
    first.backward(retain_graph=True)
    (3 * first).backward()


def forgotten(loss: Callable[[int], Tensor]) -> None:
    """A forward pass without backward, one without gradients, one that counts."""
    loss(0)
    with torch.no_grad():
        assert not loss(1).requires_grad
    loss(2).backward()


@pytest.mark.parametrize("use", [accumulated, together, scaled, repeated, forgotten])
@pytest.mark.parametrize("work, style", [(MLP_JOB, "1f1b"), (GPT_JOB, "gpipe")], ids=["mlp", "gpt"])
def test_backward_is_that_of_one_device(use: Callable[[Callable[[int], Tensor]], None], work: Job, style: str) -> None:
    plan = random_stages(work, SPLIT, style, 2, cuts=at_blocks(work, 2) if work is GPT_JOB else [3])

    def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
        use(lambda step: loss_of(pipeline, work, step))
        return pipeline.store.full_gradients()

    expected = alone(work, lambda module: use(lambda step: module(*work.inputs(step))))
    for found in on_all(plan, work, gradients):
        close(found, expected)


def test_gradients_are_handed_out_once() -> None:
    def twice(pipeline: Pipeline) -> bool:
        loss = loss_of(pipeline, MLP_JOB)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        return True

    assert all(on_all(random_stages(MLP_JOB, SPLIT, cuts=[2]), MLP_JOB, twice))


def test_the_schedule_begins_with_the_scale() -> None:
    """Gradients of inner stages are computed at the scale: in float16 nothing is lost on the way."""
    seen: list[float] = []
    work = MLP_JOB
    plan = random_stages(work, SPLIT, cuts=[2])

    def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
        seed_of = Pipeline.seed_with
        seed_of(pipeline, lambda: 1024.0)
        loss = loss_of(pipeline, work)
        held = [g for g in loss.grad_fn.gradients if g is not None]  # type: ignore[union-attr]
        seen.append(max(float(g.abs().max()) for g in held if g.numel()))
        (loss * 1024.0).backward()
        return pipeline.store.full_gradients()

    expected = alone(work, lambda module: (module(*work.inputs(0)) * 1024.0).backward())
    for found in on_all(plan, work, gradients):
        close(found, expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert max(seen) == pytest.approx(largest)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_counts_tied_parameters_once(norm_type: float) -> None:
    plan = random_stages(GPT_JOB, SPLIT, "1f1b", 4, cuts=at_blocks(GPT_JOB, 2), idle=1)
    assert [len(s.copies) for s in plan.storage if s.name == "tok.weight"] == [2]

    def clipped(pipeline: Pipeline) -> tuple[float, torch.dtype, dict[str, Tensor]]:
        loss_of(pipeline, GPT_JOB).backward()
        norm = pipeline.clip_grad_norm_(0.01, norm_type)
        return float(norm), norm.dtype, pipeline.store.full_gradients()

    module = GPT_JOB.model()
    module(*GPT_JOB.inputs(0)).backward()
    expected = float(nn.utils.clip_grad_norm_(module.parameters(), 0.01, norm_type))
    wanted = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}
    for norm, dtype, found in on_all(plan, GPT_JOB, clipped):
        assert norm == pytest.approx(expected, rel=1e-9) and dtype == torch.float64
        close(found, wanted, 1e-8)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_pass_over_what_is_elsewhere(foreach: bool) -> None:
    """Parameters of other stages are empty and have no gradient."""
    plan = random_stages(MLP_JOB, SPLIT, cuts=[3], idle=1)

    def trained(pipeline: Pipeline) -> tuple[dict[str, Tensor], list[int]]:
        optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=0.01, weight_decay=0.1, foreach=foreach)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(pipeline, MLP_JOB, step).backward()
            optimizer.step()
        return pipeline.store.full_state_dict(), [p.numel() for p in pipeline.module.parameters()]

    expected = train_micro(MLP_JOB, 2, "adamw").state
    found = on_all(plan, MLP_JOB, trained)
    for state, _ in found:
        close(state, dict(expected))
    assert set(found[3][1]) == {0}, "an idle device keeps nothing"
    assert 0 in found[0][1] and 0 in found[2][1]


class Frozen(MLP):
    """The first layer is not trained, and nobody uses `spare`."""

    def __init__(self) -> None:
        super().__init__(WIDTHS)
        self.layers[0].requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_frozen_and_unused_parameters(cut: int) -> None:
    work = job(Frozen)
    plan = random_stages(work, SPLIT, cuts=[cut], idle=1)

    def trained(pipeline: Pipeline) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        loss_of(pipeline, work).backward()
        return pipeline.store.full_gradients(), pipeline.store.full_state_dict()

    expected = alone(work, lambda module: module(*work.inputs(0)).backward())
    for gradients, state in on_all(plan, work, trained):
        close(gradients, expected)
        close(state, dict(work.model().state_dict()))


def test_whole_state_loads_into_the_pieces_of_stages() -> None:
    wanted = GPT(11, 8, 2, 2, 4, seed=9).state_dict()
    plan = random_stages(GPT_JOB, SPLIT, cuts=at_blocks(GPT_JOB, 2), idle=1)

    def loaded(pipeline: Pipeline) -> dict[str, Tensor]:
        pipeline.store.load_full_state_dict(wanted)
        pieces = pipeline.module.state_dict()
        pipeline.module.load_state_dict({n: t.clone() for n, t in pieces.items()})
        return pipeline.store.full_state_dict()

    for state in on_all(plan, GPT_JOB, loaded):
        close(state, wanted)


def test_copies_of_several_stages_are_made_equal_again() -> None:
    plan = random_stages(GPT_JOB, SPLIT, seed=4, cuts=at_blocks(GPT_JOB, 2))

    def aligned(pipeline: Pipeline) -> dict[str, Tensor]:
        with torch.no_grad():
            for parameter in pipeline.module.parameters():
                parameter.add_(pipeline.rank)
        pipeline.align(pipeline.plan.first)
        return {n: p.detach().clone() for n, p in pipeline.module.named_parameters()}

    states = on_all(plan, GPT_JOB, aligned)
    name, start = "tok.weight", GPT_JOB.model().get_parameter("tok.weight")
    copies = next(s.copies for s in plan.storage if s.name == name)
    assert {plan.stages[c.stage].devices for c in copies} == set(SPLIT)
    first = [p for p in copies if p.stage == 0][0].placement
    if not any(hasattr(s, "cut") for s in first.states):  # device 0 decides everything
        assert torch.equal(states[2][name], start.detach()) and torch.equal(states[1][name], start.detach())
    else:
        assert not torch.equal(states[2][name], start.detach() + 2)


# ---- what a call gives -----------------------------------------------------------------------------------------------------


class Told(MLP):
    """Returns the loss with per-sample scores, hidden features, the number of large ones, and a table."""

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        h = F.gelu(self.layers[0](x))
        made = self.layers[2](F.gelu(self.layers[1](h)))
        return {"loss": F.mse_loss(made, targets), "scores": made.softmax(-1), "hidden": h, "large": (h > 0.1).sum(), "shift": h.T}


def told(pipeline: Pipeline, work: Job, gather: bool) -> dict[str, Tensor]:
    plan = pipeline.plan
    graph = plan.graphs[plan.first]
    outputs = pipeline.run(plan.first, dict(zip(graph.given, work.inputs(0), strict=True)))
    named = {str(o.target): o.tensor for o in graph.outputs if o.role == "result"}
    return {place: pipeline.gathered(plan.first, n, outputs[n]) if gather else outputs[n] for place, n in named.items()}


@pytest.mark.parametrize("seed", range(4))
def test_results_are_put_together(seed: int) -> None:
    work = job(partial(Told, WIDTHS))
    plan = random_stages(work, ((0, 1), (2, 3)), seed=seed, cuts=[4], idle=1)
    expected = work.model()(*work.inputs(0))
    for found in on_all(plan, work, lambda pipeline: told(pipeline, work, gather=True)):
        assert len(found) == 4
        for place, value in found.items():
            torch.testing.assert_close(value, expected[place.strip("[]'.")].detach(), msg=lambda m, place=place: f"{place}: {m}")


def test_results_of_other_stages_are_empty() -> None:
    work = job(partial(Told, WIDTHS))
    plan = random_stages(work, ((0,), (1,)), cuts=[4], idle=1)
    rows = [{p.strip("[]'."): tuple(t.shape) for p, t in f.items()} for f in on_all(plan, work, lambda pipeline: told(pipeline, work, gather=False))]
    assert rows[0]["hidden"] == (8, 8) and rows[0]["scores"] == (0, 3)
    assert rows[1]["hidden"] == (0, 8) and rows[1]["scores"] == (8, 3)
    assert rows[2]["hidden"] == (0, 8) and rows[2]["scores"] == (0, 3)


def with_evaluation(plan: Plan, work: Job, batch: int) -> Plan:
    """The plan with an evaluation program for some batch."""
    with MAKING:
        module = work.model().eval()
    inputs = tuple(t[:batch] for t in work.inputs(0))
    return with_program(plan, module, inputs, training=False)


def test_evaluation_leaves_training_as_it_was() -> None:
    """Other numbers of micro-batches, no dropout, running statistics, and the same random numbers in training afterwards."""
    work = job(partial(GPT, 11, 8, 2, 2, 4, 0.3), 4, draws=True)
    plan = with_evaluation(random_stages(work, SPLIT, cuts=at_blocks(work, 2)), work, 6)
    key = [k for k in plan.graphs if k.mode == "eval"][0]
    assert len(plan.schedules[key].micro_batches) == 3

    def losses(pipeline: Pipeline) -> list[float]:
        found = [float(loss_of(pipeline, work, 0).detach())]
        inputs = {n: t[:6] for n, t in zip(plan.graphs[key].given, work.inputs(0), strict=True)}
        with torch.no_grad():
            found.append(float(pipeline.run(key, inputs)[plan.graphs[key].loss]))
        return [*found, float(loss_of(pipeline, work, 1).detach())]

    def without_evaluation(pipeline: Pipeline) -> list[float]:
        return [float(loss_of(pipeline, work, step).detach()) for step in range(2)]

    wanted = float(work.model().eval()(*(t[:6] for t in work.inputs(0))).detach())
    one = train_micro(work, 1, "sgd").losses[0]
    expected = on_all(plan, work, without_evaluation)[0]
    for first, evaluated, second in on_all(plan, work, losses):
        assert first == pytest.approx(one) and evaluated == pytest.approx(wanted)
        assert [first, second] == expected


# ---- what is refused -------------------------------------------------------------------------------------------------------


def test_other_shapes_are_refused_before_anything_is_sent() -> None:
    plan = random_stages(MLP_JOB, SPLIT, cuts=[3])
    graph, (x, y) = plan.graphs[plan.first], MLP_JOB.inputs(0)

    def refused(pipeline: Pipeline) -> list[str]:
        found = []
        for inputs in [(x[:4], y), (x[:, :5], y), (x.float(), y)]:
            with pytest.raises(LaunchError) as error:
                pipeline.run(plan.first, dict(zip(graph.given, inputs, strict=True)))
            found.append(str(error.value))
        assert not pipeline.started
        return found

    for first, second, third in on_all(plan, MLP_JOB, refused):
        assert "x is float64[4, 6]; allowed: float64[8, 6], 4 micro-batches of 2" in first
        assert "x is float64[8, 5]" in second and "x is float32[8, 6]" in third


def test_backward_of_an_evaluation_is_refused() -> None:
    """Gradients are enabled, as on one device; only backward is missing."""
    plan = with_evaluation(random_stages(MLP_JOB, SPLIT, cuts=[3]), MLP_JOB, 8)
    key = [k for k in plan.graphs if k.mode == "eval"][0]

    def evaluated(pipeline: Pipeline) -> tuple[bool, float]:
        loss = pipeline.run(key, dict(zip(plan.graphs[key].given, MLP_JOB.inputs(0), strict=True)))[plan.graphs[key].loss]
        with pytest.raises(
            LaunchError, match=r"backward: a pipeline runs no backward passes in evaluation mode; call model\.train\(\) before forward"
        ):
            loss.backward()
        return loss.requires_grad, float(loss.detach())

    wanted = float(MLP_JOB.model().eval()(*MLP_JOB.inputs(0)).detach())
    assert on_all(plan, MLP_JOB, evaluated) == [(True, pytest.approx(wanted))] * 3


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(PlanError, match="the batch is empty; allowed: in a pipeline, batches of at least one sample"):
        with_evaluation(random_stages(MLP_JOB, SPLIT, cuts=[3]), MLP_JOB, 0)


def test_local_shares_are_refused() -> None:
    plan = random_stages(MLP_JOB, SPLIT, cuts=[3])

    def refused(pipeline: Pipeline) -> bool:
        with pytest.raises(LaunchError, match="a pipeline takes whole batches"):
            pipeline.run(plan.first, {}, {"x": plan.stages[0].programs[plan.first].gives[0].placement})
        return True

    assert all(on_all(plan, MLP_JOB, refused))


def test_a_buffer_that_stages_share_and_one_writes_is_refused() -> None:
    work = job(CNN)
    plan = random_stages(work, ((0,), (1,)), cuts=[4])
    stored = next(s for s in plan.storage if s.name == "bn1.running_mean")
    copies = (stored.copies[0], replace(stored.copies[0], stage=1 - stored.copies[0].stage))
    broken = replace(plan, storage=tuple(replace(s, copies=copies) if s is stored else s for s in plan.storage))
    with pytest.raises(PlanError, match=r"buffer bn1.running_mean is written, and stages on different devices use it"):
        on_all(broken, work, lambda pipeline: None)


def test_an_error_on_one_device_ends_all() -> None:
    plan = random_stages(MLP_JOB, ((0,), (1,), (2,)), cuts=[2, 4])

    def step(pipeline: Pipeline) -> None:
        if pipeline.rank == 1:
            for program in pipeline.programs(plan.first):
                program.module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("a bug")))
        loss_of(pipeline, MLP_JOB)

    with pytest.raises(ValueError, match="a bug"):
        on_all(plan, MLP_JOB, step)


# ---- memory, text ------------------------------------------------------------------------------------------------------------


class Counting:
    """A messenger that knows how many messages it has sent whose handles nobody has waited for."""

    def __init__(self, inner: Messenger):
        self.inner, self.rank, self.open, self.most, self.sent = inner, inner.rank, 0, 0, 0

    def isend(self, t: Tensor, device: int, channel: int = 0) -> Any:
        self.open, self.sent = self.open + 1, self.sent + 1
        self.most = max(self.most, self.open)
        handle, counting = self.inner.isend(t, device, channel), self

        class Counted:
            def wait(self) -> Tensor:
                counting.open -= 1
                return handle.wait()

        return Counted()

    def irecv(self, buffer: Tensor, device: int, channel: int = 0) -> Any:
        return self.inner.irecv(buffer, device, channel)

    def over_hosts(self) -> AbstractContextManager[None]:
        return self.inner.over_hosts()


@pytest.mark.parametrize("style, most", [("1f1b", 3), ("1f1b-warm:1", 4), ("gpipe", 8)])
def test_what_was_sent_is_given_back_as_the_schedule_goes_on(style: str, most: int) -> None:
    work = job(partial(MLP, WIDTHS), 8)
    plan = random_stages(work, ((0,), (1,)), style, cuts=[3])

    def counted(pipeline: Pipeline) -> tuple[int, int, int]:
        made: list[Counting] = []

        def counting(inner: Messenger) -> Counting:
            made.append(Counting(inner))
            return made[0]

        pipeline.wrap(lambda c: c, counting)
        loss_of(pipeline, work).backward()
        return made[0].sent, made[0].most, made[0].open

    for sent, highest, left in on_all(plan, work, counted):
        assert sent == 8 and left == 0
        assert highest <= most


class Noting(Counting):
    """A messenger that knows how many messages it has sent over the hosts."""

    def __init__(self, inner: Messenger):
        super().__init__(inner)
        self.inside = False
        self.over = 0

    def isend(self, t: Tensor, device: int, channel: int = 0) -> Any:
        self.over += self.inside
        return super().isend(t, device, channel)

    @contextmanager
    def over_hosts(self) -> Iterator[None]:
        assert not self.open, "something is under way"
        self.inside = True
        yield
        self.inside = False


def noted(uses: Sequence[Callable[[Pipeline], Any]], pipeline: Pipeline) -> list[tuple[int, int]]:
    """Per use, how many messages this device has sent, and how many of them over the hosts."""
    made: list[Noting] = []

    def noting(inner: Messenger) -> Noting:
        made.append(Noting(inner))
        return made[0]

    pipeline.wrap(lambda c: c, noting)
    totals = [(0, 0)]
    for use in uses:
        use(pipeline)
        totals.append((made[0].sent, made[0].over))
    return [(sent - before, over - then) for (before, then), (sent, over) in pairwise(totals)]


def test_what_runs_for_the_first_time_sends_over_the_hosts() -> None:
    """On GPUs a new kernel waits until nothing runs, messages to devices that have not come yet among it: two devices could wait for ever."""
    plan = random_stages(MLP_JOB, ((0,), (1,)), "1f1b", cuts=[3])

    def ahead(pipeline: Pipeline) -> None:
        with torch.no_grad():
            loss_of(pipeline, MLP_JOB)

    def both(pipeline: Pipeline) -> None:
        loss_of(pipeline, MLP_JOB).backward()

    first, last = on_all(plan, MLP_JOB, partial(noted, [ahead, both, both, ahead]))
    assert first == [(4, 4), (4, 4), (4, 0), (4, 0)]
    assert last == [(0, 0), (4, 4), (4, 0), (0, 0)]


def test_the_first_alignment_sends_over_the_hosts() -> None:
    plan = random_stages(GPT_JOB, ((0,), (1,)), "1f1b", cuts=at_blocks(GPT_JOB, 2))
    align: Callable[[Pipeline], None] = lambda pipeline: pipeline.align(plan.first)  # noqa: E731
    assert on_all(plan, GPT_JOB, partial(noted, [align, align])) == [[(1, 1), (1, 0)], [(0, 0), (0, 0)]]


def test_code_of_all_stages_of_a_device() -> None:
    plan = random_stages(MLP_JOB, ((0, 1), (2,), (0, 1)), "gpipe", cuts=[2, 4], idle=1)
    texts = on_all(plan, MLP_JOB, lambda pipeline: pipeline.code(plan.first))
    assert [line for line in texts[0].splitlines() if line.startswith("# stage")] == ["# stage 0 of 3", "# stage 2 of 3"]
    assert texts[2].startswith("# stage 1 of 3") and texts[2].count("def forward") == 1
    assert texts[3] == "# this device has no part in any stage\n"
    assert on_all(plan, MLP_JOB, lambda pipeline: sum(pipeline.batch_sizes(plan.first))) == [8] * 4
