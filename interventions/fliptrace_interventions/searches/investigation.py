"""The whole story of a pair: every experiment and search, the most informative first, within one budget.

What was not run is said. Where nothing sufficient was found, the sentence says within how many runs; it never says that
there is nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from fliptrace.judgements import (
    Arm,
    CachePartNeed,
    CoordinateResult,
    FirstCacheStep,
    Investigation,
    Judgement,
    LayerNeed,
    MinimalSet,
    Reconstruction,
    RootResult,
    Screening,
    TwoByTwo,
    Verdict,
)
from fliptrace.verdicts import RowDifference
from fliptrace_interventions.budget import Budget, BudgetSpentError
from fliptrace_interventions.edits import CacheEdit, Edit, edits_from_json
from fliptrace_interventions.journal import Journal
from fliptrace_interventions.searches.coordinates import (
    best_first,
    screen_coordinates,
    surviving_coordinates,
)
from fliptrace_interventions.searches.first_step import first_cache_step, first_differing_step
from fliptrace_interventions.searches.layers import take_cache_apart
from fliptrace_interventions.searches.minimal_set import (
    Elements,
    minimal_set,
    screen_all_together,
    single_row_set,
)
from fliptrace_interventions.searches.roots import is_sufficient, root_rows, screen_roots
from fliptrace_interventions.searches.summary import headline, summarise
from fliptrace_interventions.searches.trials import Progress, Trials
from fliptrace_interventions.searches.two_by_two import cross_cache_and_shrinks
from fliptrace_interventions.workbench import EXECUTIONS, Workbench

#: How many of the coordinates, or rows, that were sufficient in a screening are proved until one proof agrees.
PROOFS_TRIED = 3


def investigate(
    workbench: Workbench,
    *,
    budget: Budget | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> Investigation:
    """Find out what was enough to flip a pair's token.

    In this order: both reconstructions; the whole cache before the flip; cache × shrinks of the flip step; every root
    row; the coordinates of the rows that were enough; a proof of the best one; its continuations to the end of the
    answer; the other coordinates; the cache layer by layer; all rows together and a 1-minimal set; the first step at
    which the caches alone flip the token.

    Args:
        workbench: the pair on an engine.
        budget: what may be spent; None: no limit. Reconstructions are done in any case.
        progress: told (what, done, total); the total is one more than done where it cannot be known.
        journal: finished runs, to go on from; None keeps them in memory.

    Returns:
        What was found. Its judgement is SUFFICIENT where a coordinate, a root row or a set of root rows was: a cache
        that is enough says when the difference was there, not where it came from. It is VOID where nothing can be
        judged here.
    """
    trials = Trials(workbench, budget=budget, journal=journal, progress=progress)
    story = _Story(trials)
    story.tell()
    return story.investigation()


class _Story:
    """What was found so far; what is missing was not run."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.workbench = trials.workbench
        self.rows = root_rows(trials)
        self.reconstruction: tuple[Reconstruction, ...] = ()
        self.cache_substitution: Verdict | None = None
        self.two_by_two: TwoByTwo | None = None
        self.roots: tuple[RootResult, ...] = ()
        self.coordinates: tuple[CoordinateResult, ...] = ()
        self.best: CoordinateResult | None = None
        self.all_roots: tuple[Screening, ...] = ()
        self.sets: list[MinimalSet] = []
        self.layers: tuple[LayerNeed, ...] = ()
        self.parts: tuple[CachePartNeed, ...] = ()
        self.first_cache_step: FirstCacheStep | None = None
        self.continuations: tuple[Arm, ...] = ()
        self.not_covered: list[str] = []

    @property
    def flipped(self) -> bool:
        """The executions chose different tokens at the judged step."""
        reference, candidate = self.workbench.tokens
        return reference != candidate

    @property
    def reconstructed(self) -> bool:
        """Both recordings came out bit by bit."""
        return all(found.equal and found.restored_start for found in self.reconstruction)

    def tell(self) -> None:
        """Run everything."""
        self.trials.report("reconstruction", 0, 1)
        self.reconstruction = self.trials.reconstruct()
        if not self.reconstructed:
            self.not_covered.append(
                "nothing else was run: without both reconstructions no experiment says anything"
            )
            return
        if not self.flipped:
            self.not_covered.append(
                "all but root rows and coordinates: not applicable, since both executions have the same token at the "
                "judged step and there is none to reach"
            )
            self._roots()
        else:
            self._cache_before_the_flip()
            self._roots()
            self._cache_by_layer()
            self._sets()
            self._first_cache_step()
        self._say_what_was_not_tried()

    @contextlib.contextmanager
    def _within_budget(self, what: str) -> Iterator[None]:
        try:
            yield
        except BudgetSpentError as error:
            self._skip(what, str(error))

    def _skip(self, what: str, why: str) -> None:
        if why:
            self.not_covered.append(f"{what}: not run, or not to its end: {why}")

    def _cache_before_the_flip(self) -> None:
        step = self.workbench.target_step
        if step == 0:
            self.not_covered.append(
                "cache substitution, its layers, its first step and the 2 × 2: not applicable, since the first token "
                "is the judged one and nothing is cached before it"
            )
            return
        with self._within_budget("the cache before the flip"):
            self.trials.report("cache substitution", 0, 1)
            self.cache_substitution = self.trials.prove((CacheEdit(step),))
        with self._within_budget("the 2 × 2 of cache and shrinks"):
            self.two_by_two, why_not = cross_cache_and_shrinks(self.trials)
            if self.two_by_two is None:
                self.not_covered.append(f"the 2 × 2 of cache and shrinks: {why_not}")

    def _roots(self) -> None:
        self.roots, spent = screen_roots(self.trials, self.rows)
        self._skip("root rows", spent)
        enough = [root for root in self.roots if is_sufficient(root)]
        sufficient = [row for row in self.rows if any(_is_of(root, row) for root in enough)]
        self._coordinates_of(sufficient)
        self._prove_best(enough)
        self._continue_best()
        self._coordinates_of([row for row in self.rows if row not in sufficient])
        if self.best is None:
            self._prove_best([])
            self._continue_best()

    def _coordinates_of(self, rows: Sequence[RowDifference]) -> None:
        found, spent = screen_coordinates(self.trials, rows, self.roots)
        self._skip("single coordinates", spent)
        order = {(row.site.path, row.step, row.position): at for at, row in enumerate(self.rows)}
        self.coordinates = tuple(
            sorted(
                (*self.coordinates, *found),
                key=lambda c: (order[c.site, c.step, c.position], c.rank_index),
            )
        )

    def _prove_best(self, enough: Sequence[RootResult]) -> None:
        """Prove the best coordinate; where no proof agrees, the first of the rows that were sufficient."""
        chosen = best_first(self.coordinates)
        for number, coordinate in enumerate(chosen[:PROOFS_TRIED]):
            self.trials.report("proof of a coordinate", number, min(len(chosen), PROOFS_TRIED))
            try:
                verdict = self.trials.prove(edits_from_json(list(coordinate.edits)))
            except BudgetSpentError as error:
                self._skip(f"the proof of {coordinate.name}", str(error))
                self.best = coordinate
                return
            proved = dataclasses.replace(coordinate, verdict=verdict)
            self.coordinates = tuple(
                proved if known == coordinate else known for known in self.coordinates
            )
            if verdict.sufficient_directions:
                self.best = proved
                return
        if len(chosen) > PROOFS_TRIED:
            self.not_covered.append(
                f"{len(chosen) - PROOFS_TRIED} more coordinates were sufficient when screened and were not proved"
            )
        for number, root in enumerate(enough[:PROOFS_TRIED]):
            with self._within_budget(f"the proof of {root.name}"):
                self.trials.report("proof of a root row", number, min(len(enough), PROOFS_TRIED))
                verdict = self.trials.prove(edits_from_json(list(root.edits)))
                proved_root = dataclasses.replace(root, verdict=verdict)
                self.roots = tuple(proved_root if r == root else r for r in self.roots)
                if verdict.sufficient_directions:
                    return

    def _continue_best(self) -> None:
        """Continue the best coordinate, or else the best row, to the end of the answer."""
        if self.continuations:
            return
        if self.best is not None:
            self._continue(self.best.edits, _directions(self.best.screenings), "recorded")
            return
        root = next((root for root in self.roots if holds(root)), None)
        if root is not None:
            self._continue(root.edits, _directions(root.screenings), "recorded")

    def _continue(self, edits: Sequence[object], recipients: Sequence[str], between: str) -> None:
        """Continue with the recipient's own values and with the donor's, in each execution."""
        with self._within_budget("continuations to the end of the answer"):
            for recipient in recipients:
                donor = "candidate" if recipient == "reference" else "reference"
                for unedited in (True, False):
                    self.trials.report("continuations", len(self.continuations), 4)
                    arm = self.trials.continue_freely(
                        edits_from_json(list(edits)), recipient, between=between, unedited=unedited
                    )
                    values = "own values" if unedited else f"{donor}'s values"
                    named = dataclasses.replace(arm, name=f"{recipient} with {values}")
                    self.continuations = (*self.continuations, named)

    def _sets(self) -> None:
        """All rows together; a 1-minimal set of rows, and of coordinates."""
        together: tuple[tuple[str, Screening], ...] = ()
        if len(self.rows) > 1:
            together, spent = screen_all_together(self.trials, self.rows)
            self._skip("all root rows together", spent)
            self.all_roots = tuple(screening for _, screening in together)
        for recipient in EXECUTIONS:
            found = self._single_row(recipient) or self._minimised(together, recipient)
            if found is None:
                continue
            self.sets.append(found)
            if not any(
                s.recipient == recipient and s.gives_donor_token
                for coordinate in self.coordinates
                for s in coordinate.screenings
            ):
                self._take_set_apart(found)

    def _single_row(self, recipient: str) -> MinimalSet | None:
        return next(
            (
                single_row_set(root, screening, len(self.rows))
                for root in self.roots
                for screening in root.screenings
                if screening.recipient == recipient and _stands(root, screening)
            ),
            None,
        )

    def _minimised(
        self, together: Sequence[tuple[str, Screening]], recipient: str
    ) -> MinimalSet | None:
        """Shrink all rows together to a 1-minimal set, in one direction, and prove that."""
        ways = [w for w, s in together if s.recipient == recipient and s.gives_donor_token]
        if not ways:
            return None
        found, spent = minimal_set(self.trials, Elements.of_rows(self.rows), recipient, ways[0])
        self._skip("the minimal set of root rows", spent)
        if found is None:
            return None
        edits = edits_from_json(list(found.edits))
        with self._within_budget("the proof of the minimal set"):
            self.trials.report("proof of the minimal set", 0, 1)
            verdict = self.trials.prove(edits, (recipient,), between=ways[0])
            found = dataclasses.replace(found, verdict=verdict)
        if not self.continuations:
            self._continue(found.edits, (recipient,), ways[0])
        return found

    def _take_set_apart(self, found: MinimalSet) -> None:
        """Shrink the coordinates of a set of rows to a 1-minimal set."""
        chosen = [row for row in self.rows if row.name in found.names]
        elements = Elements.of_coordinates(chosen)
        if len(elements.edits) < 2:
            return
        coordinates, spent = minimal_set(self.trials, elements, found.recipient, found.between)
        self._skip("the minimal set of coordinates", spent)
        if coordinates is not None:
            self.sets.append(coordinates)

    def smallest(self, unit: str) -> MinimalSet | None:
        """The smallest set of rows, or of coordinates, that was sufficient."""
        chosen = [found for found in self.sets if found.unit == unit and holds(found)]
        return min(chosen, key=lambda found: len(found.edits), default=None)

    def _cache_by_layer(self) -> None:
        if self.workbench.target_step == 0:
            return
        apart = take_cache_apart(self.trials)
        self.layers, self.parts = apart.layers, apart.parts
        self._skip("the cache by layer", apart.spent)

    def _first_cache_step(self) -> None:
        if not self.continuations and self.cache_substitution is not None:
            recipients = [
                result.recipient
                for result in self.cache_substitution.directions
                if result.judgement in (Judgement.SUFFICIENT, Judgement.CHANGES)
            ]
            edit: Edit = CacheEdit(self.workbench.target_step)
            self._continue([edit.to_json()], recipients, "recorded")
        first = first_differing_step(self.trials)
        if first is not None:
            self.first_cache_step, spent = first_cache_step(self.trials, first)
            self._skip("the first step at which the caches flip the token", spent)

    def _say_what_was_not_tried(self) -> None:
        diff = self.workbench.pair.diff
        if not diff.same_reduction:
            self.not_covered.append(
                "root rows: none, since the executions used different reductions; their first difference is a variant "
                "of configuration, which was not substituted alone"
            )
        elif not self.rows:
            self.not_covered.append("root rows: the pair has none that survives rounding")
        if len(diff.roots) < diff.surviving_root_rows:
            self.not_covered.append(
                f"root rows: the comparison lists the first {len(diff.roots)} of {diff.surviving_root_rows}"
            )
        cut = [row for row in self.rows if len(surviving_coordinates(row)) < row.surviving]
        self.not_covered += [
            f"{row.name}: {row.surviving} coordinates survive, the first {len(surviving_coordinates(row))} were tried"
            for row in cut
        ]
        if diff.foreign_root is not None:
            self.not_covered.append(
                "a difference that entered elsewhere than in a shrink was not substituted: "
                f"{diff.foreign_root.explanation}"
            )

    def investigation(self) -> Investigation:
        """Return what was found."""
        bench, trials = self.workbench, self.trials
        step = bench.target_step
        tokens = tuple(
            (token, bench.engine.text_of([token], special=True)) for token in bench.tokens
        )
        found = Investigation(
            judgement=self._judgement(),
            sentence="",
            target_step=step,
            reference_token=tokens[0],
            candidate_token=tokens[1],
            reduction=bench.reduction,
            repeats=bench.repeats,
            shams=bench.shams,
            seed=bench.seed,
            fingerprints=(bench.reference.fingerprint(), bench.candidate.fingerprint()),
            reconstruction=self.reconstruction,
            cache_substitution=self.cache_substitution,
            roots_in_pair=bench.pair.diff.surviving_root_rows,
            roots=self.roots,
            coordinates=self.coordinates,
            best_coordinate=self.best,
            minimal_set=self.smallest("rows"),
            coordinate_set=self.smallest("coordinates"),
            layers=self.layers,
            first_cache_step=self.first_cache_step,
            two_by_two=self.two_by_two,
            continuations=self.continuations,
            runs=trials.spending.runs,
            forwards=trials.forwards,
            seconds=trials.spending.seconds,
            budget=str(trials.spending.budget),
            not_covered=tuple(dict.fromkeys(self.not_covered)),
            environment=bench.environment,
            environment_differences=bench.environment_differences,
            all_roots=self.all_roots,
            minimal_sets=tuple(self.sets),
            cache_parts=self.parts,
        )
        found = dataclasses.replace(found, sentence=headline(found))
        return dataclasses.replace(found, sentences=summarise(found))

    def _judgement(self) -> Judgement:
        if not self.reconstructed:
            return Judgement.VOID
        if self.best is not None or self.smallest("rows") is not None:
            return Judgement.SUFFICIENT
        judged = [screening.judgement for root in self.roots for screening in root.screenings]
        judged += [screening.judgement for screening in self.all_roots]
        if self.cache_substitution is not None:
            judged += [result.judgement for result in self.cache_substitution.directions]
        if judged and all(judgement is Judgement.VOID for judgement in judged):
            return Judgement.VOID
        if Judgement.CHANGES in judged:
            return Judgement.CHANGES
        return Judgement.NOT_SUFFICIENT if self.flipped else Judgement.NOT_APPLICABLE


def holds(found: RootResult | MinimalSet) -> bool:
    """Tell whether something was sufficient: by its proof, or, where there is none, by its screening."""
    if found.verdict is not None:
        return bool(found.verdict.sufficient_directions)
    return isinstance(found, MinimalSet) or is_sufficient(found)


def _stands(root: RootResult, screening: Screening) -> bool:
    """Tell whether a row was sufficient in a screening's direction: by its proof there, else by the screening."""
    if root.verdict is None:
        return screening.gives_donor_token
    return any(
        result.recipient == screening.recipient and result.judgement is Judgement.SUFFICIENT
        for result in root.verdict.directions
    )


def _is_of(root: RootResult, row: RowDifference) -> bool:
    return (root.site, root.step, root.position) == (row.site.path, row.step, row.position)


def _directions(screenings: Sequence[Screening]) -> tuple[str, ...]:
    return tuple(s.recipient for s in screenings if s.gives_donor_token)
