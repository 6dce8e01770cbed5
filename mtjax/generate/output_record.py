"""The record of the weights and options of an output file: only a command with the same ones may continue it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtjax.config.storage import PLAIN
from mtjax.data.tokens.tokenizer import digest_of
from mtjax.errors import UserError, parse_json_object
from mtjax.generate.options import Options
from mtjax.generate.weights import LoadedModel
from mtjax.storage import write_whole

SUFFIX = ".settings.json"
"""Suffix of the record's file name, after the output's name."""
DIGITS = 12
"""Digits of a digest in messages."""
NEXT_STEP = "name another --output, or replace this one with --overwrite"
"""What to do if an output can't be continued."""
OPTIONS = ("stop", "ignore_eos", "logprobs", "fillings", "beams", "length_penalty")
"""Options that change the texts, in addition to the sampling parameters."""

Facts = dict[str, Any]
NO_FACTS: Mapping[str, Any] = {}


class OutputRecord:
    """The record of an output file.

    Args:
      output: the file of texts.
      facts: weights and options of this command, as JSON values.
    """

    def __init__(self, output: Path, facts: Facts) -> None:
        self.path = output.with_name(f"{output.name}{SUFFIX}")
        # The JSON round trip turns tuples into lists, so that facts compare equal to those of a stored record.
        self._output, self._facts = output, json.loads(json.dumps(facts))

    @classmethod
    def of(cls, options: Options, model: LoadedModel, others: Mapping[str, Any] = NO_FACTS) -> "OutputRecord":
        """Builds the record of options, model and other facts; mesh and batch are not in it, as they change no text."""
        assert options.output is not None
        config, name = model.sharded_model.config, model.tokenizer_name
        facts = {
            "weights": {"name": options.source, "digest": model.identity},
            "tokenizer": {"name": name, "digest": digest_of(name)},
            "dtype": config.training.compute_dtype,
            "stop_ids": sorted(model.stop_ids),
            **{option: getattr(options, option) for option in OPTIONS},
            # Settings without effect are left out, as they are in records from before there were any.
            "weights_dtype": options.storage.weights_dtype,
            **{name: value for name, value in asdict(options.storage).items() if value != getattr(PLAIN, name)},
            **asdict(options.sampling),
            **others,
        }
        return cls(options.output, facts)

    def check(self) -> None:
        """Checks that the texts in the output were generated with the same weights and options.

        Raises:
          UserError: some differ (the message lists them), or the output has no record.
        """
        if not self.path.is_file():
            raise UserError(f"{self._output} has texts, but the record {self.path.name} is missing: {NEXT_STEP}")
        before = parse_json_object(self.path.read_bytes(), self.path)
        # Settings that were left out then, or are now, have no effect there.
        names = [*self._facts, *(name for name in before if name not in self._facts)]
        differing = [n for n in names if _comparable(before.get(n)) != _comparable(self._facts.get(n))]
        if differing:
            then, now = (_describe(facts, differing) for facts in (before, self._facts))
            raise UserError(f"{self._output} was generated with {then}, and this command has {now}: {NEXT_STEP}")

    def write(self) -> None:
        """Writes the record.

        Raises:
          UserError: the file can't be written.
        """
        write_whole("the record", self.path, json.dumps(self._facts, indent=2, ensure_ascii=False) + "\n")


def _comparable(value: Any) -> Any:
    """Returns the part of a fact that must match: for files the digest, not the path."""
    # Folders may be moved or named in another way between two commands.
    return value.get("digest") if isinstance(value, dict) else value


def _describe(facts: Facts, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {_describe_value(facts.get(name))}" for name in names)


def _describe_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('name')} ({str(value.get('digest'))[:DIGITS]})"
    return "none" if value is None or value == [] else json.dumps(value, ensure_ascii=False)
