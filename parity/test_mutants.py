"""The proof of the proof: every planted fault is caught by the test named for it, and that test passes without the fault."""

import pytest

from .lab import Lab
from .mutants import MUTANTS, Mutant
from .record import Record


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_named_test_catches(mutant: Mutant, lab: Lab, record: Record) -> None:
    record.caught(mutant.name, mutant.killer, mutant.run(lab).worst)
