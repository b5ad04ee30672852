"""Sample calls of every operator in the registry, for the audit (`hapx.theory.audit`).

In: nothing. Out: `SAMPLES`: small calls with the shapes, dtypes and ranges of their tensors; arguments that are left out have the
schema's defaults. `UNSAMPLED`: overloads that have none, and why. Invariant: every overload that the registry covers is in one of the two.

Sizes of different dims differ, so that a rule which mixes dims up cannot hold by chance; every dim that may be split has several units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hapx.ir import FLOATING, OpCall, Ref, TorchConst


class Values(Enum):
    """How an operand is drawn. IDS: integers below `limit`; SPECIAL: normal with infinities and nans; SHARES: positive, rows sum to 1."""

    NORMAL = "normal"
    POSITIVE = "positive"
    UNIT = "unit"
    IDS = "ids"
    SPECIAL = "special"
    SHARES = "shares"
    BOOL = "bool"


class Reason(Enum):
    """Why a true rule is not claimed."""

    INTEGER_PARTIAL = "integer partial"
    DEGENERATE_SIZE = "degenerate size"
    VALUE = "depends on value"
    LAYOUT = "layout"
    ZERO_GRADIENT = "zero gradient"
    RANDOM = "random, never Partial"


@dataclass(frozen=True, slots=True)
class Draw:
    """One operand. `grad`: whether a gradient is asked for (floating operands only)."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    values: Values = Values.NORMAL
    limit: int = 0
    grad: bool = True

    @property
    def requires_grad(self) -> bool:
        return self.grad and self.dtype in FLOATING


@dataclass(frozen=True, slots=True)
class Sample:
    """`draws`: operands by the name of their Ref. `excuse`: why rules that are true for this call are not claimed, if any are."""

    call: OpCall
    draws: tuple[tuple[str, Draw], ...]
    excuse: Reason | None = None

    def __str__(self) -> str:
        shapes = ", ".join(f"{n}: {d.dtype}{list(d.shape)}{'' if d.requires_grad else ' no grad'}" for n, d in self.draws)
        constants = ", ".join(f"{k}={v}" for k, v in self.call.args if not isinstance(v, Ref | tuple))
        return f"{self.call.target}({shapes}{'; ' + constants if constants else ''})"


def t(*shape: int, values: Values = Values.NORMAL, grad: bool = True, dtype: str = "float64") -> Draw:
    return Draw(shape, dtype, values, grad=grad)


def positive(*shape: int, grad: bool = True) -> Draw:
    return Draw(shape, values=Values.POSITIVE, grad=grad)


def unit(*shape: int) -> Draw:
    return Draw(shape, values=Values.UNIT)


def ids(*shape: int, limit: int) -> Draw:
    return Draw(shape, "int64", Values.IDS, limit)


def booleans(*shape: int) -> Draw:
    return Draw(shape, "bool", Values.BOOL)


def dtype(name: str) -> TorchConst:
    return TorchConst("dtype", name)


def sample(target: str, excuse: Reason | None = None, /, **args: Any) -> Sample:
    """A sample of `target`: Draws (and lists of them) become operands, everything else constants."""
    values: list[tuple[str, Any]] = []
    draws: list[tuple[str, Draw]] = []
    for name, value in args.items():
        if isinstance(value, Draw):
            draws.append((name, value))
            values.append((name, Ref(name)))
        elif isinstance(value, list):
            members = [(f"{name}{i}", d) for i, d in enumerate(value)]
            draws += members
            values.append((name, tuple(Ref(n) for n, _ in members)))
        else:
            values.append((name, value))
    return Sample(OpCall(f"aten.{target}" if target.count(".") else f"aten.{target}.default", tuple(values)), tuple(draws), excuse)


def words(text: str) -> list[str]:
    return text.split()


