"""What the doctor finds in numbers and prompts: each check takes what a dataset holds and returns its findings.

Axes: S, D: dims of the robot's state and action; n: frames.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from pi05.data.norm_stats import FieldStats
from pi05.data.recording import UNKNOWN, Recording
from pi05.data.tokenizer import clean_task, clipped_share
from pi05.data.transforms import FLOOR, LIMIT, range_floors
from pi05.robots.base import Dim, Robot

Level = Literal["error", "warning", "note"]
Recorded = Literal["absolute", "relative", "still", "unclear"]

GAP = 0.5  # of a frame's time: time stamps farther off show that a frame is missing or doubled
RATE_TOLERANCE = 0.05  # of the median time between frames; more is another rate, not jitter
SHORT = 0.2  # of the median length: shorter episodes are aborted recordings
IDLE_EPISODE = 0.02  # of a dim's range: an episode in which no dim moves farther shows nothing
IDLE_FRAME, IDLE_SECONDS, IDLE_SHARE = 1e-3, 1.0, 0.2  # of a dim's range a frame; how long; and which share of all frames is too much
LITTLE = 0.01  # of a dim's declared range: more than noise, less than a motion
CLIPPED = 0.05  # of the values of a dim; by definition 2 % lie outside q01 to q99 of the same data
LAGS = (1, 2, 4, 8)  # frames in which a robot follows its command
MAX_PAIRS = 20_000  # of frames that are correlated, spread over the data
FOLLOWS = 0.8  # correlation of commands with the states that they lead to
STEPS = 0.5  # correlation of commands with the change of the state
NEAR = 0.2  # median distance that counts as near, as a share of the median size


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to repair (error: training would fail or learn wrong things), to look at (warning), or to know (note).

    check: which check found it. where: dataset, and column or dim. text: what it is and what to do.
    """

    level: Level
    check: str
    where: str
    text: str


def check_lengths(recording: Recording, action_horizon: int) -> list[Finding]:
    """Episodes that are aborted recordings, or shorter than an action chunk."""
    numbers, lengths = recording.folder.episodes.numbers, recording.folder.episodes.lengths
    kept = np.isin(numbers, recording.episode)
    numbers, lengths = numbers[kept], lengths[kept]
    out = []
    if (short := numbers[lengths < SHORT * np.median(lengths)]).size:
        text = f"less than {SHORT:.0%} of the median length ({np.median(lengths):g} frames). An aborted recording? Exclude it."
        out.append(Finding("warning", "episodes", recording.folder.name, f"{name_episodes(short)}: {text}"))
    if (short := numbers[lengths < action_horizon]).size:
        share = padded_share(lengths[lengths < action_horizon], action_horizon)
        text = f"shorter than the horizon of {action_horizon} steps: no chunk of theirs is whole, {share:.0%} of their steps are padding. Lower the horizon?"
        out.append(Finding("warning", "episodes", recording.folder.name, f"{name_episodes(short)}: {text}"))
    return out


def padded_share(lengths: np.ndarray, action_horizon: int) -> float:
    """The share of chunk steps that lie behind their episode's end; lengths: int64[E], frames."""
    inside = sum(int(np.minimum(np.arange(1, length + 1), action_horizon).sum()) for length in lengths)
    return 1 - inside / (int(lengths.sum()) * action_horizon)


def check_time(recording: Recording) -> list[Finding]:
    """Time stamps that contradict the rate, or jump: pi05 counts frames, so each frame must be one period after the one before."""
    if recording.time is None:
        return []
    name, fps = recording.folder.name, recording.folder.fps
    first = np.flatnonzero(recording.episode[:-1] == recording.episode[1:])
    steps = np.diff(recording.time)[first]
    if not steps.size:
        return []
    median = float(np.median(steps))
    if not abs(median * fps - 1) <= RATE_TOLERANCE:
        text = f"the time stamps are {median:.4g} s apart, the rate of {fps:g} frames/s in meta/info.json means {1 / fps:.4g} s. Correct fps, or resample."
        return [Finding("error", "time", name, text)]
    bad = first[~(np.abs(steps - 1 / fps) <= GAP / fps)]
    if not bad.size:
        return []
    row, episode = int(bad[0]), int(recording.episode[bad[0]])
    frame = row - int(np.flatnonzero(recording.episode == episode)[0]) + 1
    gap = recording.time[row + 1] - recording.time[row]
    text = (
        f"{bad.size} time stamps jump, in {name_episodes(recording.episode[bad])}; first in episode {episode} at frame {frame}, {gap:.4g} s after the one "
        f"before instead of {1 / fps:.4g} s. Frames are missing or doubled there: actions would span another time. Exclude the episodes, or resample."
    )
    return [Finding("warning", "time", name, text)]


