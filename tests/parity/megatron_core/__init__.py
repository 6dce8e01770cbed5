"""The real megatron-core on a CPU, in a process of its own: what the tests of parity compare with.

`python -O -m tests.parity.megatron_core FOLDER` does all of it; `schedules` instead of a folder prints the table that
`tests/train/megatron_schedules.json` holds.
"""
