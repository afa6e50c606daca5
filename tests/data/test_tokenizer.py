"""The prompt is openpi's, token for token, and nothing of it is lost in silence. The bundled tokenizer has PaliGemma's manners."""

import math
import pickle
import socket
import time
import warnings
from fractions import Fraction
from pathlib import Path

import fsspec
import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from pi05.data.tokenizer import Tokenizer, clean_task, clipped_share, discretise_state, load_tokenizer
from pi05.errors import DataError
from pi05.spec import ModelSpec

DATA = Path(__file__).resolve().parents[2] / "data"
TINY = DATA / "tokenizer/tiny.model"
LIMIT = ModelSpec.tiny().max_token_len
RAW = sentencepiece.SentencePieceProcessor(model_file=str(TINY))
STATE = np.array([-0.3, 0.999, -1.0, 0.0])
BINS = "89 255 0 128"
FINGERPRINT = "7810cdd6a2c9a943cce9be4902c359ad5c32f66f3e84d9dd8ebad72f37cb18b9"
RECORDED = [2, 274, 466, 389, 382, 263, 404, 485, 276, 466, 460, 479, 481, 460, 464, 474, 474, 486, 4, 275, 466, 460]
seeded = settings(max_examples=80, deadline=None, derandomize=True)
states = st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=8).map(np.array)


def tiny(**options: object) -> Tokenizer:
    return load_tokenizer(TINY, **{"max_token_len": LIMIT} | options)


def text(ids: np.ndarray) -> str:
    """What the pieces spell, by another processor than the tokenizer's."""
    return "".join(RAW.id_to_piece(int(i)) for i in ids[1:]).replace("▁", " ")


# --- the prompt


def test_the_prompt_is_openpis_text_behind_bos_and_without_eos() -> None:
    ids = tiny().encode("  pick_up the\ncup ", STATE)
    assert ids.dtype == np.int32
    assert text(ids) == f"Task: pick up the cup, State: {BINS};\nAction: "
    assert ids.tolist() == [2, *RAW.encode(f"Task: pick up the cup, State: {BINS};\nAction: ")]


def test_the_bundled_tokenizer_gives_the_recorded_ids() -> None:
    tokenizer = tiny()
    assert tokenizer.fingerprint == FINGERPRINT
    assert tokenizer.encode("pick up the puck", np.array([-0.3, 2.0])).tolist() == RECORDED


def test_upper_case_and_inner_spaces_stay_as_openpi_leaves_them() -> None:
    assert clean_task(" Pick  UP_\nit\n") == "Pick  UP  it"


@given(state=states)
@seeded
def test_token_ids_equal_openpis_for_the_same_normalised_unpadded_state(state: np.ndarray) -> None:
    """user_reports 10.2. The rule is written anew here, with exact fractions."""
    bins = [max(-1, min(255, math.floor((Fraction(float(s)) + 1) * 128))) for s in state]
    want = [2, *RAW.encode(f"Task: push, State: {' '.join(map(str, bins))};\nAction: ")]
    assert tiny(max_token_len=200).encode("push", state).tolist() == want


def test_bins_change_exactly_at_multiples_of_a_128th() -> None:
    edges = np.arange(-128, 128) / 128
    assert discretise_state(edges).tolist() == list(range(256))
    assert discretise_state(np.nextafter(edges, -2)).tolist() == list(range(-1, 255))
    assert discretise_state(np.array([-1e-20, 0.0, -0.0])).tolist() == [127, 128, 128]
    assert discretise_state(edges.astype(np.float32)).tolist() == list(range(256))


def test_a_state_below_minus_one_is_the_text_minus_one_and_above_one_is_255() -> None:
    """user_reports 10.3."""
    assert text(tiny().encode("go", np.array([-1.0001, -7, 0.9921875, 1, 7]))).startswith("Task: go, State: <0x2D>1 <0x2D>1 255 255 255;")
    assert clipped_share(np.array([[-1.1, 0.0], [0.5, 1.0], [1.5, -1.0], [0.0, 0.0]])).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_an_error_that_names_the_dim(value: float) -> None:
    """user_reports 10.3: np.digitize alone makes NaN the highest bin."""
    with pytest.raises(DataError, match="Dim 2 of the normalised state is -?(nan|inf); it cannot become tokens"):
        tiny().encode("go", np.array([0, 0, value, 0]))


def test_a_batch_of_states_is_refused() -> None:
    with pytest.raises(DataError, match=r"has shape \(1, 4\); the prompt takes one state"):
        tiny().encode("go", STATE[None])


