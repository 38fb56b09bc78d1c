"""Training from a script or a notebook: `penstock.train(...)` starts a run, `penstock.Run` follows one.

It is the same run as that of `penstock run`: the same settings, processes and directory. It ends with the Python
process that started it, and can be resumed like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orjson

import penstock
from penstock.config.check import check_environment
from penstock.config.load import dump, load, resolve_paths, validate
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.errors import INTERRUPTED, ConfigError, PenstockError, RunFailed
from penstock.launch.charts import curve_svg
from penstock.launch.markup import filled, joined
from penstock.launch.summary import plot, read_curves
from penstock.launch.user_code import UserCode
from penstock.runtime.beneath import read_beneath
from penstock.runtime.following import Following
from penstock.runtime.interpreter import python_command, search_path
from penstock.runtime.named import nearest
from penstock.runtime.rundir import RunDir, require_own_configuration

Named = str | Callable[..., Any] | Mapping[str, Any]
State = Literal["running", "complete", "interrupted", "failed", "killed"]

KEYWORDS = {"environment": "env", "model": "model", "steps": "steps"}
"""Required keywords of `train`, and their keys in the table of a pipeline."""
POLL_S = 0.1
STOP_S = 60.0
START_S = 30.0
"""If no supervisor locks the run directory within this time, the run has not started."""
CONSOLE = "console"
"""Name of the log with the terminal output of `penstock run`."""


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    environment: Named | None = None,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    steps: int | None = None,
    name: str | None = None,
    show: bool | None = None,
    **settings: Any,
) -> Run:
    """Starts a run and returns a handle at once.

        def shouts(prompts, completions, *, answer, **columns):
            return [float(text == right.upper()) for text, right in zip(completions, answer)]

        run = penstock.train(environment="copy", reward=shouts, model="tiny", steps=100, rollout={"max_new_tokens": 4})
        for step in run:
            print(step["step"], step["reward"])

    `environment` is a built-in name, a class, or a table as in the TOML. `reward` is one function or several, which
    replace those of the environment. `model` is `"tiny"`, `"mlp"`, a directory, `"hub:owner/name"`, or a table. All
    other keywords are the tables and keys of the configuration, with the same defaults and checks:
    `rollout={"group_size": 8}`, `train={"advantage": my_function}`, `run={"seed": 1}`. `config` is a TOML file or a
    table to start from.

    Functions and classes may be passed as objects wherever the TOML takes `module:name`. `show` prints the run's
    progress to standard output; the default is True if that is a terminal.
    """
    code = UserCode()
    tree = _tree(config)
    _place(tree, settings)
    _place(tree, _settings(environment, reward, model, steps, name))
    tree = code.resolve(tree)
    resolve_paths(tree, Path.cwd())
    _check_complete(tree)
    run_table = tree.setdefault("run", {})
    run_table["extra_path"] = [*map(str, run_table.get("extra_path", [])), *map(str, code.paths)]
    resolved = validate(tree, source="penstock.train")
    run = _created(resolved, code)
    return Run(run.root, _start(run, show=sys.stdout.isatty() if show is None else show))


def _created(config: Config, code: UserCode) -> RunDir:
    """Creates a run directory with the code that the processes import; removes it if the configuration is rejected."""
    run = RunDir.create(config.run.dir, config.run.name, dump(config), penstock.__version__)
    try:
        if code.text:
            folder = run.root / "code"
            folder.mkdir()
            (folder / f"{code.module}.py").write_text(code.text, encoding="utf-8")
            paths = [*config.run.extra_path, folder]
            config = config.model_copy(update={"run": config.run.model_copy(update={"extra_path": paths})})
            run.write_config(dump(config))
        check_environment(config)
    except PenstockError:
        run.remove()
        raise
    return run


def _start(run: RunDir, *, show: bool) -> subprocess.Popen[bytes]:
    """Starts `penstock run` as a child, which ends with this process."""
    begun = ("run", "--resume", str(run.root), "--parent", str(os.getpid()))
    command = python_command("-m", "penstock.cli.entry", *begun)
    home = Path(penstock.__file__).parents[1]  # the child must import the same Penstock as this process
    environment = os.environ | {"PYTHONPATH": search_path(home)}
    with run.log_path(CONSOLE).open("ab") as log:
        output = None if show else log
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=not show
        )


def _tree(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {"pipeline": [{"name": "train"}]}
    if isinstance(config, Mapping):
        tree = dict(config)
    else:
        require_own_configuration(Path(config), trusts=False)
        try:
            tree = tomllib.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {config}: {error}") from error
        resolve_paths(tree, Path(config).parent)
    pipelines = tree.get("pipeline", [{"name": "train"}])
    tree["pipeline"] = [dict(one) for one in pipelines] if isinstance(pipelines, list | tuple) else pipelines
    return tree


def _settings(
    environment: Named | None,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None,
    model: str | os.PathLike[str] | Mapping[str, Any] | None,
    steps: int | None,
    name: str | None,
) -> dict[str, Any]:
    """The keyword arguments of `train` as tables of a pipeline."""
    tables: dict[str, Any] = {}
    if environment is not None:
        tables["env"] = dict(environment) if isinstance(environment, Mapping) else {"name": environment}
    if reward is not None:
        rewards = list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
        tables["env"] = tables.get("env", {}) | {"rewards": rewards}
    if model is not None:
        tables["model"] = _model(model)
    if steps is not None:
        tables["steps"] = steps
    if name is not None:
        tables["run"] = {"name": name}
    return tables


def _model(model: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The table `model`. Names on the hub need the prefix `hub:`: a mistyped path must not become a download."""
    if isinstance(model, Mapping):
        return dict(model)
    text = os.fspath(model)
    if text in ("tiny", "mlp"):
        return {"kind": text}
    if text.startswith("hub:"):
        return {"kind": "hub", "name": text.removeprefix("hub:")}
    if not Path(text).is_dir():
        raise ConfigError(
            f"model {text!r} is not a directory; expected 'tiny', 'mlp', a directory, or 'hub:{text}' for a model on "
            "the Hugging Face hub"
        )
    return {"kind": "path", "path": text}


