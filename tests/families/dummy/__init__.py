"""A family of the tests' own: this folder, and a row in `mtjax.families.registry.FAMILIES`."""

from mtjax.families.registry import FamilyParts

ROW = FamilyParts(
    config="tests.families.dummy.config:DUMMY",
    model="tests.families.dummy.model:Dummy",
    costs="tests.families.dummy.costs:dummy",
    samples="tests.families.dummy.samples:SAMPLES",
)
