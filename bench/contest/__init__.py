"""The contest with other ways to move a trajectory: `contest.run` asks, `contest.child` answers."""
