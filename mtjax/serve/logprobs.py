"""Log-probabilities as OpenAI writes them: of completions as four lists, of chats as a list of objects."""

from collections.abc import Iterable
from typing import Any

from mtjax.generate.completion import Piece
from mtjax.generate.request import Token
from mtjax.serve.tokens import Tokens


class CompletionLogprobs:
    """Of one text, in order.

    Args:
      tokens: the tokenizer.
      most: how many of the most likely tokens are told; 0 for none.
      start: where the text begins, for `text_offset`: below 0 if what is told begins with characters that are not
        part of the answer's text.
    """

    def __init__(self, tokens: Tokens, most: int, start: int = 0) -> None:
        self._tokens, self._most, self._offset = tokens, most, start

    def of(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """The four lists of the next pieces."""
        rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            if piece.token is not None:
                rows["tokens"].append(self._tokens.text_of(piece.token.id))
                rows["token_logprobs"].append(piece.token.logprob)
                rows["top_logprobs"].append(self._likely(piece.token))
                rows["text_offset"].append(max(self._offset, 0))
            self._offset += len(piece.text)
        return rows | ({} if self._most else {"top_logprobs": None})

    def _likely(self, token: Token) -> dict[str, float] | None:
        """The most likely ones by their texts: of several with the same text the likeliest, which comes first."""
        if token.logprob is None:
            return None
        texts: dict[str, float] = {}
        for index, logprob in [*token.top_logprobs.items()][: self._most]:
            texts.setdefault(self._tokens.text_of(index), logprob)
        texts.setdefault(self._tokens.text_of(token.id), token.logprob)
        return texts


def chat_logprobs(tokens: Tokens, pieces: Iterable[Piece], most: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice, with `most` of the most likely tokens."""

    def entry(index: int, logprob: float | None) -> dict[str, Any]:
        return {"token": tokens.text_of(index), "logprob": logprob, "bytes": tokens.bytes_of(index)}

    content = [
        entry(token.id, token.logprob)
        | {"top_logprobs": [entry(index, logprob) for index, logprob in [*token.top_logprobs.items()][:most]]}
        for token in (piece.token for piece in pieces)
        if token is not None
    ]
    return {"content": content, "refusal": None}
