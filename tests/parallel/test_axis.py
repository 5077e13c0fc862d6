"""What ranks exchange, against the same rows in one process."""

import os
import signal
from datetime import timedelta

import pytest
import torch

from longstrand.errors import RunFailed, UserError
from longstrand.parallel import all_ranks, make_mesh, processes, run_ranks, together


def _exchanges():
    axis = make_mesh(data=1, context=3, expert=1).context
    mine = torch.arange(4.0).reshape(2, 2) + 10 * axis.rank
    gathered = axis.gather(mine, "rows")
    summed = axis.scatter_sum(torch.arange(6.0) * (axis.rank + 1), "sums")
    sent = torch.full((1 + 2 + 3, 1), float(axis.rank))
    came = axis.exchange(sent, [1, 2, 3], [axis.rank + 1] * 3, "rows")
    return gathered, summed, came, axis.total(axis.rank + 0.5), axis.largest(axis.rank), dict(axis.received)


def test_every_rank_gets_the_rows_that_it_should():
    for rank, (gathered, summed, came, total, largest, received) in enumerate(
        run_ranks(3, _exchanges, start="fork", timeout=100)
    ):
        expected = torch.cat([torch.arange(4.0).reshape(2, 2) + 10 * other for other in range(3)])
        torch.testing.assert_close(gathered, expected, rtol=0, atol=0)
        torch.testing.assert_close(summed, 6 * torch.arange(6.0)[2 * rank : 2 * rank + 2], rtol=0, atol=0)
        assert came.flatten().tolist() == [float(other) for other in range(3) for _ in range(rank + 1)]
        assert (total, largest) == (4.5, 2)
        assert received["rows"] == 2 * 16 + 2 * (rank + 1) * 4  # bytes of the two others


def _fails(rank_that_fails, how):
    mesh = make_mesh(data=2, context=1, expert=1)
    if mesh.world.rank == rank_that_fails:
        if how == "raise":
            raise UserError("this rank's own words")
        if how == "bug":
            raise ValueError("a fault of ours")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    mesh.world.total(1.0)  # waits for the one that is gone


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raise", UserError, "this rank's own words"),
        ("bug", RunFailed, r"rank 1 of 2 failed:\n(?s:.*)\nValueError: a fault of ours"),
        ("kill", RunFailed, "rank 1 of 2 was killed by SIGKILL"),
        ("exit", RunFailed, "rank 1 of 2 ended with code 7"),
    ],
)
def test_one_rank_that_fails_ends_all(how, error, words):
    with pytest.raises(error, match=words):
        run_ranks(2, _fails, 1, how, start="fork", timeout=100)


def _refuses_together():
    with together(all_ranks()):
        if all_ranks().rank == 0:
            raise UserError("all refuse")


def test_whoever_waits_for_the_ranks_says_their_error(monkeypatch):
    plain = torch.save

    def save(failure, path):  # the one for which another speaks is the first to write it down
        (moment, *rest) = failure
        plain((moment - 100 * path.endswith("writing_1"), *rest), path)

    monkeypatch.setattr(processes.torch, "save", save)
    with pytest.raises(UserError, match="all refuse") as refused:
        run_ranks(2, _refuses_together, start="fork", timeout=100)
    assert not refused.value.said_by_another


def test_axes_that_do_not_fit_the_processes_are_refused():
    with pytest.raises(UserError, match=r"parallel.data x parallel.context = 2 x 3: must be the number"):
        make_mesh(data=2, context=3, expert=1)


def _patience():
    mesh = make_mesh(data=2, context=2, expert=2)
    axes = [mesh.world, mesh.data, mesh.context, mesh.expert, mesh.expert_replicas]
    groups = [axis.group for axis in axes] + [mesh.view("expert", "cpu").get_group("expert")]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_every_exchange_waits_as_long_as_the_documents_say():
    assert run_ranks(4, _patience, start="fork", timeout=100) == [{timedelta(hours=1)}] * 4
