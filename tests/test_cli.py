"""The command line, in this process: mistakes end with one line and status 2, the commands work together."""

import contextlib
import io
import json
import shutil

import datasets
import planning_profiles
import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

from hf_sparsebalance.cli import COMMANDS, main
from hf_sparsebalance.latency_profile import LatencyProfile
from recipes.toy import build_model

TEXTS = [
    f"Document {number}: " + "the quick brown fox jumps over the lazy dog. " * (1 + number) for number in range(8)
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A toy model with its tokenizer; tests that change it copy it."""
    return build_model(
        tmp_path_factory.mktemp("model"), hidden_size=32, num_heads=2, head_dim=16, intermediate_size=48
    )


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def flags(model_folder, data_file, tmp_path):
    """Flags of a run without a profile that would work; a test changes one of them."""
    return {
        "model_name_or_path": model_folder,
        "data": data_file,
        "output_dir": tmp_path / "out",
        "max_length": 512,
        "batching": "random",
        "tolerance": 0,
        "block_size": 16,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def command_line(flags):
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def assert_one_line(capfd, status, *wanted):
    """Status 2, nothing on stdout, and one line on stderr that has each wanted text."""
    out, err = capfd.readouterr()
    assert status == 2, err
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("sparsebalance")
    for text in wanted:
        assert text in lines[0], lines[0]


def written_to(folder):
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


def refused(capfd, flags, *wanted, extra=()):
    """`train` with these flags is refused and leaves no file behind."""
    capfd.readouterr()
    status = main(["train", *command_line(flags), *extra])
    assert_one_line(capfd, status, *wanted)
    assert not flags["output_dir"].exists()


# Mistakes.


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"tolerance": 1.5}, "--tolerance"),
        ({"tolerance": -1}, "--tolerance"),
        ({"tolerance": "much"}, "--tolerance"),
        ({"base_top_p": 0}, "--base_top_p"),
        ({"base_top_p": 1.5}, "--base_top_p"),
        ({"base_top_k": 0}, "--base_top_k"),
        ({"base_top_k": 2, "base_top_p": 0.5}, "--base_top_p and --base_top_k"),
        ({"base_top_k": 2, "tolerance": 0.1, "anchor": "optimal"}, "--anchor mean"),
        ({"base_top_k": 2, "tolerance": 1.0, "anchor": "mean"}, "--tolerance"),
        ({"block_size": 0}, "--block_size"),
        ({"anchor": "median"}, "--anchor"),
        ({"batching": "sorted"}, "--batching"),
        ({"scope": "node"}, "--scope"),
        ({"overflow": "wrap"}, "--overflow"),
        ({"max_length": 1}, "--max_length"),
        ({"toleranse": 0.1}, "--toleranse"),
        ({"lora_r": -1}, "--lora_r"),
        ({"attn_implementation": "sparse"}, "sparse"),
        ({"dtype": "float99"}, "--dtype"),
        ({"num_ranks": 2}, "--num_ranks"),
        ({"pipeline_parallel_size": 0}, "--pipeline_parallel_size"),
        ({"pipeline_parallel_size": 2}, "--pipeline_parallel_size"),
        ({"pipeline_schedule": "fast"}, "--pipeline_schedule"),
        ({"rank_speed": "fast"}, "--rank_speed"),
        ({"rank_speed": "auto"}, "--rank_speed"),
        ({"attn_implementation": "sdpa", "tolerance": 0.1}, "--tolerance"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": 100}, "gradient_accumulation_steps"),
        ({"train_sampling_strategy": "group_by_length"}, "--train_sampling_strategy"),
        ({"resume_from_checkpoint": "/nowhere/checkpoint-1"}, "/nowhere/checkpoint-1"),
        ({"seed": -1}, "--seed"),
        ({"lora_r": 2, "lora_dropout": 2}, "--lora_dropout"),
        ({"eval_strategy": "steps"}, "--eval_data"),
        ({"data": ""}, "--data"),
    ],
)
def test_bad_values(capfd, flags, changes, wanted):
    """A value out of range, or an unknown option, is one line that names it."""
    refused(capfd, flags | changes, wanted)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("", "no document"),
        ("\n\n", "no document"),
        ('{"text": ""}\n{"text": "  "}\n', "no document"),
        ('{"text": "good"}\n{"text": \n', "train.jsonl line 2"),
        ('{"body": "good"}\n', "--text_column"),
        ('["good"]\n', "train.jsonl line 1"),
        ('{"text": "only one document"}\n', "1 samples"),
    ],
)
def test_bad_documents(capfd, flags, data_file, content, wanted):
    """Missing, empty or malformed documents are one line that names the file, line, or number."""
    data_file.write_text(content)
    refused(capfd, flags, wanted)


def test_missing_documents(capfd, flags, tmp_path):
    """A data file that is not there, or a folder without files, is named."""
    refused(capfd, flags | {"data": tmp_path / "none.jsonl"}, "--data", "none.jsonl")
    (tmp_path / "empty").mkdir()
    refused(capfd, flags | {"data": tmp_path / "empty"}, "--data", "empty")
    del flags["data"]
    refused(capfd, flags, "--data")


def test_a_streaming_dataset(capfd, flags, monkeypatch):
    """A dataset that streams has no lengths to plan with."""
    stream = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    refused(capfd, flags | {"data": "someone/stream"}, "--data someone/stream", "streaming")


@pytest.mark.parametrize("changes", [{"batching": "sparsity_aware"}, {"tolerance": 0.1}])
def test_no_profile(capfd, flags, changes):
    """Planning without a profile is refused with the command that makes one."""
    refused(capfd, flags | changes, "--profile", "sparsebalance profile")


@pytest.mark.parametrize("content", [None, "{", "{}", "measured with other settings"])
def test_a_bad_profile(capfd, flags, tmp_path, content):
    """A profile that is missing, corrupt, or of another device is refused by the option's name."""
    path = tmp_path / "profile.json"
    if content == "measured with other settings":
        planning_profiles.profile().save(path)
        refused(capfd, flags | {"profile": path}, "--profile", content, "device toy")
        return
    if content is not None:
        path.write_text(content)
    refused(capfd, flags | {"profile": path}, "--profile", "profile.json")


def test_an_output_folder_that_cannot_be(capfd, flags, tmp_path):
    """A path below a regular file is refused before anything is loaded."""
    (tmp_path / "file").write_text("")
    refused(capfd, flags | {"output_dir": tmp_path / "file" / "out"}, "--output_dir")


def test_a_model_folder_without_a_model(capfd, flags, model_folder, tmp_path):
    """A folder without config, without weights, or one that is not there, is refused by the option's name."""
    (tmp_path / "empty").mkdir()
    refused(capfd, flags | {"model_name_or_path": tmp_path / "empty"}, "--model_name_or_path")
    refused(capfd, flags | {"model_name_or_path": tmp_path / "none"}, "--model_name_or_path")
    shutil.copytree(model_folder, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    refused(capfd, flags | {"model_name_or_path": tmp_path / "half"}, "--model_name_or_path")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "cannot be read"),
        ("a: [1", "YAML"),
        ("just text", "option: value"),
        ("data: {a: 1}", "data"),
        ("toleranse: 0.1", "--toleranse"),
        ("tolerance: 7", "--tolerance"),
        ("batching: sorted", "--batching"),
    ],
)
def test_a_bad_config_file(capfd, flags, tmp_path, content, wanted):
    """A --config file that is missing, not YAML, not flat, or with a bad entry is one line."""
    path = tmp_path / "train.yaml"
    if content is not None:
        path.write_text(content)
    for name in ("tolerance", "batching"):  # flags would win
        del flags[name]
    refused(capfd, flags, wanted, extra=["--config", str(path)])


