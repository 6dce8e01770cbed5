"""Prompts from a JSONL file and texts to another, line by line; what was written stays, and is not written again."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from io import BufferedRandom
from pathlib import Path
from typing import Any

from mtjax.config.checks import check_bounds
from mtjax.data.progress import ProgressLine
from mtjax.errors import UserError, parse_json
from mtjax.generate.request import Sampling, for_text

SETTINGS = {field.name: field.type for field in fields(Sampling)}


@dataclass(frozen=True)
class Line:
    """A text that is to be written."""

    number: int
    """Of the input's line, from 0."""
    sample: int
    """Of the texts for this line, from 0."""
    prompt: str
    sampling: Sampling
    stops: tuple[str, ...]


class JsonLines:
    """An input and an output; use as a context manager.

    Args:
      source: JSONL: objects with `prompt`; names of `Sampling` and `stop` override the settings.
      target: JSONL; appended to.
      samples: texts for each prompt.
      sampling: settings of lines that say nothing else.
      stops: likewise.

    Raises:
      UserError: a file can't be read or written, or is not what it should be.
    """

    def __init__(self, source: Path, target: Path, samples: int, sampling: Sampling, stops: Sequence[str]) -> None:
        self._source, self._target, self._samples = source, target, samples
        self._sampling, self._stops = sampling, tuple(stops)
        try:
            self._file = target.open("a+b")
            self._lines = source.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as e:
            name = getattr(e, "filename", None) or source
            raise UserError(f"{name} can't be used: {getattr(e, 'strerror', None) or e}") from e

    def __enter__(self) -> "JsonLines":
        self._done = done_in(self._file, self._target)
        self._total = self._samples * sum(bool(line.strip()) for line in self._lines)
        self._progress = ProgressLine(f"texts for {self._source.name}", self._total).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._file.close()

    def left(self) -> Iterator[Line]:
        """What the output does not have yet, in the order of the input.

        Raises:
          UserError: a line is not what it should be.
        """
        for number, text in enumerate(self._lines):
            for sample in range(self._samples if text.strip() else 0):
                line, before = self._line(number, sample, text), self._done.get((number, sample))
                if before is None:
                    yield line
                elif before != line.prompt:
                    where = f"{self._source}:{number + 1}"
                    raise UserError(f"{self._target} has a text for another prompt than {where}: name another file")

    def write(self, line: Line, fields: Mapping[str, Any]) -> None:
        """Appends what was made of a line."""
        record = {"index": line.number, "sample": line.sample, "prompt": line.prompt, **fields}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._done[line.number, line.sample] = line.prompt
        self._progress.update(len(self._done))

    def _line(self, number: int, sample: int, text: str) -> Line:
        where = f"{self._source}:{number + 1}"
        record = parse_json(text, where)
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UserError(f'{where} should be an object with a text "prompt"')
        stops = record.get("stop", self._stops)
        stops = (stops,) if isinstance(stops, str) else stops
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise UserError(f'{where}: "stop" should be a text, or a list of texts')
        sampling = self._settings({name: record[name] for name in SETTINGS if name in record}, where)
        # A line with a seed of its own draws the same wherever it stands.
        sampling = for_text(sampling, sample, 0 if "seed" in record else number)
        return Line(number, sample, record["prompt"], sampling, tuple(stops))

    def _settings(self, given: dict[str, Any], where: str) -> Sampling:
        for name, value in given.items():
            wanted = (int,) if SETTINGS[name] is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, wanted):
                raise UserError(f'{where}: "{name}" is {value!r}, and must be a number')
        sampling = replace(self._sampling, **given)
        try:
            check_bounds(sampling)
        except UserError as e:
            raise UserError(f"{where}: {e}") from e
        return sampling


def done_in(file: BufferedRandom, path: Path) -> dict[tuple[int, int], str]:
    """The prompts of the texts that an output has, by line and sample; a last line that was cut off is removed.

    Raises:
      UserError: the file has other lines: it is not such an output.
    """
    file.seek(0)
    done: dict[tuple[int, int], str] = {}
    end = 0
    for raw in file:
        if not raw.endswith(b"\n"):
            break
        try:
            record = json.loads(raw)
            done[record["index"], record["sample"]] = record["prompt"]
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path} exists and is not an output of this command: name another file") from e
        end += len(raw)
    file.truncate(end)
    file.seek(0, 2)
    return done
