"""Functions of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Draw, Reason, Sample, Values, sample, t, words


def definite(*shape: int) -> Draw:
    """Symmetric and positive definite matrices."""
    return t(*shape, values=Values.DEFINITE)


def matrices() -> Iterator[Sample]:
    for name in words("linalg_cholesky cholesky_inverse inverse linalg_matrix_exp matrix_exp det logdet pinverse"):
        yield sample(name, self=definite(4, 3, 3))
    for name in words("linalg_matrix_power matrix_power"):
        yield sample(name, self=definite(4, 3, 3), n=2)
    for name in words("linalg_inv linalg_det linalg_svdvals"):
        yield sample(name, A=definite(4, 3, 3))
    yield sample("slogdet", Reason.ZERO_GRADIENT, self=definite(4, 3, 3))  # of the sign
    yield sample("linalg_slogdet", Reason.ZERO_GRADIENT, A=definite(4, 3, 3))
    for name in words("linalg_eigvalsh linalg_eigh linalg_pinv.atol_rtol_float"):
        yield sample(name, self=definite(4, 3, 3))
    yield sample("linalg_pinv", self=definite(4, 3, 3), rcond=1e-12)
    yield sample("linalg_inv", A=definite(3, 3))
    yield sample("linalg_svd", A=t(4, 5, 3), full_matrices=False)
    yield sample("linalg_qr", A=t(4, 5, 3))


def solutions() -> Iterator[Sample]:
    yield sample("linalg_solve", A=definite(4, 3, 3), B=t(4, 3, 6))
    yield sample("linalg_solve", A=definite(3, 3), B=t(4, 3, 6))
    yield sample("linalg_solve", A=definite(4, 3, 3), B=t(4, 3))
    yield sample("linalg_solve", A=definite(3, 3), B=t(3))
    yield sample("linalg_solve", A=definite(4, 3, 3), B=t(4, 6, 3), left=False)
    yield sample("linalg_solve_triangular", self=definite(4, 3, 3), B=t(4, 3, 6), upper=False)
    yield sample("linalg_solve_triangular", self=definite(3, 3), B=t(6, 3), upper=True, left=False)
    yield sample("cholesky_solve", self=t(4, 3, 6), input2=definite(4, 3, 3))
