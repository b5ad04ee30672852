"""Which gradients are summed together."""

from __future__ import annotations

from hapx.buckets import in_buckets


def test_a_bucket_is_closed_before_it_would_exceed_its_limit() -> None:
    assert in_buckets([("a", 6), ("a", 4), ("a", 1), ("a", 9), ("a", 1)], 10) == [0, 0, 1, 1, 2]


def test_a_large_gradient_has_a_bucket_of_its_own() -> None:
    assert in_buckets([("a", 1), ("a", 30), ("a", 1)], 10) == [0, 1, 2]


def test_groups_have_buckets_of_their_own() -> None:
    assert in_buckets([("a", 5), ("b", 5), ("a", 5), ("b", 6), ("a", 1)], 10) == [0, 1, 0, 2, 3]
    assert in_buckets([], 10) == []
