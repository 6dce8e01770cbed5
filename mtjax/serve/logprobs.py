"""Log-probabilities in OpenAI's formats: four lists for completions, a list of objects for chat completions."""

from collections.abc import Iterable
from typing import Any

from mtjax.generate.completion import Piece
from mtjax.generate.request import Token
from mtjax.serve.tokens import Tokens


class CompletionLogprobs:
    """Log-probabilities of one text, whose pieces are passed in order.

    Args:
      tokens: the tokenizer.
      most: number of most likely tokens to report; 0 for none.
      start: `text_offset` of the first piece: below 0 if the pieces begin with characters that are not part of the
        response's text.
    """

    def __init__(self, tokens: Tokens, most: int, start: int = 0) -> None:
        self._tokens, self._most, self._offset = tokens, most, start

    def of(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Returns the four lists for the next pieces."""
        rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            if piece.token is not None:
                rows["tokens"].append(self._tokens.text_of(piece.token.id))
                rows["token_logprobs"].append(piece.token.logprob)
                rows["top_logprobs"].append(self._top_logprobs(piece.token))
                rows["text_offset"].append(max(self._offset, 0))
            self._offset += len(piece.text)
        return rows | ({} if self._most else {"top_logprobs": None})

    def _top_logprobs(self, token: Token) -> dict[str, float] | None:
        """Returns log-probabilities by text; among tokens with the same text, that of the most likely one."""
        if token.logprob is None:
            return None
        texts: dict[str, float] = {}
        # Tokens of parts of a character may decode to the same replacement character: the likelier one stays.
        for index, logprob in [*token.top_logprobs.items()][: self._most]:
            texts.setdefault(self._tokens.text_of(index), logprob)
        # OpenAI's API adds the token itself if it is not among the most likely ones.
        texts.setdefault(self._tokens.text_of(token.id), token.logprob)
        return texts


def chat_logprobs(tokens: Tokens, pieces: Iterable[Piece], most: int) -> dict[str, Any]:
    """Returns `logprobs` of a chat completion's choice, with the `most` most likely tokens at each position."""

    def entry(index: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.text_of(index), "logprob": logprob, "bytes": tokens.bytes_of(index)}

    content = [
        entry(token.id, token.logprob)
        | {"top_logprobs": [entry(index, logprob) for index, logprob in [*token.top_logprobs.items()][:most]]}
        for token in (piece.token for piece in pieces)
        if token is not None
    ]
    return {"content": content, "refusal": None}
