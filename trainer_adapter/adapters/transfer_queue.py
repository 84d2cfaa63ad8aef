"""A storage backend of TransferQueue in shared memory: each value is a file of tmpfs.

::

    register = "trainer_adapter.adapters.transfer_queue.register"  # in every process
    ray.init(runtime_env={"worker_process_setup_hook": register})
    backend = {"storage_backend": "Shmbus", "Shmbus": {"store": "run1"}}
    tq.init(OmegaConf.create({"backend": backend}))

Importing this module registers the backend; processes that Ray starts do so by that hook.

A put writes a tensor's bytes once, a get maps them: no process lies between, nothing is serialised.

Invariants:

- A value is there whole or not at all: it is written beside, and renamed. What was read stays what
  it was when its key is put again or cleared, and may be written to: pages are private.
- A full /dev/shm is an error of the put, never a signal.
- The store goes with the process that made it. One that a kill left is removed by the next of its
  name, and never one that a living process holds.

The interface is TransferQueue's, as of 0.1.11: a client, a manager and a bootstrap by this name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import torch

from shmbus import BusBusyError, CapacityError, DamagedError
from trainer_adapter.adapters.optional_imports import Stack

__all__ = ["ShmbusStorageClient", "ShmbusStorageManager", "Store", "register"]

_QUEUE: Final = Stack("TransferQueue", {"TransferQueue": "0.1.11"}, "TransferQueue==0.1.11")
StorageClientFactory, StorageKVClient = _QUEUE.needed(
    "transfer_queue.storage.clients.base", "StorageClientFactory", "StorageKVClient"
)
StorageManagerFactory, KVStorageManager = _QUEUE.needed(
    "transfer_queue.storage.managers.base", "StorageManagerFactory", "KVStorageManager"
)
(StorageBootstrapProvider,) = _QUEUE.needed(
    "transfer_queue.storage.bootstrap", "StorageBootstrapProvider"
)
encode, decode = _QUEUE.needed("transfer_queue.utils.serial_utils", "encode", "decode")

#: How the backend is called in TransferQueue's configuration.
BACKEND: Final = "Shmbus"
#: Where stores lie. The names of buses and of what goes with them are others.
_PREFIX: Final = "/dev/shm/shmbus+queue."
#: Bytes of a store's name: with the prefix it is a file name.
_MAX_NAME_BYTES: Final = 200
#: Up to here a value is read, not mapped: a process has 65,530 mappings, and copying takes
#: microseconds.
_READ_BYTES: Final = 1 << 18
#: Where a value's bytes begin, so that any dtype is aligned.
_ALIGNMENT: Final = 64
_SIZE_BYTES: Final = 4
#: Parts that one call writes: IOV_MAX of Linux.
_PARTS: Final = 1024
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_PARTIAL: Final = itertools.count()
#: What a checkpoint has of a store.
_SAVED: Final = "shmbus_values"


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What a value's file begins with."""

    #: Of a tensor; "" of any other value, which TransferQueue has encoded.
    dtype: str
    shape: tuple[int, ...]
    #: Bytes of each part.
    parts: tuple[int, ...]


_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode


class Store:
    """The folder of a store, and its removal with this process.

    Parameters
    ----------
    name : str
        Of the store.

    Raises
    ------
    BusBusyError
        A living process has a store of this name.
    PermissionError
        Something of another user is there.
    """

    def __init__(self, name: str) -> None:
        self.path: Final = _path_of(name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        folder = _open_folder(self.path)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise BusBusyError(
                f"store {name!r}: expected no process that has it, got one that is alive; end "
                f"that, or give {BACKEND}.store another name"
            ) from None
        for left in os.listdir(folder):
            os.unlink(left, dir_fd=folder)
        self._end = weakref.finalize(self, _remove, folder, self.path, os.getpid())

    def close(self) -> None:
        """Remove it; what was read stays."""
        self._end()


@StorageBootstrapProvider.register_provider(BACKEND)  # type: ignore[untyped-decorator]
def make_store(config: Any) -> Store:
    """Make the store, in the process that calls ``tq.init`` first.

    Parameters
    ----------
    config : DictConfig
        TransferQueue's.

    Returns
    -------
    Store
        Which TransferQueue keeps until it is closed.
    """
    return Store(config.backend[BACKEND].store)


@StorageManagerFactory.register(BACKEND)
class ShmbusStorageManager(KVStorageManager):  # type: ignore[misc, valid-type]
    """TransferQueue's manager of stores of keys, with this client.

    Parameters
    ----------
    controller_info, config, zmq_context
        TransferQueue's; the configuration has the name of the store.
    """

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        config = {**config, "client_name": "ShmbusStorageClient"}
        super().__init__(controller_info, config, zmq_context=zmq_context)
        self._path: Final = _path_of(config["store"])

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy what is in the store.

        Parameters
        ----------
        checkpoint_dir : str
            TransferQueue's, which has a folder of the store's own in it then.
        """
        saved = os.path.join(checkpoint_dir, _SAVED)
        os.makedirs(saved, exist_ok=True)
        _copy_values(self._path, saved)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy values back, in place of those that their keys have.

        Parameters
        ----------
        checkpoint_dir : str
            TransferQueue's.

        Raises
        ------
        FileNotFoundError
            Another backend has saved it.
        """
        saved = os.path.join(checkpoint_dir, _SAVED)
        if not os.path.isdir(saved):
            raise FileNotFoundError(
                errno.ENOENT,
                f"expected the values of a store in {saved}, got none; another backend has saved "
                "this checkpoint: load it with that one",
            )
        _copy_values(saved, self._path)


@StorageClientFactory.register("ShmbusStorageClient")
class ShmbusStorageClient(StorageKVClient):  # type: ignore[misc, valid-type]
    """Puts values into a store, gets and clears them.

    Parameters
    ----------
    config : mapping
        With ``store``, the name that the store was made with, on this machine.

    Raises
    ------
    FileNotFoundError
        There is no such store on this machine.
    PermissionError
        It is another user's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._name: Final[str] = config["store"]
        path = _path_of(self._name)
        try:
            self._folder: Final = _open_folder(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                errno.ENOENT,
                f"store {self._name!r}: expected {path} on this machine, got none; the store is "
                "made by the process that calls tq.init first, on the same machine",
            ) from None
        weakref.finalize(self, os.close, self._folder)

    def put(self, keys: list[str], values: list[Any]) -> None:
        """Write values, in place of those that their keys had.

        Parameters
        ----------
        keys : list of str
            As many as values.
        values : list
            Tensors of any dtype, on any device; all else as TransferQueue encodes it.

        Raises
        ------
        CapacityError
            /dev/shm is full; the values before are there.
        """
        for key, value in zip(keys, values, strict=True):
            name = _file_of(key)
            partial = f".{os.getpid()}-{next(_PARTIAL)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(partial, flags, 0o600, dir_fd=self._folder)
            try:
                _write(fd, _parts_of(value))
                os.rename(partial, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException as error:
                os.unlink(partial, dir_fd=self._folder)
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise CapacityError(
                        f"store {self._name!r}: expected room for the value of {key!r} in "
                        "/dev/shm, got none; clear what was trained on, or enlarge it (mount -o "
                        "remount,size=)"
                    ) from error
                raise
            finally:
                os.close(fd)

    def get(
        self,
        keys: list[str],
        shapes: Any = None,
        dtypes: Any = None,
        custom_backend_meta: Any = None,
    ) -> list[Any]:
        """Read values: a large tensor is a mapping, whose pages are private to it.

        Parameters
        ----------
        keys : list of str
            Of values that are there.
        shapes, dtypes, custom_backend_meta
            TransferQueue's; the values have their own.

        Returns
        -------
        list
            In the order of the keys.

        Raises
        ------
        KeyError
            A value is not there.
        DamagedError
            A file is not what a put wrote.
        """
        return [self._get(key) for key in keys]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Remove values; of those that are not there nothing is to be removed.

        Parameters
        ----------
        keys : list of str
            Of any values.
        custom_backend_meta
            TransferQueue's.
        """
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_file_of(key), dir_fd=self._folder)

    def _get(self, key: str) -> Any:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(_file_of(key), flags, dir_fd=self._folder)
        except FileNotFoundError:
            raise KeyError(
                f"store {self._name!r}: expected a value of {key!r}, got none; it was cleared, or "
                "put on another machine: a store is of one machine"
            ) from None
        try:
            size = os.fstat(fd).st_size
            if size > _READ_BYTES:
                content: Any = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            else:
                content = bytearray(size)
                del content[os.readv(fd, [content]) :]
        finally:
            os.close(fd)
        try:
            return _value_of(memoryview(content))
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise DamagedError(
                f"store {self._name!r}: expected the value of {key!r} as it was put, got "
                f"{size} bytes that are none ({error}); put it again"
            ) from error


