"""tests/support/minimal_bodies.py has a body for each route, with which tests of all routes begin."""

from proa_gateway.app import create_app
from proa_gateway.config import GatewayConfig
from support.minimal_bodies import ALIASES, MINIMAL


def test_every_route_that_takes_a_body_has_a_minimal_one() -> None:
    paths = create_app(GatewayConfig(engines=("engine:1",), enable_runtime_lora_updating=True)).openapi()["paths"]
    routes = {path for path, methods in paths.items() if "requestBody" in methods.get("post", ())}
    assert routes == MINIMAL.keys() | ALIASES.keys(), "change the bodies in tests/support/minimal_bodies.py"
