"""Variables that set flags: their names and forms, and those that only look so."""

import pytest

from proa.environment import read_switch, split, value_of, variable_of, warnings

KNOWN = {"PROA_PORT", "PROA_MAX_MODEL_LEN", "PROA_ENGINE_SERVICE", "PROA_HEALTH_PORT", "PROA_ENGINE"}

# Of Services named proa, proa-health and proa-engine, beside a pod without `enableServiceLinks: false`.
OF_SERVICES = {
    "PROA_SERVICE_HOST": "10.0.0.1",
    "PROA_SERVICE_PORT": "80",
    "PROA_SERVICE_PORT_HTTP": "80",
    "PROA_PORT_80_TCP": "tcp://10.0.0.1:80",
    "PROA_PORT_80_TCP_PROTO": "tcp",
    "PROA_PORT_80_TCP_PORT": "80",
    "PROA_PORT_80_TCP_ADDR": "10.0.0.1",
    "PROA_ENGINE_SERVICE_HOST": "10.0.0.1",
    "PROA_ENGINE_SERVICE_PORT": "80",
    "PROA_ENGINE_PORT": "tcp://10.0.0.1:80",
    "PROA_HEALTH_PORT_80_TCP": "tcp://[fd00::1]:80",
}


def test_a_flag_has_a_variable() -> None:
    assert variable_of("--max-model-len") == "PROA_MAX_MODEL_LEN"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a", ["a"]),
        ("a=/a, b=/b,", ["a=/a", "b=/b"]),
        ('["a,b", {"name": "c"}]', ["a,b", '{"name": "c"}']),
        ('{"name": "c", "path": "/c"}', ['{"name": "c", "path": "/c"}']),
    ],
)
def test_values_have_commas_between_them_or_are_json(text: str, values: list[str]) -> None:
    assert split(text) == values


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("0", False), ("false", False)])
def test_switches(text: str, value: bool) -> None:
    assert read_switch(text) is value


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:80", "udp://[fd00::1]:80"])
def test_the_address_of_a_service_is_no_port(text: str) -> None:
    assert value_of("PROA_PORT", {"PROA_PORT": text}) is None
    lines = warnings(KNOWN, {"PROA_PORT": text})
    assert lines["PROA_PORT"] == f"PROA_PORT is ignored: {text} is the address of a Kubernetes Service"


def test_variables_of_services_are_no_misspelled_flags() -> None:
    assert warnings(KNOWN, OF_SERVICES) == {}


def test_a_misspelled_variable_gets_a_suggestion() -> None:
    environment = {"PROA_MAX_MODEL_LENGTH": "4", "PROA_E2E_POWER": "x", "MAX_MODEL_LENGTH": "4", "PROA_PORT": "8001"}
    assert warnings(KNOWN, environment) == {
        "PROA_MAX_MODEL_LENGTH": (
            "PROA_MAX_MODEL_LENGTH is ignored: no flag has this variable; did you mean PROA_MAX_MODEL_LEN?"
        )
    }
