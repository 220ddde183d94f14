"""vLLM's routes that load and unload adapters while the gateway runs."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from proa_gateway.errors import InvalidRequest
from proa_gateway.gateway import gateway_of, require_operator
from proa_gateway.http.bodies import JsonRoute
from proa_gateway.http.errors import error_responses
from proa_gateway.operators.calls import load_on_engines, unload_from_engines
from proa_gateway.serving.fields import ModelName, Text, at_most

lora_router = APIRouter(
    route_class=JsonRoute,  # with --enable-runtime-lora-updating
    responses=error_responses(400, 401, 403, 404, 503),
    dependencies=[Depends(require_operator)],
)


class LoadLoraRequest(BaseModel):
    """`POST /v1/load_lora_adapter`."""

    model_config = ConfigDict(extra="ignore")

    lora_name: ModelName = ""
    lora_path: Annotated[Text, at_most(4096)] = Field("", description="A folder in the engines' file system.")
    load_inplace: bool = Field(False, description="Replace an adapter of this name that has another content.")
    base_model_name: ModelName | None = Field(None, description="May be omitted if only one model is served.")


class UnloadLoraRequest(BaseModel):
    """`POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="ignore")

    lora_name: ModelName = ""


@lora_router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadLoraRequest, request: Request) -> Response:
    """Load an adapter on all engines of its model; answered when requests may name it."""
    if not body.lora_name or not body.lora_path:
        raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
    gateway = gateway_of(request)
    lookup = gateway.admission.lookup
    if lookup.name(body.lora_name) in lookup.known:
        raise InvalidRequest(f"{body.lora_name!r} is the name of a model.", param="lora_name")
    model = lookup.name(body.base_model_name)
    lookup.check(model)
    await load_on_engines(
        gateway.pool, gateway.models.loras, body.lora_name, body.lora_path, model, replace=body.load_inplace
    )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@lora_router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadLoraRequest, request: Request) -> Response:
    """Forget an adapter and unload it from all engines. Requests that run continue."""
    if not body.lora_name:
        raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    gateway = gateway_of(request)
    await unload_from_engines(gateway.pool, gateway.models.loras, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
