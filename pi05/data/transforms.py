"""From rows to samples and from actions back: pure functions on arrays, and the Pipeline that composes them.

The way of a row: the robot's to_model (columns, units, deltas), normalise, prompt and state to tokens, resize, pad to the model's dims.
Deltas come before normalisation, so statistics are of deltas. Pipeline.inverse is the way back.

Axes: A, M, C, Y, X (spec.py); S, D: dims of the robot's state and action; "...": any leading axes.
Dtypes: numbers of any type come in, arithmetic is float64, float32 goes out. No input is changed.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pi05.data.images import resize_with_pad
from pi05.errors import DataError
from pi05.spec import IMAGE_CHANNELS, ModelSpec

if TYPE_CHECKING:
    from pi05.data.norm_stats import FieldStats, NormStats
    from pi05.data.tokenizer import Tokenizer
    from pi05.robots.base import Dim, Robot

Normalization = Literal["quantile", "zscore"]
Sample = dict[str, Any]

EPSILON = 1e-6  # openpi's, added to every divisor
FLOOR = 1e-3  # the narrowest range that counts as motion, as a share of the dim's own range
LIMIT = 50.0  # |normalised value| beyond which data and statistics cannot belong together
QUANTILES_IN_STD = 4.0  # a normal distribution's q99 - q01 is 4.65 standard deviations


def repack(tree: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """Returns {new name: value} with each value taken from its place: a key of `tree`, or a path a/b/c into nested mappings.

    Raises:
        DataError: a place is empty; names it, what is there, and the nearest name.
    """
    return {name: _look_up(tree, place) for name, place in places.items()}


def delta_actions(actions: np.ndarray, state: np.ndarray, action_dims: np.ndarray, state_dims: np.ndarray) -> np.ndarray:
    """Returns float32[..., A, D] with `state[..., state_dims]` subtracted from `action_dims` of every step of the chunk."""
    out = np.array(actions, np.float32)
    out[..., action_dims] = np.asarray(actions, np.float64)[..., action_dims] - np.asarray(state, np.float64)[..., None, state_dims]
    return out


def absolute_actions(actions: np.ndarray, state: np.ndarray, action_dims: np.ndarray, state_dims: np.ndarray) -> np.ndarray:
    """Inverse of delta_actions."""
    return delta_actions(actions, -np.asarray(state, np.float64), action_dims, state_dims)


def rotation6d_to_matrix(rotation: np.ndarray) -> np.ndarray:
    """Returns float64[..., 3, 3] whose first two columns are `rotation` [..., 6] made orthonormal (Zhou et al. 2019, eq. 15).

    Raises:
        DataError: the two columns are zero or parallel, so they name no rotation.
    """
    first, second = np.split(np.asarray(rotation, np.float64), 2, axis=-1)
    x = _unit(first)
    y = _unit(second - (x * second).sum(-1, keepdims=True) * x)
    return np.stack([x, y, np.cross(x, y)], axis=-1)


def matrix_to_rotation6d(matrix: np.ndarray) -> np.ndarray:
    """Returns float64[..., 6], the first column of `matrix` [..., 3, 3] and then its second."""
    return np.concatenate([matrix[..., 0], matrix[..., 1]], axis=-1)


def relative_rotation(action: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Returns R_state^T R_action, the turn from the state to the action seen from the state's own frame; all [..., 6]."""
    return matrix_to_rotation6d(np.swapaxes(rotation6d_to_matrix(state), -1, -2) @ rotation6d_to_matrix(action))


