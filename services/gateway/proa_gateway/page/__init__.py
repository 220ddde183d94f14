"""The chat page at `/`: files of this folder, without a build step and without anything from elsewhere."""

from importlib.resources import files

from fastapi import APIRouter, Response

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = "default-src 'self'; img-src data:; frame-ancestors 'none'"

page_router = APIRouter(include_in_schema=False)


def _add_file(path: str, name: str) -> None:
    content = (files(__name__) / name).read_bytes()
    kind = _TYPES[name[name.rindex(".") :]]
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}

    @page_router.get(path)
    async def get_file() -> Response:
        return Response(content, media_type=kind, headers=headers)


_add_file("/", "index.html")
for _file in files(__name__).iterdir():
    if _file.name.endswith((".js", ".css")):
        _add_file(f"/{_file.name}", _file.name)
