"""A vLLM server that ends with the worker that started it: `python -m penstock.engines.vllm.main PARENT FLAGS...`.

Runs in the environment that has vLLM, which may differ from the worker's. Processes that the server starts end with the
server: the plugin that vLLM loads in each of them sees to that.
"""

from __future__ import annotations

import runpy
import sys

from penstock.engines.vllm.leftovers import name_shared_memory
from penstock.runtime.parent import die_with_parent

SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    parent_pid, *flags = sys.argv[1:]
    die_with_parent(int(parent_pid))
    name_shared_memory()
    sys.argv = [SERVER, *flags]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
