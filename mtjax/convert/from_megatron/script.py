"""Interprets a bash script without running it: variables, arrays, conditions, functions, loops."""

import contextlib
import fnmatch
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from mtjax.convert.from_megatron.conditions import Decided, both, decide
from mtjax.convert.from_megatron.expand import Value, Variables, shown, unknown, unknown_in
from mtjax.convert.from_megatron.lexer import ShellToken, WordPart, tokens
from mtjax.errors import UserError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_SHELLS = ("bash", "sh", "zsh")
_SEPARATORS = ("\n", ";", "&", "&&", "||", "|", ";;")
_ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
_DEEPEST = 20
_MOST = 100_000
"""Most commands of a script; a launch script has far fewer."""


class CommandLine(NamedTuple):
    """A command that the script would run."""

    words: list[str]
    line: int


class _Exit(Exception):
    """The script runs `exit`."""


class Script:
    """Interprets a script.

    Args:
      text: the script.
      source: its name, for messages.
      positional: its arguments, `$1` first.
      variables: values of variables, which override assignments in the script.

    Attributes:
      lines: commands in the order in which they would run.
      notes: conditions and loops that could not be evaluated.
      variables: values after the last command.
    """

    def __init__(self, text: str, source: str, positional: Sequence[str], variables: dict[str, str]) -> None:
        self.lines: list[CommandLine] = []
        self.notes: list[str] = []
        # Values of --set: an assignment in the script must not override what the user gave instead.
        self._fixed = frozenset(variables)
        # No variables of this process's environment: a translation must not depend on where it is made.
        values: dict[str, Value] = {**_scheduler(text), **variables}
        self.variables = Variables(values, positional)
        self._source, self._functions = source, {}
        with contextlib.suppress(_Exit):
            self._read(tokens(text, source), self.variables, 0)

    def _read(self, found: list[ShellToken], variables: Variables, depth: int) -> None:
        """Interprets a list of commands; `depth` counts nested functions and compound commands."""
        if depth > _DEEPEST:
            raise UserError(f"{self._source}: functions and conditions are nested more than {_DEEPEST} deep")
        at, status, joined = 0, True, "\n"
        while at < len(found):
            token = found[at]
            if token.operator:
                joined = token.operator if token.operator in ("&&", "||") else "\n"
                at += 1
                continue
            # After &&, a command with unknown status counts as failed; after ||, as succeeded.
            is_skipped = (joined == "&&" and status is not True) or (joined == "||" and status is not False)
            if token.bare in _ENDS:
                end = _end_of(found, at)
                if not is_skipped:
                    self._compound(found[at : end + 1], variables, depth)
                at, status = end + 1, True if not is_skipped else status
                continue
            if _is_function(found, at):
                at = self._define(found, at)
                continue
            end = _end_of_command(found, at)
            if not is_skipped:
                status = self._command(found[at:end], variables, depth)
            at = end

    def _define(self, found: list[ShellToken], at: int) -> int:
        """Records the function whose definition starts at index `at`; returns the index after its body."""
        named = at + (found[at].bare == "function")
        start = next((i for i in range(named + 1, len(found)) if found[i].operator not in ("(", ")", "\n")), named)
        if start >= len(found) or found[start].bare != "{":
            raise UserError(f"{self._source}, line {found[at].line}: the function's body must be in braces")
        end = _end_of(found, start)
        self._functions[found[named].raw] = found[start + 1 : end]
        return end + 1

    def _command(self, words: list[ShellToken], variables: Variables, depth: int) -> Decided:
        """Interprets one command and returns its exit status; records it in `lines` if it runs a program."""
        first = words[0].bare
        if first == "!":
            found = self._command(words[1:], variables, depth) if words[1:] else True
            return None if found is None else not found
        if first in ("[", "[[", "test"):
            inner = words[1:] if first == "test" else words[1:-1]
            return decide([word.operator or variables.text(word.parts) for word in inner])
        if first in ("true", ":", "false"):
            return first != "false"
        remaining = words
        if first in _DECLARES:  # declare -a NAME=(...)
            remaining = list(itertools.dropwhile(lambda word: word.raw.startswith("-"), words[1:]))
        remaining = self._assign(remaining, variables)
        if first in _DECLARES or not remaining:
            return True
        # Parentheses of a subshell or of `((` are not words.
        fields = [field for word in remaining if not word.operator for field in variables.fields(word)]
        if not fields:
            return True
        if fields[0] == "exit":
            raise _Exit
        if fields[0] in ("source", "."):
            self._note(words[0], f"{' '.join(map(shown, fields))}: the file is not read")
        if fields[0] in self._functions:
            # Functions share the script's variables, as in bash without `local`.
            self._read(self._functions[fields[0]], variables.with_arguments(fields[1:]), depth + 1)
            return True
        # bash -c "...": the inner script is interpreted with the same variables.
        inner = _inner_script(fields)
        if inner is not None:
            read = [token._replace(line=words[0].line) for token in tokens(inner, self._source)]
            self._read(read, variables, depth + 1)
            return True
        if len(self.lines) >= _MOST:
            raise UserError(f"{self._source} has more than {_MOST} commands")
        self.lines.append(CommandLine(fields, words[0].line))
        return True

    def _assign(self, words: list[ShellToken], variables: Variables) -> list[ShellToken]:
        """Interprets the assignments at the beginning of a command; returns its other words."""
        at = 0
        while at < len(words):
            match = _ASSIGNED.match(words[at].raw) if not words[at].operator else None
            if not match or words[at].parts[0].style != "plain" or not _ASSIGNED.match(words[at].parts[0].text):
                break
            name, is_added = match[1], bool(match[2])
            first = words[at].parts[0]
            parts = (WordPart(first.text[match.end() :], "plain"), *words[at].parts[1:])
            if at + 1 < len(words) and words[at + 1].operator == "(":
                end = next((i for i in range(at + 2, len(words)) if words[i].operator == ")"), len(words))
                inside = [word for word in words[at + 2 : end] if not word.operator]
                value: Value = [field for word in inside for field in variables.fields(word)]
                at = end
            else:
                value = variables.text(parts)
            # --set overrides assignments in the script.
            if name not in self._fixed:
                variables.assign(name, value, append=is_added)
            at += 1
        return words[at:]

    def _compound(self, found: list[ShellToken], variables: Variables, depth: int) -> None:
        """Interprets `if`, `for`, `while`, `case` or `{`."""
        kind, inner = found[0].bare, found[1:-1]
        if kind == "{":
            self._read(inner, variables, depth + 1)
        elif kind == "if":
            self._if(inner, found[0], variables, depth)
        elif kind == "case":
            self._case(inner, found[0], variables, depth)
        else:
            head, _, body = _split_at(inner, "do")
            words = [word for word in head if not word.operator]
            if kind != "for":
                self._note(found[0], f"{kind} loop: its body is ignored")
            elif words:
                values = [field for word in words[2:] for field in variables.fields(word)]
                if len(values) > 1:
                    self._note(found[0], f"loop over {words[0].raw}: only the first value is used, {shown(values[0])}")
                variables.assign(words[0].raw, values[0] if values else unknown(words[0].raw))
                self._read(body, variables, depth + 1)

    def _if(self, inner: list[ShellToken], first: ShellToken, variables: Variables, depth: int) -> None:
        """Interprets the branch of an `if` whose condition is true; ignores those with unknown conditions."""
        condition, _, remaining = _split_at(inner, "then")
        while True:
            body, keyword, remaining = _split_at(remaining, "elif", "else")
            holds = self._holds(condition, variables, depth)
            if holds is None:
                typed = [word.operator or shown(variables.text(word.parts)) for word in condition]
                words = " ".join(word for word in typed if word not in ("\n", ";"))
                self._note(first, f"if {words}: unknown condition, the branch is ignored")
            if holds:
                self._read(body, variables, depth + 1)
                return
            if keyword == "else":
                self._read(remaining, variables, depth + 1)
                return
            if keyword != "elif":
                return
            condition, _, remaining = _split_at(remaining, "then")

    def _holds(self, condition: list[ShellToken], variables: Variables, depth: int) -> Decided:
        """Returns whether a list of commands, joined by && and ||, succeeds; None if unknown."""
        at, holds, joined = 0, True, ""
        while at < len(condition):
            operator = condition[at].operator
            if operator == "(":
                return None  # (( ... ))
            if operator:
                joined = operator if operator in ("&&", "||") else ""
                at += 1
                continue
            end = _end_of_command(condition, at)
            is_skipped = (joined == "&&" and holds is False) or (joined == "||" and holds is True)
            if not is_skipped:
                found = self._status(condition[at:end], variables, depth)
                holds = both(holds, joined, found) if joined else found
            at = end
        return holds

    def _status(self, words: list[ShellToken], variables: Variables, depth: int) -> Decided:
        """Returns the exit status of a command in a condition; None (unknown) if it would run a program."""
        named = words[1].bare if words[0].bare == "!" and words[1:] else words[0].bare
        # Only the status of builtins is known; programs are not run.
        # `_command` returns True for a program, as most commands of a script succeed; as a condition that would be a
        # guess.
        is_decided = named in ("[", "[[", "test", "true", "false", ":")
        return self._command(words, variables, depth) if is_decided else None

    def _case(self, inner: list[ShellToken], first: ShellToken, variables: Variables, depth: int) -> None:
        """Interprets the first branch of a `case` whose pattern matches.

        Raises:
          UserError: there is no word after `case`.
        """
        if not inner:
            raise UserError(f"{self._source}, line {first.line}: case without a word")
        value = variables.text(inner[0].parts)
        if unknown_in(value):
            self._note(first, f"case {shown(value)}: unknown value, all branches are ignored")
            return
        branches = inner[2:]
        while branches:
            at = next((i for i, token in enumerate(branches) if token.operator == ")"), len(branches))
            patterns = [variables.text(token.parts) for token in branches[:at] if not token.operator]
            end = next((i for i in range(at, len(branches)) if branches[i].operator == ";;"), len(branches))
            if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                self._read(branches[at + 1 : end], variables, depth + 1)
                return
            branches = branches[end + 1 :]

    def _note(self, token: ShellToken, text: str) -> None:
        self.notes.append(f"line {token.line}: {text}")


