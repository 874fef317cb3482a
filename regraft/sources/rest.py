"""`Rest`: requests to the REST API of a database, with one error for all failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from index.errors import InvalidArgument
from regraft.connection import is_header_value

SECONDS = 60.0


class Rest:
    """Requests to one database."""

    def __init__(
        self, name: str, address: str, headers: Mapping[str, str], auth: tuple[str, str] | None = None
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise InvalidArgument(f"the address of {name} must begin with http:// or https://, not {address!r}")
        if not all(map(is_header_value, headers.values())):
            raise InvalidArgument(f"the key of {name} must be printable ASCII, without a line break at its end")
        self._name, self._address = name, address.rstrip("/")
        self._http = httpx.Client(headers=dict(headers), auth=auth, timeout=SECONDS)

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """Send a request; returns the JSON of the answer.

        Raises:
            InvalidArgument: no answer, no JSON, or a refusal, which is quoted.
        """
        try:
            answer = self._http.request(method, f"{self._address}{path}", **request)
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            said = " ".join(error.response.text.split())[:300]
            raise InvalidArgument(
                f"{self._name} returned status {error.response.status_code} for {path}: {said}"
            ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise InvalidArgument(f"{self._name} cannot be read: {str(error) or type(error).__name__}") from error
