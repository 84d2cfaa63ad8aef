"""User-visible C classes for taking, with their docstrings. For type checkers and editors.

No module of this name exists at run time: the classes live in ``shmbus_ext._core``. The build takes
their ``__doc__`` and signatures from here.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, overload

from numpy.typing import NDArray
from typing_extensions import Self

from shmbus.data.copies import TrajectoryCopy
from shmbus.data.sample_rows import Row
from shmbus_ext._core import Intake

class Trajectory:
    """One trajectory, read from the ring; ``trajectory[name]`` is a read-only view of a field.

    A view keeps the record's space allocated during the view's life, also after the acknowledgement
    and after the end of the consumer. Views must be taken before the acknowledgement.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    index : int
        Position in its group, from 0.
    group_size : int
        Samples in its group.
    need : int
        Samples of a complete group: group_size, unless its producer asked for fewer.
    split : str
        The group's split: "train", or the producer's label.
    key : str or tuple
        Key of its group: instance_id, or (instance_id, round); in a split other than "train"
        (instance_id, round or None, the split's number).
    round : int or None
        The producer's round, if given.
    score : float
        The reward. The reader sets the score of a sample put with ``score=None``, in this process;
        until then, reading raises UnscoredError.
    scored : bool
        True with a score.
    policy_version : int
        Version of the sampling policy; the oldest of several versions.
    newest_policy_version : int
        Newest policy version in the sample.
    sequence : int
        Position among its producer's commits, from 0.
    producer_id : int
        Its producer's number, unique on the bus.
    committed_ns : int
        Time of the commit: CLOCK_MONOTONIC, nanoseconds.
    nbytes : int
        Bytes taken in the ring, header and padding included.
    released : bool
        True after acknowledgement or drop.
    failed : bool
        True for a failure report; False for every delivered sample.
    meta : object
        The producer's meta, decoded at first access; None without meta.
    rows : list of Row
        Its rows, mappings of names to views with a `prefix_length`; a single row, unless put with
        rows=.
    """

    instance_id: str
    index: int
    group_size: int
    key: str | tuple[str, int] | tuple[str, int | None, int]
    round: int | None
    score: float
    scored: bool
    policy_version: int
    newest_policy_version: int
    need: int
    split: str
    sequence: int
    producer_id: int
    committed_ns: int
    nbytes: int
    released: bool
    failed: bool
    meta: Any
    rows: list[Row]
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def keys(self) -> tuple[str, ...]:
        """Return the names of the array fields.

        Returns
        -------
        tuple of str
            In the producer's order.
        """
    def get(self, name: str, default: Any = None, /) -> Any:
        """Return a field's read-only view, or the default for a missing field.

        Parameters
        ----------
        name : str
            The field.
        default : object, optional
            Result for a missing field.

        Returns
        -------
        numpy.ndarray
            A view of the ring, without a copy; or `default`.

        Raises
        ------
        BusClosedError
            The trajectory was acknowledged or dropped, or its consumer closed.
        TypeError
            The field's dtype is unknown to this process.
        """
    def shape(self, name: str, /) -> tuple[int, ...]:
        """Return a field's shape without making a view; also after the acknowledgement.

        Parameters
        ----------
        name : str
            The field.

        Returns
        -------
        tuple of int
            The sizes of its dimensions.

        Raises
        ------
        KeyError
            The trajectory lacks the field.
        """

    def items(self) -> tuple[tuple[str, NDArray[Any]], ...]:
        """Return the array fields as pairs of name and read-only view.

        Returns
        -------
        tuple of (str, numpy.ndarray)
            In the producer's order; ``dict(trajectory.items())`` maps names to views.

        Raises
        ------
        BusClosedError, TypeError
            As for `get`.
        """
    def values(self) -> tuple[NDArray[Any], ...]:
        """Return the read-only views of all array fields.

        Returns
        -------
        tuple of numpy.ndarray
            In the producer's order.

        Raises
        ------
        BusClosedError, TypeError
            As for `get`.
        """
    def copy(self) -> TrajectoryCopy:
        """Copy the trajectory out of the ring.

        Returns
        -------
        TrajectoryCopy
            Same read access, owned arrays, picklable.

        Raises
        ------
        BusClosedError, TypeError
            As for `get`.
        """
    def to_dict(self) -> dict[str, Any]:
        """Return keywords of `Producer.put` to put the trajectory again, with owned arrays.

        Returns
        -------
        dict
            "instance_id", "group_size", "index", "score", "policy_version", "round", "split",
            "need", "meta", and every array field by its name.

        Raises
        ------
        BusClosedError, TypeError
            As for `get`.
        """

class GroupBase:
    """The samples of one lease, for reading: base class of `shmbus.Group`.

    ``len(group)``, ``group[i]`` and iteration act on `trajectories`.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int or None
        The producers' round, if given.
    size : int
        Samples in a complete group.
    state : str
        State of the lease.
    trajectories : list of Trajectory
        The samples, ordered by index; the caller owns the list and may change it.
    """

    instance_id: str
    round: int | None
    size: int
    state: Any
    trajectories: list[Trajectory]
    _consumer: Any
    _lease: Any
    @classmethod
    def make(cls, consumer: object, leases: list[Any], /) -> list[Self]:
        """Make a group per lease; for consumers.

        Parameters
        ----------
        consumer : object
            The consumer for ending the leases.
        leases : list
            Leases: entries of a group table, or leases of a daemon's client.

        Returns
        -------
        list
            Groups of this type, in the order of the leases.

        Raises
        ------
        TypeError
            The samples of a lease are not a list.
        """
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Trajectory]: ...
    @overload
    def __getitem__(self, position: int, /) -> Trajectory: ...
    @overload
    def __getitem__(self, position: slice, /) -> list[Trajectory]: ...

_G = TypeVar("_G", bound=GroupBase)

class ConsumerBase(Generic[_G]):
    """``take``; what it does not know it leaves to ``_take`` of the subclass."""

    _intake: Intake | None
    _split: int
    def take(
        self, max_groups: int = 64, timeout: float | None = 0.1, *, split: str | None = None
    ) -> list[_G]:
        """Take complete groups of a split, in order of completion, as soon as one is ready.

        Parameters
        ----------
        max_groups : int
            Maximum number of groups. With ranks, the maximum per rank from the next step: the call
            takes this rank's shard of the step, and every rank must ask for the same number.
        timeout : float, optional
            Seconds to wait for the first group: None waits for ever, 0 returns at once.
        split : str, optional
            The split, for example "eval"; None for the Consumer's own. With a daemon only the
            Consumer's own split can be taken: make a Consumer per split.

        Returns
        -------
        list[Group]
            Possibly empty. The caller holds a lease on every group until acknowledging the group or
            giving it back.

        Raises
        ------
        ProtocolError
            A duplicate came, under ``duplicate="error"``; raised once per duplicate, without loss.
        TypeError, ValueError
            `split` is an invalid label or, with a daemon, not this Consumer's.
        StallError
            The bus stalled for too long, under ``on_stall="raise"``.
        BusBusyError
            This Consumer has no rank, and ranks came back to a restarted daemon.
        BusClosedError
            The consumer was closed, or made before a fork.
        """
