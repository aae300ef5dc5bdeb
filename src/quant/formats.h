// The list of weight formats: a line for each, whose folder says everything about it.
#pragma once

#include "quant/bf16/bf16.h"
#include "quant/bnb_fp4/bnb_fp4.h"
#include "quant/e2m1/e2m1.h"
#include "quant/e2m3/e2m3.h"
#include "quant/e3m2/e3m2.h"
#include "quant/e4m3/e4m3.h"
#include "quant/e5m2/e5m2.h"
#include "quant/f16/f16.h"
#include "quant/f32/f32.h"
#include "quant/int4/int4.h"
#include "quant/int6/int6.h"
#include "quant/int8/int8.h"
#include "quant/iq4/iq4.h"
#include "quant/nf4/nf4.h"
#include "quant/uint2/uint2.h"
#include "quant/uint4/uint4.h"

namespace conclave::inline v0::quant {

template <class... Formats>
struct FormatList {};
template <class... First, class... Second>
consteval FormatList<First..., Second...> joined(FormatList<First...>, FormatList<Second...>) {
  return {};
}

// Types that hold values.
using PlainFormats = FormatList<Bf16Codec, F16Codec, F32Codec>;

// Types that hold codes, which mean nothing without scales. Each has
// - kName, kElement, kBits;
// - kLargest, the largest finite magnitude that both signs have, or that codes without a sign have;
// - kHasNan, whether a code is NaN;
// - decode and encode: a code is in the low bits of a byte. `encode` rounds to nearest, ties to an
//   even code, and takes finite values beyond kLargest as the outermost code of their sign;
// - kMantissaBits, of floats only;
// - Rows: the format of rows that are quantised too;
// - kCompressedTensors: what that method calls it; kForms: what tools offer;
// - takes: which forms of scales its kernels read;
// - lanes<Vec, kUpper>: codes of a panel's row, from gemm/packed_layout.h, as vectors of float32.
using CodedFormats = FormatList<E4m3, Int8, Int4, E2m1, Nf4, BnbFp4, E5m2, Iq4, Uint4>;

// Types of codes that CPUs pack and no tensor has: matrices of a type with more bits may be known
// to have their values alone (MatrixCodes::dtype). Each has what comes above.
using PackedFormats = FormatList<Int6>;
// All that panels of codes hold.
using PanelFormats = decltype(joined(CodedFormats{}, PackedFormats{}));

// Types of codes that a GPU holds likewise, and that no panel has: they lack `lanes`.
using NarrowFormats = FormatList<Uint2>;

// Types of codes that rows may have and no matrix has: each has what comes before Rows above.
using RowFormats = FormatList<E2m3, E3m2>;

}  // namespace conclave::inline v0::quant
