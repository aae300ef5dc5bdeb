"""NVIDIA ModelOpt: described by hf_quant_config.json beside config.json."""

import zlib

import torch

from quantised.case import W123, Case, mixtral, store


class ModelOpt(Case):
    """Described by hf_quant_config.json beside config.json."""

    experts_at, leaves, router = "block_sparse_moe.experts", W123, "block_sparse_moe.gate.weight"
    hidden, inner, experts, top_k = 72, 40, 6, 2
    algorithm = "FP8"
    rows = {"form": "static"}

    @property
    def config(self):
        return mixtral(type(self))

    def files(self):
        described = {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": self.algorithm,
                "kv_cache_quant_algo": None,
                "exclude_modules": ["lm_head", "*block_sparse_moe.gate"],
            },
        }
        return {"config.json": self.config, "hf_quant_config.json": described}

    def scale_name(self, module):
        return f"{module}.weight_scale"

    def scale_block(self, shape):
        return shape

    def shape_scale(self, scale):
        return scale.reshape(())

    def tensors(self):
        written = {}
        for module, weight in self.matrices().items():
            codes, scale = store(weight, self.scale_block(weight.shape))
            written[f"{module}.weight"], written[f"{module}.weight_scale"] = codes, self.shape_scale(scale)
            if self.rows["form"] == "static":
                step = (3 + zlib.crc32(module.encode()) % 3) / 448
                written[f"{module}.input_scale"] = torch.tensor(step, dtype=torch.float32)
        return written


class ModelOptChannel(ModelOpt):
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    rows = {"form": "token"}

    def scale_block(self, shape):
        return (1, shape[1])

    def shape_scale(self, scale):
        return scale.reshape(-1)


class ModelOptBlock(ModelOpt):
    hidden, inner, experts, top_k = 136, 132, 3, 2
    algorithm = "FP8_PB_WO"
    block = (128, 128)
    rows = {"form": "none"}

    def scale_block(self, shape):
        return self.block

    def shape_scale(self, scale):
        return scale.reshape(scale.shape[0], 1, scale.shape[1], 1)

    def read(self, disk, module):
        flat = dict(disk)
        name = self.scale_name(module)
        flat[name] = disk[name].reshape(disk[name].shape[0], disk[name].shape[2])
        return super().read(flat, module)


CASES = {
    "mixtral-modelopt-fp8": ModelOpt,
    "mixtral-modelopt-channel": ModelOptChannel,
    "mixtral-modelopt-block": ModelOptBlock,
}
