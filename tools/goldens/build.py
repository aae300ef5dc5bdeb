"""Makes one golden folder: saves the model, records transformers, recomputes, compares, writes."""

import json
import pathlib
import re
import zlib

import numpy as np
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

from goldens import sensitivity
from goldens.disk import Disk
from goldens.family import Family
from goldens.oracle import Block

RUNS = {"f32": torch.float32, "bf16": torch.bfloat16}
OUTPUT_LIMIT = {"f32": 1e-5, "bf16": 3e-2}
CANDIDATES = 384


class GoldenError(SystemExit):
    """transformers and the float64 formula disagree, or a file is not as the family says."""


def stream_of(seed: int, label: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(label.encode())]))


def fill(family: Family, model: torch.nn.Module) -> None:
    """Random weights, each tensor from its own stream. All values fit bf16, so that every run and the
    recomputation see the same numbers whatever type a tensor is stored in."""
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        own = next((make for pattern, make in family.fill.items() if re.search(pattern, name)), None)
        values = stream_of(family.seed, name).standard_normal(tensor.shape)
        if not tensor.is_floating_point():
            tensor.data.copy_(torch.from_numpy(own(values)) if own else tensor.data)
            continue
        if tensor.data_ptr() in tied:
            continue
        tied[tensor.data_ptr()] = name
        values = own(values) if own else default_values(name, values)
        tensor.data.copy_(torch.from_numpy(np.asarray(values)).to(torch.bfloat16))


def default_values(name: str, values: np.ndarray) -> np.ndarray:
    if "norm" in name:
        return 1.0 + 0.1 * values
    if name.endswith("bias") or values.ndim < 2:
        return 0.15 * values
    if "embed" in name:
        return values
    # Gain: wide logits make the routing decisive, wide gates exercise the activation.
    gain = 2.0 if re.search(r"(mlp|moe|feed_forward|mixer)\.(gate|router)", name) else 1.5
    return values * gain / np.sqrt(values.shape[-1])


def save_model(family: Family, directory: pathlib.Path) -> None:
    model = family.build()
    fill(family, model)
    kept = {n: t.data.clone() for n, t in model.state_dict(keep_vars=True).items() if re.search(family.keep_float32, n)}
    model.to(family.dtype)
    for name, value in kept.items():
        parent, _, leaf = name.rpartition(".")
        getattr(model.get_submodule(parent), leaf).data = value
    model.save_pretrained(directory)
    if family.rewrite:
        tensors = family.rewrite(load_file(directory / "model.safetensors"))
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for path in directory.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
        else:
            path.chmod(0o644)


