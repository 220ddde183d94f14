"""The engine's ModelInfo."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from proa.contract import CheckpointRule, Role
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.engine_parts import assemble_engine
from proa_engine.option_groups import KvTiers
from proa_engine.server.loaded_engine import make_model_info
from support.engine_server import LoadedFakeExecutor


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        (CacheGroups(num_blocks=8, block_size=4), None),
        (
            CacheGroups(
                num_blocks=8,
                block_size=4,
                windows=(6, 6),
                checkpoint_interval=512,
                min_junction=256,
                max_step_tokens=64,
            ),
            CheckpointRule(interval=512, min_junction=256),
        ),
        (
            CacheGroups(num_blocks=8, block_size=4, num_state_slots=3, checkpoint_interval=1024, min_junction=64),
            CheckpointRule(interval=1024, min_junction=64),
        ),
    ],
    ids=["full", "windows", "states"],
)
def test_engines_with_windows_or_states_have_a_checkpoint_rule(
    groups: CacheGroups, rule: CheckpointRule | None
) -> None:
    parts = assemble_engine(EngineConfig(model="fake", block_size=4), LoadedFakeExecutor(), None)
    started = replace(parts.executor.started, cache_groups=groups, max_num_seqs=8)
    executor: Any = SimpleNamespace(started=started)
    info = make_model_info(replace(parts, executor=executor), tokenizer_digest="")
    assert info.checkpoint_rule == rule


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_the_role_is_that_of_the_configuration(role: Any) -> None:
    config = EngineConfig(
        model="fake",
        block_size=4,
        kv_tiers=KvTiers(role=role, kv_offloading_size=1.0, kv_transfer_address="127.0.0.1:0"),
    )
    info = make_model_info(assemble_engine(config, LoadedFakeExecutor(), None), tokenizer_digest="")
    assert info.role is Role[role.upper()]
