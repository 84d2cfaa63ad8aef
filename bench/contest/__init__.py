"""The harness that measures all contenders alike; `bench.contest.child` runs it for one of them."""