def check_numbers_finite(recording: Recording, robot: Robot) -> list[Finding]:
    """NaN and infinity, a finding a dim."""
    out = []
    for column, dims, values in _columns(recording, robot):
        for dim, bad in zip(dims, ~np.isfinite(values).T, strict=True):
            if bad.any():
                rows = np.flatnonzero(bad)
                text = f"{len(rows)} values are not finite, in {name_episodes(recording.episode[rows])} (first: {values[rows[0], dims.index(dim)]})."
                out.append(Finding("error", "finite", f"{recording.folder.name}, {column} dim {dim.name!r}", f"{text} Repair or exclude the episodes."))
    return out


def check_idle(recording: Recording, robot: Robot) -> list[Finding]:
    """Episodes in which nothing moves, and long pauses, both seen in the state."""
    state, width = moving_state(recording, robot)
    name, out = recording.folder.name, []
    idle = [number for number, rows in recording.episodes() if not (np.ptp(state[rows], axis=0) >= IDLE_EPISODE * width).any()]
    if idle:
        text = f"{name_episodes(idle)}: idle, no dim of the state moves by {IDLE_EPISODE:.0%} of its range. Exclude what shows nothing."
        out.append(Finding("warning", "idle", name, text))
    if (share := idle_share(recording, robot)) > IDLE_SHARE:
        text = f"{share:.0%} of the frames belong to pauses of {IDLE_SECONDS:g} s and longer: the policy learns to stand still. Cut the pauses."
        out.append(Finding("warning", "idle", name, text))
    return out


def idle_share(recording: Recording, robot: Robot) -> float:
    """The share of frames in pauses."""
    state, width = moving_state(recording, robot)
    still = np.zeros(len(recording), bool)
    same = (np.abs(np.diff(state, axis=0)) < IDLE_FRAME * width).all(1) & (np.diff(recording.episode) == 0)
    ends = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(int)))
    for first, end in ends.reshape(-1, 2):
        if end - first >= IDLE_SECONDS * recording.folder.fps:
            still[first : end + 1] = True
    return float(still.mean()) if len(still) else 0.0


def moving_state(recording: Recording, robot: Robot) -> tuple[np.ndarray, np.ndarray]:
    """The state's dims that move, float32[n, d], and their ranges, q99 - q01, float64[d]."""
    good = recording.state[recording.finite]
    low, high = np.percentile(good, (1, 99), axis=0) if len(good) else np.zeros((2, len(robot.state)))
    moving = high - low >= range_floors(robot.state, "quantile")
    return recording.state[:, moving], (high - low)[moving]


def check_units(recording: Recording, robot: Robot) -> list[Finding]:
    """Values outside the robot's limits."""
    good = recording.finite
    lines = robot.limit_warnings(recording.state[good], "state") + robot.limit_warnings(recording.actions[good], "actions")
    return [Finding("warning", "units", recording.folder.name, line) for line in lines]


def guess_recorded(recording: Recording, robot: Robot) -> tuple[Recorded, ...]:
    """For each action dim, how its numbers look beside the state of the same name (of the same place, where names differ but sizes do not).

    "absolute": they lie near the state, or go where it goes. "relative": they are far smaller than it, or go where its change goes. "still": one
    of the two hardly moves. "unclear": neither, or there is no such state.
    """
    state_names = robot.state_names
    aligned = len(state_names) == len(robot.actions) and not set(state_names) & set(robot.action_names) - _grippers(robot)
    out: list[Recorded] = []
    for i, dim in enumerate(robot.actions):
        j = state_names.index(dim.name) if dim.name in state_names else i if aligned else None
        out.append("unclear" if j is None else _guess(recording, i, j))
    return tuple(out)


def check_actions(recording: Recording, robot: Robot, recorded: Sequence[Recorded]) -> list[Finding]:
    """Action dims that are not recorded as the robot's description says; recorded: guess_recorded."""
    out = []
    for dim, looks, delta in zip(robot.actions, recorded, robot.delta_mask, strict=True):
        step = dim.kind in ("velocity", "displacement")
        if looks == "relative" and not step:
            what = "looks relative to the state already: it would be subtracted twice" if delta else "looks relative to the state"
            text = f"{what}. If the dataset records steps, give the dim the kind 'displacement'{', without a delta' * bool(delta)}."
        elif looks == "absolute" and step:
            text = f"looks like an absolute target, but the robot's description says {dim.kind!r}: give it the kind 'joint' or 'position'."
        else:
            continue
        out.append(Finding("warning", "actions", f"{recording.folder.name}, {robot.action_column} dim {dim.name!r}", text))
    return out


