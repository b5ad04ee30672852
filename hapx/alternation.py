"""The alternation of synthesis and balancing (`hapx.turns`) from several starts on one mesh (`hapx.starts`), with what comes before and after it:
starts that a bound shows to be hopeless are left out; where nothing fits, what needs least memory is looked for; where memory binds, strategies by
name, ratios as far as peaks allow, and lengths near the best ones.

In: a setting, the theory of its graph on a mesh. Out: candidates. Invariant: those of `hapx.turns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf

import numpy as np

from hapx.balancer.descent import descend
from hapx.balancer.rounding import Lengths
from hapx.by_peaks import around
from hapx.cluster.spec import ClusterSpec
from hapx.cost.exposed import ALL, NONE, Exposed
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.errors import InsufficientMemoryError, PlanError, kept, nearest
from hapx.lower import Candidate, at_their_best
from hapx.plan import Mesh
from hapx.progress import Teller
from hapx.restriction import AUTO, BASELINES
from hapx.setting import Counters, Setting
from hapx.starts import carried
from hapx.states import Row
from hapx.synth.search import HOPELESS, least
from hapx.theory.triple import Theory
from hapx.turns import STALLED, UNLIKELY, Turns

SLIGHT = 1e-4  # relative improvement for which a program that is not proven is not taken
NEEDLESS = 1.03  # what costs that much more than it may on a needless mesh is not begun with again from elsewhere
ROUGH = 3e-3  # relative distance from the optimum at which searches from further starts end, on one axis: that of the best one is made to the end
MUCH = 20_000  # partial programs, after which a problem is not also searched as strategies by name:
BY_NAME = ("tensor-parallel", "zero")
NAMED = 3  # programs of each of them that are candidates
FAR = 1.3  # times what would be fastest without limits
ROUNDS = 4  # around the best lengths, each from better ones
DESCENTS = 3  # of the best programs whose ratios peaks limit, each followed by an alternation; of one that is not small, 1
ROUGHLY = 1.002  # times what may be used: what is estimated to need more is not looked at
NEAR = 0.01  # `Setting.within` above which ratios need not be that good


def needless(mesh: Mesh, cluster: ClusterSpec) -> bool:
    """Whether a mesh has several axes where there is one machine."""
    return len(mesh.axes) > 1 and len(cluster.machines) == 1


class Alternation(Turns):
    """From all starts. before, costs: as in `Turns`."""

    def __init__(
        self, setting: Setting, theory: Theory, counters: Counters, told: Teller, before: Candidate | None = None, costs: CostModel | None = None
    ):
        super().__init__(setting, theory, counters, told, before, costs)
        self.old = carried(setting.old, setting.key, theory, self.costs) if setting.old is not None else None
        self._generated = counters.search.generated  # partial programs, before
        self.named: dict[str, Alternation] = {}  # strategies by name that were looked at

    def close(self) -> None:
        super().close()
        for other in self.named.values():
            other.close()

    def candidates(self, known: float) -> list[Candidate]:
        """All pairs of program and lengths that were met and fit. known: cost of the best candidate of other views; none where the bound says that
        nothing comes near it."""
        self._meet(known)
        if self.free and self.found and self.setting.within <= NEAR and self.best().cost <= UNLIKELY * min(known, self.setting.beside):
            self.descend(known)
        return [*self.found.values(), *([self.old] if self.old is not None and self.found else [])]

    def _meet(self, known: float) -> None:
        """From all starts."""
        failures: list[InsufficientMemoryError] = []
        away = 0.0
        self.problem.brief = self._hurried(known)
        if self.old is not None:
            with suppress(InsufficientMemoryError):
                self.alternate(self.starts.by_kind(self.old.shares), known, self.old.lengths)
        for ratios in self.starts.usual():
            times = self._least_times(ratios, known)
            if times > HOPELESS:
                away = times
                continue
            try:
                self.alternate(ratios, known)
            except InsufficientMemoryError as error:
                failures = failures or [kept(error)]
        if self.prices is not None and self.free and self.setting.start is None and not self.small:
            with suppress(InsufficientMemoryError):
                self.alternate(self.starts.by_memory(), known)
        if not self.found:
            if not failures and self.rejected is None:
                self.hopeless = away
                return
            try:
                self._squeeze(known)
            except InsufficientMemoryError as error:
                failures = [kept(error)]
        segments = self.setting.graph.segments > 1 and not self.setting.given
        several = self.free and (self.setting.start is None or segments) and self.small
        early = not (self.found and self.small)
        if early and not self._far(min(known, self.setting.beside)):
            self._by_name(known)
        if not self.found:
            assert failures, "why nothing was found"
            raise nearest(failures)
        self._by_beams(known)
        if several:
            self._further(known)
        self.problem.brief = False
        if self._hurried(known) and self.best().cost < known:
            self._once_more(known)
        if several and not early:
            self._by_name(known)

    def descend(self, known: float) -> None:
        """Where memory limits ratios: those of the best programs at which their peaks just fit (`hapx.balancer.descent`), and what is found from
        there."""
        looked: set[int] = set()
        for _ in range(DESCENTS if self.small else 1):
            before = self.best().cost
            for candidate in at_their_best(self.found.values())[:NAMED]:
                if id(candidate.program) not in looked and candidate.cost <= UNLIKELY * before:
                    looked.add(id(candidate.program))
                    self._downhill(candidate)
            best = self.best()
            if best.cost >= (1 - STALLED) * before:
                return
            with suppress(InsufficientMemoryError):  # what was found fits
                self.alternate(self.starts.by_kind(best.shares), known, {c: best.lengths[c] for c in self.goal_of(best)[1].cuts})

    def _downhill(self, candidate: Candidate) -> None:
        """Keeps a candidate also at ratios that are better and fit, if there are any and memory may have limited its own."""
        solution, goal = self.goal_of(candidate)
        if not self.binds and self.fitting.spares(goal.memory(self.shares(candidate.lengths, goal.cuts))):
            return
        movable = [c for c in goal.cuts if c not in self.fixed]

        def deal(ratios: Mapping[Row, Vector]) -> Lengths:
            dealt = self.lengths(ratios)
            return {**candidate.lengths, **{c: dealt[c] for c in movable}}

        estimated = self.fitting.estimate(solution, candidate.lengths, goal.cuts) if self.small else None
        usable = self.fitting.capacity * ROUGHLY

        def fits(own: Lengths) -> bool:
            return (estimated is None or bool((estimated(own) <= usable).all())) and self.fitting.holds(solution, own)

        start, lengths = self.starts.by_kind(candidate.shares), dict(candidate.lengths)
        ratios, lengths = descend(start, lengths, self.kinds, movable, deal, lambda own: goal.time(self.shares(own, goal.cuts)), fits)
        if lengths != candidate.lengths:
            self.keep(solution, goal, lengths, ratios)

    def _far(self, known: float) -> bool:
        """Whether nothing was found that comes near `known` seconds."""
        return known < inf and (not self.found or self.best().cost > HOPELESS * known)

    def _hurried(self, known: float) -> bool:
        """Whether searches are to be short, as another view is known and this one is needless."""
        return known < inf and needless(self.theory.mesh, self.setting.cluster)

    def _squeeze(self, known: float) -> None:
        """Where nothing was found that fits: the program and the lengths of the least peak, if they fit, and what is found from there. Raises
        InsufficientMemoryError."""
        tight = self.tightest
        candidate = self.keep(tight.solution, self.goal(tight.solution), tight.lengths, tight.ratios)
        if candidate is None:
            raise self.fitting.too_small(tight.solution, tight.lengths)
        with suppress(InsufficientMemoryError):  # the candidate fits
            self.alternate(dict(tight.ratios), known, tight.lengths, limits=self.fitting.limits)

    def fits(self) -> InsufficientMemoryError | None:
        """Whether a program fits; the error if none was found."""
        tight = self.tightest
        return self.fitting.too_small(tight.solution, tight.lengths) if tight.part > 1 else None

    def _least_times(self, ratios: Mapping[Row, Vector], known: float) -> float:
        """How many times `known` seconds of a program of another view every program at these ratios takes, at least: where that is hopeless, even if
        no sum of gradients counted, as the simulator may hide those. 0 where nothing is known, or these ratios were looked at."""
        lengths = self.lengths(ratios)
        if known == inf or self.at(lengths) in self.searched:
            return 0.0
        shares = self.costs.lengths_to_shares(lengths)
        times = least(self.problem, shares) / known
        if times > HOPELESS:
            self.problem.exposed = NONE
            times = least(self.problem, shares) / known
            self.problem.exposed = ALL
        return times

    def _further(self, known: float) -> None:
        """From more starts, as far as they lead somewhere."""
        most = NEEDLESS if self._hurried(known) else HOPELESS if self.prices is None else UNLIKELY
        if self.best().cost > min(most * known, UNLIKELY * self.setting.beside):
            return
        self.budget = None  # where memory binds, prices of it tell well enough where a start leads
        before, several = self.best(), len(self.theory.mesh.axes) > 1
        # a short search tells where a start leads; only where that is the best, one is made to the end
        self.problem.brief = self.prices is None and (several or before.gap > STALLED)
        self.problem.rough = 0.0 if several or self.prices is not None else ROUGH
        # what is begun with as it is, is as it was rounded and improved; on one axis, where a search costs little, first as it is rounded
        for improved in (True,) if several else (False, True):
            for start in self.starts.beyond(self.best, lambda: self.prices is not None):
                now = self.best()
                shares, least = self.starts.by_kind(now.shares), min(known, now.cost)
                alike = {row for row, own in start.items() if row in shares and np.array_equal(own, shares[row])} if improved else ()
                as_now = {c: own for c, own in now.lengths.items() if c.row in alike}
                with suppress(InsufficientMemoryError):  # something else fits
                    self.alternate(start, least, as_now, above=HOPELESS * least)
        for ratios in (self.starts.usual()[0], self.starts.by_kind(self.best().shares)):
            lengths, least = self.levelled(ratios), min(known, self.best().cost)
            if lengths is not None:
                with suppress(InsufficientMemoryError):  # something else fits
                    self.alternate(ratios, least, lengths, above=HOPELESS * least)
        self.problem.brief, self.problem.rough = self._hurried(known), 0.0
        # what a search did not solve to the end at the first shares, it hardly does at others
        if self.prices is None and before.gap <= STALLED:
            self._prove(before, known)

    def _by_beams(self, known: float) -> None:
        """In problems that are not small: where what was found is far slower than what does not fit, sums may have missed what is between them, so
        beams that know peaks look for it."""
        if not (self.beamable and self.free and self.binds) or self.least() <= FAR * self.cheapest:
            return
        before, begin = self.least(), self.lengths(self.starts.usual()[0]) | dict(self.best().lengths)
        for lengths in (begin, self.lengths(dict.fromkeys(self.starts.rows, self.starts.even))):
            self.by_peaks(lengths, 1.0, known)
        if self.least() < before:
            best = self.best()
            with suppress(InsufficientMemoryError):  # what was found fits
                self.alternate(self.starts.by_kind(best.shares), known, best.lengths)

    def _by_name(self, known: float) -> None:
        """Where memory binds, what strategies by name find: their searches have so few programs that they see some that are passed over here. From
        the best of them on, everything is allowed again."""
        setting, rule, spent = self.setting, self.setting.rule, self.counters.search.generated - self._generated
        plain = self.free and setting.start is None and not (setting.graph.segments > 1 or setting.given or setting.within)
        if not plain or (rule.split, rule.storage, rule.sfb) != (AUTO.split, AUTO.storage, AUTO.sfb):
            return
        if (self.found and (not self.binds or (self.small and spent > MUCH))) or not self.possible():
            return
        for name in BY_NAME:
            known_as = BASELINES[name]
            own = replace(rule, split=known_as.split, storage=known_as.storage, sfb=known_as.sfb)
            before = self.least()
            with suppress(InsufficientMemoryError, PlanError):  # something else may fit
                other = Alternation(replace(self.setting, rule=own, old=None), self.theory, self.counters, self.told, costs=self.costs)
                other.beams = other.beamable = False  # of fewer programs than here
                self.named[name] = other
                other._meet(min(known, before))
                self._take(name, other)
                best = self.best()
                if best.cost < before:
                    self.alternate(self.starts.by_kind(best.shares), known, best.lengths)

    def _take(self, name: str, other: Alternation) -> None:
        """Keeps the best of what a strategy by name has found."""
        self.goals |= other.goals
        for found in at_their_best(other.found.values())[:NAMED]:  # of which the simulator may like another one than the cheapest
            lengths = self.lengths(self.starts.by_kind(found.shares)) | dict(found.lengths)  # of all cuts that there are here
            bound = least(self.problem, self.costs.lengths_to_shares(lengths))  # what is proven there is of fewer programs
            self.found[name, id(found.program)] = replace(found.proven(bound), lengths=lengths)

    def _prove(self, before: Candidate, known: float) -> None:
        """Searches to the end where short searches have found the best program; unless that is hardly better than `before`, of which more is proven:
        then it is dropped."""
        found = self.best()
        if found.gap <= before.gap:
            return
        if found.cost < (1 - SLIGHT) * before.cost:
            self._once_more(known)
        else:
            self.found = {key: c for key, c in self.found.items() if c.gap <= before.gap or c.cost >= before.cost}

    def _once_more(self, known: float) -> None:
        """From the best candidate, although its lengths were searched before."""
        found = self.best()
        self.searched.discard(self.at(found.lengths))
        with suppress(InsufficientMemoryError):  # what was found fits
            self.alternate(self.starts.by_kind(found.shares), known, found.lengths)

    def around(self) -> list[Candidate]:
        """Candidates that beams find at lengths near the best ones, where memory binds. For the best view only."""
        if not (self.beams and self.binds and self.free and self.found):
            return []
        known, movable = set(self.found), [c for c in self.cuts if c not in self.fixed]
        shares = self.starts.even, self.starts.speed
        for _ in range(ROUNDS):
            best = self.best()
            for lengths in around(best.lengths, self.kinds, movable, shares):
                self.by_peaks(lengths, 1.0)
                for name, other in self.named.items():  # of fewer programs beams see other ones
                    other.by_peaks(lengths, 1.0, self.least())
                    if other.least() < self.least():
                        self._take(name, other)
                if self.least() < (1 - STALLED) * best.cost:
                    break
            else:
                break
        return [candidate for key, candidate in self.found.items() if key not in known]

    def from_even_shares(self) -> list[Candidate]:
        """Candidates from even shares, where `Starts.usual` left them out because a search on several axes costs more. For the best view only."""
        even = self.starts.even
        if not self.free or self.setting.start is not None or len(self.theory.mesh.axes) == 1 or np.allclose(even, self.starts.speed):
            return []
        known = set(self.found)
        with suppress(InsufficientMemoryError):  # something else fits
            self.alternate(dict.fromkeys(self.starts.rows, even), inf)
        return [candidate for key, candidate in self.found.items() if key not in known]

    def exposing(self, part: Exposed, above: float) -> list[Candidate]:
        """The program that is best where only this part of the sums of gradients counts (see `hapx.overlap`), at the best ratios so far (where none
        counts: at those where everything begins), and at its own. None where the bound says that all programs take more than `above` then. What
        is known of all sums stays as it is."""
        start = self.starts.by_kind(self.best().shares) if any(part) else self.starts.usual()[0]
        known = self.found, self.searched, self.prices, self.fitting.limits, list(self.problem.programs)
        self.found, self.searched, self.problem.exposed = {}, set(), part
        try:
            with suppress(InsufficientMemoryError):  # something else fits
                self.alternate(start, inf, above=above, most=1)
            return list(self.found.values())
        finally:
            self.found, self.searched, self.prices, self.fitting.limits, self.problem.programs = known
            self.problem.exposed = ALL
