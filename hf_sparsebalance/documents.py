"""Files -> tokenised documents with lengths.

One document is one training sample; planning needs every length before the first step, so everything is read and
tokenised up front. The price is memory (4 bytes a token, in every process) and a start-up that grows with the data;
for corpora beyond a few billion tokens tokenise once, `save_to_disk`, and pass the dataset as `train_dataset`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError
from jinja2.exceptions import TemplateError

from hf_sparsebalance.errors import UserError

Overflow = Literal["truncate", "split", "drop"]

# Documents tokenised in one call: enough for the tokenizer's threads, few enough to keep long texts out of memory.
BATCH_DOCUMENTS = 64
MESSAGES_COLUMN = "messages"
_FEATURES = datasets.Features({"input_ids": datasets.List(datasets.Value("int32")), "length": datasets.Value("int64")})
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_TABLE_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class DocumentCounts:
    """What became of the documents. `read == kept + empty + dropped`; `truncated` and `split` are among `kept`.

    A split document counts once here and gives several rows of the dataset.
    """

    read: int
    kept: int
    empty: int
    truncated: int
    split: int
    dropped: int

    def __str__(self) -> str:
        return (
            f"{self.read} documents read, {self.kept} kept ({self.truncated} truncated, {self.split} split), "
            f"{self.empty} empty, {self.dropped} dropped as too long"
        )


class _Document(NamedTuple):
    text: str
    is_chat: bool  # a rendered conversation brings its own special tokens


def load_documents(
    data: Sequence[str],
    *,
    tokenizer: Any,
    max_length: int,
    overflow: Overflow = "truncate",
    text_column: str = "text",
    split: str = "train",
) -> tuple[datasets.Dataset, DocumentCounts]:
    """Read and tokenise documents.

    Args:
        data: each entry is a `.jsonl`/`.json` file (one object per line), a `.parquet` file, any other file (one
            document, UTF-8), a folder (all such files below it, sorted, hidden ones skipped), a dataset saved with
            `save_to_disk`, or a name that `datasets.load_dataset` takes. Tables hold their text in `text_column`, or
            a conversation in `messages`, which the tokenizer's chat template renders.
        tokenizer: a transformers tokenizer. Its eos token, where it has one, ends every document.
        max_length: most tokens of a row, the eos token included.
        overflow: what becomes of a longer document: its end is cut off (`truncate`), it gives several rows (`split`;
            a last piece of one token, which predicts nothing, is left out), or it is left out (`drop`).
        text_column: column of the text.
        split: which split of a dataset to read; files have none.

    Returns:
        The rows in the order of `data`, with columns `input_ids` (list of int, never empty) and `length` (tokens), and
        the counts.

    Raises:
        UserError: on an unknown option, unreadable or malformed input, or when no document is left.
    """
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise UserError(f"--max_length is {max_length!r}: give a whole number of at least 2 tokens")
    if overflow not in get_args(Overflow):
        raise UserError(f"--overflow is {overflow!r}: choose one of {', '.join(get_args(Overflow))}")
    entries = [data] if isinstance(data, (str, Path)) else list(data)
    if not entries:
        raise UserError("--data is empty: name at least one file, folder or dataset")
    documents = chain.from_iterable(_read_entry(entry, tokenizer, text_column, split) for entry in entries)

    read = kept = empty = truncated = split_count = dropped = 0
    tables: list[pa.Table] = []
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        rows: list[list[int]] = []
        for ids in _tokenise(batch, tokenizer):
            read += 1
            if not ids:
                empty += 1
            elif len(ids) <= max_length:
                rows.append(ids)
            elif overflow == "truncate":
                rows.append(ids[:max_length])
                truncated += 1
            elif overflow == "split":
                pieces = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
                rows.extend(piece for piece in pieces if len(piece) > 1)
                split_count += 1
            else:
                dropped += 1
        columns = {"input_ids": rows, "length": [len(row) for row in rows]}
        tables.append(pa.Table.from_pydict(columns, schema=_FEATURES.arrow_schema))

    kept = read - empty - dropped
    counts = DocumentCounts(read, kept, empty, truncated, split_count, dropped)
    if kept == 0:
        way_out = "raise --max_length or choose another --overflow" if dropped else "check the files and --text_column"
        raise UserError(f"--data holds no document to train on ({counts}): {way_out}")
    return datasets.Dataset(pa.concat_tables(tables)), counts


def check_lengths(dataset: Any) -> list[int]:
    """Lengths (tokens) of the rows of a user's own dataset.

    Args:
        dataset: a `datasets.Dataset` or any map-style dataset (`__len__`, `__getitem__`) of rows with `input_ids`. A
            column `length` is believed where there is one; otherwise lengths are counted.

    Returns:
        One length per row, all at least 1.

    Raises:
        UserError: if the dataset is streaming, empty, without `input_ids`, or holds a row without tokens.
    """
    if dataset is None:
        raise UserError("train_dataset is missing: pass a dataset with a column input_ids")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"train_dataset is a {type(dataset).__name__}, whose lengths are unknown before it is read: "
            "pass a map-style dataset (without streaming=True)"
        )
    if len(dataset) == 0:
        raise UserError("train_dataset is empty: pass at least one row")
    # A format set by the user (set_transform, torch tensors) may compute the columns, so only its rows can be trusted.
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        lengths: Iterable[Any] = _column_lengths(dataset)
    else:
        lengths = (_row_length(dataset[index], index) for index in range(len(dataset)))
    return [_checked_length(length, index) for index, length in enumerate(lengths)]


def _column_lengths(dataset: datasets.Dataset) -> Iterator[Any]:
    column = next((name for name in ("length", "input_ids") if name in dataset.column_names), None)
    if column is None:
        raise UserError(f"train_dataset has no column input_ids, only {', '.join(dataset.column_names)}: tokenise it")
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        values = table[column]
        yield from (values if column == "length" else pc.list_value_length(values)).to_pylist()


def _row_length(row: Any, index: int) -> Any:
    if not hasattr(row, "keys") or "input_ids" not in row:
        raise UserError(f"train_dataset row {index} has no input_ids: rows must be dicts of a tokenised document")
    return row["length"] if "length" in row else len(row["input_ids"])


def _checked_length(length: Any, index: int) -> int:
    # Tensors and numpy numbers (a dataset with a torch or numpy format) are welcome, floats are not.
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise UserError(f"train_dataset row {index} has length {length!r}: a whole number of tokens is needed")
    tokens = int(length)
    if tokens < 1:
        raise UserError(f"train_dataset row {index} has length {tokens}: filter out rows without tokens")
    return tokens


def _tokenise(batch: list[_Document], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each document, the eos token included; an empty list for a document without tokens."""
    eos = tokenizer.eos_token_id
    num_special = len(tokenizer("")["input_ids"])
    for is_chat, group in groupby(batch, key=lambda document: document.is_chat):
        texts = [document.text for document in group]
        encoded = tokenizer(texts, add_special_tokens=not is_chat, return_attention_mask=False, verbose=False)
        for text, ids in zip(texts, encoded["input_ids"], strict=True):
            if not text.strip() or len(ids) <= (0 if is_chat else num_special):
                yield []
                continue
            # A chat template often writes the eos token and a newline itself: a second one would teach nothing.
            has_eos = text.rstrip().endswith(tokenizer.eos_token) if is_chat and eos is not None else ids[-1] == eos
            yield list(ids) if eos is None or has_eos else [*ids, eos]


