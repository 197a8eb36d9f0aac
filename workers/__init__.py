"""Everything that knows TVM or runs a task: front ends, graph passes, search, devices, packaging, Celery."""
