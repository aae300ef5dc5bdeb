"""Activations for experts that a program brings itself, and what such experts inherit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import vllm  # noqa: E402
from conclave.errors import Error  # noqa: E402
from support.devices import seeded  # noqa: E402
from support.problems import FLOAT32_BAR, HALF_BAR, worst_error  # noqa: E402
from support.vllm_reference import activate, experts_reference, random_case  # noqa: E402

pytestmark = pytest.mark.usefixtures("device")


class EagerExperts(vllm.FusedMoEPermuteExpertsUnpermute):
    """Products in torch; what vLLM's interface offers for the rest."""

    activation_formats = (vllm.FusedMoEActivationFormat.Standard,) * 2

    def supports_chunking(self):
        return True

    def supports_expert_map(self):
        return False

    def workspace_shapes(self, a, aq, M, N, K, topk, global_num_experts, local_num_experts,
                         expert_tokens_meta):  # fmt: skip
        return (N,), (N,), (M, topk, K), a.dtype

    def finalize_weight_and_reduce_impl(self):
        return vllm.TopKWeightAndReduceContiguous()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *rest,
              **more):  # fmt: skip
        for token, ids in enumerate(topk_ids.tolist()):
            for slot, expert in enumerate(ids):
                product = w1[expert] @ hidden_states[token]
                inner = product.new_empty(w2.shape[2])
                self.activation(activation, inner, product)
                output[token, slot] = w2[expert] @ inner


NAMES = [kind.value for kind in vllm.MoEActivation if kind is not vllm.MoEActivation.RELU2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_activations_of_rows(name, dtype):
    experts = EagerExperts(vllm.FUSED_MOE_UNQUANTIZED_CONFIG)
    columns = 14 if name.endswith("_no_mul") else 28
    rows = (4 * torch.randn(3, 5, columns, generator=seeded(1))).to(dtype)
    kept, out = rows.clone(), torch.empty(3, 5, 14, dtype=dtype)
    experts.activation(name, out, rows)
    expected = activate(name, rows.reshape(15, columns).double()).reshape(3, 5, 14)
    assert worst_error(out.reshape(15, 14), expected.reshape(15, 14)) <= (
        FLOAT32_BAR if dtype == torch.float32 else HALF_BAR
    )
    assert torch.equal(rows, kept)


def test_shapes_and_names_of_activations_are_checked():
    experts = EagerExperts(vllm.FUSED_MOE_UNQUANTIZED_CONFIG)
    for name, out, rows in (
        ("silu", (3, 8), (3, 8)),
        ("silu", (3, 8), (2, 16)),
        ("silu_no_mul", (3, 8), (3, 16)),
        ("tanh", (3, 8), (3, 16)),
        ("relu2", (3, 8), (3, 16)),
    ):
        with pytest.raises(Error, match=r"^(input|activation):"):
            experts.activation(name, torch.zeros(out), torch.zeros(rows))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_experts_of_a_program_run_in_the_kernel(activation):
    hidden, w1, w2, weights, ids = random_case(8, 12, 32, 24, 8, 2, torch.float32)[:5]
    kernel = vllm.FusedMoEModularKernel(
        vllm.MoEPrepareAndFinalizeNoEP(),
        EagerExperts(vllm.FUSED_MOE_UNQUANTIZED_CONFIG),
        chunk_size=5,
    )
    with torch.no_grad():
        out = kernel(hidden, w1, w2, weights, ids, activation=activation)
    expected = experts_reference(hidden, w1, w2, weights, ids, activation)
    assert worst_error(out, expected) <= 1e-5


def test_chunks_are_enabled_where_they_are_supported():
    config = vllm.FUSED_MOE_UNQUANTIZED_CONFIG
    assert vllm.ConclaveExperts(config).enable_chunking()
    assert not vllm.BatchedConclaveExperts(config).enable_chunking()


def test_a_reduction_need_not_be_said_before_it_is_asked_for():
    class Unfinished(EagerExperts):
        finalize_weight_and_reduce_impl = (
            vllm.FusedMoEPermuteExpertsUnpermute.finalize_weight_and_reduce_impl
        )

    experts = Unfinished(vllm.FUSED_MOE_UNQUANTIZED_CONFIG)
    with pytest.raises(NotImplementedError):
        experts.finalize_weight_and_reduce_impl()
