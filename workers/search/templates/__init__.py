"""Schedule templates: for each kind of computation, the few schedules worth trying and how each is written."""
