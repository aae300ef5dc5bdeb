// Tests tell this to the host's memory that stands for a device's.
#pragma once

namespace conclave::testing {

// A stream of the device is being captured from now on, so that nobody may wait for the device.
void set_captured(bool captured);

}  // namespace conclave::testing
