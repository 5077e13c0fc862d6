"""Ranks that are only pretended: how a model is cut for many processes can be seen in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def pretended_ranks(num_ranks: int, rank: int) -> Iterator[None]:
    """Inside, torch.distributed knows so many processes, this one being `rank`; what they exchange is nothing.

    For shapes alone: a gathered tensor has its size and no values.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "real processes are joined already"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
