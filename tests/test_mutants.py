"""Which mutants `make mutants` makes, and that tests which notice one are seen to."""

from collections import Counter
from textwrap import dedent

import pytest

import mutants
import reach
from mutants import TESTS, Kind, Mutant, Noticed, Suite, chosen, examine

SOURCE = dedent('''\
    """Says 1 + 1."""
    from typing import Literal

    LIMIT: Literal[7] = 7  # ä

    def f(a: int = 3, *, flag=False) -> "Literal[9]":
        """Is 2 < 3."""
        a -= "ä" * LIMIT
        if a < 5 and not flag:
            return [b for b in a if b in (a
                - 10)]
        while a is None:
            a = 1 if flag else f"{a + 1}"
        match a:
            case 8:
                return None
''')


def changes(kind: Kind) -> set[tuple[int, str, str]]:
    return {(one.line, one.before, one.after) for one in mutants.mutants(SOURCE) if one.kind is kind}


def test_operators_are_swapped_for_their_neighbours():
    assert changes(Kind.OPERATOR) == {
        (8, 'a -= "ä" * LIMIT', "a += 'ä' * LIMIT"),
        (8, '"ä" * LIMIT', "('ä' // LIMIT)"),
        (9, "a < 5 and not flag", "(a < 5 or not flag)"),
        (9, "a < 5", "(a <= 5)"),
        (9, "not flag", "(flag)"),
        (10, "b in (a - 10)", "(b not in a - 10)"),
        (10, "a - 10", "(a + 10)"),
        (12, "a is None", "(a is not None)"),
    }


def test_numbers_grow_by_one_where_they_are_used():
    assert changes(Kind.BOUND) == {
        (4, "7", "8"),
        (6, "3", "4"),
        (9, "5", "6"),
        (11, "10", "11"),
        (13, "1", "2"),
        (15, "8", "9"),
    }


def test_branches_are_turned_round_and_results_left_out():
    assert changes(Kind.BRANCH) == {
        (9, "a < 5 and not flag", "(not (a < 5 and (not flag)))"),
        (10, "b in (a - 10)", "(not b in a - 10)"),
        (12, "a is None", "(not a is None)"),
        (13, "flag", "(not flag)"),
    }
    assert changes(Kind.RESULT) == {(10, "[b for b in a if b in (a - 10)]", "None")}


@pytest.mark.parametrize("name", TESTS)
def test_each_is_one_change_of_code_that_leaves_the_lines_where_they_are(name):
    source = (reach.ROOT / "src" / "dryfit" / name).read_text("utf-8")
    found = mutants.mutants(source)
    assert {one.kind for one in found} == set(Kind)
    lines = source.splitlines()
    for one in found:
        now = one.source.splitlines()
        assert one.source != source and len(now) == len(lines)
        assert now[: one.line - 1] == lines[: one.line - 1] and now[one.line - 1] != lines[one.line - 1]


def mutant(kind: Kind, line: int) -> Mutant:
    return Mutant(kind, line, "a", "b", "")


def test_kinds_are_drawn_evenly_and_again_the_same():
    found = [mutant(kind, line) for kind, many in zip(Kind, (30, 20, 10, 1), strict=True) for line in range(many)]
    some = chosen(found, 8, 0)
    assert Counter(one.kind for one in some) == {Kind.OPERATOR: 3, Kind.BOUND: 2, Kind.BRANCH: 2, Kind.RESULT: 1}
    assert some == chosen(found, 8, 0) != chosen(found, 8, 1)
    assert [one.line for one in some] == sorted(one.line for one in some)
    assert len(chosen(found, 1000, 0)) == len(found)


@pytest.mark.parametrize("name", TESTS)
def test_the_files_of_a_module_reach_it_and_start_no_processes(name):
    module = f"dryfit.{name.removesuffix('.py').replace('/', '.')}"
    for file in TESTS[name]:
        found = reach.reach(reach.TESTS / file)
        assert module in found.modules and not found.starts_processes


@pytest.mark.slow
@pytest.mark.heavy
def test_each_mutant_stands_in_the_copy_while_the_tests_run(monkeypatch, tmp_path):
    monkeypatch.setenv("DRYFIT_FULL", "1")  # whoever starts it may have set it
    module, test = tmp_path / "src" / "module.py", tmp_path / "tests" / "test_module.py"
    test.parent.mkdir()
    module.parent.mkdir()
    module.write_text("ONE, TWO = 1, 2\n")
    test.write_text(
        dedent("""\
            import os
            import pytest
            from module import ONE, TWO

            def test_daily():
                assert ONE == 1

            @pytest.mark.nightly
            def test_nightly():
                assert TWO == 2 and os.environ["DRYFIT_FULL"]
        """)
    )
    sources = ("ONE, TWO = 2, 2\n", "ONE, TWO = 1, 3\n")
    suite = Suite(tmp_path, ("test_module.py",), 0)
    results = examine(suite, module, [Mutant(Kind.BOUND, 1, "", "", source) for source in sources])
    assert [noticed for _, noticed in results] == [Noticed.DAILY, Noticed.NIGHTLY]
    assert module.read_text() == "ONE, TWO = 1, 2\n"
    module.write_text("while True: pass\n")
    assert not suite.passes(nightly=False, limit_s=2)
