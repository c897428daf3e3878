"""Training stages: which stage a step belongs to, what a stage changes in the layer, storage as JSON."""

import json

import pytest

from deqseq import FixedIterations, ImplicitSequenceLayer, Phantom, Residual, SolveOptions, Unrolled
from deqseq.backbones import ModuleBackbone
from deqseq.curriculum import Curriculum, Stage

BOUNDED = Stage(0.8, {"name": "phantom", "steps": 1}, {"name": "fixed", "iterations": 4})
FREE = Stage(1.0, {"name": "phantom", "steps": 4}, {"name": "residual", "rtol": 0.05}, window=8)


def test_every_step_has_its_stage() -> None:
    curriculum = Curriculum([BOUNDED, FREE])
    assert [curriculum.at(step, 10) is curriculum.stages[0] for step in range(11)] == [True] * 8 + [False] * 3


def test_apply_sets_training_and_leaves_evaluation() -> None:
    from torch import nn

    layer = ImplicitSequenceLayer(
        ModuleBackbone(nn.Identity()), gradient=Unrolled(2), convergence=Residual(rtol=1e-3)
    )
    Curriculum.apply(BOUNDED, layer)
    assert layer.gradient == Phantom(steps=1) and layer.train_solve.convergence == FixedIterations(4)
    assert layer.eval_solve.convergence == Residual(rtol=1e-3)
    Curriculum.apply(FREE, layer)
    assert layer.train_solve == SolveOptions(convergence=Residual(rtol=0.05), window=8)


def test_a_policy_holds_until_another_is_named() -> None:
    """A stage that names no policy takes the policy of the stage before it."""
    named = Stage(0.2, "phantom", {"name": "fixed", "iterations": 4}, eval_convergence="fixed:7")
    own, held = Stage(0.5, "phantom", "fixed:5"), Stage(1.0, "phantom")
    last = Curriculum([named, own, held]).stages[-1]
    assert (last.convergence, last.eval_convergence) == ("fixed:5", "fixed:7")
    assert Curriculum([held]).stages == [held]


def test_survives_json() -> None:
    curriculum = Curriculum([BOUNDED, FREE])
    again = Curriculum([Stage(**stage) for stage in json.loads(json.dumps(curriculum.to_list()))])
    assert again.stages == curriculum.stages


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [BOUNDED],
        [FREE, BOUNDED],
        [Stage(0.0, "phantom"), FREE],
        [Stage(1.0, "phantoms")],
        [Stage(1.0, "phantom", {"name": "residual", "rtol": 0.0})],
    ],
)
def test_wrong_stages_raise(stages: list[Stage]) -> None:
    with pytest.raises(ValueError, match=r"until must increase|phantoms|tolerance"):
        Curriculum(stages)