def absolute_rotation(delta: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Inverse of relative_rotation: R_state R_delta; all [..., 6], orthonormal."""
    return matrix_to_rotation6d(rotation6d_to_matrix(state) @ rotation6d_to_matrix(delta))


def normalise(x: np.ndarray, stats: "FieldStats", method: Normalization, floor: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns float64[..., D]: quantile, 2 (x - q01) / (q99 - q01 + 1e-6) - 1, unclipped; or zscore, (x - mean) / (std + 1e-6).

    Statistics may have more dims than `x`; the first D count. These are openpi's numbers unless a dim's range (q99 - q01, or std) is
    below its `floor`, in units of x: then the range is widened around its middle to the floor, and a constant becomes 0.
    """
    low, width = _span(stats, method, x.shape[-1], floor)
    scaled = (np.asarray(x, np.float64) - low) / (width + EPSILON)
    return scaled * 2 - 1 if method == "quantile" else scaled


def unnormalise(x: np.ndarray, stats: "FieldStats", method: Normalization, floor: np.ndarray | float = 0.0) -> np.ndarray:
    """Inverse of normalise; float64[..., D]."""
    low, width = _span(stats, method, x.shape[-1], floor)
    x = np.asarray(x, np.float64)
    return ((x + 1) / 2 if method == "quantile" else x) * (width + EPSILON) + low


def range_floors(dims: Sequence["Dim"], method: Normalization, floor: float = FLOOR) -> np.ndarray:
    """Returns float64[D], what `normalise` takes as floors: `floor` of the range that each Dim declares, or the deviation that goes with it."""
    return (floor if method == "quantile" else floor / QUANTILES_IN_STD) * np.array([dim.high - dim.low for dim in dims])


def pad_dims(x: np.ndarray, dims: int) -> np.ndarray:
    """Returns float32[..., dims]: `x` [..., D], then zeros."""
    return np.pad(np.asarray(x, np.float32), [(0, 0)] * (x.ndim - 1) + [(0, dims - x.shape[-1])])


def suggest(name: str, available: Iterable[str]) -> str:
    """Returns the end of an error message: what there is instead of `name`, and the nearest of it."""
    names = [str(other) for other in available]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"Available: {', '.join(names) or 'nothing'}." + (f" Did you mean {near[0]!r}?" if near else "")


def check_finite(key: str, x: np.ndarray, names: tuple[str, ...], where: str = "") -> None:
    """Raises unless every number of `x` [..., D] is finite.

    Raises:
        DataError: names the dim; `where` is the sample.
    """
    if np.isfinite(x).all():
        return
    index = tuple(np.argwhere(~np.isfinite(x))[0])
    step = f", step {index[-2]}" if x.ndim > 1 else ""
    raise DataError(f"{key} dim {names[index[-1]]!r}{step}{where} is {x[index]}; every number must be finite.")


class Pipeline:
    """Turns rows into samples for one robot and one model, and the model's actions back into the robot's.

    normalization: "quantile" (Pi0.5) or "zscore". Whether the state enters the prompt is the tokenizer's choice (discrete_state).
    floor: the narrowest range of a dim, as a share of the range its Dim declares; 0 is openpi's behaviour. Dims that are widened by it are
        in `floored`, one line a dim, for the log.
    limit: largest normalised value of a real step.

    Raises:
        DataError: robot, statistics, tokenizer and spec do not fit together.
    """

    def __init__(
        self,
        spec: ModelSpec,
        robot: "Robot",
        stats: "NormStats",
        tokenizer: "Tokenizer",
        *,
        normalization: Normalization = "quantile",
        floor: float = FLOOR,
        limit: float = LIMIT,
    ) -> None:
        self.spec, self.robot, self.stats, self.tokenizer = spec, robot, stats, tokenizer
        self.normalization, self.limit = normalization, limit
        tokenizer.check(spec)
        self._dims = {"state": robot.state, "actions": robot.actions}
        self.slots = _slots(spec, robot)
        if len(robot.actions) > spec.action_dim:
            raise DataError(f"Robot {robot.name!r} has {len(robot.actions)} action dims, the model {spec.action_dim}; choose a spec with a larger action_dim.")
        self._floors = {key: range_floors(dims, normalization, floor) for key, dims in self._dims.items()}
        self.floored = tuple(line for key in self._dims for line in self._check_stats(key))

    def __call__(self, row: Mapping[str, Any]) -> Sample:
        """Returns the sample of `row`, a dataset's row or the robot's from_client.

        images: uint8[C, Y, X, 3], the robot's cameras in slot order. image_mask: bool[C]. tokens: int32[n].
        action_dim_is_pad: bool[M]. If the row has actions: actions float32[A, M], zeros behind the robot's dims, action_is_pad bool[A].
        If it has an index: sample_id int.

        Raises:
            DataError: what the row lacks or holds; names column, dim and sample.
        """
        data = self.robot.to_model(row)
        edge, where = self.spec.vision.image_size, f" of sample {data['sample_id']}" if "sample_id" in data else ""
        images = [resize_with_pad(data["images"][slot], edge) for slot in self.slots]
        state = self._normalise("state", data["state"], where)
        sample: Sample = {
            "images": np.array(images, np.uint8).reshape(len(images), edge, edge, IMAGE_CHANNELS),
            "image_mask": np.ones(len(images), bool),
            "tokens": self.tokenizer.encode(data["prompt"], state),
            "action_dim_is_pad": np.arange(self.spec.action_dim) >= len(self.robot.actions),
        }
        if "actions" in data:
            is_pad = data.get("action_is_pad", np.zeros(len(data["actions"]), bool))
            actions = self._normalise("actions", data["actions"], where, real=~is_pad)
            sample |= {"actions": pad_dims(actions, self.spec.action_dim), "action_is_pad": is_pad}
        return sample | ({"sample_id": data["sample_id"]} if "sample_id" in data else {})

    def inverse(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns the robot's actions, float32[A, D], for the model's [A, M]; `state` [S] is the row's own, before any transform.

        Raises:
            DataError: an action is not finite, or names no rotation.
        """
        actions = np.asarray(actions)[..., : len(self.robot.actions)]
        return self.robot.from_model(unnormalise(actions, self.stats.fields["actions"], self.normalization, self._floors["actions"]), state)

    def normalised_mean(self, key: str) -> np.ndarray:
        """The mean of the statistics' "state" or "actions", float32[D], as the model sees it."""
        return normalise(self.stats.fields[key].mean, self.stats.fields[key], self.normalization, self._floors[key])

    def _normalise(self, key: str, x: np.ndarray, where: str, real: np.ndarray | slice = slice(None)) -> np.ndarray:
        out = normalise(x, self.stats.fields[key], self.normalization, self._floors[key])
        counted = np.abs(out[real])
        if counted.size and counted.max() > self.limit:
            worst = counted.reshape(-1, out.shape[-1]).max(0)
            raise DataError(
                f"{key} dim {self._dims[key][int(worst.argmax())].name!r}{where} is {worst.max():.3g} after normalisation, beyond the limit {self.limit:g}: "
                "the statistics are of other data or other units, or the dim hardly moves in them. Compute them again, or raise the floor."
            )
        return out

    def _check_stats(self, key: str) -> list[str]:
        if key not in self.stats.fields:
            raise DataError(f"The statistics have no {key!r}, only {', '.join(sorted(self.stats.fields)) or 'nothing'}. Compute them for this robot.")
        stats, dims, floors = self.stats.fields[key], self._dims[key], self._floors[key]
        low, width = _span(stats, self.normalization, len(dims), -np.inf)
        if len(width) != len(dims):
            raise DataError(f"The statistics of {key} have {len(width)} dims, robot {self.robot.name!r} has {len(dims)}. Compute them for this robot.")
        good = np.isfinite(low) & np.isfinite(width) & (width >= 0)
        if not good.all():
            raise DataError(f"The statistics of {key} dim {dims[int(good.argmin())].name!r} cannot serve for {self.normalization!r}. Compute them again.")
        what = "q99 - q01" if self.normalization == "quantile" else "std"
        return [
            f"{key} dim {dim.name!r} hardly moves: its {what} is {w:.3g} {dim.unit}, taken as {f:.3g} {dim.unit}"
            for dim, w, f in zip(dims, width, floors, strict=True)
            if w < f
        ]


def _look_up(tree: Mapping[str, Any], place: str) -> Any:
    found = _walk(tree, place)
    if not found:
        raise DataError(f"There is no {place!r}. {suggest(place, _leaves(tree))}")
    return found[0]


def _walk(node: Any, path: str) -> list[Any]:
    """Everything at `path`; keys may hold slashes themselves, so each way of splitting the path counts, the least split first."""
    if not isinstance(node, Mapping):
        return []
    parts = path.split("/")
    heads = ["/".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
    return ([node[path]] if path in node else []) + [value for head in heads if head in node for value in _walk(node[head], path[len(head) + 1 :])]


def _leaves(tree: Mapping[str, Any]) -> list[str]:
    return [path for key, value in tree.items() for path in ([f"{key}/{leaf}" for leaf in _leaves(value)] if isinstance(value, Mapping) else [str(key)])]


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(vector, axis=-1, keepdims=True)
    if not (norm > EPSILON).all():  # so written, NaN is refused too
        raise DataError("A 6-D rotation has columns that are zero or parallel, so it names no rotation. Check the order of the dims.")
    return vector / norm


def _span(stats: "FieldStats", method: Normalization, dims: int, floor: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Where 0 (zscore) or -1 (quantile) comes from, and the width of the unit, each float64[dims]."""
    low, width = (stats.q01, stats.q99 - stats.q01) if method == "quantile" else (stats.mean, stats.std)
    low, width = np.asarray(low, np.float64)[:dims], np.asarray(width, np.float64)[:dims]
    wide = np.maximum(width, floor)
    return (low - (wide - width) / 2 if method == "quantile" else low), wide


def _slots(spec: ModelSpec, robot: "Robot") -> tuple[str, ...]:
    """The robot's camera slots in the model's order."""
    if unknown := [slot for slot in robot.cameras if slot not in spec.cameras]:
        raise DataError(
            f"Robot {robot.name!r} maps a camera to the slot {unknown[0]!r}, which this model does not have. {suggest(unknown[0], spec.cameras)} "
            "Map it to one of these, or set the slot to null to do without that camera."
        )
    return tuple(slot for slot in spec.cameras if slot in robot.cameras)
