"""``shmbus proxy NAME``: its options and requirements; found by its entry point.

Invariant: importing this module loads nothing of the extra; `run` does.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Final
from urllib.parse import urlsplit

from shmbus.cli._options import Commands, add_numbers, bus_name, number_of, require_extra, whole
from shmbus.http.options import add_server_options, allow_connections, read_token, settings_of
from shmbus.pool.server_rows import engine_address
from shmbus.recorder.sampling import OPTIONS

#: Options with a number: name, unit, default, meaning.
_NUMBERS: Final = (
    ("sessions", "N", 4096, "most sessions open at a time"),
    ("calls", "N", 1000, "most calls in a session"),
    ("tokens", "N", 1 << 20, "most tokens in all rows of a session"),
    ("idle", "SECONDS", 600, "seconds without a call until a session opened over HTTP fails"),
    ("body-limit", "MIB", 32, "largest body of a call"),
    ("memory", "MIB", 2048, "most memory for all bodies and sessions"),
)

_EXAMPLES = """\
examples:
  shmbus proxy run1 --engine http://127.0.0.1:8000
  shmbus proxy run1 --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001 --max-lag 4

A worker then gives its agent session.base_url and session.api_key of producer.session(request).
The token of POST /sessions may be in the variable SHMBUS_PROXY_TOKEN, the engines' key in
SHMBUS_ENGINE_KEY. See docs/agents.md.
"""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = commands.add_parser(
        "proxy",
        help="record agents that speak to an OpenAI or Anthropic endpoint, as rollouts of a bus",
        description="Stands before inference servers, and keeps what they sampled: token ids, "
        "logprobs and the version of the weights of each call, joined into the rows of a sample, "
        "until SIGTERM or SIGINT.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", type=bus_name, help="the bus")
    parser.add_argument(
        "--engine", dest="engines", metavar="URL", type=_engine, action="append", required=True,
        help="a vLLM or SGLang server, such as http://127.0.0.1:8000; may be given several times",
    )  # fmt: skip
    add_server_options(parser, 8080, "warning", "opens sessions")
    parser.add_argument(
        "--max-lag", metavar="N", type=whole(0),
        help="versions behind the trainer's from which a session ends (default: any)",
    )  # fmt: skip
    parser.add_argument(
        "--assume-trainer-version", action="store_true",
        help="label samples of engines that read no weights from this machine's pool with the "
        "trainer's version, and mark these samples; without it such engines get no calls once the "
        "trainer has another version than 0",
    )  # fmt: skip
    parser.add_argument(
        "--routed-experts", dest="experts", metavar="LAYERSxTOPK", type=_experts,
        help="record the experts of each token too, such as 48x8",
    )  # fmt: skip
    parser.add_argument(
        "--stitch", metavar="on|off", type=_switch, nargs="?", const=True, default=True,
        help="continue a conversation by its sampled token ids, as one row, where the engine and "
        "the chat template allow; off: the engine renders every call (default on)",
    )  # fmt: skip
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument(
        "--force-sampling", metavar="NAME=VALUE,...", type=_sampling, default={},
        help="temperature, top_p and top_k of every call, such as temperature=1,top_p=1,top_k=-1",
    )  # fmt: skip
    policy.add_argument(
        "--require-sampling", metavar="NAME=VALUE,...", type=_sampling, default={},
        help="as --force-sampling, and refuse calls that give other values",
    )  # fmt: skip
    parser.add_argument(
        "--train-grammar", action="store_true",
        help="train tokens that were sampled under a grammar (default: masked)",
    )  # fmt: skip
    add_numbers(parser, _NUMBERS)
    parser.set_defaults(run=run)


def _engine(text: str) -> str:
    try:
        parts = urlsplit(text)
        # Reading a port that is none raises ValueError.
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    plain = text.isascii() and not {" ", "?", "#"} & set(text)
    if not good or not plain or parts.username is not None:
        raise argparse.ArgumentTypeError(
            f"expected an address such as http://127.0.0.1:8000, without a key, got {text!r}"
        )
    return engine_address(text)


def _experts(text: str) -> tuple[int, int]:
    layers, times, experts = text.partition("x")
    if not times or not all(n.isdecimal() and int(n) > 0 for n in (layers, experts)):
        raise argparse.ArgumentTypeError(
            f"expected the layers and the experts of a token, such as 48x8, got {text!r}"
        )
    return int(layers), int(experts)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"expected on or off, got {text!r}")
    return text == "on"


def _sampling(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        number = number_of(value)
        least, most = OPTIONS.get(name, (math.inf, -math.inf))
        if not least <= number <= most or (name == "top_k" and number % 1):
            known = (f"{each}={a:g} to {b:g}" for each, (a, b) in OPTIONS.items())
            raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, got {part!r}")
        found[name] = int(number) if name == "top_k" else number
    return found


def run(arguments: argparse.Namespace) -> int:
    """Serve."""
    require_extra("proxy", "aiohttp")
    from shmbus.daemon import logs
    from shmbus.recorder.server import serve
    from shmbus.recorder.settings import Settings

    settings = settings_of(
        Settings,
        arguments,
        bus=arguments.name,
        token=read_token(arguments.token_file, "SHMBUS_PROXY_TOKEN"),
        engine_key=os.environ.get("SHMBUS_ENGINE_KEY"),
    )
    logs.set_up(settings.log_format, settings.log_level)
    allow_connections()
    return serve(settings, lambda url: print(f"agents of bus {settings.bus}: {url}/v1", flush=True))
