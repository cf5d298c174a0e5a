"""Requests made up from the OpenAPI document: no server error, no hang, nothing undocumented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from tests.clients.conftest import Clients

LIMIT_S = 840.0
"""It takes three quarters of a minute on two idle cores; the rest is for busy machines."""


@pytest.mark.clients
@pytest.mark.timeout(900)
def test_schemathesis_finds_no_fault(
    serve_model: Callable[..., contextlib.AbstractContextManager[Clients]], tmp_path: Path
) -> None:
    # Short answers: what is asked for is made up, often without a limit of tokens, and one request
    # may ask for dozens of completions.
    with serve_model("nano", max_model_len=40) as clients:
        clients.need("schemathesis")
        clients.run(
            [
                str(Path(clients.python).parent / "schemathesis"), "run",
                f"{clients.url}/openapi.json", "--max-examples", "5", "--workers", "1",
                "--phases", "examples,coverage,fuzzing", "--request-timeout", "60",
                # It waits for steps, which an idle server does not take.
                "--exclude-path", "/trace",
                # A schema cannot say all that makes a request wrong, such as ids out of range.
                "--exclude-checks", "positive_data_acceptance",
            ],
            tmp_path, limit_s=LIMIT_S,
        )
