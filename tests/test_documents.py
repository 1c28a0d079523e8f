import json
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_sparsebalance.documents import BATCH_DOCUMENTS, check_lengths, load_documents
from hf_sparsebalance.errors import UserError

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
EOS = 0


def make_tokenizer(*, eos=True, bos=False, chat_template=None):
    """Every character is a token; its id is its code point."""
    vocab = {"<eos>": EOS, "<bos>": 1, **{chr(point): point for point in range(2, 300)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>" if eos else None)
    tokenizer.chat_template = chat_template
    return tokenizer


TOKENIZER = make_tokenizer()


def ids(text):
    return [*map(ord, text), EOS]


def load(*data, max_length=1000, tokenizer=TOKENIZER, **options):
    return load_documents([str(entry) for entry in data], tokenizer=tokenizer, max_length=max_length, **options)


def rows(*data, **options):
    return load(*data, **options)[0]["input_ids"][:]


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_every_kind_of_file_gives_its_text(tmp_path):
    """Text, source, JSON lines and Parquet files, alone and in a folder, give their texts in order of their names."""
    (tmp_path / "a.py").write_bytes("x\r\n\u00e9".encode())
    write_lines(tmp_path / "b.jsonl", {"text": "two\u0085"}, {"text": "three", "more": 1})
    pq.write_table(pa.table({"n": [1, 2], "text": ["four", "five"]}), tmp_path / "c.parquet")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "e.txt").write_text("six")
    for hidden in (".hidden", ".git/config", "__pycache__/a.pyc"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"\xff")
    expected = [ids(text) for text in ("x\r\n\u00e9", "two\u0085", "three", "four", "five", "six")]
    assert rows(tmp_path) == expected
    assert rows(*(tmp_path / name for name in ("a.py", "b.jsonl", "c.parquet", "d"))) == expected


def test_columns_are_ids_and_lengths(tmp_path):
    """The dataset has the columns input_ids and length alone, and each length is the number of ids."""
    dataset, counts = load(write_lines(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "d"}))
    assert dataset.column_names == ["input_ids", "length"]
    assert dataset["length"][:] == [4, 2] == [len(row) for row in dataset["input_ids"]] == check_lengths(dataset)
    assert "\n" not in str(counts) and "2 documents read, 2 kept" in str(counts)


def test_saved_datasets_are_loaded(tmp_path):
    """A dataset of save_to_disk, with splits or without, gives the text of the asked column and split."""
    train, test = (datasets.Dataset.from_dict({"body": [text], "text": [1]}) for text in ("abc", "def"))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")
    assert rows(tmp_path / "one", text_column="body") == [ids("abc")]
    assert rows(tmp_path / "two", text_column="body", split="test") == [ids("def")]
    with pytest.raises(UserError, match="split 'dev', only train, test"):
        load(tmp_path / "two", text_column="body", split="dev")


def test_messages_go_through_the_chat_template(tmp_path):
    """A conversation is rendered by the tokenizer's template, without added tokens, and ends in one eos."""
    messages = [{"role": "u", "content": "hi"}, {"role": "a", "content": "yo"}]
    path = write_lines(tmp_path / "a.jsonl", {"text": None, "messages": messages}, {"text": "plain"}, {"messages": []})
    tokenizer = make_tokenizer(bos=True, chat_template=TEMPLATE)
    dataset, counts = load(path, tokenizer=tokenizer)
    assert dataset["input_ids"][:] == [ids("u:hi;a:yo;"), [1, *ids("plain")]] and counts.empty == 1
    closing = make_tokenizer(chat_template=TEMPLATE + "{{ eos_token }}{{ '\n' }}")
    assert rows(write_lines(path, {"messages": messages}), tokenizer=closing) == [[*ids("u:hi;a:yo;"), ord("\n")]]
    with pytest.raises(UserError, match=r"a\.jsonl line 1.*chat template"):
        load(path)
    with pytest.raises(UserError, match="line 1.*refuses it.*odd roles"):
        load(path, tokenizer=make_tokenizer(chat_template="{{ raise_exception('odd roles') }}"))


def test_eos_is_added_where_there_is_one(tmp_path):
    """Documents end in eos exactly where the tokenizer has one."""
    path = tmp_path / "a.txt"
    path.write_text("ab")
    assert rows(path) == [[97, 98, EOS]]
    assert rows(path, tokenizer=make_tokenizer(eos=False)) == [[97, 98]]


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8), max_length=st.integers(2, 8))
def test_overflow_policies_keep_their_promise(tmp_path_factory, sizes, max_length):
    """Truncating keeps a document's start, splitting keeps all but lone last tokens, dropping keeps short ones."""
    path = write_lines(tmp_path_factory.mktemp("x") / "a.jsonl", *({"text": "a" * size} for size in sizes))
    full = [ids("a" * size) for size in sizes]
    long = sum(len(row) > max_length for row in full)

    dataset, counts = load(path, max_length=max_length, overflow="truncate")
    assert dataset["input_ids"][:] == [row[:max_length] for row in full]
    assert (counts.read, counts.kept, counts.truncated) == (len(sizes), len(sizes), long)

    dataset, counts = load(path, max_length=max_length, overflow="split")
    joined = [token for row in dataset["input_ids"] for token in row]
    assert joined == [token for row in full for token in (row[:-1] if len(row) % max_length == 1 else row)]
    assert max(dataset["length"]) <= max_length and min(dataset["length"]) >= 2
    assert (counts.kept, counts.split, counts.truncated, counts.dropped) == (len(sizes), long, 0, 0)

    if long == len(sizes):
        with pytest.raises(UserError, match="--max_length"):
            load(path, max_length=max_length, overflow="drop")
    else:
        dataset, counts = load(path, max_length=max_length, overflow="drop")
        assert dataset["input_ids"][:] == [row for row in full if len(row) <= max_length]
        assert (counts.dropped, counts.kept) == (long, len(sizes) - long)


