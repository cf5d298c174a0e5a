"""Chat templates: what they may do, and what becomes of their refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from headrace.errors import ModelError, RequestError
from headrace.text import ChatTemplate

if TYPE_CHECKING:
    from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role ~ ':' ~ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def test_a_conversation_is_rendered_with_the_assistants_turn_begun() -> None:
    template = ChatTemplate(CHATML)
    assert template.render([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER], add_generation_prompt=False).endswith("hi<|im_end|>\n")


@pytest.mark.scenarios("B110")
def test_a_refusal_carries_the_templates_message() -> None:
    template = ChatTemplate(STRICT, special_tokens={"bos_token": "<s>"})
    assert template.render([USER]) == "<s>user:hi"
    with pytest.raises(RequestError, match="refuses: roles must alternate") as caught:
        template.render([USER, USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[3].content }}", [USER]),
        ("{{ messages[0].content.x.y }}", [USER]),
        ("{{ 1 / 0 }}", [USER]),
        ("{{ 'a' * 10**9 }}", [USER]),
        ("{{ 9 ** 999999 }}", [USER]),
        ("{{ '%0999999999d' % 1 }}", [USER]),
        ("{% for i in range(10**9) %}x{% endfor %}", [USER]),
        ("{{ ''.__class__.__mro__ }}", [USER]),
        ("{{ messages.append(1) }}", [USER]),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}]),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [USER]),
    ],
)
def test_what_a_template_may_not_do_is_a_request_error(
    source: str, messages: list[dict[str, object]]
) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render(messages)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "x"}, "needs a role"),
        ("x", "is of type str but must have a role and content"),
        ({"role": "user", "content": 3}, "must be text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'.*text only"),
        ({"role": "assistant", "tool_calls": 3}, "must be a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "function in each"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of 'f' are not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000}}
            ]},
            "arguments of 'f' are nested too deeply",
        ),
    ],
)
def test_malformed_messages_are_named(message: dict[str, object], expected: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\].*{expected}"):
        ChatTemplate(CHATML).render([USER, message])


def test_list_content_is_joined_and_arguments_are_parsed() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    text = template.render([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "f", "arguments": '{"city": "Zürich <b>"}'}},
            {"function": {"name": "g", "arguments": '{"n": %s}' % ("9" * 5000)}},
        ]},
    ])
    assert text == 'a\nb{"city": "Zürich <b>"}{"n": Infinity}'


def test_the_usual_extras_are_there() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}"
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %} {{ enable_thinking }}"
    )
    text = template.render([USER], template_kwargs={"enable_thinking": False, "messages": 3})
    year, flag = text.split()
    assert int(year) > 2024
    assert flag == "False"


def test_a_syntax_error_is_a_model_error_with_its_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("x\n{% if %}")


def test_templates_are_found_in_either_file(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "a"}))
    first = ChatTemplate.from_folder(tmp_path)
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "b"}]}))
    second = ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("c")
    third = ChatTemplate.from_folder(tmp_path)
    assert [t and t.render([USER]) for t in (first, second, third)] == ["a", "b", "c"]
