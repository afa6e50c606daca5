"""What a robot is: cameras, dims with units and limits, which actions are relative, and the ways between its numbers and the model's.

A robot's file ends in `ROBOT = Robot(...)`; the folder is the registry. A robot whose numbers need more than deltas subclasses Robot.

Axes: A, Y, X (spec.py); S, D: dims of the robot's state and action; "...": any leading axes.
Dtypes: float32 numbers, uint8 images.
"""

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import numpy as np

from pi05.data.images import Layout, as_rgb
from pi05.data.transforms import absolute_actions, absolute_rotation, check_finite, delta_actions, relative_rotation, repack, suggest
from pi05.errors import DataError

Kind = Literal["joint", "position", "rotation6d", "rotation", "gripper", "velocity", "displacement"]
RotationDelta = Literal["relative", "plain"]
Row = Mapping[str, Any]

ROTATION_SIZE = 6
OUTSIDE_SHARE = 0.05  # of the values of a dim; more than this outside its limits is a wrong unit or order, not noise


@dataclasses.dataclass(frozen=True)
class Dim:
    """One number of a state or an action.

    name: as in the dataset, such as "left_gripper.pos". unit: "rad", "deg", "m", "mm", "rad/s", or "1" for a share or a command.
    low, high: what the robot can reach or take, in that unit.
    kind: joint angle, Cartesian position, one of the six numbers of a rotation6d (first two columns of the rotation matrix), one of
        another rotation (Euler, axis-angle, quaternion), gripper, velocity, or displacement (a step the robot adds itself).
    """

    name: str
    unit: str
    low: float
    high: float
    kind: Kind

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise DataError(f"Dim {self.name!r} is of kind {self.kind!r}. {suggest(str(self.kind), get_args(Kind))}")
        if not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
            raise DataError(f"Dim {self.name!r} runs from {self.low} to {self.high}; give finite limits, low below high, in {self.unit}.")