def test_empty_documents_are_counted_not_kept(tmp_path):
    """Documents without text are skipped and counted, also where a bos token would make them one token long."""
    path = write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": " \n"}, {"text": None}, {"text": "a"})
    dataset, counts = load(path, tokenizer=make_tokenizer(bos=True))
    assert len(dataset) == 1
    assert (counts.read, counts.kept, counts.empty) == (4, 1, 3)
    with pytest.raises(UserError, match="--data holds no document"):
        load(write_lines(path, {"text": ""}))


def test_batches_do_not_show(tmp_path):
    """More documents than one tokenizer call takes come out in their order."""
    texts = [str(number) for number in range(2 * BATCH_DOCUMENTS + 3)]
    assert rows(write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))) == [ids(t) for t in texts]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl line 2: not valid JSON"),
        (b'\n[{"text": "a"}]\n', r"a\.jsonl line 2: a list"),
        (b'{"body": "a"}\n', r"a\.jsonl line 1: no column 'text' or 'messages' \(columns: body\).*--text_column"),
        (b'{"text": 3}\n', r"a\.jsonl line 1: column 'text'"),
        (b'{"messages": ["hi"]}\n', r"a\.jsonl line 1: column 'messages'"),
        (b'{"text": "\xff"}\n', r"a\.jsonl: not UTF-8"),
        (b'{"text": "a\\ud800b"}\n', r"a\.jsonl line 1: column 'text' holds half a surrogate"),
        (b'{"text": ' + b"[" * 100_000 + b"\n", r"a\.jsonl line 1: not valid JSON"),
        (b"", "--data holds no document"),
    ],
)
def test_bad_content_is_named(tmp_path, content, reason):
    """Bad content is refused with one line that names the file, the line and what is wrong."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=reason) as error:
        load(tmp_path / "a.jsonl")
    assert "\n" not in str(error.value)


def test_bad_files_are_named(tmp_path, monkeypatch):
    """A missing or broken file, an empty folder, a foreign table and an unknown dataset are refused by name."""
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "empty" / ".link")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "n.parquet")
    for name, reason in [
        ("gone.jsonl", "no such file"), ("gone/x", "no such file"), ("bad.parquet", "Parquet"),
        ("empty", "holds no file"), ("n.parquet", r"columns: n"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=f"--data .*{name}.*{reason}"):
            load(tmp_path / name)

    def fail(name, split):
        raise datasets.exceptions.DatasetNotFoundError(f"no {name}\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"--data some/set: .*no some/set\)"):
        load("some/set")
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: stream)
    with pytest.raises(UserError, match="streaming"):
        load("some/set")


def test_bad_options_are_named():
    """Unfit options are refused by their names."""
    for options, reason in [
        ({"max_length": 1}, "--max_length"),
        ({"max_length": 2.5}, "--max_length"),
        ({"overflow": "cut"}, "--overflow"),
    ]:
        with pytest.raises(UserError, match=reason):
            load("a.txt", **options)
    with pytest.raises(UserError, match="--data is empty"):
        load_documents([], tokenizer=TOKENIZER, max_length=8)
    with pytest.raises(UserError, match="--data takes names"):
        load_documents([3], tokenizer=TOKENIZER, max_length=8)


def test_lengths_are_believed_or_counted():
    """A column length is believed, ids are counted otherwise, for all kinds and formats of map-style datasets."""
    plain = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]]})
    assert check_lengths(plain) == [2, 1, 3]
    assert check_lengths(plain.select([2, 0])) == [3, 2]
    assert check_lengths(plain.with_format("torch")) == [2, 1, 3]
    assert (
        check_lengths(plain.with_transform(lambda batch: {"input_ids": [[0] * 7 for _ in batch["input_ids"]]}))
        == [7] * 3
    )
    assert check_lengths(plain.add_column("length", [9, 8, 7])) == [9, 8, 7]
    assert check_lengths([{"input_ids": torch.arange(3)}, {"input_ids": [1], "length": torch.tensor(5)}]) == [3, 5]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield {"input_ids": [1]}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (None, "missing"),
        (Stream(), "Stream, whose lengths are unknown"),
        (datasets.Dataset.from_dict({"input_ids": [[1]]}).to_iterable_dataset(), "IterableDataset"),
        ([], "empty"),
        (datasets.Dataset.from_dict({"input_ids": []}), "empty"),
        (datasets.Dataset.from_dict({"text": ["a"]}), "no column input_ids"),
        ([{"text": "a"}], "row 0 has no input_ids"),
        ([[1, 2]], "row 0 has no input_ids"),
        (datasets.Dataset.from_dict({"input_ids": [[1], []]}), "row 1 has length 0"),
        ([{"input_ids": [1]}, {"input_ids": []}], "row 1 has length 0"),
        (datasets.Dataset.from_dict({"input_ids": [[1]], "length": [1.5]}), "row 0 has length 1.5"),
        (datasets.Dataset.from_dict({"input_ids": [[1], None]}), "row 1 has length None"),
    ],
)
def test_unfit_train_datasets_are_refused(dataset, reason):
    """A streaming, empty or untokenised dataset and rows without tokens are refused in a line naming train_dataset."""
    with pytest.raises(UserError, match=f"train_dataset .*{reason}"):
        check_lengths(dataset)
