"""Newest vLLM's modular interfaces: quantised rows, workspaces, halves that take turns."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import conclave  # noqa: E402
from conclave import vllm  # noqa: E402
from conclave.errors import ConclaveCommError, ConclaveRuntimeError  # noqa: E402
from conclave.vllm import ubatching  # noqa: E402
from support.problems import FLOAT32_BAR, worst_error  # noqa: E402
from support.vllm_reference import (  # noqa: E402
    experts_reference,
    quantise_weights,
    random_case,
)

PLAIN = vllm.FUSED_MOE_UNQUANTIZED_CONFIG
KINDS = {
    "whole": vllm.ConclaveExperts,
    "unreduced": vllm.UnreducedConclaveExperts,
    "batched": vllm.BatchedConclaveExperts,
}


def quantised(rows, kind):
    """Codes and scales of rows [..., H]."""
    groups = rows.float().reshape(*rows.shape[:-1], -1, 128 if kind == "block" else rows.shape[-1])
    scale = groups.abs().amax(-1).clamp(min=1e-12) / 448
    codes = (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.reshape(rows.shape), scale


def sending(kind, base):
    """A prepare that quantises rows before it sends them."""

    class Sends(base):
        def prepare(self, *given, defer_input_quant=False):
            rows, _, *rest = super().prepare(*given)
            assert not defer_input_quant
            return (*quantised(rows, kind), *rest)

    return Sends


@pytest.mark.parametrize("experts", KINDS)
@pytest.mark.parametrize("kind", ["token", "block"])
def test_rows_that_come_quantised_have_the_results_of_rows_that_are_quantised_here(experts, kind):
    hidden, w1, w2, weights, ids = random_case(3, 9, 128, 256, 8, 2, torch.float32)
    by = "block" if kind == "block" else "channel"
    (codes1, scale1, _), (codes2, scale2, _) = quantise_weights(w1, by), quantise_weights(w2, by)
    config = conclave.fp8_w8a8_moe_quant_config(
        scale1,
        scale2,
        per_act_token_quant=kind == "token",
        per_out_ch_quant=kind == "token",
        block_shape=[128, 128] if kind == "block" else None,
    )
    batched = experts == "batched"
    base = vllm.BatchedPrepareAndFinalize if batched else vllm.MoEPrepareAndFinalizeNoEP
    sizes = (16, 8) if batched else ()
    made = vllm.FusedMoEModularKernel(sending(kind, base)(*sizes), KINDS[experts](config))
    plain = vllm.FusedMoEModularKernel(base(*sizes), KINDS[experts](config))
    case = (hidden, codes1, codes2, weights, ids)
    assert worst_error(made(*case), plain(*case).double()) <= 1e-4


def test_rows_without_scales_and_others_are_named():
    case = random_case(3, 5, 40, 48, 8, 2, torch.float32)

    def run(rows, scale):
        class Given(vllm.MoEPrepareAndFinalizeNoEP):
            def prepare(self, *_, **__):
                return rows, scale, None, None, None

        return vllm.FusedMoEModularKernel(Given(), vllm.ConclaveExperts(PLAIN))(*case)

    codes, scale = quantised(case[0], "token")
    wanted = experts_reference(codes.float() * scale, *case[1:])
    for shape in ((5,), (5, 1)):
        assert worst_error(run(codes, scale.reshape(shape)), wanted) <= FLOAT32_BAR
    exponents = torch.full((5, 1), 125, dtype=torch.uint8)
    wanted = experts_reference(codes.float() / 4, *case[1:])
    assert worst_error(run(codes, exponents), wanted) <= FLOAT32_BAR
    for rows, given, error, text in (
        (codes, None, ValueError, "expected scales beside"),
        (case[0], torch.ones(1), TypeError, "float8_e4m3fn or int8"),
        (torch.ones(5, 24, dtype=torch.uint8), torch.ones(1), NotImplementedError, "4 or 6 bits"),
        (codes, torch.ones(4, 1), ValueError, r"found \[4, 1\]"),
        (codes, torch.ones(5, 3), ValueError, r"found \[5, 3\]"),
    ):
        with pytest.raises(error, match=f"a1q_scale: .*{text}"):
            run(rows, given)


@pytest.mark.parametrize("experts", KINDS)
def test_the_callers_workspace_is_the_layers(experts, monkeypatch):
    given = []
    forward = conclave.Layer.forward

    def spy(self, *args, workspace=None, **named):
        given.append(workspace)
        return forward(self, *args, workspace=workspace, **named)

    monkeypatch.setattr(conclave.Layer, "forward", spy)
    case = random_case(3, 33, 40, 48, 8, 3, torch.float32)
    batched = experts == "batched"
    prepare = vllm.BatchedPrepareAndFinalize(64, 8) if batched else vllm.MoEPrepareAndFinalizeNoEP()
    made = vllm.FusedMoEModularKernel(prepare, KINDS[experts](PLAIN))
    first, second = made(*case), made(*case)
    assert given[0] is None and given[1] is not None and torch.equal(first, second)
    held = made._buffers_now.workspace13.buffer
    assert held.data_ptr() <= given[1].data_ptr() < held.data_ptr() + 64
    small = torch.empty(1)
    made.fused_experts._run(
        case[0], case[1:3], case[3:], torch.empty_like(case[0]), small, activation="silu"
    )
    assert given[2] is None


class Sums(vllm.FusedMoEExpertsModular):
    """Experts in eager torch, by newest vLLM's interface."""

    leaves = False

    @staticmethod
    def activation_format():
        return vllm.FusedMoEActivationFormat.Standard

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        return (M * topk, N), (M * topk, self.adjust_N_for_activation(N, activation)), (M, topk, K)

    def finalize_weight_and_reduce_impl(self):
        return vllm.TopKWeightAndReduceContiguous()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *rest,
              workspace13, workspace2, **more):  # fmt: skip
        tokens, top_k = topk_ids.shape
        for row, expert in enumerate(topk_ids.flatten().tolist()):
            workspace13[row] = w1[expert] @ hidden_states[row // top_k]
        self.activation(activation, workspace2, workspace13)
        for row, expert in enumerate(topk_ids.flatten().tolist()):
            output.view(tokens * top_k, -1)[row] = w2[expert] @ workspace2[row]
        if not self.leaves:
            return None
        places = torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)
        return vllm.UnfinalizedMoEOutput(output.flatten(0, 1), topk_weights, places, True)


