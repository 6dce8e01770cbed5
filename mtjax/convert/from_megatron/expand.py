"""Variables of a bash script, and the expansion of words."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtjax.convert.from_megatron.lexer import ShellToken, WordPart, bracket_end, tokens
from mtjax.errors import UserError

Value = str | list[str]
"""Value of a variable: a string or an array."""
# Unicode's private use area: characters that no script contains.
OPEN, CLOSE = "\ue000", "\ue001"
"""Markers around the name of a variable without a value, in an expanded text."""
_BLANK = "\ue002"
"""Replaces a blank in such a name, so that the word is not split there."""
_UNKNOWN = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)
_LONGEST = 2**20
"""Most characters of a value; guards against scripts that repeatedly double a variable."""
_LONGEST_LIST = 10_000
_NAME = re.compile(r"(?:[A-Za-z_]\w*|[0-9]+|[@*#])")
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#])(?:\[([^]]*)\])?(.*)", re.DOTALL)
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # No power: 9**9**9 in a script must not compute for hours.
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def unknown(name: str) -> str:
    """Returns the placeholder for a variable without a value."""
    return OPEN + "".join(_BLANK if char.isspace() else char for char in name) + CLOSE


def unknown_in(text: str) -> list[str]:
    """Returns the names of variables without a value that a text refers to."""
    return [name.replace(_BLANK, " ") for name in _UNKNOWN.findall(text)]


def shown(text: str) -> str:
    """Replaces placeholders by the variables as typed."""
    text = _UNKNOWN.sub(lambda match: match[1] if match[1][0] in "$`" else f"${match[1]}", text)
    return text.replace(_BLANK, " ")


class Variables:
    """The variables of a script, and its positional arguments."""

    def __init__(self, values: dict[str, Value], positional: Sequence[str]) -> None:
        self.values = values
        self._positional = list(positional)

    def with_arguments(self, positional: Sequence[str]) -> "Variables":
        """Returns the same variables, with the arguments of a function."""
        return Variables(self.values, positional)

    def assign(self, name: str, value: Value, *, append: bool = False) -> None:
        """Sets a variable, or appends to it as `+=` does.

        Raises:
          UserError: it becomes too long.
        """
        if append:
            before = self.values.get(name, [] if isinstance(value, list) else "")
            if isinstance(before, list):
                value = [*before, *(value if isinstance(value, list) else [value])]
            else:
                value = [before, *value] if isinstance(value, list) else before + value
        # The length of a string, whose items are characters, or that of all words of an array.
        if sum(map(len, value)) > _LONGEST:
            raise UserError(f"the variable {name} is longer than {_LONGEST} characters")
        self.values[name] = value

    def fields(self, word: ShellToken) -> list[str]:
        """Expands a word to zero, one or several words."""
        found: list[str] = []
        now: str | None = None

        def end() -> None:
            nonlocal now
            if now is not None:
                found.append(now)
            now = None

        for part in word.parts:
            # `""` is a word, an empty one; an unquoted variable that is empty is none. Both begin with `now` None.
            if part.style == "literal" or (part.style == "quoted" and not part.text):
                now = (now or "") + part.text
                continue
            for text, is_separate in self._pieces(part.text):
                is_quoted = part.style == "quoted"
                # bash splits only what an unquoted expansion gives: a blank at its start ends the word before it, and
                # one at its end begins the next.
                if is_separate or (text[:1].isspace() and not is_quoted):
                    end()
                for i, each in enumerate([text] if is_quoted else text.split()):
                    if i:
                        end()
                    now = (now or "") + each
                if text[-1:].isspace() and not is_quoted:
                    end()
        end()
        return found

    def text(self, parts: Sequence[WordPart]) -> str:
        """Expands the parts of a word without splitting it, as in an assignment."""
        texts = []
        for part in parts:
            if part.style == "literal":
                texts.append(part.text)
            else:
                texts.append(" ".join(text for text, _ in self._joined(part.text)))
        return "".join(texts)

    def number(self, expression: str) -> int | str:
        """Returns the value of an arithmetic expression, or a placeholder if it can't be computed."""
        text = self.text((WordPart(expression, "quoted"),))
        for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", _UNKNOWN.sub("", text))):
            value = self.values.get(name)
            if not isinstance(value, str):
                return unknown(name)
            # In brackets, as bash evaluates the value of a bare name first. `$NAME` was replaced by its text above.
            text = re.sub(rf"\b{name}\b", lambda _, value=value: f"({value})", text)
        if missing := unknown_in(text):
            return unknown(missing[0])
        try:
            # bash truncates and Python rounds down, which is the same for sizes and numbers of devices.
            return int(evaluate(text.replace("/", "//")))
        except (ValueError, SyntaxError, ZeroDivisionError, TypeError):
            return unknown(f"$(({expression}))")

    def _joined(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the pieces of a quoted text: elements of an array separately, all else joined."""
        now = ""
        for piece, is_separate in self._pieces(text):
            if is_separate:
                yield now, False
                now = ""
            now += piece
        yield now, False

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields plain text and values of variables; True for one that begins a new word, as in an array."""
        at, plain = 0, ""
        while at < len(text):
            if text[at] == "`":
                end = text.find("`", at + 1) + 1 or len(text)
                yield plain + unknown(text[at:end]), False
                plain, at = "", end
                continue
            if text[at] != "$" or at + 1 == len(text):
                plain, at = plain + text[at], at + 1
                continue
            values, at = self._expansion(text, at)
            if plain:
                yield plain, False
                plain = ""
            for i, value in enumerate(values):
                yield value, bool(i)
        if plain:
            yield plain, False

    def _expansion(self, text: str, at: int) -> tuple[list[str], int]:
        """Returns the values of the expansion at a `$`, and where it ends."""
        if text.startswith(("$(", "${"), at):
            end = bracket_end(text, at + 1) or len(text)
            inner = text[at + 2 : end - 1]
            if text[at + 1] == "{":
                return self._braced(inner), end
            if inner.startswith("("):
                return [str(self.number(inner[1:-1]))], end
            return (["."] if inner.strip() == "pwd" else [unknown(text[at:end])]), end
        match = _NAME.match(text, at + 1)
        if not match:
            return ["$"], at + 1
        name = match[0][0] if match[0][0].isdigit() else match[0]  # $10 is ${1}0
        return self._value(name, None), at + 1 + len(name)

    def _braced(self, text: str) -> list[str]:
        """Returns the values of `${...}`."""
        match = _BRACED.fullmatch(text)
        if not match:
            return [unknown(f"${{{text}}}")]
        length, name, index, suffix = match.groups()
        values = self._value(name, index)
        is_set = not any(map(unknown_in, values))
        is_filled = is_set and any(values)
        if length:
            counted = len(self._value(name, "@")) if index in ("@", "*") else len("".join(values))
            # bash's 0 for an unset variable would be taken as a number of GPUs or layers.
            return [str(counted)] if is_set else [unknown(name)]
        if not suffix:
            return values
        operation = re.match(r":?[-=+?]", suffix)
        if not operation:
            return [unknown(f"${{{text}}}")]
        holds = is_filled if operation[0][0] == ":" else is_set
        kind, word = operation[0][-1], suffix[operation.end() :]
        if kind == "+":
            return self._inner(word) if holds else []
        # `${X:?message}` ends the script if X is unset; its value is unknown then, and reported like any other.
        if holds or kind == "?":
            return values
        found = self._inner(word)
        if kind == "=":
            self.assign(name, " ".join(found))
        return found

    def _inner(self, text: str) -> list[str]:
        """Returns the words of a default: `${X:-"a b"}`."""
        return [field for token in tokens(text, "a default") for field in self.fields(token)] if text else [""]

    def _value(self, name: str, index: str | None) -> list[str]:
        """Returns the values of a variable, a positional argument or `$#`; several only for `[@]` and `$@`."""
        if name == "*" or index == "*":
            return [" ".join(self._value("@" if name == "*" else name, "@"))]
        # A script without arguments is read as one whose arguments are not known: they are what a user would add.
        if name == "@":
            return list(self._positional) if self._positional else [unknown("@")]
        if name == "#":
            return [str(len(self._positional))] if self._positional else [unknown("#")]
        if name.isdigit():
            number = int(name)
            return [self._positional[number - 1]] if 0 < number <= len(self._positional) else [unknown(name)]
        value = self.values.get(name)
        if value is None:
            return [unknown(name)]
        if isinstance(value, str):
            return [value]
        if index == "@":
            return value
        position = int(index) if index and index.isdigit() else 0
        return [value[position]] if position < len(value) else [""]


def evaluate(text: str) -> Any:
    """Evaluates sums and products of integers and lists: `2*(3+4)`, `[0]*1+[1]*27`.

    Raises:
      ValueError: it is another expression, or makes a list that is too long.
      SyntaxError: it is not an expression.
    """

    def value(node: ast.expr) -> Any:
        # Not isinstance: True is an int to Python.
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = value(node.left), value(node.right)
            counts = [side for side in (left, right) if not isinstance(side, list)]
            # A list times an integer: the length is checked before the list is made.
            if len(counts) == 1 and (type(node.op) is not ast.Mult or counts[0] > _LONGEST_LIST):
                raise ValueError(f"{text!r} makes a long list")
            return _OPERATIONS[type(node.op)](left, right)
        raise ValueError(f"{text!r} is not a sum of products of integers")

    return value(ast.parse(text.strip(), mode="eval").body)
