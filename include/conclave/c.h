// The C interface: every header of it. Plain C99, and C++; see docs/c-interface.md.
#pragma once

#include "conclave/c/adapter.h"
#include "conclave/c/balancer.h"
#include "conclave/c/base.h"
#include "conclave/c/checkpoint.h"
#include "conclave/c/communicator.h"
#include "conclave/c/context.h"
#include "conclave/c/layer.h"
#include "conclave/c/own_communicator.h"
#include "conclave/c/placement.h"
#include "conclave/c/record.h"
#include "conclave/c/refit.h"
#include "conclave/c/router.h"
#include "conclave/c/source.h"
#include "conclave/c/spec.h"
#include "conclave/c/status.h"
#include "conclave/c/tensor.h"
