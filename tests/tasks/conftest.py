"""Tests of tasks draw figures quickly, unless they have the fixture ``rendered_figures``."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_figures(quick_figures: object) -> None:
    """Figures of training runs are drawn, but not rendered: see ``quick_figures``."""
