"""What a benchmark would read, hold and take on a device, from shapes alone: no weights, no compute.

    python -m experiments.benchmark CONFIG --plan [device=h200] [prompt_tokens=512] [dotted.key=value ...]

Drafters are built and traced on shapes (`jspec.planning`); models that are not on this machine look as
`jspec/weights/known_shapes.json` says. Times are rooflines: no program is faster, most are slower. The last line is the
plan as JSON.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import rich.box
import rich.console
import rich.table

from experiments import papers, settings
from jspec import config as config_lib
from jspec import decode, drafters, extras, planning, theory, types
from jspec.weights import shapes

_BASELINE = "autoregressive"

NOTE = (
    "Each time is a roofline: bytes over bandwidth or operations over peak, whichever is longer, in the middle of an "
    "answer. breaks even: the tau at which a round costs what it gains. paper's tau: of the first task and temperature "
    "that has one, or what its alpha gives a chain. at its tau: that tau * autoregressive / (verify + draft)."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is planned for.

    device:        one of `planning.DEVICES`.
    prompt_tokens: in front of every answer.
    lower:         also lower one target pass of each method and give the compiler's count of operations; takes seconds.
    """

    device: str = "h200"
    prompt_tokens: int = 512
    lower: bool = False

    def __post_init__(self):
        planning.device(self.device)
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens {self.prompt_tokens} is below 1")


