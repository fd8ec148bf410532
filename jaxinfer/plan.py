"""What fits, and how fast it could go: `python -m jaxinfer.plan --model=PATH --chip=v5e --mesh=2x4`.

Reads config.json or a GGUF file's header alone. Needs no accelerator and no weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer import cli
from jaxinfer.config import ConfigError, ModelConfig, parse_mesh
from jaxinfer.flags import PlanOptions, describe_absent_tpus, plan_options
from jaxinfer.memory.chips import GIB, Chip, find_chip
from jaxinfer.memory.ledger import DoesNotFitError, Ledger, kv_bytes_per_token
from jaxinfer.memory.parameters import itemsize, num_parameters
from jaxinfer.memory.planning import Plan, advice, make_plan
from jaxinfer.memory.roofline import Roofline
from jaxinfer.models.families import model_config_from
from jaxinfer_checkpoints import read_config, resolve_config

Report = dict[str, Any]

ASSUMPTION = (
    "every byte moves at the published bandwidth and every operation runs at the published rate, memory and "
    "arithmetic overlap fully, what is sent not at all, and a pipeline stage always has a step to compute: "
    "real steps are slower"
)
_CLASSES = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "slots": "slots",
    "activations": "activations and temporaries",
    "logits": "logits and sampling",
    "programs": "programs",
}
_ESTIMATED = {"activations": ", about", "logits": ", about", "programs": ", not counted"}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 where it fits, 1 where it does not."""
    return cli.run(plan_options, _plan, argv)


def _plan(options: PlanOptions) -> int:
    chip = find_chip(options.chip)
    model = _read_model(options)
    report = _about(options, model, chip)
    question = options.engine, model, chip, options.quantize
    try:
        plan = make_plan(*question, options.mean_len)
        if options.compile:
            # Brings flax, which plain plans can spare.
            from jaxinfer.memory.aot import (
                compile_step,
                compiled_bytes,
                described_meshes,
                largest_programs,
                write_engine_bundle,
            )
            from jaxinfer.parallel.mesh import are_apart

            describe_absent_tpus()
            meshes = described_meshes(plan)
            if options.engine.bundle is not None and are_apart(meshes):
                raise ConfigError(
                    f"mesh={plan.mesh}: where stages lie on several hosts, these write the bundles at their "
                    "first start: leave out --bundle"
                )
            largest = largest_programs(plan, meshes)
            stages = [[compile_step(program) for program in stage] for stage in largest]
            report["compiled"] = [dataclasses.asdict(step) for steps in stages for step in steps]
            if options.engine.bundle is not None:
                made = [program for stage in largest for program in stage]
                report["bundle"] = _bundle(plan, write_engine_bundle(options.engine, plan, meshes, made))
            plan = make_plan(*question, options.mean_len, compiled_bytes(plan, stages))
    except DoesNotFitError as error:
        changes = [dataclasses.asdict(change) for change in advice(error, *question)]
        report |= {"fits": False, **_bytes(error.ledger, error.budget_bytes), "changes": changes}
        _print(options, report)
        raise
    _print(options, report | _fitting(plan, options.batch))
    return 0


def _print(options: PlanOptions, report: Report) -> None:
    print(json.dumps(report, indent=2) if options.json else "\n".join(_text(report)), flush=True)


def _read_model(options: PlanOptions) -> ModelConfig:
    engine = options.engine
    path = resolve_config(engine.model, engine.revision, Path(engine.cache_dir) if engine.cache_dir else None)
    format, config, tensors = read_config(path)
    return model_config_from(
        config,
        format,
        tensors={info.name: info for info in tensors},
        rope_scaling_override=engine.rope_scaling,
    )


# --- The report -----------------------------------------------------------------------------------


def _about(options: PlanOptions, model: ModelConfig, chip: Chip) -> Report:
    """What was asked about, and what of it this version's engine cannot run."""
    what_if = [] if options.quantize == "none" else ["the engine does not quantise weights yet"]
    return {
        "model": {
            "path": options.engine.model,
            "architecture": model.architecture,
            "num_parameters": num_parameters(model),
            "num_hidden_layers": model.num_hidden_layers,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_position_embeddings,
        },
        "chip": dataclasses.asdict(chip),
        "mesh": options.engine.mesh,
        "quantize": options.quantize,
        "what_if": what_if,
    }


def _bytes(ledger: Ledger, budget_bytes: int) -> Report:
    return {
        "bytes_a_device": ledger.by_class(),
        "device_bytes": ledger.device_bytes,
        "budget_bytes": budget_bytes,
    }


def _bundle(plan: Plan, path: Path) -> Report:
    """A file of programs, and what an engine must have to find it."""
    resolved = plan.resolved
    return {
        "path": str(path),
        "num_pages": resolved.cache.num_pages,
        "max_model_len": resolved.scheduler.max_model_len,
    }


def _fitting(plan: Plan, batch: int | None) -> Report:
    resolved, memory = plan.resolved, plan.resolved.memory
    decode, prefill = plan.decode(batch), plan.prefill()
    limit = resolved.scheduler.max_model_len
    return {
        "fits": True,
        "num_chips": plan.num_chips,
        "dtype": resolved.dtype,
        **_bytes(resolved.ledger(), resolved.budget_bytes),
        "kv_cache": {
            "dtype": resolved.cache.dtype,
            "bytes_a_token": kv_bytes_per_token(plan.model, itemsize(resolved.cache.dtype)),
            "page_size": resolved.cache.page_size,
            "num_pages_a_group": resolved.cache.num_pages,
            "page_bytes_a_device": memory.page_bytes,
            "num_tokens": plan.kv_tokens,
        },
        "requests": {
            "max_model_len": limit,
            "at_max_model_len": plan.num_requests(limit),
            "mean_len": plan.mean_len,
            "at_mean_len": plan.num_requests(plan.mean_len),
            "limited_by": plan.limited_by,
            "largest_context": plan.largest_context,
        },
        "roofline": {
            "assumption": ASSUMPTION,
            "decode": decode and _roofline(decode, plan),
            "prefill": prefill and _roofline(prefill, plan),
        },
    }


