"""How many tokens the prompts of a dataset have, kept beside its statistics with what they were measured of.

max_token_len is a fact about data: copied from another dataset's recipe it cuts prompts or wastes memory, and nobody notices.

Axes: S: dims of the robot's state; n: frames.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from pi05.data.norm_stats import check_fingerprint, read_json, save_json
from pi05.data.tokenizer import Tokenizer
from pi05.errors import DataError

FORMAT_VERSION = 1
CURE = "Measure them again: python -m pi05.data.doctor"


@dataclasses.dataclass(frozen=True)
class TokenLengths:
    """Tokens a prompt, BOS and state included.

    p50, p99, max: of the frames that were counted. safe: the smallest max_token_len that no frame of this dataset can exceed, whatever its state.
    fingerprint: what they were measured of (token_fingerprint).
    """

    p50: int
    p99: int
    max: int
    safe: int
    fingerprint: dict[str, str]

    def save(self, path: Path) -> None:
        """Writes JSON."""
        save_json(path, {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            DataError: the file is missing, of a later release, or not ours.
        """
        content = read_json(path, CURE)
        if content.pop("format_version", None) != FORMAT_VERSION or set(content) != {field.name for field in dataclasses.fields(cls)}:
            raise DataError(f"{path} holds no token lengths that this release reads. {CURE}")
        return cls(**content)

    def check_fingerprint(self, expected: Mapping[str, str]) -> None:
        """Raises unless they are of what `expected` (token_fingerprint) says.

        Raises:
            DataError: lists the differing entries with both values.
        """
        check_fingerprint("The token lengths", self.fingerprint, expected, CURE)


def token_fingerprint(stats_fingerprint: Mapping[str, str], prompts: Sequence[str], tokenizer: Tokenizer) -> dict[str, str]:
    """Returns everything that decides the lengths, as text: of the statistics' fingerprint (measure.py) what is about the state, prompts, tokenizer."""
    kept = {key: stats_fingerprint[key] for key in ("dataset", "robot", "robot conversion", "robot state") if key in stats_fingerprint}
    texts = hashlib.sha256("\0".join(sorted(set(prompts))).encode()).hexdigest()[:16]
    return kept | {
        "prompts": f"{len(set(prompts))} prompts, {texts}",
        "tokenizer": tokenizer.fingerprint[:16],
        "discrete_state": str(tokenizer.discrete_state),
    }


def measure_token_lengths(
    tokenizer: Tokenizer, states: np.ndarray, prompts: Sequence[str], all_prompts: Sequence[str], fingerprint: dict[str, str]
) -> TokenLengths:
    """Counts the tokens of frames, given as normalised `states` [n, S] with their `prompts`, n > 0; `all_prompts`: each distinct one of the dataset.

    The tokenizer must have a max_token_len beyond any prompt.
    """
    lengths = [len(tokenizer.encode(prompt, state)) for prompt, state in zip(prompts, states, strict=True)]
    p50, p99 = np.percentile(lengths, (50, 99), method="higher")
    safe = max(tokenizer.length(prompt, states.shape[1]) for prompt in all_prompts)
    return TokenLengths(int(p50), int(p99), max(lengths), safe, fingerprint)
