"""Parser of the HLO text of an optimized XLA program: computations, instructions, shapes and attributes.

The text is the only form that every backend and version of jax gives. Everything that depends on how XLA prints is in
this file and in `groups.py`; unknown operations are kept as they are, so that readers can list what they don't know.

Grammar: https://openxla.org/xla/hlo_to_json and `xla/hlo/parser` in the XLA sources.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mtjax.errors import UserError


@dataclass(frozen=True)
class Array:
    """An array's type: "bf16" and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes; 4-bit types are packed, tokens have 0."""
        return -(-self.elements * dtype_bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def dtype_bits(dtype: str) -> int:
    """Returns the bits of an element: the first number in the dtype's name (bf16, s32, f8e4m3fn, c64); 8 for pred."""
    # XLA stores a predicate in a byte, though its name has no number; tokens and opaque types have none either, and no
    # bytes.
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """Leaves of the result's shape, in order."""
    operands: tuple[str, ...]
    """Names of the operands; the text between the parentheses for parameters and constants."""
    attributes: str
    """Everything after the operands, as printed."""
    is_root: bool = False

    @cached_property
    def op_name(self) -> str:
        """The path of scopes in jax's metadata, or "" when XLA dropped it."""
        match = _OP_NAME.search(self.attributes)
        # XLA escapes quotes in metadata: state.parameters[\'stack\'] must become the name that jax gave.
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    @property
    def bytes(self) -> int:
        """Bytes of the result, all leaves together."""
        return sum(a.bytes for a in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of all computations it calls: fusions, loops, branches, async bodies, reducers."""
        # `calls` comes alone (fusions) or as a list (custom calls). Reducers (`to_apply`) are among what is found, but
        # they have neither matmuls nor collectives of their own.
        single = re.findall(
            r"(?:^|[\s,])(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)",
            self.attributes,
        )
        listed = re.findall(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}", self.attributes)
        return tuple(single + [n.strip().lstrip("%") for names in listed for n in names.split(",") if n.strip()])

    def attribute(self, name: str) -> str | None:
        """Returns the text of a simple attribute: a name, number, quoted string, or a list in braces without the
        braces."""
        match = re.search(rf"(?:^|[\s,]){name}=(?:\{{([^}}]*)\}}|\"([^\"]*)\"|([^\s,]+))", self.attributes)
        return next((g for g in match.groups() if g is not None), None) if match else None

    def dimensions(self, name: str) -> tuple[int, ...]:
        """Returns a list of dimensions, such as `lhs_contracting_dims`; empty when it is missing."""
        text = self.attribute(name)
        return tuple(int(d) for d in text.split(",")) if text else ()

    @cached_property
    def trip_count(self) -> int | None:
        """Iterations of a `while`, where XLA or `with_trip_counts` has set them."""
        match = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', self.attributes)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the order of the schedule when the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by name."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Name of an instruction -> instructions that read its result."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(using) for name, using in users.items()}

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @property
    def parameters(self) -> list[Instruction]:
        """Parameters in their order."""
        # A schedule may print them in any order.
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: int(i.operands[0]))

    def operand_arrays(self, instruction: Instruction) -> tuple[Array, ...]:
        """Returns the types of an instruction's operands, tuples flattened."""
        operands = (self.by_name[name].arrays for name in instruction.operands if name in self.by_name)
        return tuple(array for arrays in operands for array in arrays)


@dataclass(frozen=True)
class StageBranch:
    """When stages of a pipeline take the first of a conditional's two branches, `true_computation`."""

    by_tick: tuple[tuple[bool | None, ...], ...]
    """By tick of the loop around it, and by stage; None where a stage does not come to the conditional."""
    counted_stage: int = 0
    """The stage whose executions are counted."""

    def count(self, is_true: bool) -> int:
        """Returns in how many ticks the counted stage takes a branch."""
        return sum(stages[self.counted_stage] is is_true for stages in self.by_tick)


@dataclass(frozen=True)
class Module:
    """A compiled program for one of `num_partitions` devices."""

    name: str
    computations: Mapping[str, Computation]
    entry: Computation
    is_scheduled: bool
    num_partitions: int
    stage_branches: Mapping[str, StageBranch] = field(default_factory=dict)
    """By the conditional's name, where it is known (`mtjax.inspect.stage_branches`)."""

    def is_true_branch(self, instruction: Instruction, callee: Computation) -> bool:
        """Returns whether a conditional runs a computation if its condition holds: its `true_computation`, or the
        second of its `branch_computations`."""
        name = instruction.attribute("true_computation")
        return callee.name == (name.lstrip("%") if name else instruction.called[-1])

    def callees(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations that an instruction calls."""
        for name in instruction.called:
            if name in self.computations:
                yield self.computations[name]


def with_trip_counts(module: Module, count: int, scope: str) -> Module:
    """Returns the module with `count` as the trip count of loops of unknown length below a scope.

    Args:
      module: the program.
      count: of their executions, expected.
      scope: in their names.
    """

    def told(instruction: Instruction) -> Instruction:
        is_meant = instruction.opcode == "while" and instruction.trip_count is None
        if not is_meant or f"/{scope}/" not in instruction.op_name:
            return instruction
        # In XLA's own notation, so that `trip_count` reads a length that was told like one that XLA found.
        known = f'{instruction.attributes}, backend_config={{"known_trip_count":{{"n":"{count}"}}}}'
        return replace(instruction, attributes=known)

    computations = {
        name: replace(computation, instructions=tuple(map(told, computation.instructions)))
        for name, computation in module.computations.items()
    }
    return replace(module, computations=computations, entry=computations[module.entry.name])


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_NAME = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=\s]*)\]")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")


def parse(text: str) -> Module:
    """Parses the text of `jax.stages.Compiled.as_text()`.

    Raises:
      UserError: the text is not an HLO module, or a line of it can't be read; names the line.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise UserError("this is not HLO text: it does not start with HloModule")
    computations: dict[str, Computation] = {}
    entry = name = ""
    body: list[Instruction] | None = None
    for number, line in enumerate(lines[1:], 2):
        if body is None:
            # What else stands between computations (XLA prints tables of file names and stack frames there) is no
            # header.
            header = _HEADER.match(line)
            if header and "=" not in line.split("(")[0]:
                name, body = header[2], []
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name], body = Computation(name, _in_one_piece(body)), None
        elif line.strip():
            body.append(_instruction(line, number))
    # After all are parsed, as a fusion's body may be printed after the computation that calls it.
    computations = {name: _name_outputs(computation, computations) for name, computation in computations.items()}
    if entry not in computations:
        raise UserError("this HLO text has no ENTRY computation, or it is cut off")
    partitions = re.search(r"num_partitions=(\d+)", lines[0])
    return Module(
        name=lines[0].split()[1].rstrip(","),
        computations=computations,
        entry=computations[entry],
        is_scheduled="is_scheduled=true" in lines[0],
        num_partitions=int(partitions[1]) if partitions else 1,
    )


def _in_one_piece(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """Rewrites asynchronous fusions (start and done), which XLA of jax 0.12 uses for copies, as synchronous ones at
    their start."""
    results = {i.operands[0]: i.arrays for i in instructions if i.opcode == "fusion-done"}

    def whole(instruction: Instruction) -> Instruction:
        if instruction.opcode == "fusion-start":
            return replace(instruction, opcode="fusion", arrays=results.get(instruction.name, instruction.arrays))
        # A view costs nothing. What overlaps with the copy is thereby not counted as overlapped: times are too long,
        # never too short.
        return replace(instruction, opcode="bitcast") if instruction.opcode == "fusion-done" else instruction

    return tuple(map(whole, instructions))


def _name_outputs(computation: Computation, computations: Mapping[str, Computation]) -> Computation:
    """Gives every output of a fusion the op_name of the operation that computes it; XLA prints one for all."""

    def named(instruction: Instruction) -> Instruction:
        if instruction.opcode != "get-tuple-element":
            return instruction
        fusion = computation.by_name.get(instruction.operands[0])
        if fusion is None or fusion.opcode != "fusion" or not fusion.called or fusion.called[0] not in computations:
            return instruction
        body, index = computations[fusion.called[0]], instruction.attribute("index")
        # A collective that reads this output takes its phase from the output's name, and the name that XLA prints is
        # that of one of several operations, which may be in another phase.
        source = body.by_name.get(body.root.operands[int(index)]) if body.root.opcode == "tuple" and index else None
        name = _OP_NAME.search(source.attributes) if source else None
        return replace(instruction, attributes=f"index={index}, metadata={{{name[0]}}}") if name else instruction

    return replace(computation, instructions=tuple(map(named, computation.instructions)))


def _instruction(line: str, number: int) -> Instruction:
    start = _NAME.match(line)
    if not start:
        raise UserError(f"line {number} of the HLO text can't be read: {line.strip()[:80]!r}")
    shape_end = skip(line, start.end()) if line[start.end()] == "(" else line.index(" ", start.end())
    opcode = _OPCODE.match(line, shape_end)
    if not opcode:
        raise UserError(f"line {number} of the HLO text has no operation: {line.strip()[:80]!r}")
    end = skip(line, opcode.end() - 1)
    inside = line[opcode.end() : end - 1]
    # Between these parentheses are a number, or values with commas and braces, and no names.
    literal = opcode[1] in ("parameter", "constant")
    return Instruction(
        name=start[2],
        opcode=opcode[1],
        arrays=parse_arrays(line[start.end() : shape_end]),
        operands=(inside,) if literal else _operands(inside),
        attributes=line[end:].lstrip(", "),
        is_root=start[1] is not None,
    )


def parse_arrays(shape: str) -> tuple[Array, ...]:
    """Parses the leaves of a shape: "(f32[4,8]{1,0}, /*index=1*/bf16[])"; a bounded dimension counts as its bound."""
    return tuple(
        Array(dtype, tuple(int(d.strip().removeprefix("<=")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _ARRAY.findall(shape)
    )


def _operands(inside: str) -> tuple[str, ...]:
    """Parses operand names, with or without "%", and with or without the operand's shape before them."""
    # Whether XLA prints "%" and shapes depends on its version and on the print options of the backend.
    names = re.findall(r"%([\w.\-]+)", inside)
    if names or not inside.strip():
        return tuple(names)
    return tuple(part.split()[-1] for part in _split(re.sub(r"/\*.*?\*/", "", inside)) if part.strip())


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


_BRACKET = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')


def skip(line: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`, ignoring quoted text."""
    depth = 0
    for match in _BRACKET.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise UserError(f"a parenthesis is never closed in the HLO text: {line.strip()[:80]!r}")
