"""Which row of the dataset comes at which position: a pure function of (seed, epoch), so resuming needs no state and no replay.

Positions count samples over the whole run, all processes together; `epoch_size` of them make an epoch. Batches may span epochs:
nothing is dropped, and every row occurs once in each epoch (without weights).
"""

from collections.abc import Sequence

import numpy as np

from pi05.errors import DataError
from pi05.params import philox

KEPT_EPOCHS = 2  # a batch at an epoch's end needs two


class SampleOrder:
    """The order of a run.

    Without weights an epoch is one permutation of all rows. With weights an epoch has as many samples, each source its exact share of
    them in a random interleaving, and each source is itself walked in whole permutations, so that no row repeats before all its
    others have come.

    lengths: rows of each source; rows are numbered through. weights: share of each source, summing to 1, or None.

    Raises:
        DataError: a weight gives its source less than one sample an epoch.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float] | None, seed: int) -> None:
        self.epoch_size, self.seed = sum(lengths), seed
        self._lengths = np.array([self.epoch_size] if weights is None else lengths, np.int64)
        self._first_rows = np.cumsum(self._lengths) - self._lengths
        self._shares = _whole_shares(self.epoch_size, np.array([1.0] if weights is None else weights, np.float64))
        if not self._shares.all():
            raise DataError(f"weights is {list(weights or ())}: source {int(self._shares.argmin())} would get no sample in an epoch of {self.epoch_size}.")
        self._kept: dict[tuple[str, int, int], tuple[np.ndarray, ...]] = {}

    def epochs(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and place in the epoch, int64[B] each, of `positions`, int64[B]."""
        return np.divmod(positions, self.epoch_size)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Dataset rows, int64[B], at `positions`, int64[B]."""
        rows = np.empty(len(positions), np.int64)
        for i, (epoch, place) in enumerate(zip(*self.epochs(positions), strict=True)):
            source, turn = self._turn(int(epoch), int(place))
            cycle, offset = divmod(turn, int(self._lengths[source]))
            rows[i] = self._first_rows[source] + self._permutation(source, cycle)[offset]
        return rows

    def _turn(self, epoch: int, place: int) -> tuple[int, int]:
        """The source at a place, and how many samples of it came before in the run."""
        if len(self._lengths) == 1:
            return 0, epoch * self.epoch_size + place
        source, rank = self._remember(("mixture", 0, epoch), lambda: self._interleave(epoch))
        return int(source[place]), epoch * int(self._shares[source[place]]) + int(rank[place])

    def _interleave(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Source at each place of an epoch, and its rank among the epoch's samples of that source."""
        source = np.repeat(np.arange(len(self._shares)), self._shares)[_permutation(self.seed, "mixture", epoch, size=self.epoch_size)]
        rank = np.empty(self.epoch_size, np.int64)
        for number, share in enumerate(self._shares):
            rank[source == number] = np.arange(share)
        return source, rank

    def _permutation(self, source: int, cycle: int) -> np.ndarray:
        size = int(self._lengths[source])
        return self._remember(("order", source, cycle), lambda: (_permutation(self.seed, "order", source, cycle, size=size),))[0]

    def _remember(self, key, make):
        if key not in self._kept:
            same = [other for other in self._kept if other[:2] == key[:2]]
            for other in same[: len(same) - KEPT_EPOCHS + 1]:
                del self._kept[other]
            self._kept[key] = make()
        return self._kept[key]


def _permutation(seed: int, stream: str, *counters: int, size: int) -> np.ndarray:
    """A permutation from raw generator words: NumPy keeps those equal between releases, but not its `permutation`."""
    return np.argsort(philox(seed, stream, *counters).bit_generator.random_raw(size), kind="stable")


def _whole_shares(total: int, weights: np.ndarray) -> np.ndarray:
    """`total` split into whole numbers nearest to the weights (largest remainders), int64."""
    exact = total * weights / weights.sum()
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    return shares