def test_unknown_commands(capfd):
    """An unknown command is refused with the known ones."""
    assert_one_line(capfd, main(["trian"]), "trian", "train", "profile")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "model_name_or_path"),
        (["--model_name_or_path", "MODEL", "--bogus"], "--bogus"),
        (["--model_name_or_path", "MODEL", "--max_length", "1"], "--max_length"),
        (["--model_name_or_path", "MODEL", "--max_length", "long"], "--max_length"),
        (["--model_name_or_path", "MODEL", "--processes", "0"], "--processes"),
        (["--model_name_or_path", "MODEL", "--threads", "0"], "--threads"),
        (["--model_name_or_path", "MODEL", "--block_size", "0"], "block_size"),
        (["--model_name_or_path", "MODEL", "--dtype", "int8"], "--dtype"),
        (["--model_name_or_path", "MODEL", "--output", "/nowhere/profile.json"], "--output"),
        (["--model_name_or_path", "NONE"], "--model_name_or_path"),
    ],
)
def test_bad_profile_commands(capfd, model_folder, tmp_path, arguments, wanted):
    """profile refuses mistakes before it measures."""
    names = {"MODEL": str(model_folder), "NONE": str(tmp_path / "none")}
    output = tmp_path / "profile.json"
    if "--output" not in arguments:
        arguments = [*arguments, "--output", str(output)]
    assert_one_line(capfd, main(["profile", *(names.get(part, part) for part in arguments)]), wanted)
    assert not output.exists()


