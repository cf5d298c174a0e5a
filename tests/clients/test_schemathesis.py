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


@pytest.mark.clients
@pytest.mark.timeout(900)
def test_schemathesis_finds_no_fault(
    serve_model: Callable[..., contextlib.AbstractContextManager[Clients]], tmp_path: Path
) -> None:
    # Short answers: what is asked for is made up, often without a limit of tokens.
    with serve_model("nano", max_model_len=128) as clients:
        clients.need("schemathesis")
        clients.run(
            [
                str(Path(clients.python).parent / "schemathesis"), "run",
                f"{clients.url}/openapi.json", "--max-examples", "15", "--workers", "1",
                "--phases", "examples,coverage,fuzzing", "--request-timeout", "30",
                # It waits for steps, which an idle server does not take.
                "--exclude-path", "/trace",
                # A schema cannot say all that makes a request wrong, such as ids out of range.
                "--exclude-checks", "positive_data_acceptance",
            ],
            tmp_path, limit_s=LIMIT_S,
        )
