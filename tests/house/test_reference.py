"""Every public module has its names in the API reference of the site."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Where each module is public; one with a leading underscore is not.
ROOMS = ("shmbus/batch", "shmbus/peers", "trainer_adapter", "trainer_adapter/adapters")
#: Packages whose own `__all__` says what is public in them.
PACKAGES = {
    "shmbus",
    "shmbus.channel",
    "shmbus.pool",
    "shmbus.relay",
    "trainer_adapter",
    "trainer_adapter.adapters.atropos",
    "trainer_adapter.adapters.prime_rl",
    "trainer_adapter.adapters.torchtitan",
    "trainer_adapter.adapters.trl",
    "trainer_adapter.attention",
    "trainer_adapter.channel",
    "trainer_adapter.engines",
    "trainer_adapter.weights",
}
#: Public for other packages of this project, and why no user needs their page.
WITHOUT_A_PAGE = {
    "shmbus.batch.field_names": "FieldNames is on the page of shmbus.batch.gather",
    "shmbus.batch.field_presence": "a check that gather makes",
    "shmbus.batch.uninterrupted": "how batches are made whole under signals",
    "shmbus.peers.atropos_queue": "the gateway's order of groups",
    "trainer_adapter.adapters.ended": "what adapters say of groups that never come",
    "trainer_adapter.adapters.parted": "prompt and response, for the verl and SkyRL adapters",
    "trainer_adapter.adapters.place": "where put_episode puts",
    "trainer_adapter.adapters.splits": "how adapters take evaluations",
    "trainer_adapter.adapters.stack": "the names of other stacks, for all adapters",
}


def exported(path: Path) -> bool:
    return any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in ast.parse(path.read_text()).body
    )


def public_modules() -> set[str]:
    found = set(PACKAGES)
    for room in ROOMS:
        for path in (ROOT / room).glob("*.py"):
            if not path.name.startswith("_") and exported(path):
                found.add(".".join([*room.split("/"), path.stem]))
    return found


def modules_of_the_reference() -> set[str]:
    for node in ast.parse((ROOT / "docs" / "site.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REFERENCE":
            pages = ast.literal_eval(node.value)
            return {module for _, _, modules in pages.values() for module in modules}
    raise LookupError("docs/site.py has no REFERENCE")


def test_every_public_module_is_in_the_reference() -> None:
    assert public_modules() - modules_of_the_reference() == WITHOUT_A_PAGE.keys()


def test_the_reference_has_public_modules_only() -> None:
    assert modules_of_the_reference() <= public_modules()
