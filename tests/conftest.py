"""One thread of torch for every process of a test run: pytest starts a process for each core, and threads that wait for
a core they share make small models several times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the first import of torch
