"""A trainer process that trains, saves, acknowledges a part, and is killed.

Settings come as JSON: bus, handler options, `load`, `steps`, `save`, `acks`, and a folder `meet`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from trainer_adapter import OnlineDataHandler


def main() -> None:
    told = json.loads(sys.argv[1])
    handler = OnlineDataHandler(told["bus"], **told["options"])
    load = told.get("load")
    if load is not None:
        read = [
            json.loads(Path(path).read_text()) for path in ([load] if str(load) == load else load)
        ]
        handler.load_state_dict(read[0] if str(load) == load else read)
    batches = []
    for _ in range(told["steps"]):
        try:
            batches.append(handler.next_batch(told.get("timeout", 30)))
        except (TimeoutError, EOFError):
            break
        names = [f"{g.instance_id}/{t.index}" for g in batches[-1].groups for t in g]
        print(json.dumps(names), flush=True)
    meet = told.get("meet")
    if meet is not None:
        options = told["options"]
        ranks = range(options["world_size"])
        Path(meet, str(options["rank"])).touch()
        while not all(Path(meet, str(rank)).exists() for rank in ranks):
            time.sleep(0.01)
    if told.get("save"):
        Path(told["save"]).write_text(json.dumps(handler.state_dict()))
    for batch in batches[: told.get("acks", 0)]:
        handler.ack(batch)
    if told.get("acks"):
        handler.stats()  # a daemon has them by now
    print("over", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


main()
