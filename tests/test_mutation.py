"""The list of mutants keeps up with the package: every named one has its place, every excuse its file."""

import mutation
import pytest


def test_every_named_mutant_has_its_place() -> None:
    found = mutation.named_mutants()  # SystemExit names the one that has none
    assert len(found) == len(mutation.NAMED)
    for mutant in found:
        compile(mutant.text, mutant.file, "exec")


@pytest.mark.parametrize(("file", "pattern", "why"), mutation.EQUIVALENT)
def test_what_is_called_equivalent_is_there_to_be_changed(file: str, pattern: str, why: str) -> None:
    """An excuse that matches nothing is dropped; one that matches all of a file excuses too much."""
    drawn = mutation.drawn_from(file)
    matched = [mutant for mutant in drawn if mutation.excused(mutant, pattern)]
    assert 0 < len(matched) < len(drawn)
