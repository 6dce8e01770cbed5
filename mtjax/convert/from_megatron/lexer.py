"""Tokenizes a bash script into words and operators; quotes determine how parts of a word are expanded and split."""

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

from mtjax.errors import UserError

Style = Literal["literal", "quoted", "plain"]
"""literal: not expanded. quoted: variables are expanded. plain: expanded, and split at blanks."""


class WordPart(NamedTuple):
    """A part of a word with one kind of quotes."""

    text: str
    style: Style


class ShellToken(NamedTuple):
    """A word, or an operator such as `&&`, a newline or `(`."""

    parts: tuple[WordPart, ...]
    operator: str
    """"" for a word."""
    line: int

    @property
    def raw(self) -> str:
        """The word as typed, without its quotes."""
        return "".join(part.text for part in self.parts)

    @property
    def bare(self) -> str:
        """The word if it contains no quotes, so that it may be a keyword; else ""."""
        return self.raw if not self.operator and all(part.style == "plain" for part in self.parts) else ""


# Longest first: the first that matches is taken.
_OPERATORS = (";;", "&&", "||", ";", "|", "&", "(", ")")
# Before operators: `&>` and `>&` begin or end with one.
_REDIRECT = re.compile(r"\d*(?:&>>?|>>|>&|>\||<&|<>|>|<)\s*")
_HEREDOC = re.compile(r"\d*<<-?\s*(['\"]?)(\w+)\1")
_HERE_STRING = re.compile(r"\d*<<<\s*")


def tokens(text: str, source: str) -> list[ShellToken]:
    """Returns the words and operators of a script, without comments and redirections.

    Raises:
      UserError: a quote or bracket is not closed; `source` names the script.
    """
    return list(_Lexer(text, source).run())


def bracket_end(text: str, at: int) -> int | None:
    """Returns the index after the bracket that closes the one at index `at`, outside quotes; None if there is none."""
    opened = text[at]
    closed = {"(": ")", "{": "}"}[opened]
    depth, quote = 0, ""
    while at < len(text):
        char = text[at]
        # Also inside single quotes, where bash does not escape: a quote after a backslash in single quotes inside
        # `$(...)` is rare.
        if char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == opened:
            depth += 1
        elif char == closed:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return None


class _Lexer:
    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text.replace("\r\n", "\n"), source
        self._newlines = [match.start() for match in re.finditer("\n", self._text)]
        self._at = 0
        self._heredocs: list[str] = []

    def run(self) -> Iterator[ShellToken]:
        """Yields the tokens of the script."""
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char == "\n":
                # The command ends here; the text of its here-documents begins after the newline.
                yield ShellToken((), "\n", self._line)
                self._at += 1
                self._skip_heredocs()
            elif char in " \t":
                self._at += 1
            # A continued line, between words; within a word `_word` skips it.
            elif text.startswith("\\\n", self._at):
                self._at += 2
            # Only where a word would begin: `a#b` is a word.
            elif char == "#":
                self._at = self._end_of_line()
            elif self._skip_redirect():
                continue
            elif operator := next((o for o in _OPERATORS if text.startswith(o, self._at)), ""):
                yield ShellToken((), operator, self._line)
                self._at += len(operator)
            else:
                line = self._line
                yield ShellToken(tuple(self._word()), "", line)

    @property
    def _line(self) -> int:
        return bisect_left(self._newlines, self._at) + 1

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _skip_redirect(self) -> bool:
        """Skips a redirection such as `> FILE`, `2>&1` or `<<EOF`."""
        # Before _HEREDOC and _REDIRECT, which match its beginning.
        if match := _HERE_STRING.match(self._text, self._at):
            self._at = match.end()
            list(self._word())
            return True
        if match := _HEREDOC.match(self._text, self._at):
            self._heredocs.append(match[2])
            self._at = match.end()
            return True
        if match := _REDIRECT.match(self._text, self._at):
            self._at = match.end()
            list(self._word())
            return True
        return False

    def _skip_heredocs(self) -> None:
        """Skips the here-documents that begin on the next line."""
        for name in self._heredocs:
            end = re.compile(rf"^\s*{name}\s*$", re.MULTILINE).search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._heredocs = []

    def _word(self) -> Iterator[WordPart]:
        """Yields the parts up to a blank or an operator."""
        text, plain = self._text, ""
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\n;|&()<>":
                break
            if char == "'":
                yield WordPart(plain, "plain")
                plain = ""
                end = self._closing("'", self._at + 1)
                yield WordPart(text[self._at + 1 : end], "literal")
                self._at = end + 1
            elif char == '"':
                yield WordPart(plain, "plain")
                plain = ""
                yield from self._double_quoted()
            elif char == "\\":
                # A part of its own, so that an escaped character is neither expanded nor a place to split at.
                if text[self._at + 1 : self._at + 2] != "\n":
                    yield WordPart(plain, "plain")
                    plain = ""
                    yield WordPart(text[self._at + 1 : self._at + 2], "literal")
                self._at += 2
            else:
                end = self._expansion_end(self._at)
                plain += text[self._at : end]
                self._at = end
        yield WordPart(plain, "plain")

    def _double_quoted(self) -> Iterator[WordPart]:
        """Yields the parts of a text in double quotes."""
        text, found = self._text, ""
        start, self._at = self._at, self._at + 1
        while self._at < len(text):
            char = text[self._at]
            if char == '"':
                self._at += 1
                yield WordPart(found, "quoted")
                return
            # The only characters that a backslash escapes in double quotes; before any other it stands for itself.
            if char == "\\" and text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                yield WordPart(found, "quoted")
                found = ""
                escaped = text[self._at + 1]
                if escaped != "\n":
                    yield WordPart(escaped, "literal")
                self._at += 2
            else:
                end = self._expansion_end(self._at)
                found += text[self._at : end]
                self._at = end
        # The message names the line where the quote begins, not the end of the script.
        self._at = start
        raise UserError(f'{self._source}, line {self._line}: the quote " is not closed')

    def _expansion_end(self, at: int) -> int:
        """Returns the index after `$(...)`, `${...}`, a command in backquotes or a single character at index `at`."""
        text = self._text
        if text.startswith(("$(", "${"), at):
            return self._bracket_end(at + 1)
        if text[at] == "`":
            return self._closing("`", at + 1) + 1
        return at + 1

    def _bracket_end(self, at: int) -> int:
        end = bracket_end(self._text, at)
        if end is None:
            self._at = at
            raise UserError(f"{self._source}, line {self._line}: {self._text[at]} is not closed")
        return end

    def _closing(self, quote: str, at: int) -> int:
        end = self._text.find(quote, at)
        if end < 0:
            raise UserError(f"{self._source}, line {self._line}: the quote {quote} is not closed")
        return end
