"""Configurations do not show their secrets."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from proa.options import masked
from proa_engine.config import EngineConfig
from proa_gateway.admission.auth import ApiKey
from proa_gateway.batch.config import BatchConfig
from proa_gateway.config import GatewayConfig

CONFIGS = [GatewayConfig, BatchConfig, EngineConfig]
SECRETS = {"api_key", "operator_key"}
"""All fields with secrets. A new one must be here, and named so that it is masked."""


def text_fields(config: type) -> Iterator[str]:
    """The fields of a configuration, and of those in it, that have text."""
    for name, hint in get_type_hints(config).items():
        parts = {hint, *get_args(hint)}
        if str in parts:
            yield name
        for part in parts:
            if is_dataclass(part):
                yield from text_fields(part)  # type: ignore[arg-type]


def test_of_all_fields_with_text_secrets_alone_are_masked() -> None:
    names = {name for config in CONFIGS for name in text_fields(config)}
    assert len(names) > 15
    assert {name for name in names if masked("s", name=name) != "s"} == SECRETS


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_shows_no_secret_and_all_numbers(config: type) -> None:
    built: Any = object.__new__(config)
    for number, each in enumerate(fields(config)):
        object.__setattr__(built, each.name, f"sk-{each.name}" if each.name in SECRETS else number)
    for number, each in enumerate(fields(config)):
        if each.name in SECRETS:
            assert "sk-" not in repr(built) + repr(masked(built))
        else:
            assert f"{each.name}={number}" in repr(built)
            assert masked(built)[each.name] == number


def test_an_entry_of_the_key_file_does_not_show_its_key() -> None:
    assert "sk-1" not in repr(ApiKey(name="a", key="sk-1"))
