"""Slices of machines: aligned, and any order of them packs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hapx.stages.slices import full, key, members, places, same_take, takes

machines = st.lists(st.sampled_from("ab"), min_size=1, max_size=8).map(tuple)


def test_slices_are_aligned_powers_of_two() -> None:
    assert list(places(("a",) * 6, full(("a",) * 6))) == [*((i, 1) for i in range(6)), (0, 2), (2, 2), (4, 2), (0, 4)]
    assert list(places(("a",), 1)) == []  # a whole machine is no slice
    assert members(0b1011) == (0, 1, 3)


@given(st.integers(2, 16), st.randoms(use_true_random=False))
def test_any_order_of_slices_packs_in_a_machine_of_equal_devices(size: int, random) -> None:
    types, free = ("a",) * size, full(("a",) * size)
    while free:
        sizes = {len(t.types): t for t in takes(types, free)}
        left = free.bit_count()
        assert sorted(sizes) == [1 << k for k in range(5) if 1 << k <= left and 1 << k < size]  # whatever fits by its size can be taken
        take = sizes[random.choice(sorted(sizes))]
        taken = members(take.devices)
        assert taken == tuple(range(taken[0], taken[0] + len(taken))) and taken[0] % len(taken) == 0
        assert take.devices & free == take.devices and take.rest == free & ~take.devices
        free = take.rest


def _sequences(types: tuple[str, ...], free: int, reduced: bool) -> set[tuple[tuple[str, ...], ...]]:
    """Every order of slices that uses a machine up."""
    if not free:
        return {()}
    found = set()
    for taken, rest in [(t.types, t.rest) for t in takes(types, free)] if reduced else _all(types, free):
        found |= {(taken, *others) for others in _sequences(types, rest, reduced)}
    return found


def _all(types: tuple[str, ...], free: int) -> list[tuple[tuple[str, ...], int]]:
    return [(tuple(sorted(types[s : s + w])), free & ~(((1 << w) - 1) << s)) for s, w in places(types, free)]


@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=5).map(tuple))
def test_one_slice_per_kind_is_enough(types: tuple[str, ...]) -> None:
    assert _sequences(types, full(types), True) == _sequences(types, full(types), False)


@given(machines, st.randoms(use_true_random=False))
def test_equal_keys_allow_equal_slices(types: tuple[str, ...], random) -> None:
    """What a machine's state stands for can be followed on any machine in an equal state."""
    free = other = full(types)
    while found := takes(types, free):
        take = random.choice(found)
        same = same_take(types, other, take.types, key(types, take.rest))
        free, other = take.rest, same.rest
        assert key(types, free) == key(types, other)


def test_slices_of_a_mixed_machine_follow_its_own_order() -> None:
    types = ("a", "a", "b", "b")
    assert {t.types for t in takes(types, full(types))} == {("a",), ("b",), ("a", "a"), ("b", "b")}
    types = ("a", "b", "a", "b")
    assert {t.types for t in takes(types, full(types))} == {("a",), ("b",), ("a", "b")}
