// A run of launches in one call from Python: fills in addresses and hands each to the driver.
// Everything it is given stays as it is, so that any number of threads may share it.
// A host of its own (no tile words), so that it compiles in no time.
#ifndef MF_TILE_H
#define MF_TILE_H

#include <cstring>

using i64 = long long;

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
};

struct Patch {  // byte `at` of the parameters takes an address; `map`: of the tensor map there
  i64 at, slot, start, map;
};

struct Launch {
  Config config;
  void* function;
  const char* args;
  i64 bytes;
  const Patch* patches;
  i64 count;
};

struct Queue {
  const Launch* launches;
  i64 count;
  int (*launch)(const Config*, void*, void**, void**);  // cuLaunchKernelEx
  int (*readdress)(void*, void*);                       // cuTensorMapReplaceAddress
};

// From launch `begin` on. Returns 0, or the index of the launch that was refused (the upper half)
// and the driver's reason (the lower half).
extern "C" i64 mf_enqueue(const Queue* queue, i64 begin, const i64* addresses, void* stream) {
  alignas(64) char args[4096];  // what a kernel's parameters may take
  void* params[] = {args};
  for (i64 i = begin; i < queue->count; ++i) {
    const Launch& launch = queue->launches[i];
    std::memcpy(args, launch.args, launch.bytes);
    int status = 0;
    for (i64 k = 0; k < launch.count && !status; ++k) {
      const Patch& patch = launch.patches[k];
      const i64 address = addresses[patch.slot] + patch.start;
      if (patch.map)
        status = queue->readdress(args + patch.at, reinterpret_cast<void*>(address));
      else
        std::memcpy(args + patch.at, &address, sizeof address);
    }
    Config config = launch.config;
    config.stream = stream;
    if (!status) status = queue->launch(&config, launch.function, params, nullptr);
    if (status) return i << 32 | status;
  }
  return 0;
}

// Stands where cuLaunchKernelEx is for kernels of the host.
extern "C" int mf_call(const Config*, void* function, void** params, void**) {
  reinterpret_cast<void (*)(const void*)>(function)(params[0]);
  return 0;
}

#endif
