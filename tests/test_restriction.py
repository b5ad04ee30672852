"""What a user may say of the space of programs, and what is refused: a misspelt word would restrict nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from hapx.errors import HapError
from hapx.plan import Form
from hapx.restriction import AUTO, BASELINES, CHOICES, FORMS, Restriction, restriction


def test_names_and_restrictions() -> None:
    assert restriction("auto") is AUTO
    own = Restriction("own", ratios=(3.0, 1.0), segments=("encoder",), forms=frozenset({"grouped"}), max_stages=2)
    assert restriction(own) is own
    assert all(restriction(name) == rule for name, rule in BASELINES.items())


def test_the_words_are_those_of_the_types() -> None:
    hints = get_type_hints(Restriction)
    for name, words in CHOICES.items():
        parts = [hints[name], *get_args(hints[name])]
        assert set(words) == {w for part in parts for w in get_args(part) if isinstance(w, str)}, name
    assert set(FORMS) == {f.value for f in Form} - {"none"}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ratios": ({"ratios": "sped"}, "restriction: ratios='sped'; allowed: 'balanced', 'even', 'speed', shares, .*; did you mean 'speed'"),
    "storage": ({"storage": "zero3"}, "restriction: storage='zero3'; allowed: 'auto', 'as-used', 'sharded'"),
    "split": ({"split": "rows"}, "restriction: split='rows'; allowed: 'auto', 'batch', 'model'$"),
    "sfb": ({"sfb": True}, "restriction: sfb=True; allowed: 'auto', 'never', 'always'"),
    "remat": ({"remat": "all"}, "restriction: remat='all'; allowed: 'auto', 'none', 'blocks'"),
    "segments": ({"segments": 0}, "restriction: segments=0; allowed: 'auto', 'none', a number from 1 on, paths of modules"),
    "forms": ({"forms": frozenset({"pad"})}, "restriction: forms='pad'; allowed: one or more of 'padded', 'grouped', 'point_to_point'; did you mean"),
    "no form": ({"forms": frozenset()}, r"restriction: forms=set\(\); allowed: one or more of"),
    "stages": ({"max_stages": 0}, "restriction: max_stages=0; allowed: a number from 1 on"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_means_nothing_is_refused(name: str) -> None:
    fields, message = WRONG[name]
    with pytest.raises(HapError, match=message):
        restriction(replace(AUTO, **fields))
