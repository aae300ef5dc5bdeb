// Everything public, in one include.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/device.h"
#include "conclave/dtype.h"
#include "conclave/error.h"
#include "conclave/layer.h"
#include "conclave/permute.h"
#include "conclave/reference.h"
#include "conclave/routing.h"
#include "conclave/safetensors.h"
#include "conclave/spec.h"
#include "conclave/synthetic.h"
#include "conclave/tensor.h"
#include "conclave/version.h"
#include "conclave/weights.h"
