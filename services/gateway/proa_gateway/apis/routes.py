"""The routers of all APIs, and the forms of their errors."""

from proa_gateway.apis.audio.routes import audio_router
from proa_gateway.apis.chat.routes import chat_router
from proa_gateway.apis.completions.routes import completions_router
from proa_gateway.apis.decisions.routes import decisions_router
from proa_gateway.apis.embeddings.routes import embeddings_router
from proa_gateway.apis.generate.routes import generate_router
from proa_gateway.apis.invocations import invocations_router
from proa_gateway.apis.messages.render import MESSAGES_ERRORS
from proa_gateway.apis.messages.routes import messages_router
from proa_gateway.apis.models import models_router, public_router
from proa_gateway.apis.responses.routes import responses_router
from proa_gateway.apis.scores.routes import scores_router
from proa_gateway.apis.tokenize import tokenizer_router
from proa_gateway.http.errors import ErrorForms

ROUTERS = (
    chat_router,
    completions_router,
    invocations_router,
    models_router,
    tokenizer_router,
    messages_router,
    responses_router,
    generate_router,
    embeddings_router,
    scores_router,
    audio_router,
    decisions_router,
    public_router,
)
ERROR_FORMS = ErrorForms((MESSAGES_ERRORS,))
