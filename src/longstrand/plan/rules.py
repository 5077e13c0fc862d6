"""What a model and its ranks allow, in one place for what plans a run and what trains it.

Each rule takes plain values and names the setting that breaks it, with a remedy; `require_possible` asks all of a job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from longstrand.architecture import DSA, Architecture
from longstrand.config import flaw_of_kept_graphs
from longstrand.errors import UserError
from longstrand.plan.job import Job
from longstrand.plan.parameters import GROUPS
from longstrand.plan.streams import first_trained_layer, streams_at_once


def require_possible(job: Job) -> None:
    """Refuses a job that training would refuse for its model, ranks or levers.

    Raises:
        UserError: as training says it.
    """
    mesh, memory, shape = job.parallel, job.memory, job.shape
    require_divisor_of_ranks(mesh.expert, mesh.world)
    if mesh.expert > 1 and "sparse" in shape.mlp_layer_types:
        require_divisor_of_experts(mesh.expert, shape.n_routed_experts)
        require_a_row_of_each(mesh.receive_rows(memory.tile), mesh.expert)
    require_effect(job.balance, job.indexer, job.length, shape)
    require_a_pass_before_gradients(memory.recompute, job.balance, job.indexer)
    present = {weight.group for weight in job.weights() if not weight.is_buffer}
    groups_that_learn(job.trainable, job.indexer, [group for group in GROUPS if group in present])
    for setting, value in (("offload", memory.offload), ("optimizer", memory.optimizer)):
        if value == "host" and job.kind == "cpu":
            refuse_the_same_memory(setting)
    require_fewer_streams(memory.keep_every, shape.num_hidden_layers, first_trained_layer(job))


def require_divisor_of_ranks(expert: int, world: int) -> None:
    """Experts are shared among groups of ranks of one size."""
    if world % expert:
        raise UserError(
            f"parallel.expert = {expert}: must divide the number of processes, {world}; choose a divisor"
        )


def require_divisor_of_experts(expert: int, num_experts: int) -> None:
    """Each rank of the expert axis has as many experts."""
    if num_experts % expert:
        raise UserError(
            f"parallel.expert = {expert}: must divide the model's {num_experts} routed experts; choose a divisor"
        )


def require_a_row_of_each(receive: int, expert: int) -> None:
    """In a round of an exchange each rank can send one row at least."""
    if receive < expert:
        raise UserError(
            f"parallel.receive = {receive}: must be at least parallel.expert = {expert}, "
            "a row from each rank; raise it"
        )


def require_effect(balance: str, indexer: str, length: int, shape: Architecture) -> None:
    """Refuses what this model has no part for: a setting without effect would be a silent one."""
    if balance != "none" and "sparse" not in shape.mlp_layer_types:
        raise UserError(f'train.balance = "{balance}": this model has no router to balance; set it to "none"')
    if indexer != "frozen" and DSA not in shape.layer_types:
        raise UserError(f'train.indexer = "{indexer}": this model has no indexer; set it to "frozen"')
    if indexer != "frozen" and length < shape.index_kpool:
        raise UserError(
            f"data.length = {length}: no sequence completes a pool of {shape.index_kpool} tokens, so "
            f'train.indexer = "{indexer}" learns nothing; raise the length, or set it to "frozen"'
        )


def require_a_pass_before_gradients(recompute: bool, balance: str, indexer: str) -> None:
    """As a recipe is asked; a job may come from elsewhere."""
    if flaw := flaw_of_kept_graphs(recompute, balance, indexer):
        raise UserError(flaw)


def groups_that_learn(trainable: Sequence[str], indexer: str, present: Collection[str]) -> list[str]:
    """The groups of a model whose parameters learn, in the order in which they are named.

    A frozen indexer is left out of "all", and in a warm-up of the indexer nothing else learns.

    Args:
        present: groups in which the model has parameters.

    Raises:
        UserError: a group that this model has not, or nothing is left to train.
    """
    chosen = list(present) if list(trainable) == ["all"] else list(trainable)
    if unknown := [group for group in chosen if group not in present]:
        raise UserError(
            f'train.trainable: this model has no parameters in group "{unknown[0]}"; its groups are '
            + ", ".join(present)
        )
    if indexer == "frozen":
        chosen = [group for group in chosen if group != "indexer"]
    elif indexer == "warmup":
        chosen = [group for group in ("indexer",) if group in present]
    if not chosen:
        raise UserError(
            f"train.trainable = {list(trainable)} with train.indexer = {indexer!r}: nothing "
            "is left to train in this model; name another group"
        )
    return chosen


def refuse_the_same_memory(setting: str) -> None:
    """Refuses a lever that moves things to the host where they already are, on a CPU.

    Raises:
        UserError: naming the setting of `[memory]`.
    """
    remedies = {"offload": '"disk" or "none"', "optimizer": '"device"'}
    raise UserError(
        f'memory.{setting} = "host": the model is on the CPU, whose memory is the host\'s: nothing would leave '
        f"it; set {remedies[setting]}"
    )


def require_fewer_streams(keep_every: int, num_layers: int, first: int) -> None:
    """Recomputing layers must save something: going back, a group holds keep_every - 1 inputs of its own."""
    if keep_every == 1:
        return
    most = {k: streams_at_once(num_layers, first, k) for k in range(1, num_layers + 1)}
    if keep_every > num_layers:
        problem = f"this model has {num_layers} layers"
    elif most[keep_every] >= most[1]:
        problem = f"a pass then has {most[keep_every]} streams at once, and {most[1]} without it"
    else:
        return
    best = min(most, key=lambda k: most[k])
    remedy = f"set it to {best} ({most[best]} streams)" if best > 1 else "remove it"
    raise UserError(f"memory.keep_every = {keep_every}: {problem}; {remedy}")
