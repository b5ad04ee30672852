"""Functions of whole matrices: factors, inverses, determinants, solutions. Matrices of a batch are independent of each other."""

from __future__ import annotations

from collections.abc import Callable

from hapx.theory.registry import Context, op


def _of_matrix(results: str) -> Callable[[Context], str]:
    """The signature of a function of one matrix, whatever its argument is called."""

    def signature(context: Context) -> str:
        """The matrices of a batch."""
        name = next(name for name, _ in context.call.args)
        return f"{name}: * N M -> {results}"

    return signature


op(
    "aten.linalg_cholesky aten.cholesky_inverse aten.linalg_inv aten.inverse aten.linalg_matrix_exp aten.matrix_exp"
    " aten.linalg_matrix_power aten.matrix_power",
    _of_matrix("* N M"),
)
op("aten.linalg_pinv.atol_rtol_float aten.linalg_pinv.default aten.pinverse", _of_matrix("* M N"))
op("aten.linalg_det aten.det aten.logdet", _of_matrix("*"))
op("aten.linalg_slogdet aten.slogdet", _of_matrix("*, *"))
op("aten.linalg_eigvalsh aten.linalg_svdvals", _of_matrix("* K"))
op("aten.linalg_eigh", _of_matrix("* K, * N M"))
op("aten.linalg_svd", _of_matrix("* N K, * L, * I M"))
op("aten.linalg_qr", _of_matrix("* N K, * K M"))


def solve_signature(context: Context) -> str:
    """The right sides of an equation, and the matrices of a batch."""
    matrix, right = context.operands
    first = next(name for name, _ in context.call.args)
    vectors = context.call.op == "aten.linalg_solve" and (len(right.shape) == 1 or right.shape == matrix.shape[:-1])
    sides = "* N" if vectors else "* N k" if context.call["left"] else "* k N"
    return f"{first}: * N M, B: {sides} -> {sides}"


op("aten.linalg_solve aten.linalg_solve_triangular", solve_signature, linear="B")
op("aten.cholesky_solve", "self: * N k, input2: * N M -> * N k", linear="self")