def pointwise() -> Iterator[Sample]:
    """One-tensor and two-tensor pointwise operators."""
    for name in words("""neg clone contiguous positive alias detach lift_fresh_copy relu gelu silu sigmoid tanh exp exp2 expm1 abs sin cos tan
            atan sinh cosh erf erfc square elu selu celu leaky_relu hardtanh relu6 hardswish hardsigmoid softplus mish log_sigmoid hardshrink
            softshrink sign floor ceil round trunc frac zeros_like ones_like"""):
        yield sample(name, self=t(4, 6))
    for name in words("isnan isinf isfinite nan_to_num"):
        yield sample(name, self=t(4, 6, values=Values.SPECIAL))
    for name in words("log log2 log10 log1p sqrt rsqrt reciprocal"):
        yield sample(name, self=positive(4, 6))
    for name in words("asin acos logit"):
        yield sample(name, self=unit(4, 6))
    yield sample("gelu", self=t(4, 6), approximate="tanh")
    yield sample("round.decimals", self=t(4, 6), decimals=1)
    yield sample("threshold", self=t(4, 6), threshold=0.1, value=0.5)
    yield sample("clamp", self=t(4, 6), min=-0.5, max=0.5)
    yield sample("clamp_min", self=t(4, 6), min=-0.5)
    yield sample("clamp_max", self=t(4, 6), max=0.5)
    yield sample("full_like", self=t(4, 6), fill_value=2.0)
    yield sample("detach_copy", self=t(4, 6, grad=False))
    yield sample("logical_not", self=ids(4, 6, limit=3))
    yield sample("floor_divide.Scalar", self=t(4, 6, grad=False), other=0.7)
    yield sample("neg", self=ids(4, 6, limit=9))
    yield sample("bitwise_not", self=booleans(4, 6))
    for name, other in (("pow.Tensor_Scalar", 3), ("remainder.Scalar", 0.7), ("fmod.Scalar", 0.7), ("rsub.Scalar", 1.0)):
        yield sample(name, self=t(4, 6), **{"exponent" if name.startswith("pow") else "other": other})
    yield sample("pow.Scalar", self=2.0, exponent=t(4, 6))
    for name in words("eq ne lt le gt ge"):
        yield sample(f"{name}.Scalar", self=ids(4, 6, limit=3), other=1)
        yield sample(f"{name}.Tensor", self=ids(4, 6, limit=3), other=ids(6, limit=3))
    yield sample("ge.Scalar", self=t(4, 6), other=0.1)
    yield sample("ge.Tensor", self=t(4, 6), other=t(4, 1))
    for name in words("bitwise_and bitwise_or bitwise_xor"):
        yield sample(f"{name}.Scalar", self=ids(4, 6, limit=9), other=5)
        yield sample(f"{name}.Tensor", self=booleans(4, 6), other=booleans(6))
    for name, other in (("add", 0.5), ("sub", 0.5), ("mul", 1.5), ("div", 1.5)):
        yield sample(f"{name}.Scalar", self=t(4, 6), other=other)
        yield sample(f"{name}.Tensor", self=t(4, 6), other=positive(6))
        yield sample(f"{name}.Tensor", self=t(4, 6), other=other)
        yield sample(f"{name}.Tensor", self=t(4, 1, 6), other=positive(5, 6))
        yield sample(f"{name}.Tensor", self=t(4, 6), other=positive(4, 6, grad=False))
    yield sample("add.Tensor", self=t(4, 6), other=t(4, 6), alpha=2)
    yield sample("mul.Tensor", self=t(4, 6), other=booleans(4, 6))
    yield sample("add.Tensor", self=ids(4, limit=9), other=1)


