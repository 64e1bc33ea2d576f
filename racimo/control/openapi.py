"""The API's description, made from the table of calls, and a page that shows it without loading anything else."""

import re
from typing import Any, get_args

import msgspec

from racimo.control.exchange import MAX_JSON_BYTES
from racimo.control.routes import Call
from racimo.control.views import ErrorView
from racimo.spec.errors import ERROR_KINDS
from racimo.version import PROTOCOL_VERSION, __version__

_PARAMETER = re.compile(r"\{([a-z0-9]+)(?::path)?\}")


def describe(calls: tuple[Call, ...]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = [kind for call in calls for kind in (*_kinds(call.takes), *_kinds(call.gives))]
    types.append(ErrorView)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = {_key(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        path = _PARAMETER.sub(r"{\1}", call.path)
        paths.setdefault(path, {})[call.method.lower()] = _operation(call, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Racimo",
            "version": __version__,
            "description": f"Every call but the open ones needs `Authorization: Bearer TOKEN` and `Racimo-Protocol:"
            f" {PROTOCOL_VERSION}`. JSON bodies have at most {MAX_JSON_BYTES} bytes.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(call: Call, by_type: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(call.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "description": what, "schema": {"type": "string"}}
        for name, what in call.query.items()
    ]
    statuses = sorted({str(kind.http_status) for kind in ERROR_KINDS.values() if kind.http_status < 500})
    operation: dict[str, Any] = {
        "operationId": call.handler.__name__,
        "summary": call.summary,
        "responses": {
            "200": {"description": "done", "content": _content(call.gives, call.body, by_type)},
            "default": {
                "description": f"an error: {', '.join(statuses)} or 5xx",
                "content": {"application/json": {"schema": by_type[_key(ErrorView)]}},
            },
        },
    }
    if parameters:
        operation["parameters"] = parameters
    if call.takes is not None:
        body = "bytes" if call.takes is bytes else "json"
        operation["requestBody"] = {"required": True, "content": _content(call.takes, body, by_type)}
    if call.open:
        operation["security"] = []
    return operation


def _content(kind: Any, body: str, by_type: dict[str, Any]) -> dict[str, Any]:
    if kind is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    media = "application/x-ndjson" if body == "lines" else "application/json"
    schemas = [by_type[_key(one)] for one in _kinds(kind)]
    return {media: {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}}}


def _kinds(kind: Any) -> tuple[Any, ...]:
    if kind is None or kind is bytes:
        return ()
    return kind if isinstance(kind, tuple) else (kind,)


def _key(kind: Any) -> str:
    return f"{kind}{get_args(kind)}"


def page() -> str:
    """A self-contained page: it reads `/openapi.json` of the same host and nothing else."""
    return _PAGE


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Racimo API</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 13px/1.45 ui-monospace, monospace }
summary { cursor: pointer; padding: .35rem 0; border-bottom: 1px solid #8884 }
summary b { display: inline-block; width: 4.5rem }
pre { background: #8881; padding: .6rem; overflow: auto; border-radius: 4px }
dt { font-weight: 600 }
</style>
<h1>Racimo API</h1><p id="about"></p><div id="calls">reading /openapi.json ...</div>
<h2>Schemas</h2><div id="schemas"></div>
<script>
const make = (tag, text, ...inner) => {
  const node = document.createElement(tag)
  if (text) node.textContent = text
  node.append(...inner)
  return node
}
const fold = (head, ...inner) => make("details", "", make("summary", "", ...head), ...inner)
const schema = content => Object.entries(content || {}).map(([media, value]) =>
  make("pre", media + "\\n" + JSON.stringify(value.schema, null, 2)))
fetch("openapi.json").then(answer => answer.json()).then(api => {
  document.title = `${api.info.title} API ${api.info.version}`
  about.textContent = api.info.description
  calls.textContent = ""
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, call] of Object.entries(methods)) {
      const list = make("dl")
      for (const one of call.parameters || [])
        list.append(make("dt", `${one.name} (${one.in})`), make("dd", one.description || ""))
      const parts = [list]
      if (call.requestBody) parts.push(make("h4", "takes"), ...schema(call.requestBody.content))
      parts.push(make("h4", "gives"), ...schema(call.responses["200"].content))
      calls.append(fold([make("b", method.toUpperCase()), make("code", path), ` ${call.summary}`], ...parts))
    }
  for (const [name, value] of Object.entries(api.components.schemas)) {
    schemas.append(fold([make("code", name)], make("pre", JSON.stringify(value, null, 2))))
  }
}).catch(error => { calls.textContent = `cannot read the description: ${error}` })
</script></html>
"""
