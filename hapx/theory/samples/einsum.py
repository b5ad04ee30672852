"""Einstein summation and the products that are one."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Draw, Sample, sample, t

EQUATIONS: tuple[tuple[str, tuple[Draw, ...]], ...] = (
    ("bi,oi->bo", (t(4, 6), t(5, 6))),
    ("gtc,gtm->gcm", (t(4, 3, 2), t(4, 3, 5))),
    ("bi,ij,bj->b", (t(4, 3), t(3, 2), t(4, 2))),
    ("...i,io->...o", (t(2, 3, 4), t(4, 5))),
    ("...a,...b", (t(2, 4), t(3, 1, 5))),
    ("i...->", (t(4, 3, 2),)),
    ("ba", (t(4, 6),)),
    ("iij,kj->ki", (t(4, 4, 6), t(3, 6))),
    ("ij,ij->ij", (t(4, 6), t(4, 1))),
    ("bh,bh->h", (t(4, 6), t(4, 6, grad=False))),
)


def contractions() -> Iterator[Sample]:
    """Einsum by equation, then the named products."""
    for equation, draws in EQUATIONS:
        yield sample("einsum", equation=equation, tensors=list(draws))
    for name in ("outer", "ger"):
        yield sample(name, self=t(4), vec2=t(6))
    yield sample("inner", self=t(3, 4), other=t(5, 4))
    yield sample("inner", self=t(4), other=t(2, 3, 4))
    yield sample("inner", self=t(4), other=t(4))
    yield sample("inner", self=t(4, 3), other=t())
    yield sample("tensordot", self=t(4, 2, 3), other=t(3, 5, 2), dims_self=(1, -1), dims_other=(2, 0))
    yield sample("tensordot", self=t(4, 2), other=t(3), dims_self=(), dims_other=())
    yield sample("linalg_multi_dot", tensors=[t(4, 3), t(3, 2), t(2, 5)])
    yield sample("linalg_multi_dot", tensors=[t(3), t(3, 4), t(4)])
    yield sample("chain_matmul", matrices=[t(4, 3), t(3, 2), t(2, 5)])
    yield sample("bilinear", input1=t(4, 2), input2=t(4, 3), weight=t(5, 2, 3), bias=t(5))
    yield sample("bilinear", input1=t(2, 3, 2), input2=t(2, 3, 4), weight=t(3, 2, 4), bias=None)
    yield sample("kron", self=t(2, 3), other=t(4, 2))
    yield sample("kron", self=t(3), other=t(2, 4))
    yield sample("kron", self=t(2, 3), other=t(2))