def binary() -> Iterator[Sample]:
    """Pointwise operators of two and three tensors that are not linear in all of them."""
    for name in words("maximum minimum atan2"):
        yield sample(name, self=t(4, 6), other=t(6))
    for name in words("logical_and logical_or logical_xor"):
        yield sample(name, self=ids(4, 6, limit=3), other=booleans(6))
    yield sample("floor_divide", self=t(4, 6, grad=False), other=positive(6, grad=False))
    yield sample("div.Tensor_mode", Reason.ZERO_GRADIENT, self=t(4, 6), other=positive(6), rounding_mode="floor")
    yield sample("div.Tensor_mode", self=t(4, 6), other=positive(6), rounding_mode=None)
    yield sample("pow.Tensor_Tensor", self=positive(4, 6), exponent=t(6))
    yield sample("fmod.Tensor", self=t(4, 6), other=positive(6))
    yield sample("remainder.Tensor", self=t(4, 6), other=positive(6))
    yield sample("prelu", self=t(4, 6, 5), weight=t(6))
    yield sample("prelu", self=t(4, 6), weight=t(1))
    yield sample("clamp.Tensor", self=t(4, 6), min=t(6), max=t(4, 6))
    yield sample("clamp.Tensor", self=t(4, 6), min=None, max=t(6))
    yield sample("where.self", condition=booleans(4, 6), self=t(4, 6), other=t(6))
    yield sample("where.self", condition=booleans(5, 1, 1), self=t(4, 1), other=t(4, 6))
    yield sample("where.ScalarSelf", condition=booleans(4, 6), self=0.5, other=t(6))
    yield sample("where.ScalarSelf", condition=booleans(4, 6), self=0.0, other=t(6))
    yield sample("where.ScalarOther", condition=booleans(4, 6), self=t(4, 6), other=0.5)
    yield sample("where.ScalarOther", condition=booleans(4, 6), self=t(4, 6), other=0.0)
    yield sample("where.Scalar", condition=booleans(4, 6), self=0.5, other=1.5)
    yield sample("masked_fill.Scalar", self=t(4, 6), mask=booleans(6), value=0.5)
    yield sample("masked_fill.Scalar", self=t(4, 6), mask=booleans(4, 6), value=0.0)
    yield sample("masked_fill.Tensor", self=t(4, 6), mask=booleans(6), value=t())
    yield sample("lerp.Scalar", self=t(4, 6), end=t(6), weight=0.3)
    yield sample("lerp.Tensor", self=t(4, 6), end=t(6), weight=t(4, 1))
    yield sample("addcmul", self=t(4, 6), tensor1=t(6), tensor2=t(4, 1), value=2)
    yield sample("addcdiv", self=t(4, 6), tensor1=t(6), tensor2=positive(4, 1))
    yield sample("glu", self=t(4, 6, 8), dim=1)
    yield sample("glu", self=t(4, 8))
    yield sample("glu", self=t(4, 12), dim=1)


def casts() -> Iterator[Sample]:
    for name in ("to.dtype", "to.dtype_layout", "_to_copy"):
        yield sample(name, self=t(4, 6), dtype=dtype("float32"))
    yield sample("to.dtype", self=t(4, 6), dtype=dtype("float64"))
    yield sample("to.dtype", self=t(4, 6), dtype=dtype("int64"))
    yield sample("to.dtype", self=booleans(4, 6), dtype=dtype("float32"))


Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
MATMULS: Shapes = (
    ((4, 6), (6, 5)), ((6,), (6,)), ((4, 6), (6,)), ((6,), (6, 5)), ((3, 4, 6), (6, 5)), ((2, 3, 4, 6), (3, 6, 5)), ((3, 4, 6), (6,)),
    ((6,), (3, 6, 5)),
)  # fmt: skip
RESHAPES: Shapes = (
    ((4, 6), (24,)), ((2, 3, 12), (2, 3, 4, 3)), ((2, 4, 6), (8, 6)), ((4, 1, 6), (4, 6)), ((6, 4), (4, 6)), ((2, 3, 4), (6, 1, 4)),
    ((12, 5), (3, 4, 5)),
)  # fmt: skip
POOLS = (("max_pool", "kernel_size"), ("avg_pool", "kernel_size"), ("adaptive_avg_pool", "output_size"), ("adaptive_max_pool", "output_size"))


