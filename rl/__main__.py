"""The command `rl`: from words to a checked config, and on to the driver. Imports no torch: every TAB starts it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rl import exit_codes
from rl.config.schema import ConfigError, Mode, RunConfig

RESUMABLE_KEYS = ("steps", "logger")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except ConfigError as error:
        return exit_codes.refused(error)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        from rl.help import help_text, key_help

        print(key_help(words[1:]) if words[1:] else help_text())
        return exit_codes.DONE if words else exit_codes.REFUSED
    if words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    if any(word.startswith("resume=") for word in words):
        return _resume(words)
    if "-m" in words or "--multirun" in words:
        from rl.sweeps.command import run_sweep

        return run_sweep([word for word in words if word not in ("-m", "--multirun")])
    return _hydra(words) if any(word.startswith("-") for word in words) else _run(words)


def _run(words: list[str]) -> int:
    from rl.config.check import check_machine
    from rl.config.smoke import run_config

    config, replaced = run_config(words)
    if replaced:
        print(replaced, flush=True)
    if config.mode is Mode.plan:
        from rl.plan.report import print_plan

        return print_plan(config)
    check_machine(config)
    from rl.run_folder import create_run_folder

    folder = create_run_folder(config)
    from rl.driver import drive

    return drive(config, folder, overrides=words)


def _resume(words: list[str]) -> int:
    """Continues the run of a folder. Its settings stay, but for the number of steps and the logger."""
    from rl.config.check import check_machine, check_run_config

    folder = Path(next(word for word in words if word.startswith("resume=")).partition("=")[2]).expanduser().resolve()
    changes = [word for word in words if not word.startswith("resume=")]
    config = _changed(saved_config(folder), changes)
    check_run_config(config)
    check_machine(config)
    from rl.driver import drive

    return drive(config, folder, overrides=words)


def saved_config(folder: Path) -> RunConfig:
    """The config of a run's folder. Raises ConfigError if there is none that could be continued or exported."""
    from rl.config.load import load_run_yaml

    if not (folder / "run.yaml").is_file():
        raise ConfigError(f"{folder} holds no run: there is no run.yaml in it.")
    config = load_run_yaml(folder / "run.yaml")
    if config.mode is not Mode.train:
        raise ConfigError(f"{folder} holds a run of mode={config.mode.value}: there is nothing to continue.")
    return config


def _changed(config: RunConfig, changes: list[str]) -> RunConfig:
    """`config` with other steps or another logger; every other key would make it another run."""
    from rl.config.compose import compose_plain, parse_overrides
    from rl.config.load import load_run_config, to_plain

    plain = to_plain(config)
    overrides = parse_overrides(changes)
    for override in overrides:
        key = override.key_or_group
        if key.partition(".")[0] not in RESUMABLE_KEYS:
            raise ConfigError(
                f"resume: {key} cannot change within a run, only {' and '.join(RESUMABLE_KEYS)} can. Start a new run "
                f"from an export (rl export {config.output_dir or 'RUN'}), or leave {key} as it is."
            )
        if key == "steps":
            plain["steps"] = override.value()
    logger_words = [change for change, o in zip(changes, overrides, strict=True) if o.key_or_group != "steps"]
    if logger_words and not any(o.key_or_group == "logger" for o in overrides):
        for override in overrides:
            if override.key_or_group.startswith("logger."):
                plain["logger"][override.key_or_group.removeprefix("logger.")] = override.value()
    elif logger_words:
        plain["logger"] = compose_plain(logger_words)["logger"]
    return load_run_config(plain)


def _export(words: list[str]) -> int:
    if not 1 <= len(words) <= 2:
        raise ConfigError("write: rl export RUN_FOLDER [DESTINATION]")
    folder = Path(words[0]).expanduser().resolve()
    config = saved_config(folder)
    from rl.driver import export

    return export(config, folder, Path(words[1]).expanduser().resolve() if len(words) == 2 else None)


def _report(words: list[str]) -> int:
    from rl.report.page import report

    return report(words)


def _sweep(words: list[str]) -> int:
    from rl.sweeps.command import show

    return show(words)


COMMANDS = {"export": _export, "report": _report, "sweep": _sweep}


def _hydra(words: list[str]) -> int:
    """Hydra's own flags: --cfg, --info, --hydra-help, completion. They show; they run nothing."""
    import hydra

    from rl.config.compose import CONFIG_NAME, compose_plain, open_node_words
    from rl.config.register import package_folder, register_all

    is_completion = any(word in ("-sc", "--shell-completion") for word in words)
    if is_completion:
        register_all()
    else:
        # Hydra would show a config that no run accepts, with keys that were added and choices that do not exist.
        compose_plain([word for word in words if not word.startswith("-") and ("=" in word or word.startswith("~"))])
    sys.argv = ["rl", *open_node_words(words)]

    @hydra.main(config_path=str(package_folder("conf")), config_name=CONFIG_NAME, version_base="1.3")
    def show(_config: object) -> None:
        raise ConfigError(
            f"'{' '.join(word for word in words if word.startswith('-'))}' is not a flag that runs something. Use "
            "`rl key=value ...` to run, -m for a sweep, --cfg job to print the config."
        )

    if not is_completion:
        show()
        return 0
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        show()
    print("\n".join(_without_schemas(line) for line in shown.getvalue().splitlines()))
    return 0


def _without_schemas(line: str) -> str:
    """Completions without the options that only start a YAML file, such as algorithm=schema_grpo."""
    return " ".join(word for word in line.split(" ") if "=schema_" not in word)


if __name__ == "__main__":
    sys.exit(main())