def test_without_discrete_state_the_prompt_is_pi0s() -> None:
    want = [2, *RAW.encode("pick up the cup"), *RAW.encode("\n")]
    assert tiny(discrete_state=False).encode(" pick_up the cup\n", STATE).tolist() == want
    assert tiny().encode(" pick_up the cup\n", None).tolist() == want


# --- length


def long_task(words: int) -> str:
    return " ".join(["pick up the puck"] * words)


@pytest.mark.parametrize("discrete_state", [True, False])
def test_a_prompt_that_is_too_long_is_an_error_with_lengths_and_cure(discrete_state: bool) -> None:
    """user_reports 10.1: openpi warns and cuts the state and the tail."""
    length = len(tiny(discrete_state=discrete_state, max_token_len=9999).encode(long_task(30), STATE))
    with pytest.raises(DataError, match=rf"The prompt has {length} tokens, .* max_token_len is 72. Raise max_token_len to {length} or more, .*shorten_task"):
        tiny(discrete_state=discrete_state).encode(long_task(30), STATE)


def test_a_prompt_of_exactly_the_limit_is_kept_whole() -> None:
    length = len(tiny(max_token_len=999).encode(long_task(3), STATE))
    assert len(tiny(max_token_len=length).encode(long_task(3), STATE)) == length
    with pytest.raises(DataError, match=f"max_token_len is {length - 1}"):
        tiny(max_token_len=length - 1).encode(long_task(3), STATE)


