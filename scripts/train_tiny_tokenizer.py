"""Trains the small sentencepiece model of the tiny spec, data/tokenizer/tiny.model, on made-up robot prompts and state strings.

    python scripts/train_tiny_tokenizer.py --out data/tokenizer/tiny.model

It has what matters of PaliGemma's: pad 0, eos 1, bos 2, unk 3; each digit and the newline a piece of its own; spaces kept as they are; bytes
for everything else, so that any text can be encoded. The same sentencepiece release gives the same file.
"""

import argparse
import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from pi05.data.tokenizer import STATE_BINS, make_prompt

VOCAB_SIZE = 500  # ModelSpec.tiny() has 509 rows
LINES = 4000
VERBS = ("pick up", "put", "place", "push", "pull", "move", "lift", "hold", "open", "close", "press", "slide", "turn", "grasp", "stack", "fold", "insert")
COLOURS = ("", "red ", "green ", "blue ", "yellow ", "black ", "white ")
THINGS = ("puck", "ball", "cup", "block", "cube", "bowl", "plate", "bottle", "drawer", "door", "window", "button", "lid", "towel", "handle", "peg", "gripper")
PLACES = ("goal", "box", "bin", "table", "shelf", "basket", "tray", "rack", "sink", "hole")
JOINTS = ("on", "in", "into", "at", "to", "from", "above", "and place it at", "and hold it at", "with the left hand and put it in", "with the right arm")


def sentences() -> Iterator[str]:
    """Prompts of every verb with every thing, each with a random state, in the exact form that the model reads."""
    rng = np.random.default_rng(0)
    pairs = itertools.cycle(itertools.product(VERBS, THINGS))
    for verb, thing in itertools.islice(pairs, LINES):
        colour, joint, place = (str(rng.choice(words)) for words in (COLOURS, JOINTS, PLACES))
        task = f"{verb} the {colour}{thing}" + (f" {joint} the {place}" if rng.random() < 0.7 else "")
        yield make_prompt(task, rng.integers(-1, STATE_BINS, rng.integers(4, 15)))


def train() -> bytes:
    """Returns the serialised model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        byte_fallback=True,
        split_digits=True,
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/tokenizer/tiny.model"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(train())
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
