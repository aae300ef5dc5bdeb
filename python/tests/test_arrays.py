"""What counts as an array, and what is said of those that cannot be taken."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest

import conclave
from conclave import _methods
from conclave._frameworks import device_of
from conclave._shapes import separate_rows
from conclave.errors import ConclaveTypeError, ConclaveValueError


class OnlyDlpack:
    """An array of some library that speaks DLPack and nothing else."""

    def __init__(self, array: numpy.ndarray, versions: bool = True) -> None:
        self._array = array
        self._versions = versions
        self.shape = array.shape
        self.dtype = array.dtype

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **arguments):
        assert stream is None  # of the CPU
        if arguments and not self._versions:
            raise TypeError("unexpected argument max_version")
        return self._array.__dlpack__(**arguments)


@pytest.fixture
def run(problem):
    layer = problem.layer()
    expected = layer(problem.hidden, **problem.routing)

    def check(hidden, **changed):
        out = layer(hidden, **{**problem.routing, **changed})
        numpy.testing.assert_array_equal(numpy.asarray(out), expected)

    return check


def test_negatives_that_are_not_in_memory_are_refused(torch, problem):
    values = torch.from_numpy(problem.down.copy())
    negated = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert negated.is_neg() and torch.equal(negated, values)
    with pytest.raises(ConclaveValueError, match=r"^down: .*resolve_neg"):
        conclave.Layer.from_tensors(problem.spec, gate_up=problem.gate_up, down=negated)
    layer = conclave.Layer.from_tensors(
        problem.spec, gate_up=problem.gate_up, down=negated.resolve_neg()
    )
    out = layer(problem.hidden, **problem.routing)
    numpy.testing.assert_array_equal(out, problem.layer()(problem.hidden, **problem.routing))


def test_numpy_of_every_kind(problem, run):
    run(problem.hidden)
    read_only = problem.hidden.copy()
    read_only.flags.writeable = False
    run(read_only)
    run(numpy.asfortranarray(problem.hidden).copy())
    wide = numpy.zeros((9, 100), "float32")
    wide[:, 3:43] = problem.hidden
    run(wide[:, 3:43])
    run(numpy.repeat(problem.hidden, 2, axis=0)[::2])
    run(problem.hidden, topk_ids=problem.topk_ids.astype("int64"))


def test_read_only_weights_and_memory_maps(problem, tmp_path):
    numpy.save(tmp_path / "gate_up.npy", problem.gate_up)
    mapped = numpy.load(tmp_path / "gate_up.npy", mmap_mode="r")
    layer = conclave.Layer.from_tensors(problem.spec, gate_up=mapped, down=problem.down)
    out = layer(problem.hidden, **problem.routing)
    numpy.testing.assert_array_equal(out, problem.layer()(problem.hidden, **problem.routing))


@pytest.mark.parametrize("versions", [True, False])
def test_dlpack_alone_is_enough(problem, run, versions):
    run(OnlyDlpack(problem.hidden, versions))


def test_buffers_are_enough(problem, run):
    run(memoryview(problem.hidden))


def test_torch_tensors(problem, run, torch):
    hidden = torch.tensor(problem.hidden)
    run(hidden)
    wide = torch.zeros(9, 64)
    wide[:, :40] = hidden
    run(wide[:, :40])
    run(hidden.pin_memory() if torch.cuda.is_available() else hidden)


def test_parameters_are_taken_and_gradients_refused(problem, torch):
    weights = {n: torch.nn.Parameter(torch.tensor(w)) for n, w in problem.weights.items()}
    with pytest.raises(ConclaveValueError, match="gradients"):
        conclave.Layer.from_tensors(problem.spec, **weights)
    with torch.no_grad():
        layer = conclave.Layer.from_tensors(problem.spec, **weights)
    hidden = torch.tensor(problem.hidden, requires_grad=True)
    with pytest.raises(ConclaveValueError, match=r"hidden.*gradients"):
        layer(hidden, **problem.routing)
    with torch.no_grad():
        out = layer(hidden, **problem.routing)
    numpy.testing.assert_array_equal(
        out.numpy(), problem.layer()(problem.hidden, **problem.routing)
    )


def test_bfloat16_of_numpy(problem):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    weights = {n: w.astype(ml_dtypes.bfloat16) for n, w in problem.weights.items()}
    layer = conclave.Layer.from_tensors(problem.spec, **weights)
    assert layer.spec.weight_dtype == "bfloat16"
    out = layer(problem.hidden.astype(ml_dtypes.bfloat16), **problem.routing)
    assert out.dtype == ml_dtypes.bfloat16


def bad_calls(problem):
    hidden, ids, weights = problem.hidden, problem.topk_ids, problem.topk_weights
    read_only = numpy.zeros_like(hidden)
    read_only.flags.writeable = False
    return {
        "hidden type": (ConclaveTypeError, "hidden", {"hidden": hidden.astype("float64")}),
        "hidden integers": (ConclaveTypeError, "hidden", {"hidden": hidden.astype("int32")}),
        "hidden complex": (ConclaveTypeError, "hidden", {"hidden": hidden.astype("complex64")}),
        "hidden rank": (ConclaveValueError, "hidden", {"hidden": hidden[0]}),
        "hidden width": (ConclaveValueError, "hidden", {"hidden": hidden[:, :-1].copy()}),
        "hidden columns apart": (
            ConclaveValueError,
            "hidden",
            {"hidden": numpy.repeat(hidden, 2, axis=1)[:, ::2]},
        ),
        "hidden columns": (
            ConclaveValueError,
            "hidden",
            {"hidden": numpy.asfortranarray(hidden)},
        ),
        "hidden rows reversed": (ConclaveValueError, "hidden", {"hidden": hidden[::-1]}),
        "hidden rows shared": (
            ConclaveValueError,
            "hidden",
            {"hidden": numpy.broadcast_to(hidden[0], hidden.shape)},
        ),
        "hidden list": (ConclaveTypeError, "hidden", {"hidden": hidden.tolist()}),
        "hidden none": (ConclaveTypeError, "hidden", {"hidden": None}),
        "hidden string": (ConclaveTypeError, "hidden", {"hidden": "abc"}),
        "hidden objects": (ConclaveTypeError, "hidden", {"hidden": hidden.astype(object)}),
        "ids type": (ConclaveTypeError, "topk_ids", {"topk_ids": ids.astype("float32")}),
        "ids small": (ConclaveTypeError, "topk_ids", {"topk_ids": ids.astype("int16")}),
        "ids rows": (ConclaveValueError, "topk_ids", {"topk_ids": ids[:-1]}),
        "ids width": (ConclaveValueError, "topk_ids", {"topk_ids": ids[:, :2].copy()}),
        "weights type": (
            ConclaveTypeError,
            "topk_weights",
            {"topk_weights": weights.astype("float64")},
        ),
        "weights missing": (ConclaveValueError, "router_logits", {"topk_weights": None}),
        "ids missing": (ConclaveValueError, "topk_ids", {"topk_ids": None}),
        "out shape": (ConclaveValueError, "out", {"out": hidden[:3].copy()}),
        "out read-only": (ConclaveValueError, "out", {"out": read_only}),
        "out is ids": (ConclaveTypeError, "out", {"out": numpy.zeros((9, 40), "int32")}),
        "out overlaps": (
            ConclaveValueError,
            "out",
            {
                "hidden": hidden[:-1],
                "out": hidden[1:],
                "topk_ids": ids[1:],
                "topk_weights": weights[1:],
            },
        ),
        "mask type": (ConclaveTypeError, "padding_mask", {"padding_mask": numpy.ones(9)}),
        "mask size": (ConclaveValueError, "padding_mask", {"padding_mask": numpy.ones(8, bool)}),
        "count": (ConclaveValueError, "num_tokens", {"num_tokens": 10}),
        "count type": (ConclaveTypeError, "num_tokens", {"num_tokens": numpy.ones(1, "int32")}),
    }


NAMES = list(
    bad_calls(__import__("support.problems").problems.make_problem(numpy.random.default_rng(0)))
)


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_named(problem, name):
    kind, argument, changed = bad_calls(problem)[name]
    layer = problem.layer()
    arguments = {"hidden": problem.hidden, **problem.routing, **changed}
    with pytest.raises(kind) as caught:
        layer.forward(**arguments)
    assert argument in str(caught.value)
    assert isinstance(caught.value, conclave.Error)
    # A refused call leaves no trace.
    layer.forward(problem.hidden, **problem.routing)


def bad_weights(problem):
    gate_up, down = problem.gate_up, problem.down
    return {
        "halves": ("gate_up", {"gate_up": gate_up[:, :-1]}),
        "experts": ("gate", {"gate_up": gate_up[:-1]}),
        "width": ("gate", {"gate_up": gate_up[:, :, :-1]}),
        "rank": ("down", {"down": down[0]}),
        "types differ": ("down", {"down": down.astype("float16")}),
        "double": ("down", {"down": down.astype("float64"), "gate_up": gate_up.astype("float64")}),
        "no gate_up": ("gate", {"gate_up": None}),
        "no down": ("down", {"down": None}),
        "name": ("gateup", {"gateup": gate_up}),
        "list of unequal": ("down", {"down": [*down[:-1], down[-1][:, :-1]]}),
        "list of ranks": ("down", {"down": [*down[:-1], down]}),
        "object": ("gate_up", {"gate_up": object()}),
        "bias without has_bias": ("gate_up_bias", {"gate_up_bias": gate_up[:, :, 0]}),
    }


WEIGHT_NAMES = [
    n
    for n in bad_weights(
        __import__("support.problems").problems.make_problem(numpy.random.default_rng(0))
    )
    if n != "bias without has_bias"
]


@pytest.mark.parametrize("name", WEIGHT_NAMES)
def test_bad_weights_are_named(problem, name):
    argument, changed = bad_weights(problem)[name]
    weights = {**problem.weights, **changed}
    spec = conclave.MoeSpec(
        top_k=3, num_experts=6, hidden_size=40, intermediate_size=28, weight_dtype="float32"
    )
    if name == "double":
        spec = problem.spec
    with pytest.raises(conclave.Error) as caught:
        conclave.Layer.from_tensors(spec, **weights)
    assert argument in str(caught.value) or "F64" in str(caught.value)


def test_unknown_fields_and_words_are_named(problem):
    with pytest.raises(ConclaveValueError, match="top_q"):
        conclave.Layer.from_tensors({"top_q": 3}, **problem.weights)
    with pytest.raises(ConclaveValueError, match=r"router\.score.*softmax"):
        conclave.Layer.from_tensors(
            conclave.MoeSpec(top_k=3, router=conclave.RouterSpec(score="soft")), **problem.weights
        )
    with pytest.raises(ConclaveTypeError, match=r"router\.scale.*a number"):
        conclave.Layer.from_tensors({"top_k": 3, "router": {"scale": "x"}}, **problem.weights)
    with pytest.raises(ConclaveValueError, match="id_policy"):
        problem.layer(options={"id_policy": "lenient"})
    with pytest.raises(ConclaveValueError, match="gate_up_order"):
        problem.layer(gate_up_order="reversed")
    with pytest.raises(ConclaveTypeError, match="weight_dtype"):
        conclave.Layer.from_tensors({"top_k": 3, "weight_dtype": "float13"}, **problem.weights)


@pytest.mark.parametrize(
    ("kind", "index", "place"), [(1, 0, "cpu"), (2, 1, "cuda:1"), (3, 0, "cpu"), (13, 0, "cuda:0")]
)
def test_places_of_arrays_are_those_of_dlpack(kind, index, place):
    """Kind 2 is a GPU's memory, 13 managed memory, which is a GPU's as well; 3 is the host's."""
    assert device_of(SimpleNamespace(__dlpack_device__=lambda: (kind, index))) == place


