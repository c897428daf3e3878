"""Stages of training: a function of the step, applied to the layer, the same after a round trip."""

from __future__ import annotations

import json

import pytest

from deqseq import FixedIterations, ImplicitSequenceLayer, Phantom, Residual, Unrolled
from deqseq.backbones import ModuleBackbone
from deqseq.curriculum import Curriculum, Stage

BOUNDED = Stage(0.8, {"name": "phantom", "steps": 1}, {"name": "fixed", "iterations": 4})
FREE = Stage(1.0, {"name": "phantom", "steps": 4}, {"name": "residual", "rtol": 0.05}, window=8)


def test_every_step_has_its_stage() -> None:
    curriculum = Curriculum([BOUNDED, FREE])
    assert [curriculum.at(step, 10) is BOUNDED for step in range(11)] == [True] * 8 + [False] * 3


def test_apply_sets_training_and_leaves_evaluation() -> None:
    from torch import nn

    layer = ImplicitSequenceLayer(
        ModuleBackbone(nn.Identity()), gradient=Unrolled(2), convergence=Residual(rtol=1e-3)
    )
    Curriculum.apply(BOUNDED, layer)
    assert layer.gradient == Phantom(steps=1) and layer.train_convergence == FixedIterations(4)
    assert layer.eval_convergence == Residual(rtol=1e-3)
    Curriculum.apply(FREE, layer)
    assert layer.window == 8 and layer.train_convergence == Residual(rtol=0.05)


def test_survives_json() -> None:
    curriculum = Curriculum([BOUNDED, FREE])
    again = Curriculum.from_list(json.loads(json.dumps(curriculum.to_list())))
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
    with pytest.raises(ValueError, match=r"stages|phantoms|tolerance"):
        Curriculum(stages)
