"""Normal form: in-place writes, aliases, constants, buffers, rewritten operators; each case is compared with the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.errors import CaptureError, HapError, UnsupportedOperatorError
from hapx.graph.capture import capture
from hapx.graph.normalize_names import OTHER, canonical
from hapx.ir import Graph, Kind, TorchConst
from support.interpret import run_module


class Model(nn.Module):
    """`body(self, h)` between a linear layer and a mean; with a buffer."""

    def __init__(self, body: Callable[[Model, Tensor], Tensor]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(4, 4, generator=generator))
        self.register_buffer("state", torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.plain = torch.arange(4.0, dtype=torch.float64)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x)).square().mean()


def inputs() -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check(body: Callable[[Model, Tensor], Tensor]) -> Graph:
    model = Model(body)
    graph = capture(model, (inputs(),))
    reference = copy.deepcopy(model)
    expected = reference(inputs())
    values = run_module(graph, model, (inputs(),))
    assert torch.equal(values[graph.loss], expected)
    expected.backward()
    values[graph.loss].backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert not any(n.call.op.endswith("_") for n in graph.nodes)
    return graph


def chain(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    z = y.add_(1).mul_(m.plain)
    assert z is y
    y[h > 2] = 0.5
    y.clamp_(max=1.5)
    F.relu(y, inplace=True)
    return y * h


def masked(m: Model, h: Tensor) -> Tensor:
    scores = h @ h.T
    scores.masked_fill_(torch.ones(3, 3, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ h


def whole_fill(m: Model, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out.copy_(h.sum(0))
    out += 1
    return out * torch.zeros(3, 4).fill_(2).double()


def view_first(m: Model, h: Tensor) -> Tensor:
    y = (h * 2).view(-1)  # the tensor under the view is not read again
    y.mul_(3)
    return y.view(3, 4)


def clones(m: Model, h: Tensor) -> Tensor:
    y, z = h.clone(), h.contiguous().clone()
    y.add_(1)
    z *= y
    return y * z - h


def two_names(m: Model, h: Tensor) -> Tensor:
    y = F.dropout(h + 1, p=0.0)  # y is the very tensor h + 1
    w = torch.ops.aten.alias.default(y)
    y.exp_()
    return w + y


def fresh_constants(m: Model, h: Tensor) -> Tensor:
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    a.add_(1)
    return h * a.to(h) - b.to(h.device, torch.float64)


def buffers(m: Model, h: Tensor) -> Tensor:
    m.count += 1
    m.state.mul_(0.5).add_(h.detach().mean(0))
    out = h * m.state
    m.state = m.state + 1
    return out / m.count


def buffer_with_gradient(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.copy_(h[0])
    return h + m.state


def given_out(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        out, scale = torch.zeros(3, 4, dtype=h.dtype), torch.full((3, 4), 2.0, dtype=h.dtype)
        view = out[1:]
        torch.div(h.detach(), 2.0 * scale, out=out)
        torch.add(out[:2].clone(), scale[:2], alpha=3, out=view)
    return (h * out).sum() + view.mean()


def attribute(m: Model, h: Tensor) -> Tensor:
    return h * m.plain + torch.tensor(2.0)


def multiple(m: Model, h: Tensor) -> Tensor:
    values, index = h.topk(2, dim=-1)
    a, b, *_ = h.unbind(0)
    c, d = h.chunk(2, dim=1)
    e, f = torch.broadcast_tensors(a, c.repeat(1, 2))
    return values.sum() + (a * b).sum() + (c - d).sum() + e * f + index.float().mean() * 0


def casts(m: Model, h: Tensor) -> Tensor:
    return h.float().to(torch.bfloat16).to("cpu").to(h).type_as(h) + h.to("cpu", torch.float32)


def column(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    y[:, 0] = 3.0
    y[:, 1:3] *= h[:, :2]
    y[0] = h[2]
    return y * y


def stale(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    row, part = y[0], y[1:].transpose(0, 1)
    y.add_(1)
    part[2].exp_()
    return row + y + part.sum()


def reshaped(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    y.view(2, 6)[1, 2:4].mul_(5.0)
    y.t()[0].fill_(0.5)
    y.permute(1, 0)[3].neg_()
    y.unsqueeze(0).squeeze(0)[1].copy_(m.plain)
    return y


def copied_twice(m: Model, h: Tensor) -> Tensor:
    y, z = h * 2, h + 1
    y[0] = z[1]
    z.mul_(3)
    z[1] += 1  # does not change y
    y[0].add_(2)
    return y * z


def shifted(m: Model, h: Tensor) -> Tensor:
    """As decoder inputs are made from labels."""
    y = torch.zeros_like(h)
    y[..., 1:] = h[..., :-1].clone()
    y[..., 0] = 7.0
    y[:, :] += 1
    y.masked_fill_(y > 1, 0.25)
    return y


def part_of_a_buffer(m: Model, h: Tensor) -> Tensor:
    m.state[1:].mul_(0.5)
    m.state[0] = 3
    return h * m.state


def powers(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    y.pow_(2).clamp_(max=3).div_(3, rounding_mode=None)
    y.zero_()
    return F.rrelu(h, 0.1, 0.5, training=False) + y


def aliases(m: Model, h: Tensor) -> Tensor:
    x = h.swapdims(0, 1).moveaxis(0, 1).adjoint().mH.view_as(h).reshape_as(h) + h[:1].expand_as(h) + torch.broadcast_to(h[0], (3, 4))
    parts = [*h.hsplit(2), *h.vsplit((1,)), *h.tensor_split((1, 1, 3), dim=1), *h.hsplit((3,)), *h[None].repeat(1, 1, 1).dsplit(2)]
    rows = torch.vstack([h[0], h[1]]) + torch.row_stack([h[:1], h[1:2]]) + torch.concatenate([h[:1], h[1:2]])
    columns = torch.column_stack([h[:, 0], h[:, 1]]) + torch.hstack([h[:, :1], h[:, :1]]) + torch.dstack([h[:, 0:1], h[:, 1:2]]).flatten(1)
    ranks = torch.atleast_3d(h[0]).sum() + torch.atleast_2d(h[0]).mean() * torch.atleast_1d(h[0, 0])
    return x + sum(p.exp().sum() for p in parts) + rows.sum(0) * columns.sum() + ranks


def other_names(m: Model, h: Tensor) -> Tensor:
    y = torch.absolute(h).multiply(2).subtract(1).true_divide(3).negative().clip(-1, 1)
    y = torch.special.expit(y) + torch.arctan2(y, h) + torch.special.xlogy(0.5, h.square() + 1) + torch.max(y, h)
    y.multiply_(2).subtract_(h).clip_(-2, 2)
    mask = (h.greater(0) & h.less_equal(1)) | h.not_equal(h)
    return torch.special.softmax(y, 1) * mask + torch.fix(h) + torch.special.round(h, decimals=1)


CASES = [
    column,
    stale,
    reshaped,
    copied_twice,
    shifted,
    part_of_a_buffer,
    chain,
    powers,
    other_names,
    aliases,
    masked,
    whole_fill,
    view_first,
    clones,
    two_names,
    fresh_constants,
    buffers,
    buffer_with_gradient,
    given_out,
    attribute,
    multiple,
    casts,
]


@pytest.mark.parametrize("body", CASES, ids=lambda f: f.__name__)
def test_same_as_the_module(body: Callable[[Model, Tensor], Tensor]) -> None:
    check(body)


def test_single_assignment_and_order() -> None:
    graph = check(chain)
    seen = set(graph.refs) - {o.name for n in graph.nodes for o in n.outputs}
    for node in graph.nodes:
        assert set(node.call.refs()) <= seen
        assert not seen & {o.name for o in node.outputs}
        seen |= {o.name for o in node.outputs}


def test_no_assertions_getitem_or_devices() -> None:
    graph = check(casts)
    assert {n.call.op for n in graph.nodes} <= {"aten.linear", "aten.to", "aten.add", "aten.pow", "aten.mean", "aten.square"}
    assert {n.call.target for n in graph.nodes if n.call.op == "aten.to"} == {"aten.to.dtype"}
    assert not any("device" in str(v) for n in graph.nodes for _, v in n.call.args)


def test_broadcast_becomes_expand() -> None:
    graph = check(multiple)
    (expand,) = (n for n in graph.nodes if n.call.op == "aten.expand")
    assert expand.call["size"] == (3, 4)


def test_operators_have_one_name() -> None:
    found = {n.call.target for n in check(other_names).nodes}
    expected = (
        "abs.default mul.Tensor sub.Tensor div.Tensor neg.default clamp.default sigmoid.default atan2.default xlogy.Scalar_Self maximum.default"
    )
    expected += " gt.Scalar le.Scalar ne.Tensor bitwise_and.Tensor bitwise_or.Tensor softmax.int trunc.default round.decimals"
    assert {f"aten.{name}" for name in expected.split()} <= found
    assert not any(name in target for target in found for name in ("special", "absolute", "multiply", "subtract", "clip", "greater"))


def test_every_other_name_is_one_of_torch() -> None:
    gone = {"cholesky"}  # from torch 2.14 on
    for name, other in OTHER.items():
        assert hasattr(torch.ops.aten, name) or name in gone, name
        assert hasattr(torch.ops.aten, other), other
    packets = [getattr(torch.ops.aten, name) for name in OTHER if hasattr(torch.ops.aten, name)]
    for packet in packets:
        found = {canonical(getattr(packet, overload))._schema.name for overload in packet.overloads()}
        assert f"aten::{OTHER[packet.__name__]}" in found, packet


def test_aliases_are_written_as_what_they_are() -> None:
    known = "reshape expand transpose movedim tensor_split split_with_sizes cat stack slice select unsqueeze repeat flatten linear"
    pointwise = "add mul exp sum mean pow square"
    assert {n.call.op for n in check(aliases).nodes} <= {f"aten.{name}" for name in f"{known} {pointwise}".split()}


def test_dropout_in_place_is_dropout() -> None:
    def body(m: Model, h: Tensor) -> Tensor:
        y = h * 2
        F.dropout(y, 0.5, inplace=True)
        F.dropout(y, 0.0, inplace=True)
        return y

    graph = capture(Model(body), (inputs(),))
    (drop,) = (n for n in graph.nodes if n.call.op == "aten.dropout")
    assert drop.call["p"] == 0.5 and drop.tags == ("random",)
    mul = next(n for n in graph.nodes if n.call.op == "aten.mul")
    assert drop.call.refs() == (mul.outputs[0].name,)


def test_constants_and_buffers() -> None:
    graph = check(attribute)
    assert sorted(graph.constants.values()) == [(0.0, 1.0, 2.0, 3.0), (2.0,)]
    assert all(graph.refs[name].kind is Kind.CONSTANT for name in graph.constants)
    outputs = {o.target: o.tensor for o in check(buffers).outputs if o.role == "buffer"}
    assert set(outputs) == {"state", "count"}


def test_values_without_inputs_are_constants() -> None:
    def body(m: Model, h: Tensor) -> Tensor:
        mask = torch.ones(3, 4, dtype=torch.float64).tril() * 2
        return h * mask + torch.rand(3, 4, dtype=torch.float64)

    graph = capture(Model(body), (inputs(),))
    kinds = {n.call.op: n.outputs[0].kind for n in graph.nodes}
    assert kinds["aten.tril"] is kinds["aten.ones"] is Kind.CONSTANT
    assert kinds["aten.rand"] is kinds["aten.add"] is Kind.VALUE


def test_dead_code() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x.sin())  # its statistics are a result, its values are not
            self.linear(x).exp()
            return self.linear(x).mean()

    graph = capture(Dead(), (inputs(),))
    assert [n.call.op for n in graph.nodes] == ["aten.sin", "aten.add", "aten.batch_norm", "aten.linear", "aten.mean"]
    assert [n.call.op for n in capture(Dead(), (inputs(),), training=False).nodes] == ["aten.linear", "aten.mean"]


def test_one_norm_applied_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) * 2).square().mean()

    model, reference = Twice(), Twice()
    graph = capture(model, (inputs(),))
    for _ in range(3):  # several steps: the statistics of one are the start of the next
        expected = reference(inputs())
        assert torch.equal(run_module(graph, model, (inputs(),))[graph.loss], expected)
    for (name, a), (_, b) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert graph.refs["norm.running_mean"].mutated and not graph.refs["norm.num_batches_tracked"].mutated
    assert not capture(model, (inputs(),), training=False).refs["norm.running_mean"].mutated


def test_defaults_are_torch_constants() -> None:
    def body(m: Model, h: Tensor) -> Tensor:
        return h.contiguous(memory_format=torch.preserve_format) + torch.randint(4, (3, 4))

    graph = capture(Model(body), (inputs(),))
    (randint,) = (n for n in graph.nodes if n.call.op == "aten.randint")
    assert randint.call["dtype"] == TorchConst("dtype", "int64")
    assert not any(n.call.op in ("aten.contiguous", "aten.clone") for n in graph.nodes)


# -- refused --------------------------------------------------------------------------------------------------------------------------


def diagonal(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    y.diagonal().mul_(3.0)
    return y


def detached_write(m: Model, h: Tensor) -> Tensor:
    y = h * 2
    y.detach().mul_(3.0)
    return y


def parameter(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.clamp_(-1, 1)
    return h


def under_no_grad(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h


def part_under_no_grad(m: Model, h: Tensor) -> Tensor:
    with torch.no_grad():
        h[0].mul_(2)
    return h


def random_write(m: Model, h: Tensor) -> Tensor:
    return h * torch.empty(3, 4, dtype=torch.float64).cauchy_()


REFUSED = [
    (diagonal, UnsupportedOperatorError, "another view is read later"),
    (detached_write, UnsupportedOperatorError, "another view is read later"),
    (parameter, CaptureError, "changes the parameter 'linear.weight'"),
    (under_no_grad, CaptureError, "needs a gradient, under no_grad"),
    (part_under_no_grad, CaptureError, "needs a gradient, under no_grad"),
    (random_write, UnsupportedOperatorError, "aten.cauchy_.default is random"),
]


@pytest.mark.parametrize(("body", "error", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_refused(body: Callable[[Model, Tensor], Tensor], error: type[HapError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        capture(Model(body), (inputs(),))
    assert "test_normalize.py:" in str(caught.value)


def test_write_to_an_input_is_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            x -= 1
            return self.linear(x).mean()

    with pytest.raises(CaptureError, match=r"changes the input 'x' in place.*clone"):
        capture(Centred(), (inputs(),))
