"""How many tokens the block of a drafter has room for, and the number of draft tokens that follows from it. Imports no
torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proa_engine.config import EngineConfig
from proa_engine.json_configs import BLOCK_METHODS, MAX_SPECULATIVE_TOKENS
from proa_engine.sources.folders import missing_field, read_config
from proa_engine.sources.resolve import resolve_drafter


def block_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a drafter's config.json that describe its blocks, in whichever of the forms it is."""
    return {**config, **(config.get("dflash_config") or {}), **(config.get("dspark_config") or {})}


def samples_last(fields: Mapping[str, Any], method: str) -> bool:
    """Whether the first draft token is read off the request's last token, else off the first mask. `fields`: as
    `block_fields` returns them."""
    return bool(fields.get("sample_from_anchor", method == "dspark"))


def most_drafts(fields: Mapping[str, Any], method: str) -> int:
    """Return the room of a block for draft tokens. Raises `KeyError` and `ValueError`."""
    size = fields["block_size"]
    if type(size) is not int:
        raise ValueError(f"block_size must be an integer, got {size!r}")
    return size - (0 if samples_last(fields, method) else 1)


def with_draft_number(config: EngineConfig) -> EngineConfig:
    """`config` with as many draft tokens as the drafter's blocks have room for, at most `MAX_SPECULATIVE_TOKENS`, if it
    proposes blocks and the user gives no number.

    Downloads the drafter if it is on the hub or in an object store. Raises `ValueError`.
    """
    drafter = config.drafter
    if not drafter or drafter.num_speculative_tokens or drafter.method not in BLOCK_METHODS:
        return config
    try:
        most = most_drafts(block_fields(read_config(resolve_drafter(drafter, config))), drafter.method)
    except KeyError as error:
        raise ValueError(f"speculative_config model {drafter.model}: {missing_field(str(error.args[0]))}") from error
    number = min(most, MAX_SPECULATIVE_TOKENS)
    return replace(config, speculative_config=replace(drafter, num_speculative_tokens=number))
