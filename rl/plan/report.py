"""`mode=plan`: what a run will do, where, and whether it fits; in two seconds, without torch and without a GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rl import exit_codes
from rl.config.build import target_class
from rl.config.check import joins_cluster, missing_packages, not_there_yet
from rl.config.lock import published_lines, published_status
from rl.config.published import ClaimConfig, ClaimOrigin, claim_words, origin_on
from rl.config.replicas import engine_config, num_params, replicas_of
from rl.config.schema import ConfigError, RunConfig, WeightTransport
from rl.config.transport import is_handed_over, weight_transport
from rl.plan.forecast import TIGHT, Forecast, best_knob, forecast
from rl.plan.measured import measured_lines
from rl.plan.memory import GIB, Phase, host_bytes
from rl.plan.work import disk_lines, time_lines, work_lines

NODES = ("model", "algorithm", "backend.trainer", "backend.rollout", "placement", "task", "logger")


def print_plan(config: RunConfig) -> int:
    """The page of `rl ... mode=plan`; the exit code: 2 where the run does not fit or cannot run.

    Raises ConfigError where a part's own check refuses.
    """
    found = forecast(config)
    sections = [
        ("parts", _parts(config)),
        ("devices", _devices(config)),
        ("memory", _memory(config, found)),
        ("work", work_lines(config, found)),
        ("time, predicted", time_lines(config, found)),
        ("disk", disk_lines(config, found)),
        ("measured last", measured_lines(config)),
        ("published", _claims(config)),
    ]
    obstacles = [f"cannot run yet: {message}" for message in not_there_yet(config)]
    if config.plan.data:
        lines, is_readable = _data(config)
        sections.append(("data", lines))
        if not is_readable:
            obstacles.append("cannot run as it is: see data")
    verdict, code = _verdict(config, found, obstacles)
    lines = [f"plan of {config.experiment or 'the defaults'} (starts nothing)", ""]
    for title, body in sections:
        if body:
            lines += [title, *(f"  {line}" for line in body), ""]
    print("\n".join([*lines, *verdict]))
    return code


def _data(config: RunConfig) -> tuple[list[str], bool]:
    """Lines, and whether the run could read its data."""
    from rl.plan.data import data_lines

    try:
        return data_lines(config), True
    except ConfigError as error:
        return [f"cannot be read: {error}"], False


def _parts(config: RunConfig) -> list[str]:
    lines = []
    for name in NODES:
        node: Any = config
        for part in name.split("."):
            node = getattr(node, part)
        lines.append(f"{name:<16} {node._target_}")
    lines.append(_model_line(config))
    return lines + [f"missing here: {what}. {remedy}" for what, remedy in _missing(config).items()]


def _missing(config: RunConfig) -> dict[str, str]:
    """Packages and model files that are not on this machine, each with its remedy."""
    missing = missing_packages(config)
    try:
        target_class(config.model._target_).check_present(config.model)
    except ConfigError as error:
        missing["model"] = str(error)
    if config.hardware.nodes > 1 and not joins_cluster(config):
        missing["Ray cluster"] = (
            f"Start one of {config.hardware.nodes} machines with scripts/ray_cluster.sh and name it: "
            "ray.address=HOST:PORT."
        )
    return missing


def _model_line(config: RunConfig) -> str:
    shape = target_class(config.model._target_).shape(config.model)
    params = num_params(config)
    size = "size unknown" if params is None else f"{params:,} parameters"
    if shape is None:
        return f"policy {config.model.path}: {size}; its config.json is not here, so no shape"
    layers = f"{shape.layers} layers"
    if shape.linear_layers:
        layers += f" ({shape.full_attention_layers} with full attention, {shape.linear_layers} Gated DeltaNets)"
    experts = ""
    if shape.experts:
        experts = f", {shape.experts} experts a layer of which a token visits {shape.experts_per_token}"
    tower = f"; {shape.vision_params:,} of the parameters are a vision tower's" if shape.vision else ""
    return (
        f"policy {config.model.path}: {size}, {layers}, hidden {shape.hidden}, {shape.heads} query and "
        f"{shape.kv_heads} key-value heads of {shape.head_dim}{experts}, vocabulary {shape.vocab:,}{tower}"
    )


def _devices(config: RunConfig) -> list[str]:
    hardware, placement = config.hardware, config.placement
    replicas = replicas_of(config)
    roles = target_class(placement._target_).gpu_map(
        placement,
        gpus_per_engine=replicas.gpus_per_engine,
        num_groups=replicas.num_groups,
        per_device=replicas.per_device,
    )
    is_plain = replicas.count == 1 and config.backend.rollout.replicas_per_device == 1
    lines = [] if is_plain else [_engines_line(config)]
    lines.append(_transport_line(config))
    if hardware.device == "cpu":
        held = ", ".join(role for device in roles for role in device)
        return [*lines, f"{hardware.name}: all on the host's CPU ({held})"]
    num_gpus = hardware.nodes * hardware.gpus_per_node
    lines += [f"{hardware.name}: {num_gpus} GPU(s) of {hardware.memory_gib:g} GiB on {hardware.nodes} node(s)"]
    for gpu in range(num_gpus):
        node, local = divmod(gpu, hardware.gpus_per_node)
        held = ", ".join(roles[gpu]) if gpu < len(roles) else "idle"
        lines.append(f"node {node} GPU {local}: {held}")
    return lines


def _engines_line(config: RunConfig) -> str:
    replicas = replicas_of(config)
    line = f"{replicas.count} engine(s): replicas {replicas.num_groups} x replicas_per_device {replicas.per_device}"
    if config.backend.rollout.replicas_per_device is None:
        line += " (null: by the model's size)"
    fraction = getattr(engine_config(config), "memory_fraction", None)
    return line if fraction is None else f"{line}; memory_fraction {fraction:g} each"


def _transport_line(config: RunConfig) -> str:
    transport = weight_transport(config)
    how = {
        WeightTransport.ipc: "ipc: "
        + ("handed over in this process" if is_handed_over(config) else "from memory of the devices that both are on"),
        WeightTransport.collective: "collective: broadcast to all engine workers by "
        + ("gloo" if config.hardware.device == "cpu" else "NCCL or RCCL"),
        WeightTransport.bytes: "bytes: through the host's memory and this process",
        WeightTransport.overlapped: "overlapped: from a copy in the host's memory, while the trainer goes on",
        WeightTransport.disk: "disk: through files in the run folder",
    }
    return f"weights go to the engines by {how[transport]}"


def _memory(config: RunConfig, found: Forecast | None) -> list[str]:
    if found is None:
        return ["not known: the model's sizes are not here. Give a local folder in model.path, or model.shape"]
    limit = found.sizes.device.memory_gib
    lines: list[str] = []
    shown: list[Phase] = []
    for phase in found.phases:
        lines.append(f"{phase.name:<9}{phase.gib:.1f} of {limit:g} GiB: {phase.where}")
        same = next((other for other in shown if list(other.lines) == list(phase.lines)), None)
        if same is not None:
            lines.append(f"             the terms of {same.name}")
            continue
        shown.append(phase)
        lines += [f"  {_size(line.num_bytes):>9}  {line.what}: {line.how}" for line in phase.lines]
    lines += _cache_lines(config, found)
    host, what = host_bytes(found.sizes)
    if host:
        lines.append(f"host of one node: {_size(host)} of {what}")
    lines.append(_fullest(config, found))
    return lines


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"


def _cache_lines(config: RunConfig, found: Forecast) -> list[str]:
    held, places = found.cache.sequences, config.backend.rollout.max_num_seqs
    if found.sizes.device.is_cpu or held < 1:
        return []
    rest = "" if held >= places else ": where all are that long, the others wait"
    return [
        f"the cache of an engine holds {held:,} answers of {found.sizes.step.max_sequence:,} tokens at once, and "
        f"max_num_seqs={places:,}{rest}"
    ]


def _fullest(config: RunConfig, found: Forecast) -> str:
    phase = found.fullest
    line = f"fullest: {phase.name}, and there {phase.largest.what} ({phase.largest.gib:.1f} GiB)"
    knob = best_knob(config, found)
    if knob is None or knob.saved_gib <= 0:
        return f"{line}; no single setting makes room there"
    return f"{line}; {knob.words} would save {knob.saved_gib:.1f} GiB there"


def _claims(config: RunConfig) -> list[str]:
    published = config.published
    if published is None:
        return []
    source = published.source
    lines = [
        f"{source.title}, {source.date or 'no date'}; {source.url or 'address not found'}; on {published.hardware}"
    ]
    lines += published_lines(config, published_status(config))
    for name, claim in published.claims.items():
        # One that is lost on this hardware was named above, and stays what it is where it was measured.
        origin = origin_on(published, claim, config.hardware.name) or claim.origin
        lines.append(_claim(name, claim, origin))
    return [*lines, "after +- stands our tolerance: no source gives one"] if published.claims else lines


def _claim(name: str, claim: ClaimConfig, origin: ClaimOrigin) -> str:
    value = f"{claim.value:g} +- {claim.tolerance:g} {claim.unit}".rstrip()
    how = f"{origin.value.replace('_', ' ')}, {claim.read_from.value}"
    return f"{name}: {claim.metric} {claim_words(claim)} = {value} ({how})"


def _verdict(config: RunConfig, found: Forecast | None, obstacles: Sequence[str]) -> tuple[list[str], int]:
    """Lines and exit code. `obstacles` say why no run of it can start anywhere; they come before what memory says."""
    fit, is_refused = _fit(config, found)
    first, *others = [*obstacles, f"memory: {fit}"] if obstacles else [fit]
    lines = [line for text in (f"verdict: {first}", *others) for line in _wrapped(text)]
    if missing := _missing(config):
        lines.append(f"cannot run on this machine as it is: see 'missing here' under parts ({', '.join(missing)})")
    return lines, exit_codes.REFUSED if obstacles or is_refused else exit_codes.DONE


def _fit(config: RunConfig, found: Forecast | None) -> tuple[str, bool]:
    """What memory says, and whether it refuses the run."""
    if found is None:
        return "not known whether it fits, without the model's sizes", False
    margin, limit = found.margin_gib, found.sizes.device.memory_gib
    problem = found.problem
    if problem is None:
        tight = f", tight: below {TIGHT:.0%} of the memory" if margin < TIGHT * limit else ""
        return f"fits{_on_machines(config)} (margin {margin:.0f} GiB{tight})", False
    knob = best_knob(config, found)
    if knob is not None and knob.fits:
        remedy = f"try {knob.words}"
    elif knob is not None and found.cache.sequences >= 1:  # else the knob makes room elsewhere than where it lacks
        remedy = f"{knob.words} helps most (-{knob.saved_gib:.1f} GiB) and is not enough: more GPUs, or a smaller model"
    else:
        remedy = "try hardware with more memory, or a smaller model"
    return f"does not fit: {problem}; {remedy}", True


def _on_machines(config: RunConfig) -> str:
    """Empty for one machine. Whoever meant fewer reads here what an experiment asks for."""
    hardware = config.hardware
    return "" if hardware.nodes == 1 else f" on {hardware.nodes} machines of {hardware.gpus_per_node} GPUs"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
