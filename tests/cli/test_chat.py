"""The conversation of `headrace chat`, on a fake session."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, cast

import pytest

from headrace.cli.chat import Conversation, line_history, read_message
from headrace.cli.main import EXIT_WRONG_USE, run_command
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.cli.session import Session


class FakeSession:
    """Answers every prompt with its number of turns."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.refuses = False

    def chat_tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.refuses:
            raise RequestError("prompt has 9 tokens but max_model_len is 8")
        self.asked.append([message["content"] for message in messages])
        return [len(messages)]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[str]:
        del params
        yield "answer "
        yield str(prompt[0])


def converse(session: FakeSession, *texts: str, system: str | None = None) -> Conversation:
    conversation = Conversation(
        cast("Session", session), SamplingParams(temperature=0), system=system
    )
    for text in texts:
        assert conversation.take(text)
    return conversation


def test_each_question_carries_the_turns_before_it() -> None:
    session = FakeSession()

    converse(session, "a", "b", system="s")

    assert session.asked == [["s", "a"], ["s", "a", "answer 2", "b"]]


def test_reset_forgets_all_but_the_system_turn() -> None:
    session = FakeSession()

    converse(session, "a", "/reset", "b", system="s")

    assert session.asked[-1] == ["s", "b"]


def test_refused_question_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession()
    conversation = converse(session, "a")
    session.refuses = True
    conversation.take("too long")
    session.refuses = False
    conversation.take("b")

    assert session.asked[-1] == ["a", "answer 1", "b"]
    assert "max_model_len is 8" in capsys.readouterr().err


def test_an_unknown_command_is_told_and_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    session = FakeSession()

    converse(session, "/restet", "/etc/hosts is a file", "/ is a slash")

    assert session.asked[-1] == ["/etc/hosts is a file", "answer 1", "/ is a slash"]
    assert "no command /restet; /help lists them" in capsys.readouterr().err


def test_exit_ends_the_conversation() -> None:
    assert not converse(FakeSession()).take(" /exit ")


def test_several_lines_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('one\\\ntwo\n"""three\n\nfour"""\nfive\n'))

    messages = [read_message() for _ in range(4)]

    assert messages == ["one\ntwo", "three\n\nfour", "five", None]


def test_lines_are_kept_for_the_next_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    file = tmp_path / "deep" / "history"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    readline.clear_history()
    with line_history(file):
        readline.add_history("what is a lamp post?")
    readline.clear_history()
    with line_history(file):
        assert readline.get_history_item(1) == "what is a lamp post?"
    readline.clear_history()
    assert file.stat().st_mode & 0o77 == 0


def test_a_history_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("readline")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    (tmp_path / "file").write_text("in the way")
    with line_history(tmp_path / "file" / "history"):
        pass
    assert "cannot be kept" in capsys.readouterr().err


def test_a_pipe_has_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with line_history(tmp_path / "history"):
        pass
    assert not (tmp_path / "history").exists()


def test_bytes_that_are_no_text_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = io.TextIOWrapper(io.BytesIO(b"caf\xe9 hi\n"), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", wrong)
    with pytest.raises(RequestError, match=r"standard input is no text: .*; send UTF-8"):
        read_message()
    wrong.seek(0)
    assert run_command(["run", "--model", "/no/such"]) == EXIT_WRONG_USE
    assert "the prompt on standard input is no text" in capsys.readouterr().err
