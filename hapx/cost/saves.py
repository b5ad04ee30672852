"""What small operators keep for backward: operands by argument name, outputs as "out" (the first) and "out1" (the last).

In: nothing. Out: `SAVES_OF_SMALL`, by overload or operator, and `KEPT_INSIDE`. Invariant: it is what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NOTHING = """
    lift_fresh_copy deg2rad rad2deg sign floor ceil round trunc frac zero fill remainder.Scalar fmod.Scalar lerp.Scalar tensor_split concat
    diff tile repeat_interleave diag_embed diag trace tril triu rot90 fliplr flipud meshgrid _unsafe_view ravel l1_loss kl_div
    conj_physical resolve_conj resolve_neg fft_fftshift fft_ifftshift
    hinge_embedding_loss margin_ranking_loss triplet_margin_loss special_ndtr
"""
_SELF = "elu hardtanh threshold angle"
_OUT = "exp2 expm1 tan special_ndtri polar linalg_cholesky inverse linalg_inv linalg_svdvals linalg_eigvalsh"
_SELF_AND_OUT = """
    sgn special_erfcx special_log_ndtr special_i0e special_i1 special_i1e amax amin prod logsumexp std std_mean norm frobenius_norm
    linalg_vector_norm linalg_norm linalg_matrix_norm copysign cumprod logcumsumexp max min median nanmedian
    cholesky_inverse det slogdet pinverse linalg_pinv linalg_solve_triangular
"""
_INDEX = "index_fill scatter scatter_add"
_SELF_AND_INDEX = "gather take"

SAVES_OF_SMALL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{f"aten.{name}": () for name in _NOTHING.split()},
        **{f"aten.{name}": ("self",) for name in _SELF.split()},
        **{f"aten.{name}": ("out",) for name in _OUT.split()},
        **{f"aten.{name}": ("self", "out") for name in _SELF_AND_OUT.split()},
        **{f"aten.{name}": ("index",) for name in _INDEX.split()},
        **{f"aten.{name}": ("self", "index") for name in _SELF_AND_INDEX.split()},
        **{f"aten.{name}": ("out1",) for name in ["sort", "topk", "kthvalue", "mode", "max.dim", "min.dim", "median.dim", "nanmedian.dim"]},
        **{f"aten.{name}": ("self", "out1") for name in ["cummax", "cummin"]},
        **{f"aten.{name}": ("self", "other", "out") for name in ["hypot", "dist"]},
        **{f"aten.{name}": ("self", "exponent", "out") for name in ["pow.Tensor_Tensor", "float_power.Tensor_Tensor"]},
        **{f"aten.{name}": ("exponent", "out") for name in ["pow.Scalar", "float_power.Scalar"]},
        **{f"aten.{name}": ("tensor1", "tensor2") for name in ["addcmul", "addcdiv"]},
        **{f"aten.{name}": ("index", "source") for name in ["index_add", "index_copy", "put"]},
        **{f"aten.{name}": ("self", "target", "weight") for name in ["nll_loss", "nll_loss2d", "nll_loss_nd", "multi_margin_loss"]},
        "aten.complex": ("real", "imag"),
        **{f"aten.{name}": ("A", "out") for name in ["linalg_det", "linalg_slogdet", "linalg_solve"]},
        **{f"aten.{name}": ("out", "out1") for name in ["linalg_eigh", "linalg_svd", "linalg_qr"]},  # and few numbers between
        "aten.logdet": ("self",),
        "aten.cholesky_solve": ("self", "input2", "out"),
        "aten.cdist": ("x1", "x2", "out"),
        "aten.masked_scatter": ("mask",),
        "aten.aminmax": ("self", "out", "out1"),
        "aten.index_reduce": ("self", "index", "source", "out"),
        "aten.scatter_reduce": ("self", "index", "src", "out"),
        "aten.ldexp": ("other", "out"),
        "aten.addmv": ("mat", "vec"),
        "aten.addr": ("vec1", "vec2"),
        "aten.addbmm": ("batch1", "batch2"),
        "aten.poisson_nll_loss": ("target",),
        "aten.cosine_embedding_loss": ("input1", "input2"),
        "aten.multilabel_margin_loss": ("self", "target"),
        "aten.pairwise_distance": ("out",),
        "aten.index": ("indices",),
        "aten.index_put": ("indices",),
    }
)

# bytes of further tensors that are kept inside, as multiples of those of an operand
KEPT_INSIDE: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "aten.l1_loss": ("self", 1.0),
        **{f"aten.{name}": ("self", 1.2) for name in ["det", "slogdet", "logdet"]},  # factors and pivots
        **{f"aten.{name}": ("A", 1.2) for name in ["linalg_det", "linalg_slogdet", "linalg_solve"]},
        "aten.linalg_svdvals": ("A", 2.0),
        "aten.linalg_eigvalsh": ("self", 1.0),
        "aten.special_ndtr": ("self", 1.0),
        "aten.kl_div": ("self", 2.0),
        "aten.hinge_embedding_loss": ("self", 1.25),
        "aten.poisson_nll_loss": ("input", 1.0),
        "aten.margin_ranking_loss": ("input1", 2.0),
        "aten.triplet_margin_loss": ("anchor", 3.0),
        "aten.multilabel_margin_loss": ("self", 1.0),
        "aten.pairwise_distance": ("x1", 1.0),
        "aten.cosine_similarity": ("x1", 2.6),
    }
)