def test_profile_output_is_checked_before_measuring(capfd, model_folder, tmp_path):
    """An --output that is a folder is refused before minutes of measuring, not after."""
    arguments = ["--model_name_or_path", str(model_folder), "--max_length", "64", "--quick", "--threads", "1"]
    status = main(["profile", *arguments, "--block_size", "16", "--output", str(tmp_path)])
    assert_one_line(capfd, status, "--output")


def test_profile_refuses_an_unknown_attention(capfd, model_folder, tmp_path):
    """An --attn_implementation that transformers does not know is refused by its name, before anything is measured."""
    arguments = ["--model_name_or_path", str(model_folder), "--max_length", "64", "--quick"]
    arguments += ["--attn_implementation", "fast", "--output", str(tmp_path / "profile.json")]
    assert main(["profile", *arguments]) == 2
    assert "--attn_implementation fast" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "profile.json").exists()


def test_profile_refuses_another_attention(capfd, tmp_path):
    """A model without the attention interface is refused by profile as such, before anything is measured."""
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    arguments = ["--model_name_or_path", str(tmp_path), "--max_length", "64", "--quick", "--block_size", "16"]
    status = main(["profile", *arguments, "--output", str(tmp_path / "profile.json")])
    err = capfd.readouterr().err.splitlines()
    assert status == 2 and "attention interface" in err[-1]
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"), [([], "runs"), (["/nowhere"], "/nowhere"), (["/nowhere", "--bogus"], "--bogus")]
)
def test_bad_report_commands(capfd, arguments, wanted):
    """report names the run that it cannot read, and the option that it does not know."""
    assert_one_line(capfd, main(["report", *arguments]), wanted)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capfd, arguments):
    """Without a command, and with --help, the commands are listed."""
    assert main(arguments) == 0
    out, _ = capfd.readouterr()
    for command in COMMANDS:
        assert command in out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_each_command(capfd, command):
    """--help of every command prints its usage and ends with status 0."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out, _ = capfd.readouterr()
    assert f"sparsebalance {command}" in out and "--help" in out


# All of it together.


@pytest.fixture(scope="module")
def profile_file(model_folder, tmp_path_factory):
    """A quick profile, measured and validated as a user would; what was printed lies beside it."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    arguments = ["--model_name_or_path", str(model_folder), "--max_length", "512", "--block_size", "16", "--quick"]
    threads = ["--threads", str(torch.get_num_threads()), "--processes", "1"]
    if torch.cuda.is_available():
        pytest.skip("profile measures the GPU, the runs below use the CPU")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["profile", *arguments, *threads, "--output", str(path), "--validate", "--json"]) == 0
    path.with_name("printed.json").write_text(printed.getvalue())
    return path


@pytest.mark.slow
def test_profile_validates_itself(profile_file):
    """--validate prints errors of the profile and of both rivals; the file is the profile alone."""
    printed = json.loads(profile_file.with_name("printed.json").read_text())
    validation = printed.pop("validation")
    assert [entry["name"] for entry in validation] == ["profile", "flops", "lengths"]
    for entry in validation:
        assert entry["mape"] > 0.0 and entry["p95"] > 0.0 and 0.0 <= entry["ordered"] <= 1.0
    assert json.loads(profile_file.read_text()) == printed


