"""A rank of a job that is killed, and resumes from a checkpoint: settings come as JSON.

Ranks meet in each step with their batches, and after rank 0's save.
"""

import json
import random
import sys
import time
from pathlib import Path

from trainer_adapter import OnlineDataHandler


def main() -> None:
    told = json.loads(sys.argv[1])
    rank, world_size = told["rank"], told["world_size"]
    rng = random.Random(told["seed"] * 10 + rank)
    folder, checkpoints = Path(told["folder"]), Path(told["checkpoints"])

    def meet(at: str, say: object = None) -> list[object]:
        new = folder / f"{at}.{rank}.new"
        new.write_text(json.dumps(say))
        new.rename(folder / f"{at}.{rank}")
        paths = [folder / f"{at}.{other}" for other in range(world_size)]
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [json.loads(path.read_text()) for path in paths]

    ranks = {} if world_size == 1 else {"rank": rank, "world_size": world_size}
    handler = OnlineDataHandler(
        told["bus"], groups_per_batch=1, prefetch=rng.choice([0, 2]), daemon=True, **ranks
    )
    history = []
    if told["load"] is not None:
        saved = json.loads(Path(told["load"]).read_text())
        history = saved["history"]
        handler.load_state_dict(saved["state"])
    handler.offer(
        [{"instance_id": f"q{n}", "need": 2 + n % 2} for n in range(told["prompts"])],
        ahead=3,
        group_size=3,
    )
    held = []
    while True:
        try:
            batch = handler.next_batch(60)
        except EOFError:
            if world_size == 1:
                break
            print("dry", flush=True)  # the rest is too small for a step of every rank
            time.sleep(600)
        held.append(batch)
        names = [
            [g.instance_id, t.index, t.producer_id, t.sequence] for g in batch.groups for t in g
        ]
        step = handler.step
        history += [name for said in meet(f"trained{step}", names) for name in said]
        if rank == 0:
            state = json.loads(json.dumps(handler.state_dict()))
            new = checkpoints / f"{step:04}.new"
            new.write_text(json.dumps({"history": history, "state": state}))
            new.rename(checkpoints / f"{step:04}.json")
            print(f"saved {step}", flush=True)
        meet(f"saved{step}")
        while held and rng.random() < 0.7:
            handler.ack(held.pop(0))
    for batch in held:
        handler.ack(batch)
    handler.close()
    (checkpoints / "over.new").write_text(json.dumps(history))
    (checkpoints / "over.new").rename(checkpoints / "over")


main()
