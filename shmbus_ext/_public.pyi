"""What users meet of the C core when they take, with its docstrings. For type checkers and editors.

There is no module of this name at run time: these are classes of ``shmbus_ext._core``. The build
takes their ``__doc__`` and signatures from here.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, overload

from numpy.typing import NDArray
from typing_extensions import Self

from shmbus.copies import TrajectoryCopy
from shmbus.rows import Row
from shmbus_ext._core import Intake

class Trajectory:
    """One trajectory, read from the ring; ``trajectory[name]`` is a read-only view of a field.

    A view keeps the record's space for as long as the view lives, also after the acknowledgement
    and after the end of the consumer. Views cannot be taken after the acknowledgement.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    index : int
        Which sample of its group, from 0.
    group_size : int
        Samples in its group.
    need : int
        Samples that complete its group: group_size, unless its producer asked for fewer.
    split : str
        Who it is for: "train", or what its producer said.
    key : str or tuple
        What tells its group: instance_id, or (instance_id, round); of another split than
        "train" (instance_id, round or None, the split's number).
    round : int or None
        The producer's round, where it gave one.
    score : float
        The reward. Of one that was put with ``score=None`` whoever reads it sets this, in this
        process; before that, reading it raises UnscoredError.
    scored : bool
        Whether it has a score.
    policy_version : int
        Version of the policy that sampled it; the oldest, where there were several.
    newest_policy_version : int
        The newest policy that sampled a part of it.
    sequence : int
        Its number among its producer's commits, from 0.
    producer_id : int
        Its producer's number, unique on the bus.
    committed_ns : int
        When it was committed: CLOCK_MONOTONIC, nanoseconds.
    nbytes : int
        Bytes that it takes in the ring, header and padding included.
    released : bool
        Whether it was acknowledged or dropped.
    failed : bool
        Whether it reports that its sample failed; False for all that is delivered.
    meta : object
        What the producer gave as meta, decoded when it is first read; None where it gave none.
    rows : list of Row
        Its rows, each a mapping of names to views, with its `prefix_length`; one, unless it was
        put with rows=.
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
        """Return a field's read-only view, or the default where there is no such field.

        Parameters
        ----------
        name : str
            The field.
        default : object, optional
            What to return where the trajectory has no such field.

        Returns
        -------
        numpy.ndarray
            A view of the ring, without a copy; or `default`.

        Raises
        ------
        BusClosedError
            The trajectory was acknowledged or dropped, or its consumer is closed.
        TypeError
            This process does not know the field's dtype.
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
            The trajectory has no such field.
        """

    def items(self) -> tuple[tuple[str, NDArray[Any]], ...]:
        """Return the names of the array fields, each with its read-only view.

        Returns
        -------
        tuple of (str, numpy.ndarray)
            In the producer's order; ``dict(trajectory.items())`` has all fields.

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
        """Copy it out of the ring.

        Returns
        -------
        TrajectoryCopy
            It is read in the same way, owns its arrays, and can be pickled.

        Raises
        ------
        BusClosedError, TypeError
            As for `get`.
        """
    def to_dict(self) -> dict[str, Any]:
        """Return the keywords of `Producer.put` that put it again, with owned arrays.

        Returns
        -------
        dict
            "instance_id", "group_size", "index", "score", "policy_version", "round", "split",
            "need", "meta", and each array field by its name.

        Raises
        ------
        BusClosedError, TypeError
            As for `get`.
        """

class GroupBase:
    """The samples of one lease, for reading: what `shmbus.Group` is made of.

    ``len(group)``, ``group[i]`` and iteration are those of `trajectories`.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int or None
        The producers' round, where they gave one.
    size : int
        Samples in a complete group.
    state : str
        Where the lease stands.
    trajectories : list of Trajectory
        The samples, ordered by index: a list of the caller's own, which it may change.
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
        """Make a group of each lease; what a consumer calls.

        Parameters
        ----------
        consumer : object
            Who is asked to end the leases.
        leases : list
            What is under lease: entries of a group table, or leases of a daemon's client.

        Returns
        -------
        list
            A group of this type for each, in their order.

        Raises
        ------
        TypeError
            The samples of a lease are no list.
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
        """Take complete groups of a split, in the order of completion, as soon as there is one.

        Parameters
        ----------
        max_groups : int
            How many at the most. With ranks, how many each rank gets at the most of the next step;
            this rank's shard of it is taken, and all ranks have to ask for the same number.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.
        split : str, optional
            The split, such as "eval"; None for the Consumer's own. With a daemon no other than
            that can be taken: a Consumer is made for each split.

        Returns
        -------
        list[Group]
            Maybe empty. Each is leased to the caller until it is acknowledged or given back.

        Raises
        ------
        ProtocolError
            A duplicate came, under ``duplicate="error"``; once for each, with nothing lost.
        TypeError, ValueError
            `split` is no label, or, with a daemon, not this Consumer's.
        StallError
            Nothing has moved for too long, under ``on_stall="raise"``.
        BusBusyError
            This Consumer has no rank, and ranks came back to a restarted daemon.
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
