"""The figure of the wide model in bfloat16: how much of the machine's matmul rate a training step of it reaches.

longstrand bench step 16384 --ours --config wide --dtype bfloat16 --terms    shows every term that is counted
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longstrand.bench._steps import architecture
from longstrand.bench._trial import Trial, run_apart
from longstrand.bench.step import median
from longstrand.plan.products import terms

TOKENS = 16_384
ASKED, AIMED = 0.25, 0.35
ROUNDS = 3


def measure() -> dict[str, Any]:
    """Model FLOP/s (no recompute) over those of a 1,024^3 product in bfloat16, in the same process, two threads."""
    trial = Trial(TOKENS, config="wide", dtype="bfloat16", steps=1)
    return judge([run_apart(trial) for _ in range(ROUNDS)], trial)


def judge(runs: list[dict[str, Any]], trial: Trial) -> dict[str, Any]:
    """The median of the runs' shares; beside it the share with attention counted in the width of its heads.

    Attention to selected tokens is counted in latent space (H x L), as every sparse implementation computes it;
    with keys and values formed first it would take H x (qk + v) / 2.
    """
    shape = architecture(trial.config)
    latent = replace(shape, kv_lora_rank=(shape.qk_nope_head_dim + shape.v_head_dim) // 2)
    attention, narrow = (
        sum(term.step for term in terms(one, trial.tokens) if "DSA attention" in term.name)
        for one in (shape, latent)
    )
    share = median(runs, "share_of_matmul")
    counted = [
        [term.name, f"{term.step / 1e6:.2f}", "3" if term.learns else "1"]
        for term in terms(shape, trial.tokens)
    ]
    return {
        "name": f"wide model, bfloat16, {trial.tokens:,} tokens: model FLOP/s over the matmul rate",
        "asked": f">= {ASKED:.0%}, aim {AIMED:.0%}",
        "measured": f"{share:.1%}",
        "pass": share >= ASKED,
        "detail": {
            "share": share,
            "with attention counted in the width of its heads": share
            * (1 - (attention - narrow) / runs[0]["flops_per_token"]),
            "settings": trial.settings(),
            "runs": runs,
            "table": {"columns": ["term", "MFLOP per token, all passes", "passes"], "rows": counted},
        },
    }
