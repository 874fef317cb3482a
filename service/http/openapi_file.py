"""Write docs/openapi.json: the description of a service with an API key and default settings otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr

from service.http.app import create_app
from service.http.openapi import describe
from service.settings import Settings


def written() -> str:
    """The content of the file."""
    settings = Settings.model_construct(api_key=SecretStr("any"))
    document = describe(create_app(settings), settings)
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def main(file: Annotated[Path, typer.Argument(dir_okay=False, metavar="FILE", help="The file to write.")]) -> None:
    """Write the OpenAPI description of the HTTP API, as docs/openapi.json has it."""
    file.write_text(written())


if __name__ == "__main__":
    typer.run(main)
