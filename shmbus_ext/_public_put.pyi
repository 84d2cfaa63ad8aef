"""What users meet of the C core when they put, with its docstrings. For type checkers and editors.

There is no module of this name at run time: these are classes of ``shmbus_ext._core``. The build
takes their ``__doc__`` and signatures from here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbus_ext._core import DeclaredSchema, FieldValue, Segment, SupportsItem

class Reservation:
    """A record whose arrays are filled in the ring itself; `Producer.reserve` makes it.

    ``slot[name]`` is a writable view of the ring until commit or abort. As a context manager it
    commits, or aborts on an exception. It aborts when it is collected, too.

    Attributes
    ----------
    fields : tuple of str
        The names of its arrays.
    score : float or None
        The reward; can be set until the end.
    policy_version : int or tuple of (int, int)
        The policy that sampled it, or the oldest and the newest; can be set until the end.
    meta : object
        Whatever msgspec can encode, within the `meta_room` of `reserve`; can be set, not read.
    ended : bool
        Whether it was committed or aborted.

    Notes
    -----
    After its end, and when the producer is closed, filling, setting and ending raise
    BusClosedError. Several threads may fill one reservation; one of them ends it.

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
        """Cut the first dimension of a field to what was really written.

        ``slot[name]`` is the shorter view from then on; views taken before are read-only. The space
        of the rest stays part of the record.

        Parameters
        ----------
        name : str
            A field.
        length : int
            Its new length, 0 to the present one.

        Raises
        ------
        KeyError
            The reservation has no such field.
        ValueError
            The length is out of range, or the field has no dimension.
        BusClosedError
            The reservation has ended, or the producer is closed.
        """
    def commit(self) -> None:
        """Publish the record, as leaving the ``with`` block does.

        Its views are read-only from then on. Where a slice of one is still held, which stays
        writable, a copy of the record is committed in its place if there is room for one.

        Raises
        ------
        ValueError
            What `resize` left is not what the schema declares. The reservation stays open; at the
            end of a ``with`` block it is aborted.
        BusClosedError
            The reservation has ended, or the producer is closed.
        """
    def abort(self) -> None:
        """Give the space back; nobody ever sees the record.

        An exception in the ``with`` block does the same.

        Raises
        ------
        BusClosedError
            The reservation has ended, or the producer is closed.
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

        The consumer finds all of a record or nothing of it. When this returns, the arrays are the
        caller's again, and the record outlives this process.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, 1 to 255 bytes of UTF-8. The samples of one key form a group, whoever
            puts them. An int is its decimal text: 17 and "17" are one prompt.
        group_size : int
            Samples of its group, 1 to 16384; the same for every sample of it.
        index : int
            Which sample of its group this is, 0 to group_size - 1. Of several with one index the
            first is kept, the others are dropped as duplicates.
        score : float or None, default 0.0
            The reward; finite. An array or tensor with one element is that number. None where it is
            not known yet: whoever reads the group scores it (`Trajectory.score`, or
            `score_group` of a handler), and a sample that nobody scored is an error there, by name.
        policy_version : int or tuple of (int, int), default 0
            Version of the policy that sampled it, 0 or more; or the oldest and the newest, where it
            changed meanwhile. A consumer's `max_policy_lag` compares the oldest with the
            trainer's current version, which `Producer.policy_version` reads.
        round : int, optional
            Which round of the prompt this is, 0 or more; `next_round` gives one that nobody else
            has, for all samples of a round. With a round, (instance_id, round) is the group's key,
            and a sample of a group that was complete before is dropped as surplus. Without one,
            such a sample begins the prompt's next group.
        split : str, optional
            Who the group is for, 1 to 31 bytes of UTF-8; "train" where none is given. Groups of
            another split, such as "eval", are delivered to who asks for that one, and never trained
            on. It is a part of the group's key. A bus has at most 16.
        need : int, optional
            Samples that complete the group, the first that come: at most group_size, which is the
            default. Late ones are dropped as surplus; `cancelled` tells their workers to stop.
            Fewer than group_size need a round.
        meta : object, optional
            Whatever msgspec can encode as MessagePack, for the reader of the trajectory. NumPy
            scalars, arrays and tensors come back as numbers and nested lists, pydantic models and
            dataclasses as dicts, sets as lists, paths as str, enums as their values.
        rows : list of mapping, optional
            Of a sample of several rows, such as branches of a conversation: the fields of each row,
            the same in all, and its `prefix_length` where it shares that many tokens with another.
            All fields of a row have one length; what the whole sample has is given beside rows. A
            trainer packs each row as a sequence of its own, with the sample's one advantage. Costs
            one more copy of the arrays.
        timeout : float, optional
            Seconds to wait for space while the bus is full or paused: None waits for ever, 0 does
            not wait.
        **arrays : array
            The payload, at most 64 fields; each keyword is a field's name, 1 to 255 bytes of UTF-8.
            A value is a NumPy array, or exports one: a CPU tensor, a memoryview, an array.array.
            Any shape of at most 32 dimensions, any dtype of fixed size. One that is not
            C-contiguous is copied into that order first.
            Lists and tuples, nested too, become arrays of the dtype that the schema declares;
            without a schema, tokens become int32, loss_mask uint8, logprobs and advantages float32.

        Raises
        ------
        TypeError
            An argument is missing or has the wrong type, a value is no array, a list has no
            declared dtype, an element is no number (a bool is none, but in masks), a dtype holds
            Python objects, msgspec cannot encode meta, or the schema has no such field, another
            dtype for it, or requires one that is missing.
        ValueError
            An argument is out of range, the score is not finite, there are too many fields or
            dimensions, a list is ragged, its dtype cannot hold a number of it, or a shape is not
            what the schema declares; the message names field and index.
        RecordTooLargeError
            The record is larger than `Producer.record_limit`, a quarter of the bus; also a
            ValueError.
        BusFullError
            There was no space within the timeout; the message names who holds it.
        BusClosedError
            The producer is closed, was made before a fork, or was closed during the wait.
        BusRemovedError
            The bus was removed, and under ``attach="successor"`` there was no new one in time.
        StallError
            Nothing moved on the bus for `stall_timeout` seconds, under ``on_stall="raise"``.

        Notes
        -----
        This blocks for space only: until a consumer acknowledges groups, or somebody resumes the
        bus. Other threads run during the wait, and signals are handled: what a handler raises, such
        as KeyboardInterrupt, ends it. `aput` does not block an event loop.

        After an exception nothing of the trajectory is in the ring, and it can be put again.

        Several threads may call this at the same time. While 256 KiB or more are copied other
        threads run; the arrays must not change before the call returns.

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
        """Put a list of trajectories, committed together where the bus has room for all of them.

        Parameters
        ----------
        items : iterable of dict
            Each has the arguments of `put` by name, instance_id and arrays too. A "timeout" among
            them is checked and otherwise ignored.
        timeout : float, optional
            Seconds to wait for space, for all of them together: None waits for ever, 0 does not
            wait.

        Returns
        -------
        int
            How many were put: all of them.

        Raises
        ------
        TypeError
            There is no iterable, an item is no dict with str keys, or as for `put`; the message
            says which item it was.
        ValueError, RecordTooLargeError
            As for `put`; the message says which item it was.
        BusFullError
            There was no space for all within the timeout. Its `accepted` says how many items were
            committed, from the first on; the others can be put again.
        BusClosedError, BusRemovedError, StallError
            As for `put`.

        Notes
        -----
        With room for all, no item can be seen before every item is written, and an exception leaves
        the bus as it was. On a full bus, all items are checked, then what is written is committed,
        and the others follow as space is freed. Any exception after the items were listed has
        `accepted`; it is 0 where the bus is as it was.

        It blocks as `put` does, and several threads may call it at the same time.

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
        """Whether a group has ended without this sample, so that work on it can stop.

        That is so once a group has the samples that it needs (``need=`` below group_size), was
        given up for a failed sample, or has passed its deadline. A read of shared memory, of less
        than a microsecond: cheap enough to ask after each turn of a rollout.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `put`.
        round : int or None
            The group's round. A group without one is never cancelled: its key may begin again.
        split : str, optional
            Who the group is for, as for `put`.

        Returns
        -------
        bool
            True for the last 1,024 groups of the bus that ended so.

        Raises
        ------
        TypeError, ValueError
            As for `put`.
        BusClosedError
            The producer is closed, or was made before a fork.
        """
    def _put_group(self, items: list[dict[str, Any]], timeout: float | None, /) -> None: ...
    def close(self) -> None:
        """Abort open reservations and leave the bus; what was committed stays.

        Copies that other threads have under way end first. A second call does nothing.
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
    def _fail(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        need: int | None,
        index: int,
        score: float,
        policy_version: int,
        round: int | None,
        split: str | None,
        meta: str,
        timeout: float | None,
    ) -> None: ...
    _fail_unsized = _fail
    def _declare(self, schema: DeclaredSchema | None, /) -> None: ...
    def _answer(self, claim: _Claim, flags: int, instance_id: str, /, **arguments: Any) -> bool: ...
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
