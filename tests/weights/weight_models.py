"""Models of the shapes that weights come in, and comparing them bit for bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from shmbus.pool.pool_file import pool_path
from shmbus.weights import ModuleSource, WeightPublisher, WeightSource, WeightSubscriber


class Odd(torch.nn.Module):
    """Tied, transposed, mixed dtypes, empty, scalar, and buffers that stay or do not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(97, 24)
        self.head = torch.nn.Linear(24, 97, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(33, 17, generator=made).t())
        self.low = torch.nn.Parameter(torch.randn(5, 7, generator=made).half())
        self.brain = torch.nn.Parameter(torch.randn(129, 3, generator=made).bfloat16())
        self.high = torch.nn.Parameter(torch.randn(3, generator=made).double())
        self.scale = torch.nn.Parameter(torch.randn((), generator=made))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.eight = torch.nn.Parameter(
            torch.randn(4, 4, generator=made).to(torch.float8_e4m3fn), requires_grad=False
        )
        self.register_buffer("steps", torch.tensor([seed], dtype=torch.int64))
        self.register_buffer("mask", torch.rand(11, generator=made) > 0.5)
        self.register_buffer("scratch", torch.randn(5), persistent=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.randn(97, 24, generator=made))


def many(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A model of so many small tensors of uneven shapes."""
    made = torch.Generator().manual_seed(seed)
    module = torch.nn.Module()
    for number in range(count):
        value = torch.randn((1 + number % 13, 1 + number * 7 % 31), generator=made).to(dtype)
        module.register_parameter(f"p{number}", torch.nn.Parameter(value))
    return module


def without_memory(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> torch.nn.Module:
    """A model of parameters by dotted names, on the meta device."""
    model = torch.nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        at = model
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        at.register_parameter(leaf, torch.nn.Parameter(made))
    return model


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same state, bit for bit."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(bits(left[k]) == bits(right[k]) for k in left)


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.fill_(value)


def step(model: torch.nn.Module, made: torch.Generator, share: float) -> None:
    """Change a share of all elements, each to any bits: NaN, -0.0 and denormals among them."""
    for tensor in model.state_dict().values():
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.t().reshape(-1)
        if flat.numel() == 0 or tensor.dtype == torch.bool:
            continue
        count = int(flat.numel() * share + torch.rand((), generator=made).item())
        at = torch.randint(flat.numel(), (count,), generator=made)
        width = tensor.element_size()
        patch = torch.randint(0, 256, (count, width), generator=made, dtype=torch.uint8)
        flat.view(torch.uint8).view(-1, width)[at] = patch
        if not tensor.is_contiguous():
            tensor.t().copy_(flat.view(tensor.t().shape))


class Unwritable(torch.Tensor):
    """A carrier with failing copies, as on a device without memory."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.Tensor.copy_, torch._foreach_copy_):
            raise RuntimeError("injected: no memory")
        return super().__torch_function__(function, types, args, kwargs or {})


def square() -> torch.nn.Module:
    """A model of float32 matrices of one shape, and a buffer."""
    module = torch.nn.Module()
    for number in range(6):
        value = torch.arange(64, dtype=torch.float32).view(8, 8) + 100 * number
        module.register_parameter(f"p{number}", torch.nn.Parameter(value))
    module.register_buffer("scale", torch.ones(3))
    return module


def write(model: Any) -> None:
    with torch.no_grad():
        model.p3.add_(1)


def move(model: Any) -> None:
    # The same parameter, in other memory; torch counts no write.
    model.p3.data = torch.full_like(model.p3, 7)


def turn(model: Any) -> None:
    value: torch.Tensor = model.p3.data
    rows, columns = value.shape
    strides = (1, rows) if value.is_contiguous() else (columns, 1)
    model.p3.data = value.as_strided((rows, columns), strides)


def replace(model: Any) -> None:
    model.p3 = torch.nn.Parameter(torch.full_like(model.p3, 9))


CHANGES = (write, move, turn, replace)


def swap(model: Any) -> None:
    """Exchange two matrices of one shape."""
    model.p4, model.p5 = model.p5, model.p4


MakePublisher = Callable[..., WeightPublisher]


def load_newest(subscriber: WeightSubscriber, target: Any, **options: Any) -> None:
    with subscriber.latest(timeout=20) as weights:
        weights.load_into(target, **options)


@contextmanager
def publishing(bus: str, **always: Any) -> Iterator[MakePublisher]:
    """Make publishers of a model or a source; the weights are removed at the end."""
    with ExitStack() as stack:
        stack.callback(Path(pool_path(bus, "weights")).unlink, missing_ok=True)

        def make(model: torch.nn.Module | WeightSource, **options: Any) -> WeightPublisher:
            source = ModuleSource(model) if isinstance(model, torch.nn.Module) else model
            made = WeightPublisher(bus, source, **{**always, **options})
            stack.callback(made.close)
            return made

        yield make


@contextmanager
def published(
    bus: str, source: WeightSource, reader: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[WeightPublisher, WeightSubscriber]]:
    """A publisher, and a subscriber with its own options."""
    with (
        WeightPublisher(bus, source, **options) as publisher,
        WeightSubscriber(bus, **(reader or {})) as subscriber,
    ):
        yield publisher, subscriber
