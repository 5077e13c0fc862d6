// Counts the bytes that torch's CPU allocator has given out to a thread, and the most of them at once.
//
// Torch reports each allocation to whatever stands in the profiler's place of its thread-local debug information; the
// engine that walks a graph back takes that along, so that what it allocates is counted too.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace {

std::atomic<int64_t> live{0}, most{0};

struct Counter final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const int64_t now = live.fetch_add(size) + size;
    int64_t before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
  }
  bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace

extern "C" {

void start_counting() {
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<Counter>());
}

void stop_counting() { c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE); }

int64_t live_bytes() { return live.load(); }

int64_t take_most() { return most.exchange(live.load()); }
}