def test_errors_carry_code_and_parts(problem):
    with pytest.raises(ConclaveValueError) as caught:
        problem.layer()(problem.hidden[:, :-1].copy(), **problem.routing)
    error = caught.value
    assert (error.code, error.name, error.tensor) == (104, "kShape", "hidden")
    assert error.expected == "[9, 40]" and error.found == "[9, 39]"
    with pytest.raises(FileNotFoundError) as caught:
        conclave.inspect("/does/not/exist")
    assert caught.value.code == 200 and "/does/not/exist" in caught.value.file
    with pytest.raises(conclave.ConclaveUnsupportedError):
        problem.layer(options=conclave.LayerOptions(kernel="cpu.amx"))


@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        (
            lambda: conclave.route(numpy.zeros((2, 4), "float32"), 5, conclave.RouterSpec()),
            (100, "kInvalidArgument"),
            ("topk", "1 to 4", "5"),
        ),
        (
            lambda: conclave.SharedWeights(7),
            (105, "kDType"),
            ("path", "a path", "int"),
        ),
        (
            lambda: conclave.Feed(),
            (105, "kDType"),
            (
                "config_json",
                "one of config_json, spec with model_type and layers, and gguf",
                "none or several",
            ),
        ),
        (
            lambda: conclave.RoutingMethodType.Custom.router_spec(),
            (113, "kUnsupported"),
            ("", "", ""),
        ),
    ],
)
def test_what_the_package_itself_refuses_has_code_and_parts(call, kind, parts):
    """These never reach the library: none of them is a bug of it, which is what kInternal says."""
    with pytest.raises(conclave.Error) as caught:
        call()
    error = caught.value
    assert (error.code, error.name) == kind
    assert (error.tensor, error.expected, error.found) == parts
    assert str(error).startswith(parts[0])


