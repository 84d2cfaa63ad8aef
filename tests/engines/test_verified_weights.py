"""Serving ranks are compared with the version that their rows name, and only compared."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from fused_model import FusedModel, Shape
from operators import cli, usage
from small_sglang import SmallSglang
from small_vllm import SmallVllm, VerifiedVllm
from test_planned_loading import Packed, published
from test_planned_loading import Trainer as Decoder
from test_planned_loading import device as device
from trainers import SHORT_S, TIMEOUT_S, fleet_of

from shmbus.engines import EngineError, VllmServer
from shmbus.engines import verify as verifying
from shmbus.engines.rank_loader import PlannedLoader
from shmbus.engines.verify import ServerVerdict, verify, verify_server
from shmbus.pool import read_pool
from shmbus.pool.pool_file import pool_path
from shmbus.weights import WeightPublisher, plan_check
from shmbus.weights.load_plan import bits
from shmbus.weights.plan_check import compare_slice

pytest_plugins = ["engine_fixtures"]

EMBED, Q_PROJ = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
DOWN, QKV = "layers.1.down", "layers.0.qkv"
K_PROJ, DOWN_PROJ = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"


class PackedVllm(VerifiedVllm):
    kind = Packed


class Run:
    def __init__(self, bus: str, seed: int, running: Any) -> None:
        self.bus, self.running = bus, running
        self.decoder = Decoder(Shape(), seed)
        self.publisher = WeightPublisher(bus, self.decoder.source(), digests=True, slots=2)

    async def update(self, version: int) -> None:
        self.decoder.step()
        async with fleet_of(self.bus, self.running) as fleet:
            await fleet.update(self.publisher, version)

    async def verdict(self) -> ServerVerdict:
        return (await verify(self.bus, [], share=0.5, timeout=TIMEOUT_S))[0]

    async def flip(self, rank: int, parameter: str, *index: int) -> None:
        await self.running.post("/flip", {"rank": rank, "parameter": parameter, "index": index})


@pytest.fixture
def run(bus_name: str, seed: int, servers: Any) -> Any:
    made: list[Run] = []

    def start(ranks: int = 2, kind: Callable[[int], Any] = VerifiedVllm) -> Run:
        made.append(Run(bus_name, seed, servers(ranks, kind)))
        return made[-1]

    yield start
    for each in made:
        each.publisher.close()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_version_in_force_is_equal_on_every_rank(ranks: int, run: Any) -> None:
    own = run(ranks)
    for version in (1, 2):  # by the engine's loader, then by its plan
        await own.update(version)
        rows = read_pool(own.bus, "weights").readers
        told = await own.verdict()
        assert read_pool(own.bus, "weights").readers == rows
        assert [each.state for each in told.ranks] == ["equal"] * ranks
        assert (told.error, told.version, told.absent, told.failed) == ("", version, [], False)
        assert told.server == own.running.url
        assert told.life == rows[0].applied_life
        assert all(each.compared_bytes > 0 for each in told.ranks)
        assert told.share <= 0.5


@pytest.mark.parametrize(
    ("parameter", "index", "tensor", "element"),
    [
        (QKV, (128 + 3, 5), K_PROJ, (64 + 3) * 128 + 5),  # the fused k, cut by rows
        (DOWN, (7, 9), DOWN_PROJ, 7 * 256 + 128 + 9),  # cut by columns
        ("norm", (100,), "model.norm.weight", 100),
    ],
)
async def test_one_flipped_bit_in_one_rank_is_named(
    parameter: str, index: tuple[int, ...], tensor: str, element: int, run: Any
) -> None:
    own = run()
    await own.update(1)
    await own.flip(1, parameter, *index)
    told = await own.verdict()
    assert [each.state for each in told.ranks] == ["equal", "differs"]
    found = told.ranks[1]
    assert (found.tensor, found.block, found.offset) == (tensor, 0, 2 * element)
    assert (found.slot_damaged, told.failed) == (False, True)
    await own.update(2)
    assert not (await own.verdict()).failed


async def test_a_slot_that_fails_its_digest_is_blamed_and_the_ranks_are_not(run: Any) -> None:
    own = run(1)
    await own.update(1)
    wanted = own.decoder.get_parameter("model/norm/weight").detach().clone()
    raw = wanted.view(torch.uint8).numpy().tobytes()
    with open(pool_path(own.bus, "weights"), "r+b") as file:
        at = file.read().index(raw)
        os.pwrite(file.fileno(), bytes([raw[0] ^ 1]), at)
    found = (await own.verdict()).ranks[0]
    assert (found.state, found.tensor, found.offset) == ("differs", "model.norm.weight", 0)
    assert found.slot_damaged is True


async def test_a_repacked_tensor_is_not_comparable_by_name(run: Any) -> None:
    own = run(2, PackedVllm)
    await own.update(1)
    told = await own.verdict()
    assert [each.state for each in told.ranks] == ["equal in part"] * 2
    for each in told.ranks:
        assert set(each.not_comparable) == {EMBED, "model.norm.weight", "lm_head.weight"}
    for parameter, tensor in ((QKV, Q_PROJ), ("embed", EMBED)):
        await own.flip(0, parameter, 0, 0)
        found = (await own.verdict()).ranks[0]
        assert (found.state, found.tensor, found.offset) == ("differs", tensor, 0)


def test_the_command_exits_with_1_where_a_bit_differs(run: Any) -> None:
    own = run()
    asyncio.run(own.update(1))
    line = ("weights", own.bus, "--verify", "--share", "0.5")
    equal = cli(*line, "--server", own.running.url)
    assert (equal.status, equal.err) == (0, ""), equal.err
    asyncio.run(own.flip(1, QKV, 131, 5))
    differs = usage(*line)
    assert differs.status == 1 and K_PROJ in differs.out and "rank 1" in differs.out
    (told,) = usage(*line, "--json").json()
    assert [each["state"] for each in told["ranks"]] == ["equal", "differs"]
    assert told["version"] == 1 and told["life"] and told["share"] <= 0.5


class Between(VllmServer):
    slices = 0
    action: Callable[[], Awaitable[None]]

    async def verify(self, asked: Any, timeout: float) -> list[object]:
        self.slices += 1
        if self.slices == 2:
            await self.action()
        return await super().verify(asked, timeout)


async def test_slices_are_bounded_and_leaseless(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = run()
    await own.update(1)
    server = Between(own.running.url)
    held: list[list[int]] = []

    async def look() -> None:
        held.extend(row.holds for row in read_pool(own.bus, "weights").readers)

    server.action = look
    monkeypatch.setattr(verifying, "SLICE_S", 0.0)
    told = await verify_server(own.bus, server, 0.5, TIMEOUT_S)
    assert [each.state for each in told.ranks] == ["equal", "equal"]
    assert held == [[], []]
    assert server.slices > 20, "a slice without time compares one part"
    assert told.share <= 0.5


async def test_an_update_ends_the_check(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = run()
    await own.update(1)
    server = Between(own.running.url)
    server.action = lambda: own.update(2)
    monkeypatch.setattr(verifying, "SLICE_S", 0.0)
    with pytest.raises(EngineError) as caught:
        await verify_server(own.bus, server, 0.5, TIMEOUT_S)
    assert (caught.value.step, caught.value.server) == ("verify", own.running.url)
    assert "publication 2" in caught.value.body
    assert not (await own.verdict()).failed


async def taken_over(own: Run) -> None:
    for version in (2, 3, 4):
        own.decoder.step()
        own.publisher.publish(version=version)


async def new_pool(own: Run) -> None:
    own.publisher.close()
    own.publisher = WeightPublisher(own.bus, own.decoder.source())
    own.publisher.publish(version=1)


async def update_open(own: Run) -> None:
    server = own.running.server()
    await server.pause("keep", False, TIMEOUT_S)
    await server.post("start", "/start_weight_update", TIMEOUT_S)


@pytest.mark.parametrize(
    ("action", "said", "asks_ranks"),
    [
        (taken_over, "version 1", False),
        (new_pool, "has a row", False),
        (update_open, "an update", False),
        (lambda own: own.running.server().pause("keep", False, TIMEOUT_S), "is paused", False),
        (lambda own: own.running.fault("rpc", "few"), "ranks [1]", True),
    ],
)
async def test_a_misfit_is_named(action: Any, said: str, asks_ranks: bool, run: Any) -> None:
    own = run()
    await own.update(1)
    await action(own)
    rows = read_pool(own.bus, "weights").readers
    (told,) = await verify(own.bus, [own.running.url], share=0.5, timeout=TIMEOUT_S)
    assert said in told.error and own.running.url in told.error
    assert (told.failed, told.ranks) == (True, [])
    assert read_pool(own.bus, "weights").readers == rows
    assert any(step == "verify" for step, _ in await own.running.calls()) == asks_ranks


@pytest.mark.parametrize(
    ("kind", "step", "status"),
    [
        (SmallVllm, "verify", None),
        (SmallSglang, "verify", 404),
        (None, "get_world_size", None),
    ],
)
async def test_a_server_that_never_took_a_version_is_asked_nothing(
    kind: Any, step: str, status: int | None, run: Any, servers: Any
) -> None:
    own = run()
    await own.update(1)
    url = "http://127.0.0.1:9" if kind is None else servers(1, kind).url
    with pytest.raises(EngineError) as caught:
        await verify_server(own.bus, VllmServer(url), 0.5, SHORT_S)
    assert (caught.value.step, caught.value.status) == (step, status)
    assert caught.value.gone == (kind is None)


@pytest.mark.parametrize("words", [("--verify",), ("--verify", "--server", "none")])
def test_no_servers_and_wrong_addresses_are_errors(words: tuple[str, ...], bus_name: str) -> None:
    ended = usage("weights", bus_name, *words)
    assert ended.status == 1 and "Traceback" not in ended.err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("part_bytes", [512, 1 << 20])
def test_every_element_of_every_copy_is_compared_across_devices_and_casts(
    device: torch.device,
    dtype: torch.dtype,
    part_bytes: int,
    bus_name: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_check, "PART_BYTES", part_bytes)
    shape = Shape(experts=2)
    model = FusedModel(shape._replace(dtype=dtype), 1, 2, device)
    loader = PlannedLoader(model, device, lambda tensors, _: model.load_weights(tensors))
    random = torch.Generator().manual_seed(seed)
    with published(bus_name, Decoder(shape, seed), device) as following, following() as weights:
        loader.load(weights)
        lasting = weights.lasting()
        assert lasting is not None

        def differs() -> int | None:
            return compare_slice(loader.comparable, lasting[1], 0, 0, math.inf).differs

        assert differs() is None
        for copy in loader.comparable:
            index = tuple(int(torch.randint(n, (), generator=random)) for n in copy.target.shape)
            element = bits(copy.target)[index]
            element ^= 1
            steps = zip(index, copy.source.strides, strict=True)
            at = sum(number * step for number, step in steps) * copy.source.dtype.itemsize
            assert differs() == copy.source.start + at
            element ^= 1
        assert differs() is None