def config_of(hidden=48, width=40):
    return vllm.FusedMoEConfig(
        num_experts=8, experts_per_token=3, hidden_dim=hidden, num_local_experts=8,
        moe_parallel_config=vllm.FusedMoEParallelConfig(), in_dtype=torch.float32,
        intermediate_size=width,
    )  # fmt: skip


def test_experts_of_the_newest_interface():
    case = random_case(3, 7, 40, 48, 8, 3, torch.float32)
    made = vllm.FusedMoEKernel(vllm.MoEPrepareAndFinalizeNoEP(), Sums(config_of(), PLAIN))
    assert not made.is_monolithic and not made.output_is_reduced()
    wanted = experts_reference(*case)
    out = made.apply(*case, vllm.MoEActivation.SILU)
    assert worst_error(out, wanted) <= FLOAT32_BAR
    shared, out = made.apply(
        *case, vllm.MoEActivation.SILU, shared_experts=torch.sum, shared_experts_input=case[0] + 1
    )
    assert torch.equal(shared, (case[0] + 1).sum()) and worst_error(out, wanted) <= FLOAT32_BAR
    limited = vllm.FusedMoEQuantConfig.make(gemm1_clamp_limit=0.02)
    made = vllm.FusedMoEKernel(vllm.MoEPrepareAndFinalizeNoEP(), Sums(config_of(), limited))
    wanted = vllm.fused_experts(*case, quant_config=limited)
    assert worst_error(wanted, out.double()) > 0.01
    out = made.apply(*case, vllm.MoEActivation.SILU)
    assert worst_error(out, wanted.double()) <= 2 * FLOAT32_BAR
    with pytest.raises(ValueError, match="max_num_tokens"):
        Sums(config_of(), PLAIN, 4, 1)
    with pytest.raises(TypeError, match="apply_monolithic"):
        made.apply_monolithic(*case, vllm.MoEActivation.SILU)


def test_sums_that_are_left_to_the_caller():
    class Leaves(Sums):
        leaves = True

    class Passes(vllm.MoEPrepareAndFinalizeNoEP):
        def supports_deferred_moe_finalize(self):
            return True

    case = random_case(3, 7, 40, 48, 8, 3, torch.float32)
    made = vllm.FusedMoEKernel(Passes(), Leaves(config_of(), PLAIN))
    left = made.apply(*case, vllm.MoEActivation.SILU)
    assert isinstance(left, vllm.UnfinalizedMoEOutput) and left.route_major
    assert worst_error(left.finalize(), experts_reference(*case)) <= FLOAT32_BAR
    left.expanded_idx_to_permuted_idx[0, 1] = -1
    case[3][0, 1] = 0
    assert worst_error(left.finalize(), experts_reference(*case)) <= FLOAT32_BAR
    left.expanded_idx_to_permuted_idx[0, 1] = 21
    with pytest.raises(ValueError, match="expected -1 to 20, found 0 to 21"):
        left.finalize()
    made = vllm.FusedMoEKernel(vllm.MoEPrepareAndFinalizeNoEP(), Leaves(config_of(), PLAIN))
    with pytest.raises(ConclaveRuntimeError, match="does not leave sums"):
        made.apply(*case, vllm.MoEActivation.SILU)


