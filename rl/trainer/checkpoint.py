"""What a trainer writes to disk: a checkpoint to go on from, and a Hugging Face folder to use elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from transformers import AutoTokenizer, PreTrainedModel

_WEIGHTS = "weights"
_SCHEDULE = "schedule.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def save(
    folder: Path, *, policy: nn.Module, optimizer: torch.optim.Optimizer, num_updates_done: int, rank: int
) -> None:
    """Weights and optimizer in torch.distributed.checkpoint's format, which any number of ranks can load."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    save_state({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / _WEIGHTS)
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    torch.save(rng, folder / f"rng_{rank}.pt")
    if rank == 0:
        (folder / _SCHEDULE).write_text(json.dumps({"num_updates_done": num_updates_done}))
    dist.barrier()


def load(folder: Path, *, policy: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> int:
    """Restores what `save` wrote and returns the updates done. RNG states only if as many ranks had saved."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    load_state(state, checkpoint_id=folder / _WEIGHTS)
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if len(list(folder.glob("rng_*.pt"))) == num_ranks:
        rng = torch.load(folder / f"rng_{rank}.pt", weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if torch.cuda.is_available() and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
    return json.loads((folder / _SCHEDULE).read_text())["num_updates_done"]


def export(folder: Path, *, model: PreTrainedModel, weights: dict[str, torch.Tensor], model_folder: Path) -> None:
    """Writes `weights` with the model's config and every other file of `model_folder`, then checks the result."""
    model.save_pretrained(folder, state_dict=dict(weights))  # a copy: for a model on the meta device it is emptied
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")  # else that of the fp32 masters
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in other_files(model_folder):
        shutil.copyfile(file, folder / file.name)
    check_export(folder, model_class=type(model), model_folder=model_folder)


def other_files(model_folder: Path) -> list[Path]:
    """Tokenizer, chat template, generation config, processor: all but weights and config.json."""
    return [
        file
        for file in sorted(model_folder.iterdir())
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_NOT_COPIED)
    ]


def check_export(folder: Path, *, model_class: type[PreTrainedModel], model_folder: Path) -> None:
    """Loads the exported folder. Raises RuntimeError if a file is missing or a weight was not found in it."""
    expected = {"config.json", *(file.name for file in other_files(model_folder))}
    if missing := sorted(name for name in expected if not (folder / name).is_file()):
        raise RuntimeError(f"export to {folder} lacks {', '.join(missing)}")
    try:
        loaded: Any = model_class.from_pretrained(folder, dtype="auto", output_loading_info=True, local_files_only=True)
        info: dict[str, Any] = loaded[1]
        if any(name.startswith("tokenizer") for name in expected):
            AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"export to {folder} does not load") from error
    problems = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if problems:
        raise RuntimeError(f"export to {folder} does not load cleanly: {problems}")
