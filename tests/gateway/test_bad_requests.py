"""Wrong requests get a status and a sentence, never 500; the gateway serves on."""

import gzip
import json
from typing import Any, NamedTuple

import pytest
from gateways import ENVIRONMENT, REGISTRATION, Gateway, serving
from http_answers import read_answer
from http_requests import request_bytes, scored

GOOD = scored([1, 2], [3, 4])
TINY = scored([1])
#: More levels than a meta may have.
DEEP = json.loads('{"a": ' * 200 + "0" + "}" * 200)
#: What is left of a character that was cut in two, as json.dumps writes it.
HALF = "\ud83d"


def raw(group: dict[str, Any], **texts: str) -> bytes:
    """A group as JSON in which quoted marks stand for texts that json.dumps does not write."""
    body = json.dumps(group)
    for mark, text in texts.items():
        body = body.replace(f'"{mark}"', text)
    return body.encode()


class Case(NamedTuple):
    name: str
    method: str
    path: str
    content: Any
    status: int
    says: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012  (never changed)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


CASES = [
    Case("good", "POST", "/scored_data", GOOD, 200),
    Case("token as text", "POST", "/scored_data", {**GOOD, "tokens": [["1", 2], [3, 4]]}, 200),
    Case("token 1.0", "POST", "/scored_data", {**GOOD, "tokens": [[1.0, 2], [3, 4]]}, 200),
    Case("mask true", "POST", "/scored_data", {**GOOD, "masks": [[True, 2], [3, False]]}, 200),
    Case("score of int", "POST", "/scored_data", {**GOOD, "scores": [1, 0]}, 200),
    Case("unknown keys", "POST", "/scored_data", {**GOOD, "more": {"a": 1}}, 200),
    Case("unknown env_id", "POST", "/scored_data", {**GOOD, "env_id": 99}, 200),
    Case("env_id -1", "POST", "/scored_data", {**GOOD, "env_id": -1}, 200),
    Case("empty group", "POST", "/scored_data", {"tokens": [], "masks": [], "scores": []}, 200),
    Case("empty list", "POST", "/scored_data_list", [], 200),
    Case("empty sequence", "POST", "/scored_data", 
         {**scored([], [1]), "masks": [[], [1]]}, 200),
    Case("options", "OPTIONS", "/scored_data", None, 200),
    Case("disconnect unknown", "POST", "/disconnect-env", {"env_id": 99}, 200),
    Case("key twice", "POST", "/scored_data",
         json.dumps(GOOD).encode()[:-1] + b', "tokens": [[5, 6], [7, 8]]}', 200),
    Case("token -2**63", "POST", "/scored_data", {**GOOD, "tokens": [[-(2**63), 2], [3, 4]]}, 200),
    Case("malformed", "POST", "/scored_data", b'{"tokens": [[1]', 422, "expected JSON"),
    Case("no body", "POST", "/scored_data", b"", 422, "expected JSON"),
    Case("null", "POST", "/scored_data", None, 415, "application/json"),
    Case("array", "POST", "/scored_data", [GOOD], 422, "object"),
    Case("object for list", "POST", "/scored_data_list", GOOD, 422, "array"),
    Case("number", "POST", "/scored_data", 7, 422, "object"),
    Case("not UTF-8", "POST", "/scored_data", b'{"tokens": "\xff"}', 422, "expected JSON"),
    Case("deep", "POST", "/scored_data", b"[" * 100_000, 422),
    Case("no tokens", "POST", "/scored_data", without("tokens"), 422, "tokens"),
    Case("no masks", "POST", "/scored_data", without("masks"), 422, "masks"),
    Case("no scores", "POST", "/scored_data", without("scores"), 422, "scores"),
    Case("token 1.5", "POST", "/scored_data", {**GOOD, "tokens": [[1.5], [3]]}, 422, "tokens"),
    Case("token 01", "POST", "/scored_data",
         raw({**GOOD, "tokens": [["@", 2], [3, 4]]}, **{"@": "01"}), 422, "expected JSON"),
    Case("comma at the end", "POST", "/scored_data",
         raw({**GOOD, "tokens": [[1, "@"], [3, 4]]}, **{"@": ""}), 422, "expected JSON"),
    Case("half a list", "POST", "/scored_data_list", json.dumps([GOOD, GOOD]).encode()[:-9], 422,
         "expected JSON"),
    Case("byte order mark", "POST", "/scored_data",
         b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), 200),
    Case("tokens 0", "POST", "/scored_data", {**GOOD, "tokens": 0}, 422, "tokens"),
    Case("deeper tokens", "POST", "/scored_data", {**GOOD, "tokens": [[[1], 2], [3, 4]]}, 422,
         "tokens"),
    Case("token null", "POST", "/scored_data", {**GOOD, "tokens": [[None], [3]]}, 422, "tokens"),
    Case("flat tokens", "POST", "/scored_data", {**GOOD, "tokens": [1, 2]}, 422, "tokens"),
    Case("score null", "POST", "/scored_data", {**GOOD, "scores": [None, 1]}, 422, "scores"),
    Case("score as text", "POST", "/scored_data", {**GOOD, "scores": ["high", 1]}, 422, "scores"),
    Case("message without role", "POST", "/scored_data",
         {**GOOD, "messages": [[{"content": "x"}], []]}, 422, "'role'"),
    Case("message of text", "POST", "/scored_data", {**GOOD, "messages": [["x"], []]}, 422),
    Case("list with one bad", "POST", "/scored_data_list", [GOOD, without("masks")], 422, "masks"),
    Case("score NaN", "POST", "/scored_data", {**GOOD, "scores": [float("nan"), 1]}, 422, "NaN"),
    Case("score -Infinity", "POST", "/scored_data", {**GOOD, "scores": [float("-inf"), 1]}, 422,
         "finite"),
    Case("logprob NaN", "POST", "/scored_data",
         {**GOOD, "inference_logprobs": [[float("nan")], []]}, 422, "NaN"),
    Case("score 1e999", "POST", "/scored_data", raw({**GOOD, "scores": ["@", 1]}, **{"@": "1e999"}),
         422),
    Case("score 1e39", "POST", "/scored_data", {**GOOD, "scores": [1, 1e39]}, 422,
         "scores[1]: expected a number within 1e+38, got 1e+39"),
    Case("score 10**39", "POST", "/scored_data", {**GOOD, "scores": [-(10**39), 1]}, 422,
         "scores[0]: expected a number within 1e+38, got -1e+39"),
    Case("list with one large score", "POST", "/scored_data_list",
         [TINY, {**GOOD, "scores": [1e39, 1]}], 422, "scores[0]"),
    Case("list with one deep meta", "POST", "/scored_data_list",
         [TINY, {**GOOD, "overrides": [DEEP, {}]}], 422, "at most 128"),
    Case("token 2**70", "POST", "/scored_data", {**GOOD, "tokens": [[2**70, 2], [3, 4]]}, 422,
         "beyond 64 bits"),
    Case("token 2**63", "POST", "/scored_data", {**GOOD, "tokens": [[2**63, 2], [3, 4]]}, 422,
         "64-bit"),
    Case("env_id 2**70", "POST", "/scored_data", {**GOOD, "env_id": 2**70}, 422),
    Case("fewer scores", "POST", "/scored_data", {**GOOD, "scores": [1.0]}, 422, "one for each"),
    Case("fewer masks", "POST", "/scored_data", {**GOOD, "masks": [[1, 2]]}, 422, "one for each"),
    Case("shorter mask", "POST", "/scored_data", {**GOOD, "masks": [[1], [3, 4]]}, 422,
         "one for each token"),
    Case("tokens null", "POST", "/scored_data", {**GOOD, "tokens": None}, 422, "tokens"),
    Case("masks null", "POST", "/scored_data", {**GOOD, "masks": None}, 422, "masks"),
    Case("parameter 1e400", "POST", "/scored_data",
         raw({**GOOD, "generation_params": {"top_p": "@"}}, **{"@": "1e400"}), 422, "finite"),
    Case("half a surrogate pair", "POST", "/scored_data", {**GOOD, "images": [HALF, ""]}, 422,
         "half of a surrogate pair"),
    Case("the same in an unknown key", "POST", "/scored_data", {**GOOD, HALF: 1}, 422,
         "half of a surrogate pair"),
    Case("too many groups", "POST", "/scored_data_list", [TINY] * 65_536, 422, "at most 65535"),
    Case("text/plain", "POST", "/scored_data", GOOD, 415, "application/json",
         {"Content_Type": "text/plain"}),
    Case("no type", "POST", "/scored_data", GOOD, 415, "application/json", {"Content_Type": ""}),
    Case("head of what acts", "HEAD", "/batch", None, 405),
    Case("status of unknown", "GET", "/status-env", {"env_id": 99}, 404, "register-env"),
    Case("status of -1", "GET", "/status-env", {"env_id": -1}, 404, "register-env"),
    Case("status without body", "GET", "/status-env", None, 415, "application/json"),
    Case("status of text", "GET", "/status-env", {"env_id": "x"}, 422, "env_id"),
    Case("large status", "GET", "/status-env", b" " * 70_000, 413, "65536 bytes"),
    Case("batch size 0", "POST", "/register", {**REGISTRATION, "batch_size": 0}, 422, "batch_size"),
    Case("no batch size", "POST", "/register", {"wandb_group": "g"}, 422),
    Case("endless name", "POST", "/register", {**REGISTRATION, "wandb_group": "g" * 2000}, 422,
         "1024 characters"),
    Case("name with half a pair", "POST", "/register", {**REGISTRATION, "wandb_group": HALF}, 422,
         "half of a surrogate pair"),
    Case("endless batch", "POST", "/register", {**REGISTRATION, "batch_size": 2**70}, 422,
         "batch_size"),
    Case("environment of half a pair", "POST", "/register-env",
         {**ENVIRONMENT, "desired_name": HALF}, 422, "half of a surrogate pair"),
    Case("infinite weight", "POST", "/register-env",
         raw({**ENVIRONMENT, "weight": "@"}, **{"@": "1e400"}), 422, "finite"),
    Case("weight nan", "POST", "/register-env", {**ENVIRONMENT, "weight": "nan"}, 422, "weight"),
    Case("more than all of a batch", "POST", "/register-env",
         {**ENVIRONMENT, "min_batch_allocation": 1.5}, 422, "min_batch_allocation"),
    Case("endless context", "POST", "/register-env", {**ENVIRONMENT, "max_token_length": 10**400},
         422, "max_token_length"),
    Case("group size 0", "POST", "/register-env", {**ENVIRONMENT, "group_size": 0}, 422),
    Case("endless group", "POST", "/register-env", {**ENVIRONMENT, "group_size": 10**12}, 422),
    Case("reset by a page", "GET", "/reset_data", None, 403, "another site",
         {"Sec_Fetch_Site": "cross-site"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("children"), "bad-requests", "--create", "4MiB") as found:
        found.register(batch_size=2)
        found.register_env()
        yield found


def still_serves(gateway: Gateway) -> None:
    while gateway.batch() is not None:
        pass
    assert gateway.post("/scored_data", scored([7], [8])).status == 200
    [group] = gateway.batch()
    assert group["tokens"] == [[7], [8]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_answered_and_nothing_is_lost(shared: Gateway, case: Case) -> None:
    before = shared.get("/status").json()["queue_size"]
    answer = shared.ask(case.method, case.path, case.content, **case.headers)
    assert answer.status == case.status, answer
    if case.says:
        assert case.says in answer.detail
    if case.status == 422:
        assert shared.get("/status").json()["queue_size"] == before, "a refused body put a group"
    still_serves(shared)


def test_before_registration_too(gateway: Gateway) -> None:
    assert gateway.get("/status-env", {"env_id": 0}).status == 404
    assert gateway.post("/scored_data", GOOD).status == 200
    assert gateway.post("/register", {**REGISTRATION, "batch_size": 2}).status == 200
    assert gateway.get("/info").json()["batch_size"] == 2
    assert len(gateway.batch()) == 1


def test_environments_that_all_disconnected_are_answered(gateway: Gateway) -> None:
    gateway.register()
    env = gateway.register_env()
    gateway.post("/disconnect-env", {"env_id": env})
    answer = gateway.get("/status-env", {"env_id": env})
    assert (answer.status, answer.json()["env_weight"]) == (200, 0.01)


def talk(gateway: Gateway, data: bytes) -> bytes:
    with gateway.connect() as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found


def test_requests_of_one_connection_are_answered_in_order(shared: Gateway) -> None:
    still_serves(shared)
    tokens = [[[1], [2]], [[3], [4]]]
    first, second = (request_bytes("POST", "/scored_data", scored(*rows)) for rows in tokens)
    requests = (first, request_bytes("GET", "/info"), second)
    with shared.connect() as connection:
        for request in requests:
            connection.sendall(request)
            assert read_answer(connection).status == 200
    assert [shared.batch()[0]["tokens"] for _ in tokens] == tokens
    end = request_bytes("GET", "/info", Connection="close")
    _, *answers = talk(shared, b"".join(requests) + end).split(b"HTTP/1.1 200 ")
    assert [b"batch_size" in answer for answer in answers] == [False, True, False, True]
    assert [shared.batch()[0]["tokens"] for _ in tokens] == tokens


@pytest.mark.parametrize(("limit", "option"), [(1, "--body-limit"), (8, "--memory")])
def test_a_bomb_is_refused_before_it_is_inflated(limit: int, option: str, gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB", "--body-limit", limit, "--memory", 9 - limit)
    bomb = gzip.compress(b" " * (200 << 20), 6)
    assert gateway.post("/scored_data", bomb, Content_Encoding="gzip").status == 413
    lying = bomb[:-4] + (1000).to_bytes(4, "little")
    assert gateway.post("/scored_data", lying, Content_Encoding="gzip").status == 413
    large = gateway.ask("POST", "/scored_data", b" " * (1 << 20) + b"  ")
    assert (large.status, option in large.detail) == (413, True)
    assert gateway.peak_kib() < 200 << 10


def test_a_token_is_asked_for(gateway_of: Any, tmp_path: Any) -> None:
    (tmp_path / "token").write_text("secret\n")
    gateway = gateway_of("--create", "4MiB", "--token-file", tmp_path / "token")
    assert gateway.get("/healthz").status == 200
    for given in ("", "Bearer wrong", "secret", "Bearer secre", "Bearer", "Basic secret"):
        answer = gateway.get("/info", Authorization=given)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert gateway.post("/scored_data", GOOD, Authorization=given).status == 401
    for allowed in ("Bearer secret", "bearer secret", "BEARER  secret"):
        assert gateway.get("/info", Authorization=allowed).status == 200
    assert gateway.get("/status").status == 401


def test_pages_of_this_machine_may_read_what_only_looks(shared: Gateway) -> None:
    origin = "http://localhost:3000"
    assert shared.get("/status", Origin=origin).headers["access-control-allow-origin"] == origin
    assert "access-control-allow-origin" not in shared.get("/batch", Origin=origin).headers
    other = shared.get("/status", Origin="https://evil.example")
    assert "access-control-allow-origin" not in other.headers
    asked = shared.ask("OPTIONS", "/status", None, Origin=origin)
    assert (asked.status, asked.headers["access-control-allow-methods"]) == (200, "GET")
