"""What `mtjax generate` does with a Retro: texts with neighbours that lines give, or that a retriever finds."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from mtjax.data.progress import say
from mtjax.errors import UserError, shortened
from mtjax.generate.completion import Completion
from mtjax.generate.jsonl import JsonLines, PromptLine
from mtjax.generate.neighbours import NEIGHBOURS, PASSAGES, WITHOUT, NeighbourWriter, Reading
from mtjax.generate.options import OF_ENGINES, Options, refuse
from mtjax.generate.request import Sampling, with_text_seed
from mtjax.generate.show import TextPrinter
from mtjax.generate.weights import LoadedModel
from mtjax.retrieval.retriever import Retriever

Text = tuple[Completion, Reading]


def write_with_neighbours(options: Options, model: LoadedModel, prompts: Iterable[str]) -> None:
    """Continues prompts with a Retro: all with what --retrieve finds, or those of --input with what their lines give.

    Raises:
      UserError: options of the engine are given, a line's neighbours can't be read, or there is no such database.
    """
    refuse(options, OF_ENGINES, "a retro runs the whole model for each token")
    job = _Job(options, model)
    if options.output is None:
        job.print_texts(list(prompts))
    else:
        job.continue_file()


class _Job:
    """One run of the command."""

    def __init__(self, options: Options, model: LoadedModel) -> None:
        self._options, self._model = options, model
        self._stop_ids = frozenset[int]() if options.ignore_eos else model.stop_ids
        self._retriever = None
        if options.retrieve:
            config, devices = model.sharded_model.config.model, model.sharded_model.mesh.size
            self._retriever = Retriever(
                options.retrieve,
                config,
                model.tokenizer,
                embedder=options.embedder,
                devices=devices,
                rows=options.batch,
            )
            say(f"search  {self._retriever.described()}")

    def print_texts(self, prompts: list[str]) -> None:
        """Prints the texts in their order: a single one token by token, several when each is done."""
        options, printer = self._options, TextPrinter(sys.stdout, self._options.show_logprobs)
        numbered = [
            (index, prompt, number) for index, prompt in enumerate(prompts) for number in range(options.samples)
        ]
        writer, texts = self._writer(len(numbered)), list[Text]()
        titles = deque[str]()
        for index, prompt, number in numbered:
            reading = writer.read(self._model.prompt_ids(prompt), {})
            completion = self._completion(reading, with_text_seed(options.sampling, number, index), options.stop)
            completion.on_end = lambda: self._print_ended(printer, titles, texts)
            texts.append((completion, reading))
            titles.append(f"{shortened(prompt, 60)!r}" + (f" ({number + 1})" if options.samples > 1 else ""))
        if len(texts) == 1:
            # A single text is printed as it is written, without a title.
            titles.clear()
            texts[0][0].on_piece = printer.piece
        # A copy: `_print_ended` takes texts out of the list while they are written.
        writer.run(list(texts))

    def _print_ended(self, printer: TextPrinter, titles: deque[str], texts: list[Text]) -> None:
        """Prints and drops the first texts that have ended; without a title, a text was printed as it was written."""
        while texts and texts[0][0].ended is not None:
            completion, reading = texts.pop(0)
            if titles:
                printer.title(titles.popleft())
                for piece in completion.pieces:
                    printer.piece(piece)
            printer.end()
            if self._options.sources:
                for chunk, sources in enumerate(reading.sources):
                    print(f"chunk {chunk + 1} read {'; '.join(map(str, sources)) or 'nothing'}")

    def continue_file(self) -> None:
        """Continues the prompts of a JSONL file, except for texts that the output already has."""
        options, facts = self._options, dict[str, object]()
        if self._retriever is not None:
            facts["retrieve"] = {"name": ", ".join(options.retrieve), "digest": self._retriever.identity}
            facts |= {"without_document": options.without_document} if options.without_document else {}
            facts |= {"sources": True} if options.sources else {}
        keys = (NEIGHBOURS, PASSAGES, WITHOUT)
        lines = JsonLines.of(options, self._model, options.samples, keys, facts)
        # Before the output is opened, which --overwrite empties: the documents to leave out, and every line.
        writer = self._writer(options.samples * len(lines.prompts))
        for number, (prompt, settings) in lines.prompts.items():
            self._read(writer, number, prompt, settings)
        with lines:
            writer.run(self._texts(lines, writer))
        say(f"{lines.written:,} texts added to {options.output}")

    def _texts(self, lines: JsonLines, writer: NeighbourWriter) -> Iterator[Text]:
        for line in lines.remaining():
            reading = self._read(writer, line.number, line.prompt, line.settings)
            completion = self._completion(reading, line.sampling, line.stops)
            completion.on_end = partial(self._write, lines, line, completion, reading)
            yield completion, reading

    def _read(self, writer: NeighbourWriter, number: int, prompt: str, settings: Mapping[str, Any]) -> Reading:
        try:
            return writer.read(self._model.prompt_ids(prompt), settings)
        except UserError as e:
            raise UserError(f"{self._options.input}:{number + 1}: {e}") from e

    def _write(self, lines: JsonLines, line: PromptLine, completion: Completion, reading: Reading) -> None:
        record = completion.record(logprobs=self._options.logprobs)
        if self._options.sources:
            record["sources"] = [[asdict(source) for source in each] for each in reading.sources]
        lines.write(line, record)

    def _writer(self, texts: int) -> NeighbourWriter:
        options = self._options
        return NeighbourWriter(
            self._model, max(min(options.batch, texts), 1), self._retriever, options.without_document
        )

    def _completion(self, reading: Reading, sampling: Sampling, stops: tuple[str, ...]) -> Completion:
        logprobs = self._options.logprobs or self._options.show_logprobs
        return Completion(self._model.tokenizer, tuple(reading.ids), sampling, self._stop_ids, stops, logprobs)
