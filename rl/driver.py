"""Runs one run folder to its end: what `rl`, a resumed run and every child of a sweep come down to. No Hydra here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl import exit_codes
from rl.accounting import Accounting
from rl.config.build import build
from rl.config.load import load_run_yaml, save_run_yaml, to_plain
from rl.config.lock import published_lines, published_status
from rl.config.reproducible import promise
from rl.config.schema import ConfigError, FullyAsyncConfig, Mode, RunConfig
from rl.config.secrets import MaskingFormatter, mask_secrets
from rl.faults import headline
from rl.loggers.facts import run_facts
from rl.placement.ray_runtime import set_driver_env, shutdown_ray, use_cluster
from rl.plan.measured import conclude
from rl.provenance import write_provenance
from rl.run_folder import Checkpoint, Checkpoints, locked, open_checkpoint

if TYPE_CHECKING:
    from rl.loop import Run

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_GRACE_S = 5.0
"""How long a step may still take once a part of the run has failed, and to let go once it is cancelled."""
FAILED_CLOSE_S = 10.0
"""How long the parts of a run that failed may take to close; then they are ended with this process."""


def drive(config: RunConfig, run_folder: Path, *, overrides: Sequence[str]) -> int:
    """Trains or evaluates in `run_folder`, from its newest checkpoint if it has one. Returns the exit code.

    `overrides` are the words that the person gave, for provenance.
    """
    with locked(run_folder):
        checkpoint = Checkpoints(run_folder, keep_last=config.checkpoint.keep_last).newest()
        if checkpoint is not None and config.steps is not None and config.steps < checkpoint.step:
            raise ConfigError(f"steps={config.steps}, but {checkpoint.step} steps are done already. Give more.")
        save_run_yaml(config, run_folder / "run.yaml")
        _configure_logging(run_folder)
        _configure_libraries(config)
        crash = _Crash(run_folder)
        try:
            if config.mode is Mode.eval:
                return _evaluate(config, run_folder)
            return _train(config, run_folder, checkpoint, overrides, crash)
        except ConfigError:
            raise
        except KeyboardInterrupt:
            print("\nstopped before the first step", file=sys.stderr)
            return exit_codes.INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, say it in one line and keep the rest
            exit_code = crash.conclude(error)
        finally:
            shutdown_ray()
    if any(thread.name.startswith("trainer") for thread in threading.enumerate()):
        os._exit(exit_code)  # a step that nobody waits for any more would keep the interpreter from its end
    return exit_code


def _train(
    config: RunConfig, run_folder: Path, checkpoint: Checkpoint | None, overrides: Sequence[str], crash: _Crash
) -> int:
    from rl.assemble import assemble, claim_cluster, prepare_policy

    machines = claim_cluster(config, run_folder)
    print(f"run folder: {run_folder}", flush=True)
    status = published_status(config)
    for line in published_lines(config, status):
        print(line, flush=True)
    if checkpoint is not None:
        print(_resume_line(checkpoint), flush=True)
    plain = to_plain(config)
    policy = prepare_policy(config, run_folder)
    provenance = write_provenance(
        run_folder,
        overrides=overrides,
        config_plain=plain,
        extra={
            "model_folder": str(policy.folder),
            "task_fingerprint": policy.task_fingerprint,
            "published": None if status is None else status.facts(),
            "total_steps": config.num_steps(policy.task.num_prompts),
            "reproducible": promise(config).line,
        },
    )
    facts = run_facts(run_folder, config=mask_secrets(plain), provenance=provenance)
    return _run(
        _fit(
            lambda: assemble(config, run_folder, policy=policy, checkpoint=checkpoint, facts=facts, machines=machines),
            config,
            run_folder,
            crash,
        )
    )


def _run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` whose end waits for no thread: a reward may hang in one."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(_DaemonThreads())
        return runner.run(main)


class _DaemonThreads(ThreadPoolExecutor):
    """What `asyncio.to_thread` runs in: one thread for each call, so that those that hang leave others, and neither the
    end of the event loop nor that of the interpreter waits for them."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name="to_thread", daemon=True).start()
        return future


async def _fit(assemble: Callable[[], Run], config: RunConfig, run_folder: Path, crash: _Crash) -> int:
    from rl.loop import fit

    run = assemble()
    if run.progress.step >= run.cadence.total_steps:
        # Killed after its last checkpoint: what is left is the table and the picture.
        run.log.close(failed=False)
        print(f"all {run.cadence.total_steps} steps are done. To train on, give more: steps=N")
        return 0
    _stop_on_signals(run.stop)
    try:
        await _end_with_failure(fit(run), run.failure())
    except BaseException as error:
        error.add_note(f"in step {run.progress.step + 1}")
        crash.announce(error)
        try:
            await _close(run, failed=True, limit_s=FAILED_CLOSE_S)
        except TimeoutError:
            log.warning("the run's parts did not close in %.0f s and are ended", FAILED_CLOSE_S)
        except Exception:
            log.exception("closing failed too, after the error that ended the run")
        raise
    failed = run.progress.step < run.cadence.total_steps
    await _close(run, failed=failed)
    for line in conclude(config, run_folder):
        print(line, flush=True)
    if not failed:
        return 0
    print(f"stopped after step {run.progress.step}. Continue: rl resume={run_folder}", flush=True)
    return exit_codes.INTERRUPTED


