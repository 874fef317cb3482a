"""One request of the client: its key, what its answer may be, and when it is sent again."""

from __future__ import annotations

import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from index.errors import InvalidArgument, RegraftError
from regraft import connection
from regraft.client import Client, InvalidInput, Problem, TextItem, TimedOut, UnexpectedAnswer, Unreachable
from regraft.models import Health
from staging.api.answers import Handler, answering, awaiting, connected, whole


def test_the_key_travels_as_a_bearer_token_and_only_when_given():
    seen, handler = answering({})

    connected(handler, api_key="secret").health()
    connected(handler).health()

    assert [r.headers.get("authorization") for r in seen] == ["Bearer secret", None]


def test_address_and_key_that_are_not_given_are_the_environments(monkeypatch):
    seen, handler = answering({})
    monkeypatch.setenv("REGRAFT_URL", "http://elsewhere:9")
    monkeypatch.setenv("REGRAFT_API_KEY", "from outside")

    for given in ((), ("http://here:1", "own")):
        Client(*given, transport=httpx.MockTransport(handler)).health()

    told = [(request.url.host, request.headers["authorization"]) for request in seen]
    assert told == [("elsewhere", "Bearer from outside"), ("here", "Bearer own")]


@pytest.mark.parametrize("key", ["top-secret-key-1\n", " top-secret-key-1", "top-secret-key\x7f", "top-secret-ключ"])
def test_what_is_no_key_is_refused_and_never_shown(run, monkeypatch, key):
    monkeypatch.setenv("REGRAFT_API_KEY", key)

    with pytest.raises(InvalidArgument, match="the API key must be") as refused:
        Client()
    code, shown, said = run("gallery", "list")
    given = run("gallery", "list", "--api-key", key, "--json")

    assert (code, given[0]) == (1, 1)
    assert not [told for told in (str(refused.value), shown, said, *given[1:]) if "secret" in told or "ключ" in told]


@pytest.mark.parametrize(
    "url",
    [
        "nowhere:1",
        "http://",
        "http://a:b",
        "http://caf\udce9",
        "http://a/caf\udce9",
        "http://a..b",
        "http://.a",
        f"http://{64 * 'a'}.com",
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InvalidArgument, match="must be http:// or https://"):
        Client(url)


@pytest.mark.parametrize("url", ["http://a/?key=1", "http://a/#/galleries"])
def test_an_address_with_more_than_a_path_is_refused(url):
    with pytest.raises(InvalidArgument, match=r"the address of the service, without \? or #"):
        Client(url)


@pytest.mark.parametrize("url", ["http://a/v1", "https://a:8080/v1/"])
def test_the_version_of_the_api_is_not_part_of_an_address(url):
    with pytest.raises(InvalidArgument, match="the address of the service, without /v1"):
        Client(url)


def test_a_problem_carries_everything_the_service_said():
    errors = [{"pointer": "/k", "detail": "too large"}]
    body = {"detail": "k is 9", "code": "invalid_argument", "errors": errors, "request_id": "r-1"}
    _, handler = answering(body, 422)

    with pytest.raises(Problem) as caught:
        connected(handler).gallery("g")

    problem = caught.value
    assert (problem.status, problem.code, problem.detail) == (422, "invalid_argument", "k is 9")
    assert (problem.errors, problem.request_id, problem.pointer) == (errors, "r-1", "/k")
    assert isinstance(problem, RegraftError)

    again = pickle.loads(pickle.dumps(problem))

    assert (vars(again), str(again)) == (vars(problem), str(problem))


@pytest.mark.parametrize("content", [b"<html>Bad gateway</html>", b"[1]", b""])
def test_an_answer_that_is_no_problem_json_still_raises_a_problem(content):
    client = connected(lambda _: httpx.Response(502, content=content))

    with pytest.raises(Problem, match="502 Bad Gateway") as caught:
        client.health()

    assert caught.value.code == "http_error"


@pytest.mark.parametrize("errors", [["rate limit"], [{"message": "rate limit"}, None], {"base": ["x"]}, "x", 7])
def test_errors_of_a_gateway_in_its_own_form_are_a_problem(errors):
    _, handler = answering({"errors": errors, "detail": "slow down"}, 429)

    with pytest.raises(Problem, match="slow down") as caught:
        connected(handler).health()

    assert all(isinstance(one, dict) for one in caught.value.errors)


def test_a_redirection_names_the_other_address():
    client = connected(lambda _: httpx.Response(301, headers={"location": "https://service/v1/health"}))

    with pytest.raises(Problem, match=r"301 Moved Permanently: .* to https://service/v1/health; give that"):
        client.health()


@pytest.mark.parametrize("call", [lambda client: client.health(), lambda client: list(client.watch_backfill(1))])
def test_an_answer_that_cannot_be_decompressed_is_one_error_at_once(call):
    client = connected(lambda _: httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Plain()))

    with pytest.raises(UnexpectedAnswer, match="decompress"):
        call(client)


