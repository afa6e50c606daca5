"""From a prompt and a robot's state to tokens: PaliGemma's sentencepiece model and the exact text that Pi0.5 was trained on.

With the state: "Task: pick up the cup, State: 12 255 0;\nAction: ", behind BOS, without EOS. Without (Pi0): BOS, the task, one newline.

Axes: S: dims of the robot's state; n: tokens of one prompt.
"""

import bisect
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import sentencepiece

from pi05.errors import DataError
from pi05.spec import ModelSpec

Overflow = Literal["error", "shorten_task"]

STATE_BINS = 256
BIN_EDGES = np.arange(STATE_BINS) * (2 / STATE_BINS) - 1  # exact; (s + 1) * 128 in floating point would lift -1e-20 into the next bin
MODEL_FILE = "tokenizer.model"  # in the Hub's PaliGemma repositories


def clean_task(prompt: str) -> str:
    """Returns the task text as it enters the prompt: stripped, "_" and newlines as spaces; upper case stays."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def discretise_state(state: np.ndarray) -> np.ndarray:
    """Returns int64[S], the bins of a normalised, un-padded state [S]: floor((s + 1) * 128), 255 from 127/128 on, -1 below -1.

    That -1, a token sequence of its own, is openpi's rule; about one value in a hundred is below q01 by definition.

    Raises:
        DataError: a value is not finite; names the dim.
    """
    state = np.asarray(state)
    if state.ndim != 1:
        raise DataError(f"The normalised state has shape {state.shape}; the prompt takes one state [S].")
    if bad := np.flatnonzero(~np.isfinite(state)).tolist():
        raise DataError(f"Dim {bad[0]} of the normalised state is {state[bad[0]]}; it cannot become tokens. Check the dataset and its statistics.")
    return np.searchsorted(BIN_EDGES, state, side="right") - 1


def clipped_share(states: np.ndarray) -> np.ndarray:
    """Returns float64[S], the share of normalised `states` [..., S] outside [-1, 1], which the two outermost bins cannot tell apart."""
    return (np.abs(states) > 1).reshape(-1, states.shape[-1]).mean(0)


def make_prompt(task: str, bins: Sequence[int] | np.ndarray) -> str:
    """Returns the text that the model reads for a clean `task` and state `bins`."""
    return f"Task: {task}, State: {' '.join(map(str, bins))};\nAction: "


class Tokenizer:
    """A sentencepiece model with a prompt format; made by load_tokenizer. Pickles, and changes only in its counter.

    model: bytes of the sentencepiece file. fingerprint: their SHA-256.
    max_token_len: the longest prompt in tokens. shortened: prompts that were shortened to it so far (in this process).
    """

    def __init__(self, model: bytes, *, max_token_len: int, discrete_state: bool = True, overflow: Overflow = "error") -> None:
        self.max_token_len, self.discrete_state, self.overflow, self.shortened = max_token_len, discrete_state, overflow, 0
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.model = model
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are below it."""
        return self._model.get_piece_size()

    def check(self, spec: ModelSpec) -> None:
        """Raises unless every prompt fits the model of `spec`.

        Raises:
            DataError: the vocabulary or the length limit is larger than the model's.
        """
        if self.vocab_size > spec.vocab_size:
            raise DataError(f"The tokenizer has {self.vocab_size} tokens, the model embeds {spec.vocab_size}. Take the tokenizer that belongs to the model.")
        if self.max_token_len > spec.max_token_len:
            raise DataError(f"The tokenizer lets prompts have {self.max_token_len} tokens, the model {spec.max_token_len}. Give both the same max_token_len.")

    def encode(self, prompt: str, state: np.ndarray | None) -> np.ndarray:
        """Returns int32[n], un-padded, n <= max_token_len.

        state: normalised, un-padded [S]; float64 keeps bin edges where openpi has them. None, or discrete_state=False: the format without it.

        Raises:
            DataError: the state is not finite, or the prompt is too long and may not be, or cannot be, shortened.
        """
        task = clean_task(prompt)
        format_ids = self._formatter(None if state is None or not self.discrete_state else discretise_state(state))
        ids = format_ids(task)
        if len(ids) > self.max_token_len:
            ids = self._shorten(task, format_ids, len(ids))
        return np.array(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`; BOS and padding have none."""
        return self._model.decode([int(i) for i in ids])

    def length(self, prompt: str, state_dim: int) -> int:
        """Returns the number of tokens of `prompt` with the worst state of `state_dim` dims, before any shortening.

        An upper bound for models that, as PaliGemma's, never merge across a space or digits: then each dim counts for itself.
        """
        bins = [self._longest_bin] * state_dim if self.discrete_state else None
        return len(self._formatter(bins)(clean_task(prompt)))

    @functools.cached_property
    def _longest_bin(self) -> int:
        return max(range(-1, STATE_BINS), key=lambda i: len(self._model.encode(f"0 {i} 0")))

    def _formatter(self, bins: Sequence[int] | np.ndarray | None) -> Callable[[str], list[int]]:
        """A function from a clean task to ids."""
        model = self._model
        if bins is None:
            return lambda task: [model.bos_id(), *model.encode(task), *model.encode("\n")]
        return lambda task: [model.bos_id(), *model.encode(make_prompt(task, bins))]

    def _shorten(self, task: str, format_ids: Callable[[str], list[int]], length: int) -> list[int]:
        """The ids with as much of the beginning of the task as fits: whole words, or characters where one word is too long."""
        limit, rest = self.max_token_len, len(format_ids(""))
        lengths = f"The prompt has {length} tokens, {length - rest} of them its task; max_token_len is {limit}."
        if rest > limit:
            raise DataError(f"{lengths} Even without a task it is too long: raise max_token_len to {rest} or more, or leave the state out of the prompt.")
        if self.overflow == "error":
            raise DataError(
                f"{lengths} Raise max_token_len to {length} or more, shorten the task {task[:60]!r}, or say overflow='shorten_task', "
                "which cuts the end of the task and keeps the state."
            )
        kept = bisect.bisect_right(range(len(task)), limit, key=lambda end: len(format_ids(_beginning(task, end)))) - 1
        self.shortened += 1
        if self.shortened == 1:
            warnings.warn(f"{lengths} The task is cut to {_beginning(task, kept)!r}. Tokenizer.shortened counts further ones.", stacklevel=3)
        return format_ids(_beginning(task, kept))


def load_tokenizer(source: str | Path, *, max_token_len: int, discrete_state: bool = True, overflow: Overflow = "error") -> Tokenizer:
    """Loads a sentencepiece model and returns it as the tokenizer of Pi0.5's prompts.

    source: a file, or a folder with a tokenizer.model; a Hub repository with one ("google/paligemma-3b-pt-224") or another file in it
        ("owner/name/path/x.model"); or a URL that fsspec reads ("gs://big_vision/paligemma_tokenizer.model", with gcsfs installed), fetched once.
    discrete_state: the state is part of the prompt (Pi0.5); False: Pi0's format, also that of openpi's pi05_libero.
    overflow: of a prompt beyond max_token_len. "error", or "shorten_task": words leave the end of the task, never the state or "Action:".

    Raises:
        DataError: there is no such file, or it is no sentencepiece model.
    """
    if overflow not in get_args(Overflow):
        raise DataError(f"overflow is {overflow!r}; it is one of {', '.join(get_args(Overflow))}.")
    path = _locate(str(source))
    try:
        return Tokenizer(path.read_bytes(), max_token_len=max_token_len, discrete_state=discrete_state, overflow=overflow)
    except RuntimeError as error:
        raise DataError(f"{path} is no sentencepiece model. Give the file called tokenizer.model, not tokenizer.json.") from error


def _beginning(task: str, end: int) -> str:
    """The words of `task` that end before character `end`, or its first `end` characters if it has no word as short."""
    words, space, _ = task[:end].rpartition(" ")
    return (words if space else task[:end]).rstrip()


def _locate(source: str) -> Path:
    """The local file of `source`, downloaded if need be."""
    path = Path(source).expanduser()
    for file in (path, path / MODEL_FILE):
        if file.is_file():
            return file
    if "://" in source:
        return _fetch(source)
    if path.is_absolute() or source.startswith((".", "~")) or path.is_dir() or len(path.parts) < 2:
        raise DataError(f"There is no tokenizer file {source!r} (from {Path.cwd()}). Give a sentencepiece model, a Hub repository or a gs:// URL.")
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    owner, name, *inner = path.parts
    try:
        return Path(huggingface_hub.hf_hub_download(f"{owner}/{name}", "/".join(inner) or MODEL_FILE))
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{source!r} is neither a file (from {Path.cwd()}) nor a tokenizer that the Hub gives out now ({type(error).__name__}: {reason}). "
            "PaliGemma's needs an accepted licence and a login; a copy of tokenizer.model by its path works without."
        ) from error


def _fetch(url: str) -> Path:
    """The file of `url`, from the cache if it was ever fetched: a run must not need the network for it."""
    import fsspec

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pi05"
    cached = cache / f"tokenizer-{hashlib.sha256(url.encode()).hexdigest()[:16]}.model"
    if cached.is_file():
        return cached
    try:
        with fsspec.open(url, "rb") as file:
            content = file.read()
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"{url} cannot be read ({error}), and {cached} does not exist. Download it elsewhere and give the file's path.") from error
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
        file.write(content)
    os.replace(file.name, cached)
    return cached
