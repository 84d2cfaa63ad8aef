"""The trajectory API of Atropos: shapes, statuses, groups of differing sizes, what comes back."""

import gzip
import json
from typing import Any

import numpy as np
from conftest import together, wait_until
from gateways import REGISTRATION, Gateway
from http_requests import request_bytes, reset, scored

import shmbus
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec
from shmbus.pool.server_rows import drop_dead_rows

EVERYTHING: dict[str, Any] = {
    "tokens": [[1, 2**63 - 1, -(2**63)], [4]],
    "masks": [[-100, 2, 3], [4]],
    "scores": [0.1, -1e30],
    "advantages": [[0.1, 0.2, 1 / 3], [5e-324]],
    "ref_logprobs": [[-0.1], []],
    "messages": [[{"role": "user", "content": "é\u0000x", "reward": None}], []],
    "generation_params": {"temperature": 0.7, "stop": ["a"]},
    "inference_logprobs": [[1.0, -2.302585092994046, -0.5], [-1.7976931348623157e308]],
    "overrides": [{"sft": True}, {}],
    "group_overrides": {"group_size": 2, "nested": {"deep": [1, None]}},
    "images": [["aGVsbG8="], None],
    "env_id": 0,
    "distill_token_ids": [[[1, 2], [3, 4], [5, 6]], [[7]]],
    "distill_logprobs": [[[-0.1, -0.2], [-0.3], []], [[-1.0]]],
}


def test_before_a_trainer_everything_says_so(gateway: Gateway) -> None:
    assert gateway.get("/").json() == {"message": "AtroposLib API"}
    assert gateway.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert gateway.get("/wandb_info").json() == {"group": None, "project": None}
    assert gateway.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert gateway.get("/latest_example").json()["tokens"] == []
    found = gateway.get("/batch").json()
    assert (found["status"], found["batch"]) == ("error", [])
    waiting = gateway.post("/register-env", {
        "max_token_length": 1, "desired_name": "e", "weight": 1, "group_size": 1,
    }).json()  # fmt: skip
    assert waiting == {"status": "wait for trainer to start"}
    assert gateway.post("/disconnect-env", {"env_id": 0}).json()["status"] == "failure"


def test_a_group_without_a_known_version_is_refused_and_may_come_again(gateway: Gateway) -> None:
    gateway.post("/register", REGISTRATION)
    url = "http://127.0.0.1:1"
    with PoolPublisher(gateway.name, "weights", spec=PoolSpec(slot_bytes=4096)) as publisher:
        publisher.begin(1, 1).finish()  # type: ignore[union-attr]
        PoolReader(gateway.name, "weights", label=f"{url} rank 0", keeps_row=True).close()
        refused = gateway.post("/scored_data", scored([1, 2], [3, 4]))
        assert refused.status == 503 and url in refused.json()["detail"]
        drop_dead_rows(gateway.name, lambda name: name == url)
        wait_until(lambda: gateway.post("/scored_data", scored([1, 2], [3, 4])).status == 200)
        publisher.close(remove=True)


def test_a_run_from_registration_to_reset(gateway: Gateway) -> None:
    assert isinstance(gateway.post("/register", REGISTRATION).json()["uuid"], int)
    assert gateway.get("/info").json() == {"batch_size": 4, "max_token_len": 512}
    assert gateway.get("/wandb_info").json() == {"group": "group", "project": "project"}
    assert gateway.batch() is None
    for number, name in enumerate(("math_0", "math_1")):
        answer = gateway.post("/register-env", {
            "max_token_length": 512, "desired_name": "math", "weight": 1.0, "group_size": 2,
        }).json()  # fmt: skip
        assert answer == {
            "status": "success", "env_id": number, "wandb_name": name, "starting_step": 0,
            "checkpoint_dir": "/checkpoints", "checkpoint_interval": 10, "num_steps": 100,
        }  # fmt: skip
    first, second = scored([1, 2], [3], env_id=0), scored([4], [5, 6], env_id=1)
    for group in (first, second):
        assert gateway.post("/scored_data", group).json() == {"status": "received"}
    assert gateway.get("/latest_example").json()["tokens"] == second["tokens"]
    assert gateway.get("/status").json() == {"current_step": 0, "queue_size": 2}
    batch = gateway.batch()
    assert [group["tokens"] for group in batch] == [first["tokens"], second["tokens"]]
    assert gateway.get("/status").json() == {"current_step": 1, "queue_size": 0}
    assert gateway.post("/disconnect-env", {"env_id": 1}).json() == {"status": "success"}
    assert gateway.get("/reset_data").body == b"Reset successful"
    assert gateway.get("/info").json()["batch_size"] == -1
    assert gateway.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert gateway.get("/latest_example").json()["tokens"] == second["tokens"]