class Plain(httpx.SyncByteStream):
    def __iter__(self):
        yield b"not compressed"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>a proxy</html>", "is not a valid GalleryInfo: the body"),
        (b"[1]", "the body"),
        (b'{"name": "g"}', "/current"),
    ],
)
def test_an_answer_of_another_shape_is_one_error_that_names_the_field(content, said):
    client = connected(lambda _: httpx.Response(200, content=content))

    with pytest.raises(UnexpectedAnswer, match=said):
        client.gallery("g")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.delete_item("g", "a"),
        lambda client: client.delete_gallery("g"),
        lambda client: client.delete_version("v1"),
        lambda client: client.delete_evaluation("g", 1),
        lambda client: client.delete_api_key("k"),
    ],
)
def test_a_page_of_another_server_is_no_deletion(call):
    client = connected(lambda _: httpx.Response(200, content=b"<html>please log in</html>"))

    with pytest.raises(UnexpectedAnswer, match="http://service:1 to a deletion has status 200, not 204"):
        call(client)


def test_a_field_of_a_newer_service_is_left_out():
    _, handler = answering({"name": "g", "colour": "blue", "mix": {"v1": 2}})

    found = connected(handler).gallery("g")

    assert (found.name, found.mix, hasattr(found, "colour")) == ("g", {"v1": 2}, False)


def test_a_deployment_carries_the_etag_of_its_answer():
    client = connected(lambda r: httpx.Response(200, json=whole(r, {"id": 4}), headers={"etag": "d-7"}))

    assert [client.deployment("g", 4).etag, client.retire("g", "v1").etag] == ["d-7", "d-7"]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.query("g", texts=["caf\udce9"]),
        lambda client: client.query("g", [b"x"], mode="caf\udce9"),
        lambda client: client.query_embeddings("g", np.ones((1, 2)), "caf\udce9"),
        lambda client: client.gate("g", "v2", far=float("nan")),
    ],
)
def test_what_no_request_can_hold_is_invalid_input(call):
    seen, handler = answering({})

    with pytest.raises(InvalidInput, match="cannot be sent"):
        call(connected(handler))

    assert seen == []


def failing(error: type[httpx.TransportError], times: int) -> tuple[list[str], Handler]:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.method)
        if len(seen) <= times:
            raise error("refused")
        return httpx.Response(200, json=whole(request, {}))

    return seen, handler


def returning(handler, call, **options):
    return call(connected(handler, **options))


@pytest.fixture(params=[returning, awaiting])
def ask(request):
    """How a call is made, by either client."""
    return request.param


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(connection, "CONNECT_PAUSE_SECONDS", 0.0)


READ, WRITE = lambda client: client.health(), lambda client: client.create_gallery("g")


