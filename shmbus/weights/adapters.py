"""Adapters alone: LoRA tensors as files in PEFT's form, in a folder on tmpfs.

Invariants: a folder is written whole under another name, synced, and renamed. No two publications
have one name or path: servers keep adapters, and keys and values, by name.

Source: PEFT's `get_peft_model_state_dict` and `save_pretrained` (adapter_config.json,
adapter_model.safetensors).
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from shmbus.base.arguments import check_count, check_int, check_path, check_text
from shmbus.errors import WeightsError
from shmbus.segment.own_file import require_own_folder
from shmbus.store.directory import sync
from shmbus.weights.carriers.checkpoint import faults_in_file
from shmbus.weights.errors import ManifestError

_TENSORS: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"
#: Name parts of PEFT's adapter tensors: the kind, then the adapter's own name.
_OWN: Final = re.compile(
    r"\.(lora_[A-Za-z_]+|modules_to_save|token_adapter\.trainable_tokens_delta)\.([^.]+)(?=\.|$)"
)
#: Kind of wholly trained modules: their files use the model's names.
_WHOLE: Final = "modules_to_save"
#: DoRA's magnitudes: a layer in the model, a tensor in the files.
_MAGNITUDE: Final = "lora_magnitude_vector"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: Random bytes of a life.
_LIFE_BYTES: Final = 8
#: Suffix of a publication's name: the version, then the life.
ENDING: Final = r"(\d+)(?:-[0-9a-f]{16})?"


class LoraVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A written adapter.

    Attributes
    ----------
    name : str
        Name for servers: NAME-vVERSION-LIFE, where LIFE is random. A worker takes the last of a
        server's models with the prefix NAME-vVERSION-.
    path : str
        Its folder.
    version : int
        As given.
    size : int
        Bytes of its tensors.
    """

    name: str
    path: str
    version: int
    size: int


class LoraFiles:
    """Writer of an adapter's versions in PEFT's form.

    A life begins with this object, and again with every version below the previous one.

    Parameters
    ----------
    directory : path
        Created if needed; use tmpfs, for example "/dev/shm/run1-adapters", for speed.
    name : str
        The adapter's: letters, digits, dots, dashes, underscores.
    config : mapping
        PEFT's adapter_config.json, for example ``peft_config.to_dict()``.
    keep : int
        Number of kept versions, besides versions still held by servers (`forget`).

    Raises
    ------
    TypeError, ValueError, WeightsError
        The name, `keep` or the config is invalid.
    PermissionError, LayoutMismatchError
        The directory belongs to another user, or is no directory.
    """

    def __init__(
        self, directory: Path | str, name: str, config: Mapping[str, Any], *, keep: int = 3
    ) -> None:
        check_text("name", name)
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: expected letters, digits, '.', '-' and '_', got {name!r}")
        if not isinstance(config, Mapping):
            raise TypeError(f"config: expected a mapping, got {type(config).__name__}")
        missing = [key for key in ("peft_type", "r", "target_modules") if key not in config]
        if missing:
            raise WeightsError(
                f"config: expected PEFT's adapter_config.json, {', '.join(missing)} is missing; "
                "give peft_config.to_dict(). Nothing was written"
            )
        check_path("directory", directory)
        self._directory = Path(directory).absolute()
        self._name = name
        self._keep = check_count("keep", keep)
        self._life = secrets.token_hex(_LIFE_BYTES)
        self._last = -1
        self._folder = re.compile(re.escape(name) + "-v" + ENDING)
        self._config = json.dumps(dict(config), indent=2, sort_keys=True, default=_plain).encode()
        self._directory.mkdir(parents=True, exist_ok=True)
        require_own_folder(str(self._directory), f"adapters {name!r}")
        # Leftovers of a dead trainer. Different adapters may be in the middle of a write.
        left = re.compile(rf"\.new-{re.escape(name)}-[0-9a-f]{{8}}")
        for each in self._directory.iterdir():
            if left.fullmatch(each.name):
                shutil.rmtree(each, ignore_errors=True)

    def publish(self, state: Mapping[str, torch.Tensor], version: int) -> LoraVersion:
        """Write a version.

        Parameters
        ----------
        state : mapping of Tensor
            By PEFT's names, as returned by `lora_state`.
        version : int
            0 or more.

        Returns
        -------
        LoraVersion

        Raises
        ------
        TypeError, ValueError
            The version is no int64, or negative; or a value is no tensor.
        ManifestError
            A tensor's name or dtype is unknown to safetensors.
        WeightsError
            The state is empty, or the version was written in this life, or could not be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        version = check_int("version", version, 0, (1 << 63) - 1)
        _require_tensors(state)
        if version < self._last:  # training went back
            self._life = secrets.token_hex(_LIFE_BYTES)
        name = f"{self._name}-v{version}-{self._life}"
        target = self._directory / name
        if not state or target.exists():
            what = "that version is there already" if state else "it has no tensors"
            raise WeightsError(f"adapter {name!r}: {what}; nothing was written")
        faults = faults_in_file({key: value.dtype for key, value in state.items()})
        if faults:
            raise ManifestError(f"adapter {name!r} was not written", faults)
        # A file stores each tensor's bytes once and refuses tensors with shared memory.
        tensors = {
            key: value.detach().to("cpu", copy=True).contiguous() for key, value in state.items()
        }
        fresh = self._directory / f".new-{self._name}-{secrets.token_hex(4)}"
        try:
            fresh.mkdir()
            save_file(tensors, fresh / _TENSORS, {"format": "pt"})
            (fresh / _CONFIG).write_bytes(self._config)
            for each in (fresh / _TENSORS, fresh / _CONFIG, fresh):
                sync(each)
            fresh.rename(target)
        except BaseException as error:
            shutil.rmtree(fresh, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                there = ", ".join(map(str, self.versions())) or "none"
                raise WeightsError(
                    f"adapter {name!r} could not be written: {error}; versions there: {there}"
                ) from error
            raise
        self._last = version
        for old in past_keeping([each for _, each in self._folders()], name, self._keep):
            shutil.rmtree(self._directory / old, ignore_errors=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return LoraVersion(name=name, path=str(target.resolve()), version=version, size=size)

    def versions(self) -> list[int]:
        """Return the directory's versions of every life, in rising order."""
        return sorted({version for version, _ in self._folders()})

    def _folders(self) -> list[tuple[int, str]]:
        found = (self._folder.fullmatch(each.name) for each in self._directory.glob("*"))
        return sorted((int(match[1]), match[0]) for match in found if match)

    def forget(self, version: int) -> None:
        """Remove a version of each life, if present; servers with the version loaded keep it.

        Parameters
        ----------
        version : int
            Version number.
        """
        if version == self._last:  # servers may keep its name
            self._life = secrets.token_hex(_LIFE_BYTES)
        for number, folder in self._folders():
            if number == version:
                shutil.rmtree(self._directory / folder, ignore_errors=True)


