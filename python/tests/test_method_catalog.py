"""The library's catalog of checkpoint methods, and what the package says of each beside it."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from conclave import _conclave  # noqa: E402
from conclave.errors import Error  # noqa: E402
from conclave.vllm import _formats, _modules, scheme  # noqa: E402
from conclave.vllm._method_schemes import Matrix  # noqa: E402
from support.method_layers import RUN, config_of, expert_tensors, sizes_of  # noqa: E402


def method_names():
    return [name.replace("_", "-") for name in _conclave.checkpoint_methods()]


def test_every_method_of_the_catalog_has_a_reader_or_a_reason():
    known = {*scheme._READERS, *scheme._OTHER_NAMES, *scheme.WITHOUT_PARAMETERS}
    assert [name for name in method_names() if name not in known] == []
    assert not set(scheme._READERS) & set(scheme.WITHOUT_PARAMETERS)


def test_every_reader_is_of_a_method_of_the_catalog():
    """What vLLM makes of plain files, and GGUF, is none of a checkpoint's methods."""
    others = {"experts-int8", "gguf"}
    assert set(scheme._READERS) - set(method_names()) == others
    assert set(scheme.WITHOUT_PARAMETERS) <= set(method_names())


@pytest.mark.parametrize("name", RUN)
def test_parameters_of_one_matrix_have_the_shapes_of_the_file(name):
    config, method = config_of(name)
    found = scheme.read_scheme(method, _modules.LayerNames("model.layers.0.mlp.experts"))
    if not isinstance(found, scheme.MethodScheme):
        pytest.skip("its parameters are those of e4m3")
    sizes = sizes_of(config)
    down = Matrix(sizes["hidden_size"], sizes["intermediate_size"], 1)
    matrix = "1.w2" if name.startswith("mixtral") else "1.down_proj"
    stored = expert_tensors(name)
    seen = 0
    for plane in found.planes:
        tensor = stored.get(f"{matrix}.{plane.name}")
        if tensor is None:
            assert not plane.is_read, plane.name
            continue
        seen += 1
        shape = [size for size in tensor.shape if size != 1]
        expected = [size for size in plane.shape(down) if size != 1]
        assert (shape[::-1] if plane.turns else shape) == expected, plane.name
    assert seen >= (1 if found.has_aids else 2)


def test_groups_of_vllms_formats_are_those_of_the_librarys_forms():
    forms = {form["name"]: form for form in _conclave.weight_forms()}
    for name in ("mxfp4", "nvfp4"):
        assert _formats.FORMATS[name].group == forms[name]["quant"]["block_cols"]
        assert _formats.FORMATS[name].codes == forms[name]["dtype"]
        assert _formats.FORMATS[name].needs_alphas == forms[name]["quant"]["has_global_scale"]


def test_a_layout_names_planes_and_axes():
    config = json.dumps({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True})
    layout = _conclave.method_layout(config, "w1.weight", 64, 96)
    assert (layout["method"], layout["codes"], layout["reason"]) == ("awq", "int4", "")
    found = {tensor["name"]: tensor for tensor in layout["tensors"]}
    assert found["w1.qweight"]["shape"] == [96, 8]
    assert found["w1.qzeros"]["shape"] == [3, 8]
    assert (found["w1.scales"]["plane"], found["w1.scales"]["rows_axis"]) == ("scale", 1)
    refused = _conclave.method_layout('{"quant_method": "hqq"}', "w1.weight", 64, 96)
    assert refused["reason"] and refused["tensors"] == []
    with pytest.raises(Error):
        _conclave.method_layout("{", "w1.weight", 64, 96)
