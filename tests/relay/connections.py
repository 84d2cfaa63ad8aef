"""The relay's own connections, between processes that find each other in a directory."""

import contextlib
from pathlib import Path

import msgspec

from shmbus.relay.direct import Direct, Endpoint
from shmbus.relay.host import HostMailbox


def open_mailbox(directory: str, address: str, host: str = "127.0.0.1") -> HostMailbox:
    """Listen at a host; return the mailbox of what comes. A later one takes the address over."""
    place = Path(directory)

    def introduce(to: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = msgspec.msgpack.decode((place / f"{to}.endpoint").read_bytes(), type=Endpoint)
            direct.learn(found)

    direct = Direct(address, host, introduce, lambda packed, payload: mailbox.put(packed, payload))
    mailbox = HostMailbox(address, direct)
    new = place / f"{address}.new-endpoint"
    new.write_bytes(msgspec.msgpack.encode(direct.endpoint))
    new.rename(place / f"{address}.endpoint")
    return mailbox