def products() -> Iterator[Sample]:
    """Matrix products and convolutions."""
    yield sample("linear", input=t(4, 6), weight=t(5, 6), bias=t(5))
    yield sample("linear", input=t(2, 4, 6), weight=t(5, 6), bias=None)
    yield sample("linear", input=t(6), weight=t(5, 6), bias=t(5))
    yield sample("linear", input=t(4, 6, grad=False), weight=t(5, 6), bias=t(5))
    yield sample("linear", input=t(4, 6), weight=t(5, 6, grad=False), bias=t(5, grad=False))
    yield sample("linear", input=t(4, 6), weight=t(5, 6, grad=False), bias=t(5))
    yield sample("mm", self=t(4, 6), mat2=t(6, 5))
    yield sample("bmm", self=t(3, 4, 6), mat2=t(3, 6, 5))
    for added in ((4, 5), (5,), (1, 5), (4, 1)):
        yield sample("addmm", self=t(*added), mat1=t(4, 6), mat2=t(6, 5), beta=2, alpha=3)
    for shape in ((3, 4, 5), (4, 5), (1, 4, 1)):
        yield sample("baddbmm", self=t(*shape), batch1=t(3, 4, 6), batch2=t(3, 6, 5), alpha=2)
    yield sample("mv", self=t(4, 6), vec=t(6))
    yield sample("dot", self=t(6), tensor=t(6))
    for left, right in MATMULS:
        yield sample("matmul", self=t(*left), other=t(*right))
    yield sample("conv1d", input=t(4, 6, 5), weight=t(8, 6, 3), bias=t(8), padding=(1,))
    yield sample("conv2d", input=t(4, 6, 7, 5), weight=t(8, 6, 3, 3), bias=t(8), padding=(1, 1))
    yield sample("conv2d", input=t(4, 6, 7, 5), weight=t(8, 6, 3, 3), bias=None, padding=(1, 1))
    yield sample("conv2d", input=t(4, 6, 7, 5), weight=t(8, 3, 3, 3), bias=t(8), groups=2)
    yield sample("conv2d", input=t(2, 3, 4, 5), weight=t(6, 3, 1, 1), bias=t(6))
    yield sample("conv3d", input=t(2, 3, 2, 3, 4), weight=t(4, 3, 1, 2, 2), bias=t(4))


def attention() -> Iterator[Sample]:
    def call(mask: Draw | None = None, kv: int = 4, **constants: Any) -> Sample:
        excuse = Reason.RANDOM if constants.get("dropout_p") else None
        tensors = {"query": t(2, 4, 5, 3), "key": t(2, kv, 6, 3), "value": t(2, kv, 6, 7), "attn_mask": mask}
        return sample("scaled_dot_product_attention", excuse, **tensors, **constants)

    yield call(is_causal=True)
    yield call()
    yield call(t(5, 6, grad=False))
    yield call(booleans(2, 1, 5, 6))
    yield call(kv=2, enable_gqa=True)
    yield call(dropout_p=0.4)
    yield call(dropout_p=0.4, is_causal=True)
    yield call(kv=2, enable_gqa=True, dropout_p=0.4)
    yield call(kv=2, enable_gqa=True, dropout_p=0.4, is_causal=True)
    yield sample("scaled_dot_product_attention", query=t(4, 5, 3), key=t(4, 6, 3), value=t(4, 6, 7), scale=0.3)


def views() -> Iterator[Sample]:
    for shape, size in RESHAPES:
        yield sample("view", self=t(*shape), size=size)
    yield sample("view", self=ids(4, 6, limit=9), size=(24,))
    yield sample("_unsafe_view", self=t(4, 6), size=(2, 2, 6))
    yield sample("reshape", self=t(4, 6), shape=(2, 2, 6))
    yield sample("flatten.using_ints", self=t(2, 3, 4), start_dim=1)
    yield sample("unflatten.int", self=t(4, 6), dim=1, sizes=(2, 3))
    yield sample("squeeze", self=t(4, 1, 6))
    yield sample("squeeze.dim", self=t(4, 1, 6), dim=1)
    yield sample("squeeze.dim", self=t(4, 2, 6), dim=1)
    yield sample("squeeze.dims", self=t(4, 1, 6, 1), dim=(1, 3))
    yield sample("unsqueeze", self=t(4, 6), dim=1)
    yield sample("ravel", self=t(4, 6))
    yield sample("transpose.int", self=t(4, 5, 6), dim0=0, dim1=-1)
    yield sample("swapaxes", self=t(4, 5, 6), axis0=0, axis1=-1)
    yield sample("permute", self=t(4, 5, 6), dims=(2, 0, -2))
    yield sample("movedim.int", self=t(4, 5, 6), source=0, destination=-1)
    yield sample("movedim.intlist", self=t(4, 5, 6), source=(0, 1), destination=(1, 2))
    for name in ("t", "numpy_T", "mT"):
        yield sample(name, self=t(4, 6))
    yield sample("t", self=t(4))
    yield sample("numpy_T", self=t(4, 5, 6))
    yield sample("mT", self=t(4, 5, 6))
    yield sample("select.int", self=t(4, 5, 6), dim=1, index=2)
    yield sample("unbind.int", self=t(4, 2, 6), dim=1)
    yield sample("narrow", self=t(4, 5, 6), dim=1, start=1, length=2)
    yield sample("cumsum", self=t(4, 6), dim=1)
    yield sample("flip", self=t(4, 5, 6), dims=(1,))
    yield sample("roll", self=t(4, 6), shifts=(1,), dims=(1,))
    yield sample("roll", self=t(4, 6), shifts=(1,))


