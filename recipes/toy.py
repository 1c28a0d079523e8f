"""A toy model and toy documents: real text with heavy-tailed lengths, no download, the same for everyone.

The model is a random Qwen2 with about a third of a million parameters; the documents are the source files of Python's
own standard library, one byte a token. Good for showing that something runs and balances, not for showing quality.
"""

import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from hf_sparsebalance.errors import UserError

HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 2
NUM_KV_HEADS = 1
HEAD_DIM = 64
INTERMEDIATE_SIZE = 256
MAX_POSITIONS = 32768
EOS_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
NUM_BYTES = 256
VOCAB_SIZE = 264  # 256 bytes, eos, pad, rounded up to a multiple of 8

# No text to learn from: tests and their data, generated tables, other people's packages.
SKIPPED_FOLDERS = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("lib2to3", "idlelib", "turtledemo"),
}


def build_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = HIDDEN_SIZE,
    num_layers: int = NUM_LAYERS,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
    head_dim: int = HEAD_DIM,
    intermediate_size: int = INTERMEDIATE_SIZE,
    max_positions: int = MAX_POSITIONS,
) -> Path:
    """Write a random Qwen2 and its byte-level tokenizer; `from_pretrained` of the Auto classes loads both.

    Args:
        folder: where to; made if missing.
        seed: of the weights; the caller's random state stays as it is.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, max_positions: the shape.

    Returns:
        The folder.
    """
    folder = Path(folder)
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with _no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer without merges: the id of a token is its byte, then eos (256) and pad (257).

    It is a Qwen2Tokenizer because AutoTokenizer rebuilds whatever lies beside a Qwen2 model as one. That class brings
    text to Unicode's composed form (NFC) first, so a round trip gives back the NFC of a text, and ids are its bytes.
    """
    alphabet = set(ByteLevel.alphabet())
    # The byte-level alphabet keeps printable bytes and moves the others, in order, to code points from 256 on.
    moved = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    vocab = {chr(byte) if chr(byte) in alphabet else chr(next(moved)): byte for byte in range(NUM_BYTES)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token=EOS_TOKEN,  # its default would be one more token, and no byte is ever unknown
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_documents(
    folder: str | Path, *, num_train: int, num_heldout: int, max_bytes: int, seed: int = 0
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl` with columns `text` and `name`: source files of the standard library.

    The two are disjoint, and no text occurs twice. The held-out documents depend on the seed and on `num_heldout`
    only, so that runs over more or fewer training documents are compared on the same ones.

    Args:
        folder: where to; made if missing.
        num_train, num_heldout: how many documents.
        max_bytes: a longer file is cut there, or up to 3 bytes before, at the end of a character.
        seed: of the sample.

    Returns:
        The paths of the training and of the held-out documents.

    Raises:
        UserError: if a number is out of range or the library has too few files.
    """
    if num_train < 1 or num_heldout < 0 or max_bytes < 1:
        raise UserError("num_train and max_bytes must be at least 1 and num_heldout at least 0")
    documents = list(_library_documents(max_bytes))
    if num_train + num_heldout > len(documents):
        raise UserError(
            f"num_train + num_heldout is {num_train + num_heldout}: the library has {len(documents)} files"
        )
    random.Random(seed).shuffle(documents)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train_path, heldout_path = folder / "train.jsonl", folder / "heldout.jsonl"
    _write(heldout_path, documents[:num_heldout])
    _write(train_path, documents[num_heldout : num_heldout + num_train])
    return train_path, heldout_path


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' bars quiet: a bar for one small file is noise in a recipe's output."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _library_documents(max_bytes: int) -> Iterator[tuple[str, str]]:
    """(name, text) of each distinct source file, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS.isdisjoint(name.parts):
            continue
        raw = path.read_bytes()
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        # The whole file is valid, so "ignore" can only drop a character that the cut has torn.
        text = raw[:max_bytes].decode("utf-8", errors="ignore")
        digest = hashlib.sha256(text.encode()).digest()
        if "\0" in text or not text.strip() or digest in seen:
            continue
        seen.add(digest)
        yield name.as_posix(), text


def _write(path: Path, documents: list[tuple[str, str]]) -> None:
    lines = (json.dumps({"text": text, "name": name}) + "\n" for name, text in documents)
    path.write_text("".join(lines), encoding="utf-8")
