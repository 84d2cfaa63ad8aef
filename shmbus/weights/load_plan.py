"""Recorded plan of an engine's own loader: targets of a version's bytes.

A loader runs once under `LoadRecorder`, which observes every torch operation on the version's
bytes. Copies become a plan, and later versions are gathered by the plan without the loader; tensors
beyond recording go through the loader each time.

Invariants:

- A tensor is in the plan only if its every use was a copy into memory still owned by the model, and
  no operation computed with it.
- The plan also excludes every tensor that shares a module with an excluded tensor: engines load a
  module as a whole.
- Targets of a plan do not overlap; its copies may run in any order.

Work outside of torch, like a kernel launched on addresses, stays invisible, and its results
never count as copies; an engine with weights in such places has to report them (`may_plan`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef as _StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.copy_table import Pair
from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.weights.manifest import Manifest

#: torch ships it untyped.
StorageWeakRef: Any = _StorageWeakRef

#: Operations that read no element of their arguments.
_BLIND: Final = (
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones",
    "new_full", "is_same_size", "record_stream", "set_", "resize_", "is_pinned",
)  # fmt: skip
#: Namespaces of dispatched operations, observed at dispatch.
_OWN: Final = ("aten", "prim", "prims")
_COPIES: Final = ("_to_copy", "clone")
_CONSTANTS: Final = ("fill_", "zero_")

#: Bytes held at once during a comparison of a plan.
LOT_BYTES: Final = 256 << 20
_WHOLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Box(NamedTuple):
    """Elements of a memory: bytes before the first, and how they lie, in elements."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, shift: int = 0) -> _Box:
        start = int(tensor.storage_offset()) * tensor.element_size() + shift
        # The stride of a one-element dimension carries no meaning.
        lies = zip(tensor.shape, tensor.stride(), strict=True)
        strides = tuple(step if size > 1 else 0 for size, step in lies)
        return cls(start, tuple(tensor.shape), strides, tensor.dtype)

    @property
    def end(self) -> int:
        last = sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))
        return self.start + (last + 1) * self.dtype.itemsize

    def view(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        start = self.start // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=device)
        return made.set_(storage, start, self.sizes, self.strides)

    def moved(self, nbytes: int) -> _Box:
        return self._replace(start=self.start + nbytes)

    def is_disjoint(self, other: _Box) -> bool:
        """Return whether no byte lies in both boxes; False if a cheap test cannot decide."""
        if self.end <= other.start or other.end <= self.start:
            return True
        if (self.strides, self.dtype) != (other.strides, other.dtype):
            return False
        origin = min(self.start, other.start)
        mine, theirs = self.firsts(origin), other.firsts(origin)
        return (
            mine is not None
            and theirs is not None
            and any(
                a + n <= b or b + m <= a
                for a, n, b, m in zip(mine, self.sizes, theirs, other.sizes, strict=True)
            )
        )

    def firsts(self, origin: int) -> list[int] | None:
        """Return the first index in each dimension, counted from an origin; None between rows."""
        left = (self.start - origin) // self.dtype.itemsize
        found = [0] * len(self.strides)
        row = None
        for dim in sorted(range(len(self.strides)), key=lambda dim: -self.strides[dim]):
            step = self.strides[dim]
            if step > 0:
                found[dim], left = divmod(left, step)
                if row is not None and (found[dim] + self.sizes[dim] - 1) * step >= row:
                    return None  # continues in the next row
                row = step
        return None if left else found

    def part(self, own: _Box, of: _Box) -> _Box | None:
        """Return this box's part behind `of`, given `own` (the copy of this box around `of`)."""
        firsts = of.firsts(own.start) if of.start >= own.start else None
        if firsts is None or any(
            first + size > room
            for first, size, room in zip(firsts, of.sizes, own.sizes, strict=True)
        ):
            return None
        steps = zip(firsts, self.strides, strict=True)
        ahead = sum(first * step for first, step in steps) * self.dtype.itemsize
        return self._replace(start=self.start + ahead, sizes=of.sizes)


class Recorded(NamedTuple):
    """A copy of a version's tensor: its target, and the place of its elements in the version."""

    name: str
    target: torch.Tensor
    source: _Box


class _Memory:
    """A storage reached by copies of a version's bytes."""

    def __init__(self, tensor: torch.Tensor, owners: frozenset[int]) -> None:
        self.alive = StorageWeakRef(tensor.untyped_storage())
        self.owners = owners
        self.copies: list[tuple[_Box, _Box]] = []  # in this storage, in the version
        #: Names of tensors present here in a form beyond copies.
        self.mixed: set[str] = set()
        self.passed_on = False


class LoadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of a loader's use of a version's tensors; a ``with`` block around its calls."""

    def __init__(self, model: torch.nn.Module, manifest: Manifest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._manifest = manifest
        ordered = sorted((place.offset, place.size, place.name) for place in manifest.tensors)
        self._starts = [offset for offset, _, _ in ordered]
        self._places = ordered
        #: Memory of versions, by address: a reference to detect its end, and a shift for offsets in
        #: it.
        self._sources: dict[int, tuple[Any, int]] = {}
        self._memories: dict[int, _Memory] = {}
        self._modules = {id(module): module for module in model.modules()}
        self._order = [*self._modules]
        #: Place of the last found owner: loaders go through a model in its order.
        self._near = 0
        self._read: set[str] = set()
        self._computed: set[str] = set()
        self._owned: dict[str, set[int]] = {}
        #: Memory filled with bytes foreign to the version, as far as observed.
        self._foreign: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler otherwise, seconds within a pause."""
        return False

    def add_source(self, tensor: torch.Tensor, offset: int) -> None:
        """Register a tensor as the bytes at an offset of a version."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        storage = tensor.untyped_storage()
        self._sources[storage.data_ptr()] = StorageWeakRef(storage), offset - start
        self._memories.pop(storage.data_ptr(), None)

    def __enter__(self) -> Any:
        self._calls = _Calls(self)
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "copy_":
            self._copied(args[0], args[1])
        elif name in _COPIES:
            self._copied(made, args[0], is_new=True)
        elif name in _CONSTANTS:
            self._overwritten(args[0])
        elif name not in _BLIND:
            self._done(func, args, kwargs, made)
        return made

    # -- operations --------------------------------------------------------------------------------

    def _source(self, tensor: torch.Tensor) -> _Box | None:
        """Return the place of a tensor in a version."""
        address = tensor.untyped_storage().data_ptr()
        known = self._sources.get(address)
        if known is None:
            return None
        if known[0].expired():  # another tensor reused the memory
            del self._sources[address]
            return None
        return _Box.of(tensor, known[1])

    def _memory(self, tensor: torch.Tensor) -> _Memory | None:
        address = tensor.untyped_storage().data_ptr()
        known = self._memories.get(address)
        if known is not None and known.alive.expired():
            self._end(self._memories.pop(address))
            return None
        return known

    def _end(self, memory: _Memory) -> None:
        """Judge freed or foreign memory: without an onward copy its tensors leave the plan."""
        if not memory.passed_on:
            self._computed |= self._names_in(memory)

    def _names_in(self, memory: _Memory) -> set[str]:
        return {self._name(source) for _, source in memory.copies} | memory.mixed

    def _name(self, box: _Box) -> str:
        return self._places[bisect.bisect_right(self._starts, box.start) - 1][2]

    def _names(self, tensor: torch.Tensor) -> set[str]:
        """Return the names of version tensors behind a tensor, directly or by copies."""
        box = self._source(tensor)
        if box is not None:
            first = bisect.bisect_right(self._starts, box.start) - 1
            last = bisect.bisect_left(self._starts, box.end)
            return {self._places[at][2] for at in range(first, max(last, first + 1))}
        memory = self._memory(tensor)
        return set() if memory is None else self._names_in(memory)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, *, is_new: bool = False) -> None:
        if target.is_meta or source.is_meta or target.numel() == 0:
            return
        names = self._names(source)
        if not names:
            self._overwritten(target)
            self._foreign.add(target.untyped_storage().data_ptr())
            return
        self._read |= names
        memory = self._memory(target)
        if memory is None:
            memory = _Memory(target, frozenset() if is_new else self._owner_of(target))
            self._memories[target.untyped_storage().data_ptr()] = memory
        for name in names:
            self._owned.setdefault(name, set()).update(memory.owners)
        found = self._traced(target, source)
        if found is None or not self._make_room(memory, [box for box, _ in found]):
            memory.mixed |= names
            self._computed |= names
            return
        memory.copies += found
        passed = self._memory(source)
        if passed is not None:
            passed.passed_on = True

    def _owner_of(self, target: torch.Tensor) -> frozenset[int]:
        """Return the id of a module that owns the memory now; nothing for memory of no module."""
        address = target.untyped_storage().data_ptr()
        for at in (*range(self._near, len(self._order)), *range(self._near)):
            module = self._modules[self._order[at]]
            if any(each.untyped_storage().data_ptr() == address for each in _own_tensors(module)):
                self._near = at
                return frozenset({self._order[at]})
        return frozenset()

    def _traced(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[_Box, _Box]] | None:
        """Return the version's bytes in a copy; None if they cannot be traced."""
        to = _Box.of(target)
        if target.shape != source.shape or target.is_complex() or source.is_complex():
            return None
        box = self._source(source)
        if box is not None:
            return [(to, box)]
        memory = self._memory(source)
        if memory is None or memory.mixed:
            return None
        of = _Box.of(source)
        if (of.sizes, of.strides, of.dtype) == (to.sizes, to.strides, to.dtype):
            inside = [(own, src) for own, src in memory.copies if not own.is_disjoint(of)]
            if all(of.start <= own.start and own.end <= of.end for own, _ in inside):
                return [(own.moved(to.start - of.start), src) for own, src in inside]
        # A part of one copy with a second cast equals a single cast, if the first lost nothing.
        for own, src in memory.copies:
            if (own.strides, own.dtype) == (of.strides, of.dtype) and _is_wider(
                own.dtype, src.dtype
            ):
                part = src.part(own, of)
                if part is not None:
                    return [(to, part)]
        return None

    def _make_room(self, memory: _Memory, boxes: list[_Box]) -> bool:
        """Forget overwritten copies; return False after a partial overwrite."""
        kept = []
        for own, src in memory.copies:
            hit = [box for box in boxes if not own.is_disjoint(box)]
            if any(own[:3] != box[:3] for box in hit):
                return False
            if not hit:
                kept.append((own, src))
        memory.copies = kept
        return True

    def _overwritten(self, target: torch.Tensor) -> None:
        """Record that a target holds foreign content now."""
        memory = None if target.is_meta else self._memory(target)
        if memory is None:
            return
        if not self._make_room(memory, [_Box.of(target)]):
            names = self._names_in(memory)
            memory.mixed |= names
            self._computed |= names

    def _done(self, func: Any, args: tuple[Any, ...], kwargs: Any, made: Any) -> None:
        """Inspect any further operation: ignore views, exclude the rest."""
        given = [*_tensors(args), *_tensors(kwargs)]
        names = set().union(*(self._names(each) for each in given)) if given else set()
        if not names:
            return
        addresses = {each.untyped_storage().data_ptr() for each in given}
        results = [*_tensors(made)]
        writes = _writes(func)
        if (
            not writes
            and results
            and all(each.untyped_storage().data_ptr() in addresses for each in results)
        ):
            return
        self._read |= names
        self._computed |= names
        for each in given:
            memory = self._memory(each)
            if writes and memory is not None:
                memory.mixed |= names

    # -- what follows ------------------------------------------------------------------------------

    def plan(
        self, tensors: Mapping[str, torch.Tensor], may_plan: Callable[[torch.nn.Module], bool]
    ) -> LoadPlan:
        """Return the recorded plan, limited to tensors with results equal to the loader's."""
        kept = self._kept(may_plan)
        plan = self._without(self._closed(self._computed), kept)
        wrong = plan.differing(plan.pairs(tensors))
        if wrong:
            self._computed |= wrong
            plan = self._without(self._closed(self._computed), kept)
        return plan

    def _kept(
        self, may_plan: Callable[[torch.nn.Module], bool]
    ) -> list[tuple[torch.Tensor, _Memory]]:
        """Return the model's memory filled by copies; judge the memory's content."""
        there: dict[int, torch.Tensor] = {}
        owned: dict[int, set[int]] = {}
        for module in self._model.modules():
            self._modules[id(module)] = module
            for each in _own_tensors(module):
                address = each.untyped_storage().data_ptr()
                there[address] = each
                owned.setdefault(address, set()).add(id(module))
        kept: list[tuple[torch.Tensor, _Memory]] = []
        for address, memory in list(self._memories.items()):
            if memory.alive.expired() or address not in there:
                self._end(memory)
                continue
            kept.append((there[address], memory))
            if memory.mixed:
                self._computed |= self._names_in(memory)
            owners = owned[address] | memory.owners
            if not all(may_plan(self._modules[owner]) for owner in owners):
                memory.mixed |= self._names_in(memory)
                self._computed |= memory.mixed
            for name in self._names_in(memory):
                self._owned.setdefault(name, set()).update(owners)
        # Unobserved reads filled a parameter with unknown content: suspect every tensor not read.
        if any(
            address in there and isinstance(there[address], torch.nn.Parameter)
            for address in self._foreign
        ):
            self._computed |= {place.name for place in self._manifest.tensors} - self._read
        return kept

    def _without(self, refused: set[str], kept: list[tuple[torch.Tensor, _Memory]]) -> LoadPlan:
        """Build the plan without the refused tensors."""
        copies, witnesses = [], []
        for tensor, memory in kept:
            for box, src in memory.copies:
                target = box.view(tensor.untyped_storage(), tensor.device)
                made = Recorded(self._name(src), target, src)
                if made.name not in refused:
                    copies.append(made)
                elif not memory.mixed:
                    witnesses.append(made)
        modules = {at for name in refused for at in self._owned.get(name, ())}
        return LoadPlan(
            self._manifest,
            SeenTensors(self._model.state_dict(keep_vars=True)),
            copies,
            [place.name for place in self._manifest.tensors if place.name in refused],
            [self._modules[at] for at in modules],
            witnesses,
        )

    def _closed(self, names: set[str]) -> set[str]:
        """Add every tensor of a shared module, transitively."""
        sharing: dict[int, set[str]] = {}
        for name, owners in self._owned.items():
            for owner in owners:
                sharing.setdefault(owner, set()).add(name)
        found, left = set(names), list(names)
        while left:
            for owner in self._owned.get(left.pop(), ()):
                new = sharing.pop(owner, set()) - found
                found |= new
                left += new
        return found


class _Calls(TorchFunctionMode):
    """Observer of non-torch operations, including undispatched calls."""

    def __init__(self, recorder: LoadRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            name: str = getattr(func, "_qualified_op_name", "") or str(func.name())  # type: ignore[no-untyped-call]
            if name.partition("::")[0] not in _OWN:
                self._recorder._done(func, args, kwargs or {}, made)
        return made


def _writes(func: Any) -> bool:
    """Return whether an operation writes an argument."""
    each = (
        [func] if hasattr(func, "_schema") else [getattr(func, name) for name in func.overloads()]
    )
    return any(
        argument.alias_info is not None and argument.alias_info.is_write
        for overload in each
        for argument in overload._schema.arguments
    )


class LoadPlan:
    """Copies from a version's bytes into a model."""

    def __init__(
        self,
        manifest: Manifest,
        seen: SeenTensors,
        copies: list[Recorded],
        refused: list[str],
        modules: list[torch.nn.Module],
        witnesses: list[Recorded],
    ) -> None:
        self.manifest: Final = manifest
        self._seen = seen
        self.copies: Final = copies
        #: Tensors left to the loader each time, and their modules.
        self.refused: Final = refused
        self.modules: Final = modules
        #: Plain copies of refused tensors, beside memory that the loader derived: for comparisons.
        self.witnesses: Final = witnesses
        self.nbytes: Final = sum(each.target.nbytes for each in copies)

    def still(self, model: torch.nn.Module, manifest: Manifest) -> bool:
        """Return whether the plan still fits the model and the manifest."""
        return manifest == self.manifest and self._seen.still(model.state_dict(keep_vars=True))

    def pairs(self, tensors: Mapping[str, torch.Tensor]) -> list[Pair]:
        """Return the copies out of a version stored in one memory."""
        if not self.copies:
            return []
        first = next(iter(tensors.values()))
        payload = first.untyped_storage()
        return [(each.target, each.source.view(payload, first.device)) for each in self.copies]

    @torch.no_grad()
    def differing(self, pairs: list[Pair]) -> set[str]:
        """Repeat the copies over the loader's result; return tensors with a different outcome."""
        wrong: set[str] = set()
        for first, last in _lots([target.nbytes for target, _ in pairs]):
            lot = pairs[first:last]
            before = [target.clone() for target, _ in lot]
            for target, _ in lot:
                bits(target).bitwise_not_()  # makes every uncopied element wrong
            CopyPlan(lot).copy()
            copies = self.copies[first:last]
            for (target, _), was, copy in zip(lot, before, copies, strict=True):
                if not torch.equal(bits(was), bits(target)):
                    wrong.add(copy.name)
                    target.copy_(was)
        return wrong

    def rounded(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """Return the published dtype and the engine's, by tensor whose copy loses bits."""
        return {
            each.name: (each.source.dtype, each.target.dtype)
            for each in self.copies
            if each.target.is_floating_point()
            and not _is_wider(each.target.dtype, each.source.dtype)
        }


def _lots(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Cut a list into runs of limited bytes."""
    first = held = 0
    for last, size in enumerate(sizes):
        if held and held + size > LOT_BYTES:
            yield first, last
            first, held = last, 0
        held += size
    if first < len(sizes):
        yield first, len(sizes)


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype represents every number of a second dtype."""
    both_float = dtype.is_floating_point and other.is_floating_point
    return dtype == other or (both_float and torch.promote_types(dtype, other) == dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements as integers of the same size, equal exactly for equal bits."""
    return tensor.view(_WHOLE[tensor.element_size()])


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's own parameters and buffers with memory, without its children's."""
    for each in (*module._parameters.values(), *module._buffers.values()):
        if each is not None and not each.is_meta and each.numel():
            yield each


def _tensors(given: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operation's arguments or results."""
    if isinstance(given, torch.Tensor):
        if not given.is_meta and given.layout == torch.strided:
            yield given
    elif isinstance(given, Mapping):
        for each in given.values():
            yield from _tensors(each)
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _tensors(each)
