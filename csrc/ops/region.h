// What the Python side needs to set up a communicator's region on a device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace collx {

/// Name and bytes of every part of a rank's region, and "total".
std::vector<std::pair<std::string, uint64_t>> region_parts(const std::string& device_type,
                                                           int world_size, uint64_t payload_bytes);

/// Makes this rank's region ready for use; on CUDA on the current stream, which is synchronised.
void initialise_region(uint64_t address, c10::Device device, int world_size,
                       uint64_t payload_bytes);

/// Loads every CUDA kernel; blocks of kFullBlock threads that the device holds resident. On CPU
/// nothing is to be loaded, and a rank is one thread: 1.
int load_kernels(c10::Device device);

}  // namespace collx