def past_keeping(names: Sequence[str], newest: str, keep: int) -> list[str]:
    """List which names, lowest version first, make room for the name made last."""
    others = [name for name in names if name != newest]
    stay = keep - (newest in names)
    return others[: max(0, len(others) - stay)]


def lora_state(model: torch.nn.Module, *, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Collect an adapter's tensors of a PEFT model, by the names of PEFT's files.

    The result holds the tensors of LoRA and DoRA, and modules and tokens trained beside them.

    Parameters
    ----------
    model : torch.nn.Module
        For example ``get_peft_model(...)``.
    adapter : str
        Name of the adapter.

    Returns
    -------
    dict of Tensor
        Detached, in the model's own memory.

    Raises
    ------
    WeightsError
        The model lacks the adapter, or trains tensors outside of it.
    """
    named = model.state_dict(keep_vars=True)
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and _is_of(name, adapter):
            found.setdefault(id(tensor), (_file_name(name), tensor.detach()))  # tied: once
    if not found:
        there = {match[2] for name in named if (match := _OWN.search(name))}
        raise WeightsError(
            f"adapter {adapter!r}: the model has no LoRA tensors of it; there are: "
            f"{', '.join(sorted(there)) or 'none'}"
        )
    _check_biases(model, adapter)
    return dict(found.values())


def _check_biases(model: torch.nn.Module, adapter: str) -> None:
    """Refuse an adapter that trains the base's biases: every adapter would share them."""
    configs = getattr(model, "peft_config", None)
    config = configs.get(adapter) if isinstance(configs, Mapping) else None
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise WeightsError(
            f"adapter {adapter!r}: expected bias='none' in its config, got {bias!r}: biases of the "
            "base are no part of an adapter, and servers keep theirs. Train without them, or "
            "publish the whole model"
        )


def _is_of(name: str, adapter: str) -> bool:
    match = _OWN.search(name)
    return match is not None and match[2] == adapter


def _file_name(name: str) -> str:
    """Remove the adapter's own name: PEFT's files omit it."""
    match = _OWN.search(name)
    if match is None:
        return name
    before, after = name[: match.start()], name[match.end() :]
    if match[1] == _WHOLE:
        return before + after
    if match[1] == _MAGNITUDE:
        after = after.removesuffix(".weight")
    return f"{before}.{match[1]}{after}"


def _plain(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(getattr(value, "value", value))


def _require_tensors(state: object) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected tensors by name, got {type(state).__name__}")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"state: {name!r}: expected a tensor by a text, got {type(tensor).__name__}; "
                "nothing was written"
            )
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeightsError(
                f"state: {name!r} is on {tensor.device} with the layout {tensor.layout}, expected "
                "plain bytes; nothing was written"
            )
