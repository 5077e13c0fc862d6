"""Published anchors: each is met by the planner, and a planner that is wrong in a known way misses one."""

from dataclasses import replace

import pytest

from longstrand.bench import anchors
from longstrand.plan.published import TensorLayout, own_values
from longstrand.plan.shapes import find_shape


def missed() -> set[str]:
    found = [*anchors.covered(), *anchors._dense(), *anchors._their_layout()]
    return {anchor.name for anchor in found if not anchor.passes}


def test_every_anchor_that_is_ours_is_met():
    assert missed() == set()
    assert len(list(anchors.covered())) == 6


@pytest.mark.parametrize(
    ("change", "misses"),
    [
        ({"index_kpool": 16}, "full index scores, 1,048,576 tokens"),
        ({"index_topk": 4096}, "choices per token"),
        ({"linear_head_dim": 64}, "carries per tile border"),
        ({"hc_mult": 1}, "layer inputs, 1,048,576 tokens over 8 ranks"),
    ],
)
def test_another_model_misses_its_anchor(change, misses, monkeypatch):
    found = find_shape("glm-5.3-flash")
    changed = replace(found, shape=replace(found.shape, **change))
    monkeypatch.setattr(anchors, "find_shape", lambda _: changed)
    assert misses in missed()


def test_the_published_layout_has_64_ranks_and_holds_every_parameter():
    layout, job = TensorLayout(), anchors._job(1024)
    assert layout.world == 64
    experts = sum(w.num_values for w in job.weights() if w.is_expert)
    rest = sum(w.num_values for w in job.weights() if not w.is_expert and not w.is_buffer)
    assert own_values(job, layout) == experts // 64 + rest // 8
    assert round((experts + rest) / 1e9, 1) == 313.3
