"""A checkpoint that older code wrote is resumed by today's.

`old_checkpoint/3` was written at commit 040d7d1, before the config was a package: the third step of a GPT of
`tests.tiny` with the sizes below, on the mesh 1x2. Loss and gradient norm of its fourth step were printed then. Don't
write it anew when this test fails: what it holds is what users have.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from mtjax.config import replace
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.train.step import make_train_step
from tests.tiny import mesh_of, run_steps

FOLDER = Path(__file__).parent / "old_checkpoint"
FOURTH_STEP = {"loss": 3.4033713340759277, "grad_norm": 0.26637521386146545}


def test_it_resumes_on_another_mesh(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "checkpoints")
    saved = find_weights(folder)  # its page has the config as it was written then
    program = make_train_step(replace(saved.config, mesh="4x2", zero=3), mesh_of("4x2"))
    checkpoints = Checkpoints(folder, keep_last=1)
    restored = checkpoints.restore(program.abstract_state, program.config)
    checkpoints.close()

    assert restored is not None
    assert (restored.step, restored.consumed_samples, restored.skipped) == (3, 24, ())
    leaves = jax.tree_util.tree_leaves_with_path(restored.state.parameters)
    names = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert set(names) == set(saved.names)
    for name, leaf in names.items():
        np.testing.assert_array_equal(np.asarray(leaf), saved.open(name).read().result(), err_msg=name)

    _, (metrics,) = run_steps(program, 1, restored.state)
    for name, value in FOURTH_STEP.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5)
