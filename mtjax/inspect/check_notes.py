"""What the check says of collectives: which are missing or too many, where they come from, and which are uncertain."""

from collections.abc import Iterable

from mtjax.analysis.contract import Requirement
from mtjax.inspect.collectives import ALL_GATHER, KINDS, Collective


def origin_text(collective: Collective) -> str:
    """Returns the op_name of a collective, or of its nearest neighbour, for messages."""
    if not collective.op_name:
        return f"{collective.name}, which has no op_name"
    return f"op_name {collective.op_name!r}" + ("" if collective.has_own_name else " (the nearest that has one)")


def subject(required: Requirement) -> str:
    """Returns the subject of a message about a line."""
    line = required.line
    return f"{line.kind} over {line.axis} in {line.phase}"


def missing_note(required: Requirement, found: int) -> str:
    """Returns the message about a line of which the program has too few arrays."""
    line, number = required.line, required.count - found
    return (
        f"{number} of {required.count} {line.kind} over {line.axis} missing in {line.phase}: "
        f"{required.elements:,} elements each ({line.elements})"
    )


def total_note(required: Requirement, elements: int, at_once: list[str]) -> str:
    """Returns the message about a pooled line with a wrong total."""
    total = f"{elements:,} elements per step instead of {required.total:,}"
    # XLA moved the gather out of the loop, which costs memory too.
    if at_once and required.line.kind == ALL_GATHER:
        return (
            f"{subject(required)} gathers all layers at once, outside the loop that should gather each layer when it "
            f"is used, of {' and '.join(at_once)}: {total} ({required.line.elements})"
        )
    difference = elements - required.total
    how = "many" if difference > 0 else "few"
    return f"{subject(required)} sends {total}: {abs(difference):,} too {how} ({required.line.elements})"


def uncertain_notes(collectives: Iterable[Collective]) -> list[str]:
    """Returns one sentence for each collective whose kind, axes or count is not certain."""
    notes = []
    for c in collectives:
        if c.is_known:
            continue
        if c.kind not in KINDS:
            why = "is of an unknown kind"
        elif c.axes is None:
            why = f"spans groups of {c.group_size} that match no set of mesh axes"
        else:
            why = f"runs in a loop of unknown length or a branch, counted {c.count} times"
        shapes = ", ".join(map(str, c.arrays))
        notes.append(f"{c.kind} {c.name} in {c.phase} {why}: {shapes}, from {origin_text(c)}")
    return notes
