// Slots of callers, checked once when they are made.
#pragma once

#include "conclave/balance.h"
#include "conclave/c/placement.h"

struct conclave_slots {
  conclave::ExpertSlots slots;
};
