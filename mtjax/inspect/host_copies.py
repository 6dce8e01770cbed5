"""Bytes that a compiled step copies between a GPU and its host's memory."""

import re
from collections.abc import Iterator

from mtjax.inspect.hlo import Module, parse_arrays, skip
from mtjax.inspect.hlo_walk import walk

ON_HOST = "S(5)"
"""XLA's mark in the layout of an array that is in the host's memory."""
_NAME = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_DONE = re.compile(r"-done\(%?([\w.\-]+)\)")
_ARRAY = re.compile(r"([a-z]\w*\[[\d,]*\])(\{[^}]*\})?")
"""An array of a result, and its layout."""


def host_copies(text: str, module: Module) -> tuple[int, int]:
    """Returns the bytes that a step reads from the host's memory, and those that it writes to it, on each device.

    Args:
      text: the program, whose layouts `module` does not keep.
      module: the same program.
    """
    if ON_HOST not in text:
        return 0, 0
    # From the text, because only its layouts say in which memory an array is.
    sizes = dict(_sizes(text))
    read = written = 0
    for site in walk(module):
        if size := sizes.get(site.instruction.name):
            read, written = read + site.count * size[0], written + site.count * size[1]
    return read, written


def exposed_bytes(text: str, module: Module) -> int:
    """Returns the bytes for which a step waits, if a link carries both directions at once, at equal rates, and nothing
    else takes time: a walk over the schedule, in which reads follow one another, and writes do.

    Arguments as of `host_copies`.
    """
    if ON_HOST not in text:
        return 0
    sizes, waited = dict(_sizes(text)), 0
    counts = {site.instruction.name: site.count for site in walk(module) if site.instruction.name in sizes}
    # Loops over layers have all of their copies in the body, so bodies are walked one by one, and each counts as often
    # as its copies do.
    for computation in text.split("\n}"):
        now, count, ends, free = 0, 0, dict[str, int](), [0, 0]
        for line in computation.splitlines():
            if (name := _NAME.match(line)) is None:
                continue
            if name[1] in counts:
                direction, size = (0, sizes[name[1]][0]) if sizes[name[1]][0] else (1, sizes[name[1]][1])
                # A link carries one copy at a time in each direction. Time is measured in bytes here.
                ends[name[1]] = free[direction] = max(now, free[direction]) + size
                count = counts[name[1]]
            elif (done := _DONE.search(line)) and done[1] in ends:
                now = max(now, ends[done[1]])
        # An iteration ends with its last copy, wherever that copy's end is scheduled.
        waited += count * max(now, *free)
    return waited


def hosted_arguments(text: str) -> set[str]:
    """Returns the names of a program's parameters that are in the host's memory."""
    found = (line.partition(" parameter(") for line in text.splitlines())
    names = (_NAME.match(result) for result, is_parameter, _ in found if is_parameter and ON_HOST in result)
    return {name[1] for name in names if name}


def _sizes(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the name of each copy and the bytes that it reads and writes each time."""
    for line in text.splitlines():
        name = _NAME.match(line)
        if name is None or ON_HOST not in line or "start" not in name[1]:
            continue
        result = line[name.end() : skip(line, name.end())]
        arrays = [(parse_arrays(array)[0].bytes, ON_HOST in layout) for array, layout in _ARRAY.findall(result)]
        # XLA prints the operands' arrays within the result's; the slice is the first that is on the device and no
        # index.
        if name[1].startswith("dynamic-slice-start"):  # (operands), result, token
            yield name[1], (next(size for size, hosted in arrays[1:] if size > _INDEX and not hosted), 0)
        elif name[1].startswith("dynamic-update-slice-start"):  # (stack, layer, indices), stack, token
            yield name[1], (0, arrays[1][0])
        elif name[1].startswith("copy-start"):  # destination, source, token
            (size, to_host), (_, from_host), *_ = arrays
            # Copies within one memory take no link.
            if to_host != from_host:
                yield name[1], (size * from_host, size * to_host)


_INDEX = 4
"""Bytes of an index."""
