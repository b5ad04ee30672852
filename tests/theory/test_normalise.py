"""Losses of micro-batches sum up to that of the whole batch, with its gradients: every kind of mean, and what cannot be exact is named.

The oracle is the module on the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx import codec
from hapx.errors import PlanError
from hapx.graph.capture import capture
from hapx.graph.segments import graph_hash
from hapx.ir import Graph, Region
from hapx.runtime.micro_batches import cut_batch
from hapx.theory.grains import find_grains
from hapx.theory.normalise import MixedSamplesWarning, batch_inputs, normalised, warn_of_mixing
from support.cases import CASES
from support.losses import MODELS, Seeded, noise, numbers
from support.micro import Outcome, assert_exact, assert_same, at_once, gradients, graph_of_parts, in_parts
from support.models import GPT, _initialise
from support.zoo import TINY, Balanced, masked_text

BATCH = 12
IGNORED = -1
SAMPLES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Sequence[Tensor]]]] = {
    **{n: (c.model, lambda batch, c=c: c.model().example(batch, seed=3)) for n, c in CASES.items() if not c.random and n not in ("cnn", "resnet")},
    **{name: (tiny.model, lambda batch, tiny=tiny: tiny.inputs(batch, 3)) for name, tiny in TINY.items()},
    **{name: (MODELS[name], lambda batch, name=name: MODELS[name]().example(batch, 3)) for name in ("recommender", "weighted", "indexed")},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_micro_batches_sum_up_to_the_whole_batch(name: str) -> None:
    model, example = SAMPLES[name]
    assert_exact(model, example(BATCH), 2, 3, 4)


@pytest.mark.parametrize("name", ["gpt", "vision", "unet", "vit", "bert_moe", "llama", "weighted", "indexed"])
def test_micro_batches_of_one_sample(name: str) -> None:
    model, example = SAMPLES[name]
    assert_exact(model, example(5), 5)


def test_one_micro_batch_is_the_graph_itself() -> None:
    model, example = SAMPLES["weighted"]
    whole = capture(model(), tuple(example(4)))
    graph = normalised(whole, whole)
    assert graph.nodes == whole.nodes and graph.micro_batches is not None and graph.micro_batches.number == 1
    assert_same(in_parts(graph, model, example(4)), at_once(model, example(4)))


# ---- targets that are ignored -------------------------------------------------------------------------------------------------


class Masked(GPT):
    """A language model with ignored targets."""

    def __init__(self, dtype: torch.dtype = torch.float64, **options: object):
        super().__init__(11, 12, 3, 1, 4, dtype=dtype)
        self.options = options
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 11, dtype=dtype))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        weights = self.weights if self.options.get("weights") else None
        smoothing = float(self.options.get("smoothing", 0.0))  # type: ignore[arg-type]
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten(), weights, ignore_index=IGNORED, label_smoothing=smoothing)


def with_ignored(batch: int) -> tuple[Tensor, Tensor]:
    """No target in the first third of the batch, some in the others."""
    idx, targets = GPT(11, 12, 3, 1, 4).example(batch, 5)
    targets = targets.masked_fill(noise(1, *targets.shape) > 0.5, IGNORED)
    targets[: batch // 3] = IGNORED
    return idx, targets


@pytest.mark.parametrize("options", [{}, {"weights": True}, {"smoothing": 0.1}, {"weights": True, "smoothing": 0.2}], ids=str)
def test_a_micro_batch_without_targets_adds_nothing(options: dict[str, object]) -> None:
    graph = assert_exact(lambda: Masked(**options), with_ignored(6), 3)
    assert graph.micro_batches is not None and graph.micro_batches.counts is not None
    assert graph.input_names == ("idx", "targets", "cross_entropy_loss_count")
    alone = Masked(**options)(*cut_batch(with_ignored(6), 3)[0])
    assert bool(alone.isnan()), "the first micro-batch has a mean over nothing"


def test_a_mean_of_the_losses_is_found() -> None:
    """The oracle sees what is wrong without counts."""
    inputs, module = with_ignored(6), Masked()
    sum(module(*part) for part in cut_batch(inputs, 3)[1:]).div(2).backward()  # type: ignore[union-attr]
    expected = at_once(Masked, inputs)
    with pytest.raises(AssertionError, match="gradient"):
        assert_same(Outcome(expected.loss, gradients(module), {}), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_and_counts_do_not_overflow_half_precision(dtype: torch.dtype) -> None:
    class Scaled(nn.Module):
        def __init__(self, dtype: torch.dtype = dtype) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(x.to(self.scale.dtype) * self.scale, targets, ignore_index=IGNORED)

    x = 40 * noise(0, 6000, 4).to(dtype)  # the losses of 3000 rows sum up to 150000, more than float16 has
    inputs = x, numbers(1, 5, 6000) - 1
    found, expected = in_parts(graph_of_parts(Scaled, inputs, 2), Scaled, inputs), at_once(lambda: Scaled(torch.float64), inputs)
    assert found.loss.dtype == dtype
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-2, atol=0)
    torch.testing.assert_close(found.gradients["scale"].double(), expected.gradients["scale"], rtol=3e-2, atol=0)


# ---- terms, numbers, results --------------------------------------------------------------------------------------------------


class Terms(Seeded):
    """Losses with and without means, over different counts; numbers that depend on the batch; a penalty on parameters; results of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 4), nn.Linear(5, 4)
        self.finish()

    def forward(self, x: Tensor, label: Tensor, mask: Tensor, table: Tensor) -> dict[str, Tensor]:
        a, b = self.one(x) + table.sum(), self.two(x)
        flags = F.one_hot(label.clamp(min=0), 4).to(a.dtype)
        start = torch.zeros(x.shape[0], 4, dtype=a.dtype)
        cross = F.cross_entropy(a, label, ignore_index=IGNORED)
        terms = [
            cross,
            F.cross_entropy(b, a.softmax(-1)),  # probabilities as targets: the count is the number of samples
            F.mse_loss(a, b, reduction="sum") * 0.1,
            F.multi_margin_loss(b, label.clamp(min=0), reduction="sum") * 0.1,
            (start + a).square().sum() / x.shape[0],
            b.mean(dim=(0, 1)) + a.mean(0).sum() + a.std(1).mean(),
            F.binary_cross_entropy_with_logits(b, flags, weight=mask.to(a.dtype), pos_weight=torch.full((4,), 2.0, dtype=a.dtype)),
            F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
            (F.smooth_l1_loss(a, b, reduction="none") * mask).sum() / mask.sum(),
            (b.square() * mask).sum() / mask.sum().clamp(min=1) / mask.to(a.dtype).mean().sqrt(),
            0.01 * sum(p.square().sum() for p in self.parameters()),
        ]
        correct = (a.argmax(-1) == label).sum()
        loss = torch.stack(terms).sum()
        return {"loss": loss, "scores": a.transpose(0, 1), "cross": cross.detach(), "correct": correct, "table": table * 2, "counted": mask.sum()}

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        mask = noise(seed + 2, batch, 4) > 0
        mask[: batch // 2] = False
        return noise(seed, batch, 5), numbers(seed + 1, 5, batch) - 1, mask, noise(seed + 3, 3)


def test_terms_are_exact_and_results_are_joined() -> None:
    inputs = Terms().example(BATCH, 0)
    graph = assert_exact(Terms, inputs, 2, 3, 12, 4)
    assert graph.micro_batches is not None and graph.micro_batches.cut == ("x", "label", "mask")
    found, expected = in_parts(graph, Terms, inputs), at_once(Terms, inputs)
    assert set(found.results) == {"scores", "cross", "correct", "table", "counted"} == set(expected.results)


def test_rows_in_blocks_are_joined_block_by_block() -> None:
    class Blocks(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.finish()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"loss": y.square().mean(), "both": torch.cat([y, 2 * y])}

    assert_exact(Blocks, (noise(0, 6, 5),), 3)


def test_a_loss_without_samples_is_shared() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.square().sum()

    assert_exact(Constant, (noise(0, 6, 5),), 3)


# ---- what mixes samples -------------------------------------------------------------------------------------------------------


def averaged(model: Callable[[], nn.Module], inputs: Sequence[Tensor], number: int) -> Outcome:
    """One device that runs the micro-batches and divides every loss by their number."""
    module = model()
    losses = [module(*part) / number for part in cut_batch(inputs, number)]
    sum(losses).backward()  # type: ignore[union-attr]
    return Outcome(torch.stack([x.detach() for x in losses]).sum(), gradients(module), {})


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_batch_norm_is_named_and_sees_its_own_samples(name: str) -> None:
    case = CASES[name]
    inputs = case.model().example(BATCH, seed=3)  # type: ignore[operator]
    graph = graph_of_parts(case.model, inputs, 3)
    assert graph.micro_batches is not None and {t for t, _ in graph.micro_batches.mixing} == {"aten.batch_norm.default"}
    assert_same(in_parts(graph, case.model, inputs), averaged(case.model, inputs, 3))
    with pytest.warns(MixedSamplesWarning, match=r"aten\.batch_norm\.default .*3 micro-batches"):
        warn_of_mixing(graph)


def test_every_sample_against_every_other_is_named() -> None:
    inputs = MODELS["contrastive"]().example(BATCH, 3)  # type: ignore[operator]
    graph = graph_of_parts(MODELS["contrastive"], inputs, 3)
    assert graph.micro_batches is not None
    ((target, source),) = graph.micro_batches.mixing
    assert target == "aten.matmul.default" and "@ y.T" in source
    assert_same(in_parts(graph, MODELS["contrastive"], inputs), averaged(MODELS["contrastive"], inputs, 3))


def test_a_product_of_means_is_averaged_and_the_rest_stays_exact() -> None:
    def model(weight: float = 0.1) -> nn.Module:
        made = Balanced(weight)
        _initialise(made, 0, torch.float64)
        return made

    inputs, number = masked_text(BATCH, 3), 4
    graph = graph_of_parts(model, inputs, number)
    assert graph.micro_batches is not None and [t for t, _ in graph.micro_batches.mixing] == ["aten.mul.Tensor"]
    module, plain = model(), model(0.0)
    plain.load_state_dict(module.state_dict())
    exact = at_once(lambda: model(0.0), inputs)
    balance = [(module(*part) - plain(*part)) / number for part in cut_batch(inputs, number)]
    sum(balance).backward()  # type: ignore[union-attr]
    of_plain = gradients(plain)  # minus what the loss proper adds to both
    total = {n: g + of_plain.get(n, 0) + exact.gradients[n] for n, g in gradients(module).items()}
    loss = exact.loss + sum(float(b.detach()) for b in balance)
    assert_same(in_parts(graph, model, inputs), Outcome(loss, total, {}), 1e-11)


def test_a_count_that_depends_on_parameters_is_averaged_and_named() -> None:
    class Pseudo(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)
            self.finish()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return F.cross_entropy(y, y.argmax(-1), ignore_index=2)

    inputs = (noise(0, 12, 5),)
    graph = graph_of_parts(Pseudo, inputs, 3)
    assert graph.micro_batches is not None and [t for t, _ in graph.micro_batches.mixing] == ["aten.cross_entropy_loss.default"]
    assert_same(in_parts(graph, Pseudo, inputs), averaged(Pseudo, inputs, 3))


def test_a_model_that_looks_at_the_size_of_the_batch_is_averaged_from_there_on() -> None:
    class Sized(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)
            self.finish()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return (y.tanh() if x.shape[0] > 4 else y.sigmoid()).mean()

    inputs = (noise(0, 6, 5),)
    graph = graph_of_parts(Sized, inputs, 2)
    assert graph.micro_batches is not None and graph.micro_batches.mixing[0][0] == "aten.sigmoid.default"
    assert_same(in_parts(graph, Sized, inputs), averaged(Sized, inputs, 2))


def test_masks_do_not_mix_samples() -> None:
    case = CASES["gpt with dropout"]
    graph = graph_of_parts(case.model, case.model().example(6), 3)  # type: ignore[operator]
    assert graph.micro_batches is not None and graph.micro_batches.mixing == ()
    with_masks = [n for n in graph.nodes if n.call.op == "aten.dropout"]
    assert with_masks and all(not n.outputs[0].name.endswith("_part") for n in with_masks)


# ---- what is refused ------------------------------------------------------------------------------------------------------------


def test_unequal_parts_are_refused() -> None:
    model, example = SAMPLES["mlp"]
    with pytest.raises(PlanError, match="a batch of 7 is not cut into equal parts of 2"):
        normalised(capture(model(), example(2)), capture(model(), example(7)))


def test_results_of_all_samples_together_are_refused() -> None:
    class Similar(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)
            self.finish()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"loss": y.mean(), "similar": y @ y.T}

    with pytest.raises(PlanError, match="'similar' depends on all samples"):
        graph_of_parts(Similar, (noise(0, 6, 5),), 2)


