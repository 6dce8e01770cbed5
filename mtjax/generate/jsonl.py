"""Prompts from a JSONL file and texts to another, line by line; texts of the same prompts and settings are kept."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from io import BufferedRandom
from pathlib import Path
from typing import Any

from mtjax.config.checks import check_bounds
from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.data.progress import ProgressLine
from mtjax.errors import UserError, parse_json, shortened
from mtjax.generate.output_record import NEXT_STEP, OutputRecord
from mtjax.generate.request import Sampling, with_text_seed

SETTINGS = {field.name: field.type for field in fields(Sampling)}
Identity = tuple[str, Mapping[str, Any]]
"""A prompt, and the settings that its line gives."""


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
    settings: Mapping[str, Any]
    """Settings that the line gives."""

    @property
    def identity(self) -> Identity:
        """The inputs of the text, without the settings that all lines share."""
        return self.prompt, self.settings


class JsonLines:
    """An input and an output; use as a context manager.

    Args:
      source: JSONL: objects with `prompt`; names of `Sampling` and `stop` override the settings.
      target: JSONL; appended to.
      record: of what makes the texts.
      samples: texts for each prompt.
      sampling: settings of lines that say nothing else.
      stops: likewise.
      overwrite: whether the output is written anew.

    Raises:
      UserError: a file can't be read or written, or is not what it should be.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        record: OutputRecord,
        samples: int,
        sampling: Sampling,
        stops: Sequence[str],
        *,
        overwrite: bool = False,
    ) -> None:
        self._source, self._target, self._record, self._samples = source, target, record, samples
        self._sampling, self._stops, self._overwrite = sampling, tuple(stops), overwrite
        if target.exists() and source.exists() and target.samefile(source):
            raise UserError(f"--output {target} is --input: name another file for the texts")
        self._lines = read_lines(source)
        self._numbers = [number for number, text in enumerate(self._lines) if text.strip()]
        self._prompts = {number: self._line(number, 0, self._lines[number]).identity for number in self._numbers}

    def __enter__(self) -> "JsonLines":
        with ExitStack() as stack, _file_errors(self._target):
            self._file = stack.enter_context(self._target.open("a+b"))
            if self._overwrite:
                self._file.truncate(0)
            self._done, end = read_done(self._file, self._target)
            if self._done:
                self._record.check()
                self._check_done()
            # Not before: an output that is refused stays as it is.
            self._file.truncate(end)
            self._file.seek(0, 2)
            self._record.write()
            stack.pop_all()  # it stays open until the end
        self._total = self._samples * len(self._numbers)
        self._progress = ProgressLine(f"texts for {self._source.name}", self._total).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._file.close()

    def remaining(self) -> Iterator[Line]:
        """Yields what the output does not have yet, in the order of the input."""
        for number in self._numbers:
            for sample in range(self._samples):
                if (number, sample) not in self._done:
                    yield self._line(number, sample, self._lines[number])

    def write(self, line: Line, fields: Mapping[str, Any]) -> None:
        """Appends what was made of a line."""
        own = {"settings": line.settings} if line.settings else {}
        record = {"index": line.number, "sample": line.sample, "prompt": line.prompt, **own, **fields}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._done[line.number, line.sample] = line.identity
        self._progress.update(len(self._done))

    def _check_done(self) -> None:
        """Checks that every text that the output has is one for a line of the input.

        Raises:
          UserError: one is for another prompt, has other settings, or is for no line.
        """
        for (number, sample), (prompt, settings) in self._done.items():
            where, has = f"{self._source}:{number + 1}", f"{self._target} has a text"
            if number not in self._prompts:
                raise UserError(f"{has} for {where}, which has no prompt: {NEXT_STEP}")
            now, own = self._prompts[number]
            if prompt != now:
                raise UserError(
                    f"{has} for the prompt {shortened(prompt)!r}, and {where} has {shortened(now)!r}: {NEXT_STEP}"
                )
            if settings != own:
                made, asked = (json.dumps(each, ensure_ascii=False) for each in (settings, own))
                raise UserError(f"{has} for {where} that was made with {made}, and the line has {asked}: {NEXT_STEP}")
            if not 0 <= sample < self._samples:
                raise UserError(
                    f"{has} number {sample + 1} for {where}, and --samples is {self._samples}: give at least "
                    f"{sample + 1}, or {NEXT_STEP}"
                )

    def _line(self, number: int, sample: int, text: str) -> Line:
        where = f"{self._source}:{number + 1}"
        record = parse_json(text, where)
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UserError(f'{where} should be an object with a text "prompt"')
        stops = record.get("stop", self._stops)
        stops = (stops,) if isinstance(stops, str) else stops
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise UserError(f'{where}: "stop" should be a text, or a list of texts')
        if half := surrogate_in({"prompt": record["prompt"], "stop": list(stops)}):
            raise UserError(f"{where} has {half}: correct the line, or remove it")
        sampling = self._settings({name: record[name] for name in SETTINGS if name in record}, where)
        # A line with a seed of its own draws the same wherever it stands.
        sampling = with_text_seed(sampling, sample, 0 if "seed" in record else number)
        own = {name: record[name] for name in (*SETTINGS, "stop") if name in record}
        return Line(number, sample, record["prompt"], sampling, tuple(stops), own)

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


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} can't be used: {getattr(e, 'strerror', None) or e}") from e


def read_done(file: BufferedRandom, path: Path) -> tuple[dict[tuple[int, int], Identity], int]:
    """Reads which texts an output has, by line and sample, and where its last line that was not cut off ends.

    Raises:
      UserError: the file has other lines: it is not such an output.
    """
    file.seek(0)
    done: dict[tuple[int, int], Identity] = {}
    end = 0
    for raw in file:
        if not raw.endswith(b"\n"):
            break
        try:
            record = json.loads(raw)
            place, prompt = (record["index"], record["sample"]), record["prompt"]
            if not isinstance(prompt, str) or any(type(number) is not int for number in place):
                raise ValueError
            done[place] = prompt, record.get("settings", {})
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path} exists and is not an output of this command: name another file") from e
        end += len(raw)
    return done, end