def _scheduler(text: str) -> dict[str, str]:
    """Returns Slurm's environment variables from the #SBATCH directives of a script."""
    found = dict(re.findall(r"^#SBATCH\s+--([\w-]+)[= ](\S+)", text, re.MULTILINE))
    found |= {
        {"N": "nodes", "n": "ntasks"}[k]: v for k, v in re.findall(r"^#SBATCH\s+-([Nn])\s*(\d+)", text, re.MULTILINE)
    }
    gpus = found.get("gpus-per-node") or found.get("gres", "").rpartition("gpu:")[2]
    values = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), found.get("nodes", "")),
        "SLURM_GPUS_ON_NODE": gpus.rpartition(":")[2],
        "SLURM_NTASKS_PER_NODE": found.get("ntasks-per-node", ""),
        "SLURM_NTASKS": found.get("ntasks", ""),
    }
    return {"PWD": ".", **{name: value for name, value in values.items() if value.isdigit()}}


def _is_function(found: list[ShellToken], at: int) -> bool:
    following = [token.operator for token in found[at + 1 : at + 3]]
    return found[at].bare == "function" or (following == ["(", ")"] and bool(re.fullmatch(r"\w+", found[at].bare)))


def _end_of_command(found: list[ShellToken], at: int) -> int:
    """Returns the index after a command; separators inside [[ ]] and an array's parentheses don't end it."""
    is_test = found[at].bare == "[["
    depth = 0
    for i in range(at, len(found)):
        token = found[i]
        if token.operator == "(":
            depth += 1
        elif token.operator == ")":
            depth -= 1
        elif is_test and token.bare == "]]":
            is_test = False
        elif token.operator in _SEPARATORS and not is_test and depth <= 0:
            return i
    return len(found)