@pytest.mark.parametrize("name", ["hidden", "topk_ids", "topk_weights", "out", "gate_up", "down"])
def test_freed_tensors_are_named(problem, torch, name):
    arrays = {"hidden": problem.hidden, **problem.routing, **problem.weights}
    tensors = {key: torch.tensor(array) for key, array in arrays.items()}
    tensors["out"] = torch.empty_like(tensors["hidden"])
    layer = problem.layer()
    tensors[name].untyped_storage().resize_(0)
    weights = {key: tensors.pop(key) for key in problem.weights}
    with pytest.raises(ConclaveValueError, match=f"^{name}: .*memory"):
        if name in weights:
            conclave.Layer.from_tensors(problem.spec, **weights)
        layer(tensors.pop("hidden"), **tensors)


def test_meta_tensors_are_refused(problem, torch):
    hidden = torch.empty(9, 40, device="meta")
    with pytest.raises(ConclaveValueError, match="hidden"):
        problem.layer()(hidden, **problem.routing)


def test_sparse_tensors_are_refused(problem, torch):
    hidden = torch.tensor(problem.hidden).to_sparse()
    with pytest.raises(conclave.Error, match="hidden"):
        problem.layer()(hidden, **problem.routing, out=numpy.empty((9, 40), "float32"))


@pytest.mark.parametrize("by_row", [True, False])
def test_scales_of_several_interleaved_rows_stay_in_order(by_row):
    scales = numpy.arange(12, dtype=numpy.float32).reshape(2, 6)
    weights = {"gate_up": numpy.zeros((2, 6, 4), numpy.float32), "gate_up_scale": scales}
    found = separate_rows(weights, "", transposed=False, by_row=by_row)["gate_up_scale"]
    expected = scales[:, [0, 2, 4, 1, 3, 5]] if by_row else scales
    numpy.testing.assert_array_equal(found, expected)


def test_errors_of_modules_name_tensors_as_the_caller_did():
    with pytest.raises(ConclaveValueError) as caught, _methods._names_below_experts():
        error = ConclaveValueError("model.layers.0.mlp.experts.0.down_proj.qweight: too long")
        error.tensor = "model.layers.0.mlp.experts.0.down_proj.qweight"
        raise error
    assert str(caught.value) == "0.down_proj.qweight: too long"
    assert caught.value.tensor == "0.down_proj.qweight"
