"""The API's own description (OpenAPI), for /docs and for whoever makes clients or tests of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Have the description tell the body of what is posted to each path, which our own code reads and checks rather
    than the framework."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _add(own(), bodies)
        assert app.openapi_schema is not None  # made by `own`, and kept
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the framework's way to change it


def _add(description: dict[str, Any], bodies: Mapping[str, type[BaseModel]]) -> None:
    of_model, definitions = models_json_schema(
        [(model, "validation") for model in bodies.values()], ref_template=REFERENCE
    )
    description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, model in bodies.items():
        content = {"application/json": {"schema": of_model[model, "validation"]}}
        description["paths"][path]["post"]["requestBody"] = {"content": content, "required": True}