@given(words=st.integers(0, 60), state=states, limit=st.integers(60, 90))
@seeded
def test_shortening_takes_whole_words_of_the_task_and_nothing_else(words: int, state: np.ndarray, limit: int) -> None:
    """user_reports 10.1: ", State: ...;\\nAction: " survives."""
    parts = [f"w{'o' * (i % 7)}rd{' ' * (1 + i % 2)}" for i in range(words)]
    task = "".join(parts)
    whole = tiny(max_token_len=9999).encode(task, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = tiny(max_token_len=limit, overflow="shorten_task").encode(task, state)
    assert len(ids) <= limit
    head, tail = text(ids).removeprefix("Task: ").split(", State: ")
    assert tail == text(whole).split(", State: ")[1]
    kept = head.split()
    assert kept == task.split()[: len(kept)] and head == head.rstrip()
    if len(kept) < words:
        one_more = tiny(max_token_len=9999).encode("".join(parts[: len(kept) + 1]), state)
        assert len(one_more) > limit, "no more than needed is cut"
    else:
        assert np.array_equal(ids, whole)


def test_a_task_without_spaces_is_cut_between_characters() -> None:
    tokenizer = tiny(overflow="shorten_task")
    with pytest.warns(UserWarning, match="The task is cut to '拿起杯"):
        ids = tokenizer.encode("拿起杯子" * 20, STATE)
    assert LIMIT - 3 < len(ids) <= LIMIT
    assert "杯子" in tokenizer.decode(ids) and "\ufffd" not in tokenizer.decode(ids)


def test_shortening_is_reported_once_and_counted() -> None:
    tokenizer = tiny(overflow="shorten_task")
    with pytest.warns(UserWarning, match=r"The prompt has \d+ tokens, .*max_token_len is 72. The task is cut to 'pick up") as caught:
        for _ in range(5):
            tokenizer.encode(long_task(30), STATE)
    assert len(caught) == 1 and tokenizer.shortened == 5


@pytest.mark.parametrize("overflow", ["error", "shorten_task"])
def test_a_state_that_fills_the_prompt_alone_is_always_an_error(overflow: str) -> None:
    with pytest.raises(DataError, match=r"Even without a task it is too long: raise max_token_len to \d+ or more"):
        tiny(overflow=overflow).encode("go", np.zeros(30))


@given(task=st.text(max_size=30), state=states)
@seeded
def test_length_is_an_upper_bound(task: str, state: np.ndarray) -> None:
    tokenizer = tiny(max_token_len=9999)
    assert len(tokenizer.encode(task, state)) <= tokenizer.length(task, len(state))
    worst = np.full(len(state), 200 / 128 - 1)
    assert len(tokenizer.encode(task, worst)) == tokenizer.length(task, len(state)), "and it is reached"


def test_every_bundled_prompt_fits_the_tiny_model_with_room() -> None:
    tasks = pyarrow.parquet.read_table(DATA / "metaworld_mini/meta/tasks.parquet")["task"].to_pylist()
    lengths = {task: tiny().length(task, 4) for task in [*tasks, "pick up the puck and place it at the goal"]}
    assert len(tasks) == 8 and max(lengths.values()) <= 40, lengths


# --- the bundled model


def test_the_bundled_tokenizer_has_paligemmas_special_ids_and_fits_the_tiny_spec() -> None:
    assert [RAW.pad_id(), RAW.eos_id(), RAW.bos_id(), RAW.unk_id()] == [0, 1, 2, 3]
    assert tiny().vocab_size <= 500
    tiny().check(ModelSpec.tiny())


def test_each_digit_is_a_token() -> None:
    pieces = [RAW.id_to_piece(i) for i in range(RAW.get_piece_size())]
    assert {piece for piece in pieces if any(c.isdigit() for c in piece) and not piece.startswith("<0x")} == set("0123456789")
    assert "\n" in pieces


@given(task=st.text(max_size=40))
@seeded
def test_every_text_is_encoded_and_comes_back(task: str) -> None:
    tokenizer = tiny(max_token_len=9999)
    ids = tokenizer.encode(task, STATE)
    assert RAW.unk_id() not in ids and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == f"Task: {clean_task(task)}, State: {BINS};\nAction: "
    assert tokenizer.decode(np.pad(ids, (0, 3))) == tokenizer.decode(ids), "padding has no text"


# --- sources


def test_a_tokenizer_that_the_model_cannot_embed_is_refused() -> None:
    with pytest.raises(DataError, match="tokenizer has 500 tokens, the model embeds 499"):
        tiny().check(ModelSpec.tiny().replace(vocab_size=499))
    with pytest.raises(DataError, match="prompts have 73 tokens, the model 72"):
        tiny(max_token_len=73).check(ModelSpec.tiny())


def test_a_tokenizer_travels_to_a_worker_process() -> None:
    tokenizer = pickle.loads(pickle.dumps(tiny()))
    assert np.array_equal(tokenizer.encode("go", STATE), tiny().encode("go", STATE)) and tokenizer.fingerprint == tiny().fingerprint


def test_a_local_file_or_folder_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """user_reports 12.9."""

    def refuse(*args: object) -> None:
        raise AssertionError("a look-up of a host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    (tmp_path / "tokenizer.model").write_bytes(TINY.read_bytes())
    assert load_tokenizer(tmp_path, max_token_len=LIMIT).fingerprint == load_tokenizer(str(TINY), max_token_len=LIMIT).fingerprint


@pytest.mark.parametrize("source", ["./nothing/here.model", "/nothing/here.model", "here.model"])
def test_a_missing_file_is_an_error_at_once_with_its_path(source: str) -> None:
    """user_reports 12.9."""
    started = time.monotonic()
    with pytest.raises(DataError, match=f"no tokenizer file '{source}'"):
        load_tokenizer(source, max_token_len=LIMIT)
    assert time.monotonic() - started < 2


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match="is no sentencepiece model. Give the file called tokenizer.model"):
        load_tokenizer(path, max_token_len=LIMIT)


@pytest.mark.parametrize(("source", "asked"), [("some/where", ("some/where", "tokenizer.model")), ("some/where/deep/x.model", ("some/where", "deep/x.model"))])
def test_a_hub_repository_is_asked_for_its_model_file(source: str, asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args: calls.append(args) or str(TINY))
    assert load_tokenizer(source, max_token_len=LIMIT).vocab_size == tiny().vocab_size and calls == [asked]


def test_a_hub_that_refuses_becomes_one_error_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("You are offline.\nMany lines follow.")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(DataError, match=r"'some/where' is neither a file .* \(OSError: You are offline.\). PaliGemma's needs an accepted licence"):
        load_tokenizer("some/where", max_token_len=LIMIT)


def test_a_url_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = fsspec.filesystem("memory")
    memory.pipe("/tok/tiny.model", TINY.read_bytes())
    first = load_tokenizer("memory://tok/tiny.model", max_token_len=LIMIT)
    memory.rm("/tok/tiny.model")
    assert load_tokenizer("memory://tok/tiny.model", max_token_len=LIMIT).fingerprint == first.fingerprint
    with pytest.raises(DataError, match=r"memory://tok/other.model cannot be read .* Download it elsewhere and give the file's path"):
        load_tokenizer("memory://tok/other.model", max_token_len=LIMIT)
    with pytest.raises(DataError, match="nosuch://x cannot be read"):
        load_tokenizer("nosuch://x", max_token_len=LIMIT)


def test_an_unknown_overflow_policy_is_refused() -> None:
    with pytest.raises(DataError, match="overflow is 'truncate'; it is one of error, shorten_task"):
        tiny(overflow="truncate")