def load_model(family: Family, directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    model, info = family.loader().from_pretrained(
        directory, dtype="auto", experts_implementation="eager", attn_implementation="eager",
        output_loading_info=True,
    )
    lost = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lost:
        raise GoldenError(f"{family.name}: {family.made_by} does not find or want {lost[:5]}")
    return model.to(dtype).eval()


def moe_layers(family: Family, model: torch.nn.Module) -> list[int]:
    found = []
    for layer in range(64):
        try:
            model.get_submodule(f"{family.module.format(layer)}.{family.experts_path}")
        except AttributeError:
            continue
        found.append(layer)
    return found


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest per-token relative L2 distance."""
    distance = np.linalg.norm(actual - expected, axis=1)
    return float((distance / np.maximum(np.linalg.norm(expected, axis=1), 1e-30)).max())


def survives_noise(family: Family, block: Block, logits: np.ndarray, run: str, token_ids) -> np.ndarray:
    """Which tokens select the same experts in the same order when the logits move by their rounding."""
    relative = (2.0**-7 if run == "bf16" else 2.0**-17) * (family.noise if run == "bf16" else 1.0)
    decisions = block.router.decisions(logits, token_ids)
    kept = np.ones(len(logits), dtype=bool)
    stream = stream_of(family.seed, "noise")
    for _ in range(32):
        signs = stream.choice([-1.0, 1.0], size=logits.shape)
        moved = logits + signs * relative * np.maximum(np.abs(logits), 0.1)
        kept &= (block.router.decisions(moved, token_ids) == decisions).all(axis=1)
    return kept


class Run:
    """One layer in one type: recorded tensors, recomputation, and how far they are apart."""

    def __init__(self, family: Family, model, block: Block, layer: int, run: str, x: torch.Tensor, extra: dict):
        dtype = RUNS[run]
        self.run, self.block, self.label = run, block, f"{family.name} layer {layer} {run}"
        self.x = x.to(dtype)
        self.extra = {k: v.to(dtype) if v.is_floating_point() else v for k, v in extra.items()}
        self.token_ids = self.extra["token_ids"].numpy() if "token_ids" in extra else None
        self.seen = family.record(model, family, family.module.format(layer), self.x.clone(), self.extra)
        self.x = self.x if self.seen.hidden_states is None else self.seen.hidden_states
        self.extra = self.extra if self.seen.extra is None else self.seen.extra
        self.logits = wide(self.seen.logits).reshape(len(x), -1)
        self.ids = block.router.select(self.logits, self.token_ids)
        self.decisive = survives_noise(family, block, self.logits, run, self.token_ids)

    def results(self) -> dict[str, torch.Tensor]:
        """The golden tensors of this run, slots in order of selection."""
        theirs_ids = self.seen.ids.reshape(self.ids.shape).numpy()
        if not np.array_equal(np.sort(theirs_ids, axis=1), np.sort(self.ids, axis=1)):
            wrong = int((np.sort(theirs_ids, axis=1) != np.sort(self.ids, axis=1)).any(axis=1).sum())
            raise GoldenError(f"{self.label}: the run selected other experts for {wrong} tokens")
        # Both sorted by id, so the slots of one lie where the other's are.
        theirs = np.argsort(theirs_ids, axis=1)
        ours = np.argsort(np.argsort(self.ids, axis=1), axis=1)
        weights = wide(self.seen.weights).reshape(self.ids.shape)
        weights = np.take_along_axis(np.take_along_axis(weights, theirs, axis=1), ours, axis=1)

        exact_weights = self.block.router.weigh(self.logits, self.ids)
        side = {k: wide(v) if v.is_floating_point() else v.numpy() for k, v in self.extra.items()}
        x = wide(self.x)
        exact = self.block.output(x, self.ids, exact_weights, self.logits, side)
        exact_logits = self.block.logits(side.get("router_input", x))
        self.errors = {
            "output": relative_error(wide(self.seen.output), exact),
            "weights": relative_error(weights, exact_weights),
            "logits": relative_error(self.logits, exact_logits),
        }
        for what, error in self.errors.items():
            if not error <= OUTPUT_LIMIT[self.run]:
                raise GoldenError(f"{self.label}: {what} differ by {error:.2e}, limit {OUTPUT_LIMIT[self.run]:.0e}")
        return {
            "hidden_states": self.x,
            **self.extra,
            "router_logits": torch.from_numpy(self.logits).float(),
            "topk_ids": torch.from_numpy(self.ids.astype(np.int32)),
            "topk_weights": torch.from_numpy(weights).float(),
            "output": self.seen.output,
            "float64.topk_weights": torch.from_numpy(exact_weights),
            "float64.output": torch.from_numpy(exact),
        }


def draw_inputs(family: Family, model, layer: int) -> tuple[torch.Tensor, dict]:
    stream = stream_of(family.seed, f"hidden {layer}")
    width = family.config()
    width = width.get_text_config().hidden_size
    # Tokens of different magnitude, as after attention.
    sizes = family.spread * np.exp(0.3 * stream.standard_normal((CANDIDATES, 1)))
    x = torch.from_numpy(sizes * stream.standard_normal((CANDIDATES, width))).float()
    extra = family.extra(x, stream) if family.extra else {}
    return x, extra


def record(family: Family, directory: pathlib.Path) -> dict:
    """Writes golden.safetensors beside the saved model; returns the worst errors per run."""
    disk = Disk(directory)
    blocks = {n: family.read(disk, family.disk.format(n)) for n in family.layers}
    for n in family.layers:
        ignored = tuple(f"{family.disk.format(n)}{name}" for name in family.unread)
        left = [name for name in disk.unused(family.disk.format(n) + ".") if not name.startswith(ignored or ("\n",))]
        if left:
            raise GoldenError(f"{family.name}: not read by the recomputation: {left[:5]}")

    models = {run: load_model(family, directory, dtype) for run, dtype in RUNS.items()}
    if moe_layers(family, models["f32"]) != family.layers:
        raise GoldenError(f"{family.name}: MoE layers are {moe_layers(family, models['f32'])}, not {family.layers}")

    tensors, errors = {}, {}
    for layer, block in blocks.items():
        x, extra = draw_inputs(family, models["f32"], layer)
        attempt = lambda keep: {
            run: Run(family, model, block, layer, run, x[keep], {k: v[keep] for k, v in extra.items()})
            for run, model in models.items()
        }
        trial = attempt(slice(None))
        decisive = np.nonzero(np.logical_and.reduce([r.decisive for r in trial.values()]))[0]
        if len(decisive) < 8:
            raise GoldenError(f"{family.name} layer {layer}: only {len(decisive)} decisive tokens")
        for run, result in attempt(decisive[: family.tokens]).items():
            for key, value in result.results().items():
                tensors[f"layers.{layer}.{run}.{key}"] = value.contiguous()
            errors[f"layers.{layer}.{run}"] = result.errors
            lost = sensitivity.invisible(block, result)
            if lost:
                raise GoldenError(f"{result.label}: dropping {', '.join(lost)} changes nothing; take another seed")
    provenance = {
        "made_by": family.made_by,
        "torch": torch.__version__,
        **({"transformers": transformers.__version__} if family.made_by == "transformers" else {}),
        "seed": family.seed,
        "model_type": disk.config["model_type"],
        "block": family.block,
        f"{family.made_by}_error": {key: f"{e['output']:.2e}" for key, e in errors.items()},
    }
    # One metadata key: the writer orders several keys at random, and the bytes are to be reproducible.
    save_file(tensors, directory / "golden.safetensors", {"provenance": json.dumps(provenance, sort_keys=True)})
    return errors


def make(family: Family, directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    save_model(family, directory)
    errors = record(family, directory)
    size = sum(path.stat().st_size for path in directory.iterdir()) // 1024
    worst = {run: max(e["output"] for key, e in errors.items() if key.endswith(run)) for run in RUNS}
    print(f"{family.name:24} {size:5} KiB   f32 {worst['f32']:.1e}   bf16 {worst['bf16']:.1e}", flush=True)


def read_provenance(directory: pathlib.Path) -> dict:
    with safetensors.safe_open(directory / "golden.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["provenance"])


def compare(family: Family, committed: pathlib.Path, remade: pathlib.Path) -> list[str]:
    """Model files byte for byte; recorded tensors within rounding, since CPUs sum in other orders."""
    problems = [
        f"{family.name}/{name}: bytes differ"
        for name in ("config.json", "model.safetensors")
        if (committed / name).read_bytes() != (remade / name).read_bytes()
    ]
    old, new = load_file(committed / "golden.safetensors"), load_file(remade / "golden.safetensors")
    if old.keys() != new.keys():
        return problems + [f"{family.name}: other golden tensors than committed"]
    for key in old:
        if old[key].shape != new[key].shape or old[key].dtype != new[key].dtype:
            problems.append(f"{family.name}: {key} has another shape or type")
        elif not old[key].is_floating_point():
            problems += [] if torch.equal(old[key], new[key]) else [f"{family.name}: {key} differs"]
        else:
            error = relative_error(wide(new[key]), wide(old[key]))
            limit = OUTPUT_LIMIT["bf16" if ".bf16." in key else "f32"]
            problems += [] if error <= limit else [f"{family.name}: {key} differs by {error:.2e}"]
    return problems