def pose_dims(prefix: str = "tcp", *, reach: float, unit: str = "m") -> tuple[Dim, ...]:
    """The nine dims of a tool pose: x, y, z within +-`reach`, then r1 to r6, the first and the second column of its rotation matrix."""
    position = tuple(Dim(f"{prefix}.{axis}", unit, -reach, reach, "position") for axis in "xyz")
    return position + tuple(Dim(f"{prefix}.r{i}", "1", -1, 1, "rotation6d") for i in range(1, ROTATION_SIZE + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Robot:
    """A robot, as a dataset records it, as a client sends it and as the model sees it.

    name: its file's name.
    cameras: model slot -> dataset column. A slot that is missing or None costs nothing: it is neither read nor computed.
    state, actions: the dims, in the dataset's order. fps: control rate in Hz that a step of a chunk stands for; None: the dataset's.
    delta_kinds: action dims of these kinds reach the model relative to the state dim of the same name.
    rotation_delta: how, where that includes rotations. "relative" composes rotation6d, R_state^T R_action; "plain" subtracts the numbers,
        which is no rotation but what openpi-style recipes do. A robot must say so by name.
    state_column, action_column, prompt_column: of the dataset.
    client_cameras, client_state, client_prompt: where a serving client's observation holds them, as keys or paths a/b/c (transforms.repack);
        several states are concatenated. Default, as openpi's ALOHA client: images/<last part of the column>, state, prompt.
    client_layout: channel order of a client's images where the shape leaves it open.

    Raises:
        DataError: the description contradicts itself.
    """

    name: str
    cameras: Mapping[str, str | None]
    state: tuple[Dim, ...]
    actions: tuple[Dim, ...]
    fps: float | None
    delta_kinds: tuple[Kind, ...] = ()
    rotation_delta: RotationDelta | None = None
    state_column: str = "observation.state"
    action_column: str = "action"
    prompt_column: str = "task"
    client_cameras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    client_state: tuple[str, ...] = ("state",)
    client_prompt: str = "prompt"
    client_layout: Layout = "HWC"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cameras", {slot: column for slot, column in self.cameras.items() if column is not None})
        columns = list(self.cameras.values())
        if doubled := [column for column in columns if columns.count(column) > 1]:
            self._refuse(f"reads the camera {doubled[0]!r} into two slots; set one of them to null")
        for key, dims in (("state", self.state), ("actions", self.actions)):
            names = [dim.name for dim in dims]
            if not names or len(set(names)) != len(names):
                self._refuse(f"has {key} dims {names}; it needs at least one, and no name twice")
            _rotation_groups(self.name, key, dims)
        self._check_deltas()

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with `changes`, checked like a new one: `robot.replace(cameras=robot.cameras | {"base_0_rgb": None})`."""
        return dataclasses.replace(self, **changes)

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.state)

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.actions)

    @property
    def delta_mask(self) -> np.ndarray:
        """bool[D], the action dims that reach the model relative to the state."""
        return np.array([dim.kind in self.delta_kinds for dim in self.actions])

    @property
    def gripper_dims(self) -> tuple[int, ...]:
        """Positions of the grippers in an action."""
        return tuple(i for i, dim in enumerate(self.actions) if dim.kind == "gripper")

    @property
    def fingerprint(self) -> dict[str, str]:
        """Everything that decides the numbers the model sees, as text: statistics made under another fingerprint do not fit."""
        return {
            "conversion": type(self).__qualname__,
            "state": ", ".join(f"{dim.name} [{dim.unit}]" for dim in self.state),
            "actions": ", ".join(f"{dim.name} [{dim.unit}]{' delta' * bool(delta)}" for dim, delta in zip(self.actions, self.delta_mask, strict=True)),
            "rotation_delta": str(self.rotation_delta),
            "columns": f"{self.state_column}, {self.action_column}",
        }

    def to_model(self, row: Row) -> dict[str, Any]:
        """Returns what the model's side needs of a dataset row or a from_client row.

        images: {slot: uint8[Y, X, 3]}; state: float32[S]; prompt: str; if the row has them: actions float32[A, D], action_is_pad bool[A],
        sample_id int (the row's index). The row is not changed.

        Raises:
            DataError: a column is missing, of another size or not finite; names column, dim and sample.
        """
        where = f" of sample {row['index']}" if "index" in row else ""
        state = self._numbers(row, self.state_column, self.state, where)
        out: dict[str, Any] = {"images": self._images(row, where), "state": self.state_to_model(state), "prompt": self._prompt(row, where)}
        if self.action_column in row or "action_is_pad" in row:
            out["actions"] = self.actions_to_model(self._numbers(row, self.action_column, self.actions, where), state)
        if "action_is_pad" in row:
            out["action_is_pad"] = np.asarray(row["action_is_pad"], bool)
        return out | ({"sample_id": int(row["index"])} if "index" in row else {})

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        """Returns the model's state, float32[..., S], for the robot's."""
        return np.array(state, np.float32)

    def actions_to_model(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns the model's actions, float32[..., A, D], for the robot's; `state` [..., S] is the robot's, at the first step."""
        state = self.state_to_model(state)
        out = delta_actions(actions, state, *self._subtracted)
        for action_dims, state_dims in self._composed:
            out[..., action_dims] = relative_rotation(np.asarray(actions)[..., action_dims], state[..., None, state_dims])
        return out

    def from_model(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns the robot's actions, float32[..., A, D]: the inverse of actions_to_model, with the same (the robot's own) state.

        Raises:
            DataError: a number is not finite or a rotation is none, so that no such chunk reaches the robot.
        """
        actions, state = np.asarray(actions), np.asarray(state)
        self._check("model's actions", actions, self.actions, "")
        self._check("state", state, self.state, "")
        state = self.state_to_model(state)
        out = absolute_actions(actions, state, *self._subtracted)
        for action_dims, state_dims in self._composed:
            out[..., action_dims] = absolute_rotation(actions[..., action_dims], state[..., None, state_dims])
        return out

    def from_client(self, observation: Mapping[str, Any], default_prompt: str | None = None) -> dict[str, Any]:
        """Returns a row for to_model out of a serving client's observation, which is not changed.

        Images may be float in [0, 1] and channels first, numbers scalars, the prompt bytes. `default_prompt` counts only if the client sends none.

        Raises:
            DataError: something is missing; names it, what there is, and the cure.
        """
        images = {}
        for slot, column in self.cameras.items():
            place = self.client_cameras.get(slot, f"images/{column.rsplit('.', 1)[-1]}")
            image = self._sent(observation, place, f"or serve without it: cameras: {{{slot}: null}}")
            images[column] = as_rgb(image, name=place, layout=self.client_layout)
        parts = [np.atleast_1d(np.asarray(self._sent(observation, place, "as the robot's state"), np.float32)) for place in self.client_state]
        prompt = observation.get(self.client_prompt, default_prompt)
        if prompt is None:
            raise DataError(f"The client sent no {self.client_prompt!r}, and there is no default prompt. Send one, or start the server with one.")
        prompt = prompt.decode() if isinstance(prompt, bytes) else str(prompt)
        return images | {self.state_column: np.concatenate(parts), self.prompt_column: prompt}

    def limit_warnings(self, values: np.ndarray, key: Literal["state", "actions"] = "actions") -> list[str]:
        """Returns a line for each dim of the robot's `values` [..., D] of which more than 5 % lie outside its limits, with a hint at the unit."""
        dims = {"state": self.state, "actions": self.actions}[key]
        flat = np.asarray(values, np.float64).reshape(-1, len(dims))
        out = []
        for dim, column in zip(dims, flat.T, strict=True):
            slack = 1e-6 * (dim.high - dim.low)
            share = float(((column < dim.low - slack) | (column > dim.high + slack)).mean())
            if share > OUTSIDE_SHARE:
                seen = f"{column.min():g} to {column.max():g}"
                out.append(
                    f"{key} dim {dim.name!r}: {share:.0%} of the values ({seen}) lie outside {dim.low:g} to {dim.high:g} {dim.unit}.{_unit_hint(dim, column)}"
                )
        return out

    @functools.cached_property
    def _subtracted(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the delta dims, in an action and in a state; what is composed is replaced afterwards."""
        names = [dim.name for dim in self.actions if dim.kind in self.delta_kinds]
        return _positions(self.action_names, names), _positions(self.state_names, names)

    @functools.cached_property
    def _composed(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Positions of each composed rotation, in an action and in a state."""
        if self.rotation_delta != "relative" or "rotation6d" not in self.delta_kinds:
            return []
        groups = _rotation_groups(self.name, "actions", self.actions)
        return [(_positions(self.action_names, group), _positions(self.state_names, group)) for group in groups]

    def _refuse(self, text: str) -> None:
        raise DataError(f"Robot {self.name!r} {text}.")

    def _check_deltas(self) -> None:
        kinds = {dim.kind for dim in self.actions} & set(self.delta_kinds)
        if unused := [kind for kind in self.delta_kinds if kind not in kinds]:
            self._refuse(f"lists {unused[0]!r} in delta_kinds, but no action is of that kind. {suggest(unused[0], sorted({dim.kind for dim in self.actions}))}")
        if self.rotation_delta not in (None, *get_args(RotationDelta)):
            self._refuse(f"has rotation_delta {self.rotation_delta!r}; it is one of {', '.join(get_args(RotationDelta))}")
        for dim in self.actions:
            if dim.kind in self.delta_kinds and dim.name not in self.state_names:
                self._refuse(f"takes the action {dim.name!r} relative to a state dim of that name, which it lacks; its state is {', '.join(self.state_names)}")
        if step := kinds & {"velocity", "displacement"}:
            self._refuse(f"lists {min(step)!r} in delta_kinds, but such an action is a step already")
        rotations = kinds & {"rotation", "rotation6d"}
        if rotations and self.rotation_delta is None:
            self._refuse(f"lists {min(rotations)!r} in delta_kinds; rotations cannot be subtracted like lengths: set rotation_delta to 'relative' or 'plain'")
        if "rotation" in rotations and self.rotation_delta == "relative":
            self._refuse("composes rotations that are not rotation6d; record rotation6d, keep them absolute, or set rotation_delta to 'plain'")

    def _sent(self, observation: Mapping[str, Any], place: str, cure: str) -> Any:
        try:
            return repack(observation, {"it": place})["it"]
        except DataError as error:
            raise DataError(f"Observation of the client of robot {self.name!r}: {error} Send it, {cure}.") from error

    def _images(self, row: Row, where: str) -> dict[str, np.ndarray]:
        for slot, column in self.cameras.items():
            if column not in row:
                have = [name for name, value in row.items() if np.ndim(value) == 3]
                raise DataError(
                    f"Camera column {column!r}{where} is missing. {suggest(column, have)} Map the slot to what there is, "
                    f"cameras: {{{slot}: <column>}}, or do without: cameras: {{{slot}: null}}."
                )
        return {slot: as_rgb(row[column], name=f"{column}{where}") for slot, column in self.cameras.items()}

    def _numbers(self, row: Row, column: str, dims: Sequence[Dim], where: str) -> np.ndarray:
        if column not in row:
            raise DataError(f"Column {column!r}{where} is missing. {suggest(column, row)} Name the right column in the robot's description.")
        values = np.asarray(row[column], np.float32)
        self._check(column, values, dims, where)
        return values

    def _check(self, key: str, values: np.ndarray, dims: Sequence[Dim], where: str) -> None:
        names = tuple(dim.name for dim in dims)
        if values.ndim == 0 or values.shape[-1] != len(names):
            raise DataError(f"{key}{where} has shape {values.shape}; robot {self.name!r} has the {len(names)} dims {', '.join(names)}.")
        check_finite(key, values, names, where)

    def _prompt(self, row: Row, where: str) -> str:
        if self.prompt_column not in row:
            raise DataError(f"The prompt{where}, {self.prompt_column!r}, is missing. {suggest(self.prompt_column, row)} Add it, or give a default prompt.")
        return str(row[self.prompt_column])


def robot_names() -> tuple[str, ...]:
    """Names of the robots in this folder, sorted."""
    import pi05.robots

    return tuple(sorted(module.name for module in pkgutil.iter_modules(pi05.robots.__path__) if module.name != "base"))


def load_robot(name: str) -> Robot:
    """Returns the robot of the file pi05/robots/`name`.py, or of a module of your own, given by its dotted path (my_lab.arms.my_arm).

    Raises:
        DataError: there is no such file or module, or it has no ROBOT.
    """
    if "." in name:
        path = name
        if not _exists(path):
            raise DataError(f"There is no module {path!r} for a robot; its folder must be on the Python path, with that name.")
    else:
        path = f"pi05.robots.{name}"
        if name not in robot_names():
            raise DataError(f"There is no robot {name!r}. {suggest(name, robot_names())} A private one is named by its module: my_lab.arms.my_arm.")
    robot = vars(importlib.import_module(path)).get("ROBOT")
    if not isinstance(robot, Robot):
        raise DataError(f"The module {path} must end in ROBOT = Robot(...); it has {type(robot).__name__}. See docs/add_a_robot.md.")
    return robot


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _positions(names: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    return np.array([names.index(name) for name in wanted], np.intp)


def _rotation_groups(robot: str, key: str, dims: Sequence[Dim]) -> list[list[str]]:
    """The names of each rotation6d: runs of such dims, six by six."""
    groups: list[list[str]] = []
    run: list[str] = []
    for dim in (*dims, None):
        if dim is not None and dim.kind == "rotation6d":
            run.append(dim.name)
            continue
        if len(run) % ROTATION_SIZE:
            raise DataError(f"Robot {robot!r} has {len(run)} {key} dims of kind rotation6d in a row, {', '.join(run)}; a rotation has {ROTATION_SIZE}.")
        groups += [run[i : i + ROTATION_SIZE] for i in range(0, len(run), ROTATION_SIZE)]
        run = []
    return groups


def _unit_hint(dim: Dim, values: np.ndarray) -> str:
    times = float(np.abs(values).max()) / max(abs(dim.low), abs(dim.high))
    for unit, other, factor in (("rad", "degrees", 180 / np.pi), ("m", "millimetres", 1000.0), ("1", "percent", 100.0)):
        if dim.unit == unit and 3 < times <= 1.05 * factor:
            return f" They look like {other}."
    return " Check the unit and the order of the dims."
