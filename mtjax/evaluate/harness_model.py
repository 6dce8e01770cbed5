"""The model for lm-eval: likelihoods by `Scorer`, generated texts by the engine of `mtjax generate`.

Texts are encoded as by lm-eval's `hf` model, so that both get the same results.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config.checks import check_bounds
from mtjax.data import Tokenizer
from mtjax.data.progress import BytesProgress
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.errors import UserError, require
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.rows import RowScores, ScoredRow, scores_of
from mtjax.evaluate.run import score_rows, shared_answers
from mtjax.evaluate.score import Scorer
from mtjax.generate.completion import Completion
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.first_tokens import is_special
from mtjax.generate.request import Sampling
from mtjax.runtime.processes.coordination import this_process

Arguments = Mapping[str, Any]
"""A task's `generation_kwargs`."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the argument for the most tokens of a text; the first that is given is used."""
MOST_TOKENS = 256
"""Default for the most tokens of a text."""
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


class HarnessModel:
    """A model's answers to requests of lm-eval, in their order. All processes must get the same requests.

    Args:
      scorer: the model, with at most `longest` tokens per row.
      parameters: its parameters.
      tokenizer: its tokenizer.
      prefix: id that is prepended to a text without context.
      stop_ids: ids that end a text.
      sequences: batch size of generation.
      out: scores are saved next to this file until `remove_saved`; None for not saving.
      identity: identity of the model; saved scores with another are discarded.
    """

    def __init__(
        self,
        scorer: Scorer,
        parameters: Any,
        tokenizer: Tokenizer,
        prefix: int,
        stop_ids: frozenset[int],
        sequences: int,
        out: Path | None = None,
        identity: str = "",
    ) -> None:
        self.tokenizer, self.prefix, self.longest = tokenizer, prefix, scorer.longest
        self._added, self._is_special = added_tokens(tokenizer), cache(partial(is_special, tokenizer))
        self._scorer, self._parameters = scorer, parameters
        self._stop_ids, self._sequences, self._out, self._identity = stop_ids, sequences, out, identity
        self._saved: list[SavedAnswers] = []
        self._engine: Engine | None = None

    # --- ids

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encodes a text as lm-eval's `hf` model does; names of special tokens in it are encoded as these tokens.

        Args:
          text: the text.
          add_special_tokens: whether to add the ids that the tokenizer adds to texts; None for unless the text begins
            with the name of `prefix`.
        """
        ids, begins = self.tokenizer.encode_marked(text), self.tokenizer.decode([self.prefix])
        if add_special_tokens is None:
            add_special_tokens = not (begins and text.startswith(begins))
        return [*self._added.front, *ids, *self._added.back] if add_special_tokens else ids

    # --- likelihoods

    def continuations(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Returns the log-probability of continuations, and whether each of their tokens is the most likely one.

        Args:
          pairs: ids of context and continuation.

        Raises:
          UserError: a continuation is longer than the model's sequence.
        """
        rows = []
        for before, after in pairs:
            if len(after) > self.longest:
                raise UserError(
                    f"an answer of {len(after)} tokens is longer than the sequence length of {self.longest}"
                )
            # Long contexts are truncated at their beginning.
            # One token more than the model reads, as the last is only predicted; lm-eval truncates in the same way.
            ids = [*(before or [self.prefix]), *after][-(self.longest + 1) :]
            rows.append(ScoredRow(np.asarray(ids, np.int32), len(ids) - len(after)))
        # All rows in one call, so that rows of similar length share batches.
        scores = self._scores("continuations", rows)
        return list(zip(scores.log_probability.tolist(), scores.all_best.tolist(), strict=True))

    def text_log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-probability of texts.

        Windows are lm-eval's: adjacent; the last one is as long as the others, but only its end is scored.
        """
        rows, counts = [], []
        for text in texts:
            text_rows = rolling_rows(self.encode(text), self.prefix, self.longest)
            rows += text_rows
            counts.append(len(text_rows))
        log_probability = self._scores("texts", rows).log_probability
        return [float(windows.sum()) for windows in np.split(log_probability, np.cumsum(counts)[:-1])]

    def _scores(self, kind: str, rows: Sequence[ScoredRow]) -> RowScores:
        """Scores rows; saves answers next to `out`, in a file for each kind of request."""
        hashed = hashlib.sha256(self._identity.encode())
        for row in rows:
            # The rows themselves are hashed: another few-shot number or version of a task has other rows.
            hashed.update(row.tokens.tobytes() + row.first.to_bytes(8, "little"))
        out = None if self._out is None else self._out.with_name(f"{self._out.name}.{kind}")
        with shared_answers(out, hashed.hexdigest()) as saved:
            self._saved.append(saved)
            score_rows(rows, self._scorer, self._parameters, saved)
        return scores_of(saved.answers)

    def remove_saved(self) -> None:
        """Removes the saved scores, once the results are written."""
        for saved in self._saved:
            saved.remove()

    # --- texts

    def generate(self, prompts: Sequence[tuple[str, Arguments]]) -> list[str]:
        """Generates texts after prompts, up to the first stop string.

        A prompt that is too long for the requested text is truncated at its beginning.

        Raises:
          UserError: a task's arguments are not supported, or its texts are longer than the model's sequence.
        """
        if self._engine is None:
            # Built by the first task that generates: the decoder holds a second copy of the weights.
            decoder = GenerationPrograms(self._scorer.sharded_model, self._parameters)
            self._engine = Engine(decoder, self._sequences)
        done, texts = 0, []

        def count() -> None:
            nonlocal done
            done += 1
            if this_process() == 0:
                progress.update(done)

        with BytesProgress("generating", len(prompts)) as progress:
            for number, (prompt, arguments) in enumerate(prompts):
                sampling, stops = sampling_of(arguments, number)
                prompt_limit = self.longest - sampling.max_tokens
                if prompt_limit < 1:
                    raise UserError(
                        f"texts of {sampling.max_tokens} tokens leave no space for a prompt in the sequence length of "
                        f"{self.longest}: lower the task's max_gen_toks"
                    )
                # From the left, as in lm-eval: the question is at the end of the few-shot examples.
                ids = tuple((self.encode(prompt) or [self.prefix])[-prompt_limit:])
                text = Completion(self.tokenizer, ids, sampling, self._stop_ids, stops, on_end=count)
                self._engine.submit(text.request)
                texts.append((text, stops))
            self._engine.run()
        return [self._decoded(text, stops) for text, stops in texts]

    def _decoded(self, text: Completion, stops: Sequence[str]) -> str:
        """Decodes a text as lm-eval does."""
        # Its tokens alone, so that many tokenizers drop the space before the first word, without special tokens; and
        # cut at stop strings only then. `exact_match` compares all characters.
        ids = (piece.token.id for piece in text.pieces if piece.token is not None)
        decoded = self.tokenizer.decode([index for index in ids if not self._is_special(index)])
        for stop in stops:
            decoded = decoded.partition(stop)[0]
        return decoded


def rolling_rows(ids: list[int], prefix: int, length: int) -> list[ScoredRow]:
    """Returns windows of a text, each of which predicts at most `length` tokens; prepends `prefix`."""
    tokens, rows = np.asarray([prefix, *ids], np.int32), []
    for start in range(0, len(ids), length):
        stop = min(start + length, len(ids)) + 1
        # The last window is extended to the left to `length` tokens.
        first = max(0, stop - length - 1)
        # The first window has nothing before `prefix`; others are extended into tokens that an earlier one has scored.
        rows.append(ScoredRow(tokens[first:stop], start + 1 - first))
    return rows


def sampling_of(arguments: Arguments, number: int) -> tuple[Sampling, tuple[str, ...]]:
    """Returns the sampling parameters of a text, with the prompt's number as seed, and its stop strings.

    Raises:
      UserError: the task's `generation_kwargs` are not supported.
    """
    known = (*LENGTHS, *SAMPLING, "until", "do_sample", "temperature")
    unknown = next(
        (name for name in arguments if name not in known and (name, arguments[name]) != ("num_beams", 1)), None
    )
    if unknown is not None:
        raise UserError(f"a task's generation_kwargs have {unknown}; supported are {', '.join(known)}")
    do_sample = arguments.get("do_sample")
    # A temperature above 0 without do_sample samples, as in lm-eval. With do_sample alone it is transformers' 1:
    # lm-eval's own 0 is an error there.
    temperature = float(arguments.get("temperature", 1.0 if do_sample else 0.0))
    settings = {name: arguments[name] for name in SAMPLING if arguments.get(name) is not None}
    sampling = Sampling(
        max_tokens=int(next((arguments[name] for name in LENGTHS if arguments.get(name) is not None), MOST_TOKENS)),
        temperature=0.0 if do_sample is False else temperature,
        seed=number,
        **settings,
    )
    check_bounds(sampling)
    until = arguments.get("until") or ()
    return sampling, tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)


def as_lm(model: HarnessModel) -> Any:
    """Wraps a model in lm-eval's class `LM`.

    Raises:
      UserError: lm-eval is not installed.
    """
    base: Any = require("lm_eval.api.model", "evaluate").TemplateLM

    class HarnessLM(base):
        """The model as an `LM`."""

        @property
        def eot_token_id(self) -> int:
            # lm-eval conditions a text without context on this token.
            return model.prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return model.encode(string, add_special_tokens)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            # `TemplateLM` encodes context and answer together, and divides them so that the space between belongs to
            # the answer.
            return super().loglikelihood(requests, disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return model.continuations([(before, after) for _, before, after in requests])

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return model.text_log_probabilities([request.args[0] for request in requests])

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return model.generate([request.args for request in requests])

    return HarnessLM()
