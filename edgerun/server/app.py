"""The HTTP application: routes, error answers and what surrounds every request, put together."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from edgerun import __version__
from edgerun.server import admin, chat, errors, model_routes, tokenize, vision
from edgerun.server.middleware import AccessMiddleware, AccessRules, BodyLimitMiddleware, RequestIdMiddleware
from edgerun.server.sse import ClientGone
from edgerun.server.state import AppState

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads it


def create_app(state: AppState, rules: AccessRules | None = None) -> FastAPI:
    """The application over `state`. rules: who may ask over TCP; default: this machine's names, no key."""
    app = FastAPI(title="edgerun", version=__version__, docs_url=None, redoc_url=None)
    app.state.edgerun = state
    for module in (chat, tokenize, vision, model_routes, admin):
        app.include_router(module.router)
    errors.install(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, image_paths=(vision.CLASSIFY_PATH,))
    app.add_middleware(AccessMiddleware, rules=rules or AccessRules())
    app.add_middleware(RequestIdMiddleware)
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
