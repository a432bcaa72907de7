"""Pipeline parallelism: cut points, schedules, and the executor."""
