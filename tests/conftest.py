"""One thread of torch for every process of a test run: pytest starts a process for each core, and threads that wait for
a core they share make small models several times slower. And one folder for the key that marks runs, instead of the
user's."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the first import of torch
if "XDG_STATE_HOME" not in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="penstock-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