@pytest.mark.slow
def test_profile_train_report(capfd, flags, profile_file, tmp_path):
    """profile, train from a YAML file whose entry a flag overrides, report: each works with what came before."""
    LatencyProfile.load(profile_file)
    settings = flags | {
        "profile": profile_file, "batching": "sparsity_aware", "tolerance": 0.2, "base_top_p": 0.6,
        "gradient_accumulation_steps": 4, "anchor": "mean",
    }  # fmt: skip
    entries = {name: value if isinstance(value, (int, float, str)) else str(value) for name, value in settings.items()}
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump({**entries, "data": [str(flags["data"])], "eval_data": [str(flags["data"])]}))
    assert main(["train", "--config", str(config), "--gradient_accumulation_steps", "2"]) == 0
    out = flags["output_dir"]
    run = json.loads((out / "run.json").read_text())
    assert (run["batching"], run["anchor"], run["tolerance"]) == ("sparsity_aware", "mean", 0.2)
    assert run["heldout_loss_after"] < run["heldout_loss_before"]
    lines = [json.loads(line) for line in (out / "balance.jsonl").read_text().splitlines()]
    assert len(lines) == len(TEXTS) // 2
    capfd.readouterr()

    assert main(["report", str(out), "--json", "--picture", str(tmp_path / "run.png")]) == 0
    summary = json.loads(capfd.readouterr().out)[0]
    assert (summary["steps"], summary["documents"], summary["speedup"]) == (len(lines), len(TEXTS), 1.0)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(out)]) == 0
    assert "out" in capfd.readouterr().out

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.sparse_attention["top_p"] == 0.6
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        assert bool(model(input_ids=ids).logits.isfinite().all())


@pytest.mark.slow
def test_top_k_is_tuned_and_reported(capfd, flags, profile_file):
    """--base_top_k trains with a measured profile, stands in run.json and the model's config, and can be reported."""
    settings = flags | {
        "profile": profile_file, "batching": "sparsity_aware", "tolerance": 0.1, "base_top_k": 4,
    }  # fmt: skip
    assert main(["train", *command_line(settings)]) == 0
    out = flags["output_dir"]
    run = json.loads((out / "run.json").read_text())
    assert (run["base_top_p"], run["base_top_k"], run["anchor"]) == (None, 4, "mean")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.sparse_attention["top_p"], model.config.sparse_attention["top_k"]) == (None, 4)
    capfd.readouterr()
    assert main(["report", str(out), "--picture", str(out / "run.png")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_balanced_by_its_own_profile(capfd, flags, profile_file, tmp_path, attention):
    """profile --attn_implementation measures that attention; train takes this profile for it, and no other."""
    path = tmp_path / "dense.json"
    arguments = ["--model_name_or_path", str(flags["model_name_or_path"]), "--max_length", "512", "--quick"]
    arguments += ["--threads", str(torch.get_num_threads()), "--processes", "1", "--attn_implementation", attention]
    assert main(["profile", *arguments, "--output", str(path), "--validate"]) == 0
    assert LatencyProfile.load(path).context.attention == attention
    settings = flags | {"attn_implementation": attention, "batching": "sparsity_aware", "profile": path}
    assert main(["train", *command_line(settings)]) == 0
    run = json.loads((flags["output_dir"] / "run.json").read_text())
    assert (run["attention"], run["base_top_p"], run["tuning"]) == (attention, None, False)
    capfd.readouterr()
    assert_one_line(
        capfd, main(["train", *command_line(settings | {"profile": profile_file})]), "attention", attention
    )


def test_lora_run(flags):
    """--lora_r trains adapters and saves only them."""
    assert main(["train", *command_line(flags | {"lora_r": 2})]) == 0
    out = flags["output_dir"]
    assert (out / "adapter_config.json").exists() and not (out / "model.safetensors").exists()
    assert json.loads((out / "run.json").read_text())["documents"] == len(TEXTS)


def test_a_refused_resume_keeps_the_figures(capfd, flags):
    """Resuming a finished run with another seed is refused before the weights are loaded, and its run.json stays."""
    done = flags | {"save_strategy": "epoch"}
    assert main(["train", *command_line(done)]) == 0
    figures = (flags["output_dir"] / "run.json").read_bytes()
    capfd.readouterr()
    status = main(["train", *command_line(done | {"seed": 5, "resume_from_checkpoint": "true"})])
    assert_one_line(capfd, status, "--seed")
    assert (flags["output_dir"] / "run.json").read_bytes() == figures


def test_evaluate_refuses_a_model_that_cannot_be_replaced(capfd, tmp_path, model_folder, data_file):
    """evaluate names the option, as train does, where a model's attention cannot be replaced."""
    config = GPTNeoConfig(vocab_size=264, hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    status = main(["evaluate", "--model_name_or_path", str(tmp_path / "model"), "--data", str(data_file)])
    assert_one_line(capfd, status, "--attn_implementation")
