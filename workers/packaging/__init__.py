"""From the best schedules to a library that has been compared with the reference and timed on its own device."""
