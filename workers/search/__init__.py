"""Search for schedules: spaces, proposers, builder, runner, cost model, scheduler. Each can be exchanged alone."""
