"""Fetches the model and the data of a run into the hub's cache, for machines that have no network later.

    python scripts/fetch_assets.py experiment=NAME [OVERRIDE ...]

With HF_HOME on a disk that those machines see, the same command then runs with HF_HUB_OFFLINE=1. The revisions that
were served are printed as overrides: put them into the experiment to pin them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rl import exit_codes
from rl.config.build import build, target_class
from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError, RunConfig
from rl.model.source import HuggingFaceModel, given_folder
from rl.tasks.published import DATA_SETS
from rl.tasks.rows import split_rows


def main(words: Sequence[str]) -> int:
    try:
        config = compose_run_config(list(words))
        pins = [*fetch_model(config), *fetch_data(config)]
    except ConfigError as error:
        return exit_codes.refused(error)
    print("\n".join(pins) if pins else "nothing is on a hub: this run reads local files only")
    return exit_codes.DONE


def fetch_model(config: RunConfig) -> list[str]:
    """The override that pins the revision; empty for a model that is made here or lies in a local folder."""
    model = build(config.model)
    if not isinstance(model, HuggingFaceModel) or given_folder(config.model) is not None:
        return []
    snapshot = model.downloaded()
    print(f"model {config.model.path}: {snapshot}", flush=True)
    return [f"model.revision={snapshot.name}"]


def fetch_data(config: RunConfig) -> list[str]:
    """The overrides that pin the revisions."""
    pins = []
    for key, data in target_class(config.task._target_).hub_data(config.task).items():
        revision = data.revision or served_revision(data.path)
        data_set = DATA_SETS[key]
        for split in filter(None, (data_set.train_split, data_set.test_split)):
            rows = split_rows(
                data.path, split, key=f"task.data.{key}.path", config_name=data_set.config_name, revision=revision
            )
            print(f"data {data.path} ({split}): {sum(1 for _ in rows):,} rows", flush=True)
        pins.append(f"task.data.{key}.revision={revision}")
    return pins


def served_revision(path: str) -> str:
    """The commit that the hub serves now. Raises ConfigError where the hub does not answer."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        sha = huggingface_hub.HfApi().dataset_info(path).sha
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"the hub did not say which revision of {path} it serves ({error}).") from error
    assert sha is not None
    return sha


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
