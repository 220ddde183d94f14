"""tests/support/minimal_bodies.py has a body for each route that takes JSON, with which tests of all routes begin."""

from proa_gateway.app import create_app
from proa_gateway.config import GatewayConfig
from support.minimal_bodies import ALIASES, MINIMAL


def test_every_route_that_takes_json_has_a_minimal_body() -> None:
    paths = create_app(GatewayConfig(engines=("engine:1",), enable_runtime_lora_updating=True)).openapi()["paths"]
    bodies = {path: methods["post"].get("requestBody", {}) for path, methods in paths.items() if "post" in methods}
    routes = {path for path, body in bodies.items() if "application/json" in body.get("content", ())}
    assert routes == MINIMAL.keys() | ALIASES.keys(), "change the bodies in tests/support/minimal_bodies.py"