def register() -> None:
    """Do what importing this module does: for Ray's ``worker_process_setup_hook``."""


def _path_of(name: Any) -> str:
    if not isinstance(name, str) or not name or "/" in name or "\0" in name:
        raise ValueError(f"{BACKEND}.store: expected a name without '/' and NUL, got {name!r}")
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise ValueError(f"{BACKEND}.store: expected up to {_MAX_NAME_BYTES} bytes, got {name!r}")
    return f"{_PREFIX}{name}"


def _open_folder(path: str) -> int:
    """Open a folder that has to be this user's own."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(
            f"{path}: expected a folder of uid {os.geteuid()} alone, got one of uid "
            f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; choose another name"
        )
    return fd


def _remove(folder: int, path: str, pid: int) -> None:
    """Remove a store; in a forked child nothing goes."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    os.close(folder)


def _file_of(key: str) -> str:
    """Name a key's file; keys have any length and any character."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


def _copy_values(source: str, target: str) -> None:
    """Copy each value whole; one that is cleared meanwhile is not there."""
    for name in os.listdir(source):
        if name.startswith("."):
            continue
        partial = os.path.join(target, f".{os.getpid()}-{next(_PARTIAL)}")
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(os.path.join(source, name), partial)
            os.rename(partial, os.path.join(target, name))


def _parts_of(value: Any) -> list[memoryview]:
    """Lay a value out: its head, padding, and its bytes."""
    dtype, shape = "", tuple[int, ...]()
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        dtype, shape = str(whole.dtype).removeprefix("torch."), tuple(whole.shape)
        content: Any = whole.reshape(-1).view(torch.uint8).numpy()
        parts = [memoryview(content)]
    else:
        parts = [memoryview(part).cast("B") for part in encode(value)]
    head = msgspec.msgpack.encode(_Head(dtype, shape, tuple(part.nbytes for part in parts)))
    head = len(head).to_bytes(_SIZE_BYTES, "little") + head
    return [memoryview(head.ljust(_aligned(len(head)), b"\0")), *parts]


def _value_of(content: memoryview) -> Any:
    """Read what `_parts_of` laid out."""
    at = _SIZE_BYTES + int.from_bytes(content[:_SIZE_BYTES], "little")
    head = _decode_head(content[_SIZE_BYTES:at])
    at = _aligned(at)
    if at + sum(head.parts) != len(content) or min(head.parts, default=0) < 0:
        raise ValueError(f"its parts are {sum(head.parts)} bytes")
    if not head.dtype:
        ends = list(itertools.accumulate(head.parts, initial=at))
        return decode([content[begin:end] for begin, end in itertools.pairwise(ends)])
    dtype = _DTYPES[head.dtype]
    if at == len(content):
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(content[at:], dtype=torch.uint8).view(dtype).reshape(head.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(fd: int, parts: Sequence[memoryview]) -> None:
    """Write all of it: a call writes 2 GiB at most."""
    left = _without_empty(parts)
    while left:
        written = os.writev(fd, left[:_PARTS])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]


def _without_empty(parts: Iterable[memoryview]) -> list[memoryview]:
    return [part for part in parts if part.nbytes]
