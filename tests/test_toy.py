import json
import random
import sysconfig
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from hf_sparsebalance.errors import UserError
from recipes import toy


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return toy.build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_model_loads_as_plain_qwen2(model_folder):
    """The folder loads with the Auto classes as a small Qwen2 of the documented shape, with tied embeddings."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert type(model) is Qwen2ForCausalLM and type(model.config) is Qwen2Config
    shape = model.config.hidden_size, model.config.num_hidden_layers, model.config.num_attention_heads
    assert shape == (128, 2, 2)
    assert model.config.num_key_value_heads == 1 and model.config.head_dim == 64
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[72, 105]])).logits.shape == (1, 2, toy.VOCAB_SIZE)


def test_weights_depend_on_the_seed_only(tmp_path):
    """The same seed writes the same weights, another seed others, and the caller's random state is left alone."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    folders = [toy.build_model(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]]
    assert torch.equal(torch.rand(3), expected)
    a, b, c = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert a == b != c


def test_building_prints_nothing(tmp_path, capfd):
    """Building a model and documents writes to neither stdout nor stderr."""
    toy.build_model(tmp_path)
    toy.build_documents(tmp_path, num_train=1, num_heldout=1, max_bytes=50)
    assert capfd.readouterr() == ("", "")


def test_eos_and_pad_follow_the_bytes(model_folder, tokenizer):
    """eos and pad are two tokens of their own right after the bytes, and the model knows them."""
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)
    config = Qwen2Config.from_pretrained(model_folder)
    assert (config.eos_token_id, config.pad_token_id) == (256, 257) and config.vocab_size >= len(tokenizer)


def test_every_character_is_its_bytes(tokenizer):
    """Ids are the UTF-8 bytes of the text, for one character of every block of 64 code points and all of Latin-1."""
    points = [*range(0x100), *range(0x100, 0xD800, 64), *range(0xE000, 0x110000, 64)]
    text = unicodedata.normalize("NFC", "a".join(map(chr, points)))
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode("utf-8")
    assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_a_round_trip(tokenizer, text):
    """Any text comes back from its ids unchanged, up to the composed form that Qwen2's tokenizer brings it to."""
    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_documents_are_library_sources(tmp_path):
    """Each document is the start of the library file it names, cut at a character, and no text occurs twice."""
    root = Path(sysconfig.get_paths()["stdlib"])
    rows = [row for path in toy.build_documents(tmp_path, num_train=80, num_heldout=20, max_bytes=700)
            for row in read_rows(path)]  # fmt: skip
    assert len(rows) == 100 == len({row["name"] for row in rows}) == len({row["text"] for row in rows})
    for row in rows:
        raw, text = (root / row["name"]).read_bytes(), row["text"].encode("utf-8")
        assert raw.startswith(text) and len(text) <= 700
        assert len(text) == len(raw) or len(text) > 700 - 4
        assert not {"test", "tests", "site-packages", "lib2to3"} & set(Path(row["name"]).parts)


@pytest.mark.parametrize("max_bytes", range(1, 9))
def test_cut_never_tears_a_character(tmp_path, monkeypatch, max_bytes):
    """A cut inside a multi-byte character falls back to the character before."""
    text = "ab\u00e9\u65e5\U0001f389"
    (tmp_path / "mod.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    path, _ = toy.build_documents(tmp_path / "out", num_train=1, num_heldout=0, max_bytes=max_bytes)
    longest = max((text[:n] for n in range(len(text) + 1) if len(text[:n].encode()) <= max_bytes), key=len)
    assert read_rows(path) == [{"text": longest, "name": "mod.py"}]


def test_unfit_files_are_left_out(tmp_path, monkeypatch):
    """Tests, other people's packages, copies, blank, binary and non-UTF-8 files are no documents."""
    library = tmp_path / "lib"
    for name, content in {
        "good.py": b"x = 1\n", "pkg/good.py": b"x = 2\n", "copy.py": b"x = 1\n", "blank.py": b" \n", "nul.py": b"\0",
        "latin.py": b"# \xe9", "data.txt": b"text", "test/t.py": b"t = 1", "site-packages/p.py": b"p = 1",
        "lib2to3/l.py": b"l = 1", "pkg/tests/u.py": b"u = 1",
    }.items():  # fmt: skip
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    path, _ = toy.build_documents(tmp_path, num_train=2, num_heldout=0, max_bytes=100)
    assert sorted(row["name"] for row in read_rows(path)) == ["copy.py", "pkg/good.py"]
    with pytest.raises(UserError, match="3: the library has 2 files"):
        toy.build_documents(tmp_path, num_train=2, num_heldout=1, max_bytes=100)


def test_sample_depends_on_the_seed(tmp_path):
    """The same seed gives the same files, and more training documents leave the held-out ones as they are."""

    def build(name, num_train, seed):
        state = random.getstate()
        paths = toy.build_documents(tmp_path / name, num_train=num_train, num_heldout=5, max_bytes=100, seed=seed)
        assert random.getstate() == state
        return [path.read_bytes() for path in paths]

    first, again, longer, other = build("a", 9, 0), build("b", 9, 0), build("c", 20, 0), build("d", 9, 1)
    assert first == again
    assert longer[1] == first[1] and longer[0].startswith(first[0])
    assert other[0] != first[0]
