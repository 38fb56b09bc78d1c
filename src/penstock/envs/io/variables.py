"""Environment variables of programs that act on a model's text: they see a list of names, and no secrets of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.runtime.parent import MEMBER_VARIABLE

PASSED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE"),
        *("PYTHONPATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("XDG_CACHE_HOME", "UV_CACHE_DIR", "HF_HOME", "HF_HUB_OFFLINE"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES"),
        MEMBER_VARIABLE,
    )
)
"""Besides `LC_…`. No proxies: their addresses may hold passwords."""


def passed_variables(more: Sequence[str] = ()) -> dict[str, str]:
    """Those of this process that are passed on, and `more` by name. ConfigError if one of these is not set."""
    missing = [name for name in more if name not in os.environ]
    if missing:
        raise ConfigError(f"env.options.pass_env names {missing[0]!r}, and no variable of that name is set")
    names = PASSED.union(more)
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}
