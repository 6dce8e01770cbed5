"""Pipeline parallelism: the executor of a timetable, and what stages send each other."""
