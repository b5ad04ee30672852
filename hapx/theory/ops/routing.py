"""Routing of tokens to experts where it is local to a token or a group of tokens."""

from __future__ import annotations

from hapx.theory.registry import op

op("aten.one_hot", "self: * -> * C")
