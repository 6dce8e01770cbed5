"""Checks a folder of weights for missing, unexpected and misshapen tensors, and lists them in one message."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from mtjax.convert.table import Selection, name_of
from mtjax.errors import UserError

Shape = tuple[int, ...]


def check_complete(
    selection: Selection, expected: Mapping[str, Shape], found: Mapping[str, Shape], source: str
) -> frozenset[str]:
    """Checks that the tensors of a source are exactly those of the model.

    Args:
      selection: the model's rows of the table.
      expected: name -> shape of every tensor of the model.
      found: name -> shape of every tensor of the source.
      source: name of the source, for messages.

    Returns:
      Names of mtjax's parameters that are missing and optional; they are initialized randomly.

    Raises:
      UserError: lists every missing, unexpected and misshapen tensor.
    """
    table = selection.table
    # Otherwise the message about a folder of another architecture would list every tensor of both models.
    if not any(name in expected for name in found):
        example = f"but {len(found)} others, such as {next(iter(found))}" if found else "and no other"
        raise UserError(f"{source} contains no tensor of {table.format}, {example}: is it a model of another family?")
    fresh = fresh_parameters(selection, found)
    # Optional modules are fresh only as a whole: a pooler whose bias alone is missing is a damaged file.
    may_be_missing = {name_of(t, layer) for parameter, layer, t in selection.tensors() if parameter.name in fresh}
    missing = [name for name in expected if name not in found and name not in may_be_missing]
    # Tensors that may be present although the model does not need them.
    known = (*table.ignored, *(re.escape(name) for name in table.copies))
    extra = [n for n in found if n not in expected and not any(re.fullmatch(pattern, n) for pattern in known)]
    misshapen = [
        f"{name} is {_text(found[name])}, but should be {_text(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems = [
        *_listed("missing", missing),
        *_listed("not part of this model", extra),
        *_listed("of another shape", misshapen),
    ]
    if problems:
        raise UserError(f"{source} does not match {table.format} with these settings:" + "".join(problems))
    return frozenset(fresh)


def fresh_parameters(selection: Selection, found: Iterable[str]) -> set[str]:
    """Returns the parameters of optional modules of which the source has no tensor."""
    names, fresh = set(found), set()
    for module in selection.table.optional:
        inside = {p.name for p, _ in selection.rows if p.name == module or p.name.startswith(f"{module}.")}
        tensors = {name_of(t, layer) for p, layer, t in selection.tensors() if p.name in inside}
        if not tensors & names:
            fresh |= inside
    return fresh


def _listed(what: str, items: list[str]) -> list[str]:
    """Formats a heading and items; items that differ only in the layer number share a line."""
    layers: dict[str, list[int]] = defaultdict(list)
    for item in items:
        # Only the first number, which is the layer's: each expert keeps a line of its own.
        number = re.search(r"\.(\d+)\.", item)
        layers[re.sub(r"\.\d+\.", ".*.", item, count=1)].append(int(number[1]) if number else -1)
    lines = [
        f"\n    {pattern}" if numbers[0] < 0 else f"\n    {pattern.replace('.*.', f'.{ranges(numbers)}.', 1)}"
        for pattern, numbers in layers.items()
    ]
    return [f"\n  {what}:", *lines] if lines else []


def ranges(numbers: Iterable[int]) -> str:
    """Formats numbers: [0, 1, 2, 5] -> "{0-2,5}"; [3] -> "3"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return texts[0] if len(texts) == 1 and "-" not in texts[0] else "{" + ",".join(texts) + "}"


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a single number"