def _check_complete(tree: Mapping[str, Any]) -> None:
    """Raises `ConfigError` with the missing keywords; validation would name the keys of the TOML."""
    if not isinstance(tree["pipeline"], list) or len(tree["pipeline"]) != 1:
        return
    [pipeline] = tree["pipeline"]
    missing = [keyword for keyword, key in KEYWORDS.items() if key not in pipeline]
    if "environment" not in missing and isinstance(pipeline["env"], Mapping) and "name" not in pipeline["env"]:
        missing.insert(0, "environment")
    if missing:
        raise ConfigError(
            f"penstock.train needs {' and '.join(f'{one}=…' for one in missing)}: see help(penstock.train)"
        )


def _place(tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Puts each keyword where the TOML has it: in the only pipeline, or at the top level."""
    pipelines = tree["pipeline"]
    for key, value in settings.items():
        if key in Config.model_fields and key != "pipeline":
            table = tree
        elif key not in PipelineSection.model_fields:
            known = [*KEYWORDS, *PipelineSection.model_fields, *Config.model_fields]
            raise ConfigError(f"penstock.train has no setting {key!r}{nearest(key, known)}")
        elif isinstance(pipelines, list) and len(pipelines) == 1:
            table = pipelines[0]
        else:
            raise ConfigError(f"{key} is a setting of one pipeline, and there are several: set it in `config`")
        former = table.get(key)
        table[key] = {**former, **value} if isinstance(former, Mapping) and isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG that a notebook displays."""

    path: Path

    def _repr_png_(self) -> bytes:
        return read_beneath(self.path.parents[1], self.path)


class Run:
    """A run, live or ended: `penstock.Run("runs/quickstart-20260101-120000")`, or the result of `penstock.train`.

    Iterating yields the metrics of each step as they arrive, until the run ends. As a context manager, it stops the
    run at the end of the block.
    """

    def __init__(self, path: str | os.PathLike[str], process: subprocess.Popen[bytes] | None = None) -> None:
        self._run = RunDir.open(Path(path))
        self._process = process
        if process is not None:
            atexit.register(self._at_exit)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run.root

    @property
    def config(self) -> Config:
        """The settings of the run, with every default."""
        return load(self._run.config_path)

    @property
    def state(self) -> State:
        """Whether the run is live, or how it ended."""
        if self._is_live():
            return "running"
        ending = self._run.read_ending()
        if ending is not None:
            return ending["how"]
        code = None if self._process is None else self._process.returncode
        return "failed" if code == ConfigError.exit_code else "interrupted" if code == INTERRUPTED else "killed"

    def _is_live(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        if self.config.launch.kind == "ray":
            return self._run.read_ending() is None
        if not self._run.lock_path.exists():  # no supervisor yet
            return self._run.read_ending() is None and time.time() - self.path.stat().st_mtime < START_S
        return self._run.is_supervised()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.steps()

    def steps(self, pipeline: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the metrics of every step, from the first one on, as they arrive. A step that was retrained after a
        crash is yielded twice. If the run failed, raises at the end, as `wait` does."""
        for entry in self._entries(pipeline, follow=True):
            if entry.get("kind") == "step":
                yield entry
        self.wait()

    def _entries(self, pipeline: str | None, *, follow: bool) -> Iterator[dict[str, Any]]:
        following = Following(self._run.metrics_path)
        while True:
            live = follow and self._is_live()
            lines = following.read()
            for line in lines:
                with contextlib.suppress(orjson.JSONDecodeError):
                    entry = orjson.loads(line)
                    if pipeline is None or entry.get("pipeline") == pipeline:
                        yield entry
            if not lines and not live:
                return
            if not lines:
                time.sleep(POLL_S)

    def wait(self, timeout_s: float | None = None) -> Run:
        """Returns when the run has ended. Raises the error of a run that failed or was killed; TimeoutError after
        `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._is_live():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.path} is still running after {timeout_s:g} s")
            time.sleep(POLL_S)
        state = self.state
        if state == "failed":
            ending = self._run.read_ending()
            if ending is not None:
                raise (ConfigError if ending.get("mistake") else RunFailed)(str(ending.get("sentence")))
            raise ConfigError(self._last_lines())
        if state == "killed":
            raise RunFailed(f"{self.path} was killed; resume with: penstock run --resume {self.path}")
        return self

    def stop(self, timeout_s: float = STOP_S) -> Run:
        """Stops the run gracefully: finishes work in flight and writes a checkpoint. The run can be resumed."""
        if self._process is None and self.config.launch.kind == "ray":
            raise ConfigError(f"{self.path} runs on Ray; stop it with: penstock attach {self.path} --stop")
        if self._is_live():
            pid = self._process.pid if self._process is not None else self._run.supervisor_pid()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
        return self.wait(timeout_s)

    def metrics(self, pipeline: str | None = None, kind: str = "step") -> Any:
        """One row per step (or per `kind="evaluation"`): a pandas DataFrame where pandas is installed, else a list of
        dicts. A step that was retrained after a crash replaces its first attempt."""
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for entry in self._entries(pipeline, follow=False):
            if entry.get("kind") == kind:
                rows[entry["pipeline"], entry.get("step", entry.get("version", 0))] = entry
        ordered = [rows[key] for key in sorted(rows)]
        try:
            import pandas  # type: ignore[import-not-found]
        except ImportError:
            return ordered
        return pandas.DataFrame(ordered)

    def plot(self) -> Picture | None:
        """The reward curves as a PNG, which a notebook displays; None before the first step."""
        picture = plot(self._run)
        return None if picture is None else Picture(picture)

    def log(self, process: str = CONSOLE) -> str:
        """The log of a process; `console` is the terminal output of the run."""
        logs = {path.stem: path for path in self._run.files("logs/*.log")}
        if process not in logs:
            raise ConfigError(f"there is no log {process!r}{nearest(process, logs)}")
        return self._run.read(logs[process]).decode("utf-8", "replace")

    def _last_lines(self) -> str:
        try:
            return self.log().strip()[-2000:] or f"{self.path} did not start"
        except ConfigError:
            return f"{self.path} did not start"

    def _at_exit(self) -> None:
        """Waits for the run at the end of a script. Stops it if the script failed or the session is interactive."""
        if not self._is_live():
            return
        failed = hasattr(sys, "last_type")
        interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        try:
            self.stop() if failed or interactive else self.wait()
        except (KeyboardInterrupt, TimeoutError, PenstockError) as error:
            if self._is_live():
                with contextlib.suppress(PenstockError, TimeoutError):
                    self.stop()
            sys.stderr.write(f"{self.path}: {error or 'stopped'}\n")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._is_live():
            self.stop()

    def __repr__(self) -> str:
        last = max((curve.points()[-1][0] + 1 for curve in self._curves().values() if curve.rewards), default=0)
        return f"<penstock.Run {self.path}: {self.state}, {last} steps>"

    def _curves(self) -> dict[str, Any]:
        return read_curves(self._run.metrics_path)

    def _repr_html_(self) -> str:
        parts = [filled("<b>{}</b>: {}", self.path.name, self.state)]
        for name, curve in sorted(self._curves().items()):
            if curve.rewards:
                parts.append(curve_svg(curve.points(), title=f"{name}: reward"))
        return joined(parts, "<br>")
