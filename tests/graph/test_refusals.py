"""Models that must be refused: each with the message it gets, the user's line, and what to change, before anything runs.

In a table: forward, what the message says, whether it names the line. `hapx.plan` is what users call: capture, then unknown operators.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hapx.api import plan
from hapx.cluster.spec import ClusterSpec
from hapx.errors import CaptureError, HapError, UnsupportedOperatorError
from hapx.graph.capture import capture
from support.bodies import Forward, Model
from support.clusters import TWO
from support.custom_ops import jitter

CALLS, SEEN = 0, [0]
TABLE: dict[str, int] = {}


def refusal(model: nn.Module, x: Tensor | None = None) -> str:
    """The message of the error with which a model is refused by `hapx.plan`."""
    cluster: ClusterSpec = TWO
    with pytest.raises((CaptureError, UnsupportedOperatorError)) as caught:
        plan(model, cluster, (torch.randn(3, 4) if x is None else x,))
    assert caught.value.hint or caught.value.allowed, f"does not say what to do: {caught.value}"
    return str(caught.value)


# ---- shapes and control flow that depend on values ----------------------------------------------------------------------------


def nonzero(m: Model, h: Tensor) -> Tensor:
    return h[torch.nonzero(h[:, 0])].mean()


def masked_select(m: Model, h: Tensor) -> Tensor:
    return torch.masked_select(h, h > 0).mean()


def boolean_index(m: Model, h: Tensor) -> Tensor:
    return h[h > 0].sum()


def unique(m: Model, h: Tensor) -> Tensor:
    return h.mean() + torch.unique(h.argmax(1)).sum()


def branch(m: Model, h: Tensor) -> Tensor:
    return h.mean() if h.sum() > 0 else h.sum()


def loop(m: Model, h: Tensor) -> Tensor:
    while h.norm() > 1:
        h = h / 2
    return h.mean()


def assertion(m: Model, h: Tensor) -> Tensor:
    assert h.sum() > 0
    return h.mean()


def item(m: Model, h: Tensor) -> Tensor:
    return h.mean() * h.max().item()


def as_float(m: Model, h: Tensor) -> Tensor:
    return h.mean() * float(h.max())


def tolist(m: Model, h: Tensor) -> Tensor:
    return h.mean() * sum(h[0].tolist())


def numpy(m: Model, h: Tensor) -> Tensor:
    return h.mean() * float(np.mean(h.detach().numpy()))


# ---- side effects -----------------------------------------------------------------------------------------------------------------


def append(m: Model, h: Tensor) -> Tensor:
    m.seen.append(1)
    return h.mean()


def attribute(m: Model, h: Tensor) -> Tensor:
    m.calls += 1
    return h.mean()


def global_counter(m: Model, h: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return h.mean()


def note(h: Tensor) -> Tensor:
    SEEN.append(len(SEEN))
    TABLE["last"] = len(SEEN)
    return h


def global_list(m: Model, h: Tensor) -> Tensor:
    return note(h).mean()


def make_nonlocal() -> Forward:
    count = 0

    def counted(m: Model, h: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return h.mean()

    return counted


def python_random(m: Model, h: Tensor) -> Tensor:
    return h.mean() * random.random()


def numpy_random(m: Model, h: Tensor) -> Tensor:
    return h.mean() * float(np.random.rand())


# ---- in place ------------------------------------------------------------------------------------------------------------------------


def parameter_in_place(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
    return h.mean()


def leaf_in_place(m: Model, h: Tensor) -> Tensor:
    m.linear.bias.add_(1.0)
    return h.mean()


def through_data(m: Model, h: Tensor) -> Tensor:
    m.linear.weight.data.mul_(0.9)
    return h.mean()


def another_view(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    y.diagonal().mul_(3.0)
    return y.sum()


def resized(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty(0)
        torch.mul(h, 2.0, out=out)
    return h.mean() + out.mean()


# ---- random numbers ------------------------------------------------------------------------------------------------------------------


def poisson(m: Model, h: Tensor) -> Tensor:
    return (h * torch.poisson(torch.ones(3, 4))).mean()


def cauchy(m: Model, h: Tensor) -> Tensor:
    return (h + torch.empty_like(h).cauchy_()).mean()


def own_generator(m: Model, h: Tensor) -> Tensor:
    return (h * torch.rand(3, 4, generator=torch.Generator())).mean()


def hidden_random(m: Model, h: Tensor) -> Tensor:
    return jitter(h).mean()


# ---- kinds of tensors ---------------------------------------------------------------------------------------------------------------


def eighth(m: Model, h: Tensor) -> Tensor:
    return h.to(torch.float8_e4m3fn).float().mean() + h.mean()


def sparse(m: Model, h: Tensor) -> Tensor:
    return torch.sparse.mm(h.to_sparse(), torch.ones(4, 2)).mean()


def nested(m: Model, h: Tensor) -> Tensor:
    return torch.nested.nested_tensor([h[0], h[1]]).to_padded_tensor(0.0).mean()


def jagged(m: Model, h: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([h[:1], h[1:]], layout=torch.jagged).values().mean()


def strided(m: Model, h: Tensor) -> Tensor:
    return torch.as_strided(h, (2, 2), (1, 2)).mean()


# ---- gradients and transforms --------------------------------------------------------------------------------------------------------


def reentrant(m: Model, h: Tensor) -> Tensor:
    return checkpoint(torch.sin, h, use_reentrant=True).mean()


def hook(m: Model, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * 2)
    return h.mean()


def second_order(m: Model, h: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(h.sum(), m.linear.weight, create_graph=True)
    return g.pow(2).mean()


def inner_backward(m: Model, h: Tensor) -> Tensor:
    h.sum().backward()
    return h.mean()


def functional_grad(m: Model, h: Tensor) -> Tensor:
    return torch.func.grad(lambda t: t.pow(2).sum())(h).mean()


def no_gradient(m: Model, h: Tensor) -> Tensor:
    return h.detach().mean()


def quantized(m: Model, h: Tensor) -> Tensor:
    return torch.quantize_per_tensor(h, 0.1, 0, torch.qint8).dequantize().mean()


def communicates(m: Model, h: Tensor) -> Tensor:
    dist.all_reduce(h)
    return h.mean()


OUTSIDE = nn.Parameter(torch.ones(4))
OTHER = nn.Linear(4, 4)


def outside_parameter(m: Model, h: Tensor) -> Tensor:
    return (h * OUTSIDE.to(h)).mean()


def outside_module(m: Model, h: Tensor) -> Tensor:
    return (lambda t: OTHER(t))(h.float()).mean()


def make_outer() -> Forward:
    scale = nn.Parameter(torch.ones(4))

    def outer_parameter(m: Model, h: Tensor) -> Tensor:
        return (h * scale.to(h)).mean()

    return outer_parameter


# ---- results ----------------------------------------------------------------------------------------------------------------------------


def not_scalar(m: Model, h: Tensor) -> Tensor:
    return h


def number(m: Model, h: Tensor) -> Any:
    return h.mean(), {"accuracy": 0.5}


def text(m: Model, h: Tensor) -> Any:
    return h.mean(), "fine"


VALUES = "depends on the values of a tensor; use torch.where or a mask"
RANDOM = "is random and has no rule; make it of torch.rand, torch.randn or torch.randint, or pass the random numbers as an input"
SIDE = "a captured program would not; keep such state in a registered buffer, or outside forward"
FROZEN = "random numbers: a captured program would use the same ones in every step; use torch's (torch.rand, dropout)"
NO_PART = "requires a gradient but is no part of the model; make it a parameter or a submodule of the model"
INSIDE = "which a captured program would not; write the gradient as operators, or do it after forward"

# forward, message; the line is named where there is one ("!" before the message: there is none)
REFUSED: list[tuple[Forward, str]] = [
    *((f, VALUES) for f in (nonzero, masked_select, boolean_index, unique, branch, loop, assertion, item, as_float, tolist)),
    (numpy, "forward turns a tensor into a numpy array; use torch operators"),
    (append, "!Model: forward changes seen: " + SIDE),
    (attribute, "!Model: forward changes calls: " + SIDE),
    (global_counter, "forward changes the global 'CALLS': " + SIDE),
    (global_list, "forward changes the global 'SEEN', the global 'TABLE': " + SIDE),
    (make_nonlocal(), "forward changes the outer variable 'count': " + SIDE),
    (python_random, "!Model: forward uses Python's " + FROZEN),
    (numpy_random, "!Model: forward uses numpy's " + FROZEN),
    (parameter_in_place, "aten.mul_.Tensor changes the parameter 'linear.weight' in forward; use a new tensor, or a buffer"),
    (leaf_in_place, "forward changes a parameter in place; use a new tensor, or a buffer"),
    (through_data, "!Model: forward changes a tensor through .data or an attribute; use a registered buffer"),
    (another_view, "writes into a tensor of which another view is read later; allowed: in-place operators on whole tensors"),
    (resized, "aten.mul.out writes a result of shape [3, 4] into a tensor of shape [0]; use an operator that makes a new tensor"),
    *((f, RANDOM) for f in (poisson, cauchy)),
    (own_generator, "forward uses an object that is no tensor (custom_obj); a random generator, a quantized or a scripted module"),
    (hidden_random, "hapx_tests.jitter.default gives other values each time: it is random, and has no rule; replace it"),
    (eighth, "a float8_e4m3fn tensor; allowed: dense tensors of float64, float32"),
    (sparse, "a sparse_coo tensor; allowed: dense tensors of float64, float32"),
    *((f, "nested tensors cannot be captured; use a padded tensor and a mask") for f in (nested, jagged)),
    (strided, "aten.as_strided.default is dependent on strides and has no rule; replace it"),
    (reentrant, "a reentrant checkpoint cannot be captured: its gradients would be lost; pass use_reentrant=False"),
    (hook, "forward registers a hook on a gradient, " + INSIDE),
    (second_order, "forward computes a gradient, " + INSIDE),
    (inner_backward, "forward calls backward, " + INSIDE),
    (functional_grad, "a gradient of torch.func cannot be captured; write the gradient as operators"),
    *((f, "the loss does not depend on any parameter that requires a gradient; is forward under no_grad") for f in (no_gradient, quantized)),
    (communicates, "forward communicates itself (torch.distributed); pass the model as it is on one device"),
    (outside_parameter, "the global 'OUTSIDE' " + NO_PART),
    (outside_module, "the global 'OTHER' " + NO_PART),
    (make_outer(), "the outer variable 'scale' " + NO_PART),
    (not_scalar, "!forward returned a float32 tensor of shape [3, 4], which is no scalar loss; allowed: a scalar floating tensor"),
    (number, "!forward returns 0.5 as '1.accuracy', which is no tensor; allowed: tensors, and containers of them; return torch.tensor(...)"),
    (text, "!forward returns 'fine' as '1', which is no tensor"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[f[0].__name__ for f in REFUSED])
def test_refused(body: Forward, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = Model(body)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = random.getstate()
    text = refusal(model)
    assert message.removeprefix("!") in text
    assert ("test_refusals.py:" in text) != message.startswith("!"), text
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert model.calls == 0 and model.seen == [] and CALLS == 0 and SEEN == [0] and TABLE == {}, "nothing has run"
    assert random.getstate() == state and not any(p.grad is not None for p in model.parameters())
    assert capfd.readouterr() == ("", "")


# ---- models -----------------------------------------------------------------------------------------------------------------------------


def mean(m: Model, h: Tensor) -> Tensor:
    return h.mean()


def test_models_on_two_devices() -> None:
    model = Model(mean)
    model.other = nn.Linear(2, 2, device="meta")
    assert "the model lies on several devices: 'linear.weight' on cpu, 'other.weight' on meta" in refusal(model)


def test_wrappers_inside() -> None:
    model = Model(lambda m, h: m.part(h).mean())
    model.part = nn.DataParallel(nn.Linear(4, 4))
    assert "'part' is a DataParallel; allowed: plain single-device modules; use the module from before DataParallel: part.module" in refusal(model)
    assert "the model is a DataParallel" in refusal(nn.DataParallel(Model(mean)))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weights_made_by_old_hooks() -> None:
    for old in (nn.utils.weight_norm, nn.utils.spectral_norm):
        model = Model(lambda m, h: m.part(h).mean())
        model.part = old(nn.Linear(4, 4))
        assert f"part sets its weight anew in a hook (torch.nn.utils.{old.__name__}); use torch.nn.utils.parametrizations" in refusal(model)


def test_masks_of_transformers() -> None:
    """PyTorch reads the values of a mask, unless it is told."""

    def masked(m: Model, h: Tensor, **causal: bool) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=h.dtype)
        return m.part(h[None], h[None], tgt_mask=mask, **causal).mean()

    model = Model(masked)
    model.part = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True), 1)
    told = "nn.Transformer looks whether a mask is causal; pass tgt_is_causal (mask_is_causal, is_causal) beside a mask, True or False"
    assert told in refusal(model)
    model.body = lambda m, h: masked(m, h, tgt_is_causal=True)
    assert capture(model, (torch.randn(3, 4),)).nodes


def test_lazy_modules() -> None:
    model = Model(lambda m, h: m.part(h).mean())
    model.part = nn.LazyLinear(4)
    assert "Model: 'part.weight' has no shape yet; allowed: modules whose parameters are made; call a lazy module once" in refusal(model)


def test_hooks_on_gradients() -> None:
    on_module, on_parameter, after = Model(mean), Model(mean), Model(mean)
    on_module.linear.register_full_backward_hook(lambda m, i, o: None)
    on_parameter.linear.weight.register_hook(lambda g: g * 2)
    after.linear.bias.register_post_accumulate_grad_hook(lambda p: None)
    told = "has a hook on gradients, which would not run; remove it; change gradients after loss.backward()"
    assert f"module 'linear' {told}" in refusal(on_module)
    assert f"parameter 'linear.weight' {told}" in refusal(on_parameter)
    assert f"parameter 'linear.bias' {told}" in refusal(after)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_modules() -> None:
    model = Model(mean)
    model.register_parameter("scale", nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn)))
    assert "parameter 'scale': a float8_e4m3fn tensor" in refusal(model)
    model = Model(mean)
    model.register_buffer("packed", torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8))
    assert "buffer 'packed': a qint8 tensor" in refusal(model)


@torch.library.custom_op("hapx_tests::unfaked", mutates_args=())
def unfaked(x: Tensor) -> Tensor:
    return x.clone()


def test_custom_operators_without_a_fake_implementation() -> None:
    text = refusal(Model(lambda m, h: unfaked(h).mean()))
    assert "test_refusals.py:" in text and "a custom operator has no fake implementation; register one: my_op.register_fake" in text


# ---- what looks alike and is fine ---------------------------------------------------------------------------------------------------


def test_printing_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    def printing(m: Model, h: Tensor) -> Tensor:
        print(f"called with {list(h.shape)}")
        return h.mean()

    assert len(capture(Model(printing), (torch.randn(3, 4),)).nodes) == 2
    assert capsys.readouterr().out == "called with [3, 4]\n"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_parts_and_frozen_integers_are_fine() -> None:
    model = Model(lambda m, h: (m.part(h) * m.codes).mean())
    model.part = torch.compile(nn.Linear(4, 4))
    model.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    graph = capture(model, (torch.randn(3, 4),))
    assert [n.call.op for n in graph.nodes] == ["aten.linear", "aten.linear", "aten.mul", "aten.mean"]
    assert graph.refs["codes"].dtype == "int64" and not graph.refs["codes"].requires_grad


def test_globals_that_stay_as_they_are_are_fine() -> None:
    def reads(m: Model, h: Tensor) -> Tensor:
        return h.mean() * len(SEEN) + TABLE.get("last", CALLS)

    assert [n.call.op for n in capture(Model(reads), (torch.randn(3, 4),)).nodes][-1] == "aten.add"


def counting_its_calls(home: Path) -> Callable[[Tensor], Tensor]:
    """A function of a file that changes a global variable of it."""
    space: dict[str, Any] = {"COUNT": [0]}
    exec(compile("def helper(h):\n    COUNT.append(1)\n    return h\n", str(home), "exec"), space)
    return space["helper"]


@pytest.mark.parametrize(
    "root",
    [sysconfig.get_path("purelib"), "/home/her/.local/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages", "/opt/env/site-packages"],
)  # fmt: skip
def test_caches_of_installed_packages_are_fine(root: str) -> None:
    """Their global variables are no state of the model: for this environment, the user, the system or the environment below."""
    helper = counting_its_calls(Path(root, "somewhere", "library.py"))
    assert len(capture(Model(lambda m, h: helper(h).mean()), (torch.randn(3, 4),)).nodes) == 2


def test_caches_of_packages_in_a_folder_of_their_own_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install --target` leaves them; a folder of sources without metadata is the user's."""
    target, sources = tmp_path / "target", tmp_path / "sources"
    (target / "somewhere-1.0.dist-info").mkdir(parents=True)
    for folder in (target, sources):
        monkeypatch.syspath_prepend(folder)
    installed, own = (counting_its_calls(folder / "somewhere" / "library.py") for folder in (target, sources))
    assert len(capture(Model(lambda m, h: installed(h).mean()), (torch.randn(3, 4),)).nodes) == 2
    with pytest.raises(CaptureError, match="forward changes the global 'COUNT'"):
        capture(Model(lambda m, h: own(h).mean()), (torch.randn(3, 4),))


def test_dropout_in_place_is_dropout() -> None:
    graph = capture(Model(lambda m, h: F.dropout(h, 0.5, inplace=True).mean()), (torch.randn(3, 4),))
    assert graph.nodes[1].call.target == "aten.dropout.default" and graph.nodes[1].call["p"] == 0.5


def test_all_are_errors_of_hapx() -> None:
    assert issubclass(CaptureError, HapError) and len(REFUSED) >= 15
