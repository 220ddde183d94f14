"""The routes of transcriptions and translations."""

from typing import Any

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.audio.job import FILE, TRANSCRIPTIONS, TRANSLATIONS, TranscriptionCall
from proa_gateway.apis.audio.protocol import (
    TextDeltaEvent,
    TextDoneEvent,
    Transcription,
    TranscriptionRequest,
    fields_of,
)
from proa_gateway.apis.audio.whisper import Task
from proa_gateway.gateway import ERRORS, gateway_of, respond
from proa_gateway.http.errors import validated
from proa_gateway.http.forms import read_form
from proa_gateway.serving.job import Endpoint

audio_router = APIRouter()
AUDIO_PATHS = (TRANSCRIPTIONS.route, TRANSLATIONS.route)
_FORM = TranscriptionRequest.model_json_schema()
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": _FORM
                | {
                    "properties": {FILE: {"type": "string", "format": "binary"}, **_FORM["properties"]},
                    "required": [FILE],
                }
            }
        },
    }
}
_EVENTS = f"Events with a `{TextDeltaEvent.__name__}`, then a `{TextDoneEvent.__name__}` or an error, then `[DONE]`."
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Transcription,
        "description": "The text.",
        "content": {
            "text/plain": {"schema": {"type": "string"}},
            "text/event-stream": {"schema": {"type": "string", "description": _EVENTS}},
        },
    }
}


@audio_router.post(TRANSCRIPTIONS.route, responses=ERRORS | _RESPONSES, openapi_extra=_BODY)
async def transcriptions(request: Request) -> Response:
    return await _respond(request, TRANSCRIPTIONS, "transcribe")


@audio_router.post(TRANSLATIONS.route, responses=ERRORS | _RESPONSES, openapi_extra=_BODY)
async def translations(request: Request) -> Response:
    """To English."""
    return await _respond(request, TRANSLATIONS, "translate")


async def _respond(request: Request, endpoint: Endpoint, task: Task) -> Response:
    gateway = gateway_of(request)
    form = await read_form(request, file_field=FILE, max_file_bytes=gateway.config.audio.max_audio_bytes)
    fields = validated(TranscriptionRequest, fields_of(form))
    call = TranscriptionCall(
        endpoint=endpoint,
        fields=fields,
        session_id=fields.session_id or fields.user,
        extra_fields=fields.extra_fields,
        task=task,
        file=form.file,
        loader=gateway.audios,
        content_format=gateway.settings.content_format,
    )
    return respond(call, request)
