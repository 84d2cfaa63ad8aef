"""User-visible C classes for putting, with their docstrings. For type checkers and editors.

No module of this name exists at run time: the classes live in ``shmbus_ext._core``. The build takes
their ``__doc__`` and signatures from here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbus_ext._core import DeclaredSchema, FieldValue, Segment, SupportsItem

class Reservation:
    """A record whose arrays are filled in the ring, in place; made by `Producer.reserve`.

    ``slot[name]`` is a writable view of the ring until commit or abort. The context manager commits
    at the end of its block and aborts on an exception. Garbage collection aborts, too.

    Attributes
    ----------
    fields : tuple of str
        The names of its arrays.
    score : float or None
        The reward; can be set until the end.
    policy_version : int or tuple of (int, int)
        Version of the sampling policy, or the oldest and the newest; can be set until the end.
    meta : object
        A value for msgspec to encode, within the `meta_room` of `reserve`; can be set, not read.
    ended : bool
        True after commit or abort.

    Notes
    -----
    After its end, and after closing the producer, filling, setting and ending raise BusClosedError.
    Several threads may fill one reservation; a single thread ends it.

    Examples
    --------
    >>> import shmbus
    >>> with shmbus.Bus.create("run1", capacity="1MiB"), shmbus.Producer("run1") as producer:
    ...     fields = {"tokens": ("int32", 2048)}
    ...     with producer.reserve("q1", group_size=1, index=0, fields=fields) as slot:
    ...         slot["tokens"][:3] = 7
    ...         slot.resize("tokens", 3)
    ...         slot.score = 0.5
    ...     producer.stats().committed
    1
    """

    fields: tuple[str, ...]
    score: float | None
    policy_version: int | tuple[int, int]
    meta: Any
    ended: bool
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...
    def resize(self, name: str, length: int, /) -> None:
        """Cut the first dimension of a field to the length actually written.

        Afterwards ``slot[name]`` is the shorter view; views taken before become read-only. The
        space of the rest stays part of the record.

        Parameters
        ----------
        name : str
            A field.
        length : int
            Its new length, from 0 to the present length.

        Raises
        ------
        KeyError
            The reservation lacks the field.
        ValueError
            The length is out of range, or the field has no dimension.
        BusClosedError
            The reservation ended, or the producer closed.
        """
    def commit(self) -> None:
        """Publish the record, like leaving the ``with`` block.

        Afterwards its views are read-only. A slice still held elsewhere stays writable; in this
        case the call commits a copy of the record instead, given room for a copy.

        Raises
        ------
        ValueError
            The sizes after `resize` violate the schema. The reservation stays open; the end of a
            ``with`` block aborts.
        BusClosedError
            The reservation ended, or the producer closed.
        """
    def abort(self) -> None:
        """Give the space back; the record never becomes visible.

        An exception in the ``with`` block aborts, too.

        Raises
        ------
        BusClosedError
            The reservation ended, or the producer closed.
        """
    def __enter__(self) -> Reservation: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

_Claim = tuple[int, int, int, int, int]
_Text = tuple[str, int | None, str, int, int, int, int, int, bytes]

class Writer:
    producer_id: int
    closed: bool
    _segment: Segment
    _slot: int
    _declared: DeclaredSchema | None
    def __init__(self, segment: Segment, label: str, checksum: bool = ...) -> None: ...
    def put(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        index: int,
        score: float | SupportsItem | None = 0.0,
        policy_version: int | tuple[int, int] = 0,
        round: int | None = None,
        split: str | None = None,
        need: int | None = None,
        meta: Any = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arrays: FieldValue,
    ) -> None:
        """Copy one trajectory into the ring and commit it.

        The consumer finds the whole record or nothing. After the return the caller may reuse the
        arrays, and the record outlives this process.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, 1 to 255 bytes of UTF-8. The samples of one key form a group, across
            producers. An int counts as its decimal text: 17 and "17" are one prompt.
        group_size : int
            Samples of its group, 1 to 16384; the same for every sample of the group.
        index : int
            Position of the sample in its group, 0 to group_size - 1. The first sample of an index
            is kept, later samples are dropped as duplicates.
        score : float or None, default 0.0
            The reward, within 1e38. An array or tensor with one element counts as a number. None
            for a score not yet known: the reader scores the group (`Trajectory.score`, or
            `score_group` of a handler), and an unscored sample raises an error there, by name.
        policy_version : int or tuple of (int, int), default 0
            Version of the sampling policy, 0 or more; or the oldest and the newest version, after a
            change during the rollout. A consumer's `max_policy_lag` compares the oldest with the
            trainer's current version, returned by `Producer.policy_version`.
        round : int, optional
            Round of the prompt, 0 or more; `next_round` returns a unique number for the samples of
            a round. With a round, (instance_id, round) is the group's key, and a sample of an
            already complete group is dropped as surplus. Without a round, a late sample begins the
            prompt's next group.
        split : str, optional
            Split of the group, 1 to 31 bytes of UTF-8; default "train". Groups of a different
            split, for example "eval", go only to consumers asking for the split, and never to
            training. The split is part of the group's key. A bus has at most 16 splits.
        need : int, optional
            Number of samples to complete the group, in order of arrival: at most group_size, the
            default. Late samples are dropped as surplus; `cancelled` tells their workers to stop. A
            need below group_size requires a round.
        meta : object, optional
            A value for msgspec to encode as MessagePack, for the trajectory's reader. NumPy
            scalars, arrays and tensors come back as numbers and nested lists, pydantic models and
            dataclasses as dicts, sets as lists, paths as str, enums as their values.
        rows : list of mapping, optional
            For a sample of several rows, for example branches of a conversation: the fields of
            every row, with equal names in every row, and a `prefix_length` for a row sharing a
            token prefix with another row. The fields of a row have equal lengths; fields of the
            whole sample go beside rows. A trainer packs every row as a separate sequence, with the
            sample's single advantage. Costs one more copy of the arrays.
        timeout : float, optional
            Seconds to wait for space while the bus is full or paused: None waits for ever, 0 fails
            at once.
        **arrays : array
            The payload, at most 64 fields; a keyword is a field's name, 1 to 255 bytes of UTF-8. A
            value is a NumPy array, or exports an array: a CPU tensor, a memoryview, an array.array.
            Shapes of at most 32 dimensions, dtypes of fixed size. An array out of C order is copied
            into C order first. Lists and tuples, nested too, become arrays of the schema's dtype;
            without a schema, tokens become int32, loss_mask uint8, logprobs and advantages float32.

        Raises
        ------
        TypeError
            An argument is missing or of the wrong type, a value is not an array, a list has no
            declared dtype, an element is not a number (a bool counts only in masks), a dtype holds
            Python objects, msgspec cannot encode meta, or the schema lacks a field, declares a
            different dtype, or requires a missing field.
        ValueError
            An argument is out of range, the score is not finite or above 1e38, the meta nests
            deeper than 128 lists and maps, the number of fields or dimensions exceeds its limit, a
            list is ragged, its dtype cannot hold an element, or a shape violates the schema; the
            message names field and index.
        RecordTooLargeError
            The record exceeds `Producer.record_limit`, a quarter of the bus; also a ValueError.
        BusFullError
            No space within the timeout; the message names the holders of the space.
        BusClosedError
            The producer was closed, before or during the wait, or made before a fork.
        BusRemovedError
            The bus was removed and, under ``attach="successor"``, no new bus came in time.
        StallError
            The bus stalled for `stall_timeout` seconds, under ``on_stall="raise"``.

        Notes
        -----
        The call blocks for space only: until a consumer acknowledges groups, or a process resumes
        the bus. Other threads run during the wait, and signals are handled: an exception of a
        handler, for example KeyboardInterrupt, ends the wait. `aput` does not block an event loop.

        After an exception the ring holds nothing of the trajectory, and a second put may follow.

        Several threads may call this method at the same time. During a copy of 256 KiB or more
        other threads run; the arrays must not change before the call returns.

        Examples
        --------
        >>> import numpy as np
        >>> import shmbus
        >>> with shmbus.Bus.create("run1", capacity="1MiB"), shmbus.Producer("run1") as producer:
        ...     producer.put("gsm8k-17", group_size=1, index=0, score=1.0, meta={"env": "gsm8k"},
        ...                  tokens=np.arange(5, dtype=np.int32))
        ...     with shmbus.Consumer("run1") as consumer:
        ...         [group] = consumer.take(timeout=10.0)
        ...         print(group[0]["tokens"], group[0].score, group[0].meta)
        ...         group.ack()
        [0 1 2 3 4] 1.0 {'env': 'gsm8k'}
        """
    def put_many(self, items: Iterable[dict[str, Any]], *, timeout: float | None = None) -> int:
        """Put a list of trajectories, committed together if the bus has room for the whole list.

        Parameters
        ----------
        items : iterable of dict
            Dicts of `put`'s arguments by name, including instance_id and arrays. A "timeout" entry
            is checked and otherwise ignored.
        timeout : float, optional
            Seconds to wait for space, for the whole list: None waits for ever, 0 fails at once.

        Returns
        -------
        int
            The number of items put: the length of the list.

        Raises
        ------
        TypeError
            `items` is not iterable, an item is not a dict with str keys, or as for `put`; the
            message names the item.
        ValueError, RecordTooLargeError
            As for `put`; the message names the item.
        BusFullError
            No space for the whole list within the timeout. Its `accepted` is the number of items
            committed, from the first on; the remaining items can be put again.
        BusClosedError, BusRemovedError, StallError
            As for `put`.

        Notes
        -----
        With room for the whole list, no item becomes visible before every item is written, and an
        exception leaves the bus unchanged. On a full bus, every item is checked, then the written
        items are committed, and the remaining items follow as space is freed. Every exception after
        the items were listed carries `accepted`; 0 means an unchanged bus.

        The call blocks like `put`, and several threads may call it at the same time.

        Examples
        --------
        >>> import numpy as np
        >>> import shmbus
        >>> samples = [
        ...     {"instance_id": "q1", "group_size": 2, "index": i, "score": float(i),
        ...      "tokens": np.full(3, i, np.int32)}
        ...     for i in range(2)
        ... ]
        >>> with shmbus.Bus.create("run1", capacity="1MiB"), shmbus.Producer("run1") as producer:
        ...     producer.put_many(samples, timeout=10.0)
        2
        """
    def cancelled(
        self, instance_id: str | int, *, round: int | None, split: str | None = None
    ) -> bool:
        """Return True if a group ended without this sample, to stop work on the sample.

        A group ends early once enough samples came (``need=`` below group_size), after giving up on
        a failed sample, or after its deadline. The call reads shared memory in less than a
        microsecond: cheap enough to ask after every turn of a rollout.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `put`.
        round : int or None
            The group's round. A group without a round is never cancelled: its key may begin again.
        split : str, optional
            The group's split, as for `put`.

        Returns
        -------
        bool
            True for the bus's last 1,024 groups ended early.

        Raises
        ------
        TypeError, ValueError
            As for `put`.
        BusClosedError
            The producer was closed, or made before a fork.
        """
    def _put_group(
        self, items: list[dict[str, Any]], timeout: float | None, checks_only: bool = False, /
    ) -> None: ...
    def close(self) -> None:
        """Abort open reservations and leave the bus; committed records stay.

        Copies in other threads end first. A second call has no effect.
        """
    def _reserve(
        self,
        head: dict[str, Any],
        names: tuple[str, ...],
        dtypes: tuple[np.dtype[Any], ...],
        shapes: tuple[tuple[int, ...], ...],
        meta_room: int,
        /,
    ) -> Reservation: ...
    def _want_space(self) -> int: ...
    def _await_space(self, ticket: int, timeout_s: float, /) -> None: ...
    def _declare(self, schema: DeclaredSchema | None, /) -> None: ...
    def _answer(
        self, claim: _Claim | None, flags: int, instance_id: str | int, /, **arguments: Any
    ) -> bool: ...
    def _take_requests(self, known: int, limit: int, /) -> list[tuple[_Claim, _Text | None]]: ...
    def _give_back_request(self, claim: _Claim, /) -> bool: ...
    def _holds_request(self, claim: _Claim, /) -> bool: ...
    def _recover_dead(self) -> bool: ...
    def _note_unmade(
        self, released: int, given_back: int, failed: int, rest_s: float, reason: str, /
    ) -> None: ...
    def _watch_waits(self, call: Callable[[float], object], seconds: float, /) -> None: ...
    def _counts(self) -> tuple[int, int, int, int]: ...
    def _follow(self) -> None: ...
    def _go_on(self, timeout: float | None, /) -> None: ...
