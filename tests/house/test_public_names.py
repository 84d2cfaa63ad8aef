"""Names that users and their tests rely on: none goes, and `import shmbus` reaches the packages."""

import importlib
import subprocess
import sys

import pytest

NAMES = {
    "shmbus": "Annotator Bus BusBusyError BusClosedError BusExistsError BusFullError "
    "BusNotFoundError BusRemovedError Consumer DaemonUnavailableError Feeder Group "
    "LayoutMismatchError Producer ProtocolError RecordTooLargeError Session ShmbusError unlink",
    "shmbus.engines": "EngineFleet LoraFleet ManagedServer SglangServer VllmServer",
    "shmbus.relay": "start",
    "shmbus.tensors": "TensorChannel",
    "shmbus.weights": "ModuleSource ShardedSource WeightPublisher WeightSubscriber probe_carriers",
    "shmbus.Bus": "create ensure open",
    "shmbus.Consumer": "__aiter__ __iter__ atake request stats take",
    "shmbus.Group": "ack copy scores to_dict",
    "shmbus.Producer": "aput aput_group aput_many awaited cache_salt put put_group put_many "
    "requests reserve session stats",
    "shmbus.engines.EngineFleet": "catch_up sleep update update_sync wake",
    "trainer_adapter": "OnlineDataHandler group_advantages logprob_mismatch pack pad_input "
    "unpad_input varlen_attention",
    "trainer_adapter.Batch": "asdict num_sequences num_tokens to",
    "trainer_adapter.OnlineDataHandler": "ack load_state_dict metrics next_batch note_mismatch "
    "offer request set_policy_version state_dict",
    "trainer_adapter.adapters.trl": "ShmbusRolloutWorker ShmbusRollouts ShmbusWeights",
    "trainer_adapter.losses": "policy_loss",
}


@pytest.mark.parametrize("place", NAMES)
def test_the_names_are_there(place: str) -> None:
    module, _, name = place.rpartition(".")
    is_class = name[:1].isupper()
    found = importlib.import_module(module if is_class else place)
    if is_class:
        found = getattr(found, name)
    assert not [each for each in NAMES[place].split() if not hasattr(found, each)]


def test_packages_are_attributes_after_one_import() -> None:
    code = "import shmbus\nshmbus.relay.start, shmbus.weights, shmbus.engines, shmbus.tensors"
    subprocess.run([sys.executable, "-c", code], check=True)
