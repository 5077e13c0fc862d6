"""What the published 64-GPU run held, by its own layout: tensor, context, expert and data ranks, Adam on the host.

Ours has no tensor ranks and shards everything over all ranks; these few expressions are theirs, so that a plan can be
held against what they reported. `bench/anchors.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from longstrand.plan.job import Job

DENSE_PAIR_BYTES = {
    "probabilities, float32": 4,
    "probabilities as the product takes them": 2,
    "their gradient": 2,
    "that in float32": 4,
    "the scores' gradient, float32": 4,
}
"""Of one query, key and head of one layer on its way back, where softmax is taken in float32 and nothing is fused."""


@dataclass(frozen=True)
class TensorLayout:
    """Ranks of each axis; `expert` x `expert_tensor` ranks hold the experts once.

    Layer inputs are cut over tensor x context ranks (sequence parallel between products).
    """

    tensor: int = 8
    context: int = 2
    expert: int = 32
    expert_tensor: int = 2
    data: int = 4

    @property
    def world(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def token_ranks(self) -> int:
        """Ranks that share the tokens of a layer's input."""
        return self.tensor * self.context


def own_values(job: Job, layout: TensorLayout) -> int:
    """Parameters of one GPU: experts over their ranks, everything else over the tensor ranks."""
    weights = [weight for weight in job.weights() if not weight.is_buffer]
    experts = sum(weight.num_values for weight in weights if weight.is_expert)
    rest = sum(weight.num_values for weight in weights if not weight.is_expert)
    return experts // (layout.expert * layout.expert_tensor) + rest // layout.tensor


def stream_bytes(job: Job, ranks: int) -> int:
    """One layer's input on one of the ranks that share the tokens."""
    return job.length // ranks * job.shape.hc_mult * job.shape.hidden_size * job.itemsize


def layer_input_bytes(job: Job, ranks: int) -> int:
    """Inputs of all layers on one of the ranks that share the tokens; ours keeps all but the first."""
    return job.shape.num_hidden_layers * stream_bytes(job, ranks)


def index_score_bytes(job: Job) -> int:
    """Scores of every query against every pool of a sequence, float32; never formed here."""
    return job.length * (job.length // job.shape.index_kpool) * 4


def dense_attention_bytes(job: Job, layout: TensorLayout, keys: int | None = None) -> int:
    """Heads of one GPU x queries x keys of one layer on its way back, all pairs; `keys`: only so many per query."""
    heads = job.shape.num_attention_heads // layout.tensor
    return heads * job.length * (keys or job.length) * sum(DENSE_PAIR_BYTES.values())


def adam_bytes(job: Job, layout: TensorLayout) -> int:
    """Two moments and a master in float32 of all trained parameters, on the host, cut over all GPUs."""
    trained = sum(weight.num_values for weight in job.weights() if weight.trains)
    return 12 * trained // layout.world