# ---- the graph --------------------------------------------------------------------------------------------------------------------


def weighted() -> Graph:
    return graph_of_parts(MODELS["weighted"], MODELS["weighted"]().example(6, 0), 3)  # type: ignore[operator]


def test_the_graph_is_data() -> None:
    graph = weighted()
    assert codec.decode(codec.encode(graph), Graph) == graph
    assert graph.hash == graph_hash(graph) != graph_hash(replace(graph, micro_batches=None))


def test_regions_keep_their_nodes() -> None:
    model, example = SAMPLES["weighted"]
    small, whole = (capture(model(), tuple(example(batch))) for batch in (2, 6))
    marked = replace(small, regions=(Region("checkpoint", 2, 8),))
    graph = normalised(marked, whole)
    (region,) = graph.regions
    inside = graph.nodes[region.start : region.stop]
    assert [n.outputs[0].name for n in graph.nodes[: region.start]] == [n.outputs[0].name for n in small.nodes[:2]]
    assert {n.source for n in inside} == {n.source for n in small.nodes[2:8]} and any(n.outputs[0].name.endswith("_share") for n in inside)
    assert graph.nodes[region.stop].source == small.nodes[8].source


def test_repeated_layers_stay_repeated() -> None:
    model, example = SAMPLES["gpt3"]
    graph = graph_of_parts(model, example(6), 3)
    assert {b for b in graph.block_of if b} == {b for b in capture(model(), tuple(example(6))).block_of if b}


def test_a_mask_that_is_as_long_as_the_batch_has_no_samples() -> None:
    class Masking(Seeded):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
            self.finish()

        def forward(self, idx: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
            x = self.table(idx)[:, None]
            return F.cross_entropy(self.head(F.scaled_dot_product_attention(x, x, x, mask))[:, 0].transpose(1, 2), targets)

    inputs = numbers(0, 9, 4, 4), torch.ones(4, 4).tril().bool(), numbers(1, 9, 4, 4)
    whole = capture(Masking(), inputs)
    assert batch_inputs(whole, find_grains(whole)) == (True, False, True)
    graph = normalised(capture(Masking(), cut_batch(inputs, 2, (True, False, True))[0]), whole)
    assert_same(in_parts(graph, Masking, inputs), at_once(Masking, inputs))
