"""The ledger of a conversion: every tensor of the source is read exactly once, every tensor of the target is filled exactly once."""

from collections.abc import Iterable, Mapping

from pi05.errors import ParamsError

SHOWN = 20  # names of a list in an error message


class Ledger:
    """Keeps both lists; `close` raises unless they come out even.

    sources: tensor of the source -> number of parameters that are read from it, more than 1 where it packs several.
    targets: tensors to fill.
    """

    def __init__(self, sources: Mapping[str, int], targets: Iterable[str]) -> None:
        self._sources, self._targets = dict(sources), tuple(targets)
        self._read: dict[str, list[str]] = {}
        self._filled: list[str] = []
        self._dropped: dict[str, str] = {}

    def consume(self, name: str, reader: str) -> None:
        """Notes that the parameter `reader` was read from the source tensor `name`."""
        self._read.setdefault(name, []).append(reader)

    def drop(self, name: str, reason: str) -> None:
        """Notes that a source tensor is left out on purpose."""
        self._dropped[name] = reason

    def fill(self, name: str) -> None:
        """Notes that a target tensor was filled."""
        self._filled.append(name)

    def close(self) -> None:
        """Raises unless every tensor is accounted for exactly once.

        Raises:
            ParamsError: lists the tensors of the source that nothing reads and those of the target that nothing fills.
        """
        used, filled = self._read.keys() | self._dropped.keys(), set(self._filled)
        unread = [name for name, parts in self._sources.items() if name not in self._dropped and len(set(self._read.get(name, ()))) < parts]
        empty = [name for name in self._targets if name not in filled]
        read_twice = [name for name, readers in self._read.items() if len(readers) > self._sources.get(name, len(readers)) or name in self._dropped]
        filled_twice = sorted(name for name in filled if self._filled.count(name) > 1)
        lists = {
            "in the source that no parameter reads": unread,
            "in the target that nothing fills": empty,
            "read more than once": read_twice,
            "filled more than once": filled_twice,
            "named that neither side has": sorted((used - self._sources.keys()) | (filled - set(self._targets))),
        }
        if any(lists.values()):
            lines = [f"  {len(names)} {what}: {listed(names)}" for what, names in lists.items() if names or what.startswith("in ")]
            raise ParamsError("\n".join(["The tensors do not come out even:", *lines]))


def listed(names: list[str]) -> str:
    """The names for a message, shortened where they are many."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "") if names else "none"
