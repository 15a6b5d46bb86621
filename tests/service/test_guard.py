"""Who is let in: by host, method, size, site and token; at what pace; and what every answer carries."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

import service.http.guard
from service.app import create_app
from service.http.guard import Access, Guard, RateLimit, host_of
from service.status_files import StatusFiles
from service.watch import Watch

HERE = "http://localhost"
TOKEN = "Zm9yZ2V0LW1lLW5vdC4"
NO_DATA = {"/", "/livez"}


def routes(client: TestClient) -> list[str]:
    """Every path but the stream's, something in place of a parameter, and those that the schema leaves out."""
    paths = client.get("/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).json()["paths"]
    paths = [path.replace("{run_id}", "none") for path in paths if path != "/v1/events"]
    return [*paths, "/", "/page/tierd.js", "/openapi.json"]


@pytest.fixture
def client(directory: Path) -> TestClient:
    return TestClient(create_app(Watch(StatusFiles(directory))), base_url=HERE)


@pytest.mark.parametrize(
    ("access", "good", "bad"),
    [
        pytest.param(
            Access(),
            "127.0.0.1 127.0.0.1:8471 [::1] [::1]:8471 192.0.2.7 localhost LOCALHOST:80 localhost. localhost:",
            "evil.example localhost.evil.example 127.0.0.1.evil.example evil.example:8471 ::1 [::1 [localhost] "
            "localhost:x localhost:80:80 user@localhost 127.0.0.1@evil.example 2130706433 localhost,evil.example "
            "[::1%evil.example]",
            id="loopback",
        ),
        pytest.param(
            Access(frozenset({"node7"})), "node7 node7:8471 10.0.0.1", "node77 localhost", id="named"
        ),
        pytest.param(Access(None), "anything localhost evil.example:1", "", id="unix socket"),
    ],
)
def test_a_name_that_is_not_ours_gets_no_answer(directory: Path, access: Access, good: str, bad: str) -> None:
    client = TestClient(create_app(Watch(StatusFiles(directory)), access=access), base_url=HERE)
    for host in good.split():
        assert client.get("/v1/status", headers={"host": host}).status_code == 200, host
    for host in [*bad.split()]:
        for path in ("/v1/status", "/", "/livez"):
            answer = client.get(path, headers={"host": host})
            assert answer.status_code == 421, (host, path)
            assert "--allow-host" in answer.json()["detail"]


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_a_request_names_one_host(directory: Path, hosts: list[str]) -> None:
    headers = [(b"host", host.encode()) for host in hosts]
    assert answer_of(Guard(create_app(Watch(StatusFiles(directory)))), "GET", "/livez", headers) == (
        400,
        True,
    )


def answer_of(app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, bool]:
    """The status of an answer, and whether it has a body, to a request that no client library would send."""
    sent: list[dict[str, Any]] = []

    async def ask() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(3600)

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        await app(scope, receive, send)

    asyncio.run(ask())
    assert not sent[-1].get("more_body"), "an answer ends"
    return sent[0]["status"], any(message.get("body") for message in sent)


@given(st.text(st.characters(codec="latin-1")))
def test_a_colon_that_no_brackets_hold_begins_a_port(authority: str) -> None:
    host = host_of(authority)
    assert host is None or (":" in host) == authority.strip().startswith("[")


def test_nothing_but_asking_is_possible(client: TestClient) -> None:
    for path in [*routes(client), "/no/such/path"]:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"):
            answer = client.request(method, path, headers={"origin": "http://evil.example"})
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD"), (method, path)
            assert not any(name.startswith("access-control") for name in answer.headers)


def test_what_a_request_may_carry_is_bounded(client: TestClient) -> None:
    for body in (b"x", iter([b"x"])):
        answer = client.request("GET", "/livez", content=body)
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert client.request("GET", "/livez", headers={"content-length": "0"}).status_code == 200
    assert client.request("POST", "/livez", content=b"x").headers["connection"] == "close"
    longest = "/v1/runs/" + "x" * (2048 - len("/v1/runs/"))
    assert client.get(longest).status_code == 404
    assert client.get(longest + "x").status_code == 414
    assert client.get("/v1/status?" + "x" * 2048).status_code == 414


def test_head_is_answered_wherever_get_is(client: TestClient) -> None:
    for path in routes(client):
        answer, head = client.get(path), client.head(path)
        same = (head.status_code, head.headers.get("content-type"), head.content)
        assert same == (answer.status_code, answer.headers.get("content-type"), b""), path
        assert ("content-length" in head.headers) == ("content-length" in answer.headers)


def test_a_stream_ends_at_once_for_who_asks_for_its_head() -> None:
    ends = []

    async def stream(_scope: object, _receive: object, send: Callable[[Any], Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"event", "more_body": True})
        ends.append(True)

    assert answer_of(Guard(stream), "HEAD", "/v1/events", [(b"host", b"localhost")]) == (200, False)
    assert ends


def test_every_answer_keeps_a_browser_to_itself(client: TestClient) -> None:
    app = client.app
    assert isinstance(app, FastAPI)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a defect")

    failing = TestClient(app, base_url=HERE, raise_server_exceptions=False)
    answers = [failing.get(path) for path in (*routes(client), "/broken", "/none")]
    answers += [failing.get("/", headers={"host": "evil.example"}), failing.post("/")]
    assert {200, 404, 405, 421, 500} <= {answer.status_code for answer in answers}
    for answer in answers:
        headers = answer.headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self' data:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert "a defect" not in answer.text
        assert "server" not in headers
        if answer.url.path not in NO_DATA and not answer.url.path.startswith("/page/"):
            assert headers["cache-control"] == "no-store"


def test_pages_of_other_sites_get_no_data(client: TestClient) -> None:
    for path in routes(client):
        data = path not in NO_DATA and not path.startswith("/page/")
        for site in ("cross-site", "same-site", "Cross-Site"):
            refused = client.get(path, headers={"sec-fetch-site": site}).status_code == 403
            assert refused == data, (path, site)
        for site in ("same-origin", "none"):
            assert client.get(path, headers={"sec-fetch-site": site}).status_code != 403
    for mode, dest, status in (
        ("navigate", "document", 200),
        ("navigate", "iframe", 403),
        ("cors", "empty", 403),
    ):
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": mode, "sec-fetch-dest": dest}
        assert client.get("/v1/status", headers=link).status_code == status, (
            "a link may be followed, never embedded"
        )


def test_only_the_token_opens_what_holds_data(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def compare(candidate: bytes, token: bytes) -> bool:
        judged.append(candidate)
        return hmac.compare_digest(candidate, token)

    monkeypatch.setattr(
        service.http.guard, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)})
    )
    app = create_app(
        Watch(StatusFiles(directory)), access=Access(token=TOKEN.encode(), requests_per_second=1e6)
    )
    client = TestClient(app, base_url=HERE)

    def ask(path: str, *values: str) -> httpx.Response:
        return client.get(path, headers=[("authorization", value) for value in values])

    for path in routes(client):
        data = path not in NO_DATA and not path.startswith("/page/")
        assert (ask(path).status_code == 401) == data, path
        assert ask(path, f"Bearer {TOKEN}").status_code != 401
    assert ask("/v1/status", f"bearer   {TOKEN} ").status_code == 200
    wrong = [TOKEN[:end] for end in range(len(TOKEN))]
    wrong += [TOKEN[:at] + "~" + TOKEN[at + 1 :] for at in range(len(TOKEN))]
    wrong += [TOKEN + "~", TOKEN * 2, TOKEN.swapcase(), TOKEN + "\0", "Ä" * len(TOKEN), "x" * 4000]
    judged.clear()
    for credentials in wrong:
        refused = client.get(
            "/v1/status", headers={"authorization": b"Bearer " + credentials.encode("latin-1")}
        )
        assert refused.status_code == 401, credentials
        assert refused.headers["www-authenticate"] == 'Bearer realm="tierd"'
        assert TOKEN not in refused.text + str(refused.headers)
    assert len(judged) == len(wrong), "none is told apart but in constant time"
    for others in (
        [TOKEN],
        [f"Basic {TOKEN}"],
        [f"Bearer{TOKEN}"],
        [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
        ["Bearer", TOKEN],
    ):
        assert ask("/v1/status", *others).status_code == 401, others
    assert ask(f"/v1/status?token={TOKEN}").status_code == 401
    assert TOKEN not in repr(Access(token=TOKEN.encode()))


@given(
    st.lists(st.floats(0, 0.5), min_size=1, max_size=300),
    st.sampled_from([1.0, 20.0, 500.0]),
    st.integers(0, 5),
    st.integers(0, 40),
)
def test_turns_come_in_order_and_never_faster(
    gaps: list[float], rate: float, burst: int, waiting: int
) -> None:
    pace, now, turns = RateLimit(rate, burst=burst, waiting=waiting), 1000.0, []
    for gap in gaps:
        now += gap
        wait = pace.reserve(now)
        behind = sum(1 for turn in turns if turn > now)
        if wait is None:
            assert behind >= waiting
            continue
        assert 0 <= wait <= pace.max_wait + 1e-9
        assert behind <= waiting + 1
        turns.append(now + wait)
    assert turns == sorted(turns)
    for first in range(len(turns)):  # in any window: what the rate allows, and the burst
        for last in range(first, len(turns), 7):
            assert last - first <= (turns[last] - turns[first]) * rate + burst + 1 + 1e-6


def test_a_flood_waits_in_turn_and_holds_up_no_probe() -> None:
    """At so slow a rate that nobody's turn comes while this runs: 64 at once, 1024 wait, and the rest is told to."""

    async def app(_scope: object, _receive: object, send: Callable[[Any], Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(guard: Guard, path: str, host: bytes = b"localhost") -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", host)],
        }
        await guard(scope, None, send)
        return [sent[0]["status"], dict(sent[0]["headers"]).get(b"retry-after")]

    async def flood() -> None:
        guard = Guard(app, Access(requests_per_second=0.001))
        asking = [asyncio.create_task(ask(guard, "/v1/status")) for _ in range(64 + 1 + 1024 + 10)]
        await asyncio.sleep(0)
        answered = [task.result() for task in asking if task.done()]
        assert answered.count([200, None]) == 65
        assert answered[65:] == [[503, b"1024000"]] * 10
        assert await ask(guard, "/livez") == [200, None]
        assert (await ask(guard, "/v1/status", b"evil.example"))[0] == 421, (
            "nor do those let in hold up refusals"
        )
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(flood())
