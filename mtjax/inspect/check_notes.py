"""What the check says of collectives: where they come from, and which are uncertain."""

from collections.abc import Iterable

from mtjax.inspect.collectives import KINDS, Collective


def origin_text(collective: Collective) -> str:
    """Returns the op_name of a collective, or of its nearest neighbour, for messages."""
    if not collective.op_name:
        return f"{collective.name}, which has no op_name"
    return f"op_name {collective.op_name!r}" + ("" if collective.has_own_name else " (the nearest that has one)")


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