def test_kernels_that_route_themselves():
    class Brings(vllm.FusedMoEPrepareAndFinalizeMonolithic):
        activation_format = vllm.FusedMoEActivationFormat.Standard

        def prepare(self, a1, router_logits, quant_config, defer_input_quant=False):
            return a1, None, router_logits

        def finalize(self, fused_expert_output):
            return 2 * fused_expert_output

        def output_is_reduced(self):
            return True

    class Routes(vllm.FusedMoEExpertsMonolithic):
        activation_format = staticmethod(Sums.activation_format)

        def apply(self, hidden_states, w1, w2, router_logits, activation, *_, **routing):
            weights, ids, _ = conclave.fused_topk(hidden_states, router_logits, 3, True)
            return vllm.fused_experts(hidden_states, w1, w2, weights, ids, activation=activation)

    hidden, w1, w2, *_ = random_case(3, 7, 40, 48, 8, 3, torch.float32)
    logits = torch.randn(7, 8)
    made = vllm.FusedMoEKernel(Brings(), Routes(config_of(), PLAIN))
    weights, ids, _ = conclave.fused_topk(hidden, logits, 3, True)
    wanted = 2 * experts_reference(hidden, w1, w2, weights, ids)
    out = made.apply_monolithic(hidden, w1, w2, logits, vllm.MoEActivation.SILU)
    assert made.is_monolithic and made.output_is_reduced()
    assert worst_error(out, wanted) <= FLOAT32_BAR
    with pytest.raises(ValueError, match="both be either monolithic or not"):
        vllm.FusedMoEKernel(Brings(), Sums(config_of(), PLAIN))


# Halves of a batch that take turns.


class Travels(vllm.MoEPrepareAndFinalizeNoEP):
    """Rows travel until somebody asks for them; the log says who did what."""

    def __init__(self, log):
        self.log = log

    def supports_async(self):
        return True

    def _say(self, what):
        self.log.append((what, ubatching.dbo_current_ubatch_id()))

    def prepare_async(self, *given, **named):
        of = ubatching.dbo_current_ubatch_id()
        self._say("send")
        return lambda: self.log.append((f"received for {of}", ubatching.dbo_current_ubatch_id())), (
            lambda: super(Travels, self).prepare(*given, **named)
        )

    def finalize_async(self, *given):
        self._say("return")
        return lambda: self.finalize(*given)


def run_halves(work, **options):
    contexts = ubatching.make_ubatch_contexts(2, **options)
    found, errors = [None, None], [None, None]

    def run(index):
        try:
            with contexts[index]:
                found[index] = work(index)
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, errors


def test_halves_take_turns_while_rows_travel():
    log, case = [], random_case(3, 16, 40, 48, 8, 3, torch.float32)
    made = vllm.FusedMoEModularKernel(Travels(log), vllm.ConclaveExperts(PLAIN))
    whole = vllm.FusedMoEModularKernel(
        vllm.MoEPrepareAndFinalizeNoEP(), vllm.ConclaveExperts(PLAIN)
    )(*case)
    hidden, w1, w2, weights, ids = case

    def half(index):
        part = slice(8 * index, 8 * index + 8)
        return made(hidden[part], w1, w2, weights[part], ids[part]).clone()

    found, errors = run_halves(half)
    assert errors == [None, None]
    assert torch.equal(torch.cat(found), whole)
    # The second half receives the first one's rows before it sends its own.
    assert log[:3] == [("send", 0), ("received for 0", 1), ("send", 1)]
    assert sorted(log[3:]) == [("received for 1", 0), ("return", 0), ("return", 1)]
    assert set(made._buffers_of) == {0, 1}
    made(*case)
    assert log[6:] == [("send", 0), ("received for 0", 0), ("return", 0)]


def test_hooks_do_nothing_outside():
    ubatching.dbo_register_recv_hook(lambda: pytest.fail("ran"))
    ubatching.dbo_maybe_run_recv_hook()
    ubatching.dbo_yield()
    assert not ubatching.dbo_enabled() and ubatching.dbo_current_ubatch_id() == 0


def test_what_is_not_asynchronous_is_refused_within_a_half():
    made = vllm.FusedMoEModularKernel(vllm.MoEPrepareAndFinalizeNoEP(), vllm.ConclaveExperts(PLAIN))
    case = random_case(3, 4, 40, 48, 8, 3, torch.float32)
    _, errors = run_halves(lambda index: made(*case))
    assert isinstance(errors[0], ConclaveRuntimeError) and "not asynchronous" in str(errors[0])


def test_a_half_that_fails_ends_the_others_wait():
    def work(index):
        if index == 0:
            ubatching.dbo_yield()
        raise KeyError("lost")

    _, errors = run_halves(work, timeout_s=20)
    assert isinstance(errors[1], KeyError) and isinstance(errors[0], ConclaveCommError)
    contexts = ubatching.make_ubatch_contexts(2, timeout_s=0.05)
    with pytest.raises(ConclaveCommError, match="turn did not come"), contexts[0]:
        pytest.fail("the other half never came")
    with pytest.raises(ValueError, match="num_micro_batches"):
        ubatching.make_ubatch_contexts(1)
