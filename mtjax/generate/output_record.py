"""A record of the weights and settings that made an output of `mtjax generate`: others do not continue it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtjax.data.tokens.tokenizer import digest_of
from mtjax.errors import UserError, first_line, parse_json_object
from mtjax.generate.options import Options
from mtjax.generate.weights import LoadedModel

SUFFIX = ".settings.json"
"""Of the record's name, behind the output's."""
DIGITS = 12
"""Of a digest, for people."""
NEXT_STEP = "name another --output, or write this one anew with --overwrite"
"""What to do about an output that can't be continued."""
OPTIONS = ("weights_dtype", "stop", "ignore_eos", "logprobs", "fillings", "beams", "length_penalty")
"""Options that change the texts, in addition to the settings of sampling."""

Facts = dict[str, Any]


class OutputRecord:
    """The record of an output.

    Args:
      output: the file of texts.
      facts: what makes the texts now; values that JSON has.
    """

    def __init__(self, output: Path, facts: Facts) -> None:
        self.path = output.with_name(f"{output.name}{SUFFIX}")
        self._output, self._facts = output, json.loads(json.dumps(facts))

    @classmethod
    def of(cls, options: Options, model: LoadedModel) -> "OutputRecord":
        """Describes what options and model write. The mesh and the batch change no text."""
        assert options.output is not None
        placed, name = model.placed.config, model.tokenizer_name
        facts = {
            "weights": {"name": options.source, "digest": model.identity},
            "tokenizer": {"name": name, "digest": digest_of(name)},
            "dtype": placed.training.compute_dtype,
            "stop_ids": sorted(model.stop_ids),
            **{option: getattr(options, option) for option in OPTIONS},
            **asdict(options.sampling),
        }
        return cls(options.output, facts)

    def check(self) -> None:
        """Checks that the texts in the output were made with the same facts.

        Raises:
          UserError: they were not (the message lists the differences), or there is no record.
        """
        if not self.path.is_file():
            raise UserError(
                f"{self._output} has texts, and no {self.path.name} beside it says what made them: {NEXT_STEP}"
            )
        before = parse_json_object(self.path.read_bytes(), self.path)
        differing = [name for name, value in self._facts.items() if _comparable(before.get(name)) != _comparable(value)]
        if differing:
            then, now = (_describe(facts, differing) for facts in (before, self._facts))
            raise UserError(f"{self._output} was made with {then}, and this command has {now}: {NEXT_STEP}")

    def write(self) -> None:
        """Writes the record.

        Raises:
          UserError: the disk refuses.
        """
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            temporary.write_text(json.dumps(self._facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        except OSError as e:
            raise UserError(f"{self.path} can't be written: {first_line(e)}") from e


def _comparable(value: Any) -> Any:
    """What is compared of a fact: of files their digest, wherever they lie."""
    return value.get("digest") if isinstance(value, dict) else value


def _describe(facts: Facts, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {_describe_value(facts.get(name))}" for name in names)


def _describe_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('name')} ({str(value.get('digest'))[:DIGITS]})"
    return "none" if value is None or value == [] else json.dumps(value, ensure_ascii=False)