@pytest.mark.parametrize(
    ("error", "times", "call", "attempts"),
    [
        (httpx.ConnectError, 2, READ, 3),
        (httpx.ConnectError, 99, READ, 3),
        (httpx.ReadError, 1, READ, 1),  # it broke off halfway
        *((error, 1, WRITE, 1) for error in (httpx.ConnectError, httpx.ReadError, httpx.ConnectTimeout)),
    ],
)
def test_only_a_read_that_reached_nobody_is_sent_again_up_to_three_times(no_pause, ask, error, times, call, attempts):
    seen, handler = failing(error, times)

    if attempts > times:
        assert ask(handler, call) == Health(status="", version="")
    else:
        with pytest.raises(Unreachable, match=r"http://service:1.*regraft serve"):
            ask(handler, call)

    assert len(seen) == attempts


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (READ, connection.QUICK_SECONDS),
        (lambda client: client.query("g", texts=["a"]), connection.QUICK_SECONDS),
        (lambda client: client.extend_work(1, "lease"), connection.QUICK_SECONDS),
        (lambda client: client.fit_edge("v2", "v1", "auto", gallery="g", embed=4000), connection.PATIENT_SECONDS),
        (lambda client: client.ingest_texts("g", [TextItem("a", "b")]), connection.PATIENT_SECONDS),
    ],
)
def test_changes_are_waited_for_longer_than_reads_unless_a_timeout_is_given(monkeypatch, ask, call, seconds):
    seen, handler = failing(httpx.ReadTimeout, 99)
    waited: list[tuple[float, float]] = []

    def slow(request: httpx.Request) -> httpx.Response:
        waited.append((request.extensions["timeout"]["connect"], request.extensions["timeout"]["read"]))
        return handler(request)

    for options, told in (({}, seconds), ({"timeout": 0.5}, 0.5)):
        with pytest.raises(TimedOut, match=rf"within {told:g} s and may still .*REGRAFT_TIMEOUT"):
            ask(slow, call, **options)
    monkeypatch.setenv("REGRAFT_TIMEOUT", "7.5")
    with pytest.raises(TimedOut, match=r"within 7\.5 s"):
        ask(slow, call)

    assert (waited, len(seen)) == ([(connection.QUICK_SECONDS, seconds), (0.5, 0.5), (7.5, 7.5)], 3)
    assert issubclass(TimedOut, Unreachable)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_no_socket_can_wait_is_refused(monkeypatch, timeout):
    with pytest.raises(InvalidArgument, match="above 0 and at most"):
        Client(timeout=timeout)
    monkeypatch.setenv("REGRAFT_TIMEOUT", "a minute")
    with pytest.raises(InvalidArgument, match="'a minute'"):
        Client()


def test_a_stream_that_is_refused_is_a_problem():
    async def watched(client):
        return [progress async for progress in client.watch_backfill(3)]

    _, handler = answering({"code": "unknown_backfill", "detail": "there is no backfill 3"}, 404)

    with pytest.raises(Problem, match="no backfill 3"):
        list(connected(handler).watch_backfill(3))
    with pytest.raises(Problem, match="no backfill 3"):
        awaiting(handler, watched)


def test_leaving_the_context_closes_the_connections():
    _, handler = answering({})
    with connected(handler) as client:
        client.health()

    with pytest.raises(RuntimeError, match="closed"):
        client.health()


def answered(listener: socket.socket) -> socket.socket:
    """The connection of whoever asked, who got an answer and may ask on."""
    accepted, _ = listener.accept()
    accepted.recv(1 << 16)
    body = b'{"status": "ok", "version": "1"}'
    accepted.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    return accepted


# Python 3.12 warns of it beside threads: the child here does no more than ask and end.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_read_the_answers_of_others():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(5)
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        parents = pool.submit(answered, listener)
        client.health()
        child = os.fork()
        if child == 0:
            os._exit(client.health() != Health(status="ok", version="1"))
        try:
            answered(listener).close()
        finally:
            parents.result().close()
            client.close()
            _, status = os.waitpid(child, 0)

    assert status == 0
