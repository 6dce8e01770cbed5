"""`plan` and `train` agree: what the planner proposes, the trainer takes."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax import cli, config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import SERVERS
from mtjax.analysis.memory import peak_stage_memory
from mtjax.analysis.timing import step_time
from mtjax.commands.train import Options as TrainOptions
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.plan.search import search
from mtjax.plan.search_report import train_command
from mtjax.train.step import make_train_step
from tests.tiny import mesh_of, tiny_config

FAMILIES = ("gpt", "llama", "bert", "t5")


def typed(command: str) -> Config:
    """The config that a printed command trains, checked as `train` checks it."""
    words = shlex.split(command)
    assert words[:2] == ["mtjax", "train"]
    run = cli.parse(words[2:], "mtjax train", "", TrainOptions).config
    mesh = parse_mesh(run.parallel.mesh)
    check_config(run, mesh)
    return run


@settings(max_examples=12)
@given(
    family=st.sampled_from(FAMILIES),
    layers=st.integers(1, 24),
    batch=st.integers(1, 48),
    gpus=st.sampled_from([1, 2, 4, 8, 16, 24]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    staged=st.booleans(),
)
def test_every_plan_that_the_search_finds_trains(tmp_path_factory, family, layers, batch, gpus, recompute, staged):
    """Whatever the config asks for besides: its own stages, chunks and shares of layers are replaced."""
    own = {"mesh": "1x2x1", "layers_per_stage": (1, 2), "microbatch_size": 1} if staged else {}
    run = tiny_config(family=family, num_layers=layers, global_batch_size=batch, recompute=recompute, **own)
    path = tmp_path_factory.mktemp("run") / "tiny.toml"
    config.save(run, path)
    anatomy = anatomy_of(run.model)
    base = Plan.of(run, MeshShape(), pipeline_schedule="1f1b", chunks=1, layers_per_stage=None)
    found = search(anatomy, base, gpus, SERVERS["h100"])
    several = {(c.plan.stages, c.plan.chunks): c.plan for c in reversed(found.fitting)}
    for plan in several.values():
        chosen = typed(train_command(plan, run, str(path)))
        assert Plan.of(chosen, plan.mesh) == plan


@settings(max_examples=60)
@given(
    family=st.sampled_from(FAMILIES),
    layers=st.integers(1, 12),
    stages=st.integers(1, 4),
    settings=st.fixed_dictionaries(
        {},
        optional={
            "pipeline_schedule": st.sampled_from(["1f1b", "interleaved", "gpipe"]),
            "chunks": st.integers(1, 3),
            "layers_per_stage": st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
            "microbatch_size": st.integers(1, 4),
            "recompute": st.sampled_from(["none", "full"]),
            "recompute_num_layers": st.integers(1, 2),
            "zero": st.integers(0, 3),
        },
    ),
)
def test_what_is_not_refused_has_a_cost(family, layers, stages, settings):
    """And what is refused is so in a sentence, never by an error in a formula."""
    run, mesh = tiny_config(family=family, num_layers=layers, **settings), MeshShape(data=2, stage=stages, model=2)
    try:
        check_config(run, mesh)
    except UserError as refused:
        assert "\n" not in str(refused)
        return
    anatomy, plan = anatomy_of(run.model), Plan.of(run, mesh)
    assert peak_stage_memory(anatomy, plan).total > 0
    assert step_time(anatomy, plan, SERVERS["h100"]).total > 0


PROGRAMS = [
    ("gpt", "2x2x2", {"pipeline_schedule": "interleaved", "chunks": 2, "microbatch_size": 1}),
    ("t5", "1x4x2", {"pipeline_schedule": "gpipe", "microbatch_size": 2}),
    ("llama", "1x2x2", {"layers_per_stage": (1, 3), "microbatch_size": 4, "zero": 1}),
]


@pytest.mark.parametrize(("family", "mesh", "fields"), PROGRAMS)
def test_what_check_config_takes_becomes_a_program(family, mesh, fields):
    run = tiny_config(family=family, num_layers=4, mesh=mesh, **fields)
    program = make_train_step(run, mesh_of(mesh))
    assert program.microbatch_schedule(2).training.chunks == run.parallel.chunks * len(program.sections)