def _starts(found: list[ShellToken], at: int) -> bool:
    """Returns whether a command begins at a token; only there are keywords recognized."""
    return (
        not at or found[at - 1].operator != "" or found[at - 1].bare in ("then", "else", "elif", "do", "if", "{", "!")
    )


def _end_of(found: list[ShellToken], at: int) -> int:
    """Returns the index of the keyword that closes the one at index `at`."""
    depth = 0
    for i in range(at, len(found)):
        word = found[i].bare
        if not word or not (_starts(found, i) or i == at):
            continue
        depth += word in _ENDS
        depth -= word in _ENDS.values()
        if not depth:
            return i
    return len(found) - 1


def _split_at(found: list[ShellToken], *keywords: str) -> tuple[list[ShellToken], str, list[ShellToken]]:
    """Splits tokens at the first of some keywords, outside nested commands: before, keyword, after."""
    depth = 0
    for i, token in enumerate(found):
        if not token.bare or not _starts(found, i):
            continue
        if not depth and token.bare in keywords:
            return found[:i], token.bare, found[i + 1 :]
        depth += token.bare in _ENDS
        depth -= token.bare in _ENDS.values()
    return found, "", []


def _inner_script(fields: list[str]) -> str | None:
    """Returns the script in `bash -c SCRIPT` and `eval SCRIPT`, also after a launcher; None for other commands."""
    if fields[0] == "eval":
        return " ".join(fields[1:])
    for i, word in enumerate(fields[:-2]):
        if word.rpartition("/")[2] in _SHELLS and re.fullmatch(r"-\w*c", fields[i + 1]):
            return " ".join([*fields[:i], fields[i + 2]])
    return None
