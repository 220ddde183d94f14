"""How long ranks wait for each other in an exchange: longer than any step takes, so that the watchdog decides."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from proa_engine.ranks.distributed import LOOPBACK, Rendezvous, join, leave, open_store
from proa_engine.ranks.stage_links import _group

CPU = torch.device("cpu")


def test_groups_of_all_ranks_and_of_a_stage_wait_longer_than_a_chunk_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # `join` sets what is not set
        monkeypatch.setenv(name, "lo")
    store = open_store(LOOPBACK, 1)
    join(Rendezvous(1, LOOPBACK, store.port, 0, 1), CPU, store)
    try:
        groups = [dist.group.WORLD, _group([0])]
        timeouts = [group._get_backend(CPU).options._timeout for group in groups if group is not None]
        assert len(timeouts) == 2
        assert min(timeouts) >= timedelta(hours=12)
    finally:
        leave()
