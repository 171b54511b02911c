"""Delta debugging keeps what the gain needs and nothing else."""

from __future__ import annotations

import itertools

import pytest

from optimizer.minimise import apply_hunks, hunks_of, minimise

BEFORE = {"a.py": "one\ntwo\nthree\nfour\nfive\n", "b.py": "x = 1\n"}
AFTER = {"a.py": "ONE\ntwo\nthree\nFOUR\nfour and a half\nfive\n", "b.py": "x = 1\ny = 2\n", "c.py": "new\n"}


def test_any_subset_of_hunks_can_be_put_together():
    hunks = hunks_of(BEFORE, AFTER)
    assert len(hunks) == 4
    assert apply_hunks(BEFORE, hunks) == AFTER and apply_hunks(BEFORE, []) == BEFORE
    only_second = apply_hunks(BEFORE, [hunks[1]])
    assert only_second == {**BEFORE, "a.py": "one\ntwo\nthree\nFOUR\nfour and a half\nfive\n"}


def test_removed_files_are_refused():
    with pytest.raises(ValueError, match=r"b\.py"):
        hunks_of(BEFORE, {"a.py": ""})


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {1, 2, 3}, {0, 4, 9}, set(range(10)), {5, 6}])
def test_only_what_is_needed_stays(needed):
    kept = minimise(range(10), lambda subset: needed <= set(subset))
    assert set(kept) == needed and kept == sorted(kept)


def test_the_result_is_minimal_even_where_subsets_interact():
    """Works with {0, 1}, or with {4} and anything else: whatever is returned, no single hunk can go."""

    def works(subset) -> bool:
        s = set(subset)
        return {0, 1} <= s or (4 in s and len(s) >= 2)

    kept = minimise(range(8), works)
    assert works(kept)
    assert not any(works(c) for c in itertools.combinations(kept, len(kept) - 1))


def test_no_subset_is_tested_twice_and_the_budget_holds():
    asked: list[tuple[int, ...]] = []

    def test(subset) -> bool:
        asked.append(tuple(subset))
        return {2, 13} <= set(subset)

    assert set(minimise(range(16), test)) == {2, 13}
    assert len(asked) == len(set(asked))
    full = len(asked)
    asked.clear()
    partial = minimise(range(16), test, budget=5)
    assert len(asked) == 5 < full and {2, 13} <= set(partial)