def _read_entry(entry: Any, tokenizer: Any, text_column: str, split: str) -> Iterator[_Document]:
    if not isinstance(entry, (str, Path)):
        raise UserError(f"--data takes names of files, folders and datasets, not a {type(entry).__name__}")
    if not str(entry).strip():
        raise UserError("--data holds an empty name (an unset variable?): name files, folders or datasets")
    path = Path(entry).expanduser()
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        yield from _read_dataset(str(path), path, tokenizer, text_column, split)
    elif path.is_dir():
        files = list(_walk(path))
        if not files:
            raise UserError(f"--data {entry}: the folder holds no file")
        for file in files:
            yield from _read_file(file, tokenizer, text_column)
    elif path.exists():
        yield from _read_file(path, tokenizer, text_column)
    elif path.suffix in (*_TABLE_SUFFIXES, ".txt") or not _HUB_NAME.fullmatch(str(entry)):
        raise UserError(f"--data {entry}: no such file or folder")
    else:
        yield from _read_dataset(str(entry), None, tokenizer, text_column, split)


def _walk(folder: Path) -> Iterator[Path]:
    """All files below the folder, sorted; hidden ones and compiled Python left out."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _read_file(path: Path, tokenizer: Any, text_column: str) -> Iterator[_Document]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _read_parquet(path, tokenizer, text_column)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path}: not UTF-8 text (byte {error.start}): convert it or leave it out") from error
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read ({error.strerror})") from error
    if suffix not in _TABLE_SUFFIXES:
        yield _Document(text, is_chat=False)
        return
    # Not splitlines(): JSON strings may hold raw U+2028 and the like, which would tear a line apart.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--data {where}: not valid JSON ({error}): write one object per line") from error
        if not isinstance(row, dict):
            raise UserError(f"--data {where}: a {type(row).__name__}, not an object: write one object per line")
        yield _document(row, where, tokenizer, text_column)


def _read_parquet(path: Path, tokenizer: Any, text_column: str) -> Iterator[_Document]:
    try:
        with pq.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in (text_column, MESSAGES_COLUMN)]
            _check_columns(wanted, file.schema_arrow.names, str(path), text_column)
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield _document(row, f"{path} row {number}", tokenizer, text_column)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"--data {path}: not a readable Parquet file ({_first_line(error)})") from error


def _read_dataset(name: str, saved: Path | None, tokenizer: Any, text_column: str, split: str) -> Iterator[_Document]:
    try:
        loaded = datasets.load_dataset(name, split=split) if saved is None else datasets.load_from_disk(saved)
    except (OSError, ValueError, RuntimeError, DatasetsError, pa.ArrowException) as error:
        kind = "a file or folder here, and datasets cannot load it" if saved is None else "a readable saved dataset"
        raise UserError(f"--data {name}: not {kind} ({_first_line(error)})") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"--data {name}: no split {split!r}, only {', '.join(loaded)}: choose one of them")
        loaded = loaded[split]
    if not isinstance(loaded, datasets.Dataset):
        raise UserError(f"--data {name}: a streaming dataset has no known lengths: load it without streaming")
    wanted = [column for column in loaded.column_names if column in (text_column, MESSAGES_COLUMN)]
    _check_columns(wanted, loaded.column_names, name, text_column)
    for number, row in enumerate(loaded.select_columns(wanted).with_format(None), start=1):
        yield _document(row, f"{name} row {number}", tokenizer, text_column)


def _check_columns(wanted: Sequence[str], columns: Iterable[str], where: str, text_column: str) -> None:
    if not wanted:
        have = ", ".join(map(str, columns)) or "none"
        raise UserError(
            f"--data {where}: no column {text_column!r} or {MESSAGES_COLUMN!r} (columns: {have}): "
            "name the right one with --text_column"
        )


def _document(row: dict[str, Any], where: str, tokenizer: Any, text_column: str) -> _Document:
    columns = [name for name in (text_column, MESSAGES_COLUMN) if name in row]
    _check_columns(columns, row, where, text_column)
    column = next((name for name in columns if row[name] is not None), columns[0])
    value = row[column]
    if value is None:  # a null of a table is an empty document
        return _Document("", is_chat=False)
    if isinstance(value, str):
        return _Document(_checked_text(value, where, column), is_chat=False)
    if not isinstance(value, list) or not all(isinstance(message, dict) and "role" in message for message in value):
        raise UserError(f"--data {where}: column {column!r} holds neither text nor a list of messages with a role")
    if not value:
        return _Document("", is_chat=False)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--data {where}: messages need a chat template and the tokenizer has none: "
            "set tokenizer.chat_template, use a chat model's tokenizer, or name a text with --text_column"
        )
    try:
        text = tokenizer.apply_chat_template(value, tokenize=False)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"--data {where}: the chat template refuses it ({_first_line(error)})") from error
    return _Document(_checked_text(text, where, column), is_chat=True)


def _checked_text(text: str, where: str, column: str) -> str:
    """The text, if it can be written as UTF-8: JSON may escape half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"--data {where}: column {column!r} holds half a surrogate pair, which no tokenizer reads"
        ) from error
    return text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
