"""Defaults and checks of the dummy family."""

from mtjax.config import Model
from mtjax.config.families import Family
from mtjax.errors import UserError


def check(model: Model) -> None:
    if model.num_layers > 4:
        raise UserError("a dummy has at most 4 layers")


DUMMY = Family(
    kind="decoder",
    defaults={"norm": "rmsnorm"},
    choices={"position": ("learned",)},
    settings=frozenset({"rope_theta"}),
    check=check,
)
