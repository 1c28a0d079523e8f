"""Command-line parsing: errors as one line, and a YAML file whose entries flags override."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import yaml
from transformers import HfArgumentParser

from hf_sparsebalance.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UserErrors, without the usage text before them."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


class DataclassParser(HfArgumentParser):
    """The same for dataclasses: TrainingArguments' usage text alone is two screens."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Replace ``--config FILE`` by the flags that the YAML file stands for, placed first so that real flags win.

    Raises:
        UserError: the file is missing, not YAML, or not a flat mapping.
    """
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    known, rest = config.parse_known_args(list(arguments))
    if known.config is None:
        return rest
    try:
        entries = yaml.safe_load(Path(known.config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {known.config} cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {known.config} is not valid YAML ({error})") from error
    if not isinstance(entries, dict):
        raise UserError(f"--config {known.config} must hold `option: value` lines")
    flags: list[str] = []
    for name, value in entries.items():
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, (dict, list)) for x in value)):
            raise UserError(f"--config {known.config}: {name} must be a value or a flat list")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *(str(item) for item in values)]
    return flags + rest
