"""Collects checks while a test runs, fails it with the first divergence, and prints the table of the session."""

import dataclasses

from pi05.compare import Check, first_failure


@dataclasses.dataclass(frozen=True)
class Row:
    """The checks of one test, in execution order."""

    level: str
    subject: str
    checks: tuple[Check, ...]

    @property
    def worst(self) -> Check:
        return max(self.checks, key=lambda check: check.margin)


class Record:
    """The checks of a session. `settle` closes a test: it keeps the checks and raises if one failed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.mutants: list[tuple[str, str, Check]] = []

    def settle(self, level: str, subject: str, checks: list[Check]) -> None:
        """Judges the checks of one test, given in execution order.

        Raises:
            AssertionError: a check failed (the first one is named, and how many followed), or there was nothing to check.
        """
        assert checks, f"{level} {subject}: nothing was compared"
        self.rows.append(Row(level, subject, tuple(checks)))
        failed = [check for check in checks if not check.passed]
        assert not failed, f"{level} {subject}: first divergence at {first_failure(checks)}; {len(failed)} of {len(checks)} fail"

    def caught(self, mutant: str, killer: str, worst: Check) -> None:
        """Notes a planted fault, the test that failed because of it, and by how much."""
        self.mutants.append((mutant, killer, worst))

    def mutant_table(self) -> list[str]:
        """One line a caught fault: the test that caught it, and its error in units of the limit."""
        width = max((len(name) for name, _, _ in self.mutants), default=0)
        return [f"{name:{width}s}  {worst.margin:8.1e} x limit at {worst.name}, {killer}" for name, killer, worst in self.mutants]

    def table(self) -> list[str]:
        """One line a level and subject: the worst tensor, its error, its limit."""
        width = max((len(row.subject) for row in self.rows), default=0)
        lines = [f"{'level':5s} {'what':{width}s} {'checks':>6s} {'error':>9s} {'limit':>9s} {'of limit':>8s}  worst tensor"]
        for row in sorted(self.rows, key=lambda row: (int(row.level[1:]), row.subject)):
            error, limit, share = row.worst.error, row.worst.limit, 100 * row.worst.margin
            lines.append(f"{row.level:5s} {row.subject:{width}s} {len(row.checks):6d} {error:9.2e} {limit:9.2e} {share:7.1f}%  {row.worst.name}")
        return lines
