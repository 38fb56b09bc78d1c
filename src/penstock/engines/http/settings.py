"""`[pipeline.engine]` with `kind = "http"`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import Positive, Seconds


class HttpEngineSection(EngineSection):
    """An OpenAI-compatible server that the user runs. Its weights never change: for evaluation only."""

    REQUESTS_KEY: ClassVar[str] = "max_requests"
    kind: Literal["http"] = "http"
    """Chooses this table."""
    url: Annotated[str, Field(pattern=r"^https?://")]
    """The server, without `/v1`: `http://127.0.0.1:8000`."""
    model_name: str
    """The model's name on the server."""
    api_key_env: str = ""
    """The environment variable that holds the key, if the server needs one."""
    max_requests: Positive = 64
    """Requests in flight at once; the others wait."""
    max_length: Positive | None = None
    """Tokens of the longest context; longer prompts are left out. By default the server refuses them."""
    request_s: Seconds = 600.0
    """Deadline of one completion, including retries while the server is busy."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(weights="none")

    @property
    def serves(self) -> str:
        return f"{self.model_name} at {self.url}"
