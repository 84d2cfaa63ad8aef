"""Reading many trajectories at once: pack them into arrays, plan a gather."""
