"""Pointwise operators and casts."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, Values, above, booleans, dtype, ids, positive, sample, t, unit, words

UNARY = """
    neg clone contiguous positive alias detach lift_fresh_copy deg2rad rad2deg relu gelu silu sigmoid tanh exp exp2 expm1 abs sin cos tan atan
    sinh cosh asinh erf erfc square elu selu celu leaky_relu hardtanh relu6 hardswish hardsigmoid softplus mish log_sigmoid hardshrink
    softshrink sign sgn floor ceil round trunc frac zero zeros_like ones_like i0 sinc special_erfcx special_ndtr special_log_ndtr special_i0e
    special_i1 special_i1e
"""
POSITIVE = "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma special_entr"
UNIT = "asin acos atanh logit erfinv special_ndtri"
COMPARISONS = "eq ne lt le gt ge"
BITS = "bitwise_and bitwise_or bitwise_xor"


def pointwise() -> Iterator[Sample]:
    """One tensor, and one tensor and a number."""
    for name in words(UNARY):
        yield sample(name, self=t(4, 6))
    for name in words("isnan isinf isfinite isposinf isneginf nan_to_num signbit isreal"):
        yield sample(name, self=t(4, 6, values=Values.SPECIAL))
    for name in words(POSITIVE):
        yield sample(name, self=positive(4, 6))
    for name in words(UNIT):
        yield sample(name, self=unit(4, 6))
    yield sample("acosh", self=above(4, 6))
    yield sample("mvlgamma", self=above(4, 6), p=2)
    yield sample("polygamma", n=1, self=positive(4, 6))
    yield sample("gelu", self=t(4, 6), approximate="tanh")
    yield sample("round.decimals", self=t(4, 6), decimals=1)
    yield sample("threshold", self=t(4, 6), threshold=0.1, value=0.5)
    yield sample("clamp", self=t(4, 6), min=-0.5, max=0.5)
    yield sample("clamp_min", self=t(4, 6), min=-0.5)
    yield sample("clamp_max", self=t(4, 6), max=0.5)
    yield sample("full_like", self=t(4, 6), fill_value=2.0)
    yield sample("fill.Scalar", self=t(4, 6), value=2.0)
    yield sample("fill.Tensor", self=t(4, 6), value=t())
    yield sample("fill.Tensor", self=t(4, 6), value=t(grad=False))
    yield sample("detach_copy", self=t(4, 6, grad=False))
    yield sample("logical_not", self=ids(4, 6, limit=3))
    yield sample("neg", self=ids(4, 6, limit=9))
    yield sample("abs", self=ids(4, 6, limit=9))
    yield sample("bitwise_not", self=booleans(4, 6))
    yield sample("isin.Tensor_Tensor", elements=ids(4, 6, limit=9), test_elements=ids(3, limit=9))
    yield sample("isin.Tensor_Scalar", elements=ids(4, 6, limit=3), test_element=1)


def with_numbers() -> Iterator[Sample]:
    """A tensor and a number, in either order."""
    for name, other in (("remainder", 0.7), ("fmod", 0.7), ("rsub", 1.0), ("copysign", -1.0)):
        yield sample(f"{name}.Scalar", self=t(4, 6), other=other)
    yield sample("xlogy.Scalar_Other", self=t(4, 6), other=0.7)
    yield sample("special_xlog1py.other_scalar", self=t(4, 6), other=0.7)
    yield sample("special_xlog1py.self_scalar", self=0.7, other=positive(4, 6))
    yield sample("xlogy.Scalar_Self", self=0.7, other=positive(4, 6))
    yield sample("remainder.Scalar_Tensor", self=0.7, other=positive(4, 6, grad=False))
    for name in words("pow float_power"):
        yield sample(f"{name}.Tensor_Scalar", self=t(4, 6), exponent=3)
        yield sample(f"{name}.Scalar", self=2.0, exponent=t(4, 6))
    yield sample("floor_divide.Scalar", self=t(4, 6, grad=False), other=0.7)
    yield sample("div.Scalar_mode", Reason.ZERO_GRADIENT, self=t(4, 6), other=0.7, rounding_mode="trunc")
    yield sample("div.Scalar_mode", self=t(4, 6), other=0.7, rounding_mode=None)
    for name in words(COMPARISONS):
        yield sample(f"{name}.Scalar", self=ids(4, 6, limit=3), other=1)
        yield sample(f"{name}.Tensor", self=ids(4, 6, limit=3), other=ids(6, limit=3))
    yield sample("ge.Scalar", self=t(4, 6), other=0.1)
    yield sample("ge.Tensor", self=t(4, 6), other=t(4, 1))
    for name in words(BITS):
        yield sample(f"{name}.Scalar", self=ids(4, 6, limit=9), other=5)
        yield sample(f"{name}.Tensor", self=booleans(4, 6), other=booleans(6))
    for name in words("bitwise_left_shift bitwise_right_shift"):
        yield sample(f"{name}.Tensor", self=ids(4, 6, limit=9), other=ids(6, limit=3))
        yield sample(f"{name}.Tensor_Scalar", self=ids(4, 6, limit=9), other=2)
        yield sample(f"{name}.Scalar_Tensor", self=9, other=ids(4, 6, limit=3))


def arithmetic() -> Iterator[Sample]:
    """The four operations."""
    for name, other in (("add", 0.5), ("sub", 0.5), ("mul", 1.5), ("div", 1.5)):
        yield sample(f"{name}.Scalar", self=t(4, 6), other=other)
        yield sample(f"{name}.Tensor", self=t(4, 6), other=positive(6))
        yield sample(f"{name}.Tensor", self=t(4, 6), other=other)
        yield sample(f"{name}.Tensor", self=t(4, 1, 6), other=positive(5, 6))
        yield sample(f"{name}.Tensor", self=t(4, 6), other=positive(4, 6, grad=False))
    yield sample("add.Tensor", self=t(4, 6), other=t(4, 6), alpha=2)
    yield sample("rsub.Tensor", self=t(4, 6), other=t(6), alpha=2)
    yield sample("mul.Tensor", self=t(4, 6), other=booleans(4, 6))
    yield sample("add.Tensor", self=ids(4, limit=9), other=1)
    yield sample("ldexp.Tensor", self=t(4, 6), other=ids(6, limit=3))


def binary() -> Iterator[Sample]:
    """Pointwise operators of two tensors that are not linear in both."""
    for name in words("maximum minimum fmax fmin atan2 hypot logaddexp logaddexp2"):
        yield sample(name, self=t(4, 6), other=t(6))
    for name in words("logical_and logical_or logical_xor"):
        yield sample(name, self=ids(4, 6, limit=3), other=booleans(6))
    for name in words("gcd lcm"):
        yield sample(name, self=ids(4, 6, limit=9), other=ids(6, limit=9))
    yield sample("isclose", Reason.VALUE, self=t(4, 6), other=t(6))
    yield sample("copysign.Tensor", Reason.ZERO_GRADIENT, self=t(4, 6), other=t(6))
    yield sample("heaviside", Reason.VALUE, self=t(4, 6, grad=False), values=t(6, grad=False))
    yield sample("nextafter", Reason.VALUE, self=t(4, 6, grad=False), other=t(6, grad=False))
    yield sample("floor_divide", self=t(4, 6, grad=False), other=positive(6, grad=False))
    yield sample("div.Tensor_mode", Reason.ZERO_GRADIENT, self=t(4, 6), other=positive(6), rounding_mode="floor")
    yield sample("div.Tensor_mode", self=t(4, 6), other=positive(6), rounding_mode=None)
    for name in words("pow float_power"):
        yield sample(f"{name}.Tensor_Tensor", self=positive(4, 6), exponent=t(6))
    for name in words("fmod remainder"):
        yield sample(f"{name}.Tensor", self=t(4, 6), other=positive(6))
    for name in words("xlogy.Tensor special_xlog1py"):  # 0 log 0 is 0: linear in the first where the second is not 0
        yield sample(name, Reason.VALUE, self=t(4, 6), other=positive(6))


def several() -> Iterator[Sample]:
    """Pointwise operators with weights, conditions, bounds."""
    yield sample("prelu", self=t(4, 6, 5), weight=t(6))
    yield sample("prelu", self=t(4, 6), weight=t(1))
    yield sample("clamp.Tensor", self=t(4, 6), min=t(6), max=t(4, 6))
    yield sample("clamp.Tensor", self=t(4, 6), min=None, max=t(6))
    yield sample("clamp_min.Tensor", self=t(4, 6), min=t(6))
    yield sample("clamp_max.Tensor", self=t(4, 6), max=t(6))
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
