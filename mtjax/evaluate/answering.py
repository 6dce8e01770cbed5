"""A model that answers lm-eval: likelihoods by `Scorer`, texts by the engine of `mtjax generate`.

Texts become ids as lm-eval's `hf` model has them, so that both find the same.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config.checks import check_bounds
from mtjax.data import Tokenizer
from mtjax.data.progress import ProgressLine
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.errors import UserError, require
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.rows import Row, Scores, scores_of
from mtjax.evaluate.run import kept_by_all, score_rows
from mtjax.evaluate.score import Scorer
from mtjax.generate.completion import Completion
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.request import Sampling
from mtjax.train.processes.coordination import this_process

Arguments = Mapping[str, Any]
"""A task's `generation_kwargs`."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for the most tokens of a text; the first one that is given counts."""
MOST_TOKENS = 256
"""Of a text whose task does not say."""
DRAWING = ("top_p", "top_k", "min_p", "repetition_penalty")


class Answering:
    """A model's answers, in the order of what is asked. In several processes all are asked the same.

    Args:
      scorer: the model, which reads at most `longest` tokens.
      parameters: its weights.
      tokenizer: its tokenizer.
      prefix: id that stands before a text that nothing comes before.
      stop_ids: ids that end a text.
      sequences: texts that are written at a time.
      out: beside which scores are kept until `forget`; None keeps none.
      identity: of the model: scores of another are not taken over.
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
        self._added = added_tokens(tokenizer)
        self._scorer, self._parameters = scorer, parameters
        self._stop_ids, self._sequences, self._out, self._identity = stop_ids, sequences, out, identity
        self._kept: list[SavedAnswers] = []
        self._engine: Engine | None = None

    # --- ids

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Encodes a text as lm-eval's `hf` model does: names of special tokens in it stand for these.

        Args:
          text: what to encode.
          add_special_tokens: whether the ids that the tokenizer adds are added; when None, unless the text begins with
            the name of `prefix`.
        """
        ids, begins = self.tokenizer.encode_marked(text), self.tokenizer.decode([self.prefix])
        if add_special_tokens is None:
            add_special_tokens = not (begins and text.startswith(begins))
        return [*self._added.front, *ids, *self._added.back] if add_special_tokens else ids

    # --- likelihoods

    def continuations(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-probability of the second ids after the first, and whether each is the most likely one.

        Raises:
          UserError: there are more second ids than the model can read.
        """
        rows = []
        for before, after in pairs:
            if len(after) > self.longest:
                raise UserError(
                    f"an answer of {len(after)} tokens is longer than the {self.longest} that are read at once"
                )
            ids = [*(before or [self.prefix]), *after][-(self.longest + 1) :]
            rows.append(Row(np.asarray(ids, np.int32), len(ids) - len(after)))
        scores = self._scores("continuations", rows)
        return list(zip(scores.log_probability.tolist(), scores.all_best.tolist(), strict=True))

    def texts(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of whole texts.

        Windows are lm-eval's: side by side, and the last one as long as the others, of which it counts its end.
        """
        rows, counts = [], []
        for text in texts:
            own = rolling_rows(self.encode(text), self.prefix, self.longest)
            rows += own
            counts.append(len(own))
        log_probability = self._scores("texts", rows).log_probability
        return [float(part.sum()) for part in np.split(log_probability, np.cumsum(counts)[:-1])]

    def _scores(self, what: str, rows: Sequence[Row]) -> Scores:
        hashed = hashlib.sha256(self._identity.encode())
        for row in rows:
            hashed.update(row.tokens.tobytes() + row.first.to_bytes(8, "little"))
        out = None if self._out is None else self._out.with_name(f"{self._out.name}.{what}")
        with kept_by_all(out, hashed.hexdigest()) as kept:
            self._kept.append(kept)
            score_rows(rows, self._scorer, self._parameters, kept)
        return scores_of(kept.answers)

    def forget(self) -> None:
        """Removes the scores that are kept: the results are written."""
        for kept in self._kept:
            kept.forget()

    # --- texts

    def written(self, prompts: Sequence[tuple[str, Arguments]]) -> list[str]:
        """Texts that the model writes behind prompts, cut at the first stop string.

        A prompt that leaves no room for the text loses its beginning.

        Raises:
          UserError: a task asks for what the engine does not have, or for longer texts than the model can write.
        """
        if self._engine is None:
            decoder = Decoder(self._scorer.placed, self._parameters)
            self._engine = Engine(decoder, self._sequences)
        done, texts = 0, []

        def count() -> None:
            nonlocal done
            done += 1
            if this_process() == 0:
                progress.update(done)

        with ProgressLine("writing", len(prompts)) as progress:
            for number, (prompt, arguments) in enumerate(prompts):
                sampling, stops = sampling_of(arguments, number)
                room = self.longest - sampling.max_tokens
                if room < 1:
                    raise UserError(
                        f"texts of {sampling.max_tokens} tokens leave no room for a prompt in the {self.longest} that "
                        "the model reads: give the task smaller max_gen_toks"
                    )
                ids = tuple((self.encode(prompt) or [self.prefix])[-room:])
                text = Completion(self.tokenizer, ids, sampling, self._stop_ids, stops, on_end=count)
                self._engine.submit(text.request)
                texts.append(text)
            self._engine.run()
        return [text.text for text in texts]


def rolling_rows(ids: list[int], prefix: int, length: int) -> list[Row]:
    """Windows of a text, each of which predicts `length` tokens at most; `prefix` stands before the first."""
    whole, rows = np.asarray([prefix, *ids], np.int32), []
    for start in range(0, len(ids), length):
        stop = min(start + length, len(ids)) + 1
        first = max(0, stop - length - 1)
        rows.append(Row(whole[first:stop], start + 1 - first))
    return rows


def sampling_of(arguments: Arguments, number: int) -> tuple[Sampling, tuple[str, ...]]:
    """How a text is drawn, and the strings that end it; drawn ones have the prompt's number as their seed.

    Raises:
      UserError: the task's `generation_kwargs` have what the engine does not.
    """
    known = (*LENGTHS, *DRAWING, "until", "do_sample", "temperature")
    unknown = next(
        (name for name in arguments if name not in known and (name, arguments[name]) != ("num_beams", 1)), None
    )
    if unknown is not None:
        raise UserError(f"a task's generation_kwargs have {unknown}, and texts are drawn by {', '.join(known)} only")
    draws = arguments.get("do_sample")
    temperature = float(arguments.get("temperature", 1.0 if draws else 0.0))
    settings = {name: arguments[name] for name in DRAWING if arguments.get(name) is not None}
    sampling = Sampling(
        max_tokens=int(next((arguments[name] for name in LENGTHS if name in arguments), MOST_TOKENS)),
        temperature=0.0 if draws is False else temperature,
        seed=number,
        **settings,
    )
    check_bounds(sampling)
    until = arguments.get("until") or ()
    return sampling, tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)


def as_lm(answering: Answering) -> Any:
    """The model as lm-eval asks one: an `LM` of its own.

    Raises:
      UserError: lm-eval is not installed.
    """
    base: Any = require("lm_eval.api.model", "evaluate").TemplateLM

    class Model(base):
        """Of mtjax."""

        @property
        def eot_token_id(self) -> int:
            return answering.prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return answering.encode(string, add_special_tokens)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return answering.continuations([(before, after) for _, before, after in requests])

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return answering.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return answering.written([request.args for request in requests])

    return Model()
