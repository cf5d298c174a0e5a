"""The proxies' files against what the server has. The proxies themselves are not installed here."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
NGINX = (ROOT / "examples/deploy/nginx.conf").read_text(encoding="utf-8")
CADDY = (ROOT / "examples/deploy/Caddyfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")


def without_comments(text: str) -> str:
    return re.sub(r"#.*", "", text)


def test_braces_close() -> None:
    for text in (NGINX, CADDY):
        plain = without_comments(text)
        depth = 0
        for character in plain:
            depth += {"{": 1, "}": -1}.get(character, 0)
            assert depth >= 0
        assert depth == 0


def test_every_directive_of_nginx_ends() -> None:
    for line in without_comments(NGINX).splitlines():
        assert not line.strip() or line.rstrip().endswith((";", "{", "}")), line


def test_both_let_bodies_pass_that_the_server_takes() -> None:
    mebibytes = ServerSettings().max_body_bytes // 2**20
    assert f"client_max_body_size {mebibytes}m;" in NGINX
    assert f"max_size {mebibytes}MiB" in CADDY


def test_both_keep_a_session_with_a_server_by_the_header_of_the_page() -> None:
    assert "`X-Session-Id`" in PAGE
    assert "$http_x_session_id" in NGINX
    assert "hash $session consistent;" in NGINX
    assert "lb_policy header X-Session-Id" in CADDY


def test_no_request_is_sent_again_on_a_timeout() -> None:
    (again,) = re.findall(r"proxy_next_upstream (.*);", NGINX)
    assert set(again.split()) == {"error", "http_503", "non_idempotent"}
    assert "lb_retry_match" not in CADDY
