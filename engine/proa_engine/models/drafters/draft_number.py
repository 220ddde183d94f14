"""The number of draft tokens that follows from a drafter's config.json: the one that it names, or as many as a block
has room for. Imports no torch."""

import reprlib
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
    """`config` with the number of draft tokens that follows from the drafter's config.json, at most
    `MAX_SPECULATIVE_TOKENS`, if the user gives none. A checkpoint that neither names one nor proposes blocks leaves
    `config` as it is.

    Downloads the drafter if it is on the hub or in an object store. Raises `ValueError`.
    """
    drafter = config.drafter
    if not drafter or drafter.num_speculative_tokens or not drafter.model:
        return config
    try:
        numbers = _numbers(read_config(resolve_drafter(drafter, config)), drafter.method)
    except KeyError as error:
        raise ValueError(f"speculative_config model {drafter.model}: {missing_field(str(error.args[0]))}") from error
    except ValueError as error:
        raise ValueError(f"speculative_config model {drafter.model}: {error}") from error
    if not numbers:
        return config
    number = min(*numbers, MAX_SPECULATIVE_TOKENS)
    return replace(config, speculative_config=replace(drafter, num_speculative_tokens=number))


def _numbers(config: Mapping[str, Any], method: str) -> list[int]:
    """The number of draft tokens that a checkpoint of the library `speculators` names for its first way to propose, and
    the room of a block; without those that there are not."""
    numbers = []
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    if not (isinstance(methods, list) and all(isinstance(each, dict) for each in methods)):
        raise ValueError(f"proposal_methods must be a list of objects, got {reprlib.repr(methods)}")
    for first in methods[:1]:
        number = first.get("speculative_tokens")
        if type(number) is not int or number < 1:
            raise ValueError(f"speculative_tokens must be an integer above 0, got {number!r}")
        numbers.append(number)
    if method in BLOCK_METHODS:
        numbers.append(most_drafts(block_fields(config), method))
    return numbers
