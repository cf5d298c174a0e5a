"""Bodies that would take long: counted first, read in a thread, refused at their first fault."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BeforeValidator, ValidationError
from starlette.requests import Request

from headrace.errors import RequestError
from headrace.server import structure
from headrace.server.bodies import BodyReader
from headrace.server.messages import CountTokensBody, MessagesBody
from headrace.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from headrace.server.responses import ResponsesBody
from headrace.server.structure import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, check_structure

VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('ab"\\[]{},: \n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\{,:')), inner),
)


def sizes(value: object) -> tuple[int, int]:
    """Objects and lists, and names."""
    if isinstance(value, dict):
        inner = [sizes(one) for one in value.values()]
        return 1 + sum(c for c, _ in inner), len(value) + sum(n for _, n in inner)
    if isinstance(value, list):
        inner = [sizes(one) for one in value]
        return 1 + sum(c for c, _ in inner), sum(n for _, n in inner)
    return 0, 0


@given(value=VALUES, piece=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_objects_lists_and_names_are_counted_without_those_in_texts(
    value: object, piece: int
) -> None:
    data = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_PIECE_BYTES", piece)
        counted = structure._count(structure._outside_of_strings(data))
    assert (counted.num_containers, counted.num_names) == sizes(value)


@pytest.mark.parametrize(
    ("repeated", "limit", "message"),
    [
        (b"[]", MAX_CONTAINERS, "objects and lists but at most 65536 are"),
        (b'"a":1', MAX_NAMES, "names in objects but at most 263168 are"),
        (b"1", MAX_VALUES, "values but at most 1048576 are"),
    ],
)
def test_more_than_can_be_parsed_at_once_is_refused(
    repeated: bytes, limit: int, message: str
) -> None:
    check_structure(b",".join([repeated] * limit))
    check_structure(json.dumps("[{:,\\\"" * (limit + 1)).encode())
    with pytest.raises(RequestError, match=message):
        check_structure(b",".join([repeated] * (limit + 1)))


class SlowBody(Body):
    """Knows the thread in which it was checked."""

    thread: Annotated[Any, BeforeValidator(lambda _: threading.current_thread().name)]


@pytest.mark.parametrize(("num_bytes", "is_here"), [(100, True), (100_000, False)])
def test_large_bodies_are_read_in_a_thread(num_bytes: int, is_here: bool) -> None:  # noqa: FBT001
    data = json.dumps({"thread": "a" * num_bytes}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    reader = BodyReader(max_bytes=1 << 20, timeout_s=9)
    request = Request({"type": "http", "method": "POST", "headers": []}, receive)  # type: ignore[arg-type]
    body = asyncio.run(reader.read(request, SlowBody))
    reader.close()
    assert (body.thread == threading.current_thread().name) is is_here


@pytest.mark.parametrize(
    "kind",
    [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, CountTokensBody, MessagesBody,
     ResponsesBody],
)
def test_of_a_thousand_wrong_items_one_is_described(kind: type[Body]) -> None:
    for name in kind.model_fields:
        for wrong in ([object()] * 1000, {str(place): "x" for place in range(1000)}):
            with pytest.raises(ValidationError) as caught:
                # Something is always missing or wrong.
                kind.model_validate({name: wrong, "model": 1})
            # One for each type that the field may have, and what is missing.
            assert caught.value.error_count() < 10, name