def pieces() -> Iterator[Sample]:
    """Slices, splits, concatenation, expansion, creation."""
    yield sample("slice.Tensor", self=t(4, 6), dim=1, start=1, end=4)
    yield sample("slice.Tensor", self=t(4, 6), dim=0)
    yield sample("slice.Tensor", self=t(4, 6), dim=1, step=2)
    yield sample("split.Tensor", self=t(4, 12), split_size=4, dim=1)
    yield sample("split.Tensor", self=t(4, 6), split_size=4, dim=-1)
    yield sample("chunk", self=t(4, 6), chunks=2, dim=1)
    yield sample("split_with_sizes", self=t(4, 6), split_sizes=(2, 4), dim=1)
    yield sample("split_with_sizes", self=t(4, 6), split_sizes=(3, 3), dim=1)
    yield sample("split.sizes", self=t(4, 6), split_size=(3, 3), dim=1)
    yield sample("tensor_split.sections", self=t(4, 6), sections=2, dim=1)
    for name in ("cat", "concat"):
        yield sample(name, tensors=[t(4, 6), t(4, 6)], dim=1)
    yield sample("cat", tensors=[t(4, 6), t(4, 3)], dim=-1)
    yield sample("cat", tensors=[ids(4, limit=5), ids(4, limit=5)])
    yield sample("stack", tensors=[t(4, 6), t(4, 6)], dim=1)
    yield sample("expand", self=t(4, 1, 6), size=(4, 5, 6))
    yield sample("expand", self=t(6), size=(4, -1))
    yield sample("arange", end=6)
    yield sample("arange.start", start=1, end=6)
    yield sample("arange.start_step", start=1, end=9, step=2)
    yield sample("zeros", size=(4, 6), dtype=dtype("float64"))
    yield sample("ones", size=(4, 6), dtype=dtype("float64"))
    yield sample("full", size=(4, 6), fill_value=2.0, dtype=dtype("float64"))
    yield sample("eye", n=4)
    yield sample("eye.m", n=4, m=6)
    yield sample("scalar_tensor", s=2.0)
    yield sample("linspace", start=0.0, end=1.0, steps=6)
    yield sample("new_zeros", self=t(5), size=(4, 6))
    yield sample("new_ones", self=t(5), size=(4, 6))
    yield sample("new_full", self=t(5), size=(4, 6), fill_value=2.0)
    for name in ("tril", "triu"):
        yield sample(name, self=t(3, 4, 6))


def reductions() -> Iterator[Sample]:
    yield sample("sum", self=t(4, 6))
    yield sample("sum", self=ids(4, 6, limit=9))
    yield sample("mean", self=t(4, 6))
    for keepdim in (False, True):
        yield sample("sum.dim_IntList", self=t(3, 4, 6), dim=(0, -1), keepdim=keepdim)
        yield sample("mean.dim", self=t(3, 4, 6), dim=(0, -1), keepdim=keepdim)
        yield sample("max.dim", self=t(4, 6), dim=1, keepdim=keepdim)
        yield sample("amax", self=t(4, 6), dim=(1,), keepdim=keepdim)
    yield sample("mean.dim", self=t(4, 6), dim=(1,), dtype=dtype("float32"))
    yield sample("amax", self=t(4, 6))
    yield sample("amin", self=t(4, 6), dim=(0,))
    yield sample("min.dim", self=t(4, 6), dim=0)
    yield sample("argmax", self=t(4, 6), dim=1)
    yield sample("argmax", self=t(4, 6))
    yield sample("argmin", self=t(4, 6), dim=0, keepdim=True)
    yield sample("prod.dim_int", self=t(4, 6), dim=1)
    yield sample("logsumexp", self=t(4, 6), dim=(1,))
    for name in ("var", "std"):
        yield sample(f"{name}.correction", self=t(4, 6), dim=(1,), correction=0)
        yield sample(f"{name}.dim", self=t(4, 6), dim=(1,))
    yield sample("any.dim", self=booleans(4, 6), dim=1)
    yield sample("all.dim", self=booleans(4, 6), dim=1)
    yield sample("norm.ScalarOpt_dim", self=t(4, 6), p=2, dim=(1,))
    yield sample("linalg_vector_norm", self=t(4, 6), dim=(1,))
    yield sample("max", self=t(4, 6))
    yield sample("min", self=t(4, 6))


