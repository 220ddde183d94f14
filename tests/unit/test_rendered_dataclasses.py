"""Dataclasses that are shown as JSON, with every optional part."""

import json
from typing import Any

import msgspec
import pytest

from proa.contract import ModelInfo
from proa_engine.config import EngineConfig
from proa_engine.server.convert import server_info_to_pb
from proa_engine.worker import known_kernels
from proa_gateway.config import GatewayConfig
from proa_gateway.operators.dev import info_json
from support.full_values import full


def parsed(text: str | bytes) -> Any:
    """Parse JSON; infinity and NaN, which `json` accepts, are errors."""
    return json.loads(text, parse_constant=pytest.fail)


def test_the_options_of_an_engine_are_json() -> None:
    options = parsed(server_info_to_pb(full(EngineConfig)).config)
    assert options["peer_tls"]["authority_file"] == "é\x00"
    assert options["hf_overrides"] == {"é\x00": {"nan": None}}


def test_the_options_of_a_gateway_and_the_models_of_its_engines_are_json() -> None:
    info = parsed(info_json(full(GatewayConfig), {"a:1": {"model_info": full(ModelInfo), "config": {"f": 1e999}}}))
    assert info["config"]["tls"]["authority"] == "/folder"
    assert info["config"]["deadlines"]["queue"] == "Infinity"
    assert info["engines"]["a:1"]["model_info"]["kv_transfer"]["fingerprint"] == "80ff"


def test_what_decides_the_kernels_is_json() -> None:
    fields = parsed(msgspec.json.encode(known_kernels._fields(full(EngineConfig)), order="sorted"))
    assert fields["pooler_config"]["max_embed_len"] == 7