async def _end_with_failure(fit: Coroutine[Any, Any, None], failed: Coroutine[Any, Any, BaseException]) -> None:
    """`fit`, or the error of a part that it does not wait for: a step may take many minutes, and a wait for a batch."""
    training, failure = asyncio.ensure_future(fit), asyncio.ensure_future(failed)
    try:
        await asyncio.wait({training, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            await asyncio.wait({training}, timeout=STEP_GRACE_S)
        if training.done():
            return training.result()
        raise failure.result()
    finally:
        failure.cancel()
        training.cancel()
        await asyncio.wait({training}, timeout=STEP_GRACE_S)


async def _close(run: Run, *, failed: bool, limit_s: float | None = None) -> None:
    """The table and the picture first: they need nothing of the engines, whose end may take a while."""
    try:
        run.log.close(failed=failed)
    finally:
        async with asyncio.timeout(limit_s):
            await run.placement.close()


def _evaluate(config: RunConfig, run_folder: Path) -> int:
    """mode=eval: a checkpoint's policy, or the model before training, on the task's evaluation sets.

    Every answer goes to eval.jsonl, every metric to eval_metrics.jsonl and to a table.
    """
    from rl.assemble import build_evaluator, build_placement, claim_cluster, prepare_policy
    from rl.clock import Clock
    from rl.evaluation.report import evaluation_rows, print_evaluation

    checkpoint = _evaluated_checkpoint(config, run_folder)
    step = 0 if checkpoint is None else checkpoint.step
    machines = claim_cluster(config, run_folder)
    policy = prepare_policy(config, run_folder)
    if not policy.task.eval_sets():
        raise ConfigError("mode=eval: the task has no evaluation set. Give it one, for example task.eval_path=FILE.")

    async def evaluate():
        trainer, engine, placement = build_placement(config, policy, run_folder, total_steps=1, machines=machines)
        try:
            await placement.start()
            async with placement.training(Clock().phase) as residency:
                if checkpoint is not None:
                    await trainer.load(checkpoint.trainer_folder)
                await residency.publish(0)
            evaluator = build_evaluator(
                config, policy.task, answers_file=run_folder / "eval.jsonl", shows_progress=True
            )
            return await evaluator.evaluate(engine, step=step)
        finally:
            await placement.close()

    results = _run(evaluate())
    rows = [{"step": step, **row} for row in evaluation_rows(results)]
    (run_folder / "eval_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print_evaluation(results)
    print(f"files: {run_folder}  (eval.jsonl: every answer; eval_metrics.jsonl)")
    return 0


def _evaluated_checkpoint(config: RunConfig, run_folder: Path) -> Checkpoint | None:
    """The one that evaluation.checkpoint names, and its run's model beside this run; None: the model as it is."""
    if config.evaluation.checkpoint is None:
        return None
    folder = Path(config.evaluation.checkpoint).expanduser().resolve()
    checkpoint = open_checkpoint(folder)
    trained = load_run_yaml(checkpoint.run_folder / "run.yaml")
    if to_plain(trained)["model"] != to_plain(config)["model"]:
        raise ConfigError(
            f"evaluation.checkpoint={folder} was trained from another model than this command names. Give the same "
            f"experiment or model.* settings as in {checkpoint.run_folder / 'run.yaml'}."
        )
    made = checkpoint.run_folder / "model"
    if made.is_dir():
        shutil.copytree(made, run_folder / "model", symlinks=True)
    print(f"evaluating step {checkpoint.step} of {checkpoint.run_folder}", flush=True)
    return checkpoint


def export(config: RunConfig, run_folder: Path, destination: Path | None) -> int:
    """Writes the newest checkpoint as a Hugging Face folder, by default `<run>/export/step-<n>`."""
    from rl.assemble import build_trainer, claim_cluster

    _configure_libraries(config)
    checkpoint = Checkpoints(run_folder, keep_last=config.checkpoint.keep_last).newest()
    if checkpoint is None:
        raise ConfigError(f"{run_folder} has no checkpoint yet. `rl resume={run_folder}` continues the run.")
    folder = destination or run_folder / "export" / checkpoint.folder.name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty. Name another destination.")
    folder.mkdir(parents=True, exist_ok=True)
    model_folder = build(config.model).prepare(run_folder / "model", seed=config.seed)

    async def write() -> None:
        trainer = build_trainer(config, model_folder, total_steps=1, machines=claim_cluster(config, run_folder))
        try:
            await trainer.start()
            await trainer.load(checkpoint.trainer_folder)
            await trainer.export(folder)
        finally:
            await trainer.close()

    asyncio.run(write())
    print(f"exported step {checkpoint.step} to {folder}")
    return 0


def _stop_on_signals(stop: asyncio.Event) -> None:
    """Ctrl-C or SIGTERM ends the run at the next step boundary, with a checkpoint; a second one ends it at once."""

    def on_signal() -> None:
        if stop.is_set():
            print("\nstopped at once; the last complete checkpoint counts", file=sys.stderr, flush=True)
            os._exit(exit_codes.INTERRUPTED)
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr, flush=True)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def _resume_line(checkpoint: Checkpoint) -> str:
    """The proof that no prompt is trained on twice or skipped. Raises ConfigError if the accounts do not add up."""
    stream, progress = checkpoint.state["stream"], checkpoint.state["progress"]
    if "settled_below" not in stream:
        raise ConfigError(
            f"{checkpoint.folder} says how many prompts were trained on and dropped, and not which: an older version "
            "of rl wrote it. Continue it with that version, or start a new run."
        )
    accounting, again = Accounting.from_state(stream), stream["in_flight"]
    trained, dropped = accounting.trained, accounting.dropped
    reasons = f" ({', '.join(f'{reason} {count:,}' for reason, count in dropped.items())})" if dropped else ""
    line = (
        f"continuing from step {checkpoint.step}: trained {trained:,} + dropped {dropped.total():,}{reasons} "
        f"+ in flight {len(again):,}, which start again"
    )
    problems = accounting.problems(again)
    if trained != progress["prompts_trained"]:
        problems.append(f"the optimizer has seen {progress['prompts_trained']:,} prompts")
    if problems:
        raise ConfigError(
            f"{checkpoint.folder} cannot be continued from without training on prompts twice or skipping some: {line}, "
            f"but {'; '.join(problems)}. Remove that folder to continue from an older checkpoint, if there is one."
        )
    return (
        f"{line} = the first {accounting.started:,} prompts of the epoch order, compared one by one: none twice, none "
        "skipped"
    )


class _Crash:
    """What is said of the error that ends a run: the headline first, and last what to do; nothing secret in either."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._is_announced = False

    def announce(self, error: BaseException) -> None:
        """At once: to close the parts may take a while, and the table of the run comes between. Says it once.

        An interrupt and a ConfigError are not headed: the one is no failure, the other is its own headline.
        """
        if self._is_announced or isinstance(error, ConfigError) or not isinstance(error, Exception):
            return
        self._is_announced = True
        where = f" ({', '.join(notes)})" if (notes := getattr(error, "__notes__", [])) else ""
        print(f"\nrl: the run failed{where}: {mask_secrets(headline(error))}", file=sys.stderr, flush=True)

    def conclude(self, error: Exception) -> int:
        """The whole traceback goes to the folder. Returns the exit code."""
        self.announce(error)
        text = mask_secrets("".join(traceback.format_exception(error)))
        path = self._run_folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.log"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as full:  # the disk that ended the run has no room for this either
            print(f"{text}\n    {path} could not be written: {full}", file=sys.stderr)
        else:
            print(f"    traceback: {path}", file=sys.stderr)
        print(f"    continue:  rl resume={self._run_folder}", file=sys.stderr, flush=True)
        return exit_codes.FAILED


def _configure_logging(run_folder: Path) -> None:
    """Everything to run.log, warnings to the terminal, secrets to neither."""
    file = logging.FileHandler(run_folder / "run.log", encoding="utf-8")
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.WARNING)
    file.setFormatter(MaskingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal.setFormatter(MaskingFormatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [file, terminal]
    root.setLevel(logging.INFO)


def _configure_libraries(config: RunConfig) -> None:
    """Quiet libraries, the environment of the parts in this process, and on a CPU threads that leave others theirs."""
    use_cluster(config.ray.address)
    set_driver_env(config.driver_env)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if config.hardware.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        import torch

        # Not by the variable: the processes of engine and ranks would inherit it and take it for the user's.
        num_processes = 2 if isinstance(config.placement, FullyAsyncConfig) else 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def main(arguments: Sequence[str]) -> int:
    """`python -m rl.driver RUN_FOLDER [OVERRIDE ...]`: a folder with a checked run.yaml, and the words it came from."""
    run_folder = Path(arguments[0])
    try:
        return drive(load_run_yaml(run_folder / "run.yaml"), run_folder, overrides=arguments[1:])
    except ConfigError as error:
        return exit_codes.refused(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