def norms() -> Iterator[Sample]:
    """Softmax, normalisation, pooling."""
    yield sample("softmax.int", self=t(3, 4, 6), dim=1)
    yield sample("log_softmax.int", self=t(4, 6), dim=-1)
    yield sample("_softmax", self=t(4, 6), dim=-1, half_to_float=False)
    yield sample("_log_softmax", self=t(4, 6), dim=0, half_to_float=False)
    yield sample("layer_norm", input=t(3, 4, 6), normalized_shape=(6,), weight=t(6), bias=t(6))
    yield sample("layer_norm", input=t(4, 6), normalized_shape=(6,), weight=t(6), bias=None)
    yield sample("layer_norm", input=t(4, 6), normalized_shape=(6,), weight=None, bias=None)
    yield sample("layer_norm", input=t(3, 4, 6), normalized_shape=(4, 6), weight=t(4, 6), bias=t(4, 6))
    yield sample("rms_norm", input=t(3, 4, 6), normalized_shape=(6,), weight=t(6))
    yield sample("rms_norm", input=t(4, 6), normalized_shape=(6,), weight=None)
    for training in (True, False):
        stats = {"running_mean": t(6, grad=False), "running_var": positive(6, grad=False)}
        constants = {"training": training, "momentum": 0.3, "eps": 1e-5, "cudnn_enabled": True}
        yield sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **stats, **constants)
        yield sample("batch_norm", input=t(8, 6), weight=None, bias=None, **stats, **constants)
    yield sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), running_mean=None, running_var=None, **(constants | {"training": True}))
    for name, argument in POOLS:
        for rank, image in ((1, (3, 2, 6)), (2, (3, 2, 4, 6)), (2, (3, 4, 6))):
            yield sample(f"{name}{rank}d", self=t(*image), **{argument: (2,) * rank})


def losses() -> Iterator[Sample]:
    yield sample("embedding", weight=t(7, 6), indices=ids(4, 5, limit=7))
    yield sample("embedding", weight=t(7, 6), indices=ids(4, limit=7), padding_idx=2)
    yield sample("embedding", weight=t(7, 6), indices=ids(4, limit=3), scale_grad_by_freq=True)
    for reduction in (1, 0, 2):
        yield sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), weight=None, reduction=reduction, ignore_index=2)
    yield sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), weight=positive(7, grad=False), ignore_index=2, label_smoothing=0.1)
    yield sample("cross_entropy_loss", self=t(3, 7, 4), target=ids(3, 4, limit=7), label_smoothing=0.1)
    yield sample("cross_entropy_loss", self=t(7), target=ids(limit=7))
    for reduction in (0, 1, 2):
        yield sample("cross_entropy_loss", self=t(4, 7), target=t(4, 7, values=Values.SHARES, grad=False), reduction=reduction)
    yield sample("cross_entropy_loss", self=t(4, 7, grad=False), target=ids(4, limit=7))
    for reduction in (1, 0, 2):
        yield sample("mse_loss", self=t(4, 6), target=t(4, 6, grad=False), reduction=reduction)
    yield sample("mse_loss", self=t(4, 6), target=t(4, 6))
    for p, train in ((0.4, True), (0.4, False), (0.0, True)):
        yield sample("dropout", Reason.RANDOM, input=t(4, 6), p=p, train=train)


SAMPLES: tuple[Sample, ...] = tuple(
    s for family in (pointwise, binary, casts, products, attention, views, pieces, reductions, norms, losses) for s in family()
)

UNDEFINED = "its values are undefined"
UNSAMPLED: Mapping[str, str] = {
    "aten.empty.memory_format": UNDEFINED,
    "aten.new_empty.default": UNDEFINED,
}


def samples_of(target: str) -> tuple[Sample, ...]:
    """Samples of an operator ("aten.sum") or of one overload ("aten.sum.default")."""
    return tuple(s for s in SAMPLES if target in (s.call.target, s.call.op))