def _roofline(roofline: Roofline, plan: Plan) -> Report:
    return dataclasses.asdict(roofline) | {
        "step_s": roofline.step_s,
        "bound": roofline.bound,
        # Of each stage's steps, one is under way.
        "tokens_per_s_a_chip": roofline.tokens_per_s * plan.num_groups * plan.mesh.pipe / plan.num_chips,
    }


# --- The report as text ---------------------------------------------------------------------------


def _text(report: Report) -> Iterator[str]:
    model, chip = report["model"], report["chip"]
    mesh = parse_mesh(report["mesh"])
    counts = [(mesh.data, "group"), (mesh.tensor, "device")]
    if mesh.pipe > 1:
        counts.insert(0, (mesh.pipe, "stage"))
    sizes = " of ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts)
    yield (
        f"{model['path']}: {model['architecture']}, {model['num_parameters']:,} parameters, "
        f"{model['num_hidden_layers']} layers, {model['num_key_value_heads']} KV heads of {model['head_dim']}"
    )
    yield (
        f"{chip['name']}, mesh {mesh}: {sizes}; {report['budget_bytes'] / GIB:.2f} GiB of "
        f"{chip['memory_gib'] / chip['num_devices']:g} GiB a device may be used"
    )
    yield from (f"what if: {note}" for note in report["what_if"])
    yield ""
    yield from _bytes_text(report)
    yield from map(_compiled_text, report.get("compiled", ()))
    if bundle := report.get("bundle"):
        sizes = f"--num_pages={bundle['num_pages']} --max_model_len={bundle['max_model_len']}"
        yield f"wrote {bundle['path']}, which an engine with {sizes} and the same other flags starts from"
    yield ""
    if report["fits"]:
        yield from _fitting_text(report)
    else:
        yield "it does not fit" + ("; what would:" if report["changes"] else "")
        yield from (f"  {change['change']:<28} {change['outcome']}" for change in report["changes"])


def _bytes_text(report: Report) -> Iterator[str]:
    sizes = report["bytes_a_device"]
    yield f"{'of each device':<32} {'bytes':>18} {'GiB':>9}"
    notes = {} if "compiled" in report else _ESTIMATED
    rows = [(text + notes.get(name, ""), sizes[name]) for name, text in _CLASSES.items()]
    for text, size in (*rows, ("together", report["device_bytes"])):
        yield f"{text:<32} {size:>18,} {size / GIB:>9.3f}"
    staging = sizes["host_staging"]
    yield f"{'host staging, on the host':<32} {staging:>18,} {staging / GIB:>9.3f}"


def _compiled_text(step: Mapping[str, Any]) -> str:
    collectives = ", ".join(f"{count} {name}" for name, count in step["collectives"].items()) or "none"
    return (
        f"compiled in {step['compile_s']:.0f} s: {step['name']}, "
        f"{step['argument_bytes'] / GIB:.3f} GiB of arguments, of which {step['alias_bytes'] / GIB:.3f} are "
        f"written in place, {step['temp_bytes'] / 2**20:.1f} MiB of temporaries, "
        f"{step['code_bytes'] / 2**20:.1f} MiB of code; {step['kernels']} kernels; collectives: {collectives}"
    )


def _fitting_text(report: Report) -> Iterator[str]:
    cache, requests = report["kv_cache"], report["requests"]
    yield (
        f"KV cache: {cache['dtype']}, {cache['bytes_a_token']:,} bytes a token; "
        f"{cache['num_pages_a_group']:,} pages of {cache['page_size']} tokens a group, "
        f"{cache['num_tokens']:,} tokens in all"
    )
    yield f"requests of {requests['max_model_len']:,} tokens, the limit: {requests['at_max_model_len']:,}"
    yield (
        f"requests of {requests['mean_len']:,} tokens, the mean: {requests['at_mean_len']:,}, limited by "
        f"{requests['limited_by']}"
    )
    yield f"largest context of one request alone: {requests['largest_context']:,} tokens"
    for name in ("decode", "prefill"):
        roofline = report["roofline"][name]
        if roofline is None:
            yield f"{name}: no rate is published for {report['dtype']} on {report['chip']['name']}"
        else:
            yield _roofline_text(name, roofline)
    yield f"assuming that {ASSUMPTION}"


def _roofline_text(name: str, step: Mapping[str, Any]) -> str:
    return (
        f"{name}: at most {step['tokens_per_s_a_chip']:,.0f} tokens/s a chip; a step of "
        f"{step['num_tokens']:,} tokens a group reads {step['weight_bytes'] / GIB:.2f} GiB of weights and "
        f"{step['kv_bytes'] / GIB:.2f} of KV cache ({step['memory_s'] * 1e3:.2f} ms), computes "
        f"{step['flops'] / 1e12:.3f} TFLOP ({step['compute_s'] * 1e3:.2f} ms), sends "
        f"{step['link_bytes'] / 2**20:.1f} MiB ({step['link_s'] * 1e3:.2f} ms): bound by {step['bound']}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