def test_an_environment_without_a_name_is_given_one(gateway: Gateway) -> None:
    """Return BaseEnv's message for a wandb_name of None, the default."""
    gateway.post("/register", REGISTRATION)
    assert gateway.batch() is None
    new = {"max_token_length": 512, "desired_name": None, "weight": 1.0, "group_size": 2}
    for number in range(2):
        answer = gateway.post("/register-env", new)
        assert answer.status == 200
        assert answer.json()["wandb_name"] == f"environment_{number}"


def test_all_of_a_group_travels_at_equal_value(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    gateway.post("/scored_data", EVERYTHING)
    [found] = gateway.batch()
    assert found == EVERYTHING
    assert list(found) == list(EVERYTHING)
    for key in ("tokens", "scores", "advantages", "inference_logprobs"):
        assert json.dumps(found[key]) == json.dumps(EVERYTHING[key])


def test_what_is_absent_is_none_and_what_is_uneven_comes_back(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    uneven = {"messages": [], "advantages": [], "overrides": [{"a": 1}, {}, {}]}
    gateway.post("/scored_data", {**scored([1], [2]), **uneven})
    [found] = gateway.batch()
    assert {key: found[key] for key in uneven} == uneven
    assert found["images"] is found["distill_logprobs"] is found["env_id"] is None


def test_groups_of_differing_sizes_fill_batches(gateway: Gateway) -> None:
    gateway.register(batch_size=8)
    four, two = gateway.register_env(group_size=4), gateway.register_env(group_size=2)
    for _ in range(3):
        gateway.post("/scored_data", scored([1], [2], env_id=two))
    gateway.post("/scored_data", scored([1], [2], [3], [4], env_id=four))
    assert [len(group["tokens"]) for group in gateway.batch()] == [2, 2, 4]
    assert gateway.batch() is None
    assert gateway.get("/status").json()["queue_size"] == 1


def test_an_environment_with_a_minimum_has_its_share_of_each_batch(gateway: Gateway) -> None:
    gateway.register(batch_size=4)
    many = gateway.register_env()
    few = gateway.register_env(min_batch_allocation=0.5)
    for _ in range(3):
        gateway.post("/scored_data", scored([1], [2], env_id=many))
    assert gateway.batch() is None
    gateway.post("/scored_data", scored([3], [4], env_id=few))
    assert sorted(group["env_id"] for group in gateway.batch()) == [many, few]
    assert gateway.get("/status-env", {"env_id": many}).json()["unallocated_fraction"] == 0.5


def test_a_part_of_a_group_waits_for_the_rest(gateway: Gateway) -> None:
    gateway.register()
    env = gateway.register_env(group_size=4)
    assert [
        gateway.post("/scored_data", scored(*([[n]] * size), env_id=env)).json()
        for n, size in enumerate((1, 2, 1))
    ] == [{"status": "buffered", "buffer_size": n} for n in (1, 3, 0)]
    assert [len(group["tokens"]) for group in gateway.batch()] == [2, 1, 1]
    assert gateway.post("/scored_data_list", [scored([1], env_id=env), scored([2])]).json() == {
        "status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 1,
    }  # fmt: skip


def test_queue_and_weights_as_an_environment_is_told_them(gateway: Gateway) -> None:
    gateway.register(batch_size=64)
    heavy = gateway.register_env(weight=3.0)
    light = gateway.register_env(weight=1.0)
    for _ in range(5):
        gateway.post("/scored_data", scored([1], [2], env_id=heavy))
    gateway.post("/scored_data", scored([1], [2], env_id=light))
    assert gateway.get("/status-env", {"env_id": heavy}).json() == {
        "current_step": 0, "queue_size": 6, "unallocated_fraction": 1.0, "self_queue_size": 5,
        "max_group_size": 2, "env_weight": 0.75,
    }  # fmt: skip
    gateway.post("/disconnect-env", {"env_id": heavy})
    assert gateway.get("/status-env", {"env_id": light}).json()["env_weight"] == 1.0


def test_equal_groups_are_different_groups(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    for _ in range(3):
        assert gateway.post("/scored_data", scored([1], [2])).status == 200
    assert [len(gateway.batch()) for _ in range(3)] == [1, 1, 1]


def test_an_empty_group_is_received_and_stops_nothing(gateway: Gateway) -> None:
    gateway.register(batch_size=2)
    empty = {"tokens": [], "masks": [], "scores": []}
    assert gateway.post("/scored_data", empty).json() == {"status": "received"}
    assert gateway.post("/scored_data_list", []).json()["groups_processed"] == 0
    gateway.post("/scored_data", scored([1], [2]))
    assert len(gateway.batch()) == 1


def test_answers_are_compressed_where_that_is_asked_for(gateway: Gateway) -> None:
    gateway.register(batch_size=1)
    for _ in range(2):
        gateway.post("/scored_data", scored(list(range(1000))))
    assert "content-encoding" not in gateway.get("/latest_example").headers
    assert "content-encoding" not in gateway.get("/info", Accept_Encoding="gzip").headers
    packed = gateway.get("/batch", Accept_Encoding="gzip, deflate")
    assert packed.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed.body))["batch"][0]["tokens"] == [list(range(1000))]


def test_a_native_producer_feeds_the_same_batches(gateway: Gateway) -> None:
    gateway.register(batch_size=4)
    gateway.post("/scored_data", scored([1], [2]))
    with shmbus.Producer(gateway.name) as producer:
        for index in range(2):
            producer.put(
                "native", group_size=2, index=index, score=index,
                tokens=np.array([5, 6], np.int32), loss_mask=np.array([0, 1], np.uint8),
                logprobs=np.array([0, -0.5], np.float32),
            )  # fmt: skip
    batch = gateway.batch()
    assert batch[1]["tokens"] == [[5, 6], [5, 6]]
    assert batch[1]["masks"] == [[-100, 6], [-100, 6]]
    assert batch[1]["inference_logprobs"] == [[0.0, -0.5]] * 2


def test_environments_begin_where_the_trainer_reads_the_bus(bus_name: str, gateway_of: Any) -> None:
    with shmbus.Bus.create(bus_name, "4MiB"), shmbus.Consumer(bus_name) as consumer:
        gateway = gateway_of()
        assert gateway.post("/register", REGISTRATION).status == 200
        refused = gateway.get("/batch")
        assert (refused.status, "reads it itself" in refused.detail) == (409, True)
        env = gateway.register_env()
        for _ in range(3):
            gateway.post("/scored_data", scored([1, 2], [3], env_id=env))
        assert gateway.get("/status-env", {"env_id": env}).json()["queue_size"] == 3
        groups = consumer.take(8, timeout=10)
        assert [group[0]["loss_mask"].tolist() for group in groups] == [[0, 1]] * 3
        consumer.ack(groups)
        assert gateway.get("/status-env", {"env_id": env}).json()["queue_size"] == 0


def test_a_gateway_may_be_a_daemons_client(bus_name: str, daemon: Any, gateway_of: Any) -> None:
    daemon("--capacity", "8MiB")
    gateway = gateway_of("--daemon")
    gateway.register(batch_size=2)
    for number in range(3):
        gateway.post("/scored_data", scored([number], [2]))
    found = []
    while len(found) < 3:
        batch = gateway.batch()
        found += [group["tokens"][0][0] for group in batch or ()]
    assert found == [0, 1, 2]


def test_what_each_environment_is_told_follows_queue_and_shares(gateway: Gateway) -> None:
    """The aggregate of all that waits is made again whenever a part of it changes."""
    gateway.register()
    gateway.register_env()

    def told(env: int) -> tuple[int, int, float]:
        request = {"env_id": env}
        gateway.get("/status-env", request)
        found = gateway.get("/status-env", request).json()
        return found["queue_size"], found["self_queue_size"], found["unallocated_fraction"]

    assert told(0) == (0, 0, 1.0)
    gateway.post("/scored_data", scored([1], [1], env_id=0))
    assert told(0) == (1, 1, 1.0)
    other = gateway.register_env(min_batch_allocation=0.5)
    assert (told(0), told(other)) == ((1, 1, 0.5), (1, 0, 0.5))
    for _ in range(2):
        gateway.post("/scored_data", scored([1], [1], env_id=other))
    assert (told(0), told(other)) == ((2, 1, 0.5), (3, 2, 0.5))
    gateway.post("/disconnect-env", {"env_id": other})
    assert told(0) == (3, 1, 1.0)
    assert len(gateway.batch()) == 2
    assert told(0)[0] == 1
    assert gateway.post("/register", {**REGISTRATION, "batch_size": 8}).status == 200
    assert told(0)[0] == 3


def test_clients_that_poll_and_hang_up_leave_no_connection(gateway: Gateway) -> None:
    gateway.register()
    gateway.register_env()
    request = request_bytes("GET", "/status-env", {"env_id": 0})

    def hang_up(times: int) -> None:
        for number in range(times):
            connection = gateway.connect()
            connection.sendall(request)
            if number % 2:
                connection.recv(10)
            reset(connection)

    together(hang_up, [50] * 4)
    wait_until(lambda: gateway.metric("connections") == 1, what="the connections to be forgotten")
