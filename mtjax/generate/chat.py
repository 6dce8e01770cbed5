"""Conversations as text: a tokenizer's chat template, rendered as transformers' `apply_chat_template` renders it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.tokens.pretrained_settings import CONFIG, read_object, special_names_in
from mtjax.data.tokens.template_files import DEFAULT, template_files
from mtjax.errors import UserError, first_line, lone_surrogate, nearest, require, shortened
from mtjax.generate.chat_environment import ChatEnvironment, Spans

TOOL_USE = "tool_use"
"""The name of the template for conversations with tools, where a tokenizer has several."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which clients and data sets write what the assistant thinks."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag that begins what a template marks as the assistant's."""
Message = Mapping[str, Any]
"""`role`, `content`, and whatever else the template reads, such as `tool_calls`."""


@dataclass(frozen=True)
class TemplateInputs:
    """The inputs of a template in addition to the messages.

    Attributes:
      tools: JSON schemas; None where none were given.
      documents: for templates of retrieval-augmented generation; None where none were given.
      variables: of `chat_template_kwargs`, such as `enable_thinking`.
    """

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TemplateInputs":
        """Reads `tools`, `documents` and `chat_template_kwargs`; null is the same as not given.

        Raises:
          UserError: one has the wrong type, or a variable would replace an argument of the template.
        """
        lists = {name: _objects(name, values.get(name)) for name in ("tools", "documents")}
        variables = values.get("chat_template_kwargs")
        variables = {} if variables is None else variables
        if not isinstance(variables, dict):
            raise UserError(f"chat_template_kwargs is {shortened(variables)}, and must be an object")
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in variables:
                raise UserError(f"chat_template_kwargs has {name}, which can't be set there: leave it out")
        return cls(**lists, variables=variables)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: for `Tokenizer.encode_marked`.
      generated: the characters inside `{% generation %}` blocks.
      wrote_date: whether the template wrote the current date.
    """

    text: str
    generated: Spans
    wrote_date: bool


class ChatTemplate:
    """The chat templates of a tokenizer: usually one, sometimes another one for conversations with tools."""

    def __init__(self, text: str | Mapping[str, str], names: Mapping[str, str], source: str) -> None:
        """Compiles the templates.

        Args:
          text: the template, or templates by name.
          names: special tokens that it may write, such as `bos_token`.
          source: where it is from, for messages.

        Raises:
          UserError: it is not a template, or jinja2 is not installed.
        """
        self._names, self._source = names, source
        self._environment = ChatEnvironment()
        self._templates = {
            name: self._compile(each) for name, each in ({DEFAULT: text} if isinstance(text, str) else text).items()
        }

    @classmethod
    def of(cls, folder: Path, named: Path | None = None) -> "ChatTemplate | None":
        """The template of a tokenizer's folder, or the one in the file `named`; None where there is none.

        Raises:
          UserError: it can't be read.
        """
        files = {DEFAULT: named} if named else template_files(folder)
        texts: Any = {name: _read(path) for name, path in files.items()}
        texts = texts or read_object(folder / CONFIG).get("chat_template")
        if isinstance(texts, list):
            texts = {entry.get("name"): entry.get("template") for entry in texts if isinstance(entry, dict)}
        if not texts:
            return None
        if not all(isinstance(text, str) for text in (texts.values() if isinstance(texts, dict) else [texts])):
            raise UserError(f"the chat_template in {folder / CONFIG} is not text")
        return cls(texts, special_names_in(folder), str(named or folder))

    def render(
        self, messages: Sequence[Message], inputs: TemplateInputs | None = None, *, to_be_answered: bool = True
    ) -> str:
        """The conversation as text; if it is `to_be_answered`, it ends with the generation prompt.

        Raises:
          UserError: the template refuses it, say because roles do not alternate.
        """
        return self.render_tracked(messages, inputs, to_be_answered=to_be_answered).text

    def render_tracked(
        self, messages: Sequence[Message], inputs: TemplateInputs | None = None, *, to_be_answered: bool = True
    ) -> Rendered:
        """The same, with the characters inside `{% generation %}` blocks.

        Raises:
          UserError: the template refuses it.
        """
        inputs = inputs or TemplateInputs()
        values = {
            "messages": [_message(message) for message in messages],
            "tools": inputs.tools,
            "documents": inputs.documents,
            "add_generation_prompt": to_be_answered,
        }
        template = self._chosen(inputs).template
        try:
            with self._environment.tracking() as tracking:
                for block in template.generate(**{**self._names, **inputs.variables, **values}):
                    tracking.blocks.append(block)
        except Exception as e:  # a template is a program, and can fail in any way
            raise UserError(f"the chat_template of {self._source} refuses this conversation: {first_line(e)}") from e
        text = "".join(tracking.blocks)
        if lone_surrogate(text):
            raise UserError(
                "the conversation has half of a surrogate pair in it, which is no character: write it in UTF-8"
            )
        return Rendered(text, tracking.spans, tracking.wrote_date)

    def has_generation(self, inputs: TemplateInputs) -> bool:
        """Whether the template marks what is to be trained on, by `{% generation %}` blocks."""
        return self._chosen(inputs).has_generation

    def reads_key(self, key: str) -> bool:
        """Whether some template mentions a key of messages."""
        return any(key in template.keys for template in self._templates.values())

    def check(self, inputs: TemplateInputs) -> None:
        """Checks that the template reads what it is given.

        Raises:
          UserError: it doesn't, so that tools, documents or a variable would be ignored.
        """
        variables = self._chosen(inputs).variables
        given = {"tools": inputs.tools, "documents": inputs.documents}
        for name in (*(name for name, value in given.items() if value), *inputs.variables):
            if name not in variables and name not in self._names:
                known = "" if name in given else nearest(name, variables)
                raise UserError(f"the chat_template of {self._source} reads no {name}{known}: leave it out")

    def _chosen(self, inputs: TemplateInputs) -> "_Compiled":
        name = TOOL_USE if inputs.tools is not None and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            has = ", ".join(sorted(self._templates))
            raise UserError(f"{self._source} has no chat template called {DEFAULT}, only {has}")
        return self._templates[name]

    def _compile(self, text: str) -> "_Compiled":
        jinja, nodes = self._environment.jinja, require("jinja2.nodes", "chat")
        try:
            parsed = jinja.parse(text)
            variables = {node.name for node in parsed.find_all(nodes.Name) if node.ctx == "load"}
            keys = {node.attr for node in parsed.find_all(nodes.Getattr)}
            keys |= {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
            has_generation = GENERATION.search(text) is not None
            return _Compiled(jinja.from_string(text), frozenset(variables), frozenset(keys), has_generation)
        except require("jinja2", "chat").TemplateError as e:
            raise UserError(f"the chat_template of {self._source} can't be read: {first_line(e)}") from e


@dataclass(frozen=True)
class _Compiled:
    """A template, the variables and the keys that it names, and whether it has `{% generation %}` blocks."""

    template: Any
    variables: frozenset[str]
    keys: frozenset[str]
    has_generation: bool


def _message(message: Message) -> dict[str, Any]:
    """A message as transformers hands it to templates: without nulls, its reasoning under the names in use."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _objects(name: str, value: Any) -> list[dict[str, Any]] | None:
    """A list of objects, or the JSON text of one, as data sets with different schemas in each row have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise UserError(f"{name} is {shortened(value)}, and must be a list of objects") from e
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise UserError(f"{name} is {shortened(value)}, and must be a list of objects")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"the chat template {path} can't be read: {first_line(e)}") from e
