"""A trainer's parameters become an engine's by Atropos's bridge file, all of them or none."""

import base64
import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_models import fill, without_memory

from shmbus.weights import ManifestError, WeightsError, attach_bridge, bridge

GATE_UP, NORM = "model.layers.0.mlp.gate_up_proj.weight", "model.norm.weight"
SHAPES = {
    "model.embed_tokens.weight": (12, 4),
    "model.layers.0.self_attn.qkv_proj.weight": (8, 4),
    GATE_UP: (6, 4),
    NORM: (4,),
}
PARTS = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.mlp.gate_proj.weight": (3, 4),
    "model.layers.0.mlp.up_proj.weight": (3, 4),
    "model.norm.weight": (4,),
}


def engine_tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).view(
            shape
        )
        + at
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def said(
    tensors: dict[str, torch.Tensor], handle_of: Callable[[str], tuple[Any, ...]]
) -> dict[str, Any]:
    """Write what Atropos's patched runner writes, one handle in its nested form."""
    handles = {}
    for name, tensor in tensors.items():
        device, ipc, size, offset, counter, counter_offset, event, sync = handle_of(name)
        handles[name] = {
            "device_index": device, "ipc_handle_b64": encoded(ipc), "storage_size": size,
            "storage_offset_orig": offset,
            "ref_counter_handle_b64": {"_bytes_b64_": encoded(counter)},
            "ref_counter_offset": counter_offset, "event_handle_b64": encoded(event),
            "event_sync_required": sync, "tensor_storage_offset": tensor.storage_offset(),
            "shape": list(tensor.shape), "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype),
        }  # fmt: skip
    mappings = {
        name: {"shape": list(each.shape), "dtype": str(each.dtype)}
        for name, each in tensors.items()
    }
    return {
        "model": "m", "tp_degree": 1, "dp_shard_degree": 1, "param_mappings": mappings,
        "ipc_handles": handles, "num_params": len(mappings), "single_copy_enabled": True,
        "something_else": 3,
    }  # fmt: skip


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """An engine's tensors in this process, found by their handles."""
    made = engine_tensors()
    by_handle = {name.encode(): tensor for name, tensor in made.items()}

    def opened(handle: bridge._Handle) -> torch.Tensor:
        if handle.ipc_handle_b64 not in by_handle:
            raise RuntimeError("CUDA error: invalid resource handle")
        return by_handle[handle.ipc_handle_b64]

    monkeypatch.setattr(bridge, "_opened", opened)
    return made


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return said(
        tensors, lambda name: (0, name.encode(), tensors[name].nbytes, 0, b"c", 0, b"e", False)
    )


def test_a_step_of_the_trainer_is_in_the_engines_fused_tensors(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    (tmp_path / bridge.FILE).write_text(json.dumps(plain(tensors)))
    model = without_memory(PARTS, torch.float32)
    assert attach_bridge(model, tmp_path / "another.json") == tmp_path / bridge.FILE
    before = {name: each.clone() for name, each in tensors.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, each in tensors.items():
        wanted = before[name].clone()
        wanted[: 10 if "embed" in name else None] -= 1
        assert torch.equal(each, wanted), name


def given(name: str = "", **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a tensor's handle, or of the file itself."""
    return lambda file: (file["ipc_handles"][name] if name else file).update(fields)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (given(single_copy_enabled=False), WeightsError, "no handles|handles, and"),
        (given(tp_degree=2), ManifestError, "tp_degree 2"),
        (given(num_params=9), ManifestError, "num_params is 9"),
        (
            lambda file: file["ipc_handles"][NORM].pop("event_handle_b64"),
            ManifestError,
            "eight parts",
        ),
        (given(NORM, storage_size=8), ManifestError, "size mismatch"),
        (given(NORM, ipc_handle_b64=encoded(b"dead")), WeightsError, "engine that wrote it ended"),
        (lambda file: file["ipc_handles"].pop(NORM), ManifestError, f"missing: '{NORM}'"),
        (given(GATE_UP, shape=[5, 4], stride=[4, 1]), ManifestError, "expected|rows"),
    ],
)
def test_what_does_not_fit_changes_no_parameter(
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    kind: type[Exception],
    message: str,
) -> None:
    file = plain(tensors)
    change(file)
    if message.startswith("expected"):
        tensors[GATE_UP].resize_(5, 4)
    (tmp_path / bridge.FILE).write_text(json.dumps(file))
    model = without_memory(PARTS, torch.float32)
    with pytest.raises(kind, match=message):
        attach_bridge(model, tmp_path / bridge.FILE)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_written_file_is_that_of_atropos(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same handles; ours adds names and devices, as document and reader of Atropos have."""
    handles = {each.data_ptr(): name for name, each in tensors.items()}

    def exported(tensor: torch.Tensor) -> tuple[Any, ...]:
        name = handles[tensor.data_ptr()]
        return 0, name.encode(), tensors[name].nbytes, 0, b"c", 0, b"e", False

    with pytest.raises(WeightsError, match="on a CUDA device"):
        bridge.write_bridge(tmp_path, "m", tensors)
    monkeypatch.setattr(bridge, "_exported", exported)
    path = bridge.write_bridge(tmp_path / "logs", "m", tensors)
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    found, wanted = json.loads(path.read_text()), plain(tensors)
    for name, each in wanted["ipc_handles"].items():
        each["ref_counter_handle_b64"] = each["ref_counter_handle_b64"]["_bytes_b64_"]
        wanted["param_mappings"][name] |= {"vllm_name": name, "device": "cpu"}
    del wanted["something_else"]
    own = {"param_names": list(tensors), "shared_weights_enabled": True}
    assert found == wanted | own
    model = without_memory(PARTS, torch.float32)
    assert attach_bridge(model, path) == path
    assert model.get_parameter("model.norm.weight").data_ptr() in handles


def test_a_missing_file_names_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    with pytest.raises(WeightsError, match=r"logs/.*atropos_bridge"):
        attach_bridge(without_memory(PARTS, torch.float32))


def export(pipe: Connection, folder: str) -> None:
    """Be an engine on a device that writes a bridge file."""
    tensors = engine_tensors("cuda")
    bridge.write_bridge(Path(folder), "m", tensors)
    pipe.send("written")
    pipe.recv()
    torch.cuda.synchronize()
    pipe.send({name: each.cpu().tolist() for name, each in tensors.items()})


@pytest.mark.gpu
def test_torchs_own_handles_of_another_process_are_opened(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    engine = context.Process(target=export, args=(there, str(tmp_path)), daemon=True)
    engine.start()
    assert pipe.poll(120) and pipe.recv() == "written"
    model = without_memory(PARTS, torch.float32)
    attach_bridge(model, tmp_path / bridge.FILE)
    fill(model, 0)
    torch.cuda.synchronize()
    pipe.send("look")
    assert pipe.poll(120)
    found = {name: torch.tensor(values) for name, values in pipe.recv().items()}
    engine.join(60)
    for name, tensor in found.items():
        rows = 10 if "embed" in name else len(tensor)
        assert not tensor[:rows].any() and bool(tensor[rows:].all()), name