def check_motion(key: str, stats: FieldStats, dims: tuple[Dim, ...]) -> list[Finding]:
    """Dims that hardly move or move little, and outliers that a Pipeline refuses."""
    out = []
    still = stats.near_constant(dims)
    if little := [f"{i} {dims[i].name!r}" for i in np.flatnonzero(stats.near_constant(dims, LITTLE) & ~still)]:
        text = f"move within {LITTLE:.0%} of their range. Normalised they fill all of -1 to 1, noise included: is that part of the robot used?"
        out.append(Finding("note", "motion", f"{key} dims {', '.join(little)}", text))
    for i, dim in enumerate(dims):
        where = f"{key} dim {i} {dim.name!r}"
        if still[i]:
            seen = f"q99 - q01 is {stats.q99[i] - stats.q01[i]:.3g} {dim.unit}, below {FLOOR:.1%} of {dim.low:g} to {dim.high:g}"
            text = f"{'is constant' if stats.min[i] == stats.max[i] else 'hardly moves'}: {seen}. It is widened to that before it is normalised; is it used?"
            out.append(Finding("warning", "motion", where, text))
        if (far := stats.farthest(dims)[i]) > LIMIT:
            text = (
                f"has outliers: {stats.min[i]:.3g} to {stats.max[i]:.3g} {dim.unit}, but 98 % lie in {stats.q01[i]:.3g} to {stats.q99[i]:.3g}. "
                f"Normalised that is {far:.3g}; training stops beyond {LIMIT:g}. Repair or exclude the episode."
            )
            out.append(Finding("error", "motion", where, text))
    return out


def check_clipped(normalised: np.ndarray, robot: Robot) -> list[Finding]:
    """State dims of which the prompt's bins cut off more than a few values; normalised: float64[n, S]."""
    out = []
    for dim, share in zip(robot.state, clipped_share(normalised), strict=True):
        if share > CLIPPED:
            text = f"{share:.0%} of its values fall outside the bins of the prompt; with its own statistics it would be 2 %. Compute those."
            out.append(Finding("warning", "statistics", f"state dim {dim.name!r}", text))
    return out


def check_prompts(recordings: Iterable[Recording]) -> list[Finding]:
    """Empty, unknown or all-equal prompts."""
    out, used = [], set()
    for recording in recordings:
        name = recording.folder.name
        if (unknown := recording.episode[recording.prompt == UNKNOWN]).size:
            out.append(Finding("error", "prompts", name, f"{name_episodes(unknown)}: a task that the dataset does not list. Copy its meta folder again."))
        for i, prompt in enumerate(recording.prompts):
            if not clean_task(prompt):
                where = name_episodes(recording.episode[recording.prompt == i])
                out.append(Finding("error", "prompts", name, f"{where}: an empty prompt, {prompt!r}. Say there what the robot does."))
        used |= {clean_task(prompt) for prompt in recording.prompts}
    if len(used) == 1:
        text = f"one prompt for all, {min(used)!r}: the policy learns to ignore language. Add other tasks or wordings, or know that it will."
        out.append(Finding("warning", "prompts", "all datasets", text))
    return out


def name_episodes(numbers: Iterable[int], limit: int = 8) -> str:
    """The episodes of `numbers`, each once, as text: "episodes 1, 2 and 7 more"."""
    distinct = list(dict.fromkeys(int(number) for number in numbers))
    shown = ", ".join(map(str, distinct[:limit])) + (f" and {len(distinct) - limit} more" if len(distinct) > limit else "")
    return f"episode{'s' * (len(distinct) > 1)} {shown}"


def _columns(recording: Recording, robot: Robot) -> tuple[tuple[str, tuple[Dim, ...], np.ndarray], ...]:
    return (robot.state_column, robot.state, recording.state), (robot.action_column, robot.actions, recording.actions)


def _grippers(robot: Robot) -> set[str]:
    return {dim.name for dim in (*robot.state, *robot.actions) if dim.kind == "gripper"}


def _guess(recording: Recording, action_dim: int, state_dim: int) -> Recorded:
    good = recording.finite
    action, state = recording.actions[:, action_dim].astype(np.float64), recording.state[:, state_dim].astype(np.float64)
    if not good.any() or np.ptp(action[good]) == 0 or np.ptp(state[good]) == 0:
        return "still"
    size, distance = float(np.median(np.abs(action[good]))), float(np.median(np.abs(action - state)[good]))
    if distance < NEAR * size:
        return "absolute"
    follows, steps = 0.0, 0.0
    for lag in LAGS:
        now, later = (rows[:: max(1, len(rows) // MAX_PAIRS)] for rows in recording.pairs(lag))
        follows = max(follows, _correlation(action[now], state[later]))
        steps = max(steps, _correlation(action[now], state[later] - state[now]))
    if follows > max(FOLLOWS, steps):
        return "absolute"  # in other units, if it is not near
    return "relative" if steps > max(STEPS, follows) or size < NEAR * distance else "unclear"


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """|Pearson's| of the ranks, so that a spike counts as one value; |...|: a gripper's command may run the other way; 0 where one is constant."""
    if not len(x):
        return 0.0
    x, y = (np.unique(values, return_inverse=True)[1].astype(np.float64) for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return abs(float((x * y).sum())) / size if size > 0 else 0.0