def main(config_class: type, path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Plan a config. Prints the table and returns the document.

    Args:
      config_class: `benchmark.Benchmark`.
      path: of the config.
      overrides: `key=value`, those of `Options` among them.

    Raises:
      ValueError: the config or an option is bad, or what a model looks like is not known.
    """
    names = {field.name for field in dataclasses.fields(Options)}
    ours = [override for override in overrides if override.partition("=")[0] in names]
    values = dict(map(_read, ours))
    options = config_lib.parse(Options, values, source="--plan")
    config = config_lib.load(config_class, path, [override for override in overrides if override not in ours])
    planned = plan(config, options)
    show(planned)
    return {"plan": planned}


def _read(override: str) -> tuple[str, Any]:
    yaml = extras.require("yaml", "experiments")
    key, _, value = override.partition("=")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise config_lib.ConfigError(f"override {override!r}: {value!r} is not YAML") from error


def plan(config: Any, options: Options) -> dict[str, Any]:
    """The plan as plain data; bytes, milliseconds and counts.

    Args:
      config: `benchmark.Benchmark`.
      options: what for.

    Raises:
      ValueError: see `main`.
    """
    reference = config.target.reference
    t5 = None if reference is None else shapes.encoder_decoder(reference)
    if t5 is not None:
        target_plan, rows = _plan_encoder_decoder(config, options, t5)
    else:
        target_plan, rows = _plan_decoder(config, options)
    device = planning.device(options.device)
    held = max(row["held_bytes"] for row in rows)
    return {
        "device": options.device,
        "dtype": config.target.dtype,
        "batch": config.batch,
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": config.max_new_tokens,
        "not_runnable": config.not_runnable,
        **target_plan,
        "device_bytes": device.memory,
        "fits": held <= device.memory,
        "devices": math.ceil(held / device.memory),
        "methods": rows,
    }


def _plan_decoder(config: Any, options: Options) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    target = _abstract_target(config.target)
    model, device, dtype = target.model, planning.device(options.device), config.target.dtype
    methods = [settings.Method(_BASELINE, drafters.Autoregressive())]
    methods += [method for method in config.methods if method.name != _BASELINE]
    bounds = [planning.bind(method.drafter, target) for method in methods]
    limits = [getattr(bound.drafter, "max_positions", None) for bound in bounds]
    capacity = decode.capacity_for(
        options.prompt_tokens + config.max_new_tokens, min(filter(None, [model.config.max_positions, *limits]))
    )
    length = options.prompt_tokens + config.max_new_tokens // 2
    parameter_bytes = planning.num_bytes(model.params)
    step = planning.model_pass(model, batch=config.batch, tokens=1, length=length).seconds(device, dtype)
    rows, cache_bytes = [], 0
    for method, bound in zip(methods, bounds):
        planning.check_proposal(bound, target, batch=config.batch, capacity=capacity)
        nodes = bound.drafter.num_nodes
        verify = planning.model_pass(model, batch=config.batch, tokens=nodes, length=length)
        passes, draft = planning.draft_work(bound, target, batch=config.batch, length=length)
        cache_bytes, state = planning.state_bytes(bound, target, batch=config.batch, capacity=capacity)
        logits = config.batch * nodes * model.config.vocab_size * 4
        row = _row(config, method, nodes, bound.drafter.max_depth, passes, verify, draft, step, device)
        row["draft_parameters"] = planning.num_parameters(bound.own)
        row["draft_state_bytes"] = state
        row["held_bytes"] = parameter_bytes + cache_bytes + planning.num_bytes(bound.own) + state + logits
        if options.lower:
            row["lowered_operations"] = planning.lowered_operations(
                target, batch=config.batch, tokens=nodes, capacity=capacity
            )
        rows.append(row)
    target_plan = {
        "target": target.provenance.reference,
        "shape": {name: getattr(model.config, name) for name in _SIZES},
        "parameters": planning.num_parameters(model.params),
        "parameter_bytes": parameter_bytes,
        "capacity": capacity,
        "cache_bytes": cache_bytes,
    }
    return target_plan, rows


_SIZES = ("num_layers", "width", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size", "max_positions")


def _plan_encoder_decoder(
    config: Any, options: Options, shape: shapes.EncoderDecoder
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A T5, by arithmetic alone: there is nothing to trace yet. Its drafts are smaller T5s; others read no weights."""
    device, dtype, batch = planning.device(options.device), config.target.dtype, config.batch
    itemsize = jnp.dtype(dtype).itemsize
    cached = options.prompt_tokens + config.max_new_tokens
    length = options.prompt_tokens + config.max_new_tokens // 2
    one_pass = lambda shape, tokens: planning.encoder_decoder_pass(
        shape, batch=batch, tokens=tokens, length=length, itemsize=itemsize
    )
    # Keys and values of the encoder's states and of the answer, in every decoder layer.
    cache = lambda shape: batch * cached * 2 * shape.num_heads * shape.head_size * shape.decoder_layers * itemsize
    parameters = planning.encoder_decoder_parameters(shape)
    step = one_pass(shape, 1).seconds(device, dtype)
    rows = []
    for method in [settings.Method(_BASELINE, drafters.Autoregressive()), *config.methods]:
        gamma = getattr(method.drafter, "gamma", 0)
        draft_reference = getattr(getattr(method.drafter, "draft", None), "reference", None)
        draft = None if draft_reference is None else shapes.encoder_decoder(draft_reference)
        if draft_reference is not None and draft is None:
            raise ValueError(f"{draft_reference} cannot draft for {config.target.reference}: it is no known T5")
        work = planning.Work() if draft is None else one_pass(draft, 1) * gamma
        row = _row(
            config, method, gamma + 1, gamma, gamma if draft else 0, one_pass(shape, gamma + 1), work, step, device
        )
        row["draft_parameters"] = planning.encoder_decoder_parameters(draft) if draft else 0
        row["draft_state_bytes"] = cache(draft) if draft else 0
        row["held_bytes"] = (parameters + row["draft_parameters"]) * itemsize + cache(shape) + row["draft_state_bytes"]
        rows.append(row)
    target_plan = {
        "target": config.target.reference,
        "shape": dataclasses.asdict(shape),
        "parameters": parameters,
        "parameter_bytes": parameters * itemsize,
        "capacity": cached,
        "cache_bytes": cache(shape),
    }
    return target_plan, rows


def _abstract_target(target: settings.TargetSettings) -> types.Target:
    if target.reference is not None:
        model_config, name = shapes.model(target.reference), target.reference
    elif target.shape is not None:
        model_config, name = target.shape.config(), f"random weights like {target.shape.like}"
    else:
        model_config, name = target.random.config(), "random weights"
    model = shapes.abstract(model_config, jnp.dtype(target.dtype))
    return types.Target(model, provenance=types.Provenance(name))


def _row(
    config: Any,
    method: settings.Method,
    nodes: int,
    depth: int,
    passes: int,
    verify: planning.Work,
    draft: planning.Work,
    step: float,
    device: planning.Device,
) -> dict[str, Any]:
    dtype = config.target.dtype
    verify_s, draft_s = verify.seconds(device, dtype), draft.seconds(device, dtype)
    cells = [
        papers.find(config.paper, method.name, task=task, temperature=temperature, batch=config.batch)
        for task in (config.paper.tasks if config.paper else ())
        for temperature in config.temperatures
    ]
    cell = next((cell for cell in cells if cell is not None and (cell.tau or cell.alpha) is not None), None)
    tau = None if cell is None else cell.tau
    if cell is not None and tau is None and nodes == depth + 1:
        tau = theory.expected_tokens(cell.alpha, depth)
    return {
        "method": method.name,
        "drafter": method.drafter.kind,
        "nodes": nodes,
        "depth": depth,
        "draft_passes": passes,
        "verify_bytes": verify.bytes,
        "draft_bytes": draft.bytes,
        "verify_operations": verify.operations,
        "draft_operations": draft.operations,
        "autoregressive_ms": step * 1e3,
        "verify_ms": verify_s * 1e3,
        "draft_ms": draft_s * 1e3,
        "breaks_even_at_tau": (verify_s + draft_s) / step,
        "published_tau": tau,
        "published_row": None if cell is None else cell.row,
        "speedup_at_published_tau": None if tau is None else tau * step / (verify_s + draft_s),
    }


def show(planned: dict[str, Any]) -> None:
    """Print a plan on stdout."""
    console = rich.console.Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    device = planning.device(planned["device"])
    sizes = ", ".join(f"{name} {value}" for name, value in planned["shape"].items())
    lines = [
        f"target   {planned['target']}: {sizes}",
        f"weights  {planned['parameters'] / 1e9:.3f} billion: {_giga(planned['parameter_bytes'])} ({planned['dtype']})",
        f"cache    {_giga(planned['cache_bytes'])} for {planned['batch']} x {planned['capacity']} slots "
        f"(prompt {planned['prompt_tokens']}, answer {planned['max_new_tokens']})",
        f"device   {device.title}: {device.memory / 2**30:.0f} GB at {device.bandwidth / 1e9:.0f} GB/s, "
        f"{device.peak[planned['dtype']] / 1e12:g} Tflop/s ({device.source})",
        "fits, weights, caches and logits alone"
        if planned["fits"]
        else f"does not fit: {planned['devices']} such devices at least",
    ]
    if planned["not_runnable"]:
        lines.append(f"not runnable: {planned['not_runnable']}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    headers = ["method", "nodes", "depth", "own\nweights", "draft\npasses", "GB read\nverify", "GB read\ndraft"]
    headers += ["verify\nms", "draft\nms", "breaks\neven", "paper's\ntau", "speedup\nat its tau"]
    for header in headers:
        table.add_column(header, justify="left" if header == "method" else "right")
    for row in planned["methods"]:
        optional = [row["published_tau"], row["speedup_at_published_tau"]]
        table.add_row(
            row["method"],
            str(row["nodes"]),
            str(row["depth"]),
            f"{row['draft_parameters'] / 1e6:.0f}M" if row["draft_parameters"] else "-",
            str(row["draft_passes"]),
            f"{row['verify_bytes'] / 1e9:.2f}",
            f"{row['draft_bytes'] / 1e9:.2f}",
            f"{row['verify_ms']:.2f}",
            f"{row['draft_ms']:.2f}",
            f"{row['breaks_even_at_tau']:.2f}",
            *("-" if value is None else f"{value:.2f}" for value in optional),
        )
    console.print(table)
    console.print(NOTE, markup=False)


def _giga(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
