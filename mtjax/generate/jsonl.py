"""Reads prompts from a JSONL file and appends texts to another; an interrupted or extended job continues."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from io import BufferedRandom
from pathlib import Path
from typing import Any

from mtjax.config.checks import check_bounds
from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.data.progress import BytesProgress
from mtjax.errors import UserError, parse_json, shortened
from mtjax.generate.options import Options
from mtjax.generate.output_record import NEXT_STEP, NO_FACTS, OutputRecord
from mtjax.generate.request import Sampling, with_text_seed
from mtjax.generate.weights import LoadedModel

SETTINGS = {field.name: field.type for field in fields(Sampling)}
Identity = tuple[str, Mapping[str, Any]]
"""A prompt, and the settings of its line."""


@dataclass(frozen=True)
class PromptLine:
    """A text to be generated."""

    number: int
    """Index of the input's line, from 0."""
    sample: int
    """Index among the texts for this line, from 0."""
    prompt: str
    sampling: Sampling
    stops: tuple[str, ...]
    settings: Mapping[str, Any]
    """Settings of the line, which override the options."""

    @property
    def identity(self) -> Identity:
        """The prompt and the line's settings, by which an existing text is matched."""
        return self.prompt, self.settings


class JsonLines:
    """An input file of prompts and an output file of texts; use as a context manager.

    Args:
      source: JSONL of objects with `prompt`; fields of `Sampling` and `stop` override the defaults. Or the number of
        texts to write without prompts.
      target: JSONL file to append to.
      record: weights and options that determine the texts.
      samples: number of texts for each prompt.
      sampling: default sampling parameters.
      stops: default stop sequences.
      overwrite: whether to replace an existing output.
      keys: other keys of a line that determine its text; they are in its `settings`.

    Raises:
      UserError: a file can't be read or written, or is invalid.
    """

    def __init__(
        self,
        source: Path | int,
        target: Path,
        record: OutputRecord,
        samples: int,
        sampling: Sampling,
        stops: Sequence[str],
        *,
        overwrite: bool = False,
        keys: Sequence[str] = (),
    ) -> None:
        self._keys = (*SETTINGS, "stop", *keys)
        self._target, self._record, self._samples = target, record, samples
        self._sampling, self._stops, self._overwrite = sampling, tuple(stops), overwrite
        self._source = Path("--documents") if isinstance(source, int) else source
        if not isinstance(source, int) and target.exists() and source.exists() and target.samefile(source):
            raise UserError(f"--output {target} is the same file as --input: name another file")
        self.written = 0
        """Texts written since the start."""
        self._lines = ['{"prompt": ""}'] * source if isinstance(source, int) else read_lines(source)
        # Empty lines are counted, so that `index` is the line number that an editor shows, minus 1.
        self._numbers = [number for number, text in enumerate(self._lines) if text.strip()]
        # All lines are parsed before any text is generated: an error in the last one is found in the beginning.
        self.prompts = {number: self._line(number, 0, self._lines[number]).identity for number in self._numbers}

    @classmethod
    def of(
        cls,
        options: Options,
        model: LoadedModel,
        samples: int,
        keys: Sequence[str] = (),
        facts: Mapping[str, Any] = NO_FACTS,
    ) -> "JsonLines":
        """Opens `--input` and `--output`.

        Args:
          options: of the command.
          model: writes the texts.
          samples: number of texts for each prompt.
          keys: see `__init__`.
          facts: what else determines the texts, for the output's record.

        Raises:
          UserError: a file can't be read or written, or is invalid.
        """
        source = options.documents or options.input
        assert source is not None and options.output is not None
        record = OutputRecord.of(options, model, facts)
        sampling, stops = options.sampling, options.stop
        return cls(source, options.output, record, samples, sampling, stops, overwrite=options.overwrite, keys=keys)

    def __enter__(self) -> "JsonLines":
        with ExitStack() as stack, _file_errors(self._target):
            # Opened for appending: creates the file, and keeps what another mode would truncate before the checks.
            self._file = stack.enter_context(self._target.open("a+b"))
            if self._overwrite:
                self._file.truncate(0)
            self._done, end = read_done(self._file, self._target)
            if self._done:
                self._record.check()
                self._check_done()
            # After all checks, so that a rejected output file is left unchanged.
            self._file.truncate(end)
            self._file.seek(0, 2)
            # Likewise: a refused command would replace the settings with which the existing texts were generated.
            self._record.write()
            stack.pop_all()  # the file stays open until __exit__
        self._total = self._samples * len(self._numbers)
        self._progress = BytesProgress(f"texts for {self._source.name}", self._total).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._file.close()

    def remaining(self) -> Iterator[PromptLine]:
        """Yields the texts that the output does not have yet, in the order of the input."""
        for number in self._numbers:
            for sample in range(self._samples):
                if (number, sample) not in self._done:
                    yield self._line(number, sample, self._lines[number])

    def write(self, line: PromptLine, fields: Mapping[str, Any]) -> None:
        """Appends the record of a generated text."""
        settings = {"settings": line.settings} if line.settings else {}
        record = {"index": line.number, "sample": line.sample, "prompt": line.prompt, **settings, **fields}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        # An interruption loses at most the line that is being written, which `read_done` drops.
        self._file.flush()
        self._done[line.number, line.sample] = line.identity
        self.written += 1
        self._progress.update(len(self._done))

    def _check_done(self) -> None:
        """Checks that every existing text of the output matches a line of the input.

        Raises:
          UserError: a text has another prompt or other settings than its line, or its line or sample does not exist.
        """
        for (number, sample), (prompt, settings) in self._done.items():
            where, has = f"{self._source}:{number + 1}", f"{self._target} has a text"
            if number not in self.prompts:
                raise UserError(f"{has} for {where}, which has no prompt: {NEXT_STEP}")
            expected, line_settings = self.prompts[number]
            if prompt != expected:
                raise UserError(
                    f"{has} for the prompt {shortened(prompt)!r}, and {where} has {shortened(expected)!r}: {NEXT_STEP}"
                )
            if settings != line_settings:
                then, now = (json.dumps(each, ensure_ascii=False) for each in (settings, line_settings))
                raise UserError(
                    f"{has} for {where} that was generated with {then}, and the line has {now}: {NEXT_STEP}"
                )
            if not 0 <= sample < self._samples:
                raise UserError(
                    f"{has} number {sample + 1} for {where}, and --samples is {self._samples}: give at least "
                    f"{sample + 1}, or {NEXT_STEP}"
                )

    def _line(self, number: int, sample: int, text: str) -> PromptLine:
        where = f"{self._source}:{number + 1}"
        record = parse_json(text, where)
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UserError(f'{where} must be an object with a string "prompt"')
        stops = record.get("stop", self._stops)
        stops = (stops,) if isinstance(stops, str) else stops
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise UserError(f'{where}: "stop" must be a string or a list of strings')
        if half := surrogate_in({"prompt": record["prompt"], "stop": list(stops)}):
            raise UserError(f"{where} has {half}: correct the line, or remove it")
        sampling = self._settings({name: record[name] for name in SETTINGS if name in record}, where)
        # A line that sets a seed samples the same text whatever its line number is.
        sampling = with_text_seed(sampling, sample, 0 if "seed" in record else number)
        settings = {name: record[name] for name in self._keys if name in record}
        return PromptLine(number, sample, record["prompt"], sampling, tuple(stops), settings)

    def _settings(self, given: dict[str, Any], where: str) -> Sampling:
        for name, value in given.items():
            # True is an int in Python: "top_k": true would be top-1.
            types = (int,) if SETTINGS[name] is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, types):
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
    """Reads an output's texts by (line, sample), and the offset after its last complete line.

    Raises:
      UserError: the file has other lines, so it is not an output of this command.
    """
    file.seek(0)
    done: dict[tuple[int, int], Identity] = {}
    end = 0
    for raw in file:
        # A line without a newline was interrupted while it was written: it is truncated, and its text generated again.
        if not raw.endswith(b"\n"):
            break
        try:
            record = json.loads(raw)
            key, prompt = (record["index"], record["sample"]), record["prompt"]
            if not isinstance(prompt, str) or any(type(number) is not int for number in key):
                raise ValueError
            done[key] = prompt, record.get("settings", {})
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{path} exists and is not an output of this command: name another file") from e
        end += len(raw)
    return done, end
